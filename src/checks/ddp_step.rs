//! Checks before a data-parallel step is timed: each strategy's bytes and calls, their time in the step, and that
//! diverging replicas are refused.

use std::collections::BTreeMap;

use anyhow::{Result, bail, ensure};
use serde_json::Value;

use super::mutants;
use crate::bench::ddp_step::on_rank::measure;
use crate::bench::ddp_step::{Columns, Params, StrategyColumn, Timeline, WITHOUT_OVERLAP, run, run_task};
use crate::bench::interconnect;
use crate::collective::Shared;
use crate::collective::ranks::RankTask;
use crate::harness::problem::Verdict;
use crate::model::fused_adamw::adamw_for;
use crate::model::optim::AdamWOptions;
use crate::parallel::{Options, Replica};

/// Like [`crate::bench::ddp_step::on_rank::TASK`], but accepts mutants as strategies.
pub const TASK: RankTask = RankTask { name: "ddp_step_with_mutants", run: with_mutants };

/// The communication of a small setting under each strategy, without peers.
///
/// Times are not compared with the link here, because a busy machine would fail the check. Measuring compares them.
pub fn small_columns(strategies: &[&str], bucket_size_mb: Option<f64>) -> Result<BTreeMap<String, StrategyColumn>> {
    let params = Params::smallest(bucket_size_mb);
    let outputs = run(&params, &Columns { strategies, pytorch_ddp: false })?;
    strategies.iter().map(|name| Ok((name.to_string(), StrategyColumn::of(name, &params, &outputs)?))).collect()
}

/// Every gradient must be sent once. `calls` gives the expected calls from the number of parameter tensors.
pub fn sends_every_gradient_once(strategy: &str, calls: fn(u64) -> u64) -> Result<Verdict> {
    let column = &small_columns(&[strategy], None)?[strategy];
    let (bytes, tensors) = (Params::smallest(None).gradient_bytes(), Params::smallest(None).config().num_tensors());
    ensure!(
        column.bytes == bytes && column.calls == calls(tensors),
        "{strategy} sent {} bytes in {} calls; the gradients are {bytes} bytes in {tensors} tensors",
        column.bytes,
        column.calls,
    );
    require_lanes(strategy, column)?;
    Verdict::passed(format!("{} bytes in {} calls", column.bytes, column.calls))
}

/// A strategy that does not average gradients makes replicas diverge. Measuring must refuse it.
pub fn diverging_replicas_are_refused() -> Result<Verdict> {
    let columns = Columns { strategies: &["mutant_local"], pytorch_ddp: false };
    let message = match run_task(&TASK, &Params::smallest(None), &columns) {
        Ok(_) => bail!("replicas that trained without communication were accepted"),
        Err(error) => format!("{error:#}"),
    };
    ensure!(message.contains("rank 1 differs from rank 0"), "it failed for another reason: {message}");
    Verdict::passed("replicas that trained without communication were refused")
}

fn with_mutants(collective: &Shared, input: Value) -> Result<Value> {
    measure(collective, input, |name, parameters, collective, bucket_size_mb| {
        let options = Options { bucket_size_mb: bucket_size_mb.unwrap_or(1.0) };
        let optimizer = adamw_for(collective.device(), AdamWOptions::default())?;
        mutants::trainer(name, Replica { parameters, collective, options: &options }, optimizer)
    })
}

/// PyTorch's DDP takes its turns between ours. The link is probed before the first turn and after the last.
pub fn pytorch_takes_its_turns() -> Result<Verdict> {
    let params = Params { rounds: 2, ..Params::smallest(None) };
    let sizes: Vec<_> =
        interconnect::sizes(params.gradient_bytes()).map(|bytes| (bytes, interconnect::SAMPLES)).collect();
    for (rank, output) in run(&params, &Columns { strategies: &["naive"], pytorch_ddp: true })?.iter().enumerate() {
        let counts = (output.strategies["naive"].step.len(), output.pytorch_ddp.len(), output.single.len());
        ensure!(counts == (2, 2, 2), "rank {rank} timed {counts:?} steps (ours, PyTorch's, single), expected 2 each");
        for probes in [&output.probes, &output.later_probes] {
            let looks: Vec<_> = probes.iter().map(|probe| (probe.bytes, probe.seconds.len())).collect();
            ensure!(looks == sizes, "rank {rank} probed the link with {looks:?} bytes, expected {sizes:?}");
        }
    }
    Verdict::passed("2 rounds of a step each")
}

