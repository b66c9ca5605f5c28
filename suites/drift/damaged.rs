//! Damaged copies of the accepted records: each is refused in a sentence, or the report is built from it.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::symlink;

use cs336::cli::document::{RecordSource, problem_input, with_problems};
use cs336::harness::drift::{acceptable, drift};
use cs336::harness::handout::by_name;
use cs336::harness::problem::Problem;
use cs336::harness::record::{Profile, RecordFile};
use cs336::harness::store::Layout;
use cs336::harness::suite;
use cs336::problems::REGISTRY;
use cs336::report::{self, Document, Rendered, html};
use rstest::rstest;
use serde_json::{Value, json};

use self::consistent::make_consistent;
use super::layout;

mod accepted;
mod consistent;
mod lacking;
mod machines;

const FRAME: &str = include_str!("../../report/writeup.typ");

/// Every character that Markdown, HTML or typst gives a meaning, and a mark of the HTML edition.
const HOSTILE: &str = "<script>|`\" #panic[$*_\\{{ \u{E000}x.gpu.9\u{E001}";
/// The same with a line break, which only the texts of an outcome may have.
const HOSTILE_LINES: &str = "<script>|`\"\n#panic[$*_\\{{ \u{E000}x.gpu.9\u{E001}";

/// A tree whose records may be damaged; all else is the checkout's.
struct Copy {
    _folder: tempfile::TempDir,
    layout: Layout,
}

impl Copy {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        for name in ["suites", "templates", "kernels"] {
            symlink(layout().root.join(name), folder.path().join(name)).unwrap();
        }
        for profile in Profile::ALL {
            for kind in ["snapshots", "report/records"] {
                fs::create_dir_all(folder.path().join(kind).join(profile.name())).unwrap();
            }
        }
        let copy = Self { layout: Layout::at(folder.path().into()), _folder: folder };
        REGISTRY.iter().for_each(|entry| copy.write(entry, &records(entry)));
        copy
    }

    /// The same records as accepted and as local ones.
    fn write(&self, entry: &Problem, records: &[(Profile, Value)]) {
        for (profile, record) in records {
            for path in [self.layout.accepted(*profile, entry.name), self.layout.local(*profile, entry.name)] {
                fs::write(path, record.to_string()).unwrap();
            }
        }
    }

    /// One problem's document from the damaged records.
    fn render(&self, entry: &Problem) -> (Document, Rendered) {
        let input = problem_input(&self.layout, by_name(entry.name).unwrap(), RecordSource::Accepted);
        let document = with_problems(vec![input]);
        let rendered = report::render(&document).unwrap();
        (document, rendered)
    }
}

/// A problem's accepted records as JSON.
fn records(entry: &Problem) -> Vec<(Profile, Value)> {
    let read = |profile: Profile| {
        let text = fs::read_to_string(layout().accepted(profile, entry.name)).ok()?;
        Some((profile, serde_json::from_str(&text).unwrap()))
    };
    Profile::ALL.into_iter().filter_map(read).collect()
}

fn measured() -> impl Iterator<Item = &'static Problem> {
    REGISTRY.iter().filter(|entry| entry.measured.is_some())
}

/// Calls `change` with every value that is neither a list nor an object, and with its path: `cases.*.params.size`.
fn each_leaf(value: &mut Value, path: &str, change: &mut impl FnMut(&str, &mut Value)) {
    match value {
        Value::Object(fields) => {
            fields.iter_mut().for_each(|(key, child)| each_leaf(child, &format!("{path}.{key}"), change));
        }
        Value::Array(items) => items.iter_mut().for_each(|child| each_leaf(child, &format!("{path}.*"), change)),
        leaf => change(path, leaf),
    }
}

/// The hostile text in every string at `path`.
fn with_hostile(records: &[(Profile, Value)], path: &str) -> Vec<(Profile, Value)> {
    let mut hostile = records.to_vec();
    for (_, record) in &mut hostile {
        each_leaf(record, "", &mut |at, leaf| {
            if at == path && leaf.is_string() {
                let may_break = path.starts_with(".cases.*.outcome");
                *leaf = if may_break { HOSTILE_LINES } else { HOSTILE }.into();
            }
        });
    }
    hostile
}

/// Names of software, settings and precisions are texts of the record too.
fn name_hostile(records: &mut [(Profile, Value)]) {
    for run in records.iter_mut().flat_map(|(_, record)| record["runs"].as_array_mut().unwrap()) {
        (run["software"][HOSTILE], run["settings"][HOSTILE]) = (HOSTILE.into(), HOSTILE.into());
        run["peaks"]["flops_per_s"][HOSTILE] = json!(1.0);
    }
}

