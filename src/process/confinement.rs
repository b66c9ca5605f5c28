//! Confines a program: what it may read, where it may write, how much memory it may have, and whom it may signal.
//!
//! Landlock (landlock(7)) holds for the program and all its descendants and cannot be undone. This program confines itself
//! as `cs336 confine` and then executes the other one, so that nothing of that one runs before.

use std::ffi::OsString;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::printable::shown_path;
use anyhow::{Context as _, Result};
use landlock::{
    ABI, Access as _, AccessFs, Ruleset, RulesetAttr as _, RulesetCreatedAttr as _, RulesetStatus, Scope,
    path_beneath_rules,
};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde::{Deserialize, Serialize};

/// What a confined program may do. Of files and folders, those that do not exist are skipped.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Confinement {
    /// To read and execute, with all below.
    pub read: Vec<OsString>,
    /// To list, with all below.
    pub list: Vec<OsString>,
    /// To read and change, with all below.
    pub write: Vec<OsString>,
    /// The most memory that each process may have of its own.
    pub memory_bytes: Option<u64>,
    /// The most bytes of each file that it writes.
    pub file_bytes: Option<u64>,
    /// Removed from the environment: this program may need them to start.
    pub without: Vec<OsString>,
}

/// The newest of Landlock's versions whose restrictions are asked for: 6 keeps signals inside.
const VERSION: ABI = ABI::V6;

/// The argument after which the program's own come.
pub const SEPARATOR: &str = "--";

impl Confinement {
    /// The command that confines `program` and executes it; `cs336` is this program's file.
    pub fn command(&self, cs336: &str, program: &Path) -> Result<Command> {
        let mut command = Command::new(cs336);
        command.arg("confine").arg(serde_json::to_string(self)?).arg(SEPARATOR).arg(program);
        Ok(command)
    }

    /// Confines this process and executes `program` in its place; returns only with an error.
    pub fn execute(&self, program: &[OsString]) -> Result<()> {
        let (name, arguments) = program.split_first().context("no program to confine is named")?;
        if let Some(bytes) = self.memory_bytes {
            // Not RLIMIT_AS: CUDA reserves addresses for far more than it uses.
            let limit = Rlimit { current: Some(bytes), maximum: Some(bytes) };
            setrlimit(Resource::Data, limit).context("limiting the memory")?;
        }
        if let Some(bytes) = self.file_bytes {
            // Only root could raise what its own parent set.
            let bytes = getrlimit(Resource::Fsize).maximum.map_or(bytes, |most| most.min(bytes));
            let limit = Rlimit { current: Some(bytes), maximum: Some(bytes) };
            setrlimit(Resource::Fsize, limit).context("limiting the size of files")?;
        }
        self.restrict().context("confining the process")?;
        let mut command = Command::new(name);
        for name in &self.without {
            command.env_remove(name);
        }
        Err(command.args(arguments).exec()).with_context(|| format!("starting {}", shown_path(name)))
    }

    /// Confines this process; whether the kernel enforces all of it, a part or nothing.
    fn restrict(&self) -> Result<RulesetStatus> {
        let read = AccessFs::from_read(VERSION);
        let ruleset = Ruleset::default().handle_access(AccessFs::from_all(VERSION))?.scope(Scope::from_all(VERSION))?;
        let ruleset = ruleset
            .create()?
            .add_rules(path_beneath_rules(&self.read, read))?
            .add_rules(path_beneath_rules(&self.list, AccessFs::ReadDir))?
            .add_rules(path_beneath_rules(&self.write, AccessFs::from_all(VERSION)))?;
        Ok(ruleset.restrict_self()?.ruleset)
    }
}

/// What this kernel lacks for a whole confinement, as a sentence; `None` if it lacks nothing.
///
/// Confines a thread of its own to find out, which ends with it.
pub fn lacks() -> Option<String> {
    let probe = std::thread::spawn(|| Confinement::default().restrict());
    match probe.join() {
        Ok(Ok(RulesetStatus::FullyEnforced)) => None,
        Ok(Ok(RulesetStatus::PartiallyEnforced)) => {
            Some("this kernel's Landlock is older than version 6 and enforces a part of the confinement".into())
        }
        _ => Some("this kernel has no Landlock, so that nothing confines the process to its folder".into()),
    }
}

/// The paths as they travel in JSON, which need not be UTF-8.
pub fn paths(paths: impl IntoIterator<Item = PathBuf>) -> Vec<OsString> {
    paths.into_iter().map(PathBuf::into_os_string).collect()
}
