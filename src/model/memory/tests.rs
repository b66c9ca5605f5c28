//! Predictions against counts by hand and against what PyTorch saved.

use super::*;
use crate::model::sizes::{BATCH_SIZE, TABLE_1, VOCAB_SIZE};
use crate::units::{GIB, MIB};

fn largest(seq: i64, precision: Precision) -> Memory {
    let config = Config::of_size(&TABLE_1[4], VOCAB_SIZE, seq);
    Memory { config, batch: BATCH_SIZE, seq, precision, attention: ImplementationName::Naive }
}

#[test]
fn tensor_sizes_equal_a_count_by_hand() {
    for (seq, residual, scores, hidden) in [(128, 5.0, 8.0, 20.0), (256, 10.0, 32.0, 40.0), (512, 20.0, 128.0, 80.0)] {
        let memory = largest(seq, Precision::Float32);
        assert_eq!(memory.residual() as f64 / MIB, residual);
        assert_eq!(memory.scores() as f64 / MIB, scores);
        assert_eq!(memory.hidden() as f64 / MIB, hidden);
    }
    assert_eq!(largest(512, Precision::Float32).logits() as f64 / MIB, 78.125);
}

#[test]
fn fixed_memory_is_four_values_a_parameter() {
    let memory = largest(128, Precision::Float32);
    assert_eq!(memory.fixed(), 16 * memory.config.num_parameters());
    assert!((memory.fixed() as f64 / GIB - 50.77).abs() < 0.005);
    assert!((memory.parameters() as f64 / GIB - 12.691).abs() < 0.0005);
}

#[test]
fn saved_bytes_equal_what_pytorch_saved_for_the_same_operations() {
    #[derive(serde::Deserialize)]
    struct Counted {
        config: Config,
        batch: i64,
        seq: i64,
        saved_bytes: std::collections::BTreeMap<String, u64>,
        weight_copies: u64,
    }
    let counted: Counted = serde_json::from_str(include_str!("../../../suites/cases/saved_activations.json")).unwrap();
    let Counted { config, batch, seq, .. } = counted;
    for precision in [Precision::Float32, Precision::Bfloat16] {
        let memory = Memory { config, batch, seq, precision, attention: ImplementationName::Naive };
        assert_eq!(memory.saved_bytes(), counted.saved_bytes[precision.name()], "{}", precision.name());
    }
    let memory = Memory { config, batch, seq, precision: Precision::Bfloat16, attention: ImplementationName::Naive };
    assert_eq!(memory.weight_copies(), counted.weight_copies);
}

#[test]
fn the_first_step_peaks_in_the_optimizer_and_later_steps_with_the_activations() {
    for seq in [128, 256, 512] {
        let memory = largest(seq, Precision::Float32);
        let first = memory.step_peak(Update::ByOperators, false) as f64 / GIB;
        assert!((50.7..51.6).contains(&first), "{seq}: {first}");
        assert!(memory.step_peak(Update::ByOperators, true) >= memory.step_peak(Update::ByOperators, false));
    }
    let later = largest(512, Precision::Float32).step_peak(Update::ByOperators, true) as f64 / GIB;
    assert!(later > 55.0, "{later}");
}

#[test]
fn a_fused_update_needs_two_tensors_of_the_largest_parameter_less() {
    let memory = largest(128, Precision::Float32);
    let [by_operators, fused] = [Update::ByOperators, Update::Fused].map(|u| memory.step_peak(u, false));
    let fixed = memory.fixed() + memory.inputs_and_tables();
    assert_eq!((fused, by_operators - fused), (fixed, 2 * 4 * 10_240 * 2560));
}

#[test]
fn autocast_makes_a_forward_pass_without_graph_larger() {
    for seq in [128, 256, 512] {
        let (full, autocast) = (largest(seq, Precision::Float32), largest(seq, Precision::Bfloat16));
        assert!(autocast.forward_peak() > full.forward_peak());
        assert!(autocast.saved_bytes() < full.saved_bytes());
    }
}

#[test]
fn fused_attention_saves_nothing_quadratic() {
    let memory = |seq| Memory { attention: ImplementationName::Tiled, ..largest(seq, Precision::Float32) };
    let per_token = |seq| memory(seq).saved_bytes() as f64 / seq as f64;
    assert!((per_token(512) / per_token(256) - 1.0).abs() < 1e-3);
}
