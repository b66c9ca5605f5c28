//! NVRTC's C interface made safe: source text and options in, cubin and log out.

use std::ffi::{CStr, CString, c_char, c_int};

use anyhow::{Context as _, Result, ensure};
use cudarc::nvrtc::sys;

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
    check(unsafe { sys::nvrtcVersion(&mut major, &mut minor) }).context("asking NVRTC for its version")?;
    Ok((major, minor))
}

/// Compiles `source` for the real architecture that `options` name; gives the cubin and the log.
///
/// The log includes ptxas's report. Errors: NVRTC's, with the whole log.
pub(super) fn compile(source: &Source, options: &[String]) -> Result<(Vec<u8>, String)> {
    let (program, log) = build(source, options)?;
    Ok((program.cubin()?, log))
}

/// Compiles `source` for the virtual architecture that `options` name (compute_..), and gives its PTX.
#[cfg(test)]
pub(super) fn ptx(source: &Source, options: &[String]) -> Result<String> {
    let (program, _) = build(source, options)?;
    program.ptx()
}

fn build(source: &Source, options: &[String]) -> Result<(Program, String)> {
    require_library()?;
    let program = Program::create(source)?;
    // A cubin from NVRTC's own cache would lack ptxas's report.
    let no_cache = (version()? >= (12, 9)).then_some("--no-cache");
    let options = c_strings(options.iter().map(String::as_str).chain(no_cache))?;
    let pointers = pointers(&options);
    // SAFETY: the program is alive, and the pointers are to as many C strings as are counted, alive over the call.
    let result = check(unsafe { sys::nvrtcCompileProgram(program.0, pointers.len() as c_int, pointers.as_ptr()) });
    let log = program.log()?;
    result.with_context(|| format!("{} does not compile:\n{}", source.name, log.trim_end()))?;
    Ok((program, log))
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
        let result = unsafe {
            sys::nvrtcCreateProgram(&mut program, text.as_ptr(), name.as_ptr(), count, texts.as_ptr(), names.as_ptr())
        };
        check(result).with_context(|| format!("handing {} to NVRTC", source.name))?;
        Ok(Self(program))
    }

    fn log(&self) -> Result<String> {
        let mut bytes = 0;
        // SAFETY: the program is alive and `bytes` outlives the call.
        check(unsafe { sys::nvrtcGetProgramLogSize(self.0, &mut bytes) }).context("asking NVRTC for its log")?;
        let mut log = vec![0u8; bytes];
        // SAFETY: NVRTC writes exactly the bytes that it announced.
        check(unsafe { sys::nvrtcGetProgramLog(self.0, log.as_mut_ptr().cast()) }).context("reading NVRTC's log")?;
        Ok(String::from_utf8_lossy(&log).trim_end_matches('\0').to_string())
    }

    fn cubin(&self) -> Result<Vec<u8>> {
        let mut bytes = 0;
        // SAFETY: the program is alive and `bytes` outlives the call.
        check(unsafe { sys::nvrtcGetCUBINSize(self.0, &mut bytes) }).context("asking NVRTC for the cubin")?;
        ensure!(bytes > 0, "NVRTC made no cubin: the architecture must be a real one (sm_..)");
        let mut cubin = vec![0u8; bytes];
        // SAFETY: NVRTC writes exactly the bytes that it announced.
        check(unsafe { sys::nvrtcGetCUBIN(self.0, cubin.as_mut_ptr().cast()) }).context("reading NVRTC's cubin")?;
        Ok(cubin)
    }

    #[cfg(test)]
    fn ptx(&self) -> Result<String> {
        let mut bytes = 0;
        // SAFETY: the program is alive and `bytes` outlives the call.
        check(unsafe { sys::nvrtcGetPTXSize(self.0, &mut bytes) }).context("asking NVRTC for the PTX")?;
        let mut ptx = vec![0u8; bytes];
        // SAFETY: NVRTC writes exactly the bytes that it announced.
        check(unsafe { sys::nvrtcGetPTX(self.0, ptx.as_mut_ptr().cast()) }).context("reading NVRTC's PTX")?;
        Ok(String::from_utf8_lossy(&ptx).trim_end_matches('\0').to_string())
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

fn check(result: sys::nvrtcResult) -> Result<()> {
    if result == sys::nvrtcResult::NVRTC_SUCCESS {
        return Ok(());
    }
    // SAFETY: NVRTC gives a static C string for every code, unknown ones too.
    let message = unsafe { CStr::from_ptr(sys::nvrtcGetErrorString(result)) }.to_string_lossy();
    anyhow::bail!("{message} ({})", result as i32)
}

fn c_strings(texts: impl Iterator<Item = impl AsRef<str>>) -> Result<Vec<CString>> {
    texts
        .map(|text| CString::new(text.as_ref()).with_context(|| format!("{:?} holds a zero byte", text.as_ref())))
        .collect()
}

fn pointers(texts: &[CString]) -> Vec<*const c_char> {
    texts.iter().map(|text| text.as_ptr()).collect()
}
