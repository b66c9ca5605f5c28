//! NVRTC's C interface made safe: source text and options in, cubin and log out.

use std::ffi::{CString, c_char, c_int};

use anyhow::{Context as _, Result, ensure};
use cudarc::nvrtc::{result, sys};

/// One translation unit, with the headers that it may include by name.
pub(super) struct Source {
    /// Its name in the log.
    pub name: String,
    pub text: String,
    /// Name as in `#include "name"`, and text.
    pub headers: Vec<(String, String)>,
}

/// `(major, minor)` of the NVRTC that is loaded.
pub(super) fn version() -> Result<(i32, i32)> {
    require_library()?;
    let (mut major, mut minor) = (0, 0);
    // SAFETY: the library is there, and both pointers are to integers that outlive the call.
    unsafe { sys::nvrtcVersion(&mut major, &mut minor) }.result().context("asking NVRTC for its version")?;
    Ok((major, minor))
}

/// Compiles `source` for the real architecture that `options` name; gives the cubin and the log.
///
/// The log includes ptxas's report. Errors: NVRTC's, with the whole log.
pub(super) fn compile(source: &Source, options: &[String]) -> Result<(Vec<u8>, String)> {
    let (program, log) = build(source, options)?;
    let mut bytes = 0;
    // SAFETY: the program is alive and `bytes` outlives the call.
    unsafe { sys::nvrtcGetCUBINSize(program.0, &mut bytes) }.result().context("asking NVRTC for the cubin")?;
    ensure!(bytes > 0, "NVRTC made no cubin: the architecture must be a real one (sm_..)");
    let mut cubin = vec![0u8; bytes];
    // SAFETY: NVRTC writes exactly the bytes that it announced.
    unsafe { sys::nvrtcGetCUBIN(program.0, cubin.as_mut_ptr().cast()) }.result().context("reading NVRTC's cubin")?;
    Ok((cubin, log))
}

/// Compiles `source` for the virtual architecture that `options` name (compute_..), and gives its PTX.
#[cfg(test)]
pub(super) fn ptx(source: &Source, options: &[String]) -> Result<String> {
    let (program, _) = build(source, options)?;
    // SAFETY: the program is alive.
    Ok(text(&unsafe { result::get_ptx(program.0) }.context("reading NVRTC's PTX")?))
}

fn build(source: &Source, options: &[String]) -> Result<(Program, String)> {
    require_library()?;
    let program = Program::create(source)?;
    // A cubin from NVRTC's own cache would lack ptxas's report.
    let no_cache = (version()? >= (12, 9)).then_some("--no-cache");
    let options: Vec<&str> = options.iter().map(String::as_str).chain(no_cache).collect();
    // SAFETY: the program is alive.
    let compiled = unsafe { result::compile_program(program.0, &options) };
    // SAFETY: as above.
    let log = text(&unsafe { result::get_program_log(program.0) }.context("reading NVRTC's log")?);
    compiled.with_context(|| format!("{} does not compile:\n{}", source.name, log.trim_end()))?;
    Ok((program, log))
}

/// A C string of NVRTC's.
fn text(characters: &[c_char]) -> String {
    let bytes: Vec<u8> = characters.iter().map(|&c| c as u8).collect();
    String::from_utf8_lossy(&bytes).trim_end_matches('\0').to_string()
}

/// Owns an `nvrtcProgram`.
struct Program(sys::nvrtcProgram);

impl Program {
    fn create(source: &Source) -> Result<Self> {
        let text = CString::new(source.text.as_str()).with_context(|| format!("{} holds a zero byte", source.name))?;
        let name = CString::new(source.name.as_str())?;
        let texts = c_strings(source.headers.iter().map(|(_, text)| text))?;
        let names = c_strings(source.headers.iter().map(|(name, _)| name))?;
        let (texts, names) = (pointers(&texts), pointers(&names));
        let mut program = std::ptr::null_mut();
        let count = names.len() as c_int;
        // SAFETY: every pointer is to a C string (or to as many of them as are counted) that outlives the call; NVRTC
        // copies them.
        let created = unsafe {
            sys::nvrtcCreateProgram(&mut program, text.as_ptr(), name.as_ptr(), count, texts.as_ptr(), names.as_ptr())
        };
        created.result().with_context(|| format!("handing {} to NVRTC", source.name))?;
        Ok(Self(program))
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: the program is alive and not used after this.
        unsafe { sys::nvrtcDestroyProgram(&mut self.0) };
    }
}

/// cudarc panics where the library is missing.
fn require_library() -> Result<()> {
    // SAFETY: this only asks the dynamic loader for NVRTC, whose initialisers have no conditions.
    ensure!(unsafe { sys::is_culib_present() }, "the dynamic loader does not find libnvrtc");
    Ok(())
}

fn c_strings(texts: impl Iterator<Item = impl AsRef<str>>) -> Result<Vec<CString>> {
    texts
        .map(|text| CString::new(text.as_ref()).with_context(|| format!("{:?} holds a zero byte", text.as_ref())))
        .collect()
}

fn pointers(texts: &[CString]) -> Vec<*const c_char> {
    texts.iter().map(|text| text.as_ptr()).collect()
}
