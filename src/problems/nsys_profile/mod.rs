//! Profiles of a forward pass and of a training step, kernel by kernel, taken in process by Kineto or imported from nsys.

use anyhow::Result;
use serde_json::{Value, json};

use self::measure::NsysProfile;
use crate::harness::problem::{Check, Measured, Problem};
use crate::model::Config;
use crate::model::sizes::{BATCH_SIZE, TABLE_1, TINY, VOCAB_SIZE};

pub mod checks;
#[cfg(test)]
mod cuda_tests;
pub mod kernels;
pub mod measure;
pub mod nsys;
pub mod step;
pub mod summary;

pub const PROBLEM: Problem = Problem {
    name: "nsys_profile",
    answers: &["a", "b", "c", "d", "e"],
    checks: &[
        Check { name: "a_profiled_step_adds_up", part: "a", run: checks::a_profiled_step_adds_up },
        Check { name: "every_kernel_finds_its_range", part: "b", run: checks::every_kernel_finds_its_range },
        Check { name: "nsys_and_kineto_agree", part: "b", run: checks::nsys_and_kineto_agree },
    ],
    measured: Some(Measured::of::<NsysProfile>()),
    facts,
    answer: crate::harness::problem::no_answer,
    reads: &[],
};

/// Operations of the two products of attention, over the whole causal square, in one forward pass: 4 L B T² d.
fn attention_product_flops(config: &Config, batch: i64, seq: i64) -> f64 {
    4.0 * (config.num_layers * batch * seq * seq * config.d_model) as f64
}

/// Of a softmax: the maximum, the difference from it, its exponential, their sum, and the division by it.
const SOFTMAX_FLOPS_PER_SCORE: f64 = 5.0;

/// 5 L B H T².
fn softmax_flops(config: &Config, batch: i64, seq: i64) -> f64 {
    SOFTMAX_FLOPS_PER_SCORE * (config.num_layers * batch * config.num_heads * seq * seq) as f64
}

fn facts() -> Result<Value> {
    let sizes = TABLE_1.iter().chain([&TINY]).map(|size| {
        let config = Config::of_size(size, VOCAB_SIZE, 512);
        let (products, softmax) =
            (attention_product_flops(&config, BATCH_SIZE, 512), softmax_flops(&config, BATCH_SIZE, 512));
        json!({
            "name": size.name,
            "layers": size.num_layers,
            "d_head": config.d_head(),
            "matmuls": 9 * size.num_layers + 1,
            // Neither depends on batch or context.
            "softmax_per_product_flop": softmax / products,
        })
    });
    Ok(json!({"sizes": sizes.collect::<Vec<_>>(), "softmax_flops_per_score": SOFTMAX_FLOPS_PER_SCORE}))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ratio_of_operations_is_five_quarters_of_a_heads_width() {
        for size in &TABLE_1 {
            let config = Config::of_size(size, VOCAB_SIZE, 512);
            let ratio = softmax_flops(&config, 4, 512) / attention_product_flops(&config, 4, 512);
            assert!((ratio - 5.0 / (4.0 * config.d_head() as f64)).abs() < 1e-15, "{}", size.name);
        }
        // The handout's largest size at context 512: each product of one layer takes 5.37 GFLOP.
        let largest = Config::of_size(&TABLE_1[4], VOCAB_SIZE, 512);
        assert!((attention_product_flops(&largest, 4, 512) / 64.0 / 1e9 - 5.369).abs() < 1e-3);
    }
}
