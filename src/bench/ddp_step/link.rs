//! The cost of a call and the bandwidth of the link between two GPUs, from all probes of all problems.

use anyhow::Result;
use serde::Serialize;

use super::tables::StepCase;
use super::{Params, Row};
use crate::bench::interconnect::fit;
use crate::harness::answer::{Case, CaseId, Quantity, Range, Records, Unit};
use crate::harness::stats::median;

/// The problems that probe the link. Each that quotes the fit names the others in `reads`, so that all quote the same one.
pub const PROBED_BY: [&str; 5] = [
    "naive_ddp_benchmarking",
    "minimal_ddp_flat_benchmarking",
    "ddp_overlap_individual_parameters_benchmarking",
    "ddp_bucketed_benchmarking",
    "optimizer_state_sharding_accounting",
];

/// One fit of t = o + S / w to the probes of all cases on one kind of link.
#[derive(Debug, Clone, Serialize)]
pub struct PooledLink {
    /// o.
    pub overhead: Quantity,
    /// w.
    pub bandwidth: Quantity,
    /// The smallest and the largest o and w by the probes of one case.
    overheads: Range,
    bandwidths: Range,
    /// The largest size that was probed.
    largest: Quantity,
    /// How many cases were probed.
    cases: usize,
}

impl PooledLink {
    /// Of every case, in `records` and in what they read, that has the link of `like`. `None` without probes that a line
    /// fits.
    ///
    /// Errors: records of another shape.
    pub fn of<R>(records: &Records, like: &Case<Params, R>) -> Result<Option<Self>> {
        let others = PROBED_BY.iter().filter_map(|name| records.others.get(*name));
        let sets = std::iter::once(records).chain(others).filter_map(|records| records.of(like.id.profile));
        let cases: Vec<Vec<StepCase>> = sets.map(|set| set.cases_as()).collect::<Result<_>>()?;
        let mut alike: Vec<&StepCase> = cases.iter().flatten().filter(|case| have_one_link(case, like)).collect();
        // In one order for all problems, so that their fits are equal to the last bit.
        alike.sort_by_key(|case| case.id.problem.clone());
        Ok(Self::fitted(&alike.iter().filter_map(|case| Some((*case, case.row()?.steps()))).collect::<Vec<_>>()))
    }

    fn fitted(cases: &[(&StepCase, &Row)]) -> Option<Self> {
        let probes = || cases.iter().flat_map(|(_, row)| &row.link.points);
        let points: Vec<_> = probes().map(|p| (p.bytes as f64, median(&p.time.last_rank.samples))).collect();
        let (overhead_s, bytes_per_s) = fit(&points).ok()?;
        let sources: Vec<CaseId> = cases.iter().map(|(case, _)| case.id.clone()).collect();
        let of_all = |value, unit| Quantity::new(value, unit, sources.clone());
        let single =
            |value: fn(&Row) -> f64, unit| Range::of(cases.iter().map(|(case, row)| case.quantity(value(row), unit)));
        Some(Self {
            overhead: of_all(overhead_s, Unit::Seconds),
            bandwidth: of_all(bytes_per_s, Unit::BytesPerSecond),
            overheads: single(|row| row.link.overhead_s, Unit::Seconds)?,
            bandwidths: single(|row| row.link.bytes_per_s, Unit::BytesPerSecond)?,
            largest: of_all(probes().map(|p| p.bytes).max()? as f64, Unit::Bytes),
            cases: cases.len(),
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

    /// A prediction over what one case measured. No two measurements are compared, so their hosts may differ.
    pub fn over(&self, predicted: &Quantity, measured: &Quantity) -> Quantity {
        let sources = predicted.sources().iter().chain(measured.sources()).cloned().collect();
        Quantity::new(predicted.value() / measured.value(), Unit::One, sources)
    }
}

/// Whether the ranks of two cases communicate over the same kind of link: between the same GPUs, whatever their host, or on
/// the same CPU.
fn have_one_link<R>(a: &StepCase, b: &Case<Params, R>) -> bool {
    let (at, other) = (a.id.machine(), b.id.machine());
    let same_place = if at.gpus.is_empty() { at == other } else { at.gpus == other.gpus };
    same_place && (a.params.backend, a.params.world_size) == (b.params.backend, b.params.world_size)
}

#[cfg(test)]
mod tests {
    use super::super::made_up::{params, row};
    use super::*;
    use crate::harness::answer::made_up::MadeUp;
    use crate::model::Precision;

    fn link(records: &Records) -> PooledLink {
        let cases: Vec<StepCase> = records.main().unwrap().cases_as().unwrap();
        PooledLink::of(records, &cases[0]).unwrap().unwrap()
    }

    #[test]
    fn the_cases_of_one_link_share_a_fit_that_another_link_does_not_change() {
        let params = [1.0, 2.0, 3.0].map(|mb| params(Precision::Float32, Some(mb)));
        let mut slow = row(&[], None);
        for point in slow["link"]["points"].as_array_mut().unwrap() {
            point["time"]["last_rank"]["samples"][0] = 100.0.into();
        }
        slow["link"]["overhead_s"] = 100.0.into();
        let records = MadeUp::gpu("x").measured("a", &params[0], &row(&[], None));
        let records = records.run("b", Some("NVIDIA H200")).measured("a", &params[1], &row(&[], None));
        let records = records.run("c", Some("NVIDIA H100")).measured("a", &params[2], &slow).records();
        let link = link(&records);
        assert!((link.overhead.value() / 0.01 - 1.0).abs() < 1e-9, "{link:?}");
        assert!((link.bandwidth.value() / 1e9 - 1.0).abs() < 1e-9);
        assert_eq!((link.overheads.high.value(), link.overhead.sources().len(), link.cases), (0.01, 2, 2));
        assert_eq!((link.bandwidths.low.value(), link.largest.value()), (1e9, 1e9));
        assert_eq!(link.of_calls(100).value(), 100.0 * link.overhead.value());
        assert!((link.of_bytes(2e9).value() - 2.0).abs() < 1e-6);
        let measured = Quantity::new(0.5, Unit::Seconds, vec![link.overhead.sources()[0].clone()]);
        assert_eq!(link.over(&link.seconds(1.0), &measured).value(), 2.0);
    }

    #[test]
    fn problems_that_read_each_other_quote_one_fit() {
        let params = params(Precision::Float32, None);
        let mut slower = row(&[], None);
        for point in slower["link"]["points"].as_array_mut().unwrap() {
            let seconds = &mut point["time"]["last_rank"]["samples"][0];
            *seconds = (seconds.as_f64().unwrap() + 0.02).into();
        }
        let made_up = |name: &str, row| MadeUp::gpu(name).measured("a", &params, row).records();
        let rows = [&row(&[], None), &slower];
        let fits = [[0, 1], [1, 0]].map(|[own, other]| {
            let mut records = made_up(PROBED_BY[own], rows[own]);
            records.others = [(PROBED_BY[other].to_string(), made_up(PROBED_BY[other], rows[other]))].into();
            link(&records)
        });
        let [first, second] = fits.map(|link| (link.overhead.value(), link.bandwidth.value(), link.cases));
        assert_eq!(first, second);
        assert!(0.01 < first.0 && first.0 < 0.03 && first.2 == 2, "{first:?}");
    }
}
