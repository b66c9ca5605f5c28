//! The least operations and bytes of an attention pass. All TFLOP/s of attention use this convention.

use serde::{Deserialize, Serialize};

use super::dtype::Dtype;
use crate::harness::samples::Work;

/// The timed passes of attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AttentionPass {
    /// From q, k and v to o, recording the autograd graph.
    Forward,
    /// From the upstream gradient to dq, dk and dv, on a retained graph.
    Backward,
    /// Forward, then backward.
    Both,
    /// The leaderboard's function: forward, the sum of o, and backward from it, into gradients that accumulate.
    Summed,
}

/// The backward pass has five matrix products (S, dP, dV, dK, dQ), the forward pass two.
pub const BACKWARD_OVER_FORWARD: f64 = 2.5;

/// Two products of 2 s^2 d operations a head. The mask leaves half: 4 s^2 d / 2.
pub fn forward_flops(shape: [i64; 4]) -> f64 {
    let [batch, heads, seq, d] = shape.map(|n| n as f64);
    0.5 * 4.0 * batch * heads * seq * seq * d
}

pub fn flops(shape: [i64; 4], pass: AttentionPass) -> f64 {
    forward_flops(shape)
        * match pass {
            AttentionPass::Forward => 1.0,
            AttentionPass::Backward => BACKWARD_OVER_FORWARD,
            AttentionPass::Both | AttentionPass::Summed => 1.0 + BACKWARD_OVER_FORWARD,
        }
}

/// Number of tensors of the inputs' size that must be read or written: q, k, v, o forward; q, k, v, dO, dQ, dK, dV
/// backward; q, k, v, o, dO and the three gradients for both passes. The summed pass has no dO tensor: it is a scalar.
fn rows(pass: AttentionPass) -> f64 {
    match pass {
        AttentionPass::Forward => 4.0,
        AttentionPass::Backward | AttentionPass::Summed => 7.0,
        AttentionPass::Both => 8.0,
    }
}

pub fn of(shape: [i64; 4], dtype: Dtype, pass: AttentionPass, precision: &str) -> Work {
    let elements = shape.iter().map(|n| *n as f64).product::<f64>();
    let bytes = rows(pass) * elements * dtype.kind().elt_size_in_bytes() as f64;
    Work { flops: flops(shape, pass), bytes, precision: precision.into() }
}

/// Of plain attention (b, T, d) without a mask: two products of 2 b T^2 d operations forward, and backward the four of Eq. 7,
/// 8, 10 and 11, since it recomputes nothing.
pub fn plain(shape: [i64; 3], dtype: Dtype, pass: AttentionPass) -> Work {
    let row = shape.iter().map(|n| *n as f64).product::<f64>();
    let products = match pass {
        AttentionPass::Forward => 2.0,
        AttentionPass::Backward => 4.0,
        AttentionPass::Both | AttentionPass::Summed => 6.0,
    };
    let bytes = rows(pass) * row * dtype.kind().elt_size_in_bytes() as f64;
    Work { flops: products * 2.0 * row * shape[1] as f64, bytes, precision: dtype.name().into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_leaderboard_has_the_published_count() {
        let shape = [1, 16, 16384, 64];
        assert_eq!(flops(shape, AttentionPass::Forward), 549_755_813_888.0);
        assert_eq!(flops(shape, AttentionPass::Backward), 1_374_389_534_720.0);
        assert_eq!((flops(shape, AttentionPass::Summed) / 1e9).round(), 1924.0);
    }
}
