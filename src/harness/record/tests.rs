//! Parsing a written record gives it back; a file that is not a valid record is refused by name.

use proptest::prelude::*;
use serde_json::json;

use super::*;

fn run(id: &str) -> Run {
    Run {
        id: id.into(),
        started: "2026-11-21T00:00:00Z".into(),
        commit: "abc".into(),
        dirty: false,
        modified: Vec::new(),
        peers_hash: None,
        suite_hash: "def".into(),
        machine: Machine { cpu: "a CPU".into(), cores: 2, memory_bytes: 1 << 34, os: "Linux".into(), gpus: vec![] },
        software: [("torch".to_string(), "2.11.0".to_string())].into(),
        settings: BTreeMap::new(),
        peaks: Peaks { flops_per_s: BTreeMap::new(), bytes_per_s: 1e9, cache_bytes: 0.0, source: "a test".into() },
    }
}

fn case(params: Value, run: &str, outcome: Outcome) -> CaseRecord {
    let kernels = BTreeMap::new();
    let (grid, run) = ("g".into(), run.into());
    CaseRecord {
        grid,
        params,
        run,
        revision: 1,
        kernels,
        elapsed_s: 0.5,
        conditions: None,
        busy_processors: None,
        outcome,
    }
}

fn measured(samples: &[f64]) -> Outcome {
    Outcome::Measured { row: json!({"exact": 7, "forward": {"unit": "s", "samples": samples}}) }
}

fn file(cases: Vec<CaseRecord>) -> RecordFile {
    let mut file = RecordFile::new("p", Profile::Cpu);
    cases.into_iter().for_each(|c| file.put(c, &run("r1")));
    file
}

fn refused(text: &str) -> String {
    format!("{:#}", RecordFile::parse(text, "x.json").unwrap_err())
}

fn outcomes() -> impl Strategy<Value = Outcome> {
    prop_oneof![
        prop::collection::vec(1u32..10_000_000, 1..20)
            .prop_map(|nanoseconds| measured(&nanoseconds.iter().map(|&ns| f64::from(ns) / 1e9).collect::<Vec<_>>())),
        (any::<Option<u64>>(), any::<Option<u64>>(), ".*").prop_map(|(requested_bytes, predicted_bytes, message)| {
            Outcome::OutOfMemory { requested_bytes, predicted_bytes, message }
        }),
        (".*", ".*", ".*").prop_map(|(reason, needs, has)| Outcome::NotRun { reason, needs, has }),
        ".*".prop_map(|error| Outcome::Failed { error }),
    ]
}

#[test]
fn a_text_that_would_forge_a_line_is_refused_except_in_an_outcome() {
    let text = |field: &str, value: &str| {
        let mut raw: Value =
            serde_json::from_str(&file(vec![case(json!({"i": 1}), "r1", measured(&[0.5]))]).to_json().unwrap())
                .unwrap();
        *raw.pointer_mut(field).unwrap() = json!(value);
        raw.to_string()
    };
    for field in ["/cases/0/grid", "/cases/0/params/i", "/runs/0/machine/os", "/runs/0/software/torch"] {
        RecordFile::parse(&text(field, "sound"), "x.json").unwrap();
        let error = refused(&text(field, "a\npassed\u{1b}[2J"));
        let expected = r#"x.json holds what no run can write: the text "a\npassed\u{1b}[2J" is not one printable line"#;
        assert!(error.starts_with(expected), "{field}: {error}");
    }
    let error = refused(&text("/runs/0/machine/os", &"\u{301}".repeat(1_001)));
    assert!(error.contains("a text of 1001 characters: at most 1000 are one line; correct it"), "{error}");
    let failed = file(vec![case(json!({"i": 1}), "r1", Outcome::Failed { error: "a\nb".into() })]);
    RecordFile::parse(&failed.to_json().unwrap(), "x.json").unwrap();
}

