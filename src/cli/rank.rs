//! `cs336 rank` runs one rank, started by a supervisor, torchrun, srun or mpirun; `cs336 launch` starts and supervises
//! ranks on this machine. Measuring launches its ranks itself.

use std::mem::ManuallyDrop;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result};
use serde_json::Value;

use super::{Ended, interrupted, watch_for_interrupt};
use crate::collective::environment::Environment;
use crate::collective::nccl::NVLS;
use crate::collective::ranks::{Launch, RankTask, launch};
use crate::collective::rendezvous::{Settings, arrive, connect, exchange, gather};
use crate::collective::trace::{findings, traced};
use crate::collective::{Backend, saying_collectives};
use crate::harness::manifest::suites_hash;
use crate::harness::named_files::{require_distinct, require_no_folders, require_writable};
use crate::harness::provenance::Commit;
use crate::harness::store::{Layout, sha256, write_atomically};
use crate::json;
use crate::printable::shown_path;
use crate::problems::RANK_TASKS;
use crate::process::{Parent, has_parent};
use crate::root::read;

/// A task with its input and output, for one rank or for a launch.
#[derive(clap::Args)]
pub struct Task {
    /// The task's name; an unknown name lists all tasks
    #[arg(long)]
    task: String,
    #[arg(long, value_enum, default_value = "gloo")]
    backend: Backend,
    /// A JSON file that every rank reads; null without one
    #[arg(long)]
    input: Option<PathBuf>,
    /// The output file: a JSON list of the ranks' results in rank order
    #[arg(long)]
    output: Option<PathBuf>,
    /// Profile the task into one Chrome trace of all ranks, gzipped, for ui.perfetto.dev
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
}

#[derive(clap::Args)]
pub struct LaunchArguments {
    #[command(flatten)]
    task: Task,
    #[arg(long)]
    world_size: usize,
    /// Seconds after which all ranks are ended
    #[arg(long, default_value_t = 600, value_parser = clap::value_parser!(u64).range(1..=31_536_000))]
    deadline: u64,
}

impl Task {
    /// The code that a rank of this task runs.
    fn code(&self) -> Result<&'static RankTask> {
        let known = || RANK_TASKS.iter().map(|task| task.name).collect::<Vec<_>>().join(", ");
        RANK_TASKS
            .iter()
            .find(|known| known.name == self.task)
            .with_context(|| format!("no rank task is called {:?}; give --task one of {}", self.task, known()))
    }

    fn read_input(&self) -> Result<Value> {
        let Self { input, output, trace, .. } = self;
        let files = [("--input", input), ("--output", output), ("--trace", trace)];
        require_distinct(&files.map(|(option, path)| (option, path.as_deref())))?;
        let Some(file) = &self.input else { return Ok(Value::Null) };
        let bytes = read(file).with_context(|| format!("reading {}", shown_path(file)))?;
        let text = String::from_utf8(bytes).with_context(|| format!("{} is not UTF-8", shown_path(file)))?;
        json::from_str(&text).with_context(|| format!("{} is not JSON", shown_path(file)))
    }

    /// Errors: what the task gives could not be written at its end.
    fn require_output(&self) -> Result<()> {
        let files = [("--output", self.output.as_deref()), ("--trace", self.trace.as_deref())];
        require_no_folders(&files)?;
        require_writable(files.into_iter().filter_map(|(_, path)| path))
    }

    /// What the trace says of clocks and late ranks.
    fn print_findings(&self) -> Result<()> {
        let findings = self.trace.as_deref().map_or(Ok(Vec::new()), findings)?;
        findings.iter().for_each(|finding| eprintln!("cs336: {finding}"));
        Ok(())
    }

    fn write(&self, result: &Value) -> Result<()> {
        let bytes = serde_json::to_vec(result)?;
        match &self.output {
            Some(file) => write_atomically(file, &bytes),
            None => {
                println!("{}", String::from_utf8(bytes)?);
                Ok(())
            }
        }
    }
}

/// Runs `task` as the rank that the environment names.
///
/// Under our supervisor every rank receives its input and sends its own result. Under another launcher rank 0 writes all
/// results.
///
/// # Errors
/// An unknown task, invalid environment variables, or an error of the task or the process group.
pub fn run(task: &Task) -> Result<()> {
    keep_multicast_off(task.backend)?;
    let mut parent = has_parent().then(Parent::connect).transpose()?;
    let code = task.code()?;
    let input = match &mut parent {
        Some(parent) => serde_json::from_str(&parent.receive()?.context("the supervisor sent no input")?)?,
        None => task.read_input()?,
    };
    let environment = Environment::read()?;
    if parent.is_none() && environment.rank == 0 {
        task.require_output()?;
    }
    let mut settings = settings(&task.task, parent.is_none().then_some(&input));
    // Tracing adds collectives: all ranks trace, or none does.
    settings.extend(task.trace.as_ref().map(|_| ("options".into(), "--trace".into())));
    // Leaked on failure: if connections closed while this rank is still failing, its peers would fail before it has
    // exited, and the supervisor would report their errors instead of this rank's.
    let (store, peers) = arrive(&environment, task.backend, &settings)?;
    let joined = ManuallyDrop::new((connect(&environment, task.backend, &store, &peers)?, store));
    let (collective, store) = &*joined;
    let work = || match parent {
        Some(_) => (code.run)(collective, input),
        None => saying_collectives(&environment, collective.group(), &peers.names_of_others(), || {
            (code.run)(collective, input)
        }),
    };
    let result = match &task.trace {
        Some(path) => {
            let gather = |trace: &[u8]| gather(&environment, store, &peers, "trace", trace);
            traced(collective, gather, work).and_then(|(result, trace)| {
                trace.map_or(Ok(()), |trace| write_atomically(path, &trace)).map(|()| result)
            })
        }
        None => work(),
    };
    let result = result.and_then(|result| {
        collective.barrier().context("waiting for the other ranks to be done")?;
        Ok(result)
    });
    let result = result.map_err(|error| peers.explain(error))?;
    if let Some(parent) = &mut parent {
        parent.send(&result)?;
    } else {
        let results = exchange(&environment, store, &peers, "result", &serde_json::to_vec(&result)?);
        let results = results.map_err(|error| peers.explain(error))?;
        if environment.rank == 0 {
            let results = results.iter().map(|bytes| serde_json::from_slice(bytes)).collect::<Result<_, _>>();
            task.write(&Value::Array(results.context("a rank's result is not JSON")?))?;
            task.print_findings()?;
        }
    }
    drop(ManuallyDrop::into_inner(joined));
    Ok(())
}

