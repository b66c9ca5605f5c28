//! Records of two types of machine, and of two numbers of ranks: what the figures are of.

use cs336::bench::all_reduce::bus_factor;

use super::*;

const OTHER: &str = "Another One";

/// Moves the last case that ran to a run on another type of machine.
fn move_one(record: &mut Value) {
    let mut run = runs(record)[0].clone();
    run["id"] = format!("{}-made", run["id"].as_str().unwrap().split('-').next().unwrap()).into();
    run["machine"]["cpu"] = OTHER.into();
    for gpu in run["machine"]["gpus"].as_array_mut().unwrap() {
        gpu["name"] = OTHER.into();
    }
    let last = cases(record).iter_mut().rfind(|case| case["outcome"]["kind"] != "not_run").unwrap();
    last["run"] = run["id"].clone();
    runs(record).push(run);
}

#[test]
fn no_figure_is_of_another_machine_than_its_caption_names() {
    let copy = Copy::new();
    let has_more = |(_, record): &(Profile, Value)| record["cases"].as_array().unwrap().len() > 2;
    let (mut moved, mut known) = (0, 0);
    for entry in measured() {
        let sound = records(entry);
        let mut records = sound.clone();
        records.iter_mut().filter(|record| has_more(record)).for_each(|(_, record)| move_one(record));
        copy.write(entry, &records);
        let (document, rendered) = copy.render(entry);
        let said = &document.problems[0].records.unreadable;
        assert_eq!(said.len(), sound.iter().filter(|record| has_more(record)).count(), "{}: {said:?}", entry.name);
        assert!(said.iter().all(|said| said.contains(OTHER) && said.contains("measure all on one")), "{said:?}");
        let answer = rendered.markdown.lines().filter(|line| !line.contains("are left out"));
        let named: Vec<&str> = answer.filter(|line| line.contains(OTHER)).collect();
        assert!(named.is_empty(), "{}: {named:?}", entry.name);
        for (profile, _) in sound.iter().filter(|record| has_more(record)) {
            let Ok(Some(local)) = copy.layout.read_local(*profile, entry) else { continue };
            let suite = suite::load(&copy.layout.root, entry).unwrap().unwrap();
            let refused = acceptable(&copy.layout, entry, &suite, &local, None).unwrap_err().to_string();
            known += usize::from(refused.contains("are left out") && refused.contains(OTHER));
            moved += 1;
        }
        copy.write(entry, &sound);
    }
    assert!(known == moved && moved > 15, "{known} of {moved} are not accepted for their machines");
}

/// The cases of a record on four ranks beside those on two, to which `change` is done.
fn on_four_ranks(entry: &Problem, change: fn(&mut Value)) -> Vec<(Profile, Value)> {
    let mut records = records(entry);
    for (_, record) in &mut records {
        for run in runs(record) {
            let gpus = run["machine"]["gpus"].as_array().unwrap().clone();
            run["machine"]["gpus"] = gpus.iter().cycle().take(2 * gpus.len()).cloned().collect();
        }
        let mut more = cases(record).clone();
        for case in &mut more {
            case["params"]["world_size"] = json!(4);
            make_consistent(case);
            each_leaf(&mut case["outcome"]["row"], "", &mut |path, leaf| {
                if path.ends_with(".bus_bytes") {
                    *leaf = json!(bus_factor(4) * leaf.as_f64().unwrap());
                }
            });
            for ranks in case["outcome"]["row"]
                .get_mut("memory")
                .and_then(Value::as_object_mut)
                .into_iter()
                .flat_map(|schemes| schemes.values_mut())
            {
                let of_two = ranks.as_array().unwrap().clone();
                *ranks = [of_two.clone(), of_two].concat().into();
            }
        }
        cases(record).iter_mut().for_each(change);
        cases(record).extend(more);
    }
    records
}

fn fail(case: &mut Value) {
    case["outcome"] = json!({"kind": "failed", "error": "died"});
}

fn fail_float32(case: &mut Value) {
    if case["params"]["dtype"] == "float32" {
        fail(case);
    }
}

/// All samples but the last take twice as long.
fn unsettle(case: &mut Value) {
    let slower = |x: &mut Value| *x = json!(2.0 * x.as_f64().unwrap());
    samples(case, &|list| list.iter_mut().rev().skip(1).for_each(slower));
    make_consistent(case);
}

#[rstest]
#[case::measured(|_: &mut Value| ())]
#[case::failed(fail)]
#[case::float32_failed(fail_float32)]
#[case::unstable(unsettle)]
fn steps_on_more_ranks_cost_no_answer(#[case] change: fn(&mut Value)) {
    let copy = Copy::new();
    let is_of_steps = |entry: &&Problem| {
        let params = |(_, record): &(Profile, Value)| record["cases"][0]["params"].clone();
        records(entry).iter().map(params).any(|params| params["world_size"].is_number() && params["size"].is_string())
    };
    let mut answered = 0;
    for entry in measured().filter(is_of_steps) {
        copy.write(entry, &on_four_ranks(entry, change));
        let (_, rendered) = copy.render(entry);
        let is_built = !rendered.markdown.contains("This answer could not be built");
        assert!(is_built, "{}: {:?}", entry.name, rendered.faults);
        answered += 1;
    }
    assert!(answered > 3, "{answered}");
}

/// In the first case of each record.
#[rstest]
#[case("world_size", json!(0))]
#[case("size_mb", json!(u64::MAX))]
#[case("vocab_size", json!(-1))]
#[case("vocab_size", json!(1u64 << 60))]
#[case("batch_size", json!(i64::MIN))]
#[case("context_length", json!(1u64 << 60))]
#[case("seq", json!(u32::MAX))]
fn parameters_that_no_suite_can_have_end_in_a_sentence_or_in_a_report(#[case] key: &str, #[case] value: Value) {
    let copy = Copy::new();
    let mut changed = 0;
    for entry in measured() {
        let mut records = records(entry);
        for (_, record) in &mut records {
            if let Some(old) = cases(record)[0]["params"].get_mut(key) {
                *old = value.clone();
                changed += 1;
            }
        }
        copy.write(entry, &records);
        copy.render(entry);
    }
    assert!(changed > 1, "{key} of {changed} records");
}

/// The rules of a row reckon with what a case can be, so without its parameters nothing holds its figures.
#[test]
fn a_record_of_a_case_that_no_suite_can_have_is_not_read_by_any_answer() {
    let copy = Copy::new();
    let named = |name: &str| measured().find(|entry| entry.name == name).unwrap();
    let changed = named("naive_ddp_benchmarking");
    let mut records = records(changed);
    cases(&mut records[0].1)[0]["params"]["rounds"] = json!(0);
    copy.write(changed, &records);
    for reader in [changed, named("ddp_bucketed_benchmarking")] {
        let (_, rendered) = copy.render(reader);
        let said = rendered.faults.iter().map(|fault| fault.to_string()).collect::<Vec<_>>().join("\n");
        assert!(said.contains("no suite can have this case: "), "{}: {said}", reader.name);
    }
}
