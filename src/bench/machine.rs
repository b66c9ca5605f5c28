//! The facts of this machine for every run: hardware, software, settings and peak speeds.

use std::collections::BTreeMap;
use std::sync::OnceLock;

use anyhow::{Context as _, Result};
use tch::{Device, Kind, Tensor};

use super::device::device_for;
use super::nvml;
use super::timing::lap;
use crate::harness::conditions::Reading;
use crate::harness::provenance::{Facts, machine};
use crate::harness::record::{Gpu, Machine, Peaks, Profile};
use crate::harness::samples::{Samples, Work};
use crate::model::Precision;
use crate::torch;
use crate::torch::Generator;
use crate::torch::random::SEED;
use crate::units::MIB;

/// Software, settings and peak speeds for a run under `profile`.
///
/// Without the profile's device the peaks are empty, so that its cases can still be recorded as not run.
pub fn facts(profile: Profile) -> Result<Facts> {
    static MEASURED: OnceLock<Peaks> = OnceLock::new();
    let gpus = if profile == Profile::Gpu { gpus()? } else { Vec::new() };
    let peaks = match (profile, gpus.first()) {
        (Profile::Cpu, _) => cpu_peaks()?,
        (Profile::Gpu, None) => Peaks {
            flops_per_s: BTreeMap::new(),
            bytes_per_s: 0.0,
            cache_bytes: 0.0,
            source: "no such device here".into(),
        },
        (Profile::Gpu, Some(gpu)) => match gpu_peaks(&gpu.name).or_else(|| MEASURED.get().cloned()) {
            Some(known) => known,
            None => {
                let measured = measured_peaks(device_for(profile)?)?;
                MEASURED.get_or_init(|| measured).clone()
            }
        },
    };
    Ok(Facts { gpus, software: software(), settings: settings(profile)?, peaks })
}

/// The present condition of the profile's device; `None` for a CPU, and for a GPU without readings.
pub fn reading(profile: Profile) -> Option<Reading> {
    match profile {
        Profile::Cpu => None,
        Profile::Gpu => nvml::reading(),
    }
}

/// Frees cached GPU memory and resets peak statistics. Does nothing in a process that has not used a GPU.
pub fn clean_up() -> Result<()> {
    if torch::memory::is_used() {
        torch::memory::empty_cache(Device::Cuda(0))?;
        (0..tch::Cuda::device_count() as usize).try_for_each(|i| torch::memory::reset_peaks(Device::Cuda(i)))?;
    }
    Ok(())
}

/// Versions of the software that the numbers depend on.
fn software() -> BTreeMap<String, String> {
    let versions = [
        ("cs336", Some(env!("CARGO_PKG_VERSION").to_string())),
        ("torch", Some(torch::version())),
        ("cuda", torch::cuda_version()),
        ("cudnn", torch::cudnn_version()),
        ("driver", driver_version()),
    ];
    versions.into_iter().filter_map(|(name, version)| Some((name.to_string(), version?))).collect()
}

/// The NVIDIA kernel driver's version from its module; `None` without the driver.
fn driver_version() -> Option<String> {
    let text = std::fs::read_to_string("/sys/module/nvidia/version").ok()?;
    Some(text.trim().to_string())
}

fn settings(profile: Profile) -> Result<BTreeMap<String, String>> {
    let settings = [
        ("threads", tch::get_num_threads().to_string()),
        ("tf32", if torch::allow_tf32()? { "on" } else { "off" }.to_string()),
        ("cpu_capability", torch::cpu_capability()?),
    ];
    let settings = settings.into_iter().map(|(name, value)| (name.to_string(), value));
    Ok(if profile == Profile::Gpu { settings.chain(nvml::limits()).collect() } else { settings.collect() })
}

