//! The Python peer of `suites/peers`: the same operations under Python's PyTorch, eager and compiled.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::{Value, json};
use tch::Device;

use super::interleave::{ColumnOutcome, Laps};
use crate::harness::peer::Peer;
use crate::harness::python;
use crate::harness::samples::Samples;
use crate::harness::store::Layout;
use crate::torch;

/// The version of `suites/peers/protocol.py`.
const PROTOCOL: u64 = 1;
/// PyTorch may be imported from a cold disk.
const STARTING: Duration = Duration::from_secs(300);
/// Compiling the largest model and reading its weights take minutes. A longer job hangs.
pub const DEADLINE: Duration = Duration::from_secs(1800);

/// The peer's versions and settings, as it reports them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Software {
    protocol: u64,
    pub python: String,
    pub torch: String,
    pub triton: Option<String>,
    pub device: String,
    pub threads: u64,
    pub tf32: bool,
}

/// The compilations of one case.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Compile {
    /// Functions passed to torch.compile. Each must become one graph.
    pub functions: u64,
    pub graphs: u64,
    pub graph_breaks: u64,
    /// Graphs loaded from a cache. The cache is empty at the start, so this must be 0.
    pub cache_hits: u64,
    /// Seconds of each pass's first call, which compiles it and runs it once.
    pub first_call: BTreeMap<String, Samples>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Closed {
    counts: Option<CompileCounts>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct CompileCounts {
    functions: u64,
    graphs: u64,
    graph_breaks: u64,
    cache_hits: u64,
}

/// The result of verifying a column: its errors, and the seconds of its first calls if the peer reports them.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Verified<E> {
    pub errors: E,
    #[serde(default)]
    pub first_call_s: BTreeMap<String, f64>,
    /// The most that its allocator held in whole steps after these calls, where the peer reports it.
    #[serde(default)]
    pub peak_bytes: Option<f64>,
    /// How often torch.compile did without the CUDA graphs that its mode asks for.
    #[serde(default)]
    pub graphs_skipped: u64,
}

/// What a package's own checks refuse, in words; a fault of the peer or of the device is an error instead.
#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reply<T> {
    Accepted(T),
    Refused(String),
}

/// A package that the peer has imported.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Installed {
    pub version: String,
}

/// The errors of the columns that could be verified, by their names.
pub fn errors_of<E: Clone>(columns: [(&str, &ColumnOutcome<Verified<E>>); 2]) -> BTreeMap<String, E> {
    let errors = columns.into_iter().filter_map(|(name, column)| Some((name, column.measured()?.errors.clone())));
    errors.map(|(name, errors)| (name.to_string(), errors)).collect()
}

pub struct TorchPeer {
    peer: Peer,
    device: Device,
    pub software: Software,
}

impl TorchPeer {
    /// Starts the peers' Python from the checkout or bundle that this program runs in.
    ///
    /// Errors: [`crate::error::Fault::NotAvailable`] without a Python that has PyTorch.
    pub fn start(device: Device) -> Result<Self> {
        Self::start_with(device, std::env::var_os(python::FOLDERS))
    }

    /// As [`Self::start`], with modules from the folders of `site`, as PYTHONPATH lists them.
    pub fn start_with(device: Device, site: Option<OsString>) -> Result<Self> {
        python::require("torch")?;
        let name = match device {
            Device::Cuda(index) => format!("cuda:{index}"),
            _ => "cpu".to_string(),
        };
        let suites = Layout::find()?.root.join("suites");
        let mut command = python::command();
        command.args(python::of_peers(&suites, "measure")).arg(&name);
        command.env(python::FOLDERS, python::absolute(&site.unwrap_or_default()));
        let peer = Peer::start(command, PROTOCOL, STARTING).context("starting the Python peer")?;
        let software: Software = Deserialize::deserialize(peer.greeting()).context("the peer's greeting")?;
        let ours = torch::version();
        ensure!(
            software.torch.split('+').next() == ours.split('+').next(),
            "the peer's PyTorch is {}, this program's libtorch is {ours}: the versions must be equal",
            software.torch
        );
        ensure!(!software.tf32, "the peer uses TF32 in float32 products: unset the variable that enables it");
        Ok(Self { peer, device, software })
    }

    /// The result of a job, most often of the open case.
    pub fn job<R: DeserializeOwned>(&mut self, job: &str, settings: Value) -> Result<R> {
        self.job_within(DEADLINE, job, settings)
    }

    /// As [`Self::job`], with a limit of its own. The peer is gone after [`crate::harness::peer::NoAnswer`].
    pub fn job_within<R: DeserializeOwned>(&mut self, limit: Duration, job: &str, settings: Value) -> Result<R> {
        self.peer.call(job, settings, limit)
    }

    /// Ends the process. Later jobs are errors, and it is not kept.
    pub fn end(&mut self) {
        self.peer.end();
    }

    /// Opens a case; gives what the peer says of it.
    pub fn open(&mut self, measure: &str, mut settings: Value) -> Result<Value> {
        settings["measure"] = measure.into();
        self.peer.call("open", settings, DEADLINE)
    }

    /// Asks the peer to compute `column` from the inputs in `file` and to compare with the expected values there. `require`
    /// refuses errors beyond their tolerances.
    pub fn verify<E: DeserializeOwned>(
        &mut self,
        column: &str,
        file: &Path,
        require: impl FnOnce(&E) -> Result<()>,
    ) -> Result<ColumnOutcome<Verified<E>>> {
        self.verify_within(DEADLINE, column, file, require)
    }

