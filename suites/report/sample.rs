//! Made-up records and documents for the tests of the report, and helpers that read a rendering back.

use std::collections::BTreeMap;
use std::path::Path;

use cs336::cli::document::RecordSource;
use cs336::harness::answer::figure::{Figure, Plot, PlotKind, Series};
use cs336::harness::answer::format::grouped;
use cs336::harness::answer::{
    Answer, Case, CaseOutcome, Cell, Claim, Column, Quantity, RecordSet, Records, Style, Table, Unit,
};
use cs336::harness::conditions::{Conditions, During, Reading, ReadingRange, Throttle};
use cs336::harness::handout::{DeliverableKind, HANDOUT, HandoutProblem, Part};
use cs336::harness::record::{CaseRecord, Gpu, Machine, Outcome, Peaks, Profile, RecordFile, Run};
use cs336::harness::store::Layout;
use cs336::report::{self, Document, ProblemInput, Rendered};
use serde_json::{Value, json};

const ATTENTION: &str = include_str!("sample_attention.md");
const LONG: &str = include_str!("sample_long.md");

pub fn run(id: &str, started: &str) -> Run {
    Run {
        id: id.into(),
        started: started.into(),
        commit: "0123456789abcdef0123456789abcdef01234567".into(),
        dirty: false,
        modified: Vec::new(),
        peers_hash: None,
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

/// A GPU at its power cap.
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
        sm_clock_hz: ReadingRange { min: 1.2e9, median: 1.755e9, max: 1.98e9 },
        power_w: ReadingRange { min: 300.0, median: 694.0, max: 701.0 },
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
                busy_processors: None,
                outcome,
            });
        }
    }
    RecordSet { file, stale: [(2, "kernels/flash_forward.cu has changed since".to_string())].into() }
}

