//! The whole way from made-up records to a PDF: what comes out, what is refused, and that it is the same twice.

use std::collections::BTreeMap;

use cs336::harness::handout::HANDOUT;
use cs336::harness::record::{CaseRecord, Gpu, Machine, Outcome, Peaks, Profile, RecordFile, Run};
use cs336::report::{self, Document, PartInput, ProblemInput, Records, Rendered};
use proptest::prelude::*;
use serde_json::{Value, json};

const WRITEUP: &str = include_str!("../report/writeup.typ");
const ATTENTION: &str = include_str!("report/sample_attention.md");
const LONG: &str = include_str!("report/sample_long.md");

fn run(id: &str, started: &str) -> Run {
    Run {
        id: id.into(),
        started: started.into(),
        commit: "0123456789abcdef0123456789abcdef01234567".into(),
        dirty: false,
        suite_hash: "0".repeat(64),
        machine: Machine {
            cpu: "Test(R) Processor 9000 CPU @ 2.20GHz".into(),
            cores: 2,
            memory_bytes: 8 << 30,
            os: "Linux 6.1".into(),
            gpus: vec![Gpu { name: "Test GPU".into(), memory_bytes: 80 << 30, compute_capability: "9.0".into() }],
        },
        software: [("rustc", "1.92.0"), ("torch", "2.11.0+cpu")].map(|(k, v)| (k.to_string(), v.to_string())).into(),
        settings: BTreeMap::new(),
        peaks: Peaks {
            flops_per_s: BTreeMap::new(),
            bytes_per_s: 1e11,
            cache_bytes: 0.0,
            source: "made up for a test".into(),
        },
    }
}

/// Made-up timings that grow as the square of n, with a little spread; the largest case is out of memory.
fn records() -> Records {
    let mut file = RecordFile::new("sample_attention", Profile::Cpu);
    file.runs.push(run("20261121T073200Z-4f2a", "2026-11-21T07:32:00Z"));
    for d in [16, 64] {
        for n in [256, 1024, 4096, 8192, 16384] {
            let base = f64::from(n) * f64::from(n) * f64::from(d) * 1e-11;
            let samples = |factor: f64| -> Vec<f64> {
                (0..10).map(|i| base * factor * (1.0 + 0.004 * f64::from(i % 4))).collect()
            };
            let outcome = match (d, n) {
                (64, 16384) => Outcome::OutOfMemory {
                    requested_bytes: Some(8 << 30),
                    predicted_bytes: Some(17 << 30),
                    message: "cannot allocate [8 GiB] | of memory".into(),
                },
                _ => Outcome::Measured {
                    row: json!({
                        "forward": {"unit": "s", "samples": samples(1.0)},
                        "backward": {"unit": "s", "samples": samples(2.4)},
                        "saved_bytes": 4 * i64::from(n) * i64::from(n) * 8,
                    }),
                },
            };
            file.cases.push(CaseRecord {
                grid: "sweep".into(),
                params: json!({"d": d, "n": n}),
                run: "20261121T073200Z-4f2a".into(),
                revision: 1,
                kernels: BTreeMap::new(),
                elapsed_s: 1.0,
                outcome,
            });
        }
    }
    Records { file, stale: 1 }
}

fn problem(name: &str, parts: &[(&str, f64)], template: &str) -> ProblemInput {
    ProblemInput {
        name: name.into(),
        title: format!("Test problem {name}"),
        section: "1.2.1".into(),
        points: parts.iter().map(|p| p.1).sum(),
        parts: parts
            .iter()
            .map(|(id, points)| PartInput {
                id: (*id).into(),
                points: *points,
                kinds: vec!["table".into(), "written".into()],
                question: "Measure attention over head sizes and sequence lengths, forward and backward, 100 times each; \
                           report times, or that memory ran out. How does the memory saved for `backward` change with $N$?"
                    .into(),
            })
            .collect(),
        answers: parts.iter().map(|p| p.0.to_string()).collect(),
        template: Some(template.into()),
        facts: json!({"sum": 4}),
        cpu: Some(records()),
        gpu: None,
    }
}

fn document(problems: Vec<ProblemInput>) -> Document {
    Document {
        title: "Systems and Parallelism".into(),
        assignment: "A test document, made-up numbers".into(),
        problems,
    }
}

/// Every feature, followed by the handout's problems as unanswered ones.
fn full() -> Document {
    let mut problems = vec![
        problem("sample_attention", &[("a", 2.0), ("b", 3.0)], ATTENTION),
        problem("sample_long", &[("", 4.0)], LONG),
    ];
    problems.extend(HANDOUT.iter().map(|p| {
        ProblemInput {
            name: p.name.into(),
            title: p.title.into(),
            section: p.section.into(),
            points: p.points,
            parts: p
                .parts
                .iter()
                .map(|part| PartInput {
                    id: part.id.into(),
                    points: part.points,
                    kinds: vec![],
                    question: part.question.into(),
                })
                .collect(),
            answers: vec![],
            template: None,
            facts: Value::Null,
            cpu: None,
            gpu: None,
        }
    }));
    document(problems)
}

fn render(template: &str) -> anyhow::Result<Rendered> {
    report::render(&document(vec![problem("x", &[("", 4.0)], &format!("{{{{ part(\"\") }}}}\n\n{template}"))]))
}

#[test]
fn the_full_document_becomes_the_same_pdf_twice() {
    let start = std::time::Instant::now();
    let rendered = report::render(&full()).unwrap();
    let pdf = report::pdf(&rendered, WRITEUP).unwrap();
    eprintln!("{} bytes of PDF in {:.2?}", pdf.len(), start.elapsed());
    let again = report::render(&full()).unwrap();
    assert_eq!(rendered.markdown, again.markdown);
    assert_eq!(rendered.typst, again.typst);
    assert_eq!(rendered.figures, again.figures);
    assert!(pdf == report::pdf(&again, WRITEUP).unwrap(), "two renderings differ");
    if let Some(out) = std::env::var_os("REPORT_OUT") {
        report::write(std::path::Path::new(&out), &rendered, Some(&pdf)).unwrap();
        std::fs::write(std::path::Path::new(&out).join("body.typ"), &rendered.typst).unwrap();
    }
}
