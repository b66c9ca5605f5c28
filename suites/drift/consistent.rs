//! Records of steps whose times were changed, made consistent again: one that contradicts itself is not read.

use cs336::bench::all_reduce::bus_factor;
use cs336::bench::interconnect;
use cs336::harness::stats::median;

use super::*;

/// Makes what follows from the times of each rank of a case follow from them, on as many ranks as its parameters say.
pub fn make_consistent(case: &mut Value) {
    let ranks = case["params"]["world_size"].as_u64().map(|ranks| ranks as usize);
    let (Some(ranks), Some(row)) = (ranks, case["outcome"].get_mut("row")) else { return };
    follow_ranks(row, ranks);
    let steps = if row.get("steps").is_some() { &mut row["steps"] } else { row };
    let columns = steps.get_mut("strategies").and_then(Value::as_object_mut);
    for column in columns.into_iter().flat_map(|columns| columns.values_mut()) {
        let sum = |name: &str| numbers(&column[name]["mean"]["samples"]).iter().sum::<f64>();
        let (tail, communication) = (sum("tail"), sum("communication"));
        column["overlap"] = if communication > 0.0 { (1.0 - tail / communication).max(0.0) } else { 0.0 }.into();
    }
    if let Some(points) = steps.pointer("/link/points").and_then(Value::as_array) {
        let times = |point: &Value| numbers(&point["time"]["last_rank"]["samples"]);
        let bytes = |point: &Value| point["bytes"].as_f64().unwrap();
        let line: Vec<(f64, f64)> = points.iter().map(|point| (bytes(point), median(&times(point)))).collect();
        let speeds = points.iter().flat_map(|point| {
            let of_ranks = point["time"]["by_rank"].as_array().unwrap().iter();
            of_ranks.flat_map(|rank| numbers(&rank["samples"])).map(|time| bus_factor(ranks) * bytes(point) / time)
        });
        let fastest = speeds.fold(0.0, f64::max);
        let (overhead_s, bytes_per_s) = interconnect::fit(&line).unwrap();
        (steps["link"]["overhead_s"], steps["link"]["bytes_per_s"]) = (overhead_s.into(), bytes_per_s.into());
        steps["link"]["fastest_bus_bytes_per_s"] = fastest.into();
    }
}

fn numbers(list: &Value) -> Vec<f64> {
    list.as_array().unwrap().iter().map(|number| number.as_f64().unwrap()).collect()
}

/// Repeats the times of the first ranks, and takes the last rank and the mean over the ranks from all.
fn follow_ranks(value: &mut Value, ranks: usize) {
    match value {
        Value::Object(fields) => {
            if let Some(by_rank) = fields.get_mut("by_rank").and_then(Value::as_array_mut) {
                *by_rank = by_rank.iter().cycle().take(ranks).cloned().collect();
                let times: Vec<Vec<f64>> = by_rank.iter().map(|rank| numbers(&rank["samples"])).collect();
                let over = |of: fn(Vec<f64>) -> f64| -> Value {
                    (0..times[0].len()).map(|k| of(times.iter().map(|rank| rank[k]).collect())).collect()
                };
                if let Some(last) = fields.get_mut("last_rank") {
                    last["samples"] = over(|times| times.into_iter().fold(0.0, f64::max));
                }
                if let Some(mean) = fields.get_mut("mean") {
                    mean["samples"] = over(|times| times.iter().sum::<f64>() / times.len() as f64);
                }
            }
            fields.values_mut().for_each(|child| follow_ranks(child, ranks));
        }
        Value::Array(items) => items.iter_mut().for_each(|child| follow_ranks(child, ranks)),
        _ => {}
    }
}
