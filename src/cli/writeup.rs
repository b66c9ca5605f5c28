//! `cs336 writeup`: measure what is missing, render every answer, build the PDF; and the drift gate over committed records.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};

use super::{Ended, measure, profile_or_default};
use crate::harness::answer::{Answer, Audience, RecordSet, Records};
use crate::harness::grade::Evidence;
use crate::harness::handout::{HANDOUT, HandoutProblem};
use crate::harness::plan::{Scope, staleness};
use crate::harness::problem::Problem;
use crate::harness::record::{Outcome, Profile, RecordFile};
use crate::harness::store::Layout;
use crate::harness::suite::{self, Suite};
use crate::problems::REGISTRY;
use crate::report::{self, Document, PartInput, ProblemInput, ReadRecords};

#[derive(clap::Args)]
pub struct Arguments {
    /// Render from snapshots/ alone and compare with snapshots/rendered; measures and writes nothing
    #[arg(long, conflicts_with_all = ["fresh", "no_measure"])]
    check: bool,
    /// Fail unless report/writeup.pdf is exactly what the records give now; measures and writes nothing
    #[arg(long, conflicts_with = "no_measure")]
    fresh: bool,
    /// Render what is recorded and measure nothing
    #[arg(long)]
    no_measure: bool,
    /// Which grids to measure; gpu by default where there is one
    #[arg(long, value_enum)]
    profile: Option<Profile>,
}

/// Which records a document is made from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// The accepted ones alone: what every clone has.
    Accepted,
    /// This machine's own where they cover the suite, the accepted ones elsewhere.
    Here,
}

pub fn run(layout: &Layout, arguments: &Arguments) -> Result<Ended> {
    if arguments.check {
        return check(layout);
    }
    let measures = !(arguments.fresh || arguments.no_measure);
    if measures {
        let problems: Vec<&'static Problem> = REGISTRY.iter().collect();
        let profile = profile_or_default(arguments.profile);
        let limits = measure::Limits { case: Duration::from_secs(600), budget: None };
        if measure::measure(layout, &problems, profile, Scope::Outdated, limits)?.tally.interrupted {
            return Ok(Ended::Interrupted);
        }
    }
    let document = document(layout, Source::Here)?;
    let rendered = report::render(&document)?;
    let path = layout.report().join("writeup.typ");
    let frame = std::fs::read_to_string(&path).with_context(|| format!("failed to read {}", layout.display(&path)))?;
    let pdf = report::pdf(&rendered, &frame)?;
    if arguments.fresh {
        let mut records = document.problems.iter().flat_map(|p| p.records.sets().map(|r| (&p.name, r.stale.len())));
        let stale = records.find(|(_, stale)| *stale > 0);
        if let Some((name, count)) = stale {
            bail!("{count} cases of {name} are stale: run `make writeup`, look at it, and try again");
        }
        let old = std::fs::read(layout.report().join("writeup.pdf")).unwrap_or_default();
        ensure!(old == pdf, "report/writeup.pdf is missing or stale: run `make writeup`, look at it, and try again");
        return Ok(Ended::Well);
    }
    report::write(&layout.report(), &rendered, Some(&pdf))?;
    let points: f64 = rendered.answered.iter().map(|a| a.points).sum();
    println!(
        "report/writeup.pdf and report/writeup.md are ready: {} points answered, {} claims hold",
        crate::harness::grade::points(points),
        rendered.claims.iter().filter(|c| c.held).count()
    );
    Ok(Ended::Well)
}

/// The whole write-up's ingredients.
pub fn document(layout: &Layout, source: Source) -> Result<Document> {
    let problems = HANDOUT.iter().map(|problem| problem_input(layout, problem, source)).collect::<Result<_>>()?;
    Ok(with_problems(problems))
}

fn with_problems(problems: Vec<ProblemInput>) -> Document {
    Document {
        title: "Systems and Parallelism".into(),
        assignment: "Stanford CS336, Assignment 2, Spring 2025 (handout 1.0.4)".into(),
        problems,
    }
}

