//! A subject's two functions in the cells of the grid, in turns with ours, plain attention and PyTorch's operators.

use std::cell::RefCell;
use std::collections::BTreeMap;

use anyhow::{Result, ensure};
use tch::{Device, Tensor};

use super::compare::compare;
use super::implementations::{THEIRS, columns};
use super::measure::{FlashBenchmarking, Launch, Params, Row};
use super::task::Task;
use super::verify::{Expected, Others, Runs, Verified, WHOLE, worse};
use crate::attention::FLASH_KERNELS;
use crate::attention::implementations::Implementation;
use crate::bench::attention::Inputs;
use crate::bench::device::device_for;
use crate::bench::errors::{AttentionErrors, relative_error};
use crate::bench::interleave::ColumnOutcome;
use crate::bench::tolerance;
use crate::bench::work::AttentionPass;
use crate::error::Fault;
use crate::harness::problem::{Measure, Measured, Problem};
use crate::harness::record::Profile;
use crate::harness::samples::Samples;
use crate::harness::subject::{Subject, drawn_seed};
use crate::subject::attention::FlashFunction;
use crate::subject::timed::{TimedFunction, message_seconds};
use crate::subject::{SubjectFault, words_of};
use crate::torch::Generator;

mod answer;

pub const PROBLEM: Problem = Problem {
    name: "flash_benchmarking",
    answers: &["a"],
    checks: &[],
    measured: Some(Measured::of::<BesideOurs>()),
    answer: answer::answer,
    reads: &[],
};

/// Messages that ask for nothing, timed in each case.
const MESSAGES: usize = 20;

pub struct BesideOurs;

impl Measure for BesideOurs {
    type Params = Params;
    type Row = Row;
    const REVISION: u32 = 2;
    const KERNELS: &'static [&'static str] = FLASH_KERNELS;

    fn validate(params: &Params) -> Result<()> {
        FlashBenchmarking::validate(params)
    }

    fn measure(_: &Params, _: Profile) -> Result<Row> {
        anyhow::bail!("it measures a subject; name one with --subject")
    }

    fn measure_subject(params: &Params, profile: Profile, subject: &Subject) -> Result<Row> {
        let device = device_for(profile)?;
        let task = match params {
            Params::Cell(cell) => Task::of_cell(cell),
            Params::Leaderboard(_) | Params::Calls(_) => {
                let has = "a case which theirs are not measured in".to_string();
                return Err(Fault::NotAvailable { needs: "a cell of the grid".into(), has }.into());
            }
        };
        let implementations: Vec<_> = THEIRS.iter().map(|(theirs, _)| *theirs).chain(columns()).collect();
        let peer = &ColumnOutcome::NotRun { reason: "not measured beside a subject".into() };
        let mut timings = compare(&task, &implementations, device, &Others { peer, subject: Some(subject) })?;
        for (theirs, _) in &THEIRS {
            timings.columns.get_mut(theirs.name).into_iter().for_each(|column| fail_all(&mut column.passes));
        }
        if timings.columns.values().any(|column| column.errors.is_some()) {
            let seconds = message_seconds(subject, FlashFunction::PyTorch, MESSAGES).ok();
            timings.message = seconds.map(Samples::seconds_unbounded).transpose()?;
        }
        Ok(Row::Timings(timings))
    }
}

/// A function that one pass of was wrong has no time of another.
fn fail_all(passes: &mut BTreeMap<AttentionPass, ColumnOutcome<Samples>>) {
    let failed = passes.values().find_map(|pass| match pass {
        ColumnOutcome::Failed { error } => Some(error.clone()),
        _ => None,
    });
    if let Some(error) = failed {
        passes.values_mut().for_each(|pass| *pass = ColumnOutcome::Failed { error: error.clone() });
    }
}

/// A function that was right on the inputs of a case.
pub struct SubjectFunction<'p> {
    subject: &'p Subject,
    function: FlashFunction,
}

