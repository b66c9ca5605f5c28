//! Records what a device's allocator does while a body runs.

use std::sync::{Arc, Mutex};
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, Result, ensure};
use ffi::{Action, Event, Snapshot, Source};
use tch::Device;

use super::History;
use crate::torch::allocator_stats::observe_cpu;
use crate::torch::bridge::check;
use crate::torch::library::{cuda_index, require_built_version};
use crate::torch::lock;
use crate::torch::nvtx::{self, current as current_range};

#[cxx::bridge(namespace = "cs336")]
pub(super) mod ffi {
    /// The steps of c10's caching allocators; cxx compares the numbers with c10/core/CachingDeviceAllocator.h.
    #[derive(Debug)]
    #[repr(u32)]
    enum Action {
        #[cxx_name = "ALLOC"]
        Alloc,
        #[cxx_name = "FREE_REQUESTED"]
        FreeRequested,
        /// The memory may be used again, now that no stream waits for it.
        #[cxx_name = "FREE_COMPLETED"]
        FreeCompleted,
        #[cxx_name = "SEGMENT_ALLOC"]
        SegmentAlloc,
        #[cxx_name = "SEGMENT_FREE"]
        SegmentFree,
        #[cxx_name = "SEGMENT_MAP"]
        SegmentMap,
        #[cxx_name = "SEGMENT_UNMAP"]
        SegmentUnmap,
        #[cxx_name = "SNAPSHOT"]
        Snapshot,
        #[cxx_name = "OOM"]
        OutOfMemory,
    }

    /// What ran when memory was allocated or freed; either part may be empty.
    #[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord)]
    struct Source {
        /// The open ranges, outermost first, as "forward/attention".
        range: String,
        /// libtorch's operators and autograd nodes, outermost first, as "aten::softmax/aten::_softmax".
        operators: String,
    }

    /// One step of an allocator.
    #[derive(Debug, Clone, PartialEq)]
    struct Event {
        action: Action,
        /// Of the memory; of an out-of-memory, the bytes that the device had left.
        address: u64,
        /// As asked for, before any rounding; of a segment, its whole size.
        bytes: u64,
        /// Since 1970.
        time_us: i64,
        source: Source,
    }

    #[derive(Debug, Clone, PartialEq)]
    struct SegmentBlock {
        bytes: u64,
        requested_bytes: u64,
        /// Belongs to a tensor.
        allocated: bool,
        /// Belongs to a tensor, or was given back while a stream may still use it.
        active: bool,
        /// Of its allocation; empty for one that is older than the recording.
        source: Source,
    }

    /// Memory that a caching allocator has from the driver, at the end of a recording.
    #[derive(Debug, Clone, PartialEq)]
    struct Segment {
        address: u64,
        bytes: u64,
        is_large: bool,
        /// Side by side, filling the segment.
        blocks: Vec<SegmentBlock>,
    }

    struct Snapshot {
        events: Vec<Event>,
        segments: Vec<Segment>,
    }

    extern "Rust" {
        fn current_range() -> String;
    }

    unsafe extern "C++" {
        include!("cs336/src/torch/shim/history.h");

        type Action;

        type OperatorNames;
        fn name_operators() -> Result<UniquePtr<OperatorNames>>;
        fn running_operators() -> String;

        fn start_cuda_history(max_entries: usize) -> Result<()>;
        fn cuda_snapshot(device: i8) -> Result<Snapshot>;
        fn stop_cuda_history() -> Result<()>;
    }
}

/// Far more steps than one training step takes (some 15,000); beyond them the allocator drops the oldest.
const MAX_EVENTS: usize = 1 << 20;

/// Runs `body` and gives what the allocator of `device` did meanwhile; `before_bytes` are the tensors alive before.
///
/// On the CPU, steps are those of this thread and of the backward passes that it starts, as for
/// [`crate::torch::allocator_stats::AllocationTracker`]. On CUDA they are those of the whole process, and each step
/// waits for the device first: the order and the sizes stay, and the times become those of the device's work instead of
/// those of a host that runs ahead of it. Fails where a history is being kept already or is too long to be kept.
pub fn record<T>(device: Device, before_bytes: u64, body: impl FnOnce() -> Result<T>) -> Result<(T, History)> {
    let _ranges = nvtx::Listener::start();
    let _operators = check(ffi::name_operators()).context("failed to listen to operators")?;
    let (value, Snapshot { events, segments }) = match device {
        Device::Cpu => record_cpu(body)?,
        _ => record_cuda(device, body).context("failed to record the CUDA allocator's history")?,
    };
    ensure!(events.len() < MAX_EVENTS, "the history has outgrown {MAX_EVENTS} steps: record a shorter body");
    Ok((value, History { before_bytes, events, segments }))
}