/// In two halves, which run side by side.
#[rstest]
#[case::of_every_other_problem(0)]
#[case::of_the_others(1)]
fn no_text_of_a_record_enters_a_document_as_markup(#[case] first: usize) {
    let copy = Copy::new();
    let (mut printed, mut raw, mut of_runs) = (0, Vec::new(), BTreeSet::new());
    for entry in measured().skip(first).step_by(2) {
        let mut sound = records(entry);
        let mut paths = Vec::new();
        for (_, record) in &mut sound {
            // Numbers are no texts, and samples are most of a record.
            samples(record, &|list| list.truncate(2));
            cases(record).iter_mut().for_each(make_consistent);
            each_leaf(record, "", &mut |path, leaf| {
                if leaf.is_string() && !paths.iter().any(|known| known == path) {
                    paths.push(path.to_string());
                }
            });
        }
        let mut named = sound.clone();
        name_hostile(&mut named);
        let hostile = paths.iter().map(|path| (path.as_str(), with_hostile(&sound, path)));
        for (path, records) in hostile.chain([("names", named)]) {
            // No answer prints what a run has beside its machine; one problem shows it.
            let is_machine = path.starts_with(".runs.*.machine");
            let is_first = of_runs.insert(path.to_string());
            if (path.starts_with(".runs") || path == "names") && !is_machine && !is_first {
                continue;
            }
            copy.write(entry, &records);
            let (document, rendered) = copy.render(entry);
            let page = html::page(&document, &rendered).unwrap();
            html::gate::check(&page).unwrap();
            if page.matches("<script").count() != 2 {
                raw.push(format!("{path} of {} in HTML", entry.name));
            }
            if is_machine && rendered.markdown.contains("This answer could not be built") {
                raw.push(format!("{path} of {} ends its answer", entry.name));
            }
            // What stands between backticks is code.
            let unquoted = rendered.markdown.replace("\\`", "");
            let prose = unquoted.split('`').step_by(2);
            if prose.map(|text| text.matches("<script>").count()).sum::<usize>() > 0 {
                raw.push(format!("{path} of {} in Markdown", entry.name));
            }
            // As markup of typst, the text ends the compilation.
            if is_first && (is_machine || path == "names") {
                let _alone = super::pages::SETTING.lock();
                report::pdf::compile(&rendered, FRAME).unwrap();
            }
            printed += usize::from(rendered.markdown.contains("\\<script\\>"));
        }
        copy.write(entry, &sound);
    }
    assert!(raw.is_empty(), "{}", raw.join("\n"));
    assert!(printed > 20, "the hostile text was printed in {printed} documents only");
}

/// A change of one whole record.
type Damage = (&'static str, fn(&mut Value));

fn cases(record: &mut Value) -> &mut Vec<Value> {
    record["cases"].as_array_mut().unwrap()
}

fn runs(record: &mut Value) -> &mut Vec<Value> {
    record["runs"].as_array_mut().unwrap()
}

/// Replaces every list of samples.
fn samples(value: &mut Value, change: &dyn Fn(&mut Vec<Value>)) {
    match value {
        Value::Object(fields) => {
            for (key, child) in fields {
                match child {
                    Value::Array(list) if key == "samples" => change(list),
                    child => samples(child, change),
                }
            }
        }
        Value::Array(items) => items.iter_mut().for_each(|child| samples(child, change)),
        _ => {}
    }
}

fn scaled(record: &mut Value, factor: f64) {
    samples(record, &|list| list.iter_mut().for_each(|x| *x = json!(factor * x.as_f64().unwrap())));
}

/// Replaces every number of the rows.
fn numbers(record: &mut Value, change: fn(f64) -> Value) {
    for case in cases(record) {
        each_leaf(&mut case["outcome"]["row"], "", &mut |_, leaf| {
            if let Some(number) = leaf.as_f64() {
                *leaf = change(number);
            }
        });
    }
}

fn outcomes(record: &mut Value, outcome: &Value) {
    cases(record).iter_mut().for_each(|case| case["outcome"] = outcome.clone());
}

/// Empties every list but samples.
fn empty_lists(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            for (key, child) in fields {
                match child {
                    Value::Array(list) if key != "samples" => list.clear(),
                    child => empty_lists(child),
                }
            }
        }
        Value::Array(items) => items.iter_mut().for_each(empty_lists),
        _ => {}
    }
}

