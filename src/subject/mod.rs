//! Somebody else's adapters in a confined Python process of their own: they get inputs and give results, and what is
//! expected of a result never enters their process.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use rustix::fs::OFlags;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tch::{Device, Tensor};

use crate::collective::Shared;
use crate::error::{Fault, NotGraded, fault_of};
use crate::harness::peer::{NoAnswer, Peer, PeerDied};
use crate::harness::store::Layout;
use crate::harness::subject::{self, Subject};
use crate::printable::shown_path;
use crate::process::after;

pub mod attention;
mod confined;
pub mod rank;
pub mod steps;
pub mod timed;

pub use confined::require_hidden;

/// The version of `suites/peers/protocol.py`.
const PROTOCOL: u64 = 1;
const STARTING: Limit = Limit { time: subject::STARTING, set_by: "the limit for starting" };

/// The most bytes of one file that the subject writes, and of all that it leaves: a model's values and compiled code fit.
const MOST_BYTES: u64 = 4 << 30;
/// The most files and folders that it leaves.
const MOST_FILES: usize = 200_000;
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

/// The folders of a subject's processes. It may not write into the one that we write to, or it could lead our writing astray.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Folders {
    given: PathBuf,
    scratch: PathBuf,
}

impl Folders {
    /// Makes both in `folder`.
    pub fn make(folder: &Path) -> Result<Self> {
        let made = Self { given: folder.join("given"), scratch: folder.join("scratch") };
        for folder in [&made.given, &made.scratch] {
            let making = || format!("making {}", shown_path(folder));
            std::fs::create_dir(folder).map_err(|error| NotGraded::while_doing(&making(), error))?;
        }
        Ok(made)
    }

    /// Errors: [`SubjectFault`] where the subject has left more than it may. What it writes within one call is bounded for
    /// each file alone.
    fn require_small(&self, most_bytes: u64, most_files: usize) -> Result<()> {
        let (mut bytes, mut files, mut folders) = (0, 0, vec![self.scratch.clone()]);
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
                let Ok(found) = entry.metadata() else { continue };
                files += 1;
                bytes += if found.is_file() { found.len() } else { 0 };
                folders.extend(found.is_dir().then(|| entry.path()));
                let words = || {
                    let (most, gib) = (most_files, most_bytes >> 30);
                    format!("the subject leaves more than {gib} GiB or {most} files in its scratch folder, its HOME")
                };
                ensure!(bytes <= most_bytes && files <= most_files, SubjectFault::new(words()));
            }
        }
        Ok(())
    }

    /// Errors: [`NotGraded`] where nobody can write to their disk, so that a failed call is no fault of the subject.
    fn require_room(&self) -> Result<()> {
        let probe = self.given.join("probe");
        std::fs::write(&probe, [1; 1 << 16]).map_err(|error| NotGraded::while_doing(&shown_path(&probe), error))?;
        Ok(std::fs::remove_file(probe)?)
    }
}

/// A process that has imported the subject's adapters.
pub struct SubjectProcess {
    peer: Peer,
    limit: Duration,
    folders: Folders,
    /// Makes the names of this process's files differ from those of others in the same folders.
    name: String,
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
        let command =
            Layout::find().and_then(|layout| confined::command(subject, folders, &layout.root.join("suites")));
        let command = command.map_err(|error| NotGraded::while_doing("confining the subject", error))?;
        let peer = Peer::start(command, PROTOCOL, STARTING.time);
        let peer = peer.map_err(|error| fault(&error, "starting the subject's Python", STARTING))?;
        let mut process = Self { peer, limit: subject.limit(), folders: folders.clone(), name: name.into() };
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
        self.peer.call(job, settings, limit.time).map_err(|error| {
            let in_its_folder =
                self.folders.require_small(MOST_BYTES, MOST_FILES).and_then(|()| self.folders.require_room());
            in_its_folder.err().unwrap_or_else(|| fault(&error, doing, limit))
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
        let tensors =
            read(&left).map_err(|error| SubjectFault::new(format!("{doing} left no readable result: {error:#}")))?;
        Ok((value, tensors))
    }

    /// The result of a job without tensors.
    pub fn call(&mut self, job: &str, settings: Value, doing: &str) -> Result<Value> {
        let limit = Limit { time: self.limit, set_by: "the limit that --limit sets" };
        self.call_within(limit, job, settings, doing)
    }

    /// The file that a job reads these from.
    ///
    /// Errors: [`NotGraded`] where it cannot be written; [`SubjectFault`] where the subject has left too much.
    fn write(&self, inputs: &[(impl AsRef<str>, &Tensor)]) -> Result<Value> {
        self.folders.require_small(MOST_BYTES, MOST_FILES)?;
        let given = self.folders.given.join(format!("{}-inputs.safetensors", self.name));
        let inputs: Vec<_> = inputs.iter().map(|(name, t)| (name.as_ref(), t.detach().contiguous())).collect();
        let written = Tensor::write_safetensors(&inputs, &given);
        written.map_err(|error| NotGraded::while_doing("writing the subject's inputs", error))?;
        Ok(path(&given)?.into())
    }
}

/// The tensors of a file that the subject wrote, which must not be a link: it could lead to a file that only we may read.
fn read(file: &Path) -> Result<BTreeMap<String, Tensor>> {
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let open = File::options().read(true).custom_flags(flags.bits() as i32).open(file)?;
    ensure!(open.metadata()?.is_file(), "it is not a regular file");
    let tensors = Tensor::read_safetensors(format!("/proc/self/fd/{}", open.as_raw_fd()))?;
    // A later job that writes nothing must not seem to have left this one's.
    std::fs::remove_file(file)?;
    Ok(tensors.into_iter().collect())
}

/// What went wrong in a job, for whoever reads a grade.
fn fault(error: &anyhow::Error, doing: &str, limit: Limit) -> anyhow::Error {
    if let Some(Fault::NotAvailable { has, .. }) = error.downcast_ref() {
        return SubjectFault { needs_gpu: true, ..SubjectFault::new(format!("needs a GPU: {has}")) }.into();
    }
    let own = |words: &str| SubjectFault::new(format!("{doing}: {words}"));
    if let Some(PeerDied(death)) = error.downcast_ref() {
        return own(&format!("its process {death}")).into();
    }
    if let Some(NoAnswer { last_output, .. }) = error.downcast_ref() {
        let Limit { time, set_by } = limit;
        let words = format!("no answer within {} s, {set_by}{}", time.as_secs(), after(last_output));
        return SubjectFault { hangs: true, ..own(&words) }.into();
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
