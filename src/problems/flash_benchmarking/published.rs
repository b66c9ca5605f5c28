//! Published figures of implementations that cannot run here.

use serde::Serialize;

/// Medians of `do_bench` in seconds, of causal attention in bfloat16.
#[derive(Debug, Serialize)]
pub struct Published {
    pub heads: i64,
    pub seq: i64,
    pub d: i64,
    pub forward: f64,
    pub backward: f64,
    /// Where it was measured.
    pub both: Option<f64>,
}

/// FlashAttention-3 (commit 0251105a, built with CUDA 13.0) as bare operators, on an H200 at another time: it is not part
/// of PyTorch, whose operators are timed beside ours.
pub const FLASH_ATTENTION_3: &[Published] = &[
    Published { heads: 16, seq: 16_384, d: 64, forward: 1.067e-3, backward: 2.599e-3, both: Some(3.664e-3) },
    Published { heads: 16, seq: 16_384, d: 128, forward: 1.704e-3, backward: 4.771e-3, both: Some(6.444e-3) },
    Published { heads: 1, seq: 8192, d: 64, forward: 0.097e-3, backward: 0.149e-3, both: None },
    Published { heads: 1, seq: 65_536, d: 64, forward: 1.104e-3, backward: 2.527e-3, both: None },
    Published { heads: 1, seq: 8192, d: 128, forward: 0.093e-3, backward: 0.254e-3, both: None },
    Published { heads: 1, seq: 65_536, d: 128, forward: 1.644e-3, backward: 4.597e-3, both: None },
];
