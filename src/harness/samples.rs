//! Raw samples of one noisy quantity, in base units, with the work of each sample.

use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::json::from_value;
use crate::printable::one_line;

/// A rank test looks at all pairs of two lists.
const MOST_SAMPLES: usize = 5_000;

/// No sample takes thirty years.
const LONGEST_S: f64 = 1e9;

/// Base units. Tables convert to milliseconds or mebibytes when they print.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Unit {
    #[serde(rename = "s")]
    Seconds,
    #[serde(rename = "B")]
    Bytes,
    #[serde(rename = "J")]
    Joules,
    #[serde(rename = "Hz")]
    Hertz,
}

/// All observed values in order. Statistics are computed when a record is read.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Samples {
    pub unit: Unit,
    pub samples: Vec<f64>,
    /// The least work of one sample. Every timing that can be compared with a peak needs it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub work: Option<Work>,
}

/// The least work of one timed call: floating-point operations and bytes that must move.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Work {
    pub flops: f64,
    /// Compulsory traffic: each input read once, each output written once.
    pub bytes: f64,
    /// The precision whose peak bounds the time: "float32", "tf32", "bfloat16", "float16".
    pub precision: String,
}

impl Samples {
    /// Seconds of calls that do `work`. Each must be finite and above zero.
    pub fn seconds(samples: Vec<f64>, work: Work) -> Result<Self> {
        Self::new(Unit::Seconds, samples, Some(work))
    }

    /// Seconds of something that no peak bounds, such as a process start or a compilation.
    pub fn seconds_unbounded(samples: Vec<f64>) -> Result<Self> {
        Self::new(Unit::Seconds, samples, None)
    }

    /// Bytes that vary from run to run, such as an observed peak of the process.
    pub fn bytes(samples: Vec<f64>) -> Result<Self> {
        Self::new(Unit::Bytes, samples, None)
    }

    /// What calls use of the device's energy.
    pub fn joules(samples: Vec<f64>) -> Result<Self> {
        Self::new(Unit::Joules, samples, None)
    }

    /// Readings of a clock.
    pub fn hertz(samples: Vec<f64>) -> Result<Self> {
        Self::new(Unit::Hertz, samples, None)
    }

    fn new(unit: Unit, samples: Vec<f64>, work: Option<Work>) -> Result<Self> {
        let samples = Self { unit, samples, work };
        samples.validate()?;
        Ok(samples)
    }

    /// Errors: no or too many samples, a sample that is not above 0 or not finite, or work that is negative or not finite.
    pub fn validate(&self) -> Result<()> {
        ensure!(!self.samples.is_empty(), "no samples");
        let count = self.samples.len();
        ensure!(count <= MOST_SAMPLES, "{count} samples: at most {MOST_SAMPLES} can be compared");
        for (i, x) in self.samples.iter().enumerate() {
            let fine = match self.unit {
                Unit::Seconds => *x > 0.0 && *x < LONGEST_S,
                Unit::Bytes | Unit::Joules | Unit::Hertz => x.is_finite() && *x > 0.0,
            };
            ensure!(fine, "sample {i} is {x}: it must be finite and above 0, a time below {LONGEST_S:e} s");
        }
        if let Some(work) = &self.work {
            let fine = |x: f64| x.is_finite() && x >= 0.0;
            ensure!(
                fine(work.flops) && fine(work.bytes),
                "the work of a sample is {work:?}: it must be finite and not negative"
            );
        }
        Ok(())
    }
}

/// Clocks of a host and a device differ by some millionths.
const TOLERANCE: f64 = 1.01;

/// Errors: times in `row` that a case of `elapsed_s` seconds, written to a record, cannot have. No list counts a second
/// twice, so its samples together take at most as long as their case; so does a plain time, and none is below zero.
pub fn check_times(row: &Value, elapsed_s: f64) -> Result<()> {
    check_plain_times(row, round_to_clock(elapsed_s), &mut String::new())?;
    each_samples(row, &mut |at, Samples { unit, samples, .. }| {
        if *unit != Unit::Seconds {
            return Ok(());
        }
        let least = samples.iter().copied().fold(f64::INFINITY, f64::min);
        ensure!(least >= 1.0 / STEPS_PER_S, "{at}: a sample of {least:e} s is below a nanosecond, the step of clocks");
        // As a record has them, which must still be valid once it is written.
        let (sum, elapsed_s) = (samples.iter().copied().map(round_to_clock).sum::<f64>(), round_to_clock(elapsed_s));
        ensure!(
            sum <= elapsed_s * TOLERANCE,
            "{at}: its samples take {sum:.3e} s together, and their case took {elapsed_s:.3e} s"
        );
        Ok(())
    })
}

/// Whether a field of a row holds a time by its name, or a list of them: `seconds`, or an ending of `_s`, but not of `per_s`,
/// which is a rate.
pub fn is_time(key: &str) -> bool {
    key == "seconds" || (key.ends_with("_s") && !key.ends_with("per_s"))
}

