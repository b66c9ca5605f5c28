//! NCCL's functions, loaded at run time, and its error messages.
//!
//! The types are cudarc's. Its own loader looks for `libnccl.so`, a link that only NVIDIA's development packages have;
//! the wheel that PyTorch uses holds `libnccl.so.2` alone.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use anyhow::{Context as _, Result, bail};
use cudarc::nccl::sys::{ncclComm_t, ncclDataType_t, ncclRedOp_t, ncclResult_t, ncclUniqueId};
use libloading::Library;

use crate::error::Fault;
use crate::printable::shown_path;
use crate::root::installing;
use crate::torch;

const LIBRARY: &str = "libnccl.so.2";

type Stream = *mut c_void;

/// Declares [`Api`] by a table: a field, NCCL's name and type of the function.
macro_rules! api {
    ($($field:ident = $name:literal: fn($($parameter:ty),*) -> $result:ty,)*) => {
        /// The functions that we call.
        pub(super) struct Api {
            $(pub $field: unsafe extern "C" fn($($parameter),*) -> $result,)*
        }

        impl Api {
            fn find(library: Library) -> Result<Self> {
                // Never unloaded: communicators and NCCL's own threads live as long as the process.
                let library: &'static Library = Box::leak(Box::new(library));
                Ok(Self { $(
                    // SAFETY: the type is that function's in nccl.h 2.28, with enums as the C ints they are.
                    $field: *unsafe { library.get($name) }?,
                )* })
            }
        }
    };
}

api! {
    get_version = "ncclGetVersion": fn(*mut c_int) -> c_int,
    get_unique_id = "ncclGetUniqueId": fn(*mut ncclUniqueId) -> c_int,
    get_error_string = "ncclGetErrorString": fn(c_int) -> *const c_char,
    get_last_error = "ncclGetLastError": fn(ncclComm_t) -> *const c_char,
    comm_init_rank = "ncclCommInitRank": fn(*mut ncclComm_t, c_int, ncclUniqueId, c_int) -> c_int,
    comm_get_async_error = "ncclCommGetAsyncError": fn(ncclComm_t, *mut c_int) -> c_int,
    comm_finalize = "ncclCommFinalize": fn(ncclComm_t) -> c_int,
    comm_destroy = "ncclCommDestroy": fn(ncclComm_t) -> c_int,
    comm_abort = "ncclCommAbort": fn(ncclComm_t) -> c_int,
    all_reduce = "ncclAllReduce":
        fn(*const c_void, *mut c_void, usize, ncclDataType_t, ncclRedOp_t, ncclComm_t, Stream) -> c_int,
    broadcast = "ncclBroadcast": fn(*const c_void, *mut c_void, usize, ncclDataType_t, c_int, ncclComm_t, Stream) -> c_int,
    all_gather = "ncclAllGather": fn(*const c_void, *mut c_void, usize, ncclDataType_t, ncclComm_t, Stream) -> c_int,
    reduce_scatter = "ncclReduceScatter":
        fn(*const c_void, *mut c_void, usize, ncclDataType_t, ncclRedOp_t, ncclComm_t, Stream) -> c_int,
    group_start = "ncclGroupStart": fn() -> c_int,
    group_end = "ncclGroupEnd": fn() -> c_int,
}

impl Api {
    /// Finds and loads NCCL once; later calls repeat the first one's result.
    ///
    /// Errors: [`Fault::NotAvailable`], with the dynamic loader's error for each path that was tried.
    pub fn get() -> Result<&'static Self, Fault> {
        static LOADED: OnceLock<Result<Api, Fault>> = OnceLock::new();
        let missing = |error: anyhow::Error| Fault::NotAvailable {
            needs: format!("NCCL ({LIBRARY})"),
            has: format!("none: {error:#}; {}, or NCCL where the dynamic loader looks", installing()),
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
                Ok(library) => return Self::find(library).with_context(|| shown_path(path)),
                Err(error) => failures.push(format!("{}: {:#}", shown_path(path), anyhow::Error::from(error))),
            }
        }
        bail!("{}", failures.join("; "))
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
        // SAFETY: where not null, a C string of NCCL's, as above.
        let last = if last.is_null() { c"" } else { unsafe { CStr::from_ptr(last) } }.to_string_lossy();
        match last.trim() {
            "" => bail!("NCCL: {message} ({code})"),
            last => bail!("NCCL: {message} ({code}); NCCL's last error: {last}"),
        }
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
        assert!((22800..30000).contains(&version), "NCCL {version}: its functions are those of 2.28");
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
