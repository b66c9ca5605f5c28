//! The drift gate: every answer, rendered from the committed records only, equals `snapshots/rendered`, and the README's
//! figures are those of the records.
//!
//! After an intended change: run `INSTA_UPDATE=always cargo test --test drift`, check the diff, commit.

use std::collections::BTreeSet;
use std::path::Path;

use cs336::cli::document::{RecordSource, accepted_markdown, document, problem_input, with_problems};
use cs336::harness::answer::{Audience, RecordSet};
use cs336::harness::handout::by_name;
use cs336::harness::record::{CaseRecord, Outcome, RecordFile};
use cs336::harness::stats::median;
use cs336::harness::store::Layout;
use cs336::problems::REGISTRY;
use cs336::report::Rendered;
use serde_json::{Value, json};

#[path = "drift/damaged.rs"]
mod damaged;
#[path = "drift/pages.rs"]
mod pages;

fn layout() -> Layout {
    Layout::at(Path::new(env!("CARGO_MANIFEST_DIR")).to_path_buf())
}

#[test]
fn every_answer_renders_from_the_committed_records_as_accepted() {
    let mut settings = insta::Settings::clone_current();
    settings.set_snapshot_path(layout().root.join("snapshots").join("rendered"));
    settings.set_prepend_module_to_snapshot(false);
    settings.set_omit_expression(true);
    settings.bind(|| {
        for (name, markdown) in accepted_markdown(&layout()) {
            insta::assert_snapshot!(name, markdown.unwrap());
        }
    });
}

/// The test above fails for an answer without its snapshot. Pending `.snap.new` files are ignored here: that test writes
/// them while it runs, and leaves them if it fails.
#[test]
fn no_rendered_snapshot_is_without_its_answer() {
    let folder = layout().root.join("snapshots").join("rendered");
    let files = std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name().to_string_lossy().into_owned());
    let answers: BTreeSet<String> = REGISTRY.iter().map(|problem| format!("{}.snap", problem.name)).collect();
    let orphans: Vec<String> = files.filter(|file| !answers.contains(file.trim_end_matches(".new"))).collect();
    assert!(orphans.is_empty(), "snapshots/rendered holds what no registered problem answers: {orphans:?}");
}

/// One run and one case a line, times rounded. Records in another format make unreadable diffs.
#[test]
fn every_accepted_record_is_written_as_cs336_writes_it() {
    let mut files = 0;
    for folder in ["cpu", "gpu"] {
        for entry in std::fs::read_dir(layout().root.join("snapshots").join(folder)).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_none_or(|extension| extension != "json") {
                continue;
            }
            let (text, name) = (std::fs::read_to_string(&path).unwrap(), path.display().to_string());
            let written = RecordFile::parse(&text, &name).unwrap().to_json().unwrap();
            let difference = text.lines().zip(written.lines()).position(|(is, expected)| is != expected);
            assert!(
                text == written,
                "{name} differs, first in line {:?}; `cs336 accept` writes it",
                difference.map(|n| n + 1)
            );
            files += 1;
        }
    }
    assert!(files > 0, "snapshots/cpu and snapshots/gpu hold no record");
}

/// The row of the first case with these parameters in an accepted GPU record.
fn row(problem: &str, params: &Value) -> Value {
    let path = layout().root.join("snapshots").join("gpu").join(format!("{problem}.json"));
    let record: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let wanted = |case: &&Value| params.as_object().unwrap().iter().all(|(key, value)| case["params"][key] == *value);
    let case = record["cases"].as_array().unwrap().iter().find(wanted).expect("a case with these parameters");
    case["outcome"]["row"].clone()
}

fn seconds(timing: &Value) -> f64 {
    median(&serde_json::from_value::<Vec<f64>>(timing["samples"].clone()).unwrap())
}

