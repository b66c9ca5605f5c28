//! What must hold before a data-parallel step is timed: what each strategy sends is counted right and lies where it
//! belongs in the step, and replicas that diverge are refused.

use std::collections::BTreeMap;

use anyhow::{Result, bail, ensure};
use serde_json::Value;

use super::mutants;
use crate::bench::ddp_step::on_rank::measure;
use crate::bench::ddp_step::{Column, Columns, Params, Timeline, WITHOUT_OVERLAP, run, run_task};
use crate::bench::interconnect;
use crate::collective::Shared;
use crate::collective::ranks::RankTask;
use crate::harness::problem::Verdict;
use crate::model::fused_adamw::adamw_for;
use crate::model::optim::AdamWOptions;
use crate::parallel::Options;

/// As [`crate::bench::ddp_step::on_rank::TASK`], with mutants among the strategies.
pub const TASK: RankTask = RankTask { name: "ddp_step_with_mutants", run: with_mutants };

/// What the ranks of a small setting sent under each strategy, and when, without peers.
///
/// How long it took is not held against the link here: what a busy machine does to a clock is no strategy's fault.
/// Measuring holds it, and its refusals are outcomes.
pub fn small_columns(strategies: &[&str], bucket_size_mb: Option<f64>) -> Result<BTreeMap<String, Column>> {
    let params = Params::smallest(bucket_size_mb);
    let outputs = run(&params, &Columns { strategies, pytorch_ddp: false })?;
    strategies.iter().map(|name| Ok((name.to_string(), Column::of(name, &params, &outputs)?))).collect()
}

/// Every gradient must go once, in as many calls as `calls` says of the number of parameter tensors.
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

/// A strategy that leaves each rank its own gradients trains replicas apart, and is no row of a table.
pub fn diverging_replicas_are_refused() -> Result<Verdict> {
    let columns = Columns { strategies: &["mutant_local"], pytorch_ddp: false };
    let words = match run_task(&TASK, &Params::smallest(None), &columns) {
        Ok(_) => bail!("replicas that trained by themselves passed for data-parallel ones"),
        Err(error) => format!("{error:#}"),
    };
    ensure!(words.contains("rank 1 differs from rank 0"), "it failed for another reason: {words}");
    Verdict::passed("replicas that trained by themselves were told apart")
}

fn with_mutants(collective: &Shared, input: Value) -> Result<Value> {
    measure(collective, input, |name, parameters, collective, bucket_size_mb| {
        let options = Options { bucket_size_mb: bucket_size_mb.unwrap_or(1.0) };
        let optimizer = adamw_for(collective.device(), AdamWOptions::default())?;
        mutants::trainer(name, parameters, optimizer, collective, &options)
    })
}

/// PyTorch's wrapper takes its turns between ours, and the link is looked at before the first and after the last.
pub fn pytorch_takes_its_turns() -> Result<Verdict> {
    let params = Params { rounds: 2, ..Params::smallest(None) };
    let sizes: Vec<_> =
        interconnect::sizes(params.gradient_bytes()).map(|bytes| (bytes, interconnect::SAMPLES)).collect();
    for (rank, output) in run(&params, &Columns { strategies: &["naive"], pytorch_ddp: true })?.iter().enumerate() {
        let counts = (output.strategies["naive"].step.len(), output.pytorch_ddp.len(), output.single.len());
        ensure!(counts == (2, 2, 2), "rank {rank} timed {counts:?} steps of ours, of PyTorch's and of single ones");
        for probes in [&output.probes, &output.later_probes] {
            let looks: Vec<_> = probes.iter().map(|probe| (probe.bytes, probe.seconds.len())).collect();
            ensure!(looks == sizes, "rank {rank} looked at the link with {looks:?}, not {sizes:?}");
        }
    }
    Verdict::passed("2 rounds of a step each")
}

/// The lanes of a step that overlaps show calls before the backward pass ends, those of the naive one none.
pub fn lanes_tell_overlap() -> Result<Verdict> {
    let columns = small_columns(&["naive", "overlap_individual_parameters"], None)?;
    columns.iter().try_for_each(|(strategy, column)| require_lanes(strategy, column))?;
    let overlapping = during_backward(&columns["overlap_individual_parameters"].timeline);
    Verdict::passed(format!("{overlapping} calls began during the backward pass, and none under the naive strategy"))
}

/// Every call of the last step is on its lane, before or after the end of the backward pass as the strategy has it.
///
/// No load can move a call across that end: the same thread makes both, in that order.
pub fn require_lanes(strategy: &str, column: &Column) -> Result<()> {
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

    /// A step whose backward pass ends after two seconds, with a call from each of these on.
    fn column(starts_s: &[f64]) -> Column {
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
        Column::of("any", &Params::smallest(None), &[output]).unwrap()
    }

    #[test]
    fn lanes_must_show_what_a_strategy_is() {
        let hides = |name: &str, starts_s: &[f64]| require_lanes(name, &column(starts_s));
        hides("naive", &[2.0, 3.0]).unwrap();
        let words = hides("naive", &[1.9, 3.0]).unwrap_err().to_string();
        assert!(words.contains("1 of 2 calls of naive began before the backward pass had ended"), "{words}");
        assert!(hides("flat", &[0.5]).is_err());
        hides("overlap_individual_parameters", &[1.9, 3.0]).unwrap();
        assert!(hides("overlap_individual_parameters", &[2.0, 3.0]).is_err(), "nothing was hidden");
        assert!(hides("overlap_individual_parameters", &[]).is_err(), "nothing was sent");
        let uncounted = Column { calls: 3, ..column(&[2.0, 3.0]) };
        assert!(require_lanes("naive", &uncounted).is_err(), "a call is missing from its lane");
    }
}
