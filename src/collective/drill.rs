//! A rank task that misbehaves on request, so that tests can see a failing rank end its whole run and nothing more.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Result, bail};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tch::Tensor;

use super::ranks::{Launch, RankTask, launch};
use super::{Op, Shared};

pub const TASK: RankTask = RankTask { name: "drill", run };

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Drill {
    pub fault: Fault,
    /// Where every rank notes its process id, as `<rank>.pid`, before anything goes wrong.
    pub folder: PathBuf,
}

/// What the last rank does between two collectives, while the others wait for it in the second.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Fault {
    None,
    Exit,
    Panic,
    Fail,
    Stall,
    /// Supervises two ranks of its own that stall, and so waits for somebody to kill it.
    SuperviseStalled,
}

/// Gives back the sum over ranks of (rank + 1), unless the fault prevents it.
fn run(collective: &Shared, input: Value) -> Result<Value> {
    let Drill { fault, folder } = serde_json::from_value(input)?;
    let (rank, last) = (collective.rank(), collective.world_size() - 1);
    if fault == Fault::SuperviseStalled {
        let input = serde_json::to_value(Drill { fault: Fault::Stall, folder })?;
        launch(&Launch { task: TASK.name, world_size: 2, deadline: Duration::from_secs(600) }, &input)?;
        return Ok(Value::Null);
    }
    // Renamed into place, so that whoever looks finds the whole number.
    let (draft, note) = (folder.join(format!("{rank}.draft")), folder.join(format!("{rank}.pid")));
    std::fs::write(&draft, std::process::id().to_string())?;
    std::fs::rename(draft, note)?;
    collective.barrier()?;
    if rank == last {
        match fault {
            Fault::None | Fault::SuperviseStalled => {}
            Fault::Exit => std::process::exit(7),
            Fault::Panic => panic!("this rank panics"),
            Fault::Fail => bail!("this rank gives up"),
            Fault::Stall => std::thread::sleep(Duration::from_secs(3600)),
        }
    }
    let sum = Tensor::f_from_slice(&[rank as f32 + 1.0])?;
    collective.all_reduce(&sum, Op::Sum)?;
    Ok(sum.f_double_value(&[0])?.into())
}
