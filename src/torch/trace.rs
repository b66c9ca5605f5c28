//! A profile as plain events, read from the Chrome trace that Kineto writes.

use anyhow::{Context as _, Result};
use serde::Deserialize;
use serde_json::Value;

pub mod ranges;

/// Every operator, range, CUDA call and piece of GPU work in a profile, in no particular order.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Trace {
    pub events: Vec<Event>,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Event {
    pub source: Source,
    pub name: String,
    /// On a clock of the collector's that all events of a trace share.
    pub start_ns: i64,
    pub duration_ns: i64,
    /// The system's number of the host thread, or the number of the GPU's stream.
    pub thread: i64,
    /// The id that GPU work shares with the call that launched it.
    pub correlation: Option<i64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// One of libtorch's operators, or a node of its backward pass.
    Operator,
    /// A range of [`crate::torch::nvtx`].
    Range,
    /// A call of CUDA's runtime or driver.
    Call,
    Kernel,
    Memcpy,
    Memset,
}

impl Source {
    pub fn is_gpu(self) -> bool {
        matches!(self, Self::Kernel | Self::Memcpy | Self::Memset)
    }
}

impl Event {
    pub fn end_ns(&self) -> i64 {
        self.start_ns + self.duration_ns
    }
}

/// The parts of Kineto's `output_json.cpp` that are read; the rest is ignored.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ChromeTrace {
    trace_events: Vec<ChromeEvent>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct ChromeEvent {
    ph: String,
    cat: String,
    name: String,
    /// Microseconds with three decimals, as is `dur`.
    ts: f64,
    dur: f64,
    // A number for a thread, a name for other rows.
    tid: Value,
    args: ChromeArguments,
}

// Values instead of numbers, because Kineto writes some as text, such as an unknown stream.
#[derive(Default, Deserialize)]
#[serde(default)]
struct ChromeArguments {
    stream: Value,
    correlation: Value,
}

impl Trace {
    /// Reads what `torch.profiler` and [`crate::torch::profiler`] write; times are right to a nanosecond or two.
    pub fn from_chrome_json(json: &[u8]) -> Result<Self> {
        let file: ChromeTrace =
            serde_json::from_slice(json).context("this is not a Chrome trace as Kineto writes it")?;
        let events = file.trace_events.into_iter().filter(|event| event.ph == "X");
        Ok(Self { events: events.filter_map(ChromeEvent::read).collect() })
    }
}

impl ChromeEvent {
    /// `None` for what is neither work nor range nor call (the profiler's own overhead, its mirror of ranges on the GPU).
    fn read(self) -> Option<Event> {
        let source = match self.cat.as_str() {
            "cpu_op" => Source::Operator,
            "user_annotation" => Source::Range,
            "cuda_runtime" | "cuda_driver" => Source::Call,
            "kernel" => Source::Kernel,
            "gpu_memcpy" => Source::Memcpy,
            "gpu_memset" => Source::Memset,
            _ => return None,
        };
        let thread = if source.is_gpu() { self.args.stream.as_i64().or(self.tid.as_i64()) } else { self.tid.as_i64() };
        let nanoseconds = |microseconds: f64| (microseconds * 1e3).round() as i64;
        Some(Event {
            source,
            name: self.name,
            start_ns: nanoseconds(self.ts),
            duration_ns: nanoseconds(self.dur),
            thread: thread.unwrap_or(0),
            correlation: self.args.correlation.as_i64(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinetos_known_categories_become_events_and_others_are_ignored() {
        let json = br#"{"schemaVersion": 1, "displayTimeUnit": "ms", "baseTimeNanoseconds": 1, "traceEvents": [
            {"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": 7812345678901.125, "dur": 3.5,
             "args": {"External id": 5, "device": 0, "stream": 7, "correlation": 37, "grid": [1, 1, 1]}},
            {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 9, "tid": 9, "ts": 10, "dur": 1,
             "args": {"cbid": 211, "correlation": 37}},
            {"ph": "X", "cat": "cuda_driver", "name": "cuLaunchKernel", "pid": 9, "tid": 9, "ts": 12, "dur": 1,
             "args": {"correlation": "38"}},
            {"ph": "X", "cat": "gpu_memset", "name": "Memset (Device)", "pid": 0, "tid": "stream 7", "ts": 1, "dur": 2},
            {"ph": "s", "cat": "ac2g", "name": "ac2g", "id": 37, "pid": 9, "tid": 9, "ts": 10},
            {"ph": "X", "cat": "gpu_user_annotation", "name": "forward", "pid": 0, "tid": 7, "ts": 1, "dur": 2},
            {"ph": "X", "cat": "Trace", "name": "PyTorch Profiler (0)", "pid": "Spans", "tid": "PyTorch Profiler",
             "ts": 1, "dur": 2},
            {"ph": "M", "name": "process_name", "ts": 0, "pid": 9, "tid": 0, "args": {"name": "cs336"}}]}"#;
        let trace = Trace::from_chrome_json(json).unwrap();
        let sources: Vec<_> = trace.events.iter().map(|e| e.source).collect();
        assert_eq!(sources, [Source::Kernel, Source::Call, Source::Call, Source::Memset]);
        let kernel = &trace.events[0];
        assert_eq!((kernel.thread, kernel.correlation, kernel.duration_ns), (7, Some(37), 3500));
        assert!((kernel.start_ns - 7_812_345_678_901_125).abs() <= 1, "{kernel:?}");
        assert_eq!((trace.events[2].correlation, trace.events[3].thread), (None, 0));
        assert!(Trace::from_chrome_json(b"{}").is_err());
    }
}
