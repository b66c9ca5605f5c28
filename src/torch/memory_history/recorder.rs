//! Records what a device's allocator does while a body runs.

use anyhow::{Context as _, Result, ensure};
use tch::Device;

use super::{Action, Event, History, Segment, SegmentBlock, Source};
use crate::torch::bridge::check;
use crate::torch::library::{cuda_index, require_built_version};
use crate::torch::nvtx;

#[cxx::bridge(namespace = "cs336")]
mod ffi {
    struct RawEvent {
        /// A number of c10's `TraceEntry::Action`.
        action: u8,
        address: u64,
        bytes: u64,
        time_us: i64,
        range: String,
        operators: String,
    }

    struct RawBlock {
        bytes: u64,
        requested_bytes: u64,
        allocated: bool,
        active: bool,
        range: String,
        operators: String,
    }

    struct RawSegment {
        address: u64,
        bytes: u64,
        is_large: bool,
        blocks: Vec<RawBlock>,
    }

    struct RawSnapshot {
        events: Vec<RawEvent>,
        segments: Vec<RawSegment>,
    }

    extern "Rust" {
        fn current_range() -> String;
    }

    unsafe extern "C++" {
        include!("cs336/src/torch/shim/history.h");

        type OperatorNames;
        fn name_operators() -> Result<UniquePtr<OperatorNames>>;

        type CpuLog;
        fn log_cpu_allocations() -> UniquePtr<CpuLog>;
        fn take(self: &CpuLog) -> Vec<RawEvent>;

        fn start_cuda_history(max_entries: usize, paced: bool) -> Result<()>;
        fn cuda_snapshot(device: i8) -> Result<RawSnapshot>;
        fn stop_cuda_history() -> Result<()>;
    }
}

/// Far more steps than one training step takes (some 15,000); beyond them the allocator drops the oldest.
const MAX_EVENTS: usize = 1 << 20;

/// Runs `body` and gives what the allocator of `device` did meanwhile; `before_bytes` are the tensors alive before.
///
/// On the CPU, steps are those of this thread and of the backward passes that it starts, as for
/// [`crate::torch::allocator_stats::AllocationTracker`], under which this may run. On CUDA they are those of the whole process, and each step
/// waits for the device first: the order and the sizes stay, and the times become those of the device's work instead of
/// those of a host that runs ahead of it. Fails where a history is being kept already or is too long to be kept.
pub fn record<T>(device: Device, before_bytes: u64, body: impl FnOnce() -> Result<T>) -> Result<(T, History)> {
    let _ranges = nvtx::Listener::start();
    let _operators = check(ffi::name_operators()).context("failed to listen to operators")?;
    let (value, raw) = match device {
        Device::Cpu => {
            let log = ffi::log_cpu_allocations();
            let value = body()?;
            (value, ffi::RawSnapshot { events: log.take(), segments: Vec::new() })
        }
        _ => record_cuda(device, body).context("failed to record the CUDA allocator's history")?,
    };
    ensure!(raw.events.len() < MAX_EVENTS, "the history has outgrown {MAX_EVENTS} steps: record a shorter body");
    let events = raw.events.into_iter().map(event).collect::<Result<_>>()?;
    Ok((value, History { before_bytes, events, segments: raw.segments.into_iter().map(segment).collect() }))
}

fn record_cuda<T>(device: Device, body: impl FnOnce() -> Result<T>) -> Result<(T, ffi::RawSnapshot)> {
    let index = cuda_index(device)?;
    // The allocator is called through its class's layout.
    require_built_version()?;
    check(ffi::start_cuda_history(MAX_EVENTS, true))?;
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

fn current_range() -> String {
    nvtx::current()
}

fn event(raw: ffi::RawEvent) -> Result<Event> {
    let ffi::RawEvent { action, address, bytes, time_us, range, operators } = raw;
    let action = Action::of_c10(action).with_context(|| format!("the allocator's action {action} is not known"))?;
    Ok(Event { action, address, bytes, time_us, source: Source { range, operators } })
}

fn segment(raw: ffi::RawSegment) -> Segment {
    let block = |raw: ffi::RawBlock| SegmentBlock {
        bytes: raw.bytes,
        requested_bytes: raw.requested_bytes,
        allocated: raw.allocated,
        active: raw.active,
        source: Source { range: raw.range, operators: raw.operators },
    };
    Segment {
        address: raw.address,
        bytes: raw.bytes,
        is_large: raw.is_large,
        blocks: raw.blocks.into_iter().map(block).collect(),
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
