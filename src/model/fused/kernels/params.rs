//! The parameters of the fused step's kernels, field by field as the files of `kernels/` declare them.

use crate::cuda::{Address, kernel_params};
use crate::model::optim::AdamWOptions;

kernel_params! {
    struct ResidualNorm<'a> as "residual_rms_norm" {
        h, added, sum, gain, y, inverse_rms: Address<'a>,
        d: i32,
        eps: f32,
    }
    struct NormBackward<'a> as "rms_norm_backward" {
        h, inverse_rms, gain, dy, dx, dx_low, partial: Address<'a>,
        rows, d, first: i32,
    }
    struct GainGradients<'a> as "rms_norm_gain_gradients" { partial, gradient: Address<'a>, blocks, d: i32 }
    struct RopeForward<'a> as "rope_forward" { qkv, cosines, sines: Address<'a>, seq, width, d_head: i32 }
    struct RopeBackward<'a> as "rope_backward" {
        dq, dk, dv, dqkv, cosines, sines: Address<'a>,
        seq, width, d_head: i32,
    }
    struct SwigluForward<'a> as "swiglu_forward" { gate_up, activated: Address<'a>, width: i32 }
    struct SwigluBackward<'a> as "swiglu_backward" { gate_up, d_activated: Address<'a>, width: i32 }
    struct CrossEntropy<'a> as "cross_entropy" { logits, targets, losses: Address<'a>, vocabulary: i32, scale: f32 }
    struct EmbeddingGradient<'a> as "embedding_gradient" {
        tokens, d_h, gradient: Address<'a>,
        count, vocabulary, d: i32,
    }
    struct Advance<'a> as "packed_adamw_advance" { progress: Address<'a>, lr, beta1, beta2: f64 }
    struct Factors as "Factors" { decay, blend1, beta2, blend2, eps: f32 }
    struct Update<'a> as "packed_adamw" { p, g, m, v, low, progress: Address<'a>, factors: Factors, fours: i64 }
    struct UpdateFloat32<'a> as "packed_adamw_float32" {
        p, g, m, v, progress: Address<'a>,
        factors: Factors,
        fours: i64,
    }
}

impl Factors {
    pub fn of(options: &AdamWOptions) -> Self {
        let AdamWOptions { lr, beta1, beta2, eps, weight_decay } = *options;
        Self {
            decay: (1.0 - lr * weight_decay) as f32,
            blend1: (1.0 - beta1) as f32,
            beta2: beta2 as f32,
            blend2: (1.0 - beta2) as f32,
            eps: eps as f32,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Shape, UPDATE_THREADS};
    use super::*;
    use crate::cuda::layout::{Expected, Layout, compare};
    use crate::model::Precision;

    #[test]
    fn the_parameters_lie_as_the_kernels_declare_them() {
        let shape = Shape { precision: Precision::Bfloat16, d_model: 1600, vocabulary: 10_000 };
        let kernels = [
            vec![Layout::of::<ResidualNorm>(), Layout::of::<NormBackward>(), Layout::of::<GainGradients>()],
            vec![Layout::of::<RopeForward>(), Layout::of::<RopeBackward>()],
            vec![Layout::of::<SwigluForward>(), Layout::of::<SwigluBackward>()],
            vec![Layout::of::<CrossEntropy>()],
            vec![Layout::of::<EmbeddingGradient>()],
            vec![Layout::of::<Advance>(), Layout::of::<Update>(), Layout::of::<UpdateFloat32>()],
        ];
        for (program, kernels) in shape.programs().iter().zip(kernels) {
            let is_adamw = program.file == "packed_adamw.cu";
            let structs = is_adamw.then(Layout::of::<Factors>).into_iter().collect();
            let conditions = is_adamw.then(|| format!("threads == {UPDATE_THREADS}")).into_iter().collect();
            compare(program, &Expected { structs, kernels, conditions }).unwrap();
        }
    }
}
