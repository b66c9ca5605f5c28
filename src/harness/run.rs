//! Measuring: checks first, then one case after another into the record, table by table, within a budget if there is one.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Result, bail};

use super::case::{Bench, CaseEnding, CheckEnding, Measurement, Runner};
use super::plan::{Pending, Plan, kernel_hashes};
use super::pool::Pool;
use super::problem::Problem;
use super::provenance::{Facts, open_run};
use super::record::{CaseRecord, Outcome, Profile};
use super::schedule::{Clock, Table, tables};
use super::store::write_atomically;

/// What happens while measuring, told to whoever shows it.
pub trait Progress {
    fn table_started(&mut self, problem: &Problem, table: &Table);
    fn checks_started(&mut self, problem: &Problem);
    fn case_started(&mut self, case: &Pending);
    fn case_ended(&mut self, case: &Pending, outcome: &Outcome, elapsed: Duration);
    fn table_ended(&mut self);
    /// The problem is not measured (any further): a check failed, or its record cannot be written.
    fn refused(&mut self, problem: &Problem, error: &anyhow::Error);
}

/// How measuring ended.
#[derive(Debug, Default)]
pub struct Visit {
    pub tally: Tally,
    /// What the budget left no time for.
    pub left: Vec<Left>,
}

/// The cases of one table that were not begun, or were cut off.
#[derive(Debug)]
pub struct Left {
    pub problem: &'static str,
    pub profile: Profile,
    pub table: Table,
}

/// How many cases ended how.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Tally {
    pub measured: usize,
    pub out_of_memory: usize,
    pub not_run: usize,
    pub failed: usize,
    pub interrupted: bool,
}

/// A plan on its way, and its bench from its first table on.
struct Session<'a> {
    plan: Plan<'a>,
    kernels: BTreeMap<String, String>,
    bench: Option<Bench<'a>>,
    refused: bool,
}

