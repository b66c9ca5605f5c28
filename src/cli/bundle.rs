//! `cs336 bundle`: packs the program for a machine that has PyTorch and no Rust.

use std::io::ErrorKind;
use std::path::Path;
use std::process::Command;
use std::time::Duration;
use std::{fs, io};

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use rustix::process::{Resource, getrlimit};

use super::{Ended, interrupted, watch_for_interrupt};
use crate::harness::manifest::{LAUNCHER, MANIFEST, Manifest, PROGRAM, is_bundle};
use crate::harness::provenance::{Commit, git};
use crate::harness::store::{Layout, cannot_write};
use crate::printable::{one_line, shown_path};
use crate::process::{LockedFolder, not_started, output_within, program, remove_unlocked};
use crate::root::{absolute, read};
use crate::units::{MIB, human_bytes};

/// Folders that the program reads at run time.
const DATA: &[&str] = &["kernels", "suites", "templates", "snapshots", "report/writeup.typ"];
/// A larger bundle is impractical to copy to another machine.
const LIMIT_BYTES: f64 = 60.0 * MIB;

const LAUNCHER_TEXT: &str = r#"#!/bin/sh
# Runs the bundled cs336 against the PyTorch of this machine; PYTHON names another interpreter.
# Nothing is run or loaded from the working directory, where others may write: of a list of folders those from the root are kept.
named() {
    set -f; kept=; IFS=:
    for folder in $1; do case $folder in /*) kept=$kept${kept:+:}$folder ;; esac; done
    printf %s "$kept"
}
export LD_LIBRARY_PATH="$(named "${LD_LIBRARY_PATH:-}")" PATH="$(named "${PATH:-}:/usr/bin:/bin")"
export PYTHONSAFEPATH=1 PYTHONPATH="$(named "${PYTHONPATH:-}")"
case ${HOME:-/} in /*) ;; *) unset HOME ;; esac
# PYTHONHOME may name two folders.
[ "$(named "${PYTHONHOME:-}")" = "${PYTHONHOME:-}" ] || unset PYTHONHOME
case ${PYTHONUSERBASE:-/} in /*) ;; *) unset PYTHONUSERBASE ;; esac
# Python does not check who owns the compiled modules there.
unset PYTHONPYCACHEPREFIX
here=$(dirname "$(readlink -f "$0")")
python=$(command -v "${PYTHON:-python3}") || { echo "cs336: no ${PYTHON:-python3} on the path; name an interpreter with PYTHON=..." >&2; exit 1; }
# Only who names this folder as CS336_ROOT runs what other users can write to in it; another tree is not this program's.
[ "$(readlink -f "${CS336_ROOT:-/}")" = "$here" ] || unset CS336_ROOT
libraries=$("$python" - <<'PY'
import sys
# An older one would import what lies in the working directory.
if sys.version_info < (3, 11):
    sys.exit("cs336: needs Python 3.11 or newer; name one with PYTHON=...")
import glob, importlib.util, os
found = importlib.util.find_spec("torch")
if found is None:
    sys.exit("cs336: this python has no torch; name one that has with PYTHON=...")
torch = os.path.dirname(found.origin)
version = open(os.path.join(torch, "version.py")).read()
if not any(quote + "2.11.0" in version for quote in ("'", '"')):
    sys.exit("cs336: needs torch 2.11.0, this python has another (see " + torch + "/version.py)")
nvidia = os.path.join(os.path.dirname(torch), "nvidia")
folders = [os.path.join(torch, "lib")] + sorted(glob.glob(nvidia + "/*/lib"))
print(":".join(folders))
PY
) && [ -n "$libraries" ] || { echo "cs336: $python names no PyTorch; name a Python that has torch 2.11.0 with PYTHON=..." >&2; exit 1; }
export LD_LIBRARY_PATH="$libraries${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" CS336_PYTHON="$python"
exec "$here/bin/cs336" "$@"
"#;

