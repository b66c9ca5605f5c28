//! NCCL's functions, loaded at run time, and its error messages.
//!
//! The types are cudarc's. Its own loader looks for `libnccl.so`, a link that only NVIDIA's development packages have;
//! the wheel that PyTorch uses holds `libnccl.so.2` alone.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use anyhow::{Context as _, Result, bail};
use cudarc::nccl::sys::{ncclComm_t, ncclConfig_t, ncclDataType_t, ncclRedOp_t, ncclResult_t, ncclUniqueId};
use libloading::Library;

use crate::error::Fault;
use crate::torch;

const LIBRARY: &str = "libnccl.so.2";

type Stream = *mut c_void;
type DataType = ncclDataType_t;

/// The functions that we call, under NCCL's names without the prefix.
pub(super) struct Api {
    pub get_version: unsafe extern "C" fn(*mut c_int) -> c_int,
    pub get_unique_id: unsafe extern "C" fn(*mut ncclUniqueId) -> c_int,
    pub get_error_string: unsafe extern "C" fn(c_int) -> *const c_char,
    pub get_last_error: unsafe extern "C" fn(ncclComm_t) -> *const c_char,
    pub comm_init_rank_config:
        unsafe extern "C" fn(*mut ncclComm_t, c_int, ncclUniqueId, c_int, *mut ncclConfig_t) -> c_int,
    pub comm_get_async_error: unsafe extern "C" fn(ncclComm_t, *mut c_int) -> c_int,
    pub comm_finalize: unsafe extern "C" fn(ncclComm_t) -> c_int,
    pub comm_destroy: unsafe extern "C" fn(ncclComm_t) -> c_int,
    pub comm_abort: unsafe extern "C" fn(ncclComm_t) -> c_int,
    pub all_reduce:
        unsafe extern "C" fn(*const c_void, *mut c_void, usize, DataType, ncclRedOp_t, ncclComm_t, Stream) -> c_int,
    pub broadcast:
        unsafe extern "C" fn(*const c_void, *mut c_void, usize, DataType, c_int, ncclComm_t, Stream) -> c_int,
    pub all_gather: unsafe extern "C" fn(*const c_void, *mut c_void, usize, DataType, ncclComm_t, Stream) -> c_int,
    pub reduce_scatter:
        unsafe extern "C" fn(*const c_void, *mut c_void, usize, DataType, ncclRedOp_t, ncclComm_t, Stream) -> c_int,
    pub group_start: unsafe extern "C" fn() -> c_int,
    pub group_end: unsafe extern "C" fn() -> c_int,
}

