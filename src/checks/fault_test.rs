//! A rank task that misbehaves on request, so that tests can see a failing rank end its whole run and nothing more.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Result, bail};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tch::{Kind, Tensor};

use crate::collective::flight_recorder::{FLIGHT_RECORD, FlightRecord};
use crate::collective::ranks::{Launch, RankTask, launch, parse_input};
use crate::collective::{Op, Shared};
use crate::torch;
use crate::torch::hooks::post_accumulate_grad;

pub const TASK: RankTask = RankTask { name: "fault_test", run };

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FaultTest {
    pub fault: RankFault,
    /// Every rank writes its process id here as `<rank>.pid` at the start. The last rank writes `<rank>.fault` immediately
    /// before its fault.
    pub folder: PathBuf,
}

/// What the last rank does between barrier 1 and all_reduce 2. The other ranks wait for it in all_reduce 2.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RankFault {
    None,
    Exit,
    /// Exits with status 0.
    Leave,
    Fail,
    Panic,
    PanicInBackward,
    Stall,
    /// Comes a quarter of a second after the others.
    Late,
    /// Computes forever, so that the others wait for a busy rank.
    Work,
    /// Waits for a gradient that no backward pass computes, like a bucket with an unused parameter.
    NeverReady,
    WrongCount,
    WrongOrder,
    /// All ranks sum until a sum fails. Each writes `<rank>.fault` after its first.
    SumForever,
    /// Supervises two ranks of its own that stall, so that it waits until a test kills it.
    SuperviseStalled,
}

/// Returns the sum over ranks of (rank + 1), unless the fault prevents it.
fn run(collective: &Shared, input: Value) -> Result<Value> {
    let FaultTest { fault, folder } = parse_input(input)?;
    let (rank, last) = (collective.rank(), collective.world_size() - 1);
    if fault == RankFault::SuperviseStalled {
        let input = serde_json::to_value(FaultTest { fault: RankFault::Stall, folder })?;
        launch(&Launch::new(TASK.name, 2, Duration::from_secs(600)), &input)?;
        return Ok(Value::Null);
    }
    note(&folder, rank, "pid")?;
    collective.barrier()?;
    let sum = Tensor::f_full(&[4i64][..], rank as f64 + 1.0, (Kind::Float, collective.device()))?;
    if fault == RankFault::SumForever {
        collective.all_reduce(&sum, Op::Sum)?;
        note(&folder, rank, "fault")?;
        loop {
            collective.all_reduce(&sum, Op::Sum)?;
        }
    }
    if rank == last && fault != RankFault::None {
        if fault != RankFault::Late {
            until_others_wait(collective, 2);
        }
        note(&folder, rank, "fault")?;
        misbehave(fault, collective, &sum)?;
    }
    collective.all_reduce(&sum, Op::Sum)?;
    Ok(sum.f_double_value(&[0])?.into())
}

/// Written by rename, so that a reader never sees half a number.
fn note(folder: &Path, rank: usize, what: &str) -> Result<()> {
    let draft = folder.join(format!("{rank}.draft"));
    std::fs::write(&draft, std::process::id().to_string())?;
    Ok(std::fs::rename(draft, folder.join(format!("{rank}.{what}")))?)
}

/// The process ids in `folder`.
pub fn pids(folder: &Path) -> Result<Vec<u32>> {
    let mut pids = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "pid") {
            pids.push(std::fs::read_to_string(path)?.parse()?);
        }
    }
    Ok(pids)
}

/// Returns when every other rank has recorded that it waits in collective `sequence`, so that the fault comes after that
/// even on a busy machine. Without a supervisor no rank records it, and under NCCL it is recorded a second late; the
/// run's deadline bounds the wait.
fn until_others_wait(collective: &Shared, sequence: u64) {
    let Some(mine) = std::env::var_os(FLIGHT_RECORD).filter(|_| collective.backend() == "gloo") else { return };
    let of = |other: usize| Path::new(&mine).with_file_name(format!("rank{other}.flight"));
    let waits = |other: usize| FlightRecord::read(&of(other)).waits_in == Some(sequence);
    while !(0..collective.world_size()).filter(|&other| other != collective.rank()).all(waits) {
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn misbehave(fault: RankFault, collective: &Shared, sum: &Tensor) -> Result<()> {
    match fault {
        RankFault::None | RankFault::SumForever | RankFault::SuperviseStalled => {}
        RankFault::Exit => std::process::exit(7),
        RankFault::Leave => std::process::exit(0),
        RankFault::Fail => bail!("this rank gives up"),
        RankFault::Panic => panic!("this rank panics"),
        RankFault::PanicInBackward => backward(|| panic!("this hook panics"))?,
        RankFault::Late => std::thread::sleep(Duration::from_millis(250)),
        RankFault::Stall => std::thread::sleep(Duration::from_secs(3600)),
        RankFault::Work => loop {
            drop(std::hint::black_box(sum.f_sin()?));
        },
        RankFault::NeverReady => {
            let (ready, wait) = std::sync::mpsc::channel();
            let kept = ready.clone();
            backward(move || Ok(ready.send(())?))?;
            // Two gradients fill this bucket, and the second has no parameter.
            wait.recv()?;
            wait.recv()?;
            drop(kept);
        }
        RankFault::WrongCount => collective.all_reduce(&Tensor::f_cat(&[sum, sum], 0)?, Op::Sum)?,
        RankFault::WrongOrder => collective.broadcast(sum, 0)?,
    }
    Ok(())
}

/// Calls `hook` when a gradient is ready.
fn backward(mut hook: impl FnMut() -> Result<()> + Send + 'static) -> Result<()> {
    let parameter = Tensor::f_ones(&[2i64][..], (Kind::Float, tch::Device::Cpu))?.f_set_requires_grad(true)?;
    let _hook = post_accumulate_grad(&parameter, move |_| hook())?;
    torch::backward(&(&parameter * 2.0).f_sum(Kind::Float)?)
}