proptest! {
    #[test]
    fn parsing_a_written_record_gives_it_back(outcomes in prop::collection::vec(outcomes(), 0..6)) {
        let cases = outcomes.into_iter().enumerate().map(|(i, outcome)| case(json!({"i": i}), "r1", outcome));
        let file = file(cases.collect());
        let text = file.to_json().unwrap();
        prop_assert_eq!(RecordFile::parse(&text, "x.json").unwrap(), file);
    }

    #[test]
    fn a_record_truncated_anywhere_is_refused_by_name(share in 0.0..1.0f64) {
        let text = file(vec![case(json!({"n": 1}), "r1", measured(&[0.25, 0.5]))]).to_json().unwrap();
        let mut end = (share * (text.trim_end().len() - 1) as f64) as usize;
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        prop_assert!(refused(&text[..end]).contains("x.json"));
    }

    #[test]
    fn no_text_at_all_panics(text in ".*") {
        prop_assert!(RecordFile::parse(&text, "x.json").is_err());
    }
}

#[test]
fn a_file_that_contradicts_itself_is_refused() {
    let good = file(vec![case(json!({"n": 1}), "r1", measured(&[0.25]))]);
    let refused_with = |spoil: &dyn Fn(&mut RecordFile), expected: &str| {
        let mut bad = good.clone();
        spoil(&mut bad);
        let message = refused(&bad.to_json().unwrap());
        assert!(message.contains(expected) && message.contains("x.json"), "{message}");
    };
    refused_with(&|f| f.runs.clear(), "names run \"r1\", but the file has no such run");
    refused_with(&|f| f.cases.push(f.cases[0].clone()), "cases 0 and 1 have the same parameters {\"n\":1}");
    refused_with(&|f| f.cases[0].outcome = measured(&[0.25, -1.0]), "sample 1 is -1");
    refused_with(&|f| f.cases[0].outcome = measured(&[]), "no samples");
    // serde_json writes a NaN as null.
    refused_with(&|f| f.cases[0].outcome = measured(&[f64::NAN]), "no list of samples");
    refused_with(&|f| f.schema = 0, "has the old schema 0; this cs336 reads schema 1");
    refused_with(&|f| f.schema = 2, "has schema 2, from a newer cs336; this one reads schema 1");
    refused_with(&|f| f.runs.push(f.runs[0].clone()), "two runs have the id \"r1\"");
    refused_with(&|f| f.runs[0].started = "99999-01-01T00:00:00Z".into(), "run 0: it started at \"99999-");
    refused_with(&|f| f.runs[0].commit = "a <b>".into(), "run 0: the commit is \"a <b>\"");
    refused_with(&|f| (f.runs[0].id, f.cases[0].run) = ("a|b".into(), "a|b".into()), "run 0: the id is \"a|b\"");
    refused_with(&|f| f.cases[0].elapsed_s = -1.0, "it took -1e0 s: expected 0 to 3.2e7 s");
    refused_with(&|f| f.cases[0].elapsed_s = 1e308, "it took 1e308 s");
    refused_with(&|f| f.runs[0].machine.cores = usize::MAX, "cores: expected fewer than 1e5");
    refused_with(&|f| f.runs[0].machine.memory_bytes = u64::MAX, "is larger than 2^53");
    refused_with(&|f| f.cases[0].busy_processors = Some(-1.0), "-1e0 processors were busy: expected 0 to 1e5");
    for count in [json!(u64::MAX), json!(i64::MAX), json!(i64::MIN)] {
        let row = json!({"bytes": [0, {"peak": count}]});
        refused_with(&|f| f.cases[0].outcome = Outcome::Measured { row: row.clone() }, "is larger than 2^53");
    }
    for (field, bytes) in [("held_bytes", json!(1u64 << 50)), ("saved", json!([1, 1u64 << 50]))] {
        let row = json!({"naive": {"kind": "measured", "row": {field: bytes}}});
        let words = format!("{field} is 1048576.00 GiB, and its machine has 16.00 GiB of memory");
        refused_with(&|f| f.cases[0].outcome = Outcome::Measured { row: row.clone() }, &words);
    }
    let row = json!({"volumes": [{"bus_bytes": -1.5}]});
    let words = "bus_bytes is -1.5 bytes: correct it, or measure again";
    refused_with(&|f| f.cases[0].outcome = Outcome::Measured { row: row.clone() }, words);
}

