//! Somebody else's adapters in a confined Python process of their own: they get inputs and give results, and what is
//! expected of a result never enters their process.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use rustix::process::{Resource, getrlimit};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tch::{Device, Tensor};

use crate::collective::Shared;
use crate::error::{Fault, NotGraded, fault_of};
use crate::harness::peer::{NoAnswer, NoReply, Peer, PeerDied};
use crate::harness::store::Layout;
use crate::harness::subject::{self, Subject};
use crate::printable::shown_path;
use crate::process::{MORE_PROCESSES, after};
use crate::torch::safetensors;
use crate::units::human_bytes;

pub mod attention;
mod confined;
mod folders;
pub mod rank;
mod results;
pub mod steps;
pub mod timed;

pub use confined::require_hidden;
use folders::{Folders, MOST_BYTES};

/// The version of `suites/peers/protocol.py`.
const PROTOCOL: u64 = 1;
const STARTING: Limit = Limit { time: subject::STARTING, set_by: "the limit for starting" };

/// The most bytes of its words that are quoted.
const MOST_WORDS: usize = 4 << 10;

/// How long a job may take, and what sets that.
#[derive(Clone, Copy)]
struct Limit {
    time: Duration,
    set_by: &'static str,
}

/// What a subject did wrong other than a wrong value, as a sentence.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, thiserror::Error)]
#[error("{words}")]
pub struct SubjectFault {
    words: String,
    /// Whether a call had no end within its limit.
    pub hangs: bool,
    /// Whether its Python did not start or its adapters were not imported, which is not tried again.
    pub at_start: bool,
    /// Whether a GPU, which is not there, could change it.
    needs_gpu: bool,
}

impl SubjectFault {
    pub fn new(words: impl Into<String>) -> Self {
        Self { words: cut(words.into()), hangs: false, at_start: false, needs_gpu: false }
    }

    /// What went wrong, in `words`, that a GPU could change.
    pub fn needing_gpu(words: &str) -> Self {
        Self { needs_gpu: true, ..Self::new(format!("may need a GPU: {words}")) }
    }

    /// Whether `error` is such a fault.
    pub fn lacks_gpu(error: &anyhow::Error) -> bool {
        error.downcast_ref().is_some_and(|fault: &Self| fault.needs_gpu)
    }
}

/// The first [`MOST_WORDS`] of a text that a subject may have made.
fn cut(mut text: String) -> String {
    let end = text.floor_char_boundary(MOST_WORDS);
    // So that what is already cut is not cut again once words stand before it.
    let more = text.len() - end;
    if more > MOST_WORDS / 4 {
        text.truncate(end);
        text += &format!(" (... {more} more bytes)");
    }
    text
}

/// The words of the subject's own fault in `error`, else of the whole error.
pub fn words_of(error: &anyhow::Error) -> String {
    let own = error.chain().find_map(|cause| cause.downcast_ref::<SubjectFault>());
    own.map_or_else(|| cut(format!("{error:#}")), ToString::to_string)
}

/// Why the subject could not be run on this machine, if that is what `error` is about.
pub fn unavailable(error: &anyhow::Error) -> Option<String> {
    error.chain().find_map(|cause| match (cause.downcast_ref(), cause.downcast_ref::<SubjectFault>()) {
        (Some(Fault::NotAvailable { needs, has }), _) => Some(format!("needs {needs}, has {has}")),
        (_, Some(fault)) if fault.needs_gpu => Some(fault.words.clone()),
        _ => None,
    })
}

/// A process that has imported the subject's adapters.
pub struct SubjectProcess {
    peer: Peer,
    limit: Duration,
    memory_bytes: u64,
    folders: Folders,
    /// The size of the inputs that it was given last.
    given_bytes: u64,
    /// Makes the names of this process's files differ from those of others in the same scratch folder.
    name: String,
    /// Whether its processes are stopped, until its next job.
    is_stopped: bool,
}

impl SubjectProcess {
    /// Starts the subject's Python, confined, and imports the adapters.
    ///
    /// Errors: [`SubjectFault`] where the Python lacks torch, or the import fails.
    pub fn start(subject: &Subject, folders: &Folders, name: &str) -> Result<Self> {
        let at_start = |error: anyhow::Error| match error.downcast::<SubjectFault>() {
            Ok(fault) => SubjectFault { at_start: true, ..fault }.into(),
            Err(error) => error,
        };
        Self::started(subject, folders, name).map_err(at_start)
    }

    fn started(subject: &Subject, folders: &Folders, name: &str) -> Result<Self> {
        require_limits(subject)?;
        let folders = folders.of_process(name)?;
        let command =
            Layout::find().and_then(|layout| confined::command(subject, &folders, &layout.root.join("suites")));
        let command = command.map_err(|error| NotGraded::while_doing("confining the subject", error))?;
        let peer = Peer::start(command, PROTOCOL, STARTING.time);
        let peer = peer.map_err(|error| starting_fault(subject, folders.has_started(), &error))?;
        let (limit, memory_bytes) = (subject.limit(), subject.memory_bytes);
        let name = name.into();
        let mut process = Self { peer, limit, memory_bytes, folders, given_bytes: 0, name, is_stopped: false };
        process.call("load", json!({}), "importing the adapters")?;
        Ok(process)
    }

