//! Training steps under a subject's module or optimizer, in turns with ours, PyTorch's DDP and the step without communication.

use std::collections::BTreeMap;
use std::marker::PhantomData;
use std::path::PathBuf;

use anyhow::{Context as _, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tch::Tensor;

use super::on_rank::{StepOutput, open_peer};
use super::trainer::make_trainer;
use super::variant::ReplicaBench;
use super::{KERNELS, Params};
use crate::bench::all_reduce::RankTimes;
use crate::bench::interleave::ColumnOutcome;
use crate::bench::peer::Software;
use crate::collective::Shared;
use crate::collective::ranks::{Launch, RankTask, launch, parse_input};
use crate::harness::problem::Measure;
use crate::harness::record::Profile;
use crate::harness::samples::Samples;
use crate::harness::subject::Subject;
use crate::model::Precision;
use crate::subject::SubjectFault;
use crate::subject::rank::{Adapter, Trainee};
use crate::subject::steps::{Given, TimedSteps, sampled};

pub mod answer;

pub const TASK: RankTask = RankTask { name: "ddp_beside_subject", run: on_rank };

/// Messages that ask for nothing, timed in each case.
const MESSAGES: usize = 20;

/// A problem that times an adapter that trains.
pub trait BesideOurs {
    /// Ours, in the order of the tables.
    const STRATEGIES: &'static [&'static str];
    fn adapter(params: &Params) -> Adapter;
    fn validate(params: &Params) -> Result<()>;
}

/// The measuring routine of a [`BesideOurs`] problem.
pub struct Beside<P>(PhantomData<P>);

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Row {
    pub parameters: u64,
    /// The same step on every rank at the same time, without communication.
    pub single: RankTimes,
    /// By the strategy's name.
    pub ours: BTreeMap<String, RankTimes>,
    pub pytorch_ddp: RankTimes,
    pub theirs: ColumnOutcome<Theirs>,
    pub software: Option<Software>,
}

/// What a subject's process took and left.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Theirs {
    pub step: RankTimes,
    /// Of a message to the process and back, which each step includes.
    pub message: Samples,
    /// The largest distance from the values of the definition, as a share of the way that these went in the turn; two digits.
    pub off: f64,
    /// Of the optimizer, by rank, as their process counts it.
    pub state_bytes: Vec<u64>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Input {
    params: Params,
    strategies: Vec<String>,
    /// The store file of the process group of PyTorch's DDP.
    store: PathBuf,
    /// `None` where the subject is not timed.
    trainee: Option<Trainee>,
}

/// The measurements of one rank, in seconds.
#[derive(Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Output {
    single: Vec<f64>,
    ours: BTreeMap<String, StepOutput>,
    pytorch_ddp: Vec<f64>,
    theirs: Vec<f64>,
    messages: Vec<f64>,
    off: f64,
    state_bytes: u64,
    software: Option<Software>,
}

impl<P: BesideOurs> Measure for Beside<P> {
    type Params = Params;
    type Row = Row;
    const REVISION: u32 = 2;
    const KERNELS: &'static [&'static str] = KERNELS;

    fn validate(params: &Params) -> Result<()> {
        P::validate(params)
    }

    fn measure(_: &Params, _: Profile) -> Result<Row> {
        bail!("it measures a subject; name one with --subject")
    }

    fn measure_subject(params: &Params, _: Profile, subject: &Subject) -> Result<Row> {
        measure(params, P::STRATEGIES, subject, P::adapter(params))
    }
}

/// Measures all columns in turns; without the subject's where it fails, and then says why.
pub fn measure(params: &Params, strategies: &[&str], subject: &Subject, adapter: Adapter) -> Result<Row> {
    let run = |trainee: Option<&Trainee>| run(params, strategies, trainee);
    let (outputs, failed) = match subject.refused.get(adapter.name()) {
        Some(words) => (run(None)?, Some(format!("not timed, since it fails a check: {words}"))),
        None => match Trainee::launch(subject, adapter, |trainee| run(Some(trainee))) {
            Ok(outputs) => (outputs, None),
            Err(error) => match error.downcast_ref::<SubjectFault>() {
                Some(fault) => (run(None)?, Some(fault.to_string())),
                None => return Err(error),
            },
        },
    };
    row(params, strategies, &outputs, failed)
}

