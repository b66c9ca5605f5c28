//! Rank processes: one a rank, the same program re-executed under torchrun's environment contract.
//!
//! A process per rank, because libtorch's autograd engine, allocator and random generator belong to a process, and
//! because a crash then ends one rank and not its supervisor.

use std::ffi::OsString;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use serde_json::Value;

use super::Shared;
use super::supervisor::{Rank, supervise};
use crate::torch::gloo::Store;

/// Code that runs in every rank of a launch; the table of them is `problems::RANK_TASKS`.
pub struct RankTask {
    pub name: &'static str,
    /// Gets the launch's input and gives back this rank's result.
    pub run: fn(&Shared, Value) -> Result<Value>,
}

/// One run of a task on `world_size` processes of this machine.
pub struct Launch<'a> {
    pub task: &'a str,
    pub world_size: usize,
    /// From start to the last rank's exit; ranks that still run are then killed and the launch fails.
    pub deadline: Duration,
}

/// What a rank process learns from its environment, in torchrun's names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Environment {
    pub rank: usize,
    pub local_rank: usize,
    pub world_size: usize,
    pub master_addr: String,
    pub master_port: u16,
    /// Whether the launcher serves the store at that address; rank 0 does otherwise.
    pub agent_store: bool,
    /// How long a collective may take: what the supervisor allows, else [`GLOO_TIMEOUT`].
    pub timeout: Duration,
}

/// c10d's own default for Gloo (`kProcessGroupDefaultTimeout`, torch 2.11: 30 minutes).
const GLOO_TIMEOUT: Duration = Duration::from_secs(30 * 60);

/// Beyond this a launch is a mistake (or a hostile case file), not a run on one machine.
pub const MAX_WORLD_SIZE: usize = 16;

const LOOPBACK: &str = "127.0.0.1";

/// torchrun's variable for "the launcher serves the store", which spares us guessing a port that stays free.
const AGENT_STORE: &str = "TORCHELASTIC_USE_AGENT_STORE";
const SUPERVISOR: &str = "CS336_SUPERVISOR";
const DEADLINE: &str = "CS336_DEADLINE_S";

static PROGRAM: OnceLock<PathBuf> = OnceLock::new();

/// Names the `cs336` program to re-execute; the first call of a process decides.
pub fn set_program(program: PathBuf) {
    PROGRAM.get_or_init(|| program);
}

/// Runs a task on every rank and gives back the results in rank order.
///
/// # Errors
/// If a rank fails, all others are killed and reaped first, and the error names the rank, its exit status and its last
/// words; the same when the deadline passes. No process outlives this call.
pub fn launch(launch: &Launch, input: &Value) -> Result<Vec<Value>> {
    let program = PROGRAM.get().context("no program to run ranks with: call collective::ranks::set_program first")?;
    launch_program(program, launch, input)
}

fn launch_program(program: &Path, launch: &Launch, input: &Value) -> Result<Vec<Value>> {
    let world_size = launch.world_size;
    ensure!(
        (1..=MAX_WORLD_SIZE).contains(&world_size),
        "world_size is {world_size}, not between 1 and {MAX_WORLD_SIZE}"
    );
    run_ranks(program, launch, input).with_context(|| format!("task {} on {world_size} ranks", launch.task))
}

fn run_ranks(program: &Path, launch: &Launch, input: &Value) -> Result<Vec<Value>> {
    let folder = tempfile::Builder::new().prefix("cs336-ranks-").tempdir().context("making a folder for the ranks")?;
    let input_file = folder.path().join("input.json");
    std::fs::write(&input_file, serde_json::to_vec(input)?).context("writing the ranks' input")?;
    let store = Store::serve(LOOPBACK, launch.deadline)?;
    let output_file = |rank: usize| folder.path().join(format!("rank{rank}.json"));
    let ranks = (0..launch.world_size)
        .map(|rank| {
            let mut command = Command::new(program);
            command.arg("rank").arg("--task").arg(launch.task);
            command.arg("--input").arg(&input_file).arg("--output").arg(output_file(rank));
            command.envs(environment_of(rank, launch, store.port()));
            Rank { command, log: folder.path().join(format!("rank{rank}.log")) }
        })
        .collect();
    supervise(ranks, launch.deadline)?;
    (0..launch.world_size).map(|rank| read_result(rank, &output_file(rank))).collect()
}

fn read_result(rank: usize, file: &Path) -> Result<Value> {
    let bytes = std::fs::read(file).map_err(|error| match error.kind() {
        ErrorKind::NotFound => anyhow!("rank {rank} exited with success but left no result"),
        _ => anyhow!(error).context(format!("reading the result of rank {rank}")),
    })?;
    serde_json::from_slice(&bytes).with_context(|| format!("the result of rank {rank} is not JSON"))
}