    /// Joins the process group of a launch's ranks, each of which may still be starting.
    pub fn join(&mut self, collective: &Shared) -> Result<()> {
        let (rank, world_size, backend) = (collective.rank(), collective.world_size(), collective.backend());
        let device = match collective.device() {
            Device::Cuda(index) => format!("cuda:{index}"),
            _ => "cpu".into(),
        };
        let store = self.folders.scratch.join("store");
        let settings =
            json!({ "rank": rank, "world_size": world_size, "store": store, "backend": backend, "device": device });
        self.call_within(STARTING, "join", settings, "joining the process group").map(drop)
    }

    /// Whether it can take another job: false once it has died or hung.
    pub fn is_usable(&self) -> bool {
        self.peer.is_usable()
    }

    /// What the subject printed last, which is never read as a result.
    pub fn last_output(&mut self) -> String {
        self.peer.last_output()
    }

    /// The result of a job; `doing` says in messages what was called.
    ///
    /// Errors: [`SubjectFault`].
    fn call_within(&mut self, limit: Limit, job: &str, settings: Value, doing: &str) -> Result<Value> {
        let was_stopped = !std::mem::take(&mut self.is_stopped) || self.peer.go_on();
        ensure!(was_stopped, SubjectFault::new("its processes ran while others were timed"));
        self.peer.call(job, settings, limit.time).map_err(|error| {
            let in_its_folder = self.folders.require_small().and_then(|()| self.folders.require_room());
            let of_machine = || lacks_memory(&error, doing, self.memory_bytes);
            in_its_folder.err().or_else(of_machine).unwrap_or_else(|| fault(&error, doing, limit))
        })
    }

    /// Calls a job with tensors: gives what it returned and the tensors that it left. `doing` says in messages what is called.
    ///
    /// Errors: [`SubjectFault`].
    pub fn exchange(
        &mut self,
        job: &str,
        mut settings: Value,
        inputs: &[(impl AsRef<str>, &Tensor)],
        doing: &str,
    ) -> Result<(Value, BTreeMap<String, Tensor>)> {
        settings["inputs"] = self.write(inputs)?;
        self.take(job, settings, doing)
    }

    /// Calls a job with tensors that leaves none.
    pub fn give(
        &mut self,
        job: &str,
        mut settings: Value,
        inputs: &[(impl AsRef<str>, &Tensor)],
        doing: &str,
    ) -> Result<()> {
        settings["inputs"] = self.write(inputs)?;
        self.call(job, settings, doing).map(drop)
    }

    /// Calls a job without tensors that leaves some: gives what it returned and these.
    pub fn take(&mut self, job: &str, mut settings: Value, doing: &str) -> Result<(Value, BTreeMap<String, Tensor>)> {
        let left = self.folders.scratch.join(format!("{}-outputs.safetensors", self.name));
        settings["outputs"] = path(&left)?.into();
        let value = self.call(job, settings, doing)?;
        let tensors = results::read(&left, self.given_bytes);
        let tensors =
            tensors.map_err(|error| SubjectFault::new(format!("{doing} left no readable result: {error:#}")))?;
        Ok((value, tensors))
    }

    /// Stops its processes until its next job: what computes while others are timed slows these.
    ///
    /// Errors: [`SubjectFault`] where one of them runs on.
    pub fn rest(&mut self) -> Result<()> {
        self.is_stopped = true;
        ensure!(self.peer.stop(), SubjectFault::new("its processes do not stop while others are timed"));
        Ok(())
    }

    /// The result of a job without tensors.
    pub fn call(&mut self, job: &str, settings: Value, doing: &str) -> Result<Value> {
        let limit = Limit { time: self.limit, set_by: "the limit that --limit sets" };
        self.call_within(limit, job, settings, doing)
    }

    /// The file that a job reads these from.
    ///
    /// Errors: [`NotGraded`] where it cannot be written; [`SubjectFault`] where the subject has left too much.
    fn write(&mut self, inputs: &[(impl AsRef<str>, &Tensor)]) -> Result<Value> {
        self.folders.require_small()?;
        let given = self.folders.given.join("inputs.safetensors");
        let written = safetensors::write(inputs, &given);
        written.map_err(|error| NotGraded::while_doing("writing the subject's inputs", error))?;
        self.given_bytes = std::fs::metadata(&given).map_or(0, |file| file.len());
        Ok(path(&given)?.into())
    }
}

/// Errors: [`NotGraded`] where this machine lets a process write less, or compute for less time, than a subject may: the kernel
/// ends it then, and does not say why.
fn require_limits(subject: &Subject) -> Result<()> {
    if let Some(bytes) = getrlimit(Resource::Fsize).maximum.filter(|&bytes| bytes < MOST_BYTES) {
        let bytes = human_bytes(bytes);
        bail!(NotGraded(format!("a process may write files of {bytes} at most: raise that limit (`ulimit -f`)")));
    }
    let patience = subject.patience(Duration::ZERO).as_secs();
    if let Some(seconds) = getrlimit(Resource::Cpu).current.filter(|&seconds| seconds < patience) {
        let words = format!("a process may compute for {seconds} s at most: raise that limit (`ulimit -t`)");
        let remedy = Subject::longest_limit(seconds).map(|most| format!(", or lower --limit to {most}"));
        bail!(NotGraded(words + &remedy.unwrap_or_default()));
    }
    Ok(())
}

