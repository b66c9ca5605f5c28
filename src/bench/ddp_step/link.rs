//! The cost of a call and the bandwidth of a machine's link, from the probes of all its cases.

use serde::Serialize;

use super::Row;
use crate::bench::interconnect::fit;
use crate::harness::answer::{CaseId, Quantity, Range, Unit};
use crate::harness::stats::median;

/// One fit of t = o + S / w to the probes of several cases.
#[derive(Debug, Clone, Serialize)]
pub struct PooledLink {
    /// o.
    pub overhead: Quantity,
    /// w.
    pub bandwidth: Quantity,
    /// The smallest and the largest o by the probes of one case.
    pub overheads: Range,
}

impl PooledLink {
    /// Of the cases that the machine of `like` measured. `None` without probes that a line fits.
    pub fn of<'a>(like: &CaseId, cases: impl IntoIterator<Item = (&'a CaseId, &'a Row)>) -> Option<Self> {
        let cases: Vec<_> = cases.into_iter().filter(|(id, _)| id.machine() == like.machine()).collect();
        let probes = cases.iter().flat_map(|(_, row)| &row.link.points);
        let points: Vec<_> = probes.map(|p| (p.bytes as f64, median(&p.time.last_rank.samples))).collect();
        let (overhead_s, bytes_per_s) = fit(&points).ok()?;
        let sources: Vec<CaseId> = cases.iter().map(|(id, _)| (*id).clone()).collect();
        let single =
            |(id, row): &(&CaseId, &Row)| Quantity::new(row.link.overhead_s, Unit::Seconds, vec![(*id).clone()]);
        Some(Self {
            overhead: Quantity::new(overhead_s, Unit::Seconds, sources.clone()),
            bandwidth: Quantity::new(bytes_per_s, Unit::BytesPerSecond, sources),
            overheads: Range::of(cases.iter().map(single))?,
        })
    }

    /// What the fixed costs of `calls` take.
    pub fn of_calls(&self, calls: u64) -> Quantity {
        self.seconds(calls as f64 * self.overhead.value())
    }

    /// What sending `bytes` takes.
    pub fn of_bytes(&self, bytes: f64) -> Quantity {
        self.seconds(bytes / self.bandwidth.value())
    }

    /// A time that follows from the fit.
    pub fn seconds(&self, seconds: f64) -> Quantity {
        Quantity::new(seconds, Unit::Seconds, self.overhead.sources().to_vec())
    }
}

#[cfg(test)]
mod tests {
    use super::super::made_up::{params, row};
    use super::super::tables::StepCase;
    use super::*;
    use crate::harness::answer::made_up::MadeUp;
    use crate::model::Precision;

    #[test]
    fn the_cases_of_one_machine_share_a_fit_that_another_machine_does_not_change() {
        let params = [1.0, 2.0, 3.0].map(|mb| params(Precision::Float32, Some(mb)));
        let mut slow = row(&[], None);
        for point in slow["link"]["points"].as_array_mut().unwrap() {
            point["time"]["last_rank"]["samples"][0] = 100.0.into();
        }
        slow["link"]["overhead_s"] = 100.0.into();
        let records = MadeUp::gpu("x").measured("a", &params[0], &row(&[], None));
        let records = records.run("b", Some("NVIDIA H200")).measured("a", &params[1], &row(&[], None));
        let records = records.run("c", Some("NVIDIA H100")).measured("a", &params[2], &slow).records();
        let cases: Vec<StepCase> = records.main().unwrap().cases_as().unwrap();
        let rows = || cases.iter().map(|case| (&case.id, case.row().unwrap().steps()));
        let link = PooledLink::of(&cases[0].id, rows()).unwrap();
        assert!((link.overhead.value() / 0.01 - 1.0).abs() < 1e-9, "{link:?}");
        assert!((link.bandwidth.value() / 1e9 - 1.0).abs() < 1e-9);
        assert_eq!((link.overheads.high.value(), link.overhead.sources().len()), (0.01, 2));
        assert_eq!(link.of_calls(100).value(), 100.0 * link.overhead.value());
        assert!((link.of_bytes(2e9).value() - 2.0).abs() < 1e-6);
        assert!(PooledLink::of(&cases[0].id, []).is_none());
    }
}
