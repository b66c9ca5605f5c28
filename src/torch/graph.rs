//! Work of a device that is captured once as a CUDA graph and then replayed at the cost of a single launch.

use std::cell::RefCell;
use std::sync::Mutex;

use anyhow::{Context as _, Result};
use cxx::UniquePtr;
use tch::{Device, Tensor};

use super::bridge::{check, ffi};
use super::library::{cuda_index, require_built_version};
use super::lock;
use super::memory::empty_cache;
use super::stream::{self, synchronize};

/// The work that libtorch and this thread launched in a closure, as a CUDA graph.
///
/// A replay runs the same kernels on the same addresses: new inputs are copied into the tensors that the closure read,
/// and results appear in those that it wrote. Tensors made during the capture live in a memory pool of the graph's own
/// and hold nothing before the first replay. The graph keeps no tensor alive that existed before: the caller must.
pub struct Captured<T> {
    graph: UniquePtr<ffi::CudaGraph>,
    output: T,
}

thread_local! {
    /// What the capture that is under way on this thread has cleared for its kernels; `None` without one.
    static CLEARED: RefCell<Option<Vec<ffi::AddressRange>>> = const { RefCell::new(None) };
}

impl<T> Captured<T> {
    /// Records what `body` launches on `device`, autograd's backward included, without running it.
    ///
    /// Everything that libraries set up at first use (cuBLAS handles, workspaces, optimizer state) must exist: run the
    /// same body at least once, better three times, inside [`on_side_stream`] before, and let no autograd graph of
    /// those runs live on. Gradients must be absent ([`crate::torch::autograd::release_grad`]), or the replays would add
    /// to them. The body may not wait for the device (`double_value`, a copy to the host), copy from ordinary host
    /// memory, draw random numbers or use other streams. Only one capture is under way in a process at a time (others
    /// wait), and meanwhile no thread may empty the allocator's cache.
    ///
    /// Errors: those of `body`; CUDA's, for work that a graph cannot hold; and [`crate::error::Fault::NotAvailable`] on
    /// the CPU. After an error the device can be used as before.
    pub fn capture(device: Device, body: impl FnOnce() -> Result<T>) -> Result<Self> {
        let index = cuda_index(device)?;
        require_built_version()?;
        static UNDER_WAY: Mutex<()> = Mutex::new(());
        let _only_one = lock(&UNDER_WAY);
        synchronize(device)?;
        // The pool takes fresh memory from the driver, and cannot empty the cache while the capture is under way.
        empty_cache(device)?;
        // Dropped before its capture has ended, it abandons the capture.
        let mut graph = check(ffi::new_cuda_graph(index))?;
        let _side_stream = check(ffi::enter_side_stream(index))?;
        check(graph.pin_mut().begin()).context("starting to capture a CUDA graph")?;
        CLEARED.set(Some(Vec::new()));
        let output = body();
        let cleared = CLEARED.take().unwrap_or_default();
        let output = output.context("while a CUDA graph was captured")?;
        check(graph.pin_mut().end(&cleared)).context(
            "a CUDA graph cannot hold what was captured: it may not wait for the device, copy from or to ordinary host \
             memory, or leave work on other streams",
        )?;
        Ok(Self { graph, output })
    }

    /// Launches the captured work once more on the thread's current stream, without waiting for it.
    pub fn replay(&self) -> Result<()> {
        check(self.graph.replay()).context("replaying a CUDA graph")
    }

    /// The body's value; every replay writes its tensors again.
    pub fn output(&self) -> &T {
        &self.output
    }

    /// Kernels, copies and fills that one replay launches.
    pub fn num_nodes(&self) -> u64 {
        self.graph.num_nodes()
    }
}

/// Leaves out of the graph that this thread captures, if any, what fills a part of `cleared` with zeros. To be called when the
/// body has filled all of it; each part must serve one kernel, which finds it as it was filled.
pub fn leave_out_fills(cleared: &Tensor) {
    CLEARED.with_borrow_mut(|all| {
        let Some(all) = all else { return };
        let first = cleared.data_ptr() as u64;
        let bytes = (cleared.numel() * cleared.kind().elt_size_in_bytes()) as u64;
        all.push(ffi::AddressRange { first, end: first + bytes });
    });
}

/// Runs `body` on the stream that captures use, between two synchronisations of `device`.
///
/// Errors: those of `body`; [`crate::error::Fault::NotAvailable`] on the CPU.
pub fn on_side_stream<T>(device: Device, body: impl FnOnce() -> Result<T>) -> Result<T> {
    cuda_index(device)?;
    synchronize(device)?;
    stream::on_side_stream(device, || {
        let value = body()?;
        synchronize(device)?;
        Ok(value)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::{Fault, fault_of};

    #[test]
    fn capture_on_the_cpu_is_a_typed_fault() {
        let errors = [Captured::capture(Device::Cpu, || Ok(())).map(drop), on_side_stream(Device::Cpu, || Ok(()))];
        for error in errors {
            let error = error.unwrap_err();
            assert!(matches!(fault_of(&error), Some(Fault::NotAvailable { .. })), "{error:#}");
        }
    }
}