#[test]
fn the_figures_of_the_readme_match_the_records() {
    let best = row("torch_compile", &json!({"measure": "best", "size": "xl", "context_length": 512}));
    let step = |side: &str| 1e3 * seconds(&best["reduce_overhead"][side]["row"]["step"]);
    let ranks = row("torch_compile", &json!({"measure": "ranks", "pytorch": "eager"}));
    let on_ranks = |way: &str| 1e3 * seconds(&ranks[way]["last_rank"]);
    let heads = row("flash_benchmarking", &json!({"measure": "cell", "batch": 16, "d_model": 64}));
    let library = "flash_attention_4";
    let pass = |column: &str, pass: &str| 1e3 * seconds(&heads["columns"][column]["passes"][pass]["row"]);
    let float32 = json!({"dtype": "float32", "bucket_size_mb": 100.0});
    let steps = |problem: &str| row(problem, &float32)["steps"].clone();
    let (buckets, shared) = (steps("ddp_bucketed_benchmarking"), steps("optimizer_state_sharding_accounting"));
    let of = |steps: &Value, name: &str| seconds(&steps["strategies"][name]["step"]["last_rank"]);
    let single = seconds(&buckets["single"]["last_rank"]);
    let expected = [
        format!("{:.1} ms fused, {:.1} ms by torch.compile", step("rust"), step("python")),
        format!("forward {:.3} ms, backward {:.3} ms", pass("flash", "forward"), pass("flash", "backward")),
        format!("cuDNN {:.3} and {:.3} ms", pass("sdpa_cudnn", "forward"), pass("sdpa_cudnn", "backward")),
        format!("FlashAttention-4 {:.3} and {:.3} ms", pass(library, "forward"), pass(library, "backward")),
        format!("{:.3} in buckets without copies", of(&buckets, "overlap_coalesced") / single),
        format!("PyTorch's DDP {:.3}", seconds(&buckets["pytorch_ddp"]["last_rank"]) / single),
        format!("fused {:.1} ms in buckets, {:.1} without", on_ranks("buckets"), on_ranks("single")),
        format!("{:.1} with ZeRO-1", on_ranks("sharded")),
        format!("{:.3} of the step of bucketed", of(&shared, "zero1_in_backward") / of(&shared, "overlap_bucketed")),
    ];
    let readme = std::fs::read_to_string(layout().root.join("README.md")).unwrap();
    for words in expected {
        assert!(readme.contains(&words), "README.md does not say {words:?}, as the records do");
    }
}

/// `INSTA_UPDATE=always` updates it, like the rendered answers.
#[test]
fn the_picture_of_the_readme_is_drawn_from_the_records() {
    let drawn = pages::RENDERED.figures.iter().find(|(path, _)| path == "figures/flash_benchmarking-full-rates.svg");
    let (_, drawn) = drawn.expect("the rates of attention");
    let path = layout().root.join("snapshots").join("readme.svg");
    if std::env::var("INSTA_UPDATE").is_ok_and(|update| update == "always") {
        std::fs::write(&path, drawn).unwrap();
    }
    let same = std::fs::read(&path).unwrap() == *drawn;
    assert!(same, "snapshots/readme.svg drifted; check it, then run `INSTA_UPDATE=always cargo test --test drift`");
}

/// Gives every case of a set the same outcome.
fn end_all(set: &mut Option<RecordSet>, outcome: &Outcome) {
    for case in set.iter_mut().flat_map(|set| &mut set.file.cases) {
        case.outcome = outcome.clone();
    }
}

/// Renders every template from other records, so that every branch is tried. An answer may also fail with an error that
/// names the missing measurement.
#[test]
fn every_answer_renders_from_other_records_or_names_what_it_lacks() {
    let failed = Outcome::Failed { error: "the worker died".into() };
    let no_memory =
        Outcome::OutOfMemory { requested_bytes: None, predicted_bytes: None, message: "out of memory".into() };
    let mut rendered = 0;
    for entry in REGISTRY {
        for (what, only_cpu, ending) in [
            ("the CPU's records alone", true, None),
            ("failed cases on the CPU", true, Some(&failed)),
            ("failed cases on the GPU", false, Some(&failed)),
            ("GPU cases that lacked memory", false, Some(&no_memory)),
        ] {
            let mut problem = problem_input(&layout(), by_name(entry.name).unwrap(), RecordSource::Accepted);
            if only_cpu {
                problem.records.gpu = None;
            }
            if let Some(ending) = ending {
                end_all(if only_cpu { &mut problem.records.cpu } else { &mut problem.records.gpu }, ending);
            }
            match (entry.answer)(&problem.records, Audience::Ours) {
                Ok(answer) => problem.answer = answer,
                Err(error) => {
                    let words = format!("{error:#}");
                    assert!(ending.is_some() && words.contains("measured"), "{} of {what}: {words}", entry.name);
                    continue;
                }
            }
            cs336::report::render(&with_problems(vec![problem]))
                .and_then(Rendered::complete)
                .unwrap_or_else(|error| panic!("{} of {what}: {error:#}", entry.name));
            rendered += 1;
        }
    }
    assert!(rendered >= 2 * REGISTRY.len(), "{rendered} renderings");
}

