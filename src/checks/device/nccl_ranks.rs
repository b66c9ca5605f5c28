//! Checks of two ranks over NCCL: collectives, sharded optimizers on several streams, and ranks that fail.
//!
//! Each rank has its own GPU where the machine has two; on one GPU the ranks share it. The verdict says which.

use std::net::TcpListener;
use std::time::Duration;

use anyhow::{Result, ensure};

use crate::bench::training_step;
use crate::checks::fault_test::RankFault;
use crate::checks::faulty_runs::{self, by_hand, says};
use crate::checks::fused_ranks::{self, Averaging};
use crate::checks::protocol::Trial;
use crate::checks::sharded_protocol::{self, Seen, ShardedCase};
use crate::collective::Backend;
use crate::collective::ranks::{Launch, Placement, launch, require_devices};
use crate::harness::device::DeviceCheck;
use crate::harness::problem::Verdict;
use crate::model::toy::{Bias, Blueprint, Layer};
use crate::parallel::Options;
use crate::parallel::trainer::{SHARDED_OPTIMIZER, ZERO1, ZERO1_IN_BACKWARD};

pub const CHECKS: &[DeviceCheck] = &[
    DeviceCheck::new(
        "nccl_collectives_give_their_values_in_order",
        "Every collective and type over NCCL gives the right values, in order with computation, and is recorded.",
        nccl_collectives_give_their_values_in_order,
    )
    .on_two_gpus(),
    DeviceCheck::new(
        "a_late_nccl_peer_ends_in_an_abort",
        "Without a supervisor, a rank whose peer does not come aborts the communicator and ends itself in time.",
        a_late_nccl_peer_ends_in_an_abort,
    )
    .on_two_gpus(),
    sharded("sharded_optimizer_over_nccl_is_adamw", || is_adamw(SHARDED_OPTIMIZER)),
    sharded("zero1_over_nccl_is_adamw", || is_adamw(ZERO1)),
    sharded("zero1_in_backward_over_nccl_is_adamw", || is_adamw(ZERO1_IN_BACKWARD)),
    fused(
        "a_captured_fused_step_on_ranks_is_one_process",
        "A fused step captured with its NCCL collectives trains two ranks as one process trains on all rows.",
        || trains_as_one_process(&[Averaging::Buckets, Averaging::Flat]),
    ),
    fused(
        "a_captured_sharded_step_on_ranks_is_one_process",
        "So does one of which each rank steps its share, with the gathering in the same graph.",
        || trains_as_one_process(&[Averaging::Sharded]),
    ),
    fault("a_rank_that_exits_ends_the_nccl_run", || {
        let expected = ["rank 1 of 2 exited with status 7; it was in no collective; its last was barrier 1"];
        ends_the_run(RankFault::Exit, &expected)
    }),
    fault("a_rank_that_leaves_ends_the_nccl_run", || {
        let expected = ["rank 0 waits in all_reduce 2 of 4 Float, sum, which rank 1 has ended without calling"];
        ends_the_run(RankFault::Leave, &expected)
    }),
    fault("a_rank_that_fails_ends_the_nccl_run", || {
        let expected =
            ["rank 1 of 2 exited with status 1; it was in no collective; its last was barrier 1", "gives up"];
        ends_the_run(RankFault::Fail, &expected)
    }),
    fault("a_rank_that_stalls_ends_the_nccl_run", || {
        let expected =
            ["rank 0 waits in all_reduce 2 of 4 Float, sum, which rank 1 has not called: it stalls, idle for"];
        ends_the_run(RankFault::Stall, &expected)
    }),
    fault("a_wrong_count_ends_the_nccl_run", || {
        let expected = ["the ranks disagree on collective 2", "all_reduce of 4 Float, sum", "all_reduce of 8"];
        ends_the_run(RankFault::WrongCount, &expected)
    }),
    fault("a_wrong_order_ends_the_nccl_run", || {
        let expected = ["the ranks disagree on collective 2", "all_reduce of 4 Float, sum", "broadcast of 4"];
        ends_the_run(RankFault::WrongOrder, &expected)
    }),
];