fn problem_input(layout: &Layout, problem: &HandoutProblem, source: Source) -> Result<ProblemInput> {
    let entry = REGISTRY.iter().find(|entry| entry.name == problem.name);
    let template = match entry {
        Some(_) => {
            let path = layout.root.join("templates").join(format!("{}.md", problem.name));
            let text = std::fs::read_to_string(&path);
            Some(text.with_context(|| format!("failed to read templates/{}.md, which answers it", problem.name))?)
        }
        None => None,
    };
    let records = entry.map(|e| answer_records(layout, e, source)).transpose()?.unwrap_or_default();
    let answer = match entry {
        Some(entry) => (entry.answer)(&records, Audience::Ours).with_context(|| format!("answering {}", entry.name))?,
        None => Answer::default(),
    };
    let facts = entry.map(|e| (e.facts)().with_context(|| format!("the facts of {}", e.name))).transpose()?;
    let part = |part: &crate::harness::handout::Part| PartInput {
        id: part.id.into(),
        points: part.points,
        kinds: part.kinds.iter().map(|k| k.name().to_string()).collect(),
        question: part.question.into(),
    };
    Ok(ProblemInput {
        name: problem.name.into(),
        title: problem.title.into(),
        section: problem.section.into(),
        points: problem.points,
        parts: problem.parts.iter().map(part).collect(),
        answers: entry.map(|e| e.answers.iter().map(|a| a.to_string()).collect()).unwrap_or_default(),
        template,
        shared: shared_templates(layout)?,
        facts: facts.unwrap_or_default(),
        answer,
        records,
        other_records: other_records(layout, source),
    })
}

/// What a problem's answer reads: its own records and those of the problems that it names.
fn answer_records(layout: &Layout, problem: &Problem, source: Source) -> Result<Records> {
    let other = |name: &&str| Ok((name.to_string(), own_records(layout, super::registered(name)?, source)?));
    let others = problem.reads.iter().map(other).collect::<Result<_>>()?;
    Ok(Records { others, ..own_records(layout, problem, source)? })
}

fn own_records(layout: &Layout, problem: &Problem, source: Source) -> Result<Records> {
    let Some(suite) = suite::load(&layout.root, problem)? else { return Ok(Records::default()) };
    let of = |profile| records(layout, problem, &suite, profile, source);
    let (cpu, gpu) = (of(Profile::Cpu)?, of(Profile::Gpu)?);
    Ok(Records { suite: Some(suite), cpu, gpu, ..Records::default() })
}

/// What answers a template's `records("<name>")`.
fn other_records(layout: &Layout, source: Source) -> ReadRecords {
    let layout = layout.clone();
    Arc::new(move |name| own_records(&layout, super::registered(name)?, source))
}

/// The records to print: one file, so that figures of two machines never share a column.
fn records(
    layout: &Layout,
    problem: &Problem,
    suite: &Suite,
    profile: Profile,
    source: Source,
) -> Result<Option<RecordSet>> {
    let covers = |file: &RecordFile| suite.cases(profile).all(|(_, params)| file.case(params).is_some());
    let local = match source {
        Source::Here => layout.read_local(profile, problem.name)?.filter(covers),
        Source::Accepted => None,
    };
    let file = match local {
        Some(file) => Some(file),
        None => layout.read_accepted(profile, problem.name)?,
    };
    let Some(file) = file else { return Ok(None) };
    let mut stale = BTreeMap::new();
    for (at, case) in file.cases.iter().enumerate() {
        stale.extend(staleness(layout, problem, suite, &file, case)?.map(|why| (at, why)));
    }
    Ok(Some(RecordSet { file, stale }))
}

/// What a problem's written answer rests on, for grading.
pub fn evidence(layout: &Layout, problem: &'static Problem) -> Result<Evidence> {
    let handout = super::handout_problem(problem.name)?;
    let input = problem_input(layout, handout, Source::Here)?;
    let records_missing = input.records.suite.as_ref().and_then(|suite| missing(suite, &input, problem.name));
    let answer_broken =
        report::render(&with_problems(vec![input])).err().map(|e| format!("its answer does not render: {e:#}"));
    Ok(Evidence { records_missing, answer_broken })
}

/// What the accepted records of a GPU do not vouch for as things stand, where the suite wants any: nobody has run it, or
/// what ran has changed since.
pub fn unattested(layout: &Layout, problem: &'static Problem) -> Result<Option<String>> {
    let Some(suite) = suite::load(&layout.root, problem)? else { return Ok(None) };
    let wanted = suite.cases(Profile::Gpu).count();
    if wanted == 0 {
        return Ok(None);
    }
    let Some(file) = layout.read_accepted(Profile::Gpu, problem.name)? else {
        return Ok(Some(format!("unattested: no GPU's records of its {wanted} cases are accepted")));
    };
    let (mut fresh, mut reason) = (0, None);
    for (_, params) in suite.cases(Profile::Gpu) {
        match file.case(params).map(|case| staleness(layout, problem, &suite, &file, case)).transpose()? {
            Some(None) => fresh += 1,
            Some(stale) => reason = reason.or(stale),
            None => reason = reason.or(Some("it was not measured".into())),
        }
    }
    let words =
        |reason| format!("unattested: {} of {wanted} cases of a GPU's accepted records; {reason}", wanted - fresh);
    Ok(reason.map(words))
}

