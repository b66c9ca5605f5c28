//! Kernels on the CPU, for tests: a C++ compiler builds a [`Program`] against `kernels/emulator`, whose README explains
//! how it works and which errors it finds.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_uint, c_void};
use std::fmt;
use std::fs::{self, File};
use std::io::{self, Read as _, Seek as _};
use std::os::fd::AsRawFd as _;
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, ensure};
use libloading::Library;
use rustix::fs::{MemfdFlags, memfd_create};
use tch::{Device, Kind, Tensor};

use super::cache::Cache;
use super::jit::{Compiler, Program};
use super::launch::LaunchConfig;
use super::toolchain::Toolchain;
use super::trusted_folder::TrustedFolder;
use crate::error::Fault;
use crate::printable::shown_path;
use crate::process::{output_within, program};
use crate::root::COMPILER_PATHS;

/// The largest kernel takes a minute on two cores.
const LIMIT: Duration = Duration::from_secs(600);

/// Of SHA-256 in hexadecimal.
const DIGEST_CHARS: usize = 64;

/// Bytes of a compiler's words that an error repeats.
const MOST_WORDS: usize = 1 << 14;

/// How the emulator runs the launches of this thread.
#[derive(Debug, Clone, Copy)]
pub struct Settings {
    /// Decides the order of threads and of copies.
    pub seed: u64,
    /// What [`super::multiprocessors`] gives. Blocks run one after the other in any case.
    pub multiprocessors: u32,
}

/// Of a block, as on Hopper.
pub(super) const SHARED_BYTES: u32 = 227 * 1024;

thread_local! {
    // Few multiprocessors, so that persistent blocks take several turns.
    static SETTINGS: Cell<Settings> = const { Cell::new(Settings { seed: 1, multiprocessors: 3 }) };
}

/// Runs `body` with this thread's settings changed by `change`.
pub fn with<T>(change: impl FnOnce(&mut Settings), body: impl FnOnce() -> T) -> T {
    let before = SETTINGS.get();
    let mut settings = before;
    change(&mut settings);
    SETTINGS.set(settings);
    let value = body();
    SETTINGS.set(before);
    value
}

pub(super) fn multiprocessors() -> u32 {
    SETTINGS.get().multiprocessors
}

/// A program that was built for the CPU.
pub struct Emulation {
    entries: BTreeMap<String, Entry>,
    emulate: Emulate,
    /// The library has one emulated block, so one launch runs at a time.
    running: Mutex<()>,
    /// Keeps `emulate` in memory.
    _library: Library,
    /// The loader knows the library by this descriptor's number, which must not become another library's meanwhile.
    _file: File,
}

struct Entry {
    index: c_uint,
    parameters: Vec<usize>,
}

type Emulate = unsafe extern "C" fn(*const RawLaunch, c_uint, u64, *mut c_char, usize) -> c_uint;

/// A kernel with its parameters, to be run.
pub(super) struct Launch<'a> {
    pub program: Arc<Emulation>,
    pub kernel: &'static str,
    pub config: LaunchConfig,
    /// A pointer to each parameter, valid as long as this ([`Emulation::parameters`]).
    pub arguments: Box<dyn Fn() -> Vec<*mut c_void> + 'a>,
    /// Whether it may begin while the one before it runs.
    pub is_early: bool,
}

/// `Launch` of kernels/emulator/launch.h.
#[repr(C)]
struct RawLaunch {
    kernel: c_uint,
    grid: [c_uint; 3],
    block: [c_uint; 3],
    shared_bytes: c_uint,
    is_early: c_uint,
    arguments: *mut *mut c_void,
}

/// Runs kernels of one stream to completion. Successive kernels of one program overlap where they may: the last begins
/// first.
///
/// Errors: the emulator's, such as a deadlock, with the state of every thread.
pub(super) fn run_all(launches: &[Launch]) -> Result<()> {
    launches.chunk_by(|a, b| Arc::ptr_eq(&a.program, &b.program)).try_for_each(|some| some[0].program.run(some))
}