impl Runner<'_> {
    /// Measures the pending cases of `plans`, writing the record after each one.
    ///
    /// Checks come first, in the same kind of process: what fails its checks is not timed. A problem that is refused
    /// costs the others nothing; its cases count as failed.
    pub fn measure(&self, plans: Vec<Plan<'_>>, facts: &Facts, progress: &mut dyn Progress) -> Visit {
        let mut clock = Clock::start(self.budget);
        let tables = tables(&plans, self.budget);
        let mut sessions: Vec<Session> = plans.into_iter().map(Session::new).collect();
        let mut visit = Visit::default();
        for table in tables {
            // The device belongs to one problem at a time.
            let others = sessions.iter_mut().enumerate().filter(|(i, _)| *i != table.plan);
            others.flat_map(|(_, session)| &mut session.bench).for_each(|bench| bench.pool.restart());
            let session = &mut sessions[table.plan];
            if session.refused {
                visit.tally.failed += table.pending.len();
                continue;
            }
            if !table.pending.iter().any(|case| clock.fits(&table, case)) {
                visit.left.push(session.left(table));
                continue;
            }
            let before = visit.tally;
            progress.table_started(session.plan.problem, &table);
            let ended = self.table(session, &table, facts, &mut clock, progress, &mut visit);
            progress.table_ended();
            if let Err(error) = ended {
                progress.refused(session.plan.problem, &error);
                session.refused = true;
                visit.tally = Tally { failed: before.failed + table.pending.len(), ..before };
            }
            if visit.tally.interrupted {
                break;
            }
        }
        visit
    }

    fn table(
        &self,
        session: &mut Session,
        table: &Table,
        facts: &Facts,
        clock: &mut Clock,
        progress: &mut dyn Progress,
        visit: &mut Visit,
    ) -> Result<()> {
        let mut left = Vec::new();
        for pending in &table.pending {
            let in_time = clock.fits(table, pending) && self.opened(session, facts, clock, progress)?;
            let Some(bench) = session.bench.as_mut().filter(|_| in_time) else {
                visit.tally.interrupted |= (self.interrupted)();
                left.push(pending.clone());
                continue;
            };
            progress.case_started(pending);
            match self.measure_case(bench, &pending.params, clock)? {
                CaseEnding::Interrupted => visit.tally.interrupted = true,
                CaseEnding::OutOfTime => left.push(pending.clone()),
                CaseEnding::Ended(measurement) => {
                    clock.took(table, measurement.elapsed);
                    visit.tally.count(&measurement.outcome);
                    progress.case_ended(pending, &measurement.outcome, measurement.elapsed);
                    self.keep(session, pending, *measurement)?;
                    session.bench.iter_mut().for_each(|bench| bench.pool.clean_up(self.interrupted));
                }
            }
            if visit.tally.interrupted {
                return Ok(());
            }
        }
        if !left.is_empty() {
            visit.left.push(session.left(Table { pending: left, ..table.clone() }));
        }
        Ok(())
    }

    /// Runs the checks before a problem's first case; false when there was no time for them.
    fn opened(&self, session: &mut Session, facts: &Facts, clock: &Clock, progress: &mut dyn Progress) -> Result<bool> {
        if session.bench.is_some() {
            return Ok(true);
        }
        let Plan { problem, measured, profile, suite, .. } = &session.plan;
        let new_pool = || Pool::new(self.program.clone(), self.layout.root.clone());
        let mut pool = new_pool();
        progress.checks_started(problem);
        for check in problem.checks {
            match self.check_within(&mut pool, problem, check, clock)? {
                CheckEnding::Passed { .. } | CheckEnding::Skipped { .. } => {}
                CheckEnding::Interrupted => return Ok(false),
                CheckEnding::Failed { .. } if clock.is_over() => return Ok(false),
                CheckEnding::Failed { error } => {
                    bail!("{}::{} fails, so {0} is not timed: {error}", problem.name, check.name)
                }
            }
        }
        session.kernels = kernel_hashes(self.layout, measured, *profile)?;
        let run = open_run(&self.layout.root, &suite.hash, facts)?;
        // What the checks warmed must not serve the cases.
        session.bench = Some(Bench { problem, measured, profile: *profile, pool: new_pool(), run });
        Ok(true)
    }

    /// Puts one measured case into the record, and the record on the disk.
    fn keep(&self, session: &mut Session, pending: &Pending, measurement: Measurement) -> Result<()> {
        let Some(Bench { run, .. }) = &session.bench else { bail!("a case was measured on no bench") };
        let plan = &mut session.plan;
        let names = (plan.measured.kernels_of)(&pending.params);
        let mut of_case = session.kernels.clone();
        of_case.retain(|name, _| names.contains(&name.as_str()));
        let case = CaseRecord {
            grid: pending.grid.clone(),
            params: pending.params.clone(),
            run: run.id.clone(),
            revision: plan.measured.revision,
            kernels: of_case,
            elapsed_s: measurement.elapsed.as_secs_f64(),
            conditions: measurement.conditions,
            outcome: measurement.outcome,
        };
        plan.record.put(case, run);
        plan.record.sort_like(plan.suite.cases(plan.profile).map(|(_, params)| params));
        let path = self.layout.local(plan.profile, plan.problem.name);
        write_atomically(&path, plan.record.to_json()?.as_bytes())
    }
}

impl<'a> Session<'a> {
    fn new(plan: Plan<'a>) -> Self {
        Self { plan, kernels: BTreeMap::new(), bench: None, refused: false }
    }

    fn left(&self, table: Table) -> Left {
        Left { problem: self.plan.problem.name, profile: self.plan.profile, table }
    }
}

impl Tally {
    fn count(&mut self, outcome: &Outcome) {
        *match outcome {
            Outcome::Measured { .. } => &mut self.measured,
            Outcome::OutOfMemory { .. } => &mut self.out_of_memory,
            Outcome::NotRun { .. } => &mut self.not_run,
            Outcome::Failed { .. } => &mut self.failed,
        } += 1;
    }
}
