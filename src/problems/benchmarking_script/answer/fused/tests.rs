//! The table of fused steps from made-up cases, and the floor.

use serde_json::json;

use super::super::tests::{GPU, around, ask, captured, near, params, seconds, whole};
use super::*;
use crate::attention::ImplementationName::Flash;
use crate::bench::training_step::{Capture, Execution};
use crate::harness::answer::made_up::printed;
use crate::model::Precision::Bfloat16;
use crate::model::SizeName::{Small, Xl};
use crate::model::fused::OwnChoice;

#[test]
fn a_fused_step_stands_beside_the_one_by_autograd_with_what_its_search_gained() {
    let fused =
        |context| Params { execution: Execution::Fused, dtype: Bfloat16, attention: Flash, ..params(Small, context) };
    let mut row = whole(&around(0.005, 0.0));
    let choice = |first_s| Choice {
        m: 1,
        n: 1,
        k: 1,
        transposed: [false, true],
        tried: 8,
        first_s,
        best_s: 1e-5,
        algorithm: [66, 20, 35, 1, 2],
        from_cache: false,
    };
    let products = vec![choice(1e-5), choice(1.25e-5)];
    row.capture =
        Some(Capture { nodes: 300, time: seconds(&[0.2]), loss_error: 1e-5, products, own_products: Vec::new() });
    let made_up = captured(GPU("x"), [0.050, 0.050, 0.030, 0.015, 0.025], 0.0).measured("fused", &fused(512), &row);
    let answer = ask(made_up.out_of_memory("fused_long", &fused(1024)));
    near(&answer, "/search_gain", 0.25);
    near(&answer, "/fused_loss_error", 1e-5);
    let table = answer.tables()["fused"].markdown();
    assert!(table.contains("| small | 512 | bfloat16 | 15.0 ± 0.30 | 5.00 ± 0.00 | – | – |"), "{table}");
    assert!(table.contains("| small | 1,024 | bfloat16 | – | OOM | – | – |"), "{table}");
}

#[test]
fn the_products_that_run_our_kernel_are_counted_beside_what_both_take() {
    let fused = Params { execution: Execution::Fused, dtype: Bfloat16, attention: Flash, ..params(Small, 512) };
    let mut row = whole(&around(0.005, 0.0));
    let own = |is_gated, own_s| OwnChoice { is_gated, m: 1, n: 1, k: 1, own_s, library_s: 1e-4 };
    let own_products = vec![own(true, 8e-5), own(false, 9e-5), own(false, 1.2e-4), own(false, 1e-4)];
    row.capture = Some(Capture { nodes: 300, time: seconds(&[0.2]), loss_error: 1e-5, products: vec![], own_products });
    let answer = ask(captured(GPU("x"), [0.050, 0.050, 0.030, 0.015, 0.025], 0.0).measured("fused", &fused, &row));
    let printed = &printed(&answer)["own_products"];
    assert_eq!((&printed["faster"], &printed["all"]), (&json!(2), &json!(4)), "a tie runs the library's");
    near(&answer, "/own_products/gated/low", 0.8);
    near(&answer, "/own_products/plain/low", 0.9);
    near(&answer, "/own_products/plain/high", 1.2);
}

#[test]
fn the_floor_of_a_step_adds_its_parts_at_the_peaks() {
    let flops_per_s = [("float32".to_string(), 1e13), ("bfloat16".to_string(), 1e15)].into();
    let peaks = Peaks { flops_per_s, bytes_per_s: 4e12, cache_bytes: 0.0, source: "made up".into() };
    let params = Params { dtype: Bfloat16, ..params(Xl, 512) };
    let config = params.config();
    // Products bound forward and backward, memory the optimizer's 28 bytes a parameter.
    let expected = 3.0 * config.forward_flops(4, 512) / 1e15 + 28.0 * config.num_parameters() as f64 / 4e12;
    let least = floor(&params, &peaks).unwrap();
    assert!((least / expected - 1.0).abs() < 1e-9, "{least} and {expected}");
    assert_eq!(floor(&params, &Peaks { flops_per_s: [].into(), ..peaks }), None);
}
