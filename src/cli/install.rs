//! `cs336 grade --subject DIR --install`: an environment of the subject's own, `DIR/.venv`, from its pyproject.toml.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, ensure};

use crate::harness::python;
use crate::printable::shown_path;

/// Makes the environment with uv, or where there is no uv, with venv and pip. What the subject's build does is not confined.
pub fn install(folder: &Path) -> Result<()> {
    let shown = shown_path(folder);
    ensure!(
        folder.join("pyproject.toml").is_file(),
        "{shown} has no pyproject.toml, so --install cannot tell what it needs"
    );
    if Command::new("uv").arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok() {
        return run(Command::new("uv").arg("sync").current_dir(folder));
    }
    let environment = folder.join(".venv");
    run(python::command().args([OsStr::new("-m"), OsStr::new("venv"), environment.as_os_str()]))?;
    let mut pip = Command::new(environment.join("bin/python"));
    pip.args(["-m", "pip", "install"]).current_dir(folder);
    // Of one command, so that the projects find each other: pip reads no sources of uv's.
    for project in projects(folder) {
        pip.arg("--editable").arg(project);
    }
    run(&mut pip)
}

/// The folder's own project and those directly below it.
fn projects(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten();
    let below = entries.filter_map(|entry| Some(entry.ok()?.path()));
    let mut found: Vec<PathBuf> = below.filter(|path| path.join("pyproject.toml").is_file()).collect();
    found.sort();
    found.push(folder.to_path_buf());
    found
}

fn run(command: &mut Command) -> Result<()> {
    let shown = format!("{command:?}");
    // Standard output is for the grades.
    let status = command.stdout(std::io::stderr()).status().with_context(|| format!("running {shown}"))?;
    ensure!(status.success(), "--install failed: {shown} ended with {status}");
    Ok(())
}
