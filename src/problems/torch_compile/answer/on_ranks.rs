//! Whole steps on several ranks: ours with its collectives in one CUDA graph, beside PyTorch's DDP at its best.

use anyhow::Result;
use serde::Serialize;

use super::super::measure;
use super::cases::{RanksCase, machines};
use super::times;
use crate::bench::all_reduce::RankTimes;
use crate::bench::steps_on_ranks::{Params, Row};
use crate::harness::answer::format::{grouped, listed, time};
use crate::harness::answer::{
    Answer, Cell, Claim, Emphasis, Quantity, Range, RecordSet, Records, Style, Table, Turns, Unit,
};

#[derive(Serialize)]
pub struct OnRanks {
    /// The largest distance of the averages in the products' type from those in float32.
    reduction: Quantity,
    buckets: Ratios,
    sharded: Ratios,
    /// "every form", or those that were measured: "eager".
    forms: String,
    #[serde(skip)]
    pub claim: Claim,
}

/// Of a way to train, over all forms of PyTorch's DDP.
#[derive(Serialize)]
struct Ratios {
    /// Over our step without communication: "1.12 to 1.15".
    alone: String,
    /// Over PyTorch's DDP: "0.45 to 0.52".
    pytorch: String,
}

type Times = fn(&Row) -> &RankTimes;

impl RanksCase<'_> {
    fn of(&self, times: Times) -> Option<Turns> {
        Some(times(self.row?).turns(self.rounds))
    }

    fn cell_of(&self, times: Times) -> Cell {
        let ended = || self.case.outcome.label().to_string();
        let text = self.of(times).map(|turns| turns.marked(&time(turns.median_or_least())));
        Cell::text(text.unwrap_or_else(ended)).of_case(&self.case.id)
    }

    /// Of what two columns take, and whether the turns of both agree.
    fn ratio_of(&self, over: Times, under: Times) -> Option<(Quantity, bool)> {
        let [over, under] = [self.of(over)?, self.of(under)?];
        let ratio = over.median_or_least() / under.median_or_least();
        Some((self.case.quantity(ratio, Unit::One), over.is_stable() && under.is_stable()))
    }

    fn ratio_cell(&self, over: Times, under: Times) -> Option<Cell> {
        let (ratio, stable) = self.ratio_of(over, under)?;
        Some(Cell::Number(ratio, Emphasis { bold: false, unstable: !stable }))
    }
}

const NOT_MEASURED: &str = "not measured";

const BUCKETS: Times = |row| &row.buckets;
const FLAT: Times = |row| &row.flat;
const SINGLE: Times = |row| &row.single;
const SHARDED: Times = |row| &row.sharded;
const PYTORCH: Times = |row| &row.pytorch;

impl OnRanks {
    /// None where no case was measured.
    pub fn of(cases: &[RanksCase]) -> Option<Self> {
        let ratios = |over, under| Range::of(cases.iter().filter_map(|case| Some(case.ratio_of(over, under)?.0)));
        let of = |over| {
            let [alone, pytorch] = [ratios(over, SINGLE)?, ratios(over, PYTORCH)?].map(|range| times(&range));
            Some(Ratios { alone, pytorch })
        };
        let pytorch = ratios(BUCKETS, PYTORCH)?;
        let errors = cases.iter().filter_map(|case| Some(case.case.quantity(case.row?.reduction_error, Unit::One)));
        let measured: Vec<&str> =
            cases.iter().filter(|case| case.row.is_some()).map(|case| case.params.pytorch.name()).collect();
        Some(Self {
            forms: if measured.len() == cases.len() { "every form".into() } else { listed(&measured) },
            reduction: Quantity::largest(errors)?,
            buckets: of(BUCKETS)?,
            sharded: of(SHARDED)?,
            claim: Claim::below("our-ranks-are-faster", "largest buckets / PyTorch's DDP", &pytorch.high, 1.0),
        })
    }
}

/// In MB.
fn bucket_size(p: &Params) -> String {
    grouped(p.bucket_size_mb, if p.bucket_size_mb < 1.0 { 1 } else { 0 })
}

/// The planned cases that `set` does not hold.
pub fn unmeasured(records: &Records, set: &RecordSet) -> Vec<Params> {
    let planned = records.planned(set.profile()).filter(|(_, params)| set.file.case(params).is_none());
    let cases = planned.filter_map(|(_, params)| match serde_json::from_value(params.clone()).ok()? {
        measure::Params::Ranks(params) => Some(params),
        _ => None,
    });
    cases.collect()
}

