//! `optimizer_state_sharding_accounting`: what sharding the optimizer's state saves in memory and costs in time, beside ZeRO
//! stage 1.

use std::collections::BTreeMap;

use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use self::memory::RankMemory;
use super::ddp_step::{self, Columns, Params, checks::small, scheme::BESIDE_SHARDED};
use crate::attention::Choice;
use crate::harness::problem::{Check, Measure, Measured, Problem, Verdict};
use crate::harness::record::Profile;
use crate::model::Config;
use crate::model::memory::Memory;
use crate::model::sizes::{TABLE_1, VOCAB_SIZE};
use crate::parallel::overlap_bucketed;
use crate::parallel::trainer::{SHARDED_OPTIMIZER, ZERO1, ZERO1_IN_BACKWARD};

pub mod memory;

pub const PROBLEM: Problem = Problem {
    name: "optimizer_state_sharding_accounting",
    answers: &["a", "b", "c"],
    checks: &[
        Check { name: "state_is_that_of_what_is_owned", part: "a", run: state_is_that_of_what_is_owned },
        Check { name: "volumes_are_what_each_scheme_sends", part: "c", run: volumes_are_what_each_scheme_sends },
    ],
    measured: Some(Measured::of::<Sharding>()),
    facts,
};

/// Every rank's own optimizer, the handout's shared one, and ZeRO's first stage: whose memory is counted.
const SCHEMES: [&str; 3] = [BESIDE_SHARDED, SHARDED_OPTIMIZER, ZERO1];

/// What is timed: also ZeRO-1 that steps in the backward pass, which keeps the same state but not until the step, and
/// plain data parallelism with ZeRO-1's buckets.
const TIMED: [&str; 5] = [BESIDE_SHARDED, overlap_bucketed::STRATEGY.name, SHARDED_OPTIMIZER, ZERO1, ZERO1_IN_BACKWARD];

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
        let memory = Memory { config: params.config(), batch, seq, precision, attention: Choice::Naive };
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

struct Sharding;

impl Measure for Sharding {
    type Params = Params;
    type Row = Row;
    const REVISION: u32 = 2;
    const KERNELS: &'static [&'static str] = ddp_step::KERNELS;

    fn validate(params: &Params) -> Result<()> {
        params.validate()
    }

    fn measure(params: &Params, _profile: Profile) -> Result<Row> {
        let memory = memory::measure(params, &SCHEMES)?;
        let steps = ddp_step::measure(params, &Columns { strategies: &TIMED, pytorch_ddp: false })?;
        Ok(Row { steps, memory, predicted: Predicted::of(params) })
    }
}

/// Counted to the byte on the CPU: each rank's state is two moments of what it owns, and all own everything once.
fn state_is_that_of_what_is_owned() -> Result<Verdict> {
    let params = small(None);
    let (memory, all) = (memory::measure(&params, &SCHEMES)?, params.config().num_parameters());
    for (scheme, ranks) in &memory {
        let owned: u64 = ranks.iter().map(|rank| rank.owned_values).sum();
        let expected = if scheme == BESIDE_SHARDED { all * params.world_size as u64 } else { all };
        // Shards of ZeRO-1 are padded to equal and aligned lengths.
        let padding = if scheme == ZERO1 { 1024 } else { 0 };
        ensure!((expected..=expected + padding).contains(&owned), "{scheme}: {owned} values are owned, of {expected}");
        for (rank, RankMemory { owned_values, moments }) in ranks.iter().enumerate() {
            for moment in moments {
                let is_before = moment.name == "after init" || moment.name == "before the first step";
                let state = if is_before { 0 } else { 8 * owned_values };
                let (measured, name) = (moment.optimizer_state, &moment.name);
                ensure!(measured == state, "{scheme}, rank {rank}, {name}: {measured} bytes of state, not {state}");
                // Tokens and tables are all that is not counted by name; ZeRO-1 has buffers of its own.
                let explained = scheme == ZERO1 || moment.other < 64 << 10;
                ensure!(explained, "{scheme}, rank {rank}, {name}: {} bytes of unknown use", moment.other);
            }
        }
    }
    Verdict::passed(format!("{} schemes on {} ranks", memory.len(), params.world_size))
}

/// An all-reduce moves every gradient; the shared optimizer broadcasts every parameter as well; ZeRO-1 splits one all-reduce.
fn volumes_are_what_each_scheme_sends() -> Result<Verdict> {
    let columns = ddp_step::checks::small_columns(&TIMED, None)?;
    let gradients = small(None).gradient_bytes() as f64;
    let times = [(1.0, 1.0), (1.0, 1.0), (2.0, 2.0), (2.0, 1.0), (2.0, 1.0)];
    for (scheme, (handed, carried)) in TIMED.into_iter().zip(times) {
        let column = &columns[scheme];
        for (what, counted, share) in
            [("handed over", column.bytes as f64, handed), ("carried", column.bus_bytes, carried)]
        {
            let expected = share * gradients;
            // Two ranks: an all-reduce carries each byte once. Shards are padded.
            ensure!(
                (expected..expected * 1.001).contains(&counted),
                "{scheme}: {counted} bytes {what}, not {expected}"
            );
        }
    }
    Verdict::passed(format!("{} schemes, handed over and carried", TIMED.len()))
}

/// The handout's model by counting, for two ranks.
fn facts() -> Result<Value> {
    let config = Config::of_size(&TABLE_1[3], VOCAB_SIZE, 512);
    let bytes = 4 * config.num_parameters();
    Ok(json!({
        "base": BESIDE_SHARDED,
        "xl": {
            "parameters": config.num_parameters(),
            "parameters_bytes": bytes,
            "state_bytes": 2 * bytes,
            "unsharded_bytes": 4 * bytes,
            "sharded_bytes": 3 * bytes,
        },
    }))
}