    /// As [`Self::verify`], with a limit of its own. The peer is gone after [`crate::harness::peer::NoAnswer`].
    pub fn verify_within<E: DeserializeOwned>(
        &mut self,
        limit: Duration,
        column: &str,
        file: &Path,
        require: impl FnOnce(&E) -> Result<()>,
    ) -> Result<ColumnOutcome<Verified<E>>> {
        let verified = self.peer.call("verify", json!({ "column": column, "file": file }), limit);
        ColumnOutcome::of(verified)?.try_map(|verified: Verified<E>| require(&verified.errors).map(|()| verified))
    }

    pub fn turn(&mut self, column: &str, warmup: usize, iterations: usize) -> Result<Laps> {
        let settings = json!({ "column": column, "warmup": warmup, "iterations": iterations });
        self.peer.call("turn", settings, DEADLINE)
    }

    /// Ends the open case. If `first_call_s` is given, every function must have been compiled once, as one graph, and not
    /// from a cache: a fallback to eager must not count as a compiled column.
    pub fn close(&mut self, first_call_s: Option<&BTreeMap<String, f64>>) -> Result<Option<Compile>> {
        let Closed { counts } = self.peer.call("close", json!({}), DEADLINE)?;
        let (Some(counts), Some(first_call_s)) = (counts, first_call_s) else { return Ok(None) };
        let CompileCounts { functions, graphs, graph_breaks, cache_hits } = counts;
        ensure!(
            graphs == functions && graph_breaks == 0 && cache_hits == 0,
            "{functions} functions became {graphs} graphs with {graph_breaks} breaks and {cache_hits} cache hits: each \
             must become one graph, whole and from a cold cache"
        );
        let sample = |(pass, s): (&String, &f64)| Ok((pass.clone(), Samples::seconds_unbounded(vec![*s])?));
        let first_call = first_call_s.iter().map(sample).collect::<Result<_>>()?;
        Ok(Some(Compile { functions, graphs, graph_breaks, cache_hits, first_call }))
    }

    /// Whether the peer refuses a job with an unknown name and can still be used afterwards.
    pub fn refuses_unknown_jobs(&mut self) -> Result<bool> {
        let refused = self.peer.call::<Value>("dance", json!({}), DEADLINE);
        Ok(refused.is_err_and(|error| format!("{error:#}").contains("dance")) && self.peer.is_usable())
    }
}

/// One peer kept for many small cases, because starting one takes seconds.
static KEPT: Mutex<Option<TorchPeer>> = Mutex::new(None);

/// Runs `body` with the kept peer of `device`, or with a new one. A peer whose case failed is not kept.
pub fn with_kept<T>(device: Device, body: impl FnOnce(&mut TorchPeer) -> Result<T>) -> Result<T> {
    with_kept_or_why(device, |peer| body(peer?))
}

/// As [`with_kept`], for a body that goes on without a peer and records why none starts.
pub fn with_kept_or_why<T>(device: Device, body: impl FnOnce(Result<&mut TorchPeer>) -> Result<T>) -> Result<T> {
    let mut kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
    let mut peer = match kept.take().filter(|peer| peer.device == device && peer.peer.is_usable()) {
        Some(peer) => peer,
        None => match TorchPeer::start(device) {
            Ok(peer) => peer,
            Err(error) => return body(Err(error)),
        },
    };
    let value = body(Ok(&mut peer))?;
    *kept = Some(peer);
    Ok(value)
}

/// Ends the kept peer, which frees its memory.
pub fn drop_kept() {
    *KEPT.lock().unwrap_or_else(PoisonError::into_inner) = None;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::TEMPORARY_FOLDER;

    /// PyTorch's own cache has a name that other users know, and is not checked for its owner.
    #[test]
    fn a_peer_that_compiles_makes_a_cache_of_its_own() {
        let peers = crate::root::find().unwrap().join("suites/peers");
        let files = peers.read_dir().unwrap().map(|file| file.unwrap().path());
        let texts = files.filter_map(|file| Some((std::fs::read_to_string(&file).ok()?, file)));
        let compiling: Vec<_> = texts.filter(|(text, _)| text.contains("torch.compile(")).collect();
        assert!(compiling.len() >= 2, "{compiling:?}");
        for (text, file) in compiling {
            assert!(text.contains(".enter_context(empty_cache())"), "{file:?} compiles without one");
        }
    }

    /// What these lines print, with temporary files in `folder`, or the error that they end with.
    fn python(lines: &str, folder: &Path) -> String {
        let suites = crate::root::find().unwrap().join("suites");
        let mut python = python::command();
        python.args(["-B", "-c", lines]).env("PYTHONPATH", &suites).env("TMPDIR", folder).env("USER", "u");
        let output = python.env(TEMPORARY_FOLDER, folder.join("worker")).output().unwrap();
        [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned()).concat()
    }

    #[test]
    fn compiled_code_of_a_peer_lies_in_the_folder_that_its_worker_removes() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("worker")).unwrap();
        let lines = "import os; from peers.compiled import empty_cache\nwith empty_cache(): \
                     print(os.environ['TORCHINDUCTOR_CACHE_DIR'])";
        let said = python(lines, folder.path());
        assert!(Path::new(said.trim()).starts_with(folder.path().join("worker")), "{said}");
    }

    #[test]
    fn compiled_headers_of_another_user_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let ask = || python("from peers.compiled import require_own_headers; require_own_headers()", folder.path());
        assert_eq!(ask(), "");
        let kept = folder.path().read_dir().unwrap().next().unwrap().unwrap().path();
        std::fs::rename(&kept, folder.path().join("theirs")).unwrap();
        std::os::unix::fs::symlink("theirs", &kept).unwrap();
        assert!(ask().contains("set TMPDIR to a folder of yours"), "{}", ask());
    }
}
