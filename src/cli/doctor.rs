//! `cs336 doctor`: what this machine has, what it can run, and what is missing.

use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use serde::Serialize;

use super::{Ended, interrupted, watch_for_interrupt};
use crate::bench::{machine, nvml};
use crate::cuda;
use crate::harness::manifest::Manifest;
use crate::harness::provenance::{available_memory_bytes, machine};
use crate::harness::python;
use crate::harness::record::Gpu;
use crate::harness::store::Layout;
use crate::printable::{indented, shown_path};
use crate::process::{LEAST_ROOM, LockedFolder, output_within, program, room};
use crate::root::installing;
use crate::units::human_bytes;

pub mod ranks;

/// One requirement: whether it is met, and what does not work without it.
#[derive(Serialize)]
struct Requirement {
    name: &'static str,
    ok: bool,
    /// Whether the program cannot work at all without it.
    required: bool,
    detail: String,
}

pub fn run(as_json: bool) -> Result<Ended> {
    watch_for_interrupt();
    let findings = examine()?;
    if interrupted() {
        return Ok(Ended::Interrupted);
    }
    if as_json {
        println!("{}", serde_json::to_string_pretty(&findings)?);
    } else {
        for finding in &findings {
            let mark = match (finding.ok, finding.required) {
                (true, _) => "ok",
                (false, true) => "MISSING",
                (false, false) => "absent",
            };
            println!("{mark:<8} {:<12} {}", finding.name, indented(&finding.detail, 22));
        }
    }
    let broken = findings.iter().any(|f| f.required && !f.ok);
    Ok(if broken { Ended::WithFindings } else { Ended::Well })
}

fn examine() -> Result<Vec<Requirement>> {
    let gpus = machine::gpus()?;
    let here = machine(&gpus)?;
    let finding = |name, ok, required, detail| Requirement { name, ok, required, detail };
    let torch = crate::torch::version();
    let is_known = torch.starts_with("2.11.0");
    let remedy = if is_known { String::new() } else { format!("; it must be 2.11.0: {}, or set PYTHON", installing()) };
    let describe = |g: &Gpu| format!("{} ({}, sm {})", g.name, human_bytes(g.memory_bytes), g.compute_capability);
    let gpu_detail = match gpus.as_slice() {
        [] => "no CUDA device: the cpu profile runs here, gpu cases are recorded as not run".to_string(),
        gpus => gpus.iter().map(describe).collect::<Vec<_>>().join("; "),
    };
    let memory =
        format!("{}, {} of it available", human_bytes(here.memory_bytes), human_bytes(available_memory_bytes()?));
    Ok(vec![
        finding("cpu", true, true, format!("{}, {} cores", here.cpu, here.cores)),
        finding("memory", true, true, memory),
        finding("libtorch", is_known, true, format!("{torch}{remedy}")),
        finding("gpu", !gpus.is_empty(), false, gpu_detail),
        part("nvml", nvml::describe(), "without it, clocks, power and throttling are not recorded"),
        part(
            "nvrtc",
            cuda::compiler_version(),
            "without it, kernels are not compiled, and cases that need them are not run",
        ),
        part("kernel cache", cuda::kernel_cache(), "each process compiles the kernels that are not in it"),
        part(
            "temporary",
            temporary(),
            "workers, ranks, subjects and Python's PyTorch keep files there, and can fail without them",
        ),
        part("peers", peers(), "without it, comparisons with Python's PyTorch are not run"),
        part(
            "git",
            git(),
            "it names the commit in every record; without it records count as dirty and are not accepted",
        ),
        match tree() {
            Ok(root) => finding("tree", true, true, root),
            Err(error) => finding("tree", false, true, format!("{error:#}")),
        },
    ])
}

/// The checkout or bundle. Errors: there is none; a bundle whose files are not those that were packed.
fn tree() -> Result<String> {
    const SHOWN: usize = 3;
    let root = Layout::find()?.root;
    let shown = shown_path(&root);
    let Some(manifest) = Manifest::read(&root)? else { return Ok(shown) };
    let modified = manifest.modified(&root, Path::new("/proc/self/exe"))?;
    let names = modified[..modified.len().min(SHOWN)].join(", ");
    let more = if modified.len() > SHOWN { ", .." } else { "" };
    ensure!(modified.is_empty(), "{shown} has other files than the bundle ({names}{more}): unpack the bundle again");
    Ok(shown)
}

/// Shows the description of a working part, or why it does not work and what is lost without it.
fn part(name: &'static str, described: Result<String>, otherwise: &str) -> Requirement {
    let ok = described.is_ok();
    let detail = described.unwrap_or_else(|error| format!("{error:#}; {otherwise}"));
    Requirement { name, ok, required: false, detail }
}

/// The folder for temporary files and its room. Errors: nothing can be written there; it has less than [`LEAST_ROOM`].
fn temporary() -> Result<String> {
    let folder = LockedFolder::new("doctor")?;
    let shown = shown_path(folder.path().parent().unwrap_or(folder.path()));
    let room = room(folder.path())?;
    if room == u64::MAX {
        return Ok(shown);
    }
    let has_room = format!("{shown} has room for {}", human_bytes(room));
    ensure!(room >= LEAST_ROOM, "{has_room}; set TMPDIR to a folder with more");
    Ok(has_room)
}

/// The interpreter that runs `suites/peers`, with its versions of PyTorch and Triton. Imports no large module.
fn peers() -> Result<String> {
    const ASK: &str = "import platform, importlib.metadata as m\n\
        print('Python', platform.python_version(), 'with torch', m.version('torch'))\n\
        try: print('and triton', m.version('triton'))\n\
        except m.PackageNotFoundError: print('and no triton: torch.compile has no GPU code')";
    let python = python::interpreter();
    let death = python::run(&python, &["-c", ASK], python::LIMIT, &interrupted).context("there is only")?;
    let said = death.last_output.lines();
    ensure!(
        death.is_success() && death.last_output.starts_with("Python "),
        "{} has no PyTorch ({} {})",
        shown_path(&python),
        death.cause,
        said.last().unwrap_or_default()
    );
    Ok(said.collect::<Vec<_>>().join(" "))
}

fn git() -> Result<String> {
    let version = output_within(program("git").arg("--version"), python::LIMIT, &interrupted);
    let version = version.context("git does not run")?;
    ensure!(version.status.success(), "git does not run: it ended with {}", version.status);
    Ok(String::from_utf8_lossy(&version.stdout).trim().to_string())
}
