//! Profiles by Kineto, libtorch's own profiler, and NVTX ranges for external profilers.

use std::cell::Cell;
use std::fs;
use std::io::Write as _;
use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use flate2::Compression;
use flate2::write::GzEncoder;
use tch::Device;

use super::bridge::{check, ffi};
use super::nvtx::Listener;
use super::trace::Trace;

use crate::printable::shown_path;

/// What was collected while a body ran, as the Chrome trace that Kineto writes.
#[derive(Debug)]
pub struct Profile {
    json: Vec<u8>,
}

/// Runs `body` while Kineto collects the operators and ranges of this thread and of its backward passes, and on a
/// CUDA `device` the CUDA calls, kernels and copies of the process.
///
/// `body` must wait for the device, or its last work is missing. A process has one Kineto: another thread's profile
/// waits until this one ends. Errors: those of `body`, and a profile inside a profile.
pub fn profile<T>(device: Device, body: impl FnOnce() -> Result<T>) -> Result<(T, Profile)> {
    // libtorch does not refuse a profile inside another one of the same thread: it loses the outer one.
    ensure!(!PROFILED.get(), "this thread is being profiled already: a profile cannot hold another one");
    // Waits for another thread's profile, which has a listener too.
    let listener = Listener::start();
    check(ffi::start_kineto(device.is_cuda())).context("starting Kineto")?;
    PROFILED.set(true);
    let collecting = Profiler;
    let value = body()?;
    std::mem::forget(collecting);
    PROFILED.set(false);
    // In a folder of its own: Kineto leaves a partial file beside a trace that it could not finish.
    let folder = tempfile::tempdir().context("making a temporary folder for a trace")?;
    let path = folder.path().join("trace.json");
    let name = path.to_str().context("the folder of temporary files has no name in UTF-8")?;
    check(ffi::stop_profiler(name)).context("ending Kineto's collection")?;
    drop(listener);
    let json = fs::read(&path)
        .with_context(|| format!("Kineto wrote no trace to {}: is its disk full?", shown_path(folder.path())))?;
    Ok((value, Profile { json }))
}

thread_local! {
    static PROFILED: Cell<bool> = const { Cell::new(false) };
}

/// libtorch's profiler, on; its drop turns it off and throws away what it has collected.
struct Profiler;

impl Drop for Profiler {
    fn drop(&mut self) {
        PROFILED.set(false);
        // An error of the body is reported instead.
        let _ = ffi::stop_profiler("");
    }
}

impl Profile {
    /// The Chrome trace as Kineto wrote it.
    pub fn json(&self) -> &[u8] {
        &self.json
    }

    pub fn trace(&self) -> Result<Trace> {
        Trace::from_chrome_json(&self.json)
    }

    /// Writes the trace, gzipped, for <https://ui.perfetto.dev> and other viewers of Chrome traces.
    pub fn save(&self, path: &Path) -> Result<()> {
        let write = || -> std::io::Result<()> {
            fs::create_dir_all(path.parent().unwrap_or(Path::new(".")))?;
            let mut encoder = GzEncoder::new(fs::File::create(path)?, Compression::fast());
            encoder.write_all(&self.json)?;
            encoder.finish()?.sync_all()
        };
        write().with_context(|| format!("writing the trace {}", shown_path(path)))
    }
}

/// Runs `body` while the ranges of this thread are NVTX ranges, for nsys to record.
///
/// Errors: those of `body`, and a libtorch without CUDA.
pub fn with_nvtx<T>(body: impl FnOnce() -> Result<T>) -> Result<T> {
    let _listener = Listener::start();
    check(ffi::start_nvtx()).context("starting NVTX marks")?;
    let _marking = Profiler;
    body()
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;

    use anyhow::bail;
    use tch::{Kind, Tensor};

    use super::*;
    use crate::torch::nvtx::range;
    use crate::torch::trace::Source;

    fn step() -> Result<()> {
        let x = Tensor::ones([8, 8], (Kind::Float, Device::Cpu)).set_requires_grad(true);
        let loss = range("forward", || range("inner", || x.f_mm(&x))?.f_sum(Kind::Float))?;
        range("backward", || crate::torch::backward(&loss))
    }

    #[test]
    fn ranges_nest_and_contain_the_operators_that_ran_in_them() {
        let ((), profile) = profile(Device::Cpu, step).unwrap();
        let trace = profile.trace().unwrap();
        let find = |source: Source, name: &str| {
            trace.events.iter().find(|e| e.source == source && e.name == name).unwrap_or_else(|| panic!("no {name}"))
        };
        let (forward, inner) = (find(Source::Range, "forward"), find(Source::Range, "inner"));
        let (mm, backward) = (find(Source::Operator, "aten::mm"), find(Source::Range, "backward"));
        let within = |a: &crate::torch::trace::Event, b: &crate::torch::trace::Event| {
            a.start_ns >= b.start_ns && a.end_ns() <= b.end_ns() && a.thread == b.thread
        };
        assert!(within(inner, forward) && within(mm, inner) && !within(backward, forward), "{trace:?}");
        let product = trace.events.iter().filter(|e| e.name == "aten::mm" && e.start_ns >= backward.start_ns).count();
        assert_eq!(product, 2, "the gradient of a product takes two");
    }

    #[test]
    fn a_failed_body_ends_its_collection_and_profiles_can_be_repeated() {
        let error = profile(Device::Cpu, || -> Result<()> { bail!("expected") }).unwrap_err();
        assert_eq!(error.to_string(), "expected");
        for _ in 0..2 {
            let ((), profile) = profile(Device::Cpu, step).unwrap();
            assert!(profile.trace().unwrap().events.iter().any(|e| e.name == "backward"));
        }
        let error = profile(Device::Cpu, || profile(Device::Cpu, step)).unwrap_err();
        assert!(format!("{error:#}").contains("already"), "{error:#}");
    }

    #[test]
    fn a_saved_trace_is_gzipped_json_with_the_events_of_the_trace() {
        let ((), profile) = profile(Device::Cpu, step).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("deep/trace.json.gz");
        profile.save(&path).unwrap();
        let mut json = Vec::new();
        flate2::read::GzDecoder::new(fs::File::open(path).unwrap()).read_to_end(&mut json).unwrap();
        assert_eq!(Trace::from_chrome_json(&json).unwrap(), profile.trace().unwrap());
    }
}