/// The answer to `flash_backward` from GPU records of `trials` only, each with its outcome and why it is stale.
fn attested(trials: &[(&str, Outcome, Option<&str>)]) -> String {
    let mut problem = problem_input(&layout(), by_name("flash_backward").unwrap(), RecordSource::Accepted);
    let gpu = problem.records.gpu.as_mut().expect("accepted records");
    let some = gpu.file.cases[0].clone();
    let case = |(trial, outcome, _): &(&str, Outcome, _)| CaseRecord {
        params: json!({"implementation": "hopper", "trial": trial}),
        outcome: outcome.clone(),
        ..some.clone()
    };
    gpu.file.cases = trials.iter().map(case).collect();
    gpu.stale = trials.iter().enumerate().filter_map(|(at, t)| Some((at, t.2?.to_string()))).collect();
    let entry = REGISTRY.iter().find(|entry| entry.name == problem.handout.name).expect("a registered problem");
    problem.answer = (entry.answer)(&problem.records, Audience::Ours).unwrap();
    cs336::report::render(&with_problems(vec![problem])).unwrap().markdown
}

#[test]
fn an_attestation_that_is_stale_failed_or_missing_is_named_as_such() {
    let row = |errors: Option<u64>| Outcome::Measured {
        row: json!({"dimensions": [64], "cases": 3, "worst_share": 0.5,
            "findings": errors.map(|errors| json!({"errors": errors, "kinds": ["a race"]}))}),
    };
    let answer = attested(&[
        ("ragged", row(None), None),
        ("adversarial", row(None), Some("kernels/flash_forward.cu has changed since")),
        ("repeats", Outcome::Failed { error: "dk differs".into() }, None),
        ("memcheck", row(Some(0)), None),
        ("racecheck", row(Some(2)), None),
        ("refills", row(None), None),
        ("refills_repeat", row(None), None),
        ("refills_memcheck", row(Some(0)), None),
    ]);
    for words in [
        "Of 18 trials on a GPU, 5 attest to the kernels as they are now (hopper: ragged lengths, memory checker, refills, \
         repeats with refills, memory checker with refills).",
        "Failed: hopper: repeats (dk differs), race checker (errors reported: 2).",
        "Stale: hopper: adversarial inputs (kernels/flash\\_forward.cu has changed since).",
        "Not measured: hopper: race checker with refills; portable: ragged lengths, adversarial inputs, ",
        "| hopper | adversarial inputs (stale) |",
    ] {
        assert!(answer.contains(words), "{words}: {answer}");
    }
    let not_run = Outcome::NotRun { reason: "none".into(), needs: "a sanitizer".into(), has: "none".into() };
    let answer = attested(&[("memcheck", not_run, None)]);
    assert!(answer.contains("none attests to the kernels as they are now. Not measured: hopper: "), "{answer}");
    assert!(answer.contains("memory checker (needs a sanitizer)"), "{answer}");
}

#[test]
fn the_whole_write_up_gives_the_same_bytes_twice() {
    let frame = std::fs::read_to_string(layout().report().join("writeup.typ")).unwrap();
    let again = cs336::report::render(&document(&layout(), RecordSource::Accepted).unwrap()).unwrap();
    let _alone = pages::SETTING.lock();
    let [first, second] = [&*pages::RENDERED, &again].map(|rendered| cs336::report::pdf(rendered, &frame).unwrap());
    assert!(first.starts_with(b"%PDF-1.") && first.len() > 50_000, "{} bytes", first.len());
    assert!(first == second, "two renderings of the same records differ");
}
