//! Records that look possible and are worse than the accepted ones: `cs336 accept` refuses them.

use super::*;

/// Divides the times by a thousand, and the work that bounds them.
fn scaled_with_their_work(record: &mut Value) {
    scaled(record, 1e-3);
    each_leaf(record, "", &mut |path, leaf| {
        if path.ends_with("work.flops") || path.ends_with("work.bytes") {
            *leaf = json!(1e-3 * leaf.as_f64().unwrap());
        }
    });
}

fn in_bytes(record: &mut Value) {
    each_leaf(record, "", &mut |path, leaf| {
        if path.ends_with("unit") && leaf == "s" {
            *leaf = json!("B");
        }
    });
}

fn without_kernels(record: &mut Value) {
    cases(record).iter_mut().for_each(|case| case["kernels"] = json!({}));
}

fn out_of_memory(record: &mut Value) {
    outcomes(record, &json!({"kind": "out_of_memory", "requested_bytes": 1, "predicted_bytes": 1, "message": ""}));
}

/// Each outcome within the rows.
fn inner_outcomes(value: &mut Value) {
    match value {
        Value::Object(fields) if fields.get("kind").is_some_and(|kind| kind == "measured") => {
            *value = json!({"kind": "failed", "error": "it died"});
        }
        Value::Object(fields) => fields.values_mut().for_each(inner_outcomes),
        Value::Array(items) => items.iter_mut().for_each(inner_outcomes),
        _ => {}
    }
}

fn failed_within(record: &mut Value) {
    cases(record).iter_mut().for_each(|case| inner_outcomes(&mut case["outcome"]["row"]));
}

#[rstest]
#[case(without_kernels, "does not say of which kernels/")]
#[case(out_of_memory, "was measured before and ran out of memory here")]
#[case(failed_within, " before and is \"failed\" there now")]
#[case(scaled_with_their_work, "has another work or unit in ")]
#[case(in_bytes, "has another work or unit in ")]
fn a_record_that_looks_possible_is_not_accepted(#[case] damage: fn(&mut Value), #[case] words: &str) {
    let entry = REGISTRY.iter().find(|entry| entry.name == "flash_benchmarking").unwrap();
    let suite = suite::load(&layout().root, entry).unwrap().unwrap();
    let sound = layout().read_accepted(Profile::Gpu, entry).unwrap().unwrap();
    assert_eq!(acceptable(&layout(), entry, &suite, &sound, Some(&sound)).map_err(|error| error.to_string()), Ok(()));
    let (_, mut record) = records(entry).into_iter().find(|(profile, _)| *profile == Profile::Gpu).unwrap();
    damage(&mut record);
    let copy = Copy::new();
    copy.write(entry, &[(Profile::Gpu, record)]);
    let damaged = copy.layout.read_local(Profile::Gpu, entry).unwrap().unwrap();
    let said = acceptable(&layout(), entry, &suite, &damaged, Some(&sound)).unwrap_err().to_string();
    assert!(said.contains(words), "{said}");
}
