//! What the memory of the largest model should be by counting: what measured peaks are held against.

use anyhow::Result;
use serde_json::{Value, json};

use crate::attention::ImplementationName;
use crate::harness::problem::Verdict;
use crate::model::memory::Memory;
use crate::model::sizes::{BATCH_SIZE, TABLE_1, VOCAB_SIZE};
use crate::model::{Config, Precision, Size};

/// The context lengths that the handout profiles.
const CONTEXT_LENGTHS: [i64; 3] = [128, 256, 512];
const LARGEST: Size = TABLE_1[4];

fn memory(seq: i64, precision: Precision) -> Memory {
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
            memory.step_peak(false),
            memory.step_peak(true),
        ];
        anyhow::ensure!(peaks.is_sorted(), "at {seq} in {} the peaks do not rise: {peaks:?}", precision.name());
    }
    Verdict::passed(format!("{} predictions", 2 * CONTEXT_LENGTHS.len()))
}

pub fn facts() -> Result<Value> {
    let predictions = CONTEXT_LENGTHS.map(|seq| {
        json!({
            "context_length": seq,
            "residual": memory(seq, Precision::Float32).residual(),
            "scores": memory(seq, Precision::Float32).scores(),
            "hidden": memory(seq, Precision::Float32).hidden(),
            "logits": memory(seq, Precision::Float32).logits(),
            "float32": prediction(&memory(seq, Precision::Float32)),
            "bfloat16": prediction(&memory(seq, Precision::Bfloat16)),
        })
    });
    let saved = |precision| memory(512, precision).saved();
    let memory = memory(512, Precision::Float32);
    Ok(json!({
        "size": LARGEST,
        "batch_size": BATCH_SIZE,
        "vocab_size": VOCAB_SIZE,
        "num_parameters": memory.config.num_parameters(),
        "parameters": memory.parameters(),
        "gradients": memory.gradients(),
        "optimizer_state": memory.optimizer_state(),
        "fixed": memory.fixed(),
        "predictions": predictions,
        "saved": { "context_length": 512, "float32": saved(Precision::Float32), "bfloat16": saved(Precision::Bfloat16) },
    }))
}

fn prediction(memory: &Memory) -> Value {
    json!({
        "saved": memory.saved_bytes(),
        "weight_copies": memory.weight_copies(),
        "forward": memory.forward_peak(),
        "recorded_forward": memory.recorded_forward_peak(),
        "first_step": memory.step_peak(false),
        "later_step": memory.step_peak(true),
    })
}