/// What a Python, its loader and libtorch say where a limit of addresses ends them.
const LACKS_MEMORY: [&str; 4] = ["MemoryError", "annot allocate memory", "failed to map segment", "bad_alloc"];

/// What went wrong before anything of the subject was imported; `has_started` says whether its Python ran. Until then a Python
/// that is not the subject's own runs our code alone.
fn starting_fault(subject: &Subject, has_started: bool, error: &anyhow::Error) -> anyhow::Error {
    const DOING: &str = "starting the subject's Python";
    let not_graded = |remedy: &str| NotGraded(format!("{DOING}: {error:#}{remedy}")).into();
    let is_its_fault = has_started && subject.has_own_python;
    let Some(PeerDied(death)) = error.downcast_ref() else {
        return if is_its_fault { fault(error, DOING, STARTING) } else { not_graded("") };
    };
    // A Python of its own that fails where ours starts is to blame, unless it says that memory ran out.
    let lacks_addresses = || {
        let ours_starts = || is_its_fault && subject.fault_of_ours().is_none();
        LACKS_MEMORY.iter().any(|words| death.last_output.contains(words)) || has_started && !ours_starts()
    };
    if let Some(bytes) = getrlimit(Resource::As).current.filter(|_| lacks_addresses()) {
        let bytes = human_bytes(bytes);
        return not_graded(&format!("; this process may have addresses for {bytes}: raise that limit (`ulimit -v`)"));
    }
    if !has_started {
        return not_graded("");
    }
    if ["can't start new thread", "Resource temporarily unavailable"].iter().any(|w| death.last_output.contains(w)) {
        return not_graded(&format!("; {MORE_PROCESSES}"));
    }
    // A copied interpreter, whose library lies where its environment alone says, which decides nothing (`own_files`).
    if death.last_output.contains("init_fs_encoding") {
        return not_graded("; it may not read its library: make .venv with links, or name a Python in PYTHON");
    }
    match subject.require_of_foreign_python("torch") {
        Err(lacks) => NotGraded(format!("{DOING}: {lacks}")).into(),
        Ok(()) if is_its_fault => subject.fault_of_ours().map_or_else(
            || fault(error, DOING, STARTING),
            |ours| not_graded(&format!("; nor does ours start: it {ours}")),
        ),
        Ok(()) => not_graded(""),
    }
}

/// The failure to have more memory where this machine allows less than the subject may have.
fn lacks_memory(error: &anyhow::Error, doing: &str, memory_bytes: u64) -> Option<anyhow::Error> {
    let allowed = getrlimit(Resource::Data).maximum.filter(|&allowed| allowed < memory_bytes)?;
    let Some(Fault::OutOfMemory { .. }) = fault_of(error) else { return None };
    let words = format!("{doing}: {}; a process may have {}", error.root_cause(), human_bytes(allowed));
    Some(NotGraded(format!("{words}: raise that limit (`ulimit -d`), or lower --memory")).into())
}

/// What went wrong in a job, for whoever reads a grade.
fn fault(error: &anyhow::Error, doing: &str, limit: Limit) -> anyhow::Error {
    if let Some(Fault::NotAvailable { needs, has }) = error.downcast_ref() {
        return match needs.as_str() {
            "a GPU" => SubjectFault::needing_gpu(has).into(),
            // A compiler, which PyTorch names.
            _ => NotGraded(format!("{doing}: {has}; install what is missing")).into(),
        };
    }
    let own = |words: &str| SubjectFault::new(format!("{doing}: {words}"));
    if let Some(PeerDied(death)) = error.downcast_ref() {
        if death.is_out_of_memory() {
            return NotGraded(format!("{doing}: its process {death}; {}", subject::MORE_MEMORY)).into();
        }
        return own(&format!("its process {death}")).into();
    }
    if let Some(NoAnswer { last_output, .. }) = error.downcast_ref() {
        let Limit { time, set_by } = limit;
        let words = format!("no answer within {} s, {set_by}{}", time.as_secs(), after(last_output));
        return SubjectFault { hangs: true, ..own(&words) }.into();
    }
    if let Some(NoReply(what)) = error.downcast_ref() {
        return own(&format!("its process {what}")).into();
    }
    if error.root_cause().is::<std::io::Error>() {
        return NotGraded(format!("{doing}: {error:#}")).into();
    }
    let root = error.root_cause().to_string();
    let is_memory = fault_of(error).is_some();
    if is_memory { own(&format!("{root} (--memory sets the limit)")) } else { SubjectFault::new(root) }.into()
}

fn path(path: &Path) -> Result<&str> {
    path.to_str().with_context(|| format!("{} is not UTF-8", shown_path(path)))
}

#[cfg(test)]
mod tests;