pub fn run(layout: &Layout) -> Result<Ended> {
    ensure!(!is_bundle(&layout.root), "a bundle holds no sources to pack: run `cs336 bundle` in a checkout");
    watch_for_interrupt();
    let dist = layout.root.join("dist");
    // Another command may pack at the same time; one that was killed has left its folder.
    let made = fs::create_dir_all(&dist).and_then(|()| {
        remove_unlocked(&dist);
        LockedFolder::new_in(&dist, "packing")
    });
    let packing = made.map_err(|error| cannot_write(&dist, &shown_path(&dist), &error))?;
    let folder = packing.path().join("cs336");
    let packed = folder.join(PROGRAM);
    fs::create_dir_all(folder.join("bin")).with_context(|| format!("failed to make {}", shown_path(&folder)))?;
    command(program("strip").arg("-o").arg(&packed).arg(std::env::current_exe()?))?;
    remove_paths(&packed)?;
    for data in DATA {
        copy_tracked(layout, data, &folder)?;
    }
    write_executable(&folder.join(LAUNCHER), LAUNCHER_TEXT)?;
    let commit = Commit::of(&layout.root, &interrupted)?;
    if commit.dirty {
        let changed = commit.modified.iter().take(3).map(|name| one_line(name)).collect::<Vec<_>>().join(", ");
        eprintln!(
            "what this bundle measures will not be accepted: the tree has changes ({changed}); commit, undo or remove them"
        );
    }
    let manifest = Manifest::of(&folder, commit)?;
    fs::write(folder.join(MANIFEST), serde_json::to_string_pretty(&manifest)?)?;
    let archive = packing.path().join("cs336.tar.gz");
    // Where root unpacks it, files would belong to whoever has the builder's number there, and could be read as the builder's
    // umask said.
    let owner = ["--owner=0", "--group=0", "--numeric-owner", "--mode=u+rwX,go+rX,go-w"];
    let mut tar = program("tar");
    // Options that a user has for other archives would leave files out.
    tar.env_remove("TAR_OPTIONS").env_remove("GZIP");
    command(tar.args(owner).arg("-czf").arg(&archive).arg("-C").arg(packing.path()).arg("cs336"))?;
    let bytes = fs::metadata(&archive)?.len();
    ensure!(
        (bytes as f64) < LIMIT_BYTES,
        "the bundle is {}; it must stay below {}",
        human_bytes(bytes),
        human_bytes(LIMIT_BYTES as u64)
    );
    let ready = dist.join("cs336.tar.gz");
    fs::rename(&archive, &ready).with_context(|| format!("failed to write {}", shown_path(&ready)))?;
    println!("dist/cs336.tar.gz is ready ({}); unpack it there and run ./cs336/cs336 doctor", human_bytes(bytes));
    Ok(Ended::Well)
}

/// Overwrites this machine's paths in the program by slashes of the same length: those of libtorch's headers and of crates
/// in messages, and libtorch's folder in the RUNPATH. That becomes /lib, where the loader looks anyway.
fn remove_paths(program: &Path) -> Result<()> {
    let mut bytes = fs::read(program)?;
    let cargo = absolute(std::env::var_os("CARGO_HOME"));
    let cargo = cargo.or_else(|| Some(absolute(std::env::var_os("HOME"))?.join(".cargo")));
    // A compiler may write a short text into instructions, where this would not find it.
    let [libtorch, tree] = [env!("LIBTORCH"), env!("CARGO_MANIFEST_DIR")].map(std::hint::black_box);
    let folders = [Some(libtorch.into()), Some(tree.into()), cargo];
    for folder in folders.into_iter().flatten() {
        let path = folder.as_os_str().as_encoded_bytes();
        let mut at = 0;
        while let Some(slash) = bytes[at..].iter().position(|byte| *byte == b'/') {
            at += slash;
            if bytes[at..].starts_with(path) {
                bytes[at..at + path.len()].fill(b'/');
            }
            at += 1;
        }
    }
    fs::write(program, bytes).with_context(|| format!("failed to write {}", shown_path(program)))
}

/// Copies the files under `data` that git tracks, and no local ones.
fn copy_tracked(layout: &Layout, data: &str, to: &Path) -> Result<()> {
    let listed = git(&layout.root, &["ls-files", "-z", "--", data], &interrupted)?;
    let listed = listed.map_err(|why| anyhow!("git ls-files, which lists the files of a bundle, failed: {why}"))?;
    for name in listed.split(|b| *b == 0).filter(|n| !n.is_empty()) {
        let name = std::str::from_utf8(name).context("a file name is not UTF-8")?;
        let target = to.join(name);
        target.parent().map_or(Ok(()), fs::create_dir_all)?;
        copy(&layout.root.join(name), &target).with_context(|| format!("failed to copy {}", one_line(name)))?;
    }
    Ok(())
}

/// Copies a file with its permissions, and waits for no pipe.
fn copy(from: &Path, to: &Path) -> io::Result<()> {
    fs::write(to, read(from)?)?;
    fs::set_permissions(to, fs::metadata(from)?.permissions())
}

fn write_executable(path: &Path, text: &str) -> Result<()> {
    use std::os::unix::fs::PermissionsExt as _;
    fs::write(path, text)?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o755))?;
    Ok(())
}

fn command(command: &mut Command) -> Result<()> {
    /// Compressing takes seconds.
    const LIMIT: Duration = Duration::from_secs(600);
    let program = shown_path(command.get_program());
    let output = output_within(command, LIMIT, &interrupted);
    let output = output.map_err(|error| match error.kind() {
        ErrorKind::NotFound => anyhow!("there is no {program}; install binutils and tar"),
        ErrorKind::WouldBlock => not_started(&program, error),
        _ => anyhow!("failed to run {program}: {error}"),
    })?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        // strip says nothing of a file that may not be as large.
        let is_limited = getrlimit(Resource::Fsize).current.is_some();
        let remedy = if is_limited { "; raise the limit on file sizes (ulimit -f)" } else { "" };
        match said.trim() {
            "" => bail!("{program} failed: it ended with {}{remedy}", output.status),
            said => bail!("{program} failed: {said}"),
        }
    }
    Ok(())
}
