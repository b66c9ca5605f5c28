//! What must hold before a data-parallel step is timed: what each strategy sends is counted right, and replicas that
//! diverge, lanes that beat their link and overlap that cannot be are refused.

use anyhow::{Result, bail, ensure};

use super::{Columns, Params, Row, measure};
use crate::collective::Backend;
use crate::harness::problem::Verdict;
use crate::model::{Precision, SizeName};

/// The smallest named model, on two Gloo ranks.
pub fn small(bucket_size_mb: Option<f64>) -> Params {
    Params {
        backend: Backend::Gloo,
        world_size: 2,
        size: SizeName::Tiny,
        context_length: 16,
        batch_size: 1,
        vocab_size: 500,
        dtype: Precision::Float32,
        bucket_size_mb,
        rounds: 1,
        warmup: 1,
        steps: 1,
    }
}

/// One row of a small setting without peers.
pub fn small_row(strategies: &[&str], bucket_size_mb: Option<f64>) -> Result<Row> {
    measure(&small(bucket_size_mb), &Columns { strategies, pytorch_ddp: false })
}

/// Every gradient must go once, in as many calls as `calls` says of the number of parameter tensors.
pub fn sends_every_gradient_once(strategy: &str, calls: fn(u64) -> u64) -> Result<Verdict> {
    let row = small_row(&[strategy], None)?;
    let (column, tensors) = (&row.strategies[strategy], small(None).config().num_tensors());
    ensure!(
        column.bytes == row.gradient_bytes && column.calls == calls(tensors),
        "{strategy} sent {} bytes in {} calls; the gradients are {} bytes in {tensors} tensors",
        column.bytes,
        column.calls,
        row.gradient_bytes
    );
    Verdict::passed(format!("{} bytes in {} calls", column.bytes, column.calls))
}

/// A strategy that leaves each rank its own gradients trains replicas apart, and is no row of a table.
pub fn diverging_replicas_are_refused() -> Result<Verdict> {
    let words = match small_row(&["mutant_local"], None) {
        Ok(_) => bail!("replicas that trained by themselves passed for data-parallel ones"),
        Err(error) => format!("{error:#}"),
    };
    ensure!(words.contains("rank 1 differs from rank 0"), "it failed for another reason: {words}");
    Verdict::passed("replicas that trained by themselves were told apart")
}

/// PyTorch's wrapper takes its turns between ours.
pub fn pytorch_takes_its_turns() -> Result<Verdict> {
    let params = Params { rounds: 2, ..small(None) };
    let row = measure(&params, &Columns { strategies: &["naive"], pytorch_ddp: true })?;
    let theirs = row.pytorch_ddp.map_or(0, |timing| timing.last_rank.samples.len());
    let ours = row.strategies["naive"].step.last_rank.samples.len();
    ensure!((ours, theirs, row.single.last_rank.samples.len()) == (2, 2, 2), "{ours} and {theirs} steps were timed");
    Verdict::passed("2 rounds of a step each")
}

/// The lanes of a step that overlaps show calls before the backward pass ends, those of the naive one none.
pub fn lanes_tell_overlap() -> Result<Verdict> {
    let row = small_row(&["naive", "overlap_individual_parameters"], None)?;
    let during_backward = |strategy: &str| {
        let timeline = &row.strategies[strategy].timeline;
        let end = timeline.compute[1].end_s;
        timeline.communication.iter().filter(|call| call.start_s < end).count()
    };
    let (naive, overlapping) = (during_backward("naive"), during_backward("overlap_individual_parameters"));
    ensure!(naive == 0, "{naive} calls of the naive strategy began before the backward pass had ended");
    ensure!(overlapping > 0, "no call of the overlapping strategy began before the backward pass had ended");
    Verdict::passed(format!("{overlapping} calls began during the backward pass, and none under the naive strategy"))
}