/// What all ranks must have equal. A supervisor starts one program on one machine with one input, so only ranks of other
/// launchers compare the rest; they have an `input`.
pub(super) fn settings(task: &str, input: Option<&Value>) -> Settings {
    const VERSION: &str = env!("CARGO_PKG_VERSION");
    let mut settings = vec![("task".into(), task.into()), ("version".into(), VERSION.into())];
    if let Some(input) = input {
        let layout = Layout::find().ok();
        let commit = layout.as_ref().and_then(|layout| Commit::of(&layout.root, &interrupted).ok());
        let commit =
            commit.map(|Commit { commit, dirty, .. }| if dirty { format!("{commit} with changes") } else { commit });
        let suites = layout.and_then(|layout| suites_hash(&layout.root).ok().flatten());
        settings.extend(
            [("commit", commit), ("suites", suites)]
                .map(|(name, value)| (name.to_string(), value.unwrap_or_else(|| "none".to_string()))),
        );
        add_leaves("input", input, &mut settings);
    }
    settings
}

/// The longest value of an input that messages show, in bytes.
const LONGEST: usize = 100;

/// Each value of a JSON object under its keys joined by dots, as in "input.params.precision". A key with a dot of its own is
/// quoted.
fn add_leaves(name: &str, value: &Value, settings: &mut Settings) {
    match value {
        Value::Object(fields) if !fields.is_empty() => {
            let quoted = |key: &str| if key.contains('.') { format!("{key:?}") } else { key.to_string() };
            fields.iter().for_each(|(key, value)| add_leaves(&format!("{name}.{}", quoted(key)), value, settings));
        }
        leaf => {
            let text = leaf.to_string();
            let shown =
                if text.len() > LONGEST { format!("JSON of SHA-256 {}", sha256(text.as_bytes())) } else { text };
            settings.push((name.to_string(), shown));
        }
    }
}

/// Replaces this process by itself (`exec`) with NVLink multicast off, unless the launcher or the user has set it. NCCL
/// reads its environment when it is loaded, and a program cannot safely change its environment while threads run.
pub(super) fn keep_multicast_off(backend: Backend) -> Result<()> {
    let (name, value) = NVLS;
    if backend != Backend::Nccl || std::env::var_os(name).is_some() {
        return Ok(());
    }
    let program = std::env::current_exe().context("failed to find this program's own file")?;
    let error = Command::new(program).args(std::env::args_os().skip(1)).env(name, value).exec();
    Err(error).with_context(|| format!("restarting with {name}={value}"))
}

/// Runs a task on ranks of this machine, and writes their results.
///
/// # Errors
/// As [`launch`]: the error names the rank, the collective and its number.
pub fn run_launch(arguments: &LaunchArguments) -> Result<Ended> {
    let &LaunchArguments { ref task, world_size, deadline } = arguments;
    task.code()?;
    let input = task.read_input()?;
    task.require_output()?;
    watch_for_interrupt();
    let plan = Launch {
        backend: task.backend,
        trace: task.trace.clone(),
        interrupted,
        ..Launch::new(&task.task, world_size, Duration::from_secs(deadline))
    };
    task.write(&Value::Array(launch(&plan, &input)?))?;
    task.print_findings().map(|()| Ended::Well)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_without_a_supervisor_compare_version_commit_suites_and_every_value_of_the_input() {
        let input = serde_json::json!({ "params": { "precision": "bfloat16", "sizes": [1, 2] }, "steps": 3 });
        let settings = settings("ddp_step", Some(&input));
        let names: Vec<&str> = settings.iter().map(|(name, _)| name.as_str()).collect();
        let of_input = ["input.params.precision", "input.params.sizes", "input.steps"];
        assert_eq!(names, [&["task", "version", "commit", "suites"][..], &of_input].concat());
        assert_eq!(settings[4].1, "\"bfloat16\"");
        assert!(settings.iter().all(|(_, value)| value != "none"), "{settings:?}");
        // Different inputs have different settings.
        let inputs = ["{}", "{\"a\":{}}", "{\"a\":[]}", "{\"a\":{\"b\":1}}", "{\"a.b\":1}", "{\"a\":null}"];
        let all = inputs.map(|input| super::settings("x", Some(&serde_json::from_str(input).unwrap())));
        let distinct: std::collections::BTreeSet<_> = all.iter().collect();
        assert_eq!(distinct.len(), inputs.len(), "{all:?}");
    }
}