fn run(params: &Params, strategies: &[&str], trainee: Option<&Trainee>) -> Result<Vec<Output>> {
    let folder = tempfile::tempdir().context("making a folder for the peers' meeting place")?;
    let strategies = strategies.iter().map(|name| name.to_string()).collect();
    let store = folder.path().join("store");
    // The wheel is compared with PyTorch's own DDP, not with theirs.
    let params = Params { wheel: false, ..params.clone() };
    let input = Input { params: params.clone(), strategies, store, trainee: trainee.cloned() };
    let deadline = super::DEADLINE;
    let ranks = Launch {
        backend: params.backend,
        // A rank is idle while its subject's Python works.
        patience: deadline,
        ..Launch::new(TASK.name, params.world_size, deadline)
    };
    let outputs = launch(&ranks, &serde_json::to_value(input)?)?;
    Ok(outputs.into_iter().map(serde_json::from_value).collect::<Result<_, _>>()?)
}

fn row(params: &Params, strategies: &[&str], outputs: &[Output], failed: Option<String>) -> Result<Row> {
    let work = params.work();
    let of = |seconds: &dyn Fn(&Output) -> Vec<f64>| {
        let ranks: Vec<Vec<f64>> = outputs.iter().map(seconds).collect();
        RankTimes::of(ranks.iter(), &work)
    };
    let our = |name: &str| of(&|rank| rank.ours.get(name).map(|steps| steps.step.clone()).unwrap_or_default());
    let ours = strategies.iter().map(|name| Ok((name.to_string(), our(name).with_context(|| name.to_string())?)));
    let theirs = match failed {
        Some(error) => ColumnOutcome::Failed { error },
        None => {
            let off = outputs.iter().map(|rank| rank.off).fold(0.0, f64::max);
            let messages = outputs.iter().flat_map(|rank| rank.messages.clone()).collect();
            let row = Theirs {
                step: of(&|rank| rank.theirs.clone()).context("theirs")?,
                message: Samples::seconds_unbounded(messages)?,
                off: format!("{off:.1e}").parse()?,
                state_bytes: outputs.iter().map(|rank| rank.state_bytes).collect(),
            };
            ColumnOutcome::Measured { row }
        }
    };
    Ok(Row {
        parameters: params.config().num_parameters(),
        single: of(&|rank| rank.single.clone())?,
        ours: ours.collect::<Result<_>>()?,
        pytorch_ddp: of(&|rank| rank.pytorch_ddp.clone()).context("PyTorch's DDP")?,
        theirs,
        software: outputs.first().and_then(|rank| rank.software.clone()),
    })
}

fn on_rank(collective: &Shared, input: Value) -> Result<Value> {
    let Input { params, strategies, store, trainee } = parse_input(input)?;
    let bench = ReplicaBench::new(&params, collective)?;
    let (mut peer, _) = open_peer(collective, &params, &store)?;
    let mut theirs = trainee.map(|trainee| TimedSteps::start(&trainee, collective)).transpose()?;
    let mut output = Output { software: Some(peer.software.clone()), ..Output::default() };
    for _ in 0..params.rounds {
        output.single.extend(bench.single()?);
        for name in &strategies {
            let steps = output.ours.entry(name.clone()).or_default();
            bench.under(name, make_trainer, steps).with_context(|| format!("in a turn of {name}"))?;
        }
        output.pytorch_ddp.extend(peer.turn("ddp", params.warmup, params.steps)?.into_values().flatten());
        if let Some(theirs) = &mut theirs {
            turn(theirs, &bench, &params, collective, &mut output)?;
        }
    }
    peer.close(None)?;
    if let Some(theirs) = &mut theirs {
        output.messages = (0..MESSAGES).map(|_| theirs.message()).collect::<Result<_>>()?;
    }
    Ok(serde_json::to_value(output)?)
}