#[test]
fn bytes_that_were_asked_for_in_vain_or_predicted_may_be_more_than_a_machine_has() {
    let refused = json!({"kind": "out_of_memory", "requested_bytes": 1u64 << 50, "message": ""});
    let row = json!({"naive": refused, "flash": {"predicted_bytes": 1u64 << 50}});
    let text = file(vec![case(json!({"n": 1}), "r1", Outcome::Measured { row })]).to_json().unwrap();
    assert!(RecordFile::parse(&text, "x.json").is_ok());
}

/// A file of the size that is read can hold as many; comparing each two would take minutes.
#[test]
fn a_file_of_a_hundred_thousand_cases_and_runs_is_read() {
    let mut many = RecordFile::new("p", Profile::Cpu);
    for i in 0..100_000 {
        many.runs.push(run(&format!("r{i}")));
        many.cases.push(case(json!({"n": i}), &format!("r{i}"), Outcome::Failed { error: String::new() }));
    }
    many.validate().unwrap();
    many.cases[99_999].params = json!({"n": 99_998});
    let error = many.validate().unwrap_err().to_string();
    assert!(error.contains("cases 99998 and 99999 have the same parameters"), "{error}");
}

#[test]
fn a_timing_below_the_floor_of_its_machine_is_refused_with_its_case_and_both_times() {
    let with = |seconds: f64| {
        let work = json!({"flops": 1e9, "bytes": 0.0, "precision": "float32"});
        let row = json!({"forward": {"unit": "s", "samples": [0.25, seconds], "work": work}});
        let mut file = file(vec![case(json!({"n": 1}), "r1", Outcome::Measured { row })]);
        file.runs[0].peaks.flops_per_s = [("float32".to_string(), 1e12)].into();
        file.to_json().unwrap()
    };
    RecordFile::parse(&with(1e-3), "x.json").unwrap();
    let message = refused(&with(1e-6));
    for part in ["x.json", "case 0 ({\"n\":1})", "forward", "1.000e-6 s is below the floor of 1.000e-3 s"] {
        assert!(message.contains(part), "{part}: {message}");
    }
}

#[test]
fn times_that_their_case_or_the_clock_cannot_have_are_refused() {
    let of = |samples: &[f64]| file(vec![case(json!({"n": 1}), "r1", measured(samples))]);
    of(&[0.25, 0.25]).validate().unwrap();
    for (samples, expected) in [
        (&[1e5][..], "forward: its samples take 1.000e5 s together, and their case took 5.000e-1 s"),
        (&[0.25, 0.25, 0.25], "forward: its samples take 7.500e-1 s together"),
        (&[1e-12, 0.25], "forward: a sample of 1e-12 s is below a nanosecond"),
    ] {
        let error = format!("{:#}", of(samples).validate().unwrap_err());
        assert!(error.contains("case 0 ({\"n\":1})") && error.contains(expected), "{error}");
    }
    let of = |row: Value| file(vec![case(json!({"n": 1}), "r1", Outcome::Measured { row })]);
    of(json!({"seconds": 0.5, "spans": [{"end_s": 0.0}], "time_s": [0.1], "bytes_per_s": 1e30})).validate().unwrap();
    for (row, expected) in [
        (json!({"steps": [{"seconds": 7776.0}]}), "steps.seconds is 7.776e3 s, and its case took 5.000e-1 s"),
        (json!({"link": {"overhead_s": -1e-6}}), "link.overhead_s is -1e-6 s"),
        (json!({"time_s": [0.1, 0.6]}), "time_s is 6e-1 s"),
    ] {
        let error = format!("{:#}", of(row).validate().unwrap_err());
        assert!(error.contains("case 0 ({\"n\":1})") && error.contains(expected), "{error}");
    }
}

#[test]
fn a_case_replaces_its_predecessor_and_a_run_without_cases_is_dropped() {
    let mut file =
        file(vec![case(json!({"n": 1}), "r1", measured(&[0.25])), case(json!({"n": 2}), "r1", measured(&[0.5]))]);
    file.put(case(json!({"n": 1}), "r2", measured(&[0.125])), &run("r2"));
    assert_eq!(file.runs.iter().map(|r| r.id.as_str()).collect::<Vec<_>>(), ["r1", "r2"]);
    file.put(case(json!({"n": 2}), "r2", measured(&[0.125])), &run("r2"));
    assert_eq!((file.runs.len(), file.cases.len()), (1, 2));
    let order = [json!({"n": 2}), json!({"n": 1})];
    file.sort_like(order.iter());
    assert_eq!(file.cases[0].params, order[0]);
    file.retain(|c| c.params == order[1]);
    assert_eq!((file.runs.len(), file.cases.len()), (1, 1));
}

