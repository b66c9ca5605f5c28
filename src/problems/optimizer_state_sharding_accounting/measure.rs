//! Measures steps under each way to share the optimizer's state, and the memory of every rank.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize};

use super::memory::{self, RankMemory};
use super::{SCHEMES, TIMED};
use crate::attention::ImplementationName;
use crate::bench::ddp_step::{self, Columns, Params};
use crate::harness::problem::Measure;
use crate::harness::record::{Machine, Profile};
use crate::model::memory::Memory;

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Row {
    pub steps: ddp_step::Row,
    /// By scheme, of every rank.
    pub memory: BTreeMap<String, Vec<RankMemory>>,
    pub predicted: Predicted,
}

/// Bytes by counting.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Predicted {
    pub parameters: u64,
    pub gradients: u64,
    /// Of all ranks together where it is shared, of each where it is not.
    pub optimizer_state: u64,
    /// The largest moment of a step without state: everything that the forward pass saves, or the gradients.
    pub peak_before_first_step: u64,
    /// The same with the whole state.
    pub peak_before_later_step: u64,
}

impl Predicted {
    fn of(params: &Params) -> Self {
        let Params { batch_size: batch, context_length: seq, dtype: precision, .. } = *params;
        let memory = Memory { config: params.config(), batch, seq, precision, attention: ImplementationName::Naive };
        let [parameters, gradients, state] = [memory.parameters(), memory.gradients(), memory.optimizer_state()];
        Self {
            parameters,
            gradients,
            optimizer_state: state,
            peak_before_first_step: memory.backward_peak(),
            peak_before_later_step: memory.backward_peak() + state,
        }
    }
}

pub struct Sharding;

impl Measure for Sharding {
    type Params = Params;
    type Row = Row;
    const REVISION: u32 = 2;
    const KERNELS: &'static [&'static str] = ddp_step::KERNELS;

    fn validate(params: &Params) -> Result<()> {
        params.validate_without_wheel()
    }

    fn validate_row(params: &Params, row: &Row) -> Result<()> {
        row.steps.validate(params)?;
        let (found, expected) = (row.predicted, Predicted::of(params));
        ensure!(found == expected, "{found:?} bytes are predicted, and by the case's parameters {expected:?}");
        let all = params.config().num_parameters();
        for scheme in SCHEMES {
            let ranks = row.memory.get(scheme).map_or(&[][..], Vec::as_slice);
            let (found, expected) = (ranks.len(), params.world_size);
            ensure!(found == expected, "under {scheme} the memory of {found} ranks is there, of {expected}");
            let owned: u64 = ranks.iter().map(|rank| rank.owned_values).sum();
            let most = ranks.iter().map(|rank| rank.owned_values).max().unwrap_or_default();
            ensure!(most <= 2 * all, "under {scheme}, a rank keeps state for {most} values, of {all} parameters");
            ensure!(owned >= all, "under {scheme}, the ranks keep state for {owned} of {all} parameters");
            ranks.iter().try_for_each(|rank| rank.validate(all)).with_context(|| format!("under {scheme}"))?;
        }
        Ok(())
    }

    fn validate_on(params: &Params, row: &Row, machine: &Machine) -> Result<()> {
        row.steps.validate_on(params, machine)
    }

    fn measure(params: &Params, _profile: Profile) -> Result<Row> {
        let memory = memory::measure(params, &SCHEMES)?;
        let steps = ddp_step::measure(params, &Columns { strategies: &TIMED, pytorch_ddp: false })?;
        Ok(Row { steps, memory, predicted: Predicted::of(params) })
    }
}