impl<'p> SubjectFunction<'p> {
    /// Its part in the case, or why it has none.
    pub fn verify(
        subject: &'p Subject,
        implementation: &Implementation,
        task: &Task,
        inputs: &Inputs,
        generator: &Generator,
    ) -> Result<ColumnOutcome<Verified<'p>>> {
        let Some((_, function)) = THEIRS.into_iter().find(|(theirs, _)| theirs.name == implementation.name) else {
            anyhow::bail!("a subject has no {}", implementation.name)
        };
        if let Some(reason) = absent(task, function, inputs.device()) {
            return Ok(ColumnOutcome::NotRun { reason: reason.into() });
        }
        if let Some(words) = subject.refused.get(function.adapter()) {
            return Ok(ColumnOutcome::Failed { error: format!("not timed, since it fails a check: {words}") });
        }
        let own = Self { subject, function };
        let small = (task.seq() > WHOLE).then(|| task.draw(WHOLE, generator)).transpose()?;
        let mut worst = AttentionErrors { o: 0.0, dq: 0.0, dk: 0.0, dv: 0.0 };
        for inputs in small.iter().chain([inputs]) {
            match own.errors(task, inputs) {
                Ok(errors) => worst = worse(worst, errors),
                Err(error) => return ColumnOutcome::of(Err(error)),
            }
        }
        let (errors, seq) = (worst, task.seq());
        Ok(ColumnOutcome::Measured { row: Verified { errors, seq, version: None, runs: Runs::InSubject(own) } })
    }

    fn errors(&self, task: &Task, inputs: &Inputs) -> Result<AttentionErrors> {
        let found = RefCell::new(BTreeMap::new());
        let draw = || Ok([&inputs.q, &inputs.k, &inputs.v, &inputs.d_o].map(Tensor::shallow_clone));
        let check = |_: &[Tensor; 4], results: &BTreeMap<String, Tensor>| {
            *found.borrow_mut() = right(task, inputs, results)?;
            Ok(())
        };
        let timed = TimedFunction::new(self.subject, self.function, "both", &draw, &check)?;
        timed.prepare()?;
        timed.call()?;
        timed.check_last()?;
        timed.rest()?;
        let of = |name: &str| found.borrow().get(name).copied().unwrap_or(0.0);
        Ok(AttentionErrors { o: of("o"), dq: of("dq"), dk: of("dk"), dv: of("dv") })
    }

    /// Seconds of the calls of one turn, each on new inputs.
    pub fn turn(
        &self,
        pass: AttentionPass,
        task: &Task,
        inputs: &Inputs,
        bench: &impl Fn(&dyn Fn() -> Result<()>, &mut dyn FnMut() -> Result<()>) -> Result<Vec<f64>>,
    ) -> Result<Vec<f64>> {
        // No turn repeats the inputs of another, which a subject could have kept.
        let generator = Generator::new(inputs.device(), drawn_seed()?)?;
        let draw = || -> Result<[Tensor; 4]> {
            let Inputs { q, k, v, d_o, .. } = task.draw(task.seq(), &generator)?;
            Ok([q, k, v, d_o])
        };
        let check = |[q, k, v, d_o]: &[Tensor; 4], results: &BTreeMap<String, Tensor>| {
            let [q, k, v, d_o] = [q, k, v, d_o].map(Tensor::shallow_clone);
            right(task, &Inputs { leaves: Vec::new(), q, k, v, d_o }, results).map(drop)
        };
        let name = match pass {
            AttentionPass::Forward => "forward",
            AttentionPass::Backward => "backward",
            AttentionPass::Both | AttentionPass::Summed => "both",
        };
        let timed = TimedFunction::new(self.subject, self.function, name, &draw, &check)?;
        let seconds = bench(&|| timed.prepare(), &mut || timed.call())?;
        timed.check_last()?;
        timed.rest()?;
        Ok(seconds)
    }
}

/// The error of each result, none beyond the tolerance of the grid's other columns.
fn right(task: &Task, inputs: &Inputs, results: &BTreeMap<String, Tensor>) -> Result<BTreeMap<String, f64>> {
    let expected = Expected::drawn(inputs)?;
    let most = tolerance::attention(task.dtype);
    let mut errors = BTreeMap::new();
    for (name, expected_one) in ["o", "dq", "dk", "dv"].into_iter().zip(expected.outputs()) {
        let Some(result) = results.get(name) else { continue };
        let error = relative_error(&expected.compared(result)?, expected_one);
        let error = error.map_err(|error| SubjectFault::new(format!("{name}: {}", words_of(&error))))?;
        ensure!(
            error <= most,
            SubjectFault::new(format!(
                "{name} is off by {error:.1e} of its norm, more than {most:.0e}, from the definition"
            ))
        );
        errors.insert(name.to_string(), error);
    }
    Ok(errors)
}

/// Why a case has no column for it.
fn absent(task: &Task, function: FlashFunction, device: Device) -> Option<&'static str> {
    let reasons = [
        (task.launch == Launch::Graph, "a function of Python is launched by the host"),
        (
            function == FlashFunction::Triton && device == Device::Cpu,
            "it needs a GPU: here Triton's interpreter would run it",
        ),
    ];
    reasons.into_iter().find(|(applies, _)| *applies).map(|(_, reason)| reason)
}