/// `program` for the CPU, from the cache of compiled kernels if it is there; loaded once in a process.
///
/// Errors: [`Fault::NotAvailable`] without a C++ compiler or CUDA's headers; a program that does not compile, with the
/// compiler's output.
pub fn load(program: &Program) -> Result<Arc<Emulation>> {
    static LOADED: Cache<Program, Emulation> = Cache::new();
    LOADED.get(Device::Cpu, program.clone(), || {
        let compiler = Compiler::of_this_tree()?;
        build(&compiler, program).with_context(|| format!("kernels/{} for the CPU", program.file))
    })
}

/// `program`, loaded. A library of the cache that is not whole, or that cannot be loaded, such as one that another machine's
/// compiler made, is built again; one that was just built is kept only if it can be loaded.
fn build(compiler: &Compiler, program: &Program) -> Result<Emulation> {
    let source = compiler.read(program)?;
    let emulator = compiler.headers("emulator", "h")?;
    let defines = program.defines.iter().map(|(name, value)| format!("#define {name} {value}\n"));
    let defines: String = defines.collect();
    let text = format!("#define EMULATED 1\n{defines}#include \"emulator/block.h\"\n#include \"{}\"\n", program.file);
    let mut parts = vec![&Toolchain::get()?.identity, &source.text, &text];
    parts.extend(source.headers.iter().chain(&emulator).map(|(_, text)| text));
    let key = super::jit::digest(parts.into_iter().map(String::as_bytes));
    let name = format!("{}-emulated-{key}.so", program.file.trim_end_matches(".cu"));
    let cache = compiler.open_cache();
    let kept = cache.as_ref().ok().and_then(|cache| cache.file(&name).ok()).filter(is_whole);
    if let Some(emulation) = kept.and_then(|library| Emulation::open(library).ok()) {
        return Ok(emulation);
    }
    let work = TrustedFolder::temporary()?;
    let library = compile(&compiler.kernels, text, &work.path())?;
    let emulation = Emulation::open(work.write(&name, &[&library])?)?;
    // Without a cache, the next process compiles for itself.
    let _ = cache.and_then(|cache| cache.write(&name, &[&library, digest_of(&library).as_bytes()]));
    Ok(emulation)
}

/// What the cache has behind a library: the loader of one that was cut short would end the process.
fn digest_of(library: &[u8]) -> String {
    super::jit::digest([library].into_iter())
}

fn is_whole(kept: &File) -> bool {
    let mut bytes = Vec::new();
    let mut kept = kept;
    if kept.read_to_end(&mut bytes).is_err() {
        return false;
    }
    let end = bytes.len().saturating_sub(DIGEST_CHARS);
    bytes[end..] == *digest_of(&bytes[..end]).as_bytes()
}

/// Compiles `text` in the folder `work`; gives the shared library's bytes.
fn compile(kernels: &Path, mut text: String, work: &Path) -> Result<Vec<u8>> {
    let (source, made) = (work.join("program.cc"), work.join("program.so"));
    fs::write(&source, &text)?;
    let preprocessed = run(compiler(kernels, work)?.args(["-E", "-P"]).arg(&source))?;
    let names = entry_points(&String::from_utf8_lossy(&preprocessed));
    ensure!(!names.is_empty(), "it has no extern \"C\" __global__ function");
    let list: Vec<_> = names.iter().map(|name| format!("emulator::entry(\"{name}\", {name})")).collect();
    text += &format!("#include \"emulator/launch.h\"\nEMULATED_ENTRIES({})\n", list.join(", "));
    fs::write(&source, &text)?;
    run(compiler(kernels, work)?
        .args(["-O1", "-fPIC", "-fvisibility=hidden", "-shared", "-o"])
        .arg(&made)
        .arg(&source))?;
    fs::read(&made).context("failed to read the compiled library")
}

