//! Raw samples of one noisy quantity, in base units, with the work that each sample did.

use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Base units; a table's milliseconds or mebibytes are made on the way out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Unit {
    #[serde(rename = "s")]
    Seconds,
    #[serde(rename = "B")]
    Bytes,
}

/// Every value that was observed, in order. Statistics are derived when a record is read.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Samples {
    pub unit: Unit,
    pub samples: Vec<f64>,
    /// What one sample had to do at the least; required of every timing that a roof can be held against.
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
    /// The arithmetic whose peak bounds the time: "float32", "tf32", "bfloat16", "float16".
    pub precision: String,
}

impl Samples {
    /// Seconds, each finite and above zero, for a call that does `work`.
    pub fn seconds(samples: Vec<f64>, work: Work) -> Result<Self> {
        Self::new(Unit::Seconds, samples, Some(work))
    }

    /// Seconds of something that no roof bounds (a process start, a compilation).
    pub fn seconds_unbounded(samples: Vec<f64>) -> Result<Self> {
        Self::new(Unit::Seconds, samples, None)
    }

    /// Bytes that vary from run to run (an observed peak of the process, not a tensor's size).
    pub fn bytes(samples: Vec<f64>) -> Result<Self> {
        Self::new(Unit::Bytes, samples, None)
    }

    fn new(unit: Unit, samples: Vec<f64>, work: Option<Work>) -> Result<Self> {
        let samples = Self { unit, samples, work };
        samples.validate()?;
        Ok(samples)
    }

    /// At least one sample, every one finite and not negative; work finite too.
    pub fn validate(&self) -> Result<()> {
        ensure!(!self.samples.is_empty(), "no samples");
        for (i, x) in self.samples.iter().enumerate() {
            let fine = x.is_finite() && if self.unit == Unit::Seconds { *x > 0.0 } else { *x >= 0.0 };
            ensure!(fine, "sample {i} is {x}, which is no measurement");
        }
        if let Some(work) = &self.work {
            ensure!(work.flops.is_finite() && work.bytes.is_finite(), "the work of a sample is not finite: {work:?}");
        }
        Ok(())
    }
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
        path.push_str(key);
        let result = walk(child, path, visit);
        path.truncate(length);
        result
    };
    match value {
        Value::Object(fields) if fields.contains_key("samples") => {
            let samples = Samples::deserialize(value).with_context(|| format!("{path} is no list of samples"))?;
            visit(path, &samples)
        }
        Value::Object(fields) => fields.iter().try_for_each(|(key, child)| enter(key, child)),
        Value::Array(items) => items.iter().enumerate().try_for_each(|(i, child)| enter(&i.to_string(), child)),
        _ => Ok(()),
    }
}
