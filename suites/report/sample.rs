//! Made-up records, the documents of them that the tests of the report render, and what is read back of a rendering.

use std::collections::BTreeMap;
use std::sync::Arc;

use cs336::harness::answer::{Answer, RecordSet, Records};
use cs336::harness::conditions::{Conditions, During, Range, Reading, Throttle};
use cs336::harness::handout::HANDOUT;
use cs336::harness::record::{CaseRecord, Gpu, Machine, Outcome, Peaks, Profile, RecordFile, Run};
use cs336::report::{self, Document, PartInput, ProblemInput, ReadRecords, Rendered};
use serde_json::{Value, json};

pub const ATTENTION: &str = include_str!("sample_attention.md");
pub const LONG: &str = include_str!("sample_long.md");

pub fn run(id: &str, started: &str) -> Run {
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

/// A card at its power cap.
fn conditions() -> Conditions {
    let reading = Reading {
        sm_clock_hz: 1.98e9,
        memory_clock_hz: 3.2e9,
        power_w: 120.0,
        temperature_c: 40.0,
        throttle: [Throttle::GpuIdle].into(),
    };
    let during = During {
        readings: 12,
        sm_clock_hz: Range { min: 1.2e9, median: 1.755e9, max: 1.98e9 },
        power_w: Range { min: 300.0, median: 694.0, max: 701.0 },
        max_temperature_c: 62.0,
        throttle: [Throttle::SwPowerCap].into(),
    };
    Conditions { before: reading.clone(), during: Some(during), after: reading, remeasured_after: Default::default() }
}

/// Made-up timings that grow as the square of n, with a little spread; the largest case is out of memory.
fn records() -> RecordSet {
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
                conditions: (n == 4096).then(conditions),
                outcome,
            });
        }
    }
    RecordSet { file, stale: [(2, "kernels/flash_forward.cu has changed since".to_string())].into() }
}

pub fn problem(name: &str, parts: &[(&str, f64)], template: &str) -> ProblemInput {
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
        shared: shared(),
        facts: json!({"sum": 4}),
        answer: Answer::default(),
        records: measured(),
        other_records: other(),
    }
}

/// Macros as they are shared; one of them reads another problem's records for whoever imports it.
fn shared() -> Vec<(String, String)> {
    let sums = "{% macro double(x) %}{{ 2 * x }}{% endmacro %}";
    let counts = "{% macro count(name) %}{{ records(name).cpu.cases | length }} cases{% endmacro %}";
    [("shared/sums.md", sums), ("shared/counts.md", counts)].map(|(name, text)| (name.into(), text.into())).into()
}

fn measured() -> Records {
    Records { cpu: Some(records()), ..Records::default() }
}

/// What has no other problem but "other".
fn other() -> ReadRecords {
    Arc::new(|name| if name == "other" { Ok(measured()) } else { Err(anyhow::anyhow!("{name} measures nothing")) })
}

pub fn document(problems: Vec<ProblemInput>) -> Document {
    Document {
        title: "Systems and Parallelism".into(),
        assignment: "A test document, made-up numbers".into(),
        problems,
    }
}

/// Every feature, followed by the handout's problems as unanswered ones.
pub fn full() -> Document {
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
            shared: vec![],
            facts: Value::Null,
            answer: Answer::default(),
            records: Records::default(),
            other_records: other(),
        }
    }));
    document(problems)
}

pub fn render(template: &str) -> anyhow::Result<Rendered> {
    report::render(&document(vec![problem("x", &[("", 4.0)], &format!("{{{{ part(\"\") }}}}\n\n{template}"))]))
}

/// The bare page on which text is set to be read back.
const PLAIN: &str = "#set document(title: front.title)\n#set text(font: \"Libertinus Serif\", hyphenate: false)\n#include \"body.typ\"\n";

pub fn plain() -> String {
    format!("#let front = json(\"front.json\")\n{PLAIN}")
}

/// All text of the pages, without spaces.
pub fn text_of(rendered: &Rendered) -> String {
    fn collect(frame: &typst::layout::Frame, out: &mut String) {
        for (_, item) in frame.items() {
            match item {
                typst::layout::FrameItem::Group(group) => collect(&group.frame, out),
                typst::layout::FrameItem::Text(text) => out.push_str(&text.text),
                _ => {}
            }
        }
    }
    let mut out = String::new();
    for page in report::pdf::compile(rendered, &plain()).unwrap().pages() {
        collect(&page.frame, &mut out);
    }
    squeeze(&out)
}

/// Without spaces, with straight quotes (typst curls them) and one kind of minus.
pub fn squeeze(text: &str) -> String {
    let straight = text.replace(['‘', '’', '′'], "'").replace(['“', '”', '″'], "\"");
    straight.replace('−', "-").chars().filter(|c| !c.is_whitespace()).collect()
}

/// A rendering whose body is `typst`.
pub fn body(typst: String) -> Rendered {
    let mut rendered = report::render(&document(vec![])).unwrap();
    rendered.typst = typst;
    rendered
}