/// One turn of theirs from rank 0's values, and then, untimed, the same steps by the definition.
fn turn(
    theirs: &mut TimedSteps,
    bench: &ReplicaBench,
    params: &Params,
    collective: &Shared,
    output: &mut Output,
) -> Result<()> {
    let parameters = bench.model.parameters();
    let names = parameters.iter().map(|(name, _)| name.clone()).collect();
    let values = if collective.rank() == 0 { parameters } else { &[] };
    theirs.begin(&params.config(), params.dtype, values, names)?;
    let mut batches = Vec::new();
    for k in 0..params.warmup + params.steps {
        let (tokens, targets) = bench.draw()?;
        theirs.prepare(&tokens, &targets)?;
        bench.start_together()?;
        let seconds = theirs.run()?;
        output.theirs.extend((k >= params.warmup).then_some(seconds));
        batches.push((tokens, targets));
    }
    let Given { samples: given, phase, state_bytes } = theirs.give()?;
    let expected = bench.follow(&batches, |parameters| samples(parameters, phase))?;
    let off = theirs.require(off(&given, &expected, params.dtype))?;
    output.off = output.off.max(off);
    output.state_bytes = state_bytes;
    Ok(())
}

type Samplings = BTreeMap<String, Tensor>;

fn samples(parameters: &[(String, Tensor)], phase: f64) -> Result<Samplings> {
    parameters.iter().map(|(name, parameter)| Ok((name.clone(), sampled(parameter, phase)?))).collect()
}

/// The distance of `given` from the values of the definition, as a share of the way that these went.
///
/// Errors: [`SubjectFault`] where it is more than [`most_off`].
fn off(given: &Samplings, [before, after]: &[Samplings; 2], dtype: Precision) -> Result<f64> {
    let most = most_off(dtype);
    let (mut distance, mut way) = (0.0, 0.0);
    for (name, expected) in after {
        let lacks = || SubjectFault::new(format!("the values after a timed step lack {name}"));
        let value = given.get(name).ok_or_else(lacks)?;
        let (size, wanted) = (value.size(), expected.size());
        let fits = size == wanted && value.kind() == expected.kind();
        ensure!(
            fits,
            SubjectFault::new(format!("{name} has {size:?} values of {:?} after a timed step", value.kind()))
        );
        let squared = |a: &Tensor, b: &Tensor| -> Result<f64> { Ok(f64::try_from((a - b).f_square()?.f_sum(None)?)?) };
        distance += squared(value, expected)?;
        way += squared(&before[name], expected)?;
    }
    let off = (distance / way).sqrt();
    ensure!(
        off <= most,
        SubjectFault::new(format!(
            "after timed steps the parameters are off by {off:.1e} of the way that training on the whole batch goes, more than {most}"
        ))
    );
    Ok(off)
}

/// The most that rounding moves parameters in few steps, as a share of their way. AdamW's first steps are signs of gradients,
/// and another order of sums turns the sign of one that is nearly zero; a rank that trains alone, or on old gradients, goes
/// another way.
pub fn most_off(dtype: Precision) -> f64 {
    match dtype {
        Precision::Float32 => 0.05,
        Precision::Bfloat16 => 0.3,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_that_went_another_way_than_training_are_refused_with_the_distance() {
        let at = |values: [f32; 2]| Samplings::from([("w".to_string(), Tensor::from_slice(&values))]);
        let [before, after] = [at([0.0, 0.0]), at([3.0, 4.0])];
        let off = |given: &Samplings| {
            off(given, &[at([0.0, 0.0]), at([3.0, 4.0])], Precision::Float32).map_err(|error| format!("{error:#}"))
        };
        assert_eq!(off(&after), Ok(0.0));
        assert!(off(&at([3.0, 4.1])).is_ok_and(|off| (off - 0.02).abs() < 1e-6));
        let said = off(&before).unwrap_err();
        assert!(said.contains("off by 1.0e0 of the way"), "{said}");
        assert!(off(&at([3.0, f32::NAN])).is_err());
        assert!(off(&Samplings::new()).unwrap_err().contains("lack w"));
    }
}