/// `$CXX` or `c++` with the options of every step. It runs in `work`, since others may write to the working directory, and keeps
/// its temporary files there, which would stay where it is ended.
fn compiler(kernels: &Path, work: &Path) -> Result<Command> {
    let toolchain = Toolchain::get()?;
    let mut command = program(std::env::var_os("CXX").unwrap_or_else(|| "c++".into()));
    command.current_dir(work).env("TMPDIR", work);
    for name in COMPILER_PATHS {
        command.env_remove(name);
    }
    // Warnings are off: the kernels are written for another compiler.
    command.args(["-std=c++20", "-w", "-Wno-psabi"]).arg("-I").arg(kernels);
    command.args(toolchain.include.iter().flat_map(|folder| [Path::new("-isystem"), folder]));
    Ok(command)
}

/// The output of `command`. Errors: [`Fault::NotAvailable`] if it does not start; its error output if it fails.
fn run(command: &mut Command) -> Result<Vec<u8>> {
    let name = shown_path(command.get_program());
    // Workers, which compile, are ended with what they have started.
    let output = output_within(command, LIMIT, &|| false).map_err(|error| Fault::NotAvailable {
        needs: "a C++ compiler, to run kernels on the CPU".into(),
        has: format!("no {name:?} that starts and ends ({error}); set CXX"),
    })?;
    // The first error is the one to mend.
    let said = String::from_utf8_lossy(&output.stderr[..output.stderr.len().min(MOST_WORDS)]);
    ensure!(output.status.success(), "{name} failed ({}):\n{}", output.status, said.trim_end());
    Ok(output.stdout)
}

/// A copy of the file that is in no folder.
fn in_memory(mut file: &File) -> io::Result<File> {
    let mut copy = File::from(memfd_create("kernels", MemfdFlags::CLOEXEC)?);
    file.rewind()?;
    io::copy(&mut file, &mut copy)?;
    Ok(copy)
}

/// Names of the functions that begin with `extern "C" __global__ void`, after the preprocessor.
fn entry_points(preprocessed: &str) -> Vec<String> {
    const MARK: &str = "__attribute__((annotate(\"kernel\"))) void";
    let name = |rest: &str| rest.split_once('(').map(|(name, _)| name.trim().to_string());
    preprocessed.split(MARK).skip(1).filter_map(name).collect()
}

impl fmt::Debug for Emulation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.entries.keys()).finish()
    }
}