#[test]
fn a_file_has_one_run_and_one_case_a_line_and_its_times_are_rounded() {
    let two = [0.000_001_234_567_8, 0.25];
    let text = file(vec![case(json!({"n": 1}), "r1", measured(&two)), case(json!({"n": 2}), "r1", measured(&[0.5]))]);
    let text = text.to_json().unwrap();
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(
        lines[..5],
        ["{", "  \"schema\": 1,", "  \"problem\": \"p\",", "  \"profile\": \"cpu\",", "  \"runs\": ["]
    );
    assert!(lines[5].starts_with("    {\"id\":\"r1\",") && lines[5].ends_with('}'), "{}", lines[5]);
    assert_eq!(lines[6..8], ["  ],", "  \"cases\": ["]);
    let expected = "\"outcome\":{\"kind\":\"measured\",\"row\":{\"exact\":7,\"forward\":{\"unit\":\"s\",\"samples\":[1.235e-6,0.25]}}}},";
    assert!(
        lines[8].starts_with("    {\"grid\":\"g\",\"params\":{\"n\":1}") && lines[8].ends_with(expected),
        "{}",
        lines[8]
    );
    assert!(lines[9].ends_with("[0.5]}}}}"), "{}", lines[9]);
    assert_eq!(lines[10..], ["  ]", "}"]);
    assert!(file(vec![]).to_json().unwrap().ends_with("\"runs\": [],\n  \"cases\": []\n}\n"));
}

#[test]
fn two_cases_with_the_same_canonical_parameters_are_refused() {
    let file = file(vec![
        case(json!({"n": 1}), "r1", measured(&[0.25])),
        case(json!({"n": 1, "m": 0}), "r1", measured(&[0.5])),
    ]);
    let with_default =
        |params: &Value| Some(json!({"n": params["n"], "m": params.get("m").cloned().unwrap_or(json!(0))}));
    let message = file.clone().with_canonical_params(with_default).unwrap_err().to_string();
    assert!(message.contains("cases 0 and 1 have the same parameters"), "{message}");
    assert_eq!(file.clone().with_canonical_params(|_| None).unwrap(), file);
}

#[test]
fn a_run_of_another_time_than_its_id_or_from_before_the_handout_is_not_accepted() {
    let of = |id: &str, started: &str| Run { started: started.into(), ..run(id) };
    for (id, started) in [("r1", "2026-11-21T00:00:00Z"), ("20261121T000000Z-4f2a", "2026-11-21T00:00:00Z")] {
        of(id, started).acceptable().unwrap();
    }
    let said = |id: &str, started: &str| of(id, started).acceptable().unwrap_err().to_string();
    assert!(said("r1", "1970-01-01T00:00:00Z").contains("is of 1970-01-01T00:00:00Z, when there was no handout"));
    assert!(said("20261121T000000Z-4f2a", "2026-11-22T00:00:00Z").contains("which its id contradicts"));
}

#[test]
fn a_run_that_names_no_machine_is_not_accepted() {
    for spoil in [
        |machine: &mut Machine| machine.cpu.clear(),
        |machine: &mut Machine| machine.cores = 0,
        |machine: &mut Machine| machine.memory_bytes = 0,
    ] {
        let mut run = run("r1");
        run.acceptable().unwrap();
        spoil(&mut run.machine);
        let said = run.acceptable().unwrap_err().to_string();
        assert!(said.contains("on which processor, cores and memory"), "{said}");
    }
    let of_gpu = RecordFile { profile: Profile::Gpu, runs: vec![run("r1")], ..file(vec![]) };
    let said = of_gpu.require_acceptable_runs().unwrap_err().to_string();
    assert!(said.contains("had no GPU; measure on a machine that has one"), "{said}");
}