#[rustfmt::skip]
const DAMAGES: &[Damage] = &[
    ("no schema", |r| drop(r.as_object_mut().unwrap().remove("schema"))),
    ("schema 0", |r| r["schema"] = json!(0)),
    ("no runs", |r| runs(r).clear()),
    ("no cases", |r| cases(r).clear()),
    ("one case", |r| cases(r).truncate(1)),
    ("cases in reverse", |r| cases(r).reverse()),
    ("no parameters", |r| drop(cases(r)[0].as_object_mut().unwrap().remove("params"))),
    ("parameters null", |r| cases(r)[0]["params"] = Value::Null),
    ("another grid", |r| cases(r).iter_mut().for_each(|c| c["grid"] = json!("no such grid"))),
    ("another revision", |r| cases(r).iter_mut().for_each(|c| c["revision"] = json!(u32::MAX))),
    ("a case twice", |r| { let case = cases(r)[0].clone(); cases(r).push(case) }),
    ("a run twice", |r| { let run = runs(r)[0].clone(); runs(r).push(run) }),
    ("an unknown problem", |r| r["problem"] = json!("nothing")),
    ("the other profile", |r| r["profile"] = json!(if r["profile"] == "cpu" { "gpu" } else { "cpu" })),
    ("an unknown profile", |r| r["profile"] = json!("tpu")),
    ("an absurd date", |r| runs(r).iter_mut().for_each(|x| x["started"] = json!("99999-01-01T00:00:00Z"))),
    ("no date", |r| runs(r).iter_mut().for_each(|x| x["started"] = json!(""))),
    ("no core", |r| runs(r).iter_mut().for_each(|x| x["machine"]["cores"] = json!(0))),
    ("too much memory", |r| runs(r).iter_mut().for_each(|x| x["machine"]["memory_bytes"] = json!(u64::MAX))),
    ("no GPU", |r| runs(r).iter_mut().for_each(|x| x["machine"]["gpus"] = json!([]))),
    ("no peak", |r| runs(r).iter_mut().for_each(|x| x["peaks"]["bytes_per_s"] = json!(0.0))),
    ("no precision", |r| runs(r).iter_mut().for_each(|x| x["peaks"]["flops_per_s"] = json!({}))),
    ("an elapsed time below zero", |r| cases(r)[0]["elapsed_s"] = json!(-1.0)),
    ("no samples", |r| samples(r, &|list| list.clear())),
    ("one sample", |r| samples(r, &|list| list.truncate(1))),
    ("too many samples", |r| samples(&mut cases(r)[0], &|list| *list = vec![list[0].clone(); 5_001])),
    ("samples null", |r| samples(r, &|list| list[0] = Value::Null)),
    ("samples below zero", |r| scaled(r, -1.0)),
    ("samples too fast", |r| scaled(r, 1e-3)),
    ("slow samples", |r| scaled(r, 1e12)),
    ("huge samples", |r| samples(r, &|list| list.iter_mut().for_each(|x| *x = json!(f64::MAX)))),
    ("one huge sample", |r| samples(r, &|list| list[0] = json!(f64::MAX))),
    ("numbers zero", |r| numbers(r, |_| json!(0))),
    ("numbers below zero", |r| numbers(r, |x| json!(-x))),
    ("huge numbers", |r| numbers(r, |x| if x.fract() == 0.0 { json!(1u64 << 53) } else { json!(f64::MAX) })),
    ("rows null", |r| outcomes(r, &json!({"kind": "measured", "row": null}))),
    ("rows empty", |r| outcomes(r, &json!({"kind": "measured", "row": {}}))),
    ("lists empty", |r| cases(r).iter_mut().for_each(|case| empty_lists(&mut case["outcome"]))),
    ("all failed", |r| outcomes(r, &json!({"kind": "failed", "error": "TODO: <b>"}))),
    ("none run", |r| outcomes(r, &json!({"kind": "not_run", "reason": "", "needs": "", "has": ""}))),
    ("none fits", |r| outcomes(r, &json!({"kind": "out_of_memory", "requested_bytes": u64::MAX, "predicted_bytes": 0, "message": ""}))),
    ("half failed", |r| cases(r).iter_mut().step_by(2).for_each(|c| c["outcome"] = json!({"kind": "failed", "error": "died"}))),
    ("a seventh failed", |r| cases(r).iter_mut().step_by(7).for_each(|c| c["outcome"] = json!({"kind": "failed", "error": "died"}))),
];

#[test]
fn every_damaged_record_ends_in_a_sentence_or_in_a_report() {
    let copy = Copy::new();
    let mut wrong = Vec::new();
    for (number, entry) in measured().enumerate() {
        let sound = records(entry);
        // A third of all pairs: each damage meets five problems or more.
        for (what, damage) in DAMAGES.iter().skip(number % 3).step_by(3) {
            let mut records = sound.clone();
            records.iter_mut().for_each(|(_, record)| damage(record));
            copy.write(entry, &records);
            let (_, rendered) = copy.render(entry);
            for fault in &rendered.faults {
                let said = fault.to_string();
                if said.contains("panicked") || said.contains("undefined") {
                    wrong.push(format!("{what}: {said}"));
                }
            }
            for (profile, _) in &sound {
                let Ok(Some(local)) = copy.layout.read_local(*profile, entry) else { continue };
                let suite = suite::load(&copy.layout.root, entry).unwrap().unwrap();
                drift(&local, &local).unwrap();
                // Refused or not, it ends.
                let _ = acceptable(&copy.layout, entry, &suite, &local, Some(&local));
            }
        }
        copy.write(entry, &sound);
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