fn check_plain_times(value: &Value, elapsed_s: f64, path: &mut String) -> Result<()> {
    let length = path.len();
    let fields = value.as_object().into_iter().flatten().map(|(key, child)| (key.as_str(), child));
    let items = value.as_array().into_iter().flatten().map(|child| ("", child));
    for (key, child) in fields.chain(items) {
        *path += if length > 0 && !key.is_empty() { "." } else { "" };
        *path += &one_line(key);
        let in_list = child.as_array().into_iter().flatten();
        let times = std::iter::once(child).chain(in_list).filter_map(Value::as_f64).filter(|_| is_time(key));
        for seconds in times {
            ensure!(
                (0.0..=elapsed_s * TOLERANCE).contains(&seconds),
                "{path} is {seconds:e} s, and its case took {elapsed_s:.3e} s"
            );
        }
        check_plain_times(child, elapsed_s, path)?;
        path.truncate(length);
    }
    Ok(())
}

/// Calls `visit` with the path and content of every [`Samples`] inside `row`.
///
/// An object that has the key `samples` must be a well-formed `Samples`.
pub fn each_samples(row: &Value, visit: &mut dyn FnMut(&str, &Samples) -> Result<()>) -> Result<()> {
    walk(row, &mut String::new(), visit)
}

fn walk(value: &Value, path: &mut String, visit: &mut dyn FnMut(&str, &Samples) -> Result<()>) -> Result<()> {
    let mut enter = |key: &str, child: &Value| {
        let length = path.len();
        if length > 0 {
            path.push('.');
        }
        path.push_str(&one_line(key));
        let result = walk(child, path, visit);
        path.truncate(length);
        result
    };
    match value {
        Value::Object(fields) if fields.contains_key("samples") => {
            let samples = from_value::<Samples>(value).with_context(|| format!("{path} is no list of samples"))?;
            visit(path, &samples)
        }
        Value::Object(fields) => fields.iter().try_for_each(|(key, child)| enter(key, child)),
        Value::Array(items) => items.iter().enumerate().try_for_each(|(i, child)| enter(&i.to_string(), child)),
        _ => Ok(()),
    }
}

/// Clock ticks in a second: the host's monotonic clock and the profiler count nanoseconds. CUDA events are coarser
/// (documented as about 0.5 us; an H200 has steps of 32 ns).
const STEPS_PER_S: f64 = 1e9;

/// The nearest multiple of a nanosecond; a time that is not 0 does not become 0.
pub fn round_to_clock(seconds: f64) -> f64 {
    let steps = (seconds * STEPS_PER_S).abs();
    // A time so long that it has no count of nanoseconds is left as it is: infinity cannot be written.
    if steps == 0.0 || !steps.is_finite() {
        return seconds;
    }
    // The quotient of two integers is the float64 nearest to the decimal number, so few digits are written.
    (steps.round().max(1.0) / STEPS_PER_S).copysign(seconds)
}

/// Rounds every time in `row` by [`round_to_clock`]: samples in seconds, and fields that [`is_time`] names.
pub fn round_times(row: &mut Value) {
    round(row, false);
}

fn round(value: &mut Value, of_clock: bool) {
    match value {
        Value::Object(fields) => {
            let in_seconds = fields.get("unit").is_some_and(|unit| unit == "s");
            for (key, child) in fields {
                round(child, is_time(key) || (in_seconds && key == "samples"));
            }
        }
        Value::Array(items) => items.iter_mut().for_each(|item| round(item, of_clock)),
        Value::Number(number) if of_clock && number.is_f64() => {
            *value = number.as_f64().map(round_to_clock).into();
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    #[test]
    fn times_are_rounded_to_a_nanosecond() {
        for (seconds, rounded) in [
            (6.304_000_139_236_45e-6, 6.304e-6),
            (0.348_655_999_999_999_97, 0.348_656),
            (0.144_024_706_870_317_46, 0.144_024_707),
            (190.544_052_795, 190.544_052_795),
            (1e-12, 1e-9),
            (-2.5e-6, -2.5e-6),
            (0.0, 0.0),
            (1e300, 1e300),
        ] {
            assert_eq!(round_to_clock(seconds), rounded, "of {seconds}");
        }
    }

    #[test]
    fn only_times_are_rounded() {
        let mut row = json!({
            "forward": {"unit": "s", "samples": [0.123456789012], "work": {"flops": 0.123456789012}},
            "peak": {"unit": "B", "samples": [123456789.5]},
            "spans": [{"start_s": 0.123456789012, "name": "all_reduce", "bytes_per_s": 0.123456789012}],
            "time_s": [0.123456789012, 3],
            "kernels": [{"seconds": 0.123456789012, "share": 0.123456789012}],
        });
        round_times(&mut row);
        let expected = json!({
            "forward": {"unit": "s", "samples": [0.123456789], "work": {"flops": 0.123456789012}},
            "peak": {"unit": "B", "samples": [123456789.5]},
            "spans": [{"start_s": 0.123456789, "name": "all_reduce", "bytes_per_s": 0.123456789012}],
            "time_s": [0.123456789, 3],
            "kernels": [{"seconds": 0.123456789, "share": 0.123456789012}],
        });
        assert_eq!(row, expected);
    }

    proptest! {
        #[test]
        fn rounding_is_idempotent_and_moves_a_time_by_at_most_half_a_nanosecond(seconds in 1e-9..1e4f64) {
            let rounded = round_to_clock(seconds);
            prop_assert!((rounded - seconds).abs() <= 0.500_01e-9 + f64::EPSILON * seconds, "{seconds} became {rounded}");
            prop_assert_eq!(round_to_clock(rounded), rounded);
        }

        #[test]
        fn rounding_keeps_the_order_of_times(time in 1e-9..1.0f64, later in 0.0..1e-6f64) {
            prop_assert!(round_to_clock(time) <= round_to_clock(time + later));
        }
    }
}