pub fn problem(name: &str, parts: &[(&'static str, f64)], template: &str) -> ProblemInput {
    let part = |&(id, points): &(&'static str, f64)| Part {
        id,
        points,
        kinds: &[DeliverableKind::Table, DeliverableKind::Written],
        question: "Measure attention over head sizes and sequence lengths, forward and backward, 100 times each; \
                   report times, or that memory ran out. How does the memory saved for `backward` change with $N$?",
    };
    ProblemInput {
        subfolder: "",
        handout: HandoutProblem {
            name: name.to_string().leak(),
            title: format!("Test problem {name}").leak(),
            section: "1.2.1",
            points: parts.iter().map(|p| p.1).sum(),
            parts: parts.iter().map(part).collect::<Vec<_>>().leak(),
        },
        answers: parts.iter().map(|p| p.0.to_string()).collect(),
        template: Some(template.into()),
        shared: shared(),
        answer: Answer::new(&json!({"sum": 4, "seconds": Quantity::constant(0.5, Unit::Seconds)})).unwrap(),
        records: measured(),
        fault: None,
    }
}

/// A shared text that templates include.
fn shared() -> Vec<(String, Result<String, String>)> {
    vec![("shared/sums.md".into(), Ok("Twice two is {{ answer.sum }}.".into()))]
}

fn measured() -> Records {
    Records { cpu: Some(records()), ..Records::default() }
}

type Timed = Case<Value, Value>;

/// The median of a pass in seconds; none where the case was not measured.
fn median(case: &Timed, pass: &str) -> Option<Quantity> {
    Some(case.median(&serde_json::from_value(case.row()?[pass].clone()).unwrap()))
}

/// The sample's quoted values, claims, tables and figures.
fn sample_answer() -> Answer {
    let set = records();
    let cases: Vec<Timed> = set.cases_as().unwrap();
    let case = cases.iter().find(|case| case.params == json!({"d": 64, "n": 1024})).unwrap();
    let (forward, backward) = (median(case, "forward").unwrap(), median(case, "backward").unwrap());
    let ended = |case: &&Timed| matches!(case.outcome, CaseOutcome::OutOfMemory { .. });
    let asked = Quantity::constant((8u64 << 30) as f64, Unit::Bytes);
    let quoted = json!({"source": set.source(), "forward": forward, "oom": cases.iter().filter(ended).count(),
        "cases": cases.len(), "asked": asked});
    let mut answer = Answer::new(&quoted).unwrap();
    let slower = backward.value() > forward.value();
    answer.claim(Claim::new("backward-slower", slower).operand("backward", &backward)).unwrap();
    answer.claim(Claim::all("sorted", "cases", 5, 5)).unwrap();
    answer.table("times", times(&cases)).unwrap();
    answer.figure("scaling", scaling(&cases)).unwrap();
    answer.figure("bars", bars()).unwrap();
    answer
}

fn times(cases: &[Timed]) -> Table {
    let ms = |head, digits| Column::number(head, Style::Ms, digits);
    let mut table = Table::new(vec![
        Column::right("d"),
        Column::right("N"),
        ms("forward (ms)", 2),
        ms("backward (ms)", 2),
        Column::number("memory (MiB)", Style::Mib, 1),
    ]);
    for case in cases {
        let [d, n] = ["d", "n"].map(|key| Cell::text(grouped(case.params[key].as_f64().unwrap(), 0)));
        let bytes = case.row().map(|row| case.quantity(row["saved_bytes"].as_f64().unwrap(), Unit::Bytes));
        let cell = |quantity: Option<Quantity>| quantity.map_or(case.outcome.label().into(), Cell::from);
        table.row(vec![d, n, cell(median(case, "forward")), cell(median(case, "backward")), cell(bytes)]);
    }
    table
}

fn scaling(cases: &[Timed]) -> Figure {
    let line = |pass: &str, d: i64| {
        let of_d = cases.iter().filter(|case| case.params["d"] == d);
        let point = |case: &Timed| (case.params["n"].as_f64().unwrap(), median(case, pass).map(|q| 1e3 * q.value()));
        Series::over_numbers(format!("{pass}, d = {d}"), of_d.map(point))
    };
    let lines = vec![line("forward", 16), line("backward", 16), line("forward", 64), line("backward", 64)];
    let mut plot = Plot::new(PlotKind::Line, "sequence length N (tokens)", "time (ms)", lines);
    (plot.log_x, plot.log_y) = (true, true);
    Figure::plot("Log-log plot of time against sequence length; all lines rise with slope two.", plot)
}

pub fn bars() -> Figure {
    let bar = |name, times: [Option<f64>; 3]| {
        Series::over_categories(name, ["small", "medium", "large"].into_iter().zip(times))
    };
    let forward = bar("forward", [Some(12.5), Some(40.1), Some(110.7)]);
    let backward = bar("backward", [Some(25.3), Some(81.9), None]);
    let plot = Plot::new(PlotKind::Bar, "model size", "time (ms)", vec![forward, backward]);
    let caption = "Forward and backward per size; a dash stands where nothing was measured. Made-up test data.";
    Figure::plot("Grouped bars: the largest size has no backward bar.", plot).captioned(caption)
}

/// A table that is longer than a page, and a claim.
fn long_answer() -> Answer {
    let mut answer = Answer::new(&json!({"sum": 4})).unwrap();
    answer.claim(Claim::new("sum", true).count("sum", 4)).unwrap();
    let number = |head, digits| Column::number(head, Style::Fixed, digits);
    let mut table = Table::new(vec![number("row", 0), number("first (ms)", 2), number("second (ms)", 1)]);
    for i in 0..70 {
        let i = f64::from(i);
        table.row([i, i * 1.37 + 0.5, i * i * 0.77].map(|x| Quantity::constant(x, Unit::One).into()).to_vec());
    }
    answer.table("long", table).unwrap();
    answer
}

pub fn document(problems: Vec<ProblemInput>) -> Document {
    Document {
        title: "Systems and Parallelism".into(),
        assignment: "A test document, made-up numbers".into(),
        summary: None,
        subject: None,
        problems,
    }
}

/// A problem of two parts with every feature.
pub fn attention(name: &str) -> ProblemInput {
    ProblemInput { answer: sample_answer(), ..problem(name, &[("a", 2.0), ("b", 3.0)], ATTENTION) }
}

/// A problem whose table is longer than a page.
pub fn long(name: &str) -> ProblemInput {
    ProblemInput { answer: long_answer(), ..problem(name, &[("", 4.0)], LONG) }
}

/// Every feature, followed by the handout's problems as unanswered ones.
pub fn full() -> Document {
    let mut problems = vec![attention("sample_attention"), long("sample_long")];
    problems.extend(HANDOUT.iter().map(|handout| ProblemInput { handout: *handout, ..ProblemInput::default() }));
    document(problems)
}

/// The document of the accepted records.
pub fn accepted() -> Document {
    let layout = Layout::at(Path::new(env!("CARGO_MANIFEST_DIR")).to_path_buf());
    cs336::cli::document::document(&layout, RecordSource::Accepted).unwrap()
}

pub fn render(template: &str) -> anyhow::Result<Rendered> {
    complete(&document(vec![whole(template)]))
}

/// The rendering, or its faults.
pub fn complete(document: &Document) -> anyhow::Result<Rendered> {
    report::render(document)?.complete()
}

/// A problem of one part, which `template` answers.
pub fn whole(template: &str) -> ProblemInput {
    problem("x", &[("", 4.0)], &format!("{{{{ part(\"\") }}}}\n\n{template}"))
}

/// A plain page, so that its text can be read back.
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
