//! Records that lack one thing: an answer is built, or says in its own words what it needs.

use super::*;

/// The faults of a problem's document that are about a template, which no record may cause.
fn of_templates(copy: &Copy, entry: &Problem) -> impl Iterator<Item = String> {
    let (_, rendered) = copy.render(entry);
    rendered.faults.into_iter().map(|fault| fault.to_string()).filter(|said| said.contains("templates/"))
}

#[test]
fn an_answer_is_built_where_any_one_run_was_on_another_machine() {
    let (copy, mut wrong) = (Copy::new(), Vec::new());
    for entry in measured() {
        let sound = records(entry);
        for (profile, record) in &sound {
            for number in 0..record["runs"].as_array().unwrap().len() {
                let mut records = sound.clone();
                let (_, record) = records.iter_mut().find(|(of, _)| of == profile).unwrap();
                runs(record)[number]["machine"]["os"] = json!("another");
                copy.write(entry, &records);
                wrong.extend(of_templates(&copy, entry).map(|said| format!("run {number} elsewhere: {said}")));
            }
        }
        copy.write(entry, &sound);
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn an_answer_is_built_or_says_what_it_lacks_where_any_one_grid_was_not_run() {
    let (copy, mut wrong) = (Copy::new(), Vec::new());
    for entry in measured() {
        let sound = records(entry);
        let mut grids = BTreeSet::new();
        for (_, record) in &sound {
            grids.extend(record["cases"].as_array().unwrap().iter().filter_map(|case| case["grid"].as_str()));
        }
        for grid in grids {
            let mut records = sound.clone();
            for case in records.iter_mut().flat_map(|(_, record)| cases(record)) {
                if case["grid"] == grid {
                    case["outcome"] = json!({"kind": "not_run", "reason": "", "needs": "two GPUs", "has": "one"});
                }
            }
            copy.write(entry, &records);
            // An answer may ask for the grid, but in its own words.
            wrong.extend(of_templates(&copy, entry).map(|said| format!("without {grid}: {said}")));
        }
        copy.write(entry, &sound);
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
