//! Made-up rows of training steps, for the tests of answers.

use serde_json::{Map, Value, json};

use super::Params;
use crate::harness::answer::made_up::seconds;
use crate::model::Precision;

/// One strategy: seconds of a step, of communication and of the exposed tail.
pub type Times = (&'static str, f64, f64, f64);

/// Two ranks of the smallest model at one precision.
pub fn params(dtype: Precision, bucket_size_mb: Option<f64>) -> Params {
    Params { dtype, ..Params::smallest(bucket_size_mb) }
}

/// A row whose step without communication takes one second, with 100 calls of 10 ms and 1 GB at 1 GB/s.
pub fn row(strategies: &[Times], pytorch_s: Option<f64>) -> Value {
    let columns: Map<String, Value> = strategies
        .iter()
        .map(|&(name, step, communication, tail)| (name.into(), column(step, communication, tail)))
        .collect();
    json!({
        "parameters": 250_000_000, "gradient_bytes": 1_000_000_000,
        "link": link([1_000_000, 10_000_000, 1_000_000_000]),
        "single": timing(&[1.0]), "strategies": columns, "pytorch_ddp": pytorch_s.map(|t| timing(&[t])), "software": null,
    })
}

/// A link that carries 1 GB/s after 10 ms, probed with sums of these bytes.
pub fn link(probed: impl IntoIterator<Item = u64>) -> Value {
    let point = |bytes: u64| json!({"bytes": bytes, "time": timing(&[0.01 + bytes as f64 / 1e9])});
    let points: Vec<Value> = probed.into_iter().map(point).collect();
    json!({"points": points, "overhead_s": 0.01, "bytes_per_s": 1e9, "fastest_bus_bytes_per_s": 1e9})
}

fn column(step: f64, communication: f64, tail: f64) -> Value {
    let over_ranks = |t: f64| json!({"mean": seconds(&[t]), "by_rank": [seconds(&[t]), seconds(&[t])]});
    let overlap = if communication > 0.0 { (1.0 - tail / communication).max(0.0) } else { 0.0 };
    let span = |name: &str, end: f64| json!({"name": name, "start_s": 0.0, "end_s": end});
    let compute = [span("forward", step), span("backward", step / 2.0)];
    json!({
        "step": timing(&[step]), "communication": over_ranks(communication), "tail": over_ranks(tail),
        "overlap": overlap, "bytes": 1_000_000_000, "calls": 100, "bus_bytes": 1e9,
        "timeline": {"compute": compute, "communication": [span("all_reduce", step / 2.0)]},
    })
}

/// The same seconds on both ranks.
pub fn timing(samples: &[f64]) -> Value {
    json!({"last_rank": seconds(samples), "by_rank": [seconds(samples), seconds(samples)]})
}
