//! Rank processes: each rank runs this program again, with torchrun's environment variables.
//!
//! A process per rank, because libtorch's autograd engine, allocator and random generator belong to a process, and
//! because a crash then ends one rank and not its supervisor.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::net::{TcpListener, UdpSocket};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::environment::{AGENT_STORE, DEADLINE, LOOPBACK};
use super::flight_recorder::FLIGHT_RECORD;
use super::nccl::{self, NVLS};
use super::network::LOOPBACK_INTERFACE;
use super::supervisor::{Rank, supervise};
use super::{Backend, Shared};
use crate::error::Fault;
use crate::json;
use crate::process::LockedFolder;
use crate::torch;
use crate::torch::store::Store;

/// Code that runs in every rank of a launch; the table of them is `problems::RANK_TASKS`.
pub struct RankTask {
    pub name: &'static str,
    /// Gets the launch's input and gives back this rank's result.
    pub run: fn(&Shared, Value) -> Result<Value>,
}

/// A task's input as its own type. A person who starts a task with `cs336 launch` or `rank` names the input's file.
pub fn parse_input<T: DeserializeOwned>(input: Value) -> Result<T> {
    ensure!(!input.is_null(), "this task needs an input: name a JSON file with --input");
    json::from_value(&input).context("the input does not fit this task: correct the JSON file of --input")
}

/// The GPU of each rank under NCCL.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Placement {
    /// Rank k has GPU k.
    GpuPerRank,
    /// All ranks share GPU 0, each under the name of its own host, so that NCCL accepts them and connects them through
    /// sockets. For checks on a machine with one GPU: results are right, times mean nothing.
    SharedGpu,
}

impl Placement {
    /// For checks of two ranks on this machine.
    pub fn of_checks() -> Self {
        if gpus() == 1 { Self::SharedGpu } else { Self::GpuPerRank }
    }

    /// What a verdict says of it.
    pub fn note(self) -> &'static str {
        match self {
            Self::GpuPerRank => "a GPU per rank",
            Self::SharedGpu => "two ranks on one GPU, through sockets",
        }
    }

    /// The variables that place one of `world_size` ranks.
    pub fn variables(self, rank: usize, world_size: usize) -> Vec<(&'static str, OsString)> {
        let local = |rank: usize, world_size: usize| {
            [("LOCAL_RANK", rank), ("LOCAL_WORLD_SIZE", world_size)]
                .map(|(name, value)| (name, value.to_string().into()))
        };
        match self {
            Self::GpuPerRank => local(rank, world_size).to_vec(),
            Self::SharedGpu => {
                let host = ("NCCL_HOSTID", format!("rank{rank}").into());
                let sockets = [("NCCL_P2P_DISABLE", "1"), ("NCCL_SHM_DISABLE", "1"), ("NCCL_SOCKET_IFNAME", "lo")];
                let sockets = sockets.map(|(name, value)| (name, value.into()));
                local(0, 1).into_iter().chain([host]).chain(sockets).collect()
            }
        }
    }
}

/// One run of a task on `world_size` processes of this machine.
pub struct Launch<'a> {
    pub task: &'a str,
    pub world_size: usize,
    /// From start to the last rank's exit; ranks that still run are then killed and the launch fails.
    pub deadline: Duration,
    /// How long ranks may wait in a collective for one that does nothing; ranks that work have until the deadline.
    pub patience: Duration,
    pub backend: Backend,
    pub placement: Placement,
    /// Where rank 0 writes a Chrome trace of all ranks; `None` for no trace.
    pub trace: Option<PathBuf>,
    /// Whether the user has interrupted the run; polled while it runs.
    pub interrupted: fn() -> bool,
}

/// A rank that uses no processor time for this long while others wait for it is considered stalled.
const PATIENCE: Duration = Duration::from_secs(60);

impl<'a> Launch<'a> {
    /// Ranks that communicate over Gloo; `Launch { backend: Backend::Nccl, ..Launch::new(..) }` for others.
    pub fn new(task: &'a str, world_size: usize, deadline: Duration) -> Self {
        let (backend, placement) = (Backend::Gloo, Placement::GpuPerRank);
        Self { task, world_size, deadline, patience: PATIENCE, backend, placement, trace: None, interrupted: || false }
    }
}

/// The most ranks of a launch; a larger number is a mistake or a hostile case file.
pub const MAX_WORLD_SIZE: usize = 16;

/// Rejects a suite's `world_size` with which no ranks communicate, or too many.
pub fn validate_world_size(world_size: usize) -> Result<()> {
    let several = 2..=MAX_WORLD_SIZE;
    ensure!(several.contains(&world_size), "world_size is {world_size}: it must lie in 2..{MAX_WORLD_SIZE}");
    Ok(())
}