/// torchrun's variables, and two of ours that tie the rank to its supervisor.
fn environment_of(rank: usize, launch: &Launch, port: u16) -> Vec<(&'static str, OsString)> {
    let mut variables: Vec<(&'static str, OsString)> = vec![
        ("RANK", rank.to_string().into()),
        ("LOCAL_RANK", rank.to_string().into()),
        ("WORLD_SIZE", launch.world_size.to_string().into()),
        ("LOCAL_WORLD_SIZE", launch.world_size.to_string().into()),
        ("MASTER_ADDR", LOOPBACK.into()),
        ("MASTER_PORT", port.to_string().into()),
        (AGENT_STORE, "True".into()),
        (SUPERVISOR, std::process::id().to_string().into()),
        (DEADLINE, launch.deadline.as_secs_f64().to_string().into()),
    ];
    // As torchrun does: ranks that each start a thread a core only get in each other's way.
    if std::env::var_os("OMP_NUM_THREADS").is_none() {
        variables.push(("OMP_NUM_THREADS", "1".into()));
    }
    variables
}

impl Environment {
    /// Reads this process's environment.
    ///
    /// # Errors
    /// Names the variable that is missing or makes no sense.
    pub fn read() -> Result<Self> {
        Self::from(|name| std::env::var(name).ok())
    }

    fn from(variable: impl Fn(&str) -> Option<String>) -> Result<Self> {
        let text = |name: &str| {
            variable(name)
                .with_context(|| format!("{name} is not set: ranks are started by cs336 itself, or under torchrun"))
        };
        let number = |name: &str| {
            let text = text(name)?;
            text.parse::<usize>().with_context(|| format!("{name} is {text:?}, not a number"))
        };
        let (rank, world_size) = (number("RANK")?, number("WORLD_SIZE")?);
        ensure!(rank < world_size, "RANK is {rank}, but WORLD_SIZE is {world_size}");
        let port = number("MASTER_PORT")?;
        let timeout = match variable(DEADLINE) {
            Some(text) => Duration::try_from_secs_f64(text.parse().with_context(|| format!("{DEADLINE} is {text:?}"))?)
                .with_context(|| format!("{DEADLINE} is {text:?}"))?,
            None => GLOO_TIMEOUT,
        };
        Ok(Self {
            rank,
            local_rank: number("LOCAL_RANK")?,
            world_size,
            master_addr: text("MASTER_ADDR")?,
            master_port: u16::try_from(port).with_context(|| format!("MASTER_PORT is {port}, not a port"))?,
            agent_store: variable(AGENT_STORE).is_some_and(|value| value == "True"),
            timeout,
        })
    }
}

/// Asks the kernel to kill this rank when its supervisor dies, however that happens.
///
/// The signal belongs to the supervisor's *thread* that started the rank (prctl(2), PR_SET_PDEATHSIG), which is why
/// [`launch`] waits on the thread that it starts the ranks on. Started by hand or by torchrun, nothing is asked.
///
/// # Errors
/// When the supervisor is gone already.
pub fn die_with_supervisor() -> Result<()> {
    let Ok(supervisor) = std::env::var(SUPERVISOR) else { return Ok(()) };
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))
        .context("asking for a signal at the supervisor's death")?;
    let parent = rustix::process::getppid().map_or(0, |pid| pid.as_raw_nonzero().get());
    if parent.to_string() != supervisor {
        bail!("the supervisor (process {supervisor}) has died; this rank's parent is process {parent}");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn environment(changes: &[(&str, Option<&str>)]) -> Result<Environment> {
        Environment::from(|name| match changes.iter().find(|(changed, _)| *changed == name) {
            Some((_, value)) => value.map(str::to_string),
            None => Some(
                match name {
                    "RANK" | "LOCAL_RANK" => "1",
                    "WORLD_SIZE" => "2",
                    "MASTER_ADDR" => "127.0.0.1",
                    "MASTER_PORT" => "29500",
                    _ => return None,
                }
                .into(),
            ),
        })
    }

    #[test]
    fn torchruns_environment_is_read_and_errors_name_the_variable() {
        let read = environment(&[]).unwrap();
        assert_eq!((read.rank, read.world_size, read.master_port, read.timeout), (1, 2, 29500, GLOO_TIMEOUT));
        for (name, value) in [
            ("RANK", None),
            ("RANK", Some("2")),
            ("WORLD_SIZE", Some("two")),
            ("MASTER_PORT", Some("70000")),
            ("MASTER_ADDR", None),
            (DEADLINE, Some("-1")),
        ] {
            let error = environment(&[(name, value)]).unwrap_err();
            assert!(format!("{error:#}").contains(name), "{name} {value:?}: {error:#}");
        }
    }

    #[test]
    fn a_launch_needs_a_sensible_world_size_and_a_program_that_exists() {
        let launch = |world_size| Launch { task: "none", world_size, deadline: Duration::from_secs(5) };
        let error = launch_program(Path::new("/bin/true"), &launch(0), &Value::Null).unwrap_err();
        assert!(error.to_string().contains("world_size is 0"), "{error:#}");
        let error = launch_program(Path::new("/nowhere/cs336"), &launch(2), &Value::Null).unwrap_err();
        assert!(format!("{error:#}").contains("/nowhere/cs336"), "{error:#}");
        let error = launch_program(Path::new("/bin/true"), &launch(2), &Value::Null).unwrap_err();
        assert!(format!("{error:#}").contains("rank 0 exited with success but left no result"), "{error:#}");
    }
}