impl Emulation {
    /// Errors: it cannot be loaded, neither from its file nor from memory, where a folder that is mounted noexec has no say.
    fn open(file: File) -> Result<Self> {
        type Name = unsafe extern "C" fn(c_uint) -> *const c_char;
        type Parameter = unsafe extern "C" fn(c_uint, c_uint) -> usize;
        // The loader opens the file whose owner was checked, whatever its path leads to by now.
        let path = |file: &File| format!("/proc/self/fd/{}", file.as_raw_fd());
        // SAFETY: the library was built by `build`, and its initialisers touch its own state alone.
        let load = |file: &File| unsafe { Library::new(path(file)) };
        let (library, file) = match load(&file) {
            Ok(library) => (library, file),
            Err(_) => {
                let copy = in_memory(&file).context("failed to copy the compiled library to memory")?;
                (load(&copy).context("failed to load the compiled library")?, copy)
            }
        };
        // SAFETY: kernels/emulator/launch.h defines these three with these signatures.
        let (name, parameter, emulate) = unsafe {
            let name: Name = *library.get(b"emulated_name")?;
            let parameter: Parameter = *library.get(b"emulated_parameter")?;
            let emulate: Emulate = *library.get(b"emulate")?;
            (name, parameter, emulate)
        };
        let entry = |index| {
            // SAFETY: it gives null past the last entry, and otherwise a string that lives as long as the library.
            let text = unsafe { name(index) };
            // SAFETY: as above; not null.
            let text = (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) })?;
            // SAFETY: `index` is an entry's, and past its last parameter the size is 0.
            let sizes = (0..).map(|i| unsafe { parameter(index, i) }).take_while(|&bytes| bytes != 0);
            Some((text.to_string_lossy().into_owned(), Entry { index, parameters: sizes.collect() }))
        };
        let entries = (0..).map_while(entry).collect();
        Ok(Self { entries, emulate, running: Mutex::new(()), _library: library, _file: file })
    }

    /// The sizes of a kernel's parameters in bytes.
    pub fn parameters(&self, kernel: &str) -> Result<Vec<usize>> {
        Ok(self.entry(kernel)?.parameters.clone())
    }

    fn entry(&self, kernel: &str) -> Result<&Entry> {
        self.entries.get(kernel).with_context(|| {
            let names: Vec<_> = self.entries.keys().map(String::as_str).collect();
            format!("there is no kernel {kernel:?}: the program has {}", names.join(", "))
        })
    }

    /// As [`run_all`], of kernels of this program.
    fn run(&self, launches: &[Launch]) -> Result<()> {
        let mut pointers: Vec<_> = launches.iter().map(|launch| (launch.arguments)()).collect();
        let raw = launches.iter().zip(&mut pointers).map(|(launch, pointers)| self.raw(launch, pointers));
        let raw = raw.collect::<Result<Vec<_>>>()?;
        let mut message = vec![0u8; 16 << 10];
        let _one = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: there are as many launches as it says, whose arguments are what their kernels' parameters take (checked
        // by the caller), and `message` has as many bytes as it says; the library's state is not in use by another run.
        let failed = unsafe {
            let count = c_uint::try_from(raw.len())?;
            (self.emulate)(raw.as_ptr(), count, SETTINGS.get().seed, message.as_mut_ptr().cast(), message.len())
        };
        let Some(at) = (failed as usize).checked_sub(1) else { return Ok(()) };
        let error = CStr::from_bytes_until_nul(&message).map(CStr::to_string_lossy).unwrap_or_default();
        let Launch { kernel, config, .. } = &launches[at];
        Err(anyhow!("the emulator stopped: {error}").context(format!("launching {kernel} as {config:?}")))
    }

    fn raw(&self, launch: &Launch, arguments: &mut [*mut c_void]) -> Result<RawLaunch> {
        let entry = self.entry(launch.kernel)?;
        let LaunchConfig { grid, block, shared_bytes } = launch.config;
        let threads = block.0 * block.1 * block.2;
        ensure!(threads > 0 && threads <= 1024 && threads.is_multiple_of(32), "a block of {block:?} threads");
        Ok(RawLaunch {
            kernel: entry.index,
            grid: grid.into(),
            block: block.into(),
            shared_bytes,
            is_early: launch.is_early.into(),
            arguments: arguments.as_mut_ptr(),
        })
    }
}

/// What the emulator reads instead of an encoded tensor map: `Map` of kernels/emulator/hopper.h.
pub(super) fn tensor_map(tensor: &Tensor, box_rows: u32, box_columns: u32) -> Result<[u64; 16]> {
    const MARK: u64 = 0x7061_6D20_726F_7474;
    ensure!(matches!(tensor.kind(), Kind::Half | Kind::BFloat16), "{:?} is not of 16 bits", tensor.kind());
    let element = 2u64;
    let (sizes, strides) = (tensor.size(), tensor.stride());
    let mut words = [0; 16];
    (words[0], words[1]) = (MARK, tensor.data_ptr() as u64);
    for i in 0..4 {
        words[2 + i] = u64::try_from(sizes[3 - i])?;
    }
    for i in 0..3 {
        words[6 + i] = element * u64::try_from(strides[2 - i])?;
    }
    let (columns, row) = (u64::from(box_columns), u64::from(box_columns) * element);
    let swizzle = if [32, 64, 128].contains(&row) { row } else { 0 };
    words[9..13].copy_from_slice(&[columns, u64::from(box_rows), element, swizzle]);
    Ok(words)
}

#[cfg(test)]
mod tests;
