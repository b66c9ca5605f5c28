//! Made-up steps on two, four and eight ranks: what is followed, on which machine, and what else the answer says.

use serde_json::{Value, json};

use super::super::tests::answer_of;
use super::*;
use crate::bench::ddp_step::Params;
use crate::bench::ddp_step::made_up::{params, row};
use crate::harness::answer::figure::Drawing;
use crate::harness::answer::made_up::{MadeUp, seconds};

/// Buckets of 10 MB on so many ranks.
fn on(ranks: usize) -> Params {
    Params { world_size: ranks, ..params(Precision::Float32, Some(10.0)) }
}

/// Steps in buckets, and under PyTorch's DDP; without communication a step takes a second.
fn steps(buckets: f64, pytorch: f64) -> Value {
    row(&[("naive", 2.0, 0.5, 0.5), (STRATEGY, buckets, 0.5, 0.1), ("overlap_coalesced", 1.1, 0.2, 0.1)], Some(pytorch))
}

fn scaling(made_up: MadeUp) -> Option<Scaling> {
    Scaling::of(&[&made_up.records()], Profile::Gpu).unwrap()
}

#[test]
fn each_strategy_has_a_line_over_the_numbers_of_ranks_that_it_was_measured_on() {
    let made_up = MadeUp::gpu("x").measured("a", &on(8), &steps(2.0, 1.6));
    let made_up = made_up.measured("a", &on(2), &steps(1.25, 1.25)).measured("a", &on(4), &steps(1.6, 1.6));
    // Slower buckets of another size; ZeRO-1 on one number of ranks.
    let larger = Params { bucket_size_mb: Some(100.0), ..on(4) };
    let made_up = made_up.measured("a", &larger, &row(&[(STRATEGY, 1.7, 0.5, 0.1), (ZERO1, 1.2, 0.1, 0.1)], None));
    let scaling = scaling(made_up).unwrap();
    let table = scaling.table().markdown();
    for line in [
        "| float32 | overlap, buckets | 2 | 1,250.0 | 250.0 | 20.0% |",
        "| float32 | overlap, buckets | 4 | 1,600.0 | 600.0 | 37.5% |",
        "| float32 | overlap, buckets | 8 | 2,000.0 | 1,000.0 | 50.0% |",
        "| float32 | PyTorch DDP | 8 | 1,600.0 | 600.0 | 37.5% |",
    ] {
        assert!(table.contains(line), "{line}: {table}");
    }
    assert!(!table.contains("ZeRO-1") && table.matches("| float32 |").count() == 6, "{table}");
    let figure = scaling.figure();
    figure.validate().unwrap();
    let Drawing::SmallMultiples(panels) = &figure.drawing else { panic!("{figure:?}") };
    let bars = panels.plots[0].1.series.iter().map(|bars| {
        (bars.name.as_str(), bars.points.iter().map(|(_, percent)| percent.unwrap().round()).collect::<Vec<_>>())
    });
    let expected = [("overlap, buckets", vec![20.0, 38.0, 50.0]), ("PyTorch DDP", vec![20.0, 38.0, 38.0])];
    assert_eq!(bars.collect::<Vec<_>>(), expected);
}

#[test]
fn one_number_of_ranks_or_unstable_steps_are_no_scaling() {
    let two = || MadeUp::gpu("x").measured("a", &on(2), &steps(1.25, 1.25));
    assert!(scaling(two()).is_none());
    let mut unstable = steps(1.5, 1.5);
    unstable["single"]["last_rank"] = seconds(&[1.0, 1.2]);
    assert!(scaling(two().measured("a", &Params { rounds: 2, ..on(4) }, &unstable)).is_none());
}

#[test]
fn steps_of_another_setting_are_not_followed() {
    let made_up = MadeUp::gpu("x").measured("a", &Params { context_length: 8, ..on(2) }, &steps(1.1, 1.1));
    let made_up = made_up.measured("a", &on(4), &steps(1.25, 1.25)).measured("a", &on(8), &steps(1.6, 1.6));
    let table = scaling(made_up).unwrap().table().markdown();
    assert!(table.contains("1 sequence of 16 tokens per rank") && table.contains("| 8 | 1,600.0 |"), "{table}");
    assert!(!table.contains("| 2 |"), "{table}");
}

#[test]
fn what_is_said_of_bucket_sizes_is_of_the_fewest_ranks() {
    let row = |buckets| json!({"steps": steps(buckets, 1.3), "model": {"predicted_overhead_s": 1.0, "best": null}});
    let two = || MadeUp::gpu("x").measured("a", &on(2), &row(1.25));
    let [alone, beside] = [two(), two().measured("a", &on(4), &row(1.05))].map(answer_of);
    for name in ["step", "adds", "mb"] {
        assert_eq!(alone.quoted()[name]["value"], beside.quoted()[name]["value"], "{name}");
    }
    let tables = |answer: &crate::harness::answer::Answer| answer.tables().keys().cloned().collect::<Vec<_>>();
    assert!(tables(&beside).contains(&"steps-gpu-float32-4".to_string()), "{:?}", tables(&beside));
    assert!(alone.quoted()["scaled"] == false && beside.quoted()["scaled"] == true);
    let sizes = beside.tables()["sizes"].markdown();
    assert_eq!(sizes, alone.tables()["sizes"].markdown());
}
