//! A CUDA stream of our own, and events that order it with libtorch's stream and time both.

use std::ffi::c_void;
use std::sync::Arc;

use anyhow::{Context as _, Result};
use cudarc::driver::result::stream::StreamKind;
use cudarc::driver::sys::{self, CUevent_flags, CUevent_wait_flags, CUresult};
use cudarc::driver::{CudaContext, DriverError, result};
use tch::Device;

use super::device::{context_of, in_context};
use crate::torch;

/// A stream of the device's highest priority: its short kernels start before those that libtorch queued.
pub struct Stream {
    device: Device,
    context: Arc<CudaContext>,
    raw: sys::CUstream,
}

/// A CUDA event: a point in the work of a stream.
pub struct Event {
    device: Device,
    context: Arc<CudaContext>,
    raw: sys::CUevent,
}

// SAFETY: any thread may use CUDA handles; every call here makes their context current first.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}
// SAFETY: as above.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

/// Makes `device` current for this thread's CUDA calls.
///
/// Errors: [`crate::error::Fault::NotAvailable`] without the device.
pub fn make_current(device: Device) -> Result<()> {
    Ok(context_of(device)?.bind_to_thread()?)
}

/// Whether this thread's stream on `device` is being captured in a CUDA graph.
///
/// Errors: [`crate::error::Fault::NotAvailable`] without the device; CUDA's.
pub fn is_capturing(device: Device) -> Result<bool> {
    let stream = torch::stream::current_stream(device)? as sys::CUstream;
    let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    // SAFETY: libtorch never frees its streams, and the status outlives the call.
    let ask = || unsafe { sys::cuStreamIsCapturing(stream, &mut status).result() };
    let context = context_of(device)?;
    in_context(&context, ask).context("asking whether a stream is being captured")?;
    Ok(status == sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE)
}

impl Stream {
    /// Errors: [`crate::error::Fault::NotAvailable`] without the device; CUDA's.
    pub fn new(device: Device) -> Result<Self> {
        let context = context_of(device)?;
        let create = || {
            let (_least, greatest) = result::stream::get_priority_range()?;
            result::stream::create_with_priority(StreamKind::NonBlocking, greatest)
        };
        let raw = in_context(&context, create).with_context(|| format!("making a stream on {device:?}"))?;
        Ok(Self { device, context, raw })
    }

    /// The `cudaStream_t`, which lives as long as `self`.
    pub fn as_ptr(&self) -> *mut c_void {
        self.raw.cast()
    }

    /// As [`Event::new`] on the stream's device.
    pub fn event(&self, is_timed: bool) -> Result<Event> {
        Event::new(self.device, is_timed)
    }

    /// Later work of this stream waits for `event`; the host does not.
    pub fn wait_for(&self, event: &Event) -> Result<()> {
        event.make_wait(self.raw)
    }

    /// Runs `body` with the stream's device current on this thread.
    pub fn on_device<T>(&self, body: impl FnOnce() -> T) -> Result<T> {
        in_context(&self.context, || Ok(body()))
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: made by us and not used after this; CUDA completes the work on it first.
        let destroy = || unsafe { result::stream::destroy(self.raw) };
        // Fails only where the device is lost, and then there is nothing left to give back.
        let _ = in_context(&self.context, destroy);
    }
}

impl Event {
    /// `is_timed` says whether the event records its time; one that does not is cheaper.
    pub fn new(device: Device, is_timed: bool) -> Result<Self> {
        let context = context_of(device)?;
        let flags = if is_timed { CUevent_flags::CU_EVENT_DEFAULT } else { CUevent_flags::CU_EVENT_DISABLE_TIMING };
        let raw = in_context(&context, || result::event::create(flags)).context("making a CUDA event")?;
        Ok(Self { device, context, raw })
    }

    /// Records the event after all work of `stream`.
    pub fn record_on(&self, stream: &Stream) -> Result<()> {
        self.record(stream.raw)
    }

    /// Records the event after all work that libtorch launched from this thread.
    pub fn record_current(&self) -> Result<()> {
        self.record(self.current()?)
    }

    fn record(&self, stream: sys::CUstream) -> Result<()> {
        // SAFETY: both are alive (libtorch never frees its streams), and of this context.
        self.call("recording a CUDA event", || unsafe { result::event::record(self.raw, stream) })
    }

    /// Later work that libtorch launches from this thread waits for the event; the host does not.
    pub fn make_current_stream_wait(&self) -> Result<()> {
        self.make_wait(self.current()?)
    }

    fn make_wait(&self, stream: sys::CUstream) -> Result<()> {
        // SAFETY: both are alive, as above; CUDA itself keeps what it needs of the event.
        let wait =
            || unsafe { result::stream::wait_event(stream, self.raw, CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT) };
        self.call("waiting for a CUDA event", wait)
    }

    /// Whether the work before the event is done; does not block.
    ///
    /// Errors: those of kernels that failed before it.
    pub fn has_passed(&self) -> Result<bool> {
        // SAFETY: the event is alive.
        let query = || match unsafe { result::event::query(self.raw) } {
            Err(DriverError(CUresult::CUDA_ERROR_NOT_READY)) => Ok(false),
            other => other.map(|()| true),
        };
        self.call("querying a CUDA event", query)
    }

    /// Blocks until the work before the event is done.
    pub fn wait(&self) -> Result<()> {
        // SAFETY: the event is alive.
        self.call("waiting for a CUDA event", || unsafe { result::event::synchronize(self.raw) })
    }

    /// Seconds on the device from `earlier` to this event; both must be timed and done.
    pub fn seconds_since(&self, earlier: &Event) -> Result<f64> {
        // SAFETY: both events are alive; CUDA refuses what it cannot compare.
        let elapsed = || unsafe { result::event::elapsed(earlier.raw, self.raw) };
        let milliseconds = self.call("comparing CUDA events", elapsed)?;
        Ok(f64::from(milliseconds) / 1e3)
    }

    fn current(&self) -> Result<sys::CUstream> {
        Ok(torch::stream::current_stream(self.device)? as sys::CUstream)
    }

    fn call<T>(&self, what: &'static str, body: impl FnOnce() -> Result<T, DriverError>) -> Result<T> {
        in_context(&self.context, body).context(what)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: made by us and not used after this; CUDA keeps it until no work waits for it.
        let destroy = || unsafe { result::event::destroy(self.raw) };
        // Fails only where the device is lost, and then there is nothing left to give back.
        let _ = in_context(&self.context, destroy);
    }
}

/// The least mean time of a call over three runs of `calls`, in seconds, after one that is not timed. `call` launches on the stream
/// that libtorch's operators of this thread use; this waits for it.
pub fn least_seconds(device: Device, calls: usize, call: impl Fn() -> Result<()>) -> Result<f64> {
    let [start, end] = [Event::new(device, true)?, Event::new(device, true)?];
    call()?;
    let mut least = f64::INFINITY;
    for _ in 0..3 {
        start.record_current()?;
        (0..calls).try_for_each(|_| call())?;
        end.record_current()?;
        end.wait()?;
        least = least.min(end.seconds_since(&start)? / calls as f64);
    }
    Ok(least)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::{Fault, fault_of};

    #[test]
    fn a_device_that_is_not_there_is_a_typed_fault() {
        for device in [Device::Cpu, Device::Cuda(63)] {
            let faults = [Stream::new(device).map(drop), Event::new(device, true).map(drop), make_current(device)];
            for error in faults.map(Result::unwrap_err) {
                assert!(matches!(fault_of(&error), Some(Fault::NotAvailable { .. })), "{error:#}");
            }
        }
    }
}