static PROGRAM: OnceLock<PathBuf> = OnceLock::new();

/// Sets the `cs336` program to re-execute; only the first call of a process has an effect.
pub fn set_program(program: PathBuf) {
    PROGRAM.get_or_init(|| program);
}

/// The program that ranks are started with.
pub fn program() -> Result<&'static Path> {
    let program = PROGRAM.get().context("no program to run ranks with: call collective::ranks::set_program first")?;
    Ok(program)
}

/// Runs a task on every rank and gives back the results in rank order.
///
/// # Errors
/// If a rank fails, all others are killed and reaped first, and the error names the rank, its exit status and its last
/// output; the same when the deadline passes. No process outlives this call.
pub fn launch(launch: &Launch, input: &Value) -> Result<Vec<Value>> {
    launch_program(program()?, launch, input)
}

/// [`launch`] with a program of the caller's choice, which gets the arguments of `cs336 rank`.
pub fn launch_program(program: &Path, launch: &Launch, input: &Value) -> Result<Vec<Value>> {
    let world_size = launch.world_size;
    ensure!(
        (1..=MAX_WORLD_SIZE).contains(&world_size),
        "world_size is {world_size}, not between 1 and {MAX_WORLD_SIZE}"
    );
    let wanted = if launch.placement == Placement::SharedGpu { 1 } else { world_size };
    require_devices(launch.backend, wanted)?;
    run_ranks(program, launch, input).with_context(|| format!("task {} on {world_size} ranks", launch.task))
}

/// Requires NCCL and a GPU for each of `world_size` ranks under NCCL. Gloo needs neither.
///
/// # Errors
/// [`Fault::NotAvailable`] with both numbers. [`launch`] checks it too: a rank could return only a message.
pub fn require_devices(backend: Backend, world_size: usize) -> Result<()> {
    if backend == Backend::Gloo {
        return Ok(());
    }
    let gpus = gpus();
    if gpus < world_size {
        let needs = if world_size == 1 { "a GPU".to_string() } else { format!("{world_size} GPUs, one per process") };
        return Err(Fault::NotAvailable { needs, has: gpus.to_string() }.into());
    }
    nccl::version().map(drop)
}

/// The GPUs that libtorch can use.
fn gpus() -> usize {
    torch::load_cuda().map_or(0, |()| usize::try_from(tch::Cuda::device_count()).unwrap_or(0))
}

fn run_ranks(program: &Path, launch: &Launch, input: &Value) -> Result<Vec<Value>> {
    let folder = LockedFolder::new("ranks").context("making a folder for the ranks")?;
    let listener = TcpListener::bind((LOOPBACK, 0)).context("looking for a free port on the loopback interface")?;
    let port = listener.local_addr()?.port();
    require_loopback(port)?;
    let _store = Store::serve(listener, launch.deadline)?;
    let rank = |rank: usize| -> Result<Rank> {
        let mut command = Command::new(program);
        command.arg("rank").arg("--task").arg(launch.task).arg("--backend").arg(launch.backend.name());
        command.args(launch.trace.iter().flat_map(|path| [OsStr::new("--trace"), path.as_os_str()]));
        let flight_record = folder.path().join(format!("rank{rank}.flight"));
        File::create(&flight_record).with_context(|| format!("creating the flight record of rank {rank}"))?;
        command.envs(environment_of(rank, launch, port)).env(FLIGHT_RECORD, &flight_record);
        Ok(Rank { command, flight_record })
    };
    let ranks = (0..launch.world_size).map(rank).collect::<Result<Vec<_>>>()?;
    let replies = supervise(launch, ranks, input)?;
    replies.into_iter().enumerate().map(|(rank, reply)| read_reply(rank, reply)).collect()
}

/// Errors: the loopback interface is down, as in a new network namespace. Ranks would wait for each other until the deadline.
/// Connecting a datagram socket sends nothing.
fn require_loopback(port: u16) -> Result<()> {
    let connected = UdpSocket::bind((LOOPBACK, 0)).and_then(|socket| socket.connect((LOOPBACK, port)));
    connected.context("ranks cannot reach each other over the loopback interface; run `ip link set lo up`")
}

fn read_reply(rank: usize, reply: Option<String>) -> Result<Value> {
    let reply = reply.with_context(|| format!("rank {rank} exited with success but sent no result"))?;
    serde_json::from_str(&reply).with_context(|| format!("the result of rank {rank} is not JSON"))
}

