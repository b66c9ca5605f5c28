//! Measures steps with buckets of one size, and predicts their overhead from the interconnect.

use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize};

use super::{COALESCED, STRATEGY};
use crate::bench::ddp_step::{self, Columns, Params};
use crate::bench::interconnect::Interconnect;
use crate::harness::problem::Measure;
use crate::harness::record::{Machine, Profile};

/// One bucket size, with and without copies, beside naive steps, the same step without communication, and PyTorch's DDP
/// with buckets of that size.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Row {
    pub steps: ddp_step::Row,
    /// The handout's model, with o and w as this case's ranks measured them just before.
    pub model: Model,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Model {
    /// s / (n w) + n o for the n calls that were counted.
    pub predicted_overhead_s: f64,
    /// None where a call costs nothing that could be measured.
    pub best: Option<Best>,
}

/// The optimum of the bucket model.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Best {
    pub calls: f64,
    pub bucket_bytes: f64,
    pub overhead_s: f64,
}

impl Model {
    /// The handout's model of the communication left after the backward pass, for `bytes` in `calls` equal buckets, each
    /// computed while the previous one is communicated: the last bucket and the fixed costs, s / (n w) + n o.
    pub fn overhead(overhead_s: f64, bytes_per_s: f64, bytes: u64, calls: u64) -> f64 {
        bytes as f64 / (calls as f64 * bytes_per_s) + calls as f64 * overhead_s
    }

    /// The minimum of the model: n = sqrt(s / (w o)) buckets of sqrt(s w o) bytes. `None` if a call costs nothing: then more
    /// buckets are always better.
    pub fn best(overhead_s: f64, bytes_per_s: f64, bytes: u64) -> Option<Best> {
        let (s, w, o) = (bytes as f64, bytes_per_s, overhead_s);
        (o > 0.0).then(|| Best {
            calls: (s / (w * o)).sqrt(),
            bucket_bytes: (s * w * o).sqrt(),
            overhead_s: 2.0 * (s * o / w).sqrt(),
        })
    }
}

pub struct Bucketed;

impl Measure for Bucketed {
    type Params = Params;
    type Row = Row;
    const REVISION: u32 = 2;
    const KERNELS: &'static [&'static str] = ddp_step::KERNELS;

    fn validate(params: &Params) -> Result<()> {
        ensure!(params.bucket_size_mb.is_some(), "bucket_size_mb is missing: it is what this problem varies");
        params.validate()
    }

    fn validate_row(params: &Params, row: &Row) -> Result<()> {
        let (wheel, found) = (params.wheel, row.steps.from_python.is_some());
        ensure!(found == wheel, "wheel is {wheel}, but whether the row has steps from Python is {found}");
        row.steps.validate(params)
    }

    fn validate_on(params: &Params, row: &Row, machine: &Machine) -> Result<()> {
        row.steps.validate_on(params, machine)
    }

    fn measure(params: &Params, _profile: Profile) -> Result<Row> {
        let steps =
            ddp_step::measure(params, &Columns { strategies: &["naive", STRATEGY, COALESCED], pytorch_ddp: true })?;
        let column = steps.strategies.get(STRATEGY).context("the buckets were not measured")?;
        let Interconnect { overhead_s, bytes_per_s, .. } = steps.link;
        let model = Model {
            predicted_overhead_s: Model::overhead(overhead_s, bytes_per_s, column.bytes, column.calls),
            best: Model::best(overhead_s, bytes_per_s, column.bytes),
        };
        Ok(Row { steps, model })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::bench::ddp_step::made_up;
    use crate::bench::interconnect;
    use crate::harness::answer::made_up::machine;
    use crate::harness::problem::Measured;

    #[test]
    fn steps_from_python_and_the_wheel_stand_or_fall_together() {
        let measured = Measured::of::<Bucketed>();
        let params = |wheel| Params { wheel, ..Params::smallest(Some(25.0)) };
        let mut steps = made_up::row(&[], None);
        let (bytes, parameters) = (params(false).gradient_bytes(), params(false).config().num_parameters());
        (steps["gradient_bytes"], steps["parameters"]) = (bytes.into(), parameters.into());
        steps["link"] = made_up::link(interconnect::sizes(bytes));
        let row = json!({"steps": steps, "model": {"predicted_overhead_s": 1.0, "best": null}});
        (measured.check_row)(&json!(params(false)), &row, &machine(None)).unwrap();
        let said = format!("{:#}", (measured.check_row)(&json!(params(true)), &row, &machine(None)).unwrap_err());
        assert!(said.contains("wheel is true, but whether the row has steps from Python is false"), "{said}");
        assert!(json!(params(false)).get("wheel").is_none(), "older records have no such key");
        let mut wrong = json!(params(true));
        assert_eq!((measured.parse)(&wrong, Profile::Cpu).unwrap(), wrong);
        wrong["wheel"] = "yes".into();
        assert!((measured.parse)(&wrong, Profile::Cpu).is_err());
        let said = format!("{:#}", params(true).validate_without_wheel().unwrap_err());
        assert!(said.contains("wheel must be left out: ddp_bucketed_benchmarking measures it"), "{said}");
    }

    #[test]
    fn no_number_of_buckets_beats_the_best() {
        let (overhead_s, bytes_per_s, bytes) = (30e-6, 300e9, 7_992_940_800);
        let best = Model::best(overhead_s, bytes_per_s, bytes).unwrap();
        let overhead = |n| Model::overhead(overhead_s, bytes_per_s, bytes, n);
        let least = (1..2000).map(overhead).fold(f64::INFINITY, f64::min);
        assert!(least >= best.overhead_s && least < 1.001 * best.overhead_s, "{least} {best:?}");
        assert!((best.calls * best.bucket_bytes / bytes as f64 - 1.0).abs() < 1e-12);
        assert_eq!(overhead(1), bytes as f64 / 300e9 + 30e-6);
        assert_eq!(Model::best(0.0, 1e9, bytes), None);
    }
}
