//! Physical floors: a timing that beats the machine's roofs is an error, not a result.

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use super::record::Peaks;
use super::samples::{Samples, Unit, each_samples};

/// How far a sample may exceed a peak before it is an error. A measured peak has noise too.
const TOLERANCE: f64 = 1.10;

/// Compares every timing in `row` with `peaks`. The error names the value's path and both figures.
///
/// Columns with outcomes of their own do the same work. So it is an error too if one names its work and another does not:
/// nothing would bound the other.
pub fn check(row: &Value, peaks: &Peaks) -> Result<()> {
    let (mut bounded, mut unbounded) = (false, None);
    each_samples(row, &mut |at, samples| {
        if at.ends_with(".row") && samples.unit == Unit::Seconds {
            let works = samples.work.as_ref().is_some_and(|work| work.flops > 0.0 || work.bytes > 0.0);
            bounded |= works;
            unbounded = unbounded.take().or_else(|| (!works).then(|| at.to_string()));
        }
        check_samples(samples, peaks).with_context(|| format!("{at} is faster than this machine can be"))
    })?;
    let at = unbounded.filter(|_| bounded);
    ensure!(at.is_none(), "{} names no work, as the other columns do", at.unwrap_or_default());
    Ok(())
}

fn check_samples(samples: &Samples, peaks: &Peaks) -> Result<()> {
    let (Unit::Seconds, Some(work)) = (samples.unit, &samples.work) else { return Ok(()) };
    let fastest = samples.samples.iter().copied().fold(f64::INFINITY, f64::min);
    let peak = peaks.flops_per_s.get(&work.precision).with_context(|| {
        let known: Vec<_> = peaks.flops_per_s.keys().collect();
        format!("no peak is known for precision {:?} (known: {known:?})", work.precision)
    })?;
    let speed = format!("{:.2} TFLOP/s in {}", peak / 1e12, work.precision);
    above(fastest, (work.flops, "FLOP"), (*peak, &speed), &peaks.source)?;
    if work.bytes <= peaks.cache_bytes {
        return Ok(());
    }
    let speed = format!("{:.1} GB/s of memory", peaks.bytes_per_s / 1e9);
    above(fastest, (work.bytes, "B"), (peaks.bytes_per_s, &speed), &peaks.source)
}

/// Errors: `fastest`, in seconds, is less than the time that `work` takes at the peak speed. Both have their amount and its name.
pub fn above(fastest: f64, work: (f64, &str), peak: (f64, &str), source: &str) -> Result<()> {
    let floor = work.0 / peak.0;
    ensure!(
        peak.0 > 0.0 && fastest * TOLERANCE >= floor,
        "{fastest:.3e} s is below the floor of {floor:.3e} s: {:.3e} {} at {} ({source})",
        work.0,
        work.1,
        peak.1
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
        assert!(error.contains("forward") && error.contains("1.000e-4 s is below the floor of 1.000e-3 s"), "{error}");
        assert!(error.contains("1.00 TFLOP/s in float32 (a test)"), "{error}");
    }

    #[test]
    fn one_sample_above_the_memory_roof_is_an_error() {
        let error = format!("{:#}", check(&row(1e-4, 0.0, 1e9), &peaks()).unwrap_err());
        assert!(error.contains("floor of 1.000e-2 s") && error.contains("100.0 GB/s of memory"), "{error}");
    }

    #[test]
    fn a_column_without_work_beside_others_with_work_is_an_error() {
        let column = |work: Value| json!({"kind": "measured", "row": {"unit": "s", "samples": [1.0], "work": work}});
        let of = |flops: f64| json!({"flops": flops, "bytes": 0.0, "precision": "float32"});
        let both = |other: Value| check(&json!({"ours": column(of(1e9)), "other": column(other)}), &peaks());
        both(of(1e9)).unwrap();
        for other in [of(0.0), Value::Null] {
            assert_eq!(both(other).unwrap_err().to_string(), "other.row names no work, as the other columns do");
        }
        check(&json!({"ours": column(Value::Null), "other": column(Value::Null)}), &peaks()).unwrap();
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
