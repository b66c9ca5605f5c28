//! `cs336 official DIR`: the official tests of a checkout against the installed wheel, whose own command this starts.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};

use super::{Ended, interrupted, watch_for_interrupt};
use crate::harness::manifest::is_bundle;
use crate::harness::python;
use crate::harness::store::Layout;
use crate::harness::subject::PYTHON;
use crate::printable::shown_path;
use crate::process::{Answer, Cause, ChildProcess, LockedFolder, TEMPORARY_FOLDER};
use crate::root::require_own_environment;

/// The environment into which `make wheel` installs what it has packed.
const ENVIRONMENT: &str = "target/wheel/environment";

#[derive(clap::Args)]
pub struct Arguments {
    /// A checkout of the assignment, which holds tests/
    #[arg(value_name = "DIR")]
    folder: PathBuf,
    /// Arguments of pytest, after --
    #[arg(last = true)]
    pytest: Vec<std::ffi::OsString>,
}

/// Runs `python -m cs336 official DIR` of `$PYTHON`, else of the environment that `make wheel` leaves. An interrupt ends it
/// with all that it started, and the copy of the tests is removed however it ends.
///
/// Errors: that Python does not exist, or lacks the wheel, or was ended by a signal; another user can write to that environment.
pub fn run(layout: &Layout, arguments: &Arguments) -> Result<Ended> {
    let named = std::env::var_os(PYTHON).filter(|name| !name.is_empty()).map(PathBuf::from);
    let interpreter = match named {
        Some(interpreter) => interpreter,
        None => {
            require_own_environment(&layout.root, ENVIRONMENT)?;
            layout.root.join(ENVIRONMENT).join("bin/python")
        }
    };
    let shown = shown_path(&interpreter);
    let remedy = remedy(&layout.root);
    watch_for_interrupt();
    let asked = python::run(&interpreter, &["-c", "import cs336.adapters"], python::LIMIT, &interrupted);
    if interrupted() {
        return Ok(Ended::Interrupted);
    }
    let asked = asked.with_context(|| format!("the wheel is not installed: {remedy}"))?;
    ensure!(asked.is_success(), "{shown} cannot import the wheel's cs336: {remedy}; it {asked}");
    let folder = LockedFolder::new("official").context("making a folder for a copy of the tests")?;
    let mut command = python::command_of(&interpreter);
    command.args(["-m", "cs336", "official"]).arg(&arguments.folder).arg("--").args(&arguments.pytest);
    command.env(TEMPORARY_FOLDER, folder.path());
    let mut tests = ChildProcess::start_shown(command)?;
    match tests.receive(Duration::MAX, &interrupted) {
        Answer::Interrupted => Ok(Ended::Interrupted),
        Answer::Died(death) if death.is_success() => Ok(Ended::Well),
        // It has said why.
        Answer::Died(death) if matches!(death.cause, Cause::Exited { status, .. } if status.code().is_some()) => {
            Ok(Ended::WithFindings)
        }
        Answer::Died(death) => bail!("{shown}, which runs the tests, {death}"),
        Answer::Line(_) | Answer::TimedOut { .. } => bail!("{shown} wrote to its standard input"),
    }
}

/// Where a wheel comes from: a bundle holds no sources to pack one from.
fn remedy(root: &Path) -> &'static str {
    match is_bundle(root) {
        true => "install cs336-*.whl, which `make wheel` packs in a checkout, and name that Python in PYTHON",
        false => "run `make wheel`, or install dist/cs336-*.whl elsewhere and name that Python in PYTHON",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::manifest::MANIFEST;

    #[test]
    fn a_bundle_is_told_of_the_wheel_that_a_checkout_packs() {
        let root = tempfile::tempdir().unwrap();
        assert!(remedy(root.path()).starts_with("run `make wheel`"));
        std::fs::write(root.path().join(MANIFEST), "{}").unwrap();
        assert!(remedy(root.path()).starts_with("install cs336-*.whl, which `make wheel` packs in a checkout"));
    }
}
