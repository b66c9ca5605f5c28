//! Runs one check or one case in a worker, with a time limit and readings of the device's sensor.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use serde_json::Value;

use super::conditions::{Conditions, ConditionsMonitor, Sensor};
use super::device::DeviceCheck;
use super::floor;
use super::grade::CheckStatus;
use super::host_load::HostLoad;
use super::problem::{Check, Measured, Problem, Verdict};
use super::record::{Outcome, Profile, Run, check_bytes};
use super::samples::check_times;
use super::schedule::Clock;
use super::store::Layout;
use super::subject::{MORE_MEMORY, Subject, SubjectCheck};
use super::worker::{Ending, Job, Reply, Worker, outcome_of};
use crate::error::Fault;
use crate::printable::printable;

/// Time limit of one case if the user sets none.
pub const CASE_LIMIT: Duration = Duration::from_secs(600);

/// How cases run: the time limits, the interrupt flag and the device's sensor.
pub struct Runner<'a> {
    pub layout: &'a Layout,
    /// Time limit of one case.
    pub limit: Duration,
    /// Time limit of all cases together. Cases that do not fit are left out.
    pub budget: Option<Duration>,
    pub interrupted: &'a dyn Fn() -> bool,
    /// Reads the device's condition while a case runs.
    pub sensor: Sensor<'a>,
}

/// What the cases of one problem share while they are measured: the worker and the run.
pub struct MeasurementContext<'a> {
    pub problem: &'a Problem,
    pub measured: &'a Measured,
    pub profile: Profile,
    pub worker: Worker,
    pub run: Run,
}

/// How one case ended, in what conditions, and how long it took.
#[derive(Debug)]
pub struct Measurement {
    pub outcome: Outcome,
    pub conditions: Option<Conditions>,
    pub busy_processors: Option<f64>,
    pub elapsed: Duration,
}

/// How an attempt to measure a case ended.
#[derive(Debug)]
pub enum CaseEnding {
    Ended(Box<Measurement>),
    /// The budget ended before the case did, so there is no outcome.
    OutOfTime,
    Interrupted,
}

impl<'a> Runner<'a> {
    /// Ten minutes a case, no budget, no sensor.
    pub fn new(layout: &'a Layout, interrupted: &'a dyn Fn() -> bool) -> Self {
        Self { layout, limit: CASE_LIMIT, budget: None, interrupted, sensor: &|| None }
    }

    /// Measures one case in a worker, and once more when the device was throttled meanwhile.
    ///
    /// If the device is still throttled, the second measurement is kept, with the throttle reasons of both.
    pub fn measure_case(&self, context: &mut MeasurementContext, params: &Value, clock: &Clock) -> Result<CaseEnding> {
        // Also of a case that a GPU's machine runs on its processor.
        if context.profile == Profile::Gpu && context.run.machine.gpus.is_empty() {
            let outcome = outcome_of(Fault::NotAvailable { needs: "a CUDA GPU".into(), has: "none".into() });
            let (conditions, busy_processors, elapsed) = (None, None, Duration::ZERO);
            return Ok(CaseEnding::Ended(Box::new(Measurement { outcome, conditions, busy_processors, elapsed })));
        }
        let first = match self.attempt(context, params, clock)? {
            CaseEnding::Ended(first) => first,
            other => return Ok(other),
        };
        let spoiled = first.conditions.as_ref().map(Conditions::spoiled_by).unwrap_or_default();
        if spoiled.is_empty() || !matches!(first.outcome, Outcome::Measured { .. }) {
            return Ok(CaseEnding::Ended(first));
        }
        context.worker.clean_up(self.interrupted);
        let mut second = match self.attempt(context, params, clock)? {
            CaseEnding::Ended(second) if matches!(second.outcome, Outcome::Measured { .. }) => second,
            // A figure marked as throttled is better than none.
            _ => return Ok(CaseEnding::Ended(first)),
        };
        if let Some(conditions) = &mut second.conditions {
            conditions.remeasured_after = spoiled;
        }
        Ok(CaseEnding::Ended(second))
    }