/// A line for each recorded and each planned case; no table of none.
pub fn table(answer: &mut Answer, id: &str, cases: &[RanksCase], planned: &[Params]) -> Result<()> {
    let recorded = cases.iter().map(|case| (case.params, Some(case)));
    let mut lines: Vec<(&Params, Option<&RanksCase>)> = recorded.chain(planned.iter().map(|p| (p, None))).collect();
    lines.sort_by_key(|(p, _)| p.pytorch);
    let Some((first, _)) = lines.first() else { return Ok(()) };
    let (p, machine) = (*first, machines(cases));
    let cell = |case: &Option<&RanksCase>, times| case.map_or_else(|| Cell::text(NOT_MEASURED), |c| c.cell_of(times));
    let ratio = |case: &Option<&RanksCase>, under| case.and_then(|case| case.ratio_cell(BUCKETS, under));
    let table = Table::of(lines)
        .text("PyTorch's form", |(p, _)| p.pytorch.name())
        .right("single (ms)", move |(_, c)| cell(c, SINGLE))
        .right("buckets (ms)", move |(_, c)| cell(c, BUCKETS))
        .right("one call (ms)", move |(_, c)| cell(c, FLAT))
        .right("shares (ms)", move |(_, c)| cell(c, SHARDED))
        .right("PyTorch (ms)", move |(_, c)| cell(c, PYTORCH))
        .number("buckets / single", Style::Fixed, 2, move |(_, c)| ratio(c, SINGLE))
        .number("buckets / PyTorch", Style::Fixed, 2, move |(_, c)| ratio(c, PYTORCH));
    answer.table(
        id,
        table.captioned(format!(
            "Whole steps on {} ranks over {}: {}, context {}, batch {} on each rank, {}, buckets of {} MB, {} attention; {machine}. \
             Single is our step without communication on all ranks at the same time; with shares, each rank steps its own \
             (ZeRO-1, in buckets). Median of {} turns of {} steps, each step as long as its last rank takes. † marks a time or ratio whose turns differ by more than 5 %.",
            p.world_size,
            p.backend.title(),
            p.size.size().name,
            grouped(p.context_length as f64, 0),
            p.batch_size,
            p.dtype.name(),
            bucket_size(p),
            p.attention.name(),
            p.rounds,
            p.iterations,
        )),
    )
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde_json::json;

    use super::super::{ALONE, answer};
    use crate::bench::steps_on_ranks::made_up::{params, row};
    use crate::harness::answer::made_up::{MadeUp, printed};
    use crate::harness::answer::{Answer, Audience, Records};

    fn answered(made_up: MadeUp) -> Answer {
        let others = BTreeMap::from([(ALONE.to_string(), Records::default())]);
        answer(&Records { others, ..made_up.records() }, Audience::Ours).unwrap()
    }

    #[test]
    fn our_buckets_count_as_faster_only_beside_every_form_of_pytorch() {
        let gpu = || MadeUp::gpu("torch_compile").measured("ranks", &params("eager"), &row(0.050, 0.100));
        let answer = answered(gpu());
        assert_eq!(answer.holds("our-ranks-are-faster"), Some(true));
        let quoted = printed(&answer);
        assert_eq!(quoted["ranks"]["reduction"]["value"], json!(0.002));
        let sharded = &quoted["ranks"]["sharded"];
        for (under, ratio) in [("alone", "1.10"), ("pytorch", "0.44")] {
            assert!(sharded[under].to_string().contains(ratio), "{sharded}");
        }
        let table = answer.tables()["ranks"].markdown();
        assert!(table.contains("| DDP | 40.0 | 50.0 | 60.0 | 44.0 | 100 | 1.25 | 0.50 |"), "{table}");
        let slower = answered(gpu().measured("ranks", &params("compiled"), &row(0.050, 0.050)));
        assert_eq!(slower.holds("our-ranks-are-faster"), Some(false), "a tie is no less");
        assert_eq!(quoted["ranks"]["forms"], "every form");
        let one = printed(&answered(gpu().not_run("ranks", &params("compiled"))));
        assert_eq!(one["ranks"]["forms"], "DDP");
        let failed = answered(MadeUp::gpu("torch_compile").failed("ranks", &params("eager")));
        assert!(printed(&failed)["ranks"].is_null() && failed.tables()["ranks"].markdown().contains("| failed |"));
    }
}
