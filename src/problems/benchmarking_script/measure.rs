//! Measures a training step with the attention of the profile where the suite names none.

use anyhow::Result;
use serde_json::{Value, json};

use crate::bench::device::attention_for;
use crate::bench::training_step::{self, Execution, Params, Row};
use crate::harness::problem::Measure;
use crate::harness::record::Profile;
use crate::model::Precision;

pub struct BenchmarkingScript;

impl Measure for BenchmarkingScript {
    type Params = Params;
    type Row = Row;
    const REVISION: u32 = 2;
    const KERNELS: &'static [&'static str] = &[
        "adamw.cu",
        "flash_forward.cu",
        "flash_backward.cu",
        "portable_forward.cu",
        "portable_backward.cu",
        "rms_norm.cu",
        "rope.cu",
        "swiglu.cu",
        "cross_entropy.cu",
        "embedding_gradient.cu",
        "packed_adamw.cu",
    ];

    /// Hopper's attention kernels have no float32. On another GPU than Hopper, and where the scores are few, bfloat16 uses the
    /// portable ones too.
    fn kernels(params: &Params) -> &'static [&'static str] {
        let own = params.attention.runs_own_kernels();
        match (params.execution, own, params.dtype) {
            (Execution::Fused, true, Precision::Bfloat16) => &Self::KERNELS[1..],
            (Execution::Fused, true, Precision::Float32) => &Self::KERNELS[3..],
            (Execution::Fused, false, _) => &Self::KERNELS[5..],
            (_, true, Precision::Bfloat16) => &Self::KERNELS[..5],
            (_, true, Precision::Float32) => &["adamw.cu", "portable_forward.cu", "portable_backward.cu"],
            (_, false, _) => &Self::KERNELS[..1],
        }
    }

    fn defaults(profile: Profile) -> Vec<(&'static str, Value)> {
        vec![("attention", json!(attention_for(profile)))]
    }

    fn fresh_process(params: &Params) -> bool {
        params.needs_fresh_process()
    }

    fn validate(params: &Params) -> Result<()> {
        params.validate()
    }

    fn predicted_bytes(params: &Params, profile: Profile) -> Option<u64> {
        Some(params.predicted_bytes(profile))
    }

    fn measure(params: &Params, profile: Profile) -> Result<Row> {
        training_step::measure(params, profile)
    }
}
