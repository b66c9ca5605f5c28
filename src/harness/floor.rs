//! Physical floors: a timing that beats the machine's roofs is an error, not a result.

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use super::record::Peaks;
use super::samples::{Samples, Unit, each_samples};

/// How far a sample may exceed a peak before it is an error. A measured peak has noise too.
const TOLERANCE: f64 = 1.10;

/// Compares every timing in `row` with `peaks`. The error names the value's path and both figures.
pub fn check(row: &Value, peaks: &Peaks) -> Result<()> {
    each_samples(row, &mut |at, samples| {
        check_samples(samples, peaks).with_context(|| format!("{at} is faster than this machine can be"))
    })
}

fn check_samples(samples: &Samples, peaks: &Peaks) -> Result<()> {
    let (Unit::Seconds, Some(work)) = (samples.unit, &samples.work) else { return Ok(()) };
    let fastest = samples.samples.iter().copied().fold(f64::INFINITY, f64::min);
    let peak = peaks.flops_per_s.get(&work.precision).with_context(|| {
        let known: Vec<_> = peaks.flops_per_s.keys().collect();
        format!("no peak is known for precision {:?} (known: {known:?})", work.precision)
    })?;
    let flops_per_s = work.flops / fastest;
    ensure!(
        flops_per_s <= peak * TOLERANCE,
        "{fastest:.3e} s for {:.3e} FLOP is {:.2} TFLOP/s; the {} roof is {:.2} TFLOP/s ({})",
        work.flops,
        flops_per_s / 1e12,
        work.precision,
        peak / 1e12,
        peaks.source
    );
    let bytes_per_s = work.bytes / fastest;
    ensure!(
        work.bytes <= peaks.cache_bytes || bytes_per_s <= peaks.bytes_per_s * TOLERANCE,
        "{fastest:.3e} s for {:.3e} B is {:.1} GB/s; the memory roof is {:.1} GB/s ({})",
        work.bytes,
        bytes_per_s / 1e9,
        peaks.bytes_per_s / 1e9,
        peaks.source
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn peaks() -> Peaks {
        Peaks {
            flops_per_s: [("float32".to_string(), 1e12)].into(),
            bytes_per_s: 1e11,
            cache_bytes: 1e3,
            source: "a test".into(),
        }
    }

    fn row(seconds: f64, flops: f64, bytes: f64) -> Value {
        json!({"forward": {"unit": "s", "samples": [1.0, seconds], "work": {"flops": flops, "bytes": bytes, "precision": "float32"}}})
    }

    #[test]
    fn a_possible_timing_passes() {
        check(&row(1e-3, 0.9e9, 0.9e8), &peaks()).unwrap();
    }

    #[test]
    fn one_sample_above_the_arithmetic_roof_is_an_error_that_names_it() {
        let error = format!("{:#}", check(&row(1e-4, 1e9, 0.0), &peaks()).unwrap_err());
        assert!(error.contains("forward") && error.contains("10.00 TFLOP/s") && error.contains("a test"), "{error}");
    }

    #[test]
    fn one_sample_above_the_memory_roof_is_an_error() {
        let error = format!("{:#}", check(&row(1e-4, 0.0, 1e9), &peaks()).unwrap_err());
        assert!(error.contains("memory roof"), "{error}");
    }

    #[test]
    fn traffic_that_fits_the_cache_is_not_compared_with_the_memory_roof() {
        check(&row(1e-9, 0.0, 1e3), &peaks()).unwrap();
    }

    #[test]
    fn an_unknown_precision_is_an_error_not_a_pass() {
        let row = json!([{"unit": "s", "samples": [1.0], "work": {"flops": 1.0, "bytes": 1.0, "precision": "int4"}}]);
        assert!(check(&row, &peaks()).is_err());
    }
}