fn record_cpu<T>(body: impl FnOnce() -> Result<T>) -> Result<(T, Snapshot)> {
    let events = Arc::new(Mutex::new(Vec::new()));
    let recorded = events.clone();
    let _observer = observe_cpu(move |address, bytes| {
        let event = Event {
            action: if bytes < 0 { Action::FreeCompleted } else { Action::Alloc },
            address,
            bytes: bytes.unsigned_abs(),
            time_us: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_micros() as i64),
            source: Source { range: current_range(), operators: ffi::running_operators() },
        };
        lock(&recorded).push(event);
    });
    let value = body()?;
    let events = std::mem::take(&mut *lock(&events));
    Ok((value, Snapshot { events, segments: Vec::new() }))
}

fn record_cuda<T>(device: Device, body: impl FnOnce() -> Result<T>) -> Result<(T, Snapshot)> {
    let index = cuda_index(device)?;
    // The allocator is called through its class's layout.
    require_built_version()?;
    check(ffi::start_cuda_history(MAX_EVENTS))?;
    let _stop = Stop;
    let value = body()?;
    Ok((value, check(ffi::cuda_snapshot(index))?))
}

/// Ends the recording, also when the body failed.
struct Stop;

impl Drop for Stop {
    fn drop(&mut self) {
        // After a failure the recording goes on unread, until the next one clears it.
        let _ = check(ffi::stop_cuda_history());
    }
}

#[cfg(test)]
mod tests {
    use tch::{Kind, Tensor};

    use super::*;
    use crate::torch::allocator_stats::AllocationTracker;
    use crate::torch::autograd::backward;
    use crate::torch::nvtx::range;

    fn zeros(floats: i64) -> Tensor {
        Tensor::zeros([floats], (Kind::Float, Device::Cpu))
    }

    fn steps(history: &History, action: Action) -> Vec<(u64, &str)> {
        let steps = history.events.iter().filter(|e| e.action == action);
        steps.map(|e| (e.bytes, e.source.range.as_str())).collect()
    }

    #[test]
    fn each_event_has_its_bytes_range_and_operators() {
        let tracker = AllocationTracker::start(Device::Cpu).unwrap();
        let kept = zeros(16);
        let (x, history) = record(Device::Cpu, tracker.in_use().unwrap(), || {
            let x = range("outer", || range("inner", || zeros(256).softmax(0, None)));
            drop(kept);
            Ok(x)
        })
        .unwrap();
        assert_eq!(history.before_bytes, 64);
        assert_eq!(steps(&history, Action::Alloc), [(1024, "outer/inner"), (1024, "outer/inner")]);
        assert_eq!(steps(&history, Action::FreeCompleted), [(1024, "outer/inner"), (64, "")]);
        let operators: Vec<_> = history.events.iter().map(|e| e.source.call()).collect();
        assert_eq!(operators, ["aten::zeros", "aten::softmax", "", ""]);
        assert!(history.events.windows(2).all(|pair| pair[0].time_us <= pair[1].time_us));
        // The outer tracker has counted everything too.
        assert_eq!(tracker.in_use().unwrap(), 1024);
        drop(x);
        assert_eq!(tracker.in_use().unwrap(), 0);
    }

    #[test]
    fn an_allocation_in_backward_names_its_autograd_node() {
        let x = zeros(256).set_requires_grad(true);
        let loss = x.exp().sum(Kind::Float);
        let ((), history) = record(Device::Cpu, 0, || range("backward", || backward(&loss))).unwrap();
        let gradient = history.events.iter().find(|e| e.bytes == 1024).unwrap();
        assert_eq!(gradient.source.range, "backward");
        assert_eq!(gradient.source.call(), "ExpBackward0", "{:?}", gradient.source);
    }

    #[test]
    fn recording_stops_when_the_body_fails() {
        let error = record(Device::Cpu, 0, || -> Result<()> { anyhow::bail!("expected") }).unwrap_err();
        assert_eq!(error.to_string(), "expected");
        let ((), history) = record(Device::Cpu, 0, || Ok(())).unwrap();
        assert_eq!(history.events, []);
    }
}
