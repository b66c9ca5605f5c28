//! Fuzz targets: data from outside is refused in one line, or read to a value that is written and read again alike.
//!
//! `make fuzz` runs each target of [`TARGETS`] under libFuzzer. `cargo test` replays the inputs of `suites/fuzz/<target>`.

#![cfg_attr(fuzzing, no_main)]

use std::cell::Cell;
use std::collections::BTreeMap;
use std::io::Write as _;
use std::os::unix::net::UnixStream;
use std::path::Path;

use anyhow::{Context as _, Error, Result, ensure};
use cs336::checks::golden::{self, CaseFile};
use cs336::cli::document::{RecordSource, problem_input, with_problems};
use cs336::harness::answer::{Audience, RecordSet, Records};
use cs336::harness::handout::by_name;
use cs336::harness::peer::read_reply;
use cs336::harness::problem::Problem;
use cs336::harness::record::{Profile, RecordFile};
use cs336::harness::store::Layout;
use cs336::harness::suite::{self, MAX_CASES};
use cs336::harness::worker::{Job, Reply};
use cs336::json;
use cs336::printable::printable;
use cs336::problems::REGISTRY;
use cs336::process::Lines;
use cs336::report::{self, Document, Rendered, html};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::Value;

/// Reads an input as the program reads such data. An error is a refusal; a panic, a hang and unbounded memory are faults.
type Target = fn(&[u8]) -> Result<()>;

const TARGETS: &[(&str, Target)] = &[
    ("suites", suites),
    ("records", records),
    ("cases", cases),
    ("templates", templates),
    ("safetensors", safetensors),
    ("lines", lines),
];

/// Runs `target`, and returns whether it accepted the input.
fn accepts(target: Target, input: &[u8]) -> bool {
    // As the command line prints it.
    let refusal = target(input).map_err(|error| printable(&format!("{error:#}")));
    if let Err(message) = &refusal {
        assert!(!message.is_empty() && !message.contains(char::is_control), "not one printable line: {message:?}");
    }
    refusal.is_ok()
}

fn text(input: &[u8]) -> Result<&str> {
    std::str::from_utf8(input).context("not UTF-8")
}

fn problem(name: &str) -> Option<&'static Problem> {
    REGISTRY.iter().find(|problem| problem.name == name)
}

/// A suite, of the problem that its first line names after a `#`.
fn suites(input: &[u8]) -> Result<()> {
    let text = text(input)?;
    let name = text.lines().next().and_then(|line| line.strip_prefix("# "));
    let measured = name.and_then(problem).and_then(|problem| problem.measured.as_ref());
    let canonical = |case: &Value, profile| measured.map_or(Ok(case.clone()), |it| (it.parse)(case, profile));
    for grid in suite::parse(text, "fuzz.toml", &canonical)?.grids {
        assert!((1..=MAX_CASES).contains(&grid.cases.len()), "{} cases", grid.cases.len());
        for case in &grid.cases {
            let again = canonical(case, grid.profile).expect("a canonical case is a case");
            assert_eq!(*case, again, "canonical parameters are their own canonical form");
            // `measure` computes these in its own process, not in a worker.
            if let Some(measured) = measured {
                let _ = (measured.predicted_bytes)(case, grid.profile);
                let _ = ((measured.kernels_of)(case), (measured.fresh_process)(case));
            }
        }
    }
    Ok(())
}

/// A record file, and the answer of its problem to it.
fn records(input: &[u8]) -> Result<()> {
    let file = RecordFile::parse(text(input)?, "fuzz.json")?;
    let written = file.to_json().expect("a record that was read can be written");
    let again = RecordFile::parse(&written, "fuzz.json").expect("a written record can be read");
    assert_eq!(again.to_json().unwrap(), written);
    let Some(problem) = problem(&file.problem) else { return Ok(()) };
    let profile = file.profile;
    let canonical = |params: &Value| (problem.measured.as_ref()?.parse)(params, profile).ok();
    let set = RecordSet { file: file.with_canonical_params(canonical)?, stale: BTreeMap::new() };
    let others = problem.reads.iter().map(|name| (name.to_string(), Records::default())).collect();
    let (cpu, gpu) = if profile == Profile::Cpu { (Some(set), None) } else { (None, Some(set)) };
    (problem.answer)(&Records { suite: None, cpu, gpu, others, unreadable: Vec::new() }, Audience::Ours).map(drop)
}

/// A golden case: a line of JSON as [`Header`] has it, then the tensors' bytes, which repeat where they are too few.
fn cases(input: &[u8]) -> Result<()> {
    let end = input.iter().position(|&byte| byte == b'\n').unwrap_or(input.len());
    let header: Header = serde_json::from_slice(&input[..end]).map_err(|_| Error::msg("not a header"))?;
    let data = if input[end..].len() > 1 { &input[end + 1..] } else { &[0] };
    let mut tensors = Vec::new();
    for (name, (dtype, shape)) in &header.tensors {
        let elements = shape.iter().try_fold(1_usize, |count, n| count.checked_mul(*n)).filter(|count| *count <= 4096);
        let length = elements.context("a file of this size is not fuzzed")? * dtype.bitsize().div_ceil(8);
        tensors.push((name, *dtype, shape.clone(), data.iter().copied().cycle().take(length).collect::<Vec<u8>>()));
    }
    let views =
        tensors.iter().map(|(name, dtype, shape, data)| Ok((name, TensorView::new(*dtype, shape.clone(), data)?)));
    let views = views.collect::<Result<Vec<_>, safetensors::SafeTensorError>>()?;
    let file = safetensors::serialize(views, Some(header.metadata.into_iter().collect()))?;
    let case = CaseFile::parse(&file, Path::new("fuzz.safetensors"))?;
    for comparison in golden::run(&case)? {
        assert!(!comparison.to_string().contains(char::is_control), "{comparison}");
    }
    Ok(())
}

