//! Tests of relating clocks, of naming late ranks and of merging, on made-up traces.

use super::*;

/// Anchors as a rank sees them whose clock is `ahead` of rank 0's and gains `drift` of each microsecond. It enters each
/// barrier at these times and leaves 50 us after the last rank, which enters at 10 us.
fn anchors(ahead: f64, drift: f64, enter: f64) -> Vec<(f64, f64)> {
    let shown = |at: f64| at * (1.0 + drift) + ahead;
    (0..6).map(|i| f64::from(i) * 1e6).map(|at| (shown(at + enter), shown(at + 60.0))).collect()
}

/// A rank's trace: its anchors, an operator at `work_us`, an arrow, and the launches of collectives by number.
fn trace(anchors: &[(f64, f64)], work_us: f64, launches: &[(u64, f64)]) -> Value {
    let range = |name: String, at: f64, dur: f64| json!({"ph": "X", "cat": "user_annotation", "name": name, "pid": 7, "tid": 7, "ts": at, "dur": dur});
    let mut events = vec![
        json!({"ph": "M", "name": "process_name", "pid": 7, "ts": 0, "args": {"name": "cs336"}}),
        json!({"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 7, "tid": 7, "ts": work_us, "dur": 1}),
        json!({"ph": "s", "cat": "ac2g", "id": 5, "pid": 7, "tid": 7, "ts": work_us}),
    ];
    events.extend(anchors.iter().map(|(enter, leave)| range(ANCHOR.into(), *enter, leave - enter)));
    // An anchor's own barrier is not part of the work.
    events.extend(anchors.iter().zip(100..).map(|((enter, _), n)| range(format!("launch barrier {n}"), *enter, 1.0)));
    events.extend(launches.iter().map(|(n, at)| range(format!("launch all_reduce {n} of 4 Float, sum"), *at, 1.0)));
    json!({"schemaVersion": 1, "traceEvents": events})
}

#[test]
fn a_skewed_clock_is_related_to_rank_0s_within_the_stated_uncertainty() {
    for (ahead, enter) in [(0.0, 10.0), (12_345.0, 0.0), (-3.6e9, 10.0), (5e14, 3.0)] {
        let clock = Clock::between(&anchors(0.0, 0.0, 10.0), &anchors(ahead, 0.0, enter)).unwrap();
        assert!((clock.offset + ahead).abs() <= clock.uncertainty + 0.1, "{ahead}: {clock:?}");
        assert!(clock.uncertainty <= 60.0, "{clock:?}");
    }
}

#[test]
fn one_undisturbed_anchor_is_enough_for_a_small_uncertainty() {
    let (zero, mut own) = (anchors(0.0, 0.0, 10.0), anchors(500.0, 0.0, 0.0));
    for (i, anchor) in own.iter_mut().enumerate().filter(|(i, _)| *i != 3) {
        // Scheduled out before it entered (and rank 0 waited long), or after it left.
        if i % 2 == 0 { anchor.0 -= 2e4 } else { anchor.1 += 3e4 }
    }
    let clock = Clock::between(&zero, &own).unwrap();
    assert!((clock.offset + 500.0).abs() <= clock.uncertainty && clock.uncertainty <= 60.0, "{clock:?}");
}

#[test]
fn a_drift_is_part_of_the_uncertainty_until_the_anchors_contradict_each_other() {
    let zero = anchors(0.0, 0.0, 10.0);
    let clock = Clock::between(&zero, &anchors(500.0, 1e-4, 0.0)).unwrap();
    assert!(clock.uncertainty > 150.0 && (clock.offset + 750.0).abs() < 100.0, "{clock:?}");
    let refused = |own: &[(f64, f64)]| Clock::between(&zero, own).unwrap_err().to_string();
    let drifting = refused(&anchors(500.0, 1e-3, 0.0));
    assert!(
        drifting.starts_with("the anchors contradict each other by 4.8") && drifting.contains("at most 1 ms"),
        "{drifting}"
    );
    let mut set = anchors(500.0, 0.0, 0.0);
    set.iter_mut().skip(3).for_each(|anchor| *anchor = (anchor.0 - 1e6, anchor.1 - 1e6));
    assert!(refused(&set).contains("without setting a clock"));
}

#[test]
fn a_rank_without_all_anchors_is_refused_by_its_number() {
    let all = anchors(0.0, 0.0, 10.0);
    for rest in [&all[..4], &[]] {
        let error = format!("{:#}", merge(vec![trace(&all, 1.0, &[]), trace(rest, 1.0, &[])]).unwrap_err());
        let expected = format!("rank 1 cannot be related to rank 0's: its trace has {} clock anchors", rest.len());
        assert!(error.contains(&expected), "{error}");
    }
    let error = format!("{:#}", merge(vec![trace(&all, 1.0, &[]), json!({})]).unwrap_err());
    assert!(error.starts_with("rank 1's trace: it has no list of events"), "{error}");
}

#[test]
fn events_of_all_ranks_are_on_rank_0s_clock_with_names_of_their_own() {
    let ranks = vec![trace(&anchors(0.0, 0.0, 10.0), 1e5, &[]), trace(&anchors(7e6, 0.0, 0.0), 7.2e6, &[])];
    let merged = merge(ranks).unwrap();
    let events = merged["traceEvents"].as_array().unwrap();
    let all =
        |key: &str, name: &str| -> Vec<Value> { events.iter().filter(|event| event[key] == name).cloned().collect() };
    let work = all("name", "aten::mm");
    let uncertainty = merged["otherData"]["ranks"][1]["uncertainty_us"].as_f64().unwrap();
    assert!((work[1]["ts"].as_f64().unwrap() - 2e5).abs() <= uncertainty && work[0]["ts"] == 1e5, "{work:?}");
    assert_ne!(work[0]["pid"], work[1]["pid"]);
    let names: Vec<_> = all("name", "process_name").iter().map(|e| e["args"]["name"].clone()).collect();
    assert_eq!(names, ["rank 0: cs336", "rank 1: cs336"]);
    let arrows: Vec<_> = all("ph", "s").iter().map(|e| e["id"].clone()).collect();
    assert_eq!(arrows, ["0.5", "1.5"]);
    let findings = merged["otherData"]["findings"].as_array().unwrap();
    let clock = format!("rank 1's clock is 6999.995 ms ahead of rank 0's, to within {:.3} ms", uncertainty / 1e3);
    assert_eq!(findings[0], clock.as_str());
    assert_eq!(findings[1], "no rank is measurably late at any of 0 collectives");
}

#[test]
fn the_rank_that_arrives_last_is_named_with_how_late_it_is_at_the_median() {
    let calls = |ahead: f64, late: [f64; 4]| [1, 2, 3, 4].map(|n| (n, 2e5 * n as f64 + ahead + late[n as usize - 1]));
    let ranks = vec![
        trace(&anchors(0.0, 0.0, 10.0), 1.0, &calls(0.0, [0.0, 0.0, 9000.0, 0.0])),
        trace(&anchors(-4e6, 0.0, 0.0), 1.0, &calls(-4e6, [3000.0, 5000.0, 0.0, 0.0])),
        // Later by less than the clocks are known to.
        trace(&anchors(2e6, 0.0, 0.0), 1.0, &calls(2e6, [20.0; 4])),
    ];
    let findings = merge(ranks).unwrap()["otherData"]["findings"].take();
    let findings: Vec<String> = serde_json::from_value(findings).unwrap();
    assert!(findings[2].starts_with("rank 0 arrives last at 1 of 4 collectives, 8.9"), "{findings:?}");
    assert!(findings[3].starts_with("rank 1 arrives last at 2 of 4 collectives, 4.9"), "{findings:?}");
    assert_eq!(findings.len(), 4, "{findings:?}");
}