/// torchrun's variables, the launch's deadline, and the interface of [`LOOPBACK`] whatever network the user's shell names.
fn environment_of(rank: usize, launch: &Launch, port: u16) -> Vec<(&'static str, OsString)> {
    let mut variables: Vec<(&'static str, OsString)> = vec![
        ("RANK", rank.to_string().into()),
        ("WORLD_SIZE", launch.world_size.to_string().into()),
        ("MASTER_ADDR", LOOPBACK.into()),
        ("MASTER_PORT", port.to_string().into()),
        (AGENT_STORE, "True".into()),
        (DEADLINE, launch.deadline.as_secs_f64().to_string().into()),
        ("GLOO_SOCKET_IFNAME", LOOPBACK_INTERFACE.into()),
    ];
    variables.extend(launch.placement.variables(rank, launch.world_size));
    // As torchrun does: if every rank started one thread for each core, the ranks would slow each other down.
    if std::env::var_os("OMP_NUM_THREADS").is_none() {
        variables.push(("OMP_NUM_THREADS", "1".into()));
    }
    let (name, value) = NVLS;
    if std::env::var_os(name).is_none() {
        variables.push((name, value.into()));
    }
    variables
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::fault_of;

    #[test]
    fn more_nccl_ranks_than_gpus_are_a_typed_fault() {
        let plan = Launch { backend: Backend::Nccl, ..Launch::new("none", MAX_WORLD_SIZE, Duration::from_secs(5)) };
        let error = launch_program(Path::new("/bin/true"), &plan, &Value::Null).unwrap_err();
        assert!(
            matches!(fault_of(&error), Some(Fault::NotAvailable { needs, .. }) if needs.starts_with("16 GPUs")),
            "{error:#}"
        );
    }

    #[test]
    fn an_input_that_does_not_fit_is_named_without_types_of_rust() {
        let error = parse_input::<[u32; 2]>(serde_json::json!([1, "a"])).unwrap_err();
        let expected = "correct the JSON file of --input: invalid type: string \"a\", expected a whole number";
        assert!(format!("{error:#}").ends_with(expected), "{error:#}");
    }

    #[test]
    fn ranks_that_share_a_gpu_are_ranks_of_two_hosts() {
        let launch = Launch { placement: Placement::SharedGpu, ..Launch::new("none", 2, Duration::from_secs(5)) };
        let of = |rank: usize, name: &str| {
            let variables = environment_of(rank, &launch, 1);
            let mut values =
                variables.iter().filter(|(n, _)| *n == name).map(|(_, value)| value.to_str().unwrap().to_string());
            (values.next(), values.next())
        };
        for rank in 0..2 {
            assert_eq!(of(rank, "LOCAL_RANK"), (Some("0".into()), None));
            assert_eq!(of(rank, "LOCAL_WORLD_SIZE"), (Some("1".into()), None));
        }
        assert_ne!(of(0, "NCCL_HOSTID"), of(1, "NCCL_HOSTID"));
        assert_eq!(
            environment_of(1, &Launch { placement: Placement::GpuPerRank, ..launch }, 1)
                .iter()
                .filter(|(n, _)| n.starts_with("NCCL_H"))
                .count(),
            0
        );
    }

    #[test]
    fn ranks_of_this_machine_use_its_loopback_interface() {
        let variables = environment_of(0, &Launch::new("none", 2, Duration::from_secs(5)), 1);
        let values = variables.iter().filter(|(name, _)| *name == "GLOO_SOCKET_IFNAME").map(|(_, value)| value);
        assert_eq!(values.collect::<Vec<_>>(), ["lo"]);
    }

    #[test]
    fn every_rank_keeps_multicast_off_unless_the_user_decides() {
        let variables = environment_of(0, &Launch::new("none", 2, Duration::from_secs(5)), 1);
        let set = variables.iter().find(|(name, _)| *name == "NCCL_NVLS_ENABLE").map(|(_, value)| value.to_str());
        assert_eq!(set.is_some(), std::env::var_os("NCCL_NVLS_ENABLE").is_none());
        assert!(set.is_none_or(|value| value == Some("0")));
    }

    #[test]
    fn a_launch_with_an_invalid_world_size_or_program_is_refused() {
        let launch = |world_size| Launch::new("none", world_size, Duration::from_secs(5));
        let error = launch_program(Path::new("/bin/true"), &launch(0), &Value::Null).unwrap_err();
        assert!(error.to_string().contains("world_size is 0"), "{error:#}");
        let error = launch_program(Path::new("/nowhere/cs336"), &launch(2), &Value::Null).unwrap_err();
        assert!(format!("{error:#}").contains("/nowhere/cs336"), "{error:#}");
        let error = launch_program(Path::new("/bin/true"), &launch(2), &Value::Null).unwrap_err();
        assert!(format!("{error:#}").contains("rank 0 exited with success but sent no result"), "{error:#}");
    }
}
