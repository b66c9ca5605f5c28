//! The confinement of a subject's process: what it may read and write, and the environment that it gets.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Result, bail};

use super::folders::{Folders, MOST_BYTES};
use super::path;
use crate::collective::nccl::NVLS;
use crate::error::NotGraded;
use crate::harness::python;
use crate::harness::subject::Subject;
use crate::harness::worker::THIS_PROGRAM;
use crate::printable::shown_path;
use crate::process::confinement::{Confinement, paths};

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
    "LANG",
    "LC_ALL",
    "TZ",
    "LD_LIBRARY_PATH",
    "CUDA_DEVICE_ORDER",
    "CUDA_VISIBLE_DEVICES",
    "NCCL_DEBUG",
    "NCCL_P2P_DISABLE",
    "NCCL_SHM_DISABLE",
    "NCCL_CUMEM_ENABLE",
    "OMP_NUM_THREADS",
    // They choose how products round.
    "MKL_CBWR",
    "ATEN_CPU_CAPABILITY",
    "TORCHDYNAMO_DISABLE",
    "TRITON_INTERPRET",
];

/// What the subject's process may read besides its inputs, without links.
fn granted(subject: &Subject, suites: &Path) -> Vec<PathBuf> {
    let before = std::env::var_os(python::FOLDERS);
    let modules = before.iter().flat_map(|folders| python::named(folders));
    let places = SYSTEM.iter().map(PathBuf::from).chain(modules).chain([suites.join("peers")]);
    let places = places.map(|place| place.canonicalize().unwrap_or(place));
    // These had no links when they were found: one that is there now is the subject's.
    let own = subject.python_files.iter().chain([&subject.folder]);
    places.chain(own.cloned()).collect()
}

/// The variables that name programs, with what of them the subject may execute: a compiler elsewhere would fail, where another
/// one is not looked for.
fn programs(granted: &[PathBuf]) -> Vec<(&'static str, OsString)> {
    let is_granted =
        |path: &Path| path.canonicalize().is_ok_and(|real| granted.iter().any(|place| real.starts_with(place)));
    let folders: Vec<PathBuf> = std::env::var_os("PATH").iter().flat_map(std::env::split_paths).collect();
    let folders: Vec<PathBuf> = folders.into_iter().filter(|folder| is_granted(folder)).collect();
    let is_program = |named: &OsString| {
        // It may have arguments.
        let named = named.to_string_lossy();
        let program = named.split_whitespace().next().unwrap_or_default();
        folders.iter().any(|folder| is_granted(&folder.join(program)))
    };
    let compilers = ["CC", "CXX"].map(|name| Some((name, std::env::var_os(name).filter(is_program)?)));
    let path = std::env::join_paths(&folders).unwrap_or_default();
    compilers.into_iter().flatten().chain([("PATH", path)]).collect()
}

/// Errors: the subject could read a file of the folder `cases`. Landlock only grants, so a part of what is granted cannot be
/// kept back.
pub fn require_hidden(subject: &Subject, cases: &Path, suites: &Path) -> Result<()> {
    let readable = granted(subject, suites);
    let files = std::fs::read_dir(cases).into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path()));
    for file in files.chain([cases.to_path_buf()]).filter_map(|file| file.canonicalize().ok()) {
        if let Some(granted) = readable.iter().find(|granted| file.starts_with(granted)) {
            let place =
                if *granted == subject.folder { "the subject's folder".to_string() } else { shown_path(granted) };
            bail!("the cases {} lie in {place}, where it can read them; move them", shown_path(cases));
        }
    }
    Ok(())
}

/// `cs336 confine .. python`, which runs `suites/peers/subject.py` with the folder.
pub(super) fn command(subject: &Subject, folders: &Folders, suites: &Path) -> Result<Command> {
    require_hidden(subject, &suites.join("cases"), suites)?;
    let granted = granted(subject, suites);
    let given = folders.given.canonicalize()?;
    if let Some(place) = granted.iter().find(|place| given.starts_with(place)) {
        let [given, place] = [&given, place].map(shown_path);
        let remedy = "which the subject can read; set TMPDIR to another folder";
        bail!(NotGraded(format!("the folder for temporary files, {given}, lies in {place}, {remedy}")));
    }
    let read: Vec<PathBuf> = granted.iter().cloned().chain([given]).collect();
    if let Some(place) = read.iter().find(|place| place.to_str().is_none()) {
        bail!(NotGraded(format!(
            "{}, which the subject must read, is not UTF-8: rename or move it",
            shown_path(place)
        )));
    }
    let mut confinement = Confinement {
        read: paths(read),
        list: paths([suites.to_path_buf()]),
        write: paths(DEVICES.iter().map(PathBuf::from).chain(gpus()).chain([folders.scratch.clone()])),
        memory_bytes: Some(subject.memory_bytes),
        file_bytes: Some(MOST_BYTES),
        started: Some(folders.started().into()),
        without: Vec::new(),
        with_cuda: tch::Cuda::is_available(),
    };
    if subject.python != python::interpreter() {
        // A bundle lists our libtorch there, which another PyTorch must not load.
        confinement.without.push("LD_LIBRARY_PATH".into());
    }
    let mut command = confinement.command(THIS_PROGRAM, &subject.python)?;
    command.args(python::of_peers(suites, "subject")).arg(path(&subject.folder)?);
    command.envs(programs(&granted));
    command.envs(INHERITED.iter().filter_map(|name| Some((name, std::env::var_os(name)?))));
    command
        .env(python::FOLDERS, python::absolute(&std::env::var_os(python::FOLDERS).unwrap_or_default()))
        .env("PYTHONSAFEPATH", "1")
        // They lie in HOME, where one process of the subject could leave some that run in another before our code.
        .env("PYTHONNOUSERSITE", "1");
    command.env("HOME", &folders.scratch).env("TMPDIR", &folders.scratch).current_dir(&folders.scratch);
    command.env("USER", python::user(|name| std::env::var_os(name)));
    // Without it torch.compile tries each kind of vector instructions by compiling a library, which takes half a minute.
    command.env("TORCHINDUCTOR_VEC_ISA_OK", "1");
    let (multicast, off) = NVLS;
    command.env("GLOO_SOCKET_IFNAME", "lo").env(multicast, std::env::var_os(multicast).unwrap_or(off.into()));
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