    fn attempt(&self, context: &mut MeasurementContext, params: &Value, clock: &Clock) -> Result<CaseEnding> {
        let job = Job::Measure {
            problem: context.problem.name.into(),
            profile: context.profile,
            params: params.clone(),
            subject: self.layout.subject.clone(),
        };
        if (context.measured.fresh_process)(params) {
            context.worker.restart();
        }
        let watch = ConditionsMonitor::start(self.sensor);
        let (load, started) = (HostLoad::start(), Instant::now());
        let interrupted = || {
            watch.poll();
            (self.interrupted)()
        };
        let ending = context.worker.run(&job, self.limit_within(clock), &interrupted)?;
        let (busy_processors, elapsed) = (load.busy_processors(), started.elapsed());
        let outcome = match ending {
            Ending::Interrupted => return Ok(CaseEnding::Interrupted),
            Ending::TimedOut { .. } if clock.is_over() => return Ok(CaseEnding::OutOfTime),
            ending => context.outcome(params, ending, elapsed)?,
        };
        Ok(CaseEnding::Ended(Box::new(Measurement { outcome, conditions: watch.end(), busy_processors, elapsed })))
    }

    fn limit_within(&self, clock: &Clock) -> Duration {
        clock.left().map_or(self.limit, |left| left.min(self.limit))
    }

    /// Runs one check within what `clock` leaves; `None` when interrupted.
    pub fn check(
        &self,
        worker: &mut Worker,
        problem: &Problem,
        check: &Check,
        clock: &Clock,
    ) -> Result<Option<CheckStatus>> {
        let job = Job::Check { problem: problem.name.into(), check: check.name.into() };
        self.run_check(worker, &job, clock).with_context(|| format!("{}::{}", problem.name, check.name))
    }

    /// Runs one device check in a process that has done nothing else; `None` when interrupted.
    pub fn device_check(&self, worker: &mut Worker, check: &DeviceCheck) -> Result<Option<CheckStatus>> {
        worker.restart();
        let job = Job::DeviceCheck { check: check.name.into() };
        self.run_check(worker, &job, &Clock::start(None)).context(check.name)
    }

    /// Runs one check of a subject; `None` when interrupted.
    ///
    /// Errors: this program or its machine fails, so that the subject cannot be graded.
    pub fn subject_check(
        &self,
        worker: &mut Worker,
        subject: &Subject,
        check: &SubjectCheck,
    ) -> Result<Option<CheckStatus>> {
        let (problem, name) = (check.problem.to_string(), check.name.to_string());
        let job = Job::SubjectCheck { subject: subject.clone(), problem, check: name };
        self.run_check(worker, &job, &Clock::start(None)).with_context(|| format!("{}::{}", check.problem, check.name))
    }

    fn run_check(&self, worker: &mut Worker, job: &Job, clock: &Clock) -> Result<Option<CheckStatus>> {
        let limit = match job {
            Job::SubjectCheck { subject, .. } => subject.patience(self.limit),
            _ => self.limit_within(clock),
        };
        let status = match worker.run(job, limit, self.interrupted)? {
            Ending::Interrupted => return Ok(None),
            Ending::TimedOut { limit } => {
                CheckStatus::Failed { error: format!("exceeded the limit of {} s", limit.as_secs()) }
            }
            Ending::Died { how, out_of_memory: true } if matches!(job, Job::SubjectCheck { .. }) => {
                bail!("{how}; {MORE_MEMORY}")
            }
            Ending::Died { how: error, .. } | Ending::Reply(Reply::Failed(error)) => CheckStatus::Failed { error },
            Ending::Reply(Reply::Checked(Verdict::Passed { note })) => CheckStatus::Passed { note },
            Ending::Reply(Reply::Checked(Verdict::Skipped { reason })) => CheckStatus::Skipped { reason },
            Ending::Reply(Reply::Graded(status)) => status,
            Ending::Reply(Reply::NotGraded(reason)) => bail!("{reason}"),
            Ending::Reply(other) => bail!("a worker answered a check with {other:?}"),
        };
        Ok(Some(status.printable()))
    }
}