fn missing(suite: &Suite, input: &ProblemInput, name: &str) -> Option<String> {
    let covered = |profile: Profile, records: &Option<RecordSet>| {
        let Some(records) = records else { return false };
        let fine = |c: &crate::harness::record::CaseRecord| !matches!(c.outcome, Outcome::Failed { .. });
        records.stale.is_empty() && suite.cases(profile).all(|(_, params)| records.file.case(params).is_some_and(fine))
    };
    let any = covered(Profile::Gpu, &input.records.gpu) || covered(Profile::Cpu, &input.records.cpu);
    (!any).then(|| format!("no complete, fresh records without failures: run `cs336 measure {name} --resume`"))
}

/// The Markdown of each registered problem as the accepted records give it: what the drift gate compares.
pub fn accepted_markdown(layout: &Layout) -> Result<Vec<(&'static str, String)>> {
    let render = |entry: &'static Problem| {
        let handout = super::handout_problem(entry.name)?;
        let input = problem_input(layout, handout, Source::Accepted)?;
        let rendered = report::render(&with_problems(vec![input]))?;
        Ok((entry.name, rendered.markdown))
    };
    REGISTRY.iter().map(render).collect()
}

/// Where a problem's rendered text is kept.
pub fn rendered_path(layout: &Layout, name: &str) -> PathBuf {
    layout.root.join("snapshots").join("rendered").join(format!("{name}.snap"))
}

fn check(layout: &Layout) -> Result<Ended> {
    for problem in REGISTRY {
        if let Some(words) = unattested(layout, problem)? {
            println!("{}: {words}", problem.name);
        }
    }
    let mut drifted = 0;
    for (name, markdown) in accepted_markdown(layout)? {
        let path = rendered_path(layout, name);
        let stored =
            std::fs::read_to_string(&path).with_context(|| format!("failed to read {}", layout.display(&path)))?;
        let stored = snapshot_body(&stored).with_context(|| format!("{} is no snapshot", layout.display(&path)))?;
        if let Some((number, old, new)) = first_difference(stored, &markdown) {
            println!("{name}: drifted from {} at line {number}\n  - {old}\n  + {new}", layout.display(&path));
            drifted += 1;
        }
    }
    if drifted > 0 {
        bail!(
            "{drifted} of {} answers drifted; look, then `INSTA_UPDATE=always cargo test --test drift`",
            REGISTRY.len()
        );
    }
    println!("{} answers render from snapshots/ as committed", REGISTRY.len());
    Ok(Ended::Well)
}

/// The text of an insta snapshot file, without its header.
fn snapshot_body(file: &str) -> Option<&str> {
    let rest = file.strip_prefix("---\n")?;
    rest.split_once("\n---\n").map(|(_, body)| body)
}

fn first_difference<'a>(old: &'a str, new: &'a str) -> Option<(usize, &'a str, &'a str)> {
    let (old, new) = (old.trim(), new.trim());
    let (mut a, mut b) = (old.lines(), new.lines());
    for number in 1.. {
        match (a.next(), b.next()) {
            (None, None) => return None,
            (x, y) if x == y => {}
            (x, y) => return Some((number, x.unwrap_or("(end)"), y.unwrap_or("(end)"))),
        }
    }
    None
}

/// What templates may import, by name: "shared/x.md" is `templates/shared/x.md`.
fn shared_templates(layout: &Layout) -> Result<Vec<(String, String)>> {
    let folder = layout.root.join("templates").join("shared");
    let mut texts = Vec::new();
    // A tree without shared macros is as good.
    for entry in std::fs::read_dir(folder).into_iter().flatten() {
        let name = format!("shared/{}", entry?.file_name().to_string_lossy());
        let text = std::fs::read_to_string(layout.root.join("templates").join(&name));
        texts.push((name.clone(), text.with_context(|| format!("failed to read templates/{name}"))?));
    }
    texts.sort();
    Ok(texts)
}
