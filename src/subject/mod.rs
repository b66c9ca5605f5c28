//! Somebody else's adapters in a confined Python process of their own: they get inputs and give results, and what is
//! expected of a result never enters their process.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use rustix::fs::OFlags;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tch::{Device, Tensor};

use crate::collective::Shared;
use crate::error::{Fault, fault_of};
use crate::harness::peer::{NoAnswer, Peer, PeerDied};
use crate::harness::python;
use crate::harness::store::Layout;
use crate::harness::subject::{Subject, prefixes};
use crate::harness::worker::THIS_PROGRAM;
use crate::printable::shown_path;
use crate::process::after;
use crate::process::confinement::{Confinement, paths};

pub mod attention;
pub mod rank;
pub mod steps;
pub mod timed;

/// The version of `suites/peers/protocol.py`.
const PROTOCOL: u64 = 1;
/// PyTorch and the subject's packages may be imported from a cold disk.
const STARTING: Duration = Duration::from_secs(300);

/// What programs and their libraries need of a Linux system.
const SYSTEM: &[&str] = &[
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/opt",
    "/nix/store",
    "/proc",
    "/sys",
    "/etc/alternatives",
    "/etc/group",
    "/etc/host.conf",
    "/etc/hosts",
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/etc/nsswitch.conf",
    "/etc/passwd",
    "/etc/resolv.conf",
    "/dev/random",
    "/dev/urandom",
    "/dev/zero",
];
/// Devices that programs write to; those of GPUs follow.
const DEVICES: &[&str] = &["/dev/null", "/dev/full", "/dev/nvidia-caps", "/dev/dri", "/dev/kfd"];

/// The variables that a subject inherits: no token or path of the user's is among them.
const INHERITED: &[&str] = &[
    "PATH",
    "LANG",
    "LC_ALL",
    "TZ",
    "USER",
    "LD_LIBRARY_PATH",
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "TORCHDYNAMO_DISABLE",
    "TRITON_INTERPRET",
];

/// What a subject did wrong other than a wrong value, as a sentence.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, thiserror::Error)]
#[error("{words}")]
pub struct SubjectFault {
    words: String,
    /// Whether a call had no end within its limit.
    pub hangs: bool,
}

impl SubjectFault {
    pub fn new(words: impl Into<String>) -> Self {
        Self { words: words.into(), hangs: false }
    }
}

/// The words of the subject's own fault in `error`, else of the whole error.
pub fn words_of(error: &anyhow::Error) -> String {
    let own = error.chain().find_map(|cause| cause.downcast_ref::<SubjectFault>());
    own.map_or_else(|| format!("{error:#}"), ToString::to_string)
}

/// Why the subject could not be run on this machine, if that is what `error` is about.
pub fn unavailable(error: &anyhow::Error) -> Option<String> {
    error.chain().find_map(|cause| match cause.downcast_ref() {
        Some(Fault::NotAvailable { needs, has }) => Some(format!("needs {needs}: {has}")),
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
            std::fs::create_dir(folder).with_context(|| format!("making {}", shown_path(folder)))?;
        }
        Ok(made)
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
        let suites = Layout::find()?.root.join("suites");
        let command = command(subject, folders, &suites)?;
        let peer = Peer::start(command, PROTOCOL, STARTING);
        let peer = peer.map_err(|error| fault(&error, "starting the subject's Python", STARTING))?;
        let mut process = Self { peer, limit: subject.limit(), folders: folders.clone(), name: name.into() };
        process.call_within(STARTING, "load", json!({}), "importing the adapters")?;
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
    fn call_within(&mut self, limit: Duration, job: &str, settings: Value, doing: &str) -> Result<Value> {
        self.peer.call(job, settings, limit).map_err(|error| fault(&error, doing, limit))
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
        self.call_within(self.limit, job, settings, doing)
    }

    /// The file that a job reads these from.
    fn write(&self, inputs: &[(impl AsRef<str>, &Tensor)]) -> Result<Value> {
        let given = self.folders.given.join(format!("{}-inputs.safetensors", self.name));
        let inputs: Vec<_> = inputs.iter().map(|(name, t)| (name.as_ref(), t.detach().contiguous())).collect();
        Tensor::write_safetensors(&inputs, &given).context("writing the subject's inputs")?;
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
fn fault(error: &anyhow::Error, doing: &str, limit: Duration) -> anyhow::Error {
    if let Some(Fault::NotAvailable { has, .. }) = error.downcast_ref() {
        return Fault::NotAvailable { needs: "a GPU".into(), has: has.clone() }.into();
    }
    let own = |words: &str| SubjectFault::new(format!("{doing}: {words}"));
    if let Some(PeerDied(death)) = error.downcast_ref() {
        return own(&format!("its process {death}")).into();
    }
    if let Some(NoAnswer { last_output, .. }) = error.downcast_ref() {
        let seconds = limit.as_secs();
        let words = format!("no answer within {seconds} s, the limit that --limit sets{}", after(last_output));
        return SubjectFault { hangs: true, ..own(&words) }.into();
    }
    let root = error.root_cause().to_string();
    let is_memory = fault_of(error).is_some();
    if is_memory { own(&format!("{root} (--memory sets the limit)")) } else { SubjectFault::new(root) }.into()
}

/// `cs336 confine .. python -B -m peers.subject FOLDER`.
fn command(subject: &Subject, folders: &Folders, suites: &Path) -> Result<Command> {
    let before = std::env::var_os(python::FOLDERS);
    let modules: Vec<PathBuf> = before.iter().flat_map(|folders| python::named(folders)).collect();
    let system = SYSTEM.iter().map(PathBuf::from);
    let own = [suites.join("peers"), subject.folder.clone(), folders.given.clone()];
    let mut confinement = Confinement {
        read: paths(system.chain(prefixes(&subject.python)).chain(modules).chain(own)),
        list: paths([suites.to_path_buf()]),
        write: paths(DEVICES.iter().map(PathBuf::from).chain(gpus()).chain([folders.scratch.clone()])),
        memory_bytes: Some(subject.memory_bytes),
        without: Vec::new(),
    };
    if subject.python != python::interpreter() {
        // A bundle lists our libtorch there, which another PyTorch must not load.
        confinement.without.push("LD_LIBRARY_PATH".into());
    }
    let mut command = confinement.command(THIS_PROGRAM, &subject.python)?;
    command.args(["-B", "-m", "peers.subject", path(&subject.folder)?]);
    command.env_clear().envs(INHERITED.iter().filter_map(|name| Some((name, std::env::var_os(name)?))));
    command.env(python::FOLDERS, python::path_to_peers(suites, before)?).env("PYTHONSAFEPATH", "1");
    command.env("HOME", &folders.scratch).env("TMPDIR", &folders.scratch).current_dir(&folders.scratch);
    command.env("GLOO_SOCKET_IFNAME", "lo");
    if !tch::Cuda::is_available() {
        command.env("TRITON_INTERPRET", "1");
    }
    Ok(command)
}

/// The device files of GPUs.
fn gpus() -> impl Iterator<Item = PathBuf> {
    let entries = std::fs::read_dir("/dev").into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path()));
    entries.filter(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("nvidia")))
}

fn path(path: &Path) -> Result<&str> {
    path.to_str().with_context(|| format!("{} is not UTF-8", shown_path(path)))
}
