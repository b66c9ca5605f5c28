//! The boundary to the C++ shim: every function it offers, and how tensors and errors cross.

use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};

use anyhow::{Result, anyhow};
use cxx::{CxxVector, UniquePtr};

use super::autograd::Callback;
use super::hooks::{HookList, new_hook_list};
use crate::error::{Fault, fault_in_words};

pub(super) type TensorList = CxxVector<ffi::Tensor>;

#[cxx::bridge(namespace = "cs336")]
pub(super) mod ffi {
    /// The autocast setting before a scope; `dtype` is libtorch's number of a kind.
    #[derive(Clone, Copy)]
    struct AutocastState {
        enabled: bool,
        dtype: i8,
    }

    /// A quantity now, and its largest value since the peaks were last reset.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    struct Gauge {
        current: u64,
        peak: u64,
    }

    /// What the caching allocator of one device holds.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    struct AllocatorStats {
        /// In tensors, rounded up to the allocator's blocks.
        allocated_bytes: Gauge,
        /// Taken from the driver, whether in use or kept for reuse.
        reserved_bytes: Gauge,
        /// In tensors, or freed but still waited for by a stream: what PyTorch's timeline draws.
        active_bytes: Gauge,
        /// In tensors, before rounding.
        requested_bytes: Gauge,
    }

    /// A parameter and its gradient as a float32 kernel reads them: addresses on the device.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    struct Float32Pair {
        /// False, and the rest zero, where the kernel cannot read one of them.
        fits: bool,
        parameter: u64,
        gradient: u64,
        elements: u64,
    }

    /// Bytes on a device from one address to before another.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    struct AddressRange {
        first: u64,
        end: u64,
    }

    /// A device's memory as its driver counts it, including that of other programs.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    struct MemoryInfo {
        free_bytes: u64,
        total_bytes: u64,
    }

    extern "Rust" {
        type Outcome;
        fn failed(self: &Outcome) -> bool;
        fn message(self: &Outcome) -> String;
        fn save_error(self: &Outcome);
        fn save_out_of_memory();

        type Callback;
        fn forward(
            self: &Callback,
            inputs: &CxxVector<Tensor>,
            outputs: Pin<&mut CxxVector<Tensor>>,
            saved: Pin<&mut CxxVector<Tensor>>,
        ) -> Box<Outcome>;
        fn backward(
            self: &Callback,
            saved: &CxxVector<Tensor>,
            grad_outputs: &CxxVector<Tensor>,
            grad_inputs: Pin<&mut CxxVector<Tensor>>,
        ) -> Box<Outcome>;

        type CompletionCallback;
        fn call(self: &CompletionCallback);

        type HookList;
        fn new_hook_list() -> Box<HookList>;
        fn run(self: &HookList, parameter: &Tensor) -> Box<Outcome>;
    }

    unsafe extern "C++" {
        include!("cs336/src/torch/shim/attention.h");
        include!("cs336/src/torch/shim/autograd.h");
        include!("cs336/src/torch/shim/clock.h");
        include!("cs336/src/torch/shim/device.h");
        include!("cs336/src/torch/shim/gloo.h");
        include!("cs336/src/torch/shim/graph.h");
        include!("cs336/src/torch/shim/library.h");
        include!("cs336/src/torch/shim/profiler.h");
        include!("cs336/src/torch/shim/random.h");

        #[namespace = "at"]
        type Tensor;
        fn new_tensors() -> UniquePtr<CxxVector<Tensor>>;
        fn push(list: Pin<&mut CxxVector<Tensor>>, tensor: &Tensor);
        fn float32_pair(parameter: &Tensor, gradient: &Tensor, cuda_index: i32) -> Result<Float32Pair>;

        fn apply_function(callback: Box<Callback>, inputs: &CxxVector<Tensor>) -> Result<UniquePtr<CxxVector<Tensor>>>;
        fn saved_by(output: &Tensor) -> Result<UniquePtr<CxxVector<Tensor>>>;
        fn hooks_of(parameter: &Tensor) -> Result<&HookList>;
        fn run_backward(output: &Tensor, gradient: &Tensor, retain_graph: bool) -> Result<()>;
        fn release_grad(parameter: &Tensor) -> Result<()>;
        fn set_grad(parameter: &Tensor, gradient: &Tensor) -> Result<()>;
        fn copy_all(to: &CxxVector<Tensor>, from: &CxxVector<Tensor>) -> Result<()>;
        fn bump_version(tensor: &Tensor) -> Result<()>;

        fn flash_attention(q: &Tensor, k: &Tensor, v: &Tensor, is_causal: bool) -> Result<UniquePtr<Tensor>>;
        fn cudnn_attention(q: &Tensor, k: &Tensor, v: &Tensor, is_causal: bool) -> Result<UniquePtr<Tensor>>;

        fn enter_autocast(is_cuda: bool, dtype: i8) -> Result<AutocastState>;
        fn leave_autocast(is_cuda: bool, before: AutocastState) -> Result<()>;
        fn allocator_is_used() -> Result<bool>;
        fn allocator_stats(device: i8) -> Result<AllocatorStats>;
        fn memory_info(device: i8) -> Result<MemoryInfo>;
        fn reset_peak_stats(device: i8) -> Result<()>;
        fn empty_cache(device: i8) -> Result<()>;
        fn current_stream_handle(device: i8) -> Result<u64>;
        fn synchronize_device(device: i8) -> Result<()>;
        fn spin(device: i8, cycles: i64) -> Result<()>;

        #[namespace = "at"]
        type Generator;
        fn new_generator(is_cuda: bool, device: i8, seed: u64) -> Result<UniquePtr<Generator>>;
        fn draw_normal(generator: &Generator, shape: &[i64], dtype: i8) -> Result<UniquePtr<Tensor>>;
        fn draw_uniform(
            generator: &Generator,
            shape: &[i64],
            dtype: i8,
            low: f64,
            high: f64,
        ) -> Result<UniquePtr<Tensor>>;
        fn draw_integers(
            generator: &Generator,
            shape: &[i64],
            dtype: i8,
            low: i64,
            high: i64,
        ) -> Result<UniquePtr<Tensor>>;
        fn draw_permutation(generator: &Generator, n: i64) -> Result<UniquePtr<Tensor>>;

        type EventPair;
        fn new_event_pair(device: i8) -> Result<UniquePtr<EventPair>>;
        fn record_start(self: Pin<&mut EventPair>) -> Result<()>;
        fn record_end(self: Pin<&mut EventPair>) -> Result<()>;
        fn elapsed_seconds(self: &EventPair) -> Result<f64>;

        type SideStream;
        fn enter_side_stream(device: i8) -> Result<UniquePtr<SideStream>>;
        type CudaGraph;
        fn new_cuda_graph(device: i8) -> Result<UniquePtr<CudaGraph>>;
        fn begin(self: Pin<&mut CudaGraph>) -> Result<()>;
        fn end(self: Pin<&mut CudaGraph>, cleared: &[AddressRange]) -> Result<()>;
        fn replay(self: &CudaGraph) -> Result<()>;
        fn num_nodes(self: &CudaGraph) -> u64;

        fn load_library(name: &str) -> Result<()>;
        fn abi_version() -> u64;
        fn cpu_capability() -> Result<String>;
        fn cudnn_version() -> Result<i64>;
        fn allow_tf32() -> Result<bool>;
        fn set_allow_tf32(allow: bool) -> Result<()>;

        type UserScope;
        fn open_user_scope(name: &str) -> UniquePtr<UserScope>;
        fn start_kineto(is_cuda: bool) -> Result<()>;
        fn start_nvtx() -> Result<()>;
        fn stop_profiler(path: &str) -> Result<()>;

        type GlooWork;
        fn wait(self: &GlooWork, timeout_ms: i64) -> Result<()>;
        fn when_done(self: &GlooWork, callback: Box<CompletionCallback>) -> Result<()>;
        type GlooGroup;
        fn all_reduce_sum(self: &GlooGroup, tensors: &CxxVector<Tensor>) -> Result<UniquePtr<GlooWork>>;
        fn broadcast(self: &GlooGroup, tensor: &Tensor, root: i32) -> Result<UniquePtr<GlooWork>>;
        fn all_gather(
            self: &GlooGroup,
            outputs: &CxxVector<Tensor>,
            inputs: &CxxVector<Tensor>,
        ) -> Result<UniquePtr<GlooWork>>;
        fn reduce_scatter_sum(
            self: &GlooGroup,
            outputs: &CxxVector<Tensor>,
            inputs: &CxxVector<Tensor>,
        ) -> Result<UniquePtr<GlooWork>>;
        fn barrier(self: &GlooGroup) -> Result<UniquePtr<GlooWork>>;
        type KeyStore;
        fn open_store(host: &str, port: u16, listener: i32, timeout_ms: i64) -> Result<UniquePtr<KeyStore>>;
        fn set(self: &KeyStore, key: &str, value: &[u8]) -> Result<()>;
        fn get(self: &KeyStore, key: &str) -> Result<UniquePtr<CxxVector<u8>>>;
        fn has(self: &KeyStore, key: &str) -> Result<bool>;
        fn add(self: &KeyStore, key: &str, number: i64) -> Result<i64>;
        fn under(self: &KeyStore, prefix: &str) -> Result<UniquePtr<KeyStore>>;
        fn connect_gloo(
            store: &KeyStore,
            interface: &str,
            host: &str,
            rank: i32,
            world_size: i32,
            timeout_ms: i64,
        ) -> Result<UniquePtr<GlooGroup>>;
    }

    impl CxxVector<Tensor> {}
}

