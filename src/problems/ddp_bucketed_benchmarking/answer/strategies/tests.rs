//! Tables and charts of made-up steps: ties, cases that were not measured, and steps that are not stable.

use serde_json::json;

use super::*;
use crate::bench::ddp_step::made_up::{params, row};
use crate::bench::steps_on_ranks::made_up as steps_on_ranks;
use crate::harness::answer::figure::Drawing;
use crate::harness::answer::made_up::{MadeUp, seconds};

fn shown(records: &Records) -> SideBySide {
    beside_fused(records, &Records::default())
}

fn beside_fused(records: &Records, fused: &Records) -> SideBySide {
    let entries = [("naive", records), ("flat", records), ("overlap_bucketed", records)];
    side_by_side(&entries, fused, Profile::Gpu).unwrap().remove(0)
}

#[test]
fn the_fused_steps_on_the_fewest_ranks_follow_the_strategies_each_in_its_shortest_case() {
    let of_form = |made_up: MadeUp, form, buckets| {
        made_up.measured("ranks", &steps_on_ranks::params(form), &steps_on_ranks::row(buckets, 0.1))
    };
    let fused = MadeUp::gpu("torch_compile").measured("curve", &json!({"measure": "curve"}), &json!({}));
    let fused = of_form(of_form(fused, "eager", 0.050), "compiled", 0.048);
    let mut on_four = steps_on_ranks::params("compiled");
    on_four["world_size"] = json!(4);
    let fused = fused.measured("ranks", &on_four, &steps_on_ranks::row(0.041, 0.1));
    let steps = row(&[("naive", 1.5, 0.2, 0.2)], None);
    let records = MadeUp::gpu("x").measured("a", &params(Precision::Float32, None), &steps);
    let table = beside_fused(&records.records(), &fused.records()).table().markdown();
    let line = "| bfloat16 | fused, buckets (100 MB) | 48.0 | 40.0 | 8.0 | – | – |";
    assert!(table.contains(line) && table.contains("| bfloat16 | fused, one call | 60.0 |"), "{table}");
    assert!(table.contains("| bfloat16 | fused, ZeRO-1, buckets (100 MB) | 44.0 |"), "{table}");
    assert_eq!(table.matches("fused, buckets").count(), 1, "{table}");
    assert!(table.find("float32 | naive") < table.find(line), "{table}");
}

#[test]
fn the_shortest_step_is_shown_and_missing_cases_are_named() {
    let times = |step| row(&[("naive", step, 0.2, 0.2)], Some(1.1));
    let [small, large] = [1.0, 100.0].map(|mb| params(Precision::Float32, Some(mb)));
    let records = MadeUp::gpu("x").measured("a", &small, &times(1.5)).measured("a", &large, &times(1.25));
    let table = shown(&records.failed("a", &params(Precision::Bfloat16, None)).records()).table().markdown();
    assert!(table.contains("| float32 | naive (100 MB) | 1,250.0 | 1,000.0 | 250.0 |"), "{table}");
    assert!(table.contains("| bfloat16 | naive | failed | – |"), "{table}");
    assert!(table.contains("| float32 | flat | not measured | – |"), "{table}");
}

#[test]
fn the_chart_orders_what_stable_steps_add_beside_pytorchs() {
    let float32 =
        row(&[("naive", 1.5, 0.2, 0.2), ("flat", 1.4, 0.1, 0.1), ("overlap_bucketed", 1.1, 0.5, 0.1)], Some(1.3));
    let mut unstable = row(&[("naive", 1.9, 0.2, 0.2)], None);
    unstable["single"]["last_rank"] = seconds(&[1.0, 1.2]);
    unstable["strategies"]["naive"]["step"]["last_rank"] = seconds(&[1.9, 1.9]);
    let records = MadeUp::gpu("x").measured("a", &params(Precision::Float32, Some(10.0)), &float32);
    let records = records.measured("a", &params(Precision::Bfloat16, None), &unstable).records();
    let chart = shown(&records).chart().unwrap();
    let Drawing::Plot(plot) = &chart.drawing else { panic!("{chart:?}") };
    let values: Vec<f64> = plot.series[0].points.iter().map(|(_, y)| y.unwrap().round()).collect();
    assert_eq!(values, [500.0, 400.0, 300.0, 300.0, 100.0]);
    assert!(
        chart.alt.contains("PyTorch DDP (10 MB) 300.0 (step 1,300.0)") && !chart.alt.contains("1,900"),
        "{}",
        chart.alt
    );
    let table = shown(&records).table().markdown();
    assert!(table.contains("| bfloat16 | naive | 1,900.0 | 1,000 to 1,200 | 700 to 900 |"), "{table}");
}

#[test]
fn without_a_stable_float32_step_there_is_no_chart() {
    let steps = row(&[("naive", 1.5, 0.2, 0.2)], None);
    let records = MadeUp::gpu("x").measured("a", &params(Precision::Bfloat16, None), &steps).records();
    assert!(shown(&records).chart().is_none());
}
