//! `cs336 grade --subject DIR --install`: an environment of the subject's own, `DIR/.venv`, from its pyproject.toml.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use serde::Deserialize;

use super::{interrupted, watch_for_interrupt};
use crate::harness::python;
use crate::printable::{one_line, shown_path};
use crate::process::{self, Answer, ChildProcess, after, program};
use crate::root::read_text;

/// PyTorch and what it needs are gigabytes.
const LIMIT: Duration = Duration::from_secs(3600);
const PROJECT: &str = "pyproject.toml";

/// Makes the environment with uv, or where there is no uv, with venv and pip. What the subject's build does is not confined.
///
/// An environment that is there is kept, and what it has beside the project. One that was not is removed again where a
/// command fails, and so is the lock file of uv: neither is left half made.
///
/// Errors: no pyproject.toml, or one that is wrong; a command that fails, with its last words, which name the package.
pub fn install(folder: &Path) -> Result<()> {
    let shown = shown_path(folder);
    let project = folder.join(PROJECT);
    ensure!(project.exists(), "{shown} has no pyproject.toml, so --install cannot tell what it needs");
    ensure!(
        project.is_file(),
        "{} is not a regular file, so --install cannot tell what it needs",
        shown_path(&project)
    );
    watch_for_interrupt();
    let made = [".venv", "uv.lock"].map(|name| folder.join(name));
    let made: Vec<PathBuf> = made.into_iter().filter(|path| path.symlink_metadata().is_err()).collect();
    let installed = if has_uv() { install_with_uv(folder) } else { install_with_pip(folder) };
    installed.inspect_err(|_| made.iter().for_each(|path| remove(path)))
}

/// Whether there is a uv that runs: a shim may have the name and nothing behind it.
fn has_uv() -> bool {
    let mut uv = program("uv");
    uv.arg("--version");
    let started = ChildProcess::start(uv).map(|mut uv| uv.receive(python::LIMIT, &interrupted));
    matches!(started, Ok(Answer::Died(death)) if death.is_success())
}

fn install_with_uv(folder: &Path) -> Result<()> {
    let mut uv = program("uv");
    // An environment that this program runs in is not the subject's.
    uv.env("UV_PROJECT_ENVIRONMENT", ".venv").env_remove("VIRTUAL_ENV");
    uv.args(["sync", "--inexact", "--no-progress"]);
    run(uv, folder)
}

fn install_with_pip(folder: &Path) -> Result<()> {
    let wanted = wanted(folder)?;
    let mut venv = python::command();
    venv.args(["-m", "venv", ".venv"]);
    run(venv, folder)?;
    if wanted.is_empty() {
        return Ok(());
    }
    let mut pip = Command::new(std::path::absolute(folder)?.join(".venv/bin/python"));
    pip.args(["-m", "pip", "install", "--progress-bar", "off"]).args(wanted);
    run(pip, folder)
}

#[derive(Deserialize)]
struct PyProject {
    #[serde(rename = "build-system")]
    build_system: Option<toml::Value>,
    project: Option<Project>,
}

#[derive(Deserialize)]
struct Project {
    #[serde(default)]
    dependencies: Vec<String>,
}

/// What pip installs in one command, so that the projects find each other: pip reads no sources of uv's. As for uv, a project
/// without a build system is not built: what it depends on is enough, since the subject's folder is on Python's path.
fn wanted(folder: &Path) -> Result<Vec<OsString>> {
    let mut wanted = Vec::new();
    for project in projects(folder) {
        let file = project.join(PROJECT);
        let shown = shown_path(&file);
        let text = read_text(&file).with_context(|| format!("reading {shown}"))?;
        let read: PyProject = toml::from_str(&text).with_context(|| format!("--install cannot read {shown}"))?;
        match (read.build_system, read.project) {
            (Some(_), _) => wanted.extend(["--editable".into(), std::path::absolute(project)?.into_os_string()]),
            (None, Some(project)) => wanted.extend(project.dependencies.into_iter().map(OsString::from)),
            (None, None) => {}
        }
    }
    Ok(wanted)
}

/// The folder's own project and those directly below it.
fn projects(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten();
    let below = entries.filter_map(|entry| Some(entry.ok()?.path()));
    let mut found: Vec<PathBuf> = below.filter(|path| path.join(PROJECT).is_file()).collect();
    found.sort();
    found.push(folder.to_path_buf());
    found
}

/// Runs `command` in `folder`, with its output kept for the error.
fn run(mut command: Command, folder: &Path) -> Result<()> {
    let words = [command.get_program()].into_iter().chain(command.get_args()).map(OsStr::to_string_lossy);
    let shown = one_line(&words.collect::<Vec<_>>().join(" "));
    let failed = format!("--install failed: `{shown}` in {}", shown_path(folder));
    eprintln!("running `{shown}` in {}; it may take minutes", shown_path(folder));
    command.current_dir(folder);
    match ChildProcess::start(command).with_context(|| failed.clone())?.receive(LIMIT, &interrupted) {
        Answer::Died(death) if death.is_success() => Ok(()),
        Answer::Died(death) => bail!("{failed} {death}"),
        Answer::TimedOut { last_output } => {
            bail!("{failed} has no end in {} s{}", LIMIT.as_secs(), after(&last_output))
        }
        Answer::Interrupted => bail!("{failed} was interrupted"),
        Answer::Line(_) => bail!("{failed} wrote to its standard input"),
    }
}

/// Best effort: the error that led here counts more.
fn remove(path: &Path) {
    // A link is removed and not followed.
    if std::fs::remove_file(path).is_err() && !path.is_symlink() {
        process::remove(path);
    }
}