// SAFETY: these hold atomically counted handles to c10d objects that c10d itself passes between threads. They are not
// `Sync`, so one thread at a time uses each.
unsafe impl Send for ffi::GlooWork {}
// SAFETY: as above.
unsafe impl Send for ffi::GlooGroup {}
// SAFETY: a handle as above; c10d's stores lock themselves around each operation.
unsafe impl Send for ffi::KeyStore {}
// SAFETY: as above.
unsafe impl Sync for ffi::KeyStore {}

/// A Rust callback that C++ calls when an operation ends.
pub(super) struct CompletionCallback(Box<dyn Fn() + Send + Sync>);

impl CompletionCallback {
    pub(super) fn new(callback: impl Fn() + Send + Sync + 'static) -> Box<Self> {
        Box::new(Self(Box::new(callback)))
    }

    /// A panic must not cross into C++, so it is dropped.
    fn call(&self) {
        let _ = catch_unwind(AssertUnwindSafe(|| (self.0)()));
    }
}

/// The result of a Rust callback that C++ called; C++ throws if it is an error.
pub(super) struct Outcome(RefCell<Option<anyhow::Error>>);

impl Outcome {
    /// Runs a callback; its error or panic becomes the outcome, with `context()` before it.
    pub(super) fn of(context: impl Fn() -> String, body: impl FnOnce() -> Result<()>) -> Box<Self> {
        // Unwind safety: values that the body was changing are dropped, or refused because of the error.
        let result = catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|panic| Err(panic_message(panic.as_ref())));
        Box::new(Self(RefCell::new(result.err().map(|error| error.context(context())))))
    }

    fn failed(&self) -> bool {
        self.0.borrow().is_some()
    }

    fn message(&self) -> String {
        self.0.borrow().as_ref().map(|error| format!("{error:#}")).unwrap_or_default()
    }

    fn save_error(&self) {
        if let Some(error) = self.0.take() {
            PENDING.set(Some(Pending::Callback(error)));
        }
    }
}

