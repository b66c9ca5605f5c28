//! The fused step on several ranks, from the records of `torch_compile`.

use anyhow::{Context as _, Result};
use serde::Deserialize;
use serde_json::Value;

use crate::bench::all_reduce::RankTimes;
use crate::bench::ddp_step::tables::{StepSetting, size_mb};
use crate::bench::steps_on_ranks::{Params, Row};
use crate::harness::answer::{Case, CaseId, Paired, RecordSet};
use crate::model::Precision;

/// A case of `torch_compile`, of which only these steps are read.
#[derive(Deserialize)]
#[serde(tag = "measure", rename_all = "snake_case")]
enum Measured {
    Ranks(Params),
    #[serde(other)]
    Other,
}

/// How the ranks send gradients.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    Buckets,
    /// All gradients after the backward pass.
    OneCall,
    /// In buckets; each rank steps its share of the parameters (ZeRO-1).
    Shares,
}

/// A step, beside the one without communication in the same turns.
pub struct FusedStep {
    pub case: CaseId,
    pub setting: StepSetting,
    pub dtype: Precision,
    pub way: Way,
    /// "fused, buckets (100 MB)"
    pub title: String,
    pub step: Paired,
    pub single: Paired,
    /// What the step takes longer than without communication.
    pub adds: Paired,
}

/// Each way at each precision on the fewest ranks, in the case in which its step is shortest.
pub fn fused_steps(set: &RecordSet) -> Result<Vec<FusedStep>> {
    let all: Vec<Case<Measured, Value>> = set.cases_as()?;
    let measured = all.iter().filter_map(|case| match (&case.params, case.row()?) {
        (Measured::Ranks(params), row) => Some((&case.id, params, row.clone())),
        (Measured::Other, _) => None,
    });
    let read = |(id, params, row)| Ok((id, params, serde_json::from_value(row).context("a step on ranks")?));
    let mut cases: Vec<(&CaseId, &Params, Row)> = measured.map(read).collect::<Result<_>>()?;
    let fewest = cases.iter().map(|(_, params, _)| params.world_size).min();
    cases.retain(|(_, params, _)| Some(params.world_size) == fewest);
    let shortest = |dtype, way| {
        let cases = cases.iter().filter(move |(_, params, _)| params.dtype == dtype);
        let steps = cases.filter_map(|(id, params, row)| FusedStep::of(id, params, row, way));
        steps.min_by(|a, b| a.step.all.value().total_cmp(&b.step.all.value()))
    };
    let dtypes = [Precision::Float32, Precision::Bfloat16];
    let ways = [Way::Buckets, Way::OneCall, Way::Shares];
    Ok(dtypes.iter().flat_map(|dtype| ways.iter().filter_map(|way| shortest(*dtype, *way))).collect())
}

impl FusedStep {
    fn of(id: &CaseId, p: &Params, row: &Row, way: Way) -> Option<Self> {
        let [step, single] = [way.times(row), &row.single].map(|times| times.turns(p.rounds));
        Some(Self {
            case: id.clone(),
            setting: StepSetting::new(p.size, p.backend, p.batch_size, p.context_length, p.world_size),
            dtype: p.dtype,
            way,
            title: format!("fused, {}", way.title(&size_mb(p.bucket_size_mb))),
            step: Paired::median(id, &step)?,
            single: Paired::median(id, &single)?,
            adds: Paired::difference(id, &step, &single)?,
        })
    }
}

impl Way {
    fn times(self, row: &Row) -> &RankTimes {
        match self {
            Self::Buckets => &row.buckets,
            Self::OneCall => &row.flat,
            Self::Shares => &row.sharded,
        }
    }

    fn title(self, size_mb: &str) -> String {
        match self {
            Self::Buckets => format!("buckets ({size_mb} MB)"),
            Self::OneCall => "one call".into(),
            Self::Shares => format!("ZeRO-1, buckets ({size_mb} MB)"),
        }
    }
}
