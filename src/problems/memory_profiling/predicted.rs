//! What the memory of the largest model should be by counting: what measured peaks are held against.

use anyhow::Result;

use crate::attention::ImplementationName;
use crate::harness::problem::Verdict;
use crate::model::memory::{Memory, Update};
use crate::model::sizes::{BATCH_SIZE, TABLE_1, VOCAB_SIZE};
use crate::model::{Config, Precision, Size};

/// The context lengths that the handout profiles.
pub const CONTEXT_LENGTHS: [i64; 3] = [128, 256, 512];
const LARGEST: Size = TABLE_1[4];

/// Of the largest model at the handout's batch size.
pub fn memory(seq: i64, precision: Precision) -> Memory {
    let config = Config::of_size(&LARGEST, VOCAB_SIZE, seq);
    Memory { config, batch: BATCH_SIZE, seq, precision, attention: ImplementationName::Naive }
}

/// The fixed part is 4 P values, the residual stream 4 B T d bytes, and peaks order as their definitions demand.
pub fn prediction_adds_up() -> Result<Verdict> {
    for (seq, precision) in
        CONTEXT_LENGTHS.iter().flat_map(|&seq| [Precision::Float32, Precision::Bfloat16].map(|p| (seq, p)))
    {
        let memory = memory(seq, precision);
        anyhow::ensure!(memory.fixed() == 16 * memory.config.num_parameters(), "the fixed part is not 4 P values");
        anyhow::ensure!(memory.residual() == (4 * BATCH_SIZE * seq * LARGEST.d_model) as u64, "the residual stream");
        let peaks = [
            memory.parameters(),
            memory.forward_peak(),
            memory.recorded_forward_peak(),
            memory.step_peak(Update::ByOperators, false),
            memory.step_peak(Update::ByOperators, true),
        ];
        anyhow::ensure!(peaks.is_sorted(), "at {seq} in {} the peaks do not rise: {peaks:?}", precision.name());
    }
    Verdict::passed(format!("{} predictions", 2 * CONTEXT_LENGTHS.len()))
}
