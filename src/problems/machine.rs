//! What this machine is and how fast it can possibly go: the facts that every run carries.

use std::collections::BTreeMap;
use std::sync::OnceLock;
use std::time::Instant;

use anyhow::{Context as _, Result};
use tch::{Device, Kind, Tensor};

use super::device_for;
use crate::harness::provenance::Facts;
use crate::harness::record::{Gpu, Peaks, Profile};
use crate::torch;
use crate::units::MIB;

/// Software, settings and roofs for a run under `profile`; the roofs are measured once a process.
///
/// Without the profile's device the roofs are empty, so that its cases can still be recorded as not run.
pub fn facts(profile: Profile) -> Result<Facts> {
    static MEASURED: OnceLock<Peaks> = OnceLock::new();
    let gpus = if profile == Profile::Gpu { gpus()? } else { Vec::new() };
    let peaks = match (device_for(profile), gpus.first().and_then(|gpu| known_peaks(&gpu.name))) {
        (Err(_), _) => Peaks {
            flops_per_s: BTreeMap::new(),
            bytes_per_s: 0.0,
            cache_bytes: 0.0,
            source: "no such device here".into(),
        },
        (Ok(_), Some(known)) => known,
        (Ok(device), None) => match MEASURED.get() {
            Some(peaks) => peaks.clone(),
            None => MEASURED.get_or_init(|| Peaks::clone(&measured_peaks(device).unwrap_or_else(no_peaks))).clone(),
        },
    };
    Ok(Facts { gpus, software: software(), settings: settings()?, peaks })
}

fn no_peaks(error: anyhow::Error) -> Peaks {
    let source = format!("not measured: {error:#}");
    Peaks { flops_per_s: BTreeMap::new(), bytes_per_s: 0.0, cache_bytes: 0.0, source }
}

/// Versions of what the numbers depend on.
pub fn software() -> BTreeMap<String, String> {
    let versions = [
        ("cs336", Some(env!("CARGO_PKG_VERSION").to_string())),
        ("torch", Some(torch::version())),
        ("cuda", torch::cuda_version()),
        ("cudnn", torch::cudnn_version()),
        ("driver", driver_version()),
    ];
    versions.into_iter().filter_map(|(name, version)| Some((name.to_string(), version?))).collect()
}

/// The NVIDIA kernel driver's version, as its module tells it; `None` without one.
fn driver_version() -> Option<String> {
    let text = std::fs::read_to_string("/sys/module/nvidia/version").ok()?;
    Some(text.trim().to_string())
}

fn settings() -> Result<BTreeMap<String, String>> {
    let tf32 = torch::allow_tf32()?;
    let settings = [
        ("threads", tch::get_num_threads().to_string()),
        ("tf32", if tf32.matmul { "on" } else { "off" }.to_string()),
        ("cpu_capability", torch::cpu_capability()?),
    ];
    Ok(settings.into_iter().map(|(name, value)| (name.to_string(), value)).collect())
}

/// The CUDA devices that the driver shows; empty without a driver.
pub fn gpus() -> Result<Vec<Gpu>> {
    if torch::cuda_device(0).is_err() {
        return Ok(Vec::new());
    }
    (0..tch::Cuda::device_count() as usize)
        .map(|ordinal| {
            let context =
                cudarc::driver::CudaContext::new(ordinal).with_context(|| format!("failed to open GPU {ordinal}"))?;
            let (major, minor) = context.compute_capability()?;
            let memory_bytes = context.total_mem()? as u64;
            Ok(Gpu { name: context.name()?, memory_bytes, compute_capability: format!("{major}.{minor}") })
        })
        .collect()
}

/// Dense peaks of NVIDIA's data sheets (H100 and H200 SXM, without sparsity), in FLOP/s and B/s.
///
/// TF32 off means that fp32 runs on the CUDA cores. Traffic that fits the 50 MB L2 is not held to the DRAM roof.
fn known_peaks(gpu: &str) -> Option<Peaks> {
    let bytes_per_s = match gpu {
        name if name.contains("H200") => 4.8e12,
        name if name.contains("H100 80GB HBM3") => 3.35e12,
        _ => return None,
    };
    let flops =
        [("float32", 66.9e12), ("tf32", 494.7e12), ("bfloat16", 989.4e12), ("float16", 989.4e12), ("float64", 66.9e12)];
    Some(Peaks {
        flops_per_s: flops.into_iter().map(|(name, peak)| (name.to_string(), peak)).collect(),
        bytes_per_s,
        cache_bytes: 50.0 * MIB,
        source: "NVIDIA's data sheet, dense".into(),
    })
}

/// The best of many matrix products and copies, sizes from in-cache to far out of it.
fn measured_peaks(device: Device) -> Result<Peaks> {
    let float32 = best_matmul(device, Kind::Float)?;
    // Where low precision is emulated, autocast still runs some operations in fp32: the faster of the two is the roof.
    let lower = |kind| best_matmul(device, kind).map(|peak| peak.max(float32));
    let flops = [
        ("float32", float32),
        ("tf32", float32),
        ("bfloat16", lower(Kind::BFloat16)?),
        ("float16", lower(Kind::Half)?),
        ("float64", best_matmul(device, Kind::Double)?),
    ];
    let source =
        "the best of repeated matrix products (512, 1024) and copies (256 KiB to 64 MiB) before the run".into();
    Ok(Peaks {
        flops_per_s: flops.into_iter().map(|(name, peak)| (name.to_string(), peak)).collect(),
        bytes_per_s: best_copy(device)?,
        cache_bytes: 0.0,
        source,
    })
}

fn best_matmul(device: Device, kind: Kind) -> Result<f64> {
    let mut best: f64 = 0.0;
    for (size, repeats) in [(512i64, 12), (1024, 6)] {
        let a = Tensor::f_randn([size, size], (Kind::Float, device))?.f_to_kind(kind)?;
        let flops = 2.0 * (size as f64).powi(3);
        for _ in 0..repeats {
            best = best.max(flops / timed(device, || a.f_matmul(&a))?);
        }
    }
    Ok(best)
}

fn best_copy(device: Device) -> Result<f64> {
    let mut best: f64 = 0.0;
    for elements in [1i64 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24] {
        let from = Tensor::f_zeros([elements], (Kind::Float, device))?;
        let mut to = Tensor::f_zeros([elements], (Kind::Float, device))?;
        let bytes = 2.0 * 4.0 * elements as f64;
        for _ in 0..20 {
            best = best.max(bytes / timed(device, || to.f_copy_(&from))?);
        }
    }
    Ok(best)
}

fn timed<T>(device: Device, body: impl FnOnce() -> std::result::Result<T, tch::TchError>) -> Result<f64> {
    torch::stream::synchronize(device)?;
    let started = Instant::now();
    body()?;
    torch::stream::synchronize(device)?;
    Ok(started.elapsed().as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_has_roofs_for_every_precision() {
        let facts = facts(Profile::Cpu).unwrap();
        for precision in ["float32", "tf32", "bfloat16", "float16", "float64"] {
            assert!(facts.peaks.flops_per_s[precision] > 1e8, "{precision}: {:?}", facts.peaks);
        }
        assert!(facts.peaks.bytes_per_s > 1e8 && facts.software["torch"].starts_with("2.11.0"), "{facts:?}");
    }

    #[test]
    fn an_h200_is_known_and_a_stranger_is_not() {
        assert_eq!(known_peaks("NVIDIA H200").unwrap().bytes_per_s, 4.8e12);
        assert!(known_peaks("GeForce 256").is_none());
    }
}
