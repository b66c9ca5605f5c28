//! What a pass must do at the least: the convention by which attention's TFLOP/s are counted everywhere.

use super::Dtype;
use super::contest::Pass;
use crate::harness::samples::Work;

/// The backward pass has five products of matrices (S, dP, dV, dK, dQ) to the forward pass's two.
pub const BACKWARD_OVER_FORWARD: f64 = 2.5;

/// Two products of 2 s^2 d operations a head, of which the mask leaves half: 4 s^2 d / 2.
pub fn forward_flops(shape: [i64; 4]) -> f64 {
    let [batch, heads, seq, d] = shape.map(|n| n as f64);
    0.5 * 4.0 * batch * heads * seq * seq * d
}

pub fn flops(shape: [i64; 4], pass: Pass) -> f64 {
    forward_flops(shape)
        * match pass {
            Pass::Forward => 1.0,
            Pass::Backward => BACKWARD_OVER_FORWARD,
            Pass::Both | Pass::Summed => 1.0 + BACKWARD_OVER_FORWARD,
        }
}

/// How many tensors of the inputs' size must be read or written: q, k, v, o forward; q, k, v, dO, dQ, dK, dV backward;
/// q, k, v, o, dO and the three gradients in both, where the sum's dO is a number.
fn rows(pass: Pass) -> f64 {
    match pass {
        Pass::Forward => 4.0,
        Pass::Backward | Pass::Summed => 7.0,
        Pass::Both => 8.0,
    }
}

pub fn of(shape: [i64; 4], dtype: Dtype, pass: Pass, precision: &str) -> Work {
    let elements = shape.iter().map(|n| *n as f64).product::<f64>();
    let bytes = rows(pass) * elements * dtype.kind().elt_size_in_bytes() as f64;
    Work { flops: flops(shape, pass), bytes, precision: precision.into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_leaderboard_has_the_published_count() {
        let shape = [1, 16, 16384, 64];
        assert_eq!(flops(shape, Pass::Forward), 549_755_813_888.0);
        assert_eq!(flops(shape, Pass::Backward), 1_374_389_534_720.0);
        assert_eq!((flops(shape, Pass::Summed) / 1e9).round(), 1924.0);
    }
}