/// This machine, with its GPUs under their profile.
pub fn here(profile: Profile) -> Result<Machine> {
    machine(&if profile == Profile::Gpu { gpus()? } else { Vec::new() })
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

/// Peaks in the order of the names here.
fn by_precision(peaks: [f64; 5]) -> BTreeMap<String, f64> {
    ["float32", "tf32", "bfloat16", "float16", "float64"].map(String::from).into_iter().zip(peaks).collect()
}

/// Dense peaks of NVIDIA's data sheets (H100 and H200 SXM, without sparsity), in FLOP/s and B/s.
///
/// With TF32 off, fp32 runs on the CUDA cores. Traffic that fits the 50 MB L2 is not compared with the DRAM peak.
fn gpu_peaks(gpu: &str) -> Option<Peaks> {
    let bytes_per_s = match gpu {
        name if name.contains("H200") => 4.8e12,
        name if name.contains("H100 80GB HBM3") => 3.35e12,
        _ => return None,
    };
    Some(Peaks {
        flops_per_s: by_precision([66.9e12, 494.7e12, 989.4e12, 989.4e12, 66.9e12]),
        bytes_per_s,
        cache_bytes: 50.0 * MIB,
        source: "NVIDIA's data sheet, dense".into(),
    })
}

/// No server or desktop core sustains a higher clock with its widest vectors.
const CPU_HZ: f64 = 5e9;

/// Peaks from the instruction set. A measured peak would be too low if other users were busy meanwhile.
///
/// FLOP a cycle and core: two fused multiply-add units of the widest vectors (Fog, Instruction tables); AMX multiplies
/// tiles of 16 x 32 by 32 x 16 in 16 cycles. Bytes: two loads and one store of a vector a cycle, out of the first cache.
fn cpu_peaks() -> Result<Peaks> {
    let text = std::fs::read_to_string("/proc/cpuinfo").context("failed to read /proc/cpuinfo")?;
    let flags: Vec<&str> =
        text.lines().find(|l| l.starts_with("flags")).unwrap_or_default().split_whitespace().collect();
    let has = |flag: &str| flags.contains(&flag);
    let vector_bytes = if has("avx512f") { 64.0 } else { 32.0 };
    let float32 = 2.0 * 2.0 * vector_bytes / 4.0;
    let matrix = |amx: &str, vector: &str| match (has(amx), has(vector)) {
        (true, _) => 2.0 * 16.0 * 32.0 * 16.0 / 16.0,
        (false, true) => 2.0 * float32,
        (false, false) => float32,
    };
    let cores = std::thread::available_parallelism().context("failed to count the cores")?.get() as f64;
    let (bfloat16, float16) = (matrix("amx_bf16", "avx512_bf16"), matrix("amx_fp16", "avx512_fp16"));
    let a_cycle = [float32, float32, bfloat16, float16, float32 / 2.0];
    Ok(Peaks {
        flops_per_s: by_precision(a_cycle.map(|flop| flop * CPU_HZ * cores)),
        bytes_per_s: 3.0 * vector_bytes * CPU_HZ * cores,
        cache_bytes: 0.0,
        source: format!("the instruction set's bound: {cores} cores, {float32} fp32 FLOP a cycle, 5 GHz"),
    })
}

/// For a GPU without a known data sheet: the best of many matrix products and copies, with a margin because the clock
/// may have been low.
fn measured_peaks(device: Device) -> Result<Peaks> {
    const MARGIN: f64 = 1.25;
    let float32 = best_matmul(device, Kind::Float)?;
    let lower = |kind| best_matmul(device, kind).map(|peak| peak.max(float32));
    let (bfloat16, float16) = (lower(Kind::BFloat16)?, lower(Kind::Half)?);
    let peaks = [float32, bfloat16, bfloat16, float16, best_matmul(device, Kind::Double)?];
    Ok(Peaks {
        flops_per_s: by_precision(peaks.map(|peak| MARGIN * peak)),
        bytes_per_s: MARGIN * best_copy(device)?,
        cache_bytes: 50.0 * MIB,
        source: "1.25 times the best of repeated matrix products and copies before the run".into(),
    })
}

/// The time in which `device` multiplies square matrices of 8,192 rows (of 512 on the CPU) in `precision`, as [`copy_bandwidth`]
/// is for memory: the reference for steps that consist of products.
pub fn product_rate(device: Device, precision: Precision) -> Result<Samples> {
    const SAMPLES: usize = 25;
    let size: i64 = if device == Device::Cpu { 512 } else { 8192 };
    let kind = if precision == Precision::Float32 { Kind::Float } else { Kind::BFloat16 };
    let a = Generator::new(device, SEED)?.randn(&[size, size], Kind::Float)?.f_to_kind(kind)?;
    let sample = || Ok(lap(device, || Ok(a.f_matmul(&a)?))?.1);
    let warm_up = (0..5).map(|_| sample()).collect::<Result<Vec<_>>>();
    warm_up.context("warming up the product")?;
    let seconds = (0..SAMPLES).map(|_| sample()).collect::<Result<Vec<_>>>()?;
    Samples::seconds(
        seconds,
        Work { flops: 2.0 * (size as f64).powi(3), bytes: 0.0, precision: precision.name().into() },
    )
}

fn best_matmul(device: Device, kind: Kind) -> Result<f64> {
    let (mut best, generator) = (0.0f64, Generator::new(device, SEED)?);
    for (size, repeats) in [(2048i64, 12), (8192, 6)] {
        let a = generator.randn(&[size, size], Kind::Float)?.f_to_kind(kind)?;
        let flops = 2.0 * (size as f64).powi(3);
        for _ in 0..repeats {
            best = best.max(flops / lap(device, || Ok(a.f_matmul(&a)?))?.1);
        }
    }
    Ok(best)
}

/// In bytes read and written a second.
fn best_copy(device: Device) -> Result<f64> {
    let Samples { samples, work, .. } = copy_bandwidth(device)?;
    let fastest = samples.into_iter().fold(f64::INFINITY, f64::min);
    Ok(work.map_or(0.0, |work| work.bytes) / fastest)
}

/// The time in which `device` copies its own memory. `work.bytes` counts what a sample reads and writes.
///
/// A sample is eight copies of 1 GiB in a row (of 32 MiB on the CPU), so that caches and the 10 us of a launch and a
/// synchronisation do not matter. It is the reference for kernels that only move memory: a good one comes close.
pub fn copy_bandwidth(device: Device) -> Result<Samples> {
    const COPIES: usize = 8;
    const SAMPLES: usize = 25;
    let elements: i64 = if device == Device::Cpu { 1 << 23 } else { 1 << 28 };
    let from = Tensor::f_ones([elements], (Kind::Float, device))?;
    let mut to = Tensor::f_zeros([elements], (Kind::Float, device))?;
    let mut copies = || Ok((0..COPIES).try_for_each(|_| to.f_copy_(&from).map(drop))?);
    let mut sample = || Ok(lap(device, &mut copies)?.1);
    // The clock is still low during the first copies.
    let warm_up = (0..5).map(|_| sample()).collect::<Result<Vec<_>>>();
    warm_up.context("warming up the copy")?;
    let seconds = (0..SAMPLES).map(|_| sample()).collect::<Result<Vec<_>>>()?;
    let bytes = (COPIES as i64 * 2 * 4 * elements) as f64;
    Samples::seconds(seconds, Work { flops: 0.0, bytes, precision: "float32".into() })
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
    fn a_copy_has_its_bytes_and_is_no_faster_than_the_roof() {
        let copy = copy_bandwidth(Device::Cpu).unwrap();
        assert_eq!((copy.samples.len(), copy.work.unwrap().bytes), (25, 8.0 * 2.0 * 32.0 * MIB));
        let (best, roof) = (best_copy(Device::Cpu).unwrap(), cpu_peaks().unwrap().bytes_per_s);
        assert!((1e8..roof).contains(&best), "{best:.1e} B/s, roof {roof:.1e}");
    }

    #[test]
    fn an_h200_has_data_sheet_peaks_and_an_unknown_gpu_has_none() {
        assert_eq!(gpu_peaks("NVIDIA H200").unwrap().bytes_per_s, 4.8e12);
        assert!(gpu_peaks("GeForce 256").is_none());
    }
}