/// Metadata, and the dtype and shape of each tensor by name.
#[derive(Deserialize)]
struct Header {
    metadata: BTreeMap<String, String>,
    tensors: BTreeMap<String, (Dtype, Vec<usize>)>,
}

/// The bytes of a case file; what `grade --cases` accepts means the same once the safetensors crate has written it again.
fn safetensors(input: &[u8]) -> Result<()> {
    let case = CaseFile::parse(input, Path::new("fuzz.safetensors"))?;
    let views = SafeTensors::deserialize(input)?;
    let written = safetensors::serialize(views.tensors(), Some(case.metadata.clone().into_iter().collect()))?;
    let again = CaseFile::parse(&written, Path::new("fuzz.safetensors")).expect("a written case can be read");
    assert_eq!(again.metadata, case.metadata);
    assert!(again.tensors.keys().eq(case.tensors.keys()));
    for (name, tensor) in &case.tensors {
        let bits = |tensor: &tch::Tensor| tensor.contiguous().flatten(0, -1).view_dtype(tch::Kind::Uint8);
        assert!(bits(tensor).equal(&bits(&again.tensors[name])), "{name} has changed");
    }
    Ok(())
}

thread_local! {
    /// A problem with accepted records, for which templates are made.
    static DOCUMENT: Cell<Option<Document>> = const { Cell::new(None) };
}

/// A template of `mixed_precision_accumulation`, rendered to Markdown, typst's source and HTML.
fn templates(input: &[u8]) -> Result<()> {
    let template = text(input)?.to_string();
    let mut document = DOCUMENT.take().unwrap_or_else(|| {
        let layout = Layout::at(Path::new(env!("CARGO_MANIFEST_DIR")).into());
        let handout = by_name("mixed_precision_accumulation").unwrap();
        with_problems(vec![problem_input(&layout, handout, RecordSource::Accepted)])
    });
    document.problems[0].template = Some(template);
    let rendered = report::render(&document).and_then(Rendered::complete).and_then(|rendered| {
        let page = html::page(&document, &rendered)?;
        Ok((rendered.markdown, rendered.typst, page))
    });
    if let Ok((markdown, typst, _)) = &rendered {
        let again = report::render(&document).expect("a template that was rendered can be rendered");
        assert!((markdown, typst) == (&again.markdown, &again.typst), "two renderings differ");
    }
    DOCUMENT.set(Some(document));
    rendered.map(drop)
}

/// What arrives from a worker or a peer: lines, whole and alike however they are cut, each a job, a reply or a refusal.
fn lines(input: &[u8]) -> Result<()> {
    let (ours, mut theirs) = UnixStream::pair()?;
    let (mut received, mut found) = (Lines::new(ours)?, Vec::new());
    let cut = input.first().map_or(1, |&byte| 1 + usize::from(byte));
    for part in input.chunks(cut).chain([&b"\n"[..]]) {
        theirs.write_all(part)?;
        received.transfer();
        found.extend(std::iter::from_fn(|| received.next_line()));
    }
    let expected: Vec<_> = input.split(|&byte| byte == b'\n').map(String::from_utf8_lossy).collect();
    assert_eq!(found, expected);
    found.iter().try_for_each(|line| message(line))
}

fn message(line: &str) -> Result<()> {
    ensure!(!line.is_empty(), "an empty line");
    let Err(error) = round_trip::<Job>(line).or_else(|_| round_trip::<Reply>(line)) else { return Ok(()) };
    let Ok(value) = serde_json::from_str::<Value>(line) else { return Err(error) };
    read_reply(&value, 1).map(drop)
}

/// Reads a message, which must become the same one when it is written and read again.
fn round_trip<T: Serialize + DeserializeOwned + PartialEq + std::fmt::Debug>(line: &str) -> Result<()> {
    let message: T = json::from_str(line)?;
    let written = serde_json::to_string(&message).expect("a message that was read can be written");
    assert!(!written.contains('\n'), "a message is one line");
    assert_eq!(serde_json::from_str::<T>(&written).expect("a written message can be read"), message);
    Ok(())
}

#[cfg(fuzzing)]
libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    static CHOSEN: std::sync::OnceLock<Target> = std::sync::OnceLock::new();
    let target = CHOSEN.get_or_init(|| {
        tch::set_num_threads(1);
        let name = std::env::var("CS336_FUZZ").expect("CS336_FUZZ names a target");
        TARGETS.iter().find(|(known, _)| *known == name).expect("CS336_FUZZ names a target").1
    });
    accepts(*target, input);
});

/// Replays the committed inputs. Of each target some must be accepted and some refused, or it would test little.
#[cfg(not(fuzzing))]
fn main() -> std::process::ExitCode {
    use libtest_mimic::{Arguments, Trial, run};
    let replay = |name: &str, target| {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("suites/fuzz").join(name);
        let inputs = std::fs::read_dir(folder)?.map(|entry| std::fs::read(entry?.path()));
        let inputs = inputs.collect::<std::io::Result<Vec<_>>>()?;
        let accepted = inputs.iter().filter(|input| accepts(target, input)).count();
        let counts = format!("{accepted} of {} inputs were accepted", inputs.len());
        if accepted == 0 || accepted == inputs.len() { Err(counts.into()) } else { Ok(()) }
    };
    let trials = TARGETS.iter().map(|&(name, target)| Trial::test(name, move || replay(name, target)));
    run(&Arguments::from_args(), trials.collect()).exit_code()
}
