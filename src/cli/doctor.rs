//! `cs336 doctor`: what this machine has, what it can run, and what is missing.

use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use serde_json::json;

use super::Ended;
use crate::bench::{machine, nvml};
use crate::cuda;
use crate::harness::provenance::{available_memory_bytes, machine};
use crate::harness::python;
use crate::harness::store::Layout;
use crate::units::human_bytes;

/// One requirement: whether it is met, and what does not work without it.
struct Requirement {
    name: &'static str,
    well: bool,
    /// Whether the program cannot work at all without it.
    required: bool,
    detail: String,
}

pub fn run(as_json: bool) -> Result<Ended> {
    let findings = examine()?;
    if as_json {
        let list: Vec<_> = findings
            .iter()
            .map(|f| json!({"name": f.name, "ok": f.well, "required": f.required, "detail": f.detail}))
            .collect();
        println!("{}", serde_json::to_string_pretty(&list)?);
    } else {
        for finding in &findings {
            let mark = match (finding.well, finding.required) {
                (true, _) => "ok",
                (false, true) => "MISSING",
                (false, false) => "absent",
            };
            println!("{mark:<8} {:<12} {}", finding.name, finding.detail);
        }
    }
    let broken = findings.iter().any(|f| f.required && !f.well);
    Ok(if broken { Ended::WithFindings } else { Ended::Well })
}

fn examine() -> Result<Vec<Requirement>> {
    let gpus = machine::gpus()?;
    let here = machine(&gpus)?;
    let finding = |name, well, required, detail| Requirement { name, well, required, detail };
    let torch = crate::torch::version();
    let tree = Layout::find();
    let names: Vec<String> = gpus
        .iter()
        .map(|g| format!("{} ({}, sm {})", g.name, human_bytes(g.memory_bytes), g.compute_capability))
        .collect();
    let gpu_detail = match names.len() {
        0 => "no CUDA device: the cpu profile runs here, gpu cases are recorded as not run".to_string(),
        _ => names.join("; "),
    };
    let memory =
        format!("{}, {} of it available", human_bytes(here.memory_bytes), human_bytes(available_memory_bytes()?));
    Ok(vec![
        finding("cpu", true, true, format!("{}, {} cores", here.cpu, here.cores)),
        finding("memory", true, true, memory),
        finding(
            "libtorch",
            torch.starts_with("2.11.0"),
            true,
            format!("{torch} (2.11.0 is needed; `make setup` installs it)"),
        ),
        finding("gpu", !gpus.is_empty(), false, gpu_detail),
        part("nvml", nvml::describe(), "without it, clocks, power and throttling are not recorded"),
        part(
            "nvrtc",
            cuda::compiler_version(),
            "without it, kernels are not compiled, and cases that need them are not run",
        ),
        part("peers", peers(), "without it, comparisons with Python's PyTorch are not run"),
        tool("git", "git", "names the commit in every record; without it records count as dirty and are not accepted"),
        match tree {
            Ok(layout) => finding("tree", true, true, layout.root.display().to_string()),
            Err(error) => finding("tree", false, true, format!("{error:#}")),
        },
    ])
}

/// Shows the description of a working part, or why it does not work and what is lost without it.
fn part(name: &'static str, described: Result<String>, otherwise: &str) -> Requirement {
    let well = described.is_ok();
    let detail = described.unwrap_or_else(|error| format!("{error:#}; {otherwise}"));
    Requirement { name, well, required: false, detail }
}

/// The interpreter that runs `suites/peers`, with its versions of PyTorch and Triton. Imports no large module.
fn peers() -> Result<String> {
    const ASK: &str = "import platform, importlib.metadata as m\n\
        print('Python', platform.python_version(), 'with torch', m.version('torch'))\n\
        try: print('and triton', m.version('triton'))\n\
        except m.PackageNotFoundError: print('and no triton: torch.compile has no GPU code')";
    let interpreter = python::interpreter();
    let shown = interpreter.display().to_string();
    let output =
        Command::new(&interpreter).args(["-c", ASK]).output().with_context(|| format!("{shown} does not run"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{shown} has no PyTorch ({})", said.lines().last().unwrap_or_default());
    Ok(String::from_utf8_lossy(&output.stdout).lines().collect::<Vec<_>>().join(" "))
}

fn tool(name: &'static str, program: &str, purpose: &str) -> Requirement {
    let version = Command::new(program).arg("--version").output().ok().filter(|o| o.status.success());
    let detail = match &version {
        Some(output) => String::from_utf8_lossy(&output.stdout).trim().to_string(),
        None => format!("{program} is not on the path; it {purpose}"),
    };
    Requirement { name, well: version.is_some(), required: false, detail }
}