impl Api {
    /// Finds and loads NCCL once; later calls repeat the first one's result.
    ///
    /// Errors: [`Fault::NotAvailable`], with the dynamic loader's error for each path that was tried.
    pub fn get() -> Result<&'static Self, Fault> {
        static LOADED: OnceLock<Result<Api, Fault>> = OnceLock::new();
        let missing = |error: anyhow::Error| Fault::NotAvailable {
            needs: format!("NCCL ({LIBRARY})"),
            has: format!("none: {error:#}; run `make setup`, or install it where the dynamic loader looks"),
        };
        LOADED
            .get_or_init(|| candidates().and_then(|paths| Self::load(&paths)).map_err(missing))
            .as_ref()
            .map_err(Clone::clone)
    }

    fn load(paths: &[PathBuf]) -> Result<Self> {
        let mut failures = Vec::new();
        for path in paths {
            // SAFETY: NCCL's initialisers have no conditions.
            match unsafe { Library::new(path) } {
                Ok(library) => return Self::find(library).with_context(|| path.display().to_string()),
                Err(error) => failures.push(format!("{}: {:#}", path.display(), anyhow::Error::from(error))),
            }
        }
        bail!("{}", failures.join("; "))
    }

    fn find(library: Library) -> Result<Self> {
        // Never unloaded: communicators and NCCL's own threads live as long as the process.
        let library: &'static Library = Box::leak(Box::new(library));
        macro_rules! functions {
            ($($field:ident: $name:literal),* $(,)?) => {
                Self { $(
                    // SAFETY: the field's type is that function's in nccl.h 2.28, with enums as the C ints they are.
                    $field: *unsafe { library.get($name) }?,
                )* }
            };
        }
        Ok(functions! {
            get_version: b"ncclGetVersion\0",
            get_unique_id: b"ncclGetUniqueId\0",
            get_error_string: b"ncclGetErrorString\0",
            get_last_error: b"ncclGetLastError\0",
            comm_init_rank_config: b"ncclCommInitRankConfig\0",
            comm_get_async_error: b"ncclCommGetAsyncError\0",
            comm_finalize: b"ncclCommFinalize\0",
            comm_destroy: b"ncclCommDestroy\0",
            comm_abort: b"ncclCommAbort\0",
            all_reduce: b"ncclAllReduce\0",
            broadcast: b"ncclBroadcast\0",
            all_gather: b"ncclAllGather\0",
            reduce_scatter: b"ncclReduceScatter\0",
            group_start: b"ncclGroupStart\0",
            group_end: b"ncclGroupEnd\0",
        })
    }

    /// The library's version in NCCL's own coding, as 22809 for 2.28.9.
    pub fn version(&self) -> Result<c_int> {
        let mut version = 0;
        // SAFETY: the pointer is to an integer that outlives the call.
        self.check(unsafe { (self.get_version)(&mut version) }, None).context("asking NCCL for its version")?;
        Ok(version)
    }

    /// The id that one rank makes and all ranks need to form a communicator.
    pub fn unique_id(&self) -> Result<[u8; 128]> {
        let mut id = ncclUniqueId { internal: [0; 128] };
        // SAFETY: the pointer is to an id that outlives the call.
        self.check(unsafe { (self.get_unique_id)(&mut id) }, None).context("asking NCCL for a unique id")?;
        Ok(id.internal.map(|byte| byte as u8))
    }

    /// An error for every code except success, with NCCL's message for the code and its last error.
    pub fn check(&self, code: c_int, communicator: Option<ncclComm_t>) -> Result<()> {
        if code == ncclResult_t::ncclSuccess as c_int {
            return Ok(());
        }
        // SAFETY: NCCL gives a static C string for every code, unknown ones too.
        let message = unsafe { CStr::from_ptr((self.get_error_string)(code)) }.to_string_lossy();
        // SAFETY: a communicator or null, as the function takes; the C string is NCCL's own and lasts until its next error.
        let last = unsafe { (self.get_last_error)(communicator.unwrap_or(std::ptr::null_mut())) };
        let last = match last.is_null() {
            true => String::new(),
            // SAFETY: not null, so a C string of NCCL's, as above.
            false => unsafe { CStr::from_ptr(last) }.to_string_lossy().trim().to_string(),
        };
        let last = if last.is_empty() { last } else { format!("; NCCL's last error: {last}") };
        bail!("NCCL: {message} ({code}){last}")
    }
}

/// The wheel beside libtorch, then the dynamic loader's search, which finds the library that libtorch has loaded.
fn candidates() -> Result<Vec<PathBuf>> {
    let torch = torch::library_folder()?;
    let wheel = torch.ancestors().nth(2).map(|packages| packages.join("nvidia/nccl/lib").join(LIBRARY));
    Ok(wheel.into_iter().filter(|path| path.exists()).chain([Path::new(LIBRARY).to_path_buf()]).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_library_beside_libtorch_reports_its_version_and_its_error_messages() {
        let api = Api::get().unwrap();
        let version = api.version().unwrap();
        assert!((22800..30000).contains(&version), "NCCL {version}: its config is that of 2.28");
        let error = api.check(ncclResult_t::ncclInvalidUsage as c_int, None).unwrap_err().to_string();
        assert!(error.starts_with("NCCL: invalid usage") && error.contains("(5)"), "{error}");
        assert!(api.check(ncclResult_t::ncclSuccess as c_int, None).is_ok());
    }

    #[test]
    fn a_missing_library_is_an_error_that_names_every_place() {
        let places = ["/nowhere/libnccl.so.2", "/no/place/libnccl.so.2"].map(PathBuf::from);
        let error = Api::load(&places).err().unwrap().to_string();
        assert!(places.iter().all(|place| error.contains(place.to_str().unwrap())), "{error}");
    }

    #[test]
    fn a_library_that_is_not_nccl_is_refused_by_the_function_it_lacks() {
        let torch = torch::library_folder().unwrap().join("libc10.so");
        let error = format!("{:#}", Api::load(&[torch]).err().unwrap());
        assert!(error.contains("libc10.so") && error.contains("ncclGetVersion"), "{error}");
    }
}
