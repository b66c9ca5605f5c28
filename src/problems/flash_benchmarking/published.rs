//! Published figures of implementations that cannot run here.

use crate::bench::work::AttentionPass::{self, Backward, Both, Forward};

/// A median of `do_bench`, of causal attention in bfloat16.
pub struct Published {
    pub heads: i64,
    pub seq: i64,
    pub d: i64,
    pub pass: AttentionPass,
    pub seconds: f64,
}

/// FlashAttention-3 (commit 0251105a, built with CUDA 13.0) as bare operators, on an H200 at another time: it is not part
/// of PyTorch, whose operators are timed beside ours.
pub const FLASH_ATTENTION_3: &[Published] = &[
    Published { heads: 16, seq: 16_384, d: 64, pass: Forward, seconds: 1.067e-3 },
    Published { heads: 16, seq: 16_384, d: 64, pass: Backward, seconds: 2.599e-3 },
    Published { heads: 16, seq: 16_384, d: 64, pass: Both, seconds: 3.664e-3 },
    Published { heads: 16, seq: 16_384, d: 128, pass: Forward, seconds: 1.704e-3 },
    Published { heads: 16, seq: 16_384, d: 128, pass: Backward, seconds: 4.771e-3 },
    Published { heads: 16, seq: 16_384, d: 128, pass: Both, seconds: 6.444e-3 },
    Published { heads: 1, seq: 8192, d: 64, pass: Forward, seconds: 0.097e-3 },
    Published { heads: 1, seq: 8192, d: 64, pass: Backward, seconds: 0.149e-3 },
    Published { heads: 1, seq: 65_536, d: 64, pass: Forward, seconds: 1.104e-3 },
    Published { heads: 1, seq: 65_536, d: 64, pass: Backward, seconds: 2.527e-3 },
    Published { heads: 1, seq: 8192, d: 128, pass: Forward, seconds: 0.093e-3 },
    Published { heads: 1, seq: 8192, d: 128, pass: Backward, seconds: 0.254e-3 },
    Published { heads: 1, seq: 65_536, d: 128, pass: Forward, seconds: 1.644e-3 },
    Published { heads: 1, seq: 65_536, d: 128, pass: Backward, seconds: 4.597e-3 },
];