const fn sharded(name: &'static str, run: fn() -> Result<Verdict>) -> DeviceCheck {
    let proves = "With layers so wide that every stream has work, this optimizer's steps over NCCL are those of AdamW.";
    DeviceCheck::new(name, proves, run).on_two_gpus().with_kernels(&["adamw.cu"])
}

const fn fused(name: &'static str, proves: &'static str, run: fn() -> Result<Verdict>) -> DeviceCheck {
    DeviceCheck::new(name, proves, run).on_two_gpus().with_kernels(training_step::KERNELS.split_at(1).1)
}

fn trains_as_one_process(averagings: &[Averaging]) -> Result<Verdict> {
    fused_ranks::train_as_one_process(Backend::Nccl, placement()?, averagings)
}

const fn fault(name: &'static str, run: fn() -> Result<Verdict>) -> DeviceCheck {
    let proves = "This fault of one rank ends its NCCL run, by name; no process is left, and the next run works.";
    DeviceCheck::new(name, proves, run).on_two_gpus()
}

/// How the two ranks are placed here.
///
/// Errors: [`crate::error::Fault::NotAvailable`] without a GPU or NCCL.
fn placement() -> Result<Placement> {
    require_devices(Backend::Nccl, 1)?;
    Ok(Placement::of_checks())
}

fn nccl_collectives_give_their_values_in_order() -> Result<Verdict> {
    let note = placement()?.note();
    let mut seconds = faulty_runs::selftest(Backend::Nccl, 2)?;
    seconds.sort_by(f64::total_cmp);
    Verdict::passed(format!("{note}; 1 MB in {:.1} us", 1e6 * seconds[seconds.len() / 2]))
}

/// The official protocol, which requires AdamW's values. The layers are so wide that all streams are busy at the same
/// time: a stream that does not wait for another uses old values.
fn is_adamw(optimizer: &str) -> Result<Verdict> {
    let placement = placement()?;
    let layer = |i: usize, d_out| Layer { bias: Bias::Trained, ..Layer::trained(format!("layer{i}"), 2048, d_out) };
    // The last bias cannot be cut in two where it lies.
    let layers =
        [2048, 2048, 2048, 2048, 2048, 2047].into_iter().enumerate().map(|(i, d_out)| layer(i, d_out)).collect();
    let blueprint = Blueprint { name: "wide".into(), fixed_parameter: false, layers };
    let cases = vec![ShardedCase::official(blueprint, Options { bucket_size_mb: 40.0 })];
    let input = serde_json::to_value([Trial { trainer: optimizer.into(), cases }])?;
    let deadline = Duration::from_secs(120);
    let plan = Launch { backend: Backend::Nccl, placement, ..Launch::new(sharded_protocol::TASK.name, 2, deadline) };
    let mut comparisons = 0;
    for rank in launch(&plan, &input)? {
        let [Seen { report, .. }] = serde_json::from_value(rank)?;
        ensure!(report.comparisons > 0 && report.findings.is_empty(), "{:?}", report.findings);
        comparisons += report.comparisons;
    }
    Verdict::passed(format!("{}; {comparisons} comparisons", placement.note()))
}

/// Without a supervisor, as under torchrun, a rank ends itself when its peer does not come.
fn a_late_nccl_peer_ends_in_an_abort() -> Result<Verdict> {
    let note = placement()?.note();
    let folder = tempfile::tempdir()?;
    let port = TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port();
    let start =
        |rank| by_hand(Backend::Nccl, RankFault::Stall, folder.path(), rank, port, &[("CS336_DEADLINE_S", "15")]);
    let (waits, mut stalls) = (start(0)?, start(1)?);
    let outcome = waits.ended();
    stalls.child.kill()?;
    stalls.child.wait()?;
    let (status, message) = outcome?;
    ensure!(status.code() == Some(75), "{status}: {message}");
    says(&message, &["rank 0: all_reduce 2 of 4 Float, sum has not ended within 15.0 s; the communicator is aborted"])?;
    Verdict::passed(format!("{note}; after 15 s"))
}

/// Over NCCL a wait is recorded a second late, so messages of quick failures say less than over Gloo.
fn ends_the_run(fault: RankFault, expected: &[&str]) -> Result<Verdict> {
    let note = placement()?.note();
    faulty_runs::fault_ends_by(Duration::from_secs(60), Backend::Nccl, fault, expected)?;
    Verdict::passed(note)
}