impl MeasurementContext<'_> {
    /// Turns a worker's ending into an outcome. A timing that no record can hold, such as one below the physical floor, is a
    /// failure.
    fn outcome(&self, params: &Value, ending: Ending, elapsed: Duration) -> Result<Outcome> {
        let failed = |error: String| Outcome::Failed { error: printable(&error) };
        let predicted_bytes = (self.measured.predicted_bytes)(params, self.profile);
        Ok(match ending {
            Ending::Interrupted => bail!("an interrupted case has no outcome"),
            Ending::TimedOut { limit } => {
                failed(format!("exceeded the limit of {} s for one case; --case-limit sets it", limit.as_secs()))
            }
            Ending::Died { how, out_of_memory: true } => {
                Outcome::OutOfMemory { requested_bytes: None, predicted_bytes, message: how }
            }
            Ending::Died { how, out_of_memory: false } => failed(how),
            Ending::Reply(Reply::Failed(error)) => failed(error),
            Ending::Reply(Reply::Ended(Outcome::Measured { row })) => {
                let checked = floor::check(&row, &self.run.peaks)
                    .and_then(|()| check_times(&row, elapsed.as_secs_f64()))
                    .and_then(|()| check_bytes(&row, &self.run.machine))
                    .and_then(|()| (self.measured.check_row)(params, &row, &self.run.machine));
                match checked {
                    Ok(()) => Outcome::Measured { row },
                    Err(error) => failed(format!("{error:#}")),
                }
            }
            Ending::Reply(Reply::Ended(Outcome::OutOfMemory { requested_bytes, message, .. })) => {
                Outcome::OutOfMemory { requested_bytes, predicted_bytes, message }
            }
            Ending::Reply(Reply::Ended(outcome)) => outcome,
            Ending::Reply(other) => bail!("a worker answered a measurement with {other:?}"),
        })
    }
}

#[cfg(test)]
mod tests {
    use anyhow::ensure;
    use serde::{Deserialize, Serialize};
    use serde_json::json;

    use super::*;
    use crate::harness::answer::Answer;
    use crate::harness::answer::made_up::MadeUp;
    use crate::harness::problem::Measure;

    struct Even;

    #[derive(Serialize, Deserialize)]
    struct Number {
        n: f64,
    }

    impl Measure for Even {
        type Params = Value;
        type Row = Number;
        const REVISION: u32 = 1;

        fn validate_row(_: &Value, row: &Number) -> Result<()> {
            ensure!(row.n % 2.0 == 0.0, "n is odd");
            Ok(())
        }

        fn measure(params: &Value, _: Profile) -> Result<Number> {
            Ok(Number { n: 1.0 / params["divisor"].as_f64().context("no divisor")? })
        }
    }

    #[test]
    fn results_that_are_not_finite_are_an_error_of_the_measurement() {
        let measure = |divisor: f64| (Measured::of::<Even>().measure)(&json!({"divisor": divisor}), Profile::Cpu, None);
        assert_eq!(measure(0.5).unwrap(), json!({"n": 2.0}));
        let said = format!("{:#}", measure(0.0).unwrap_err());
        assert!(said.contains("NaN and infinity are null: invalid type: null"), "{said}");
    }

    /// It would cost the whole record when that is read.
    #[test]
    fn a_row_that_contradicts_its_case_or_type_is_a_failure_of_that_case() {
        let measured = Measured::of::<Even>();
        let problem = Problem {
            name: "toy",
            answers: &[],
            checks: &[],
            measured: None,
            answer: |_, _| Ok(Answer::default()),
            reads: &[],
        };
        let run = MadeUp::cpu("toy").measured("a", &json!({}), &json!({"n": 2})).set().file.runs[0].clone();
        let worker = Worker::new(&Layout::at("/nowhere".into()));
        let context = MeasurementContext { problem: &problem, measured: &measured, profile: Profile::Cpu, worker, run };
        let ended = |n: Value| {
            let ending = Ending::Reply(Reply::Ended(Outcome::Measured { row: json!({"n": n}) }));
            context.outcome(&json!({}), ending, Duration::from_secs(1)).unwrap()
        };
        assert!(matches!(ended(json!(2)), Outcome::Measured { .. }));
        assert_eq!(ended(json!(1)).failure(), Some("n is odd"));
        let said = ended(Value::Null);
        assert!(said.failure().is_some_and(|said| said.contains("invalid type: null")), "{said:?}");
    }
}