/// With overlap, some calls begin before the backward pass ends; under the naive strategy none do.
pub fn lanes_tell_overlap() -> Result<Verdict> {
    let columns = small_columns(&["naive", "overlap_individual_parameters"], None)?;
    columns.iter().try_for_each(|(strategy, column)| require_lanes(strategy, column))?;
    let overlapping = during_backward(&columns["overlap_individual_parameters"].timeline);
    Verdict::passed(format!("{overlapping} calls began during the backward pass, and none under the naive strategy"))
}

/// Every call of the last step is on its lane, before or after the end of the backward pass according to the strategy.
///
/// This does not depend on the load: one thread makes the calls and marks the end, in program order.
pub fn require_lanes(strategy: &str, column: &StrategyColumn) -> Result<()> {
    let (calls, during) = (column.timeline.communication.len(), during_backward(&column.timeline));
    ensure!(calls as u64 == column.calls, "{strategy} made {} calls, of which {calls} are on its lane", column.calls);
    if WITHOUT_OVERLAP.contains(&strategy) {
        ensure!(during == 0, "{during} of {calls} calls of {strategy} began before the backward pass had ended");
    } else {
        ensure!(during > 0, "no call of {strategy} began before the backward pass had ended");
    }
    Ok(())
}

fn during_backward(timeline: &Timeline) -> usize {
    let end_s = timeline.compute[1].end_s;
    timeline.communication.iter().filter(|call| call.start_s < end_s).count()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::ddp_step::on_rank::{Output, StepOutput};
    use crate::bench::ddp_step::timeline::{PHASES, Span};

    /// A step whose backward pass ends after two seconds, with calls at these times.
    fn column(starts_s: &[f64]) -> StrategyColumn {
        let span = |name: &str, start_s: f64| Span { name: name.into(), start_s, end_s: start_s + 1.0 };
        let timeline = Timeline {
            compute: PHASES.iter().enumerate().map(|(i, name)| span(name, i as f64)).collect(),
            communication: starts_s.iter().map(|start_s| span("all_reduce", *start_s)).collect(),
        };
        let seconds = vec![0.2];
        let steps = StepOutput {
            step: vec![1.0],
            communication: seconds.clone(),
            tail: seconds,
            calls: starts_s.len() as u64,
            timeline,
            ..StepOutput::default()
        };
        let output = Output { strategies: [("any".to_string(), steps)].into(), ..Output::default() };
        StrategyColumn::of("any", &Params::smallest(None), &[output]).unwrap()
    }

    #[test]
    fn calls_on_the_wrong_side_of_the_backward_pass_are_refused() {
        let hides = |name: &str, starts_s: &[f64]| require_lanes(name, &column(starts_s));
        hides("naive", &[2.0, 3.0]).unwrap();
        let message = hides("naive", &[1.9, 3.0]).unwrap_err().to_string();
        assert!(message.contains("1 of 2 calls of naive began before the backward pass had ended"), "{message}");
        assert!(hides("flat", &[0.5]).is_err());
        hides("overlap_individual_parameters", &[1.9, 3.0]).unwrap();
        assert!(hides("overlap_individual_parameters", &[2.0, 3.0]).is_err(), "nothing was hidden");
        assert!(hides("overlap_individual_parameters", &[]).is_err(), "nothing was sent");
        let uncounted = StrategyColumn { calls: 3, ..column(&[2.0, 3.0]) };
        assert!(require_lanes("naive", &uncounted).is_err(), "a call is missing from its lane");
    }
}