pub(super) fn panic_message(panic: &(dyn std::any::Any + Send)) -> anyhow::Error {
    let message = panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    anyhow!("panicked: {}", message.unwrap_or("a payload that is no text"))
}

/// What a C++ exception's message does not contain.
enum Pending {
    Callback(anyhow::Error),
    OutOfMemory,
}

thread_local! {
    // Set by the shim as it catches an exception, taken by `check` right after on the same thread: no callback and
    // no other thread comes between, whichever thread of libtorch the exception came from.
    static PENDING: RefCell<Option<Pending>> = const { RefCell::new(None) };
}

fn save_out_of_memory() {
    PENDING.set(Some(Pending::OutOfMemory));
}

/// Restores the type of a shim's error: a callback's own error, [`Fault::OutOfMemory`], or libtorch's message.
pub(super) fn check<T>(result: Result<T, cxx::Exception>) -> Result<T> {
    let pending = PENDING.take();
    result.map_err(|exception| {
        let message = exception.what().trim_end();
        match (pending, fault_in_words(message)) {
            (Some(Pending::Callback(error)), _) => error,
            (_, Some(fault)) => fault.into(),
            (Some(Pending::OutOfMemory), None) => {
                Fault::OutOfMemory { requested_bytes: None, message: message.to_string() }.into()
            }
            (None, None) => anyhow!("{message}"),
        }
    })
}

/// The C++ tensor inside a `tch` tensor.
pub(super) fn borrow(tensor: &tch::Tensor) -> &ffi::Tensor {
    // SAFETY: tch holds a non-null pointer to a heap `at::Tensor` that it frees only on drop, and `tensor` stays
    // borrowed for as long as the result.
    unsafe { &*tensor.as_ptr().cast::<ffi::Tensor>() }
}

/// A `tch` tensor sharing the storage and the graph of a C++ one.
pub(super) fn share(tensor: &ffi::Tensor) -> tch::Tensor {
    // SAFETY: a live `at::Tensor` is what tch's pointer means; tch copies the handle and keeps no pointer to this one.
    unsafe { tch::Tensor::clone_from_ptr(std::ptr::from_ref(tensor).cast_mut().cast()) }
}

pub(super) fn list<'a>(tensors: impl IntoIterator<Item = &'a tch::Tensor>) -> UniquePtr<TensorList> {
    let mut list = ffi::new_tensors();
    for tensor in tensors {
        ffi::push(list.pin_mut(), borrow(tensor));
    }
    list
}

pub(super) fn share_all(list: &TensorList) -> Vec<tch::Tensor> {
    list.iter().map(share).collect()
}

/// As [`share_all`], with `None` for an undefined tensor.
pub(super) fn share_defined(list: &TensorList) -> Vec<Option<tch::Tensor>> {
    list.iter().map(|tensor| Some(share(tensor)).filter(tch::Tensor::defined)).collect()
}
