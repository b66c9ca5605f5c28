//! The inputs of the write-up: the handout's questions, templates, records and answers, read from a checkout.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};

use anyhow::{Result, anyhow, bail};

use crate::harness::answer::machines::leave_out_others;
use crate::harness::answer::{Answer, Audience, RecordSet, Records};
use crate::harness::drift::require_same_bounds;
use crate::harness::handout::{HANDOUT, HandoutProblem};
use crate::harness::manifest::restoring;
use crate::harness::plan::{leave_out_other_code, staleness};
use crate::harness::problem::Problem;
use crate::harness::record::{Profile, RecordFile};
use crate::harness::store::Layout;
use crate::harness::subject::Subject;
use crate::harness::suite::{self, Suite};
use crate::harness::worker::panic_message;
use crate::problems::{REGISTRY, SUBJECT_CHECKS, SUBJECT_PROBLEMS};
use crate::report::{self, Document, ProblemInput};
use crate::root::read_text;

/// The records that a document is made from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RecordSource {
    /// Only the accepted records, which every clone has.
    Accepted,
    /// This machine's own records where they cover the suite, else the accepted ones.
    Here,
}

/// The inputs of the whole write-up.
pub fn document(layout: &Layout, source: RecordSource) -> Result<Document> {
    if let Some(subject) = &layout.subject {
        return subject_document(layout, subject);
    }
    let problems = HANDOUT.iter().map(|problem| problem_input(layout, problem, source)).collect();
    let summary = Some(template_text(layout, "templates/summary.md"));
    Ok(Document { summary, ..with_problems(problems) })
}

/// The report on a subject: the problems that measure its code, and why the others are not in it.
fn subject_document(layout: &Layout, subject: &Subject) -> Result<Document> {
    let input = |(entry, _): &(Problem, _)| {
        let handout = *super::handout_problem(entry.name)?;
        let mut input = ProblemInput { handout, ..ProblemInput::default() };
        input.answers = entry.answers.iter().map(|part| part.to_string()).collect();
        input.fault = read(layout, entry, RecordSource::Here, &mut input).err().map(|error| format!("{error:#}"));
        Ok(input)
    };
    let problems = SUBJECT_PROBLEMS.iter().map(input).collect::<Result<_>>()?;
    let summary = template_text(layout, "templates/subject/summary.md").map(|text| text + &absent_problems());
    Ok(Document { summary: Some(summary), subject: Some(subject.name()), ..with_problems(problems) })
}

/// The problems of which a subject's report has nothing, with the reason.
fn absent_problems() -> String {
    let reason = |problem: &HandoutProblem| {
        let graded = SUBJECT_CHECKS.iter().copied().flatten().any(|check| check.problem == problem.name);
        match graded {
            true => "it is graded, not measured: `cs336 grade --subject`",
            false => "the starter code has no adapter for it: nothing of theirs can be called",
        }
    };
    let is_measured = |problem: &&HandoutProblem| SUBJECT_PROBLEMS.iter().any(|(entry, _)| entry.name == problem.name);
    let mut by_reason: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for problem in HANDOUT.iter().filter(|problem| !is_measured(problem)) {
        by_reason.entry(reason(problem)).or_default().push(format!("`{}`", problem.name));
    }
    let rows = by_reason.iter().map(|(reason, names)| format!("| {} | {reason} |\n", names.join(", ")));
    format!(
        "\n| Problem | Reason |\n|:---|:---|\n{}\nTable: Problems of the handout without an answer of theirs.\n",
        rows.collect::<String>()
    )
}

/// A document without a summary.
pub fn with_problems(problems: Vec<ProblemInput>) -> Document {
    Document {
        title: "Systems and Parallelism".into(),
        assignment: "Stanford CS336, Assignment 2, Spring 2025 (handout 1.0.4)".into(),
        summary: None,
        subject: None,
        problems,
    }
}

/// One problem's inputs; what cannot be had is its fault, which stops no other problem.
pub fn problem_input(layout: &Layout, problem: &HandoutProblem, source: RecordSource) -> ProblemInput {
    let mut input = ProblemInput { handout: *problem, ..ProblemInput::default() };
    if let Some(entry) = super::entry(problem) {
        input.answers = entry.answers.iter().map(|part| part.to_string()).collect();
        input.fault = read(layout, entry, source, &mut input).err().map(|error| format!("{error:#}"));
    }
    input
}

fn read(layout: &Layout, entry: &Problem, source: RecordSource, input: &mut ProblemInput) -> Result<()> {
    input.records = answer_records(layout, entry, source)?;
    input.subfolder = if layout.subject.is_some() { "subject/" } else { "" };
    let path = report::template::origin(input);
    input.template = Some(template_text(layout, &path).map_err(|why| anyhow!("{why}"))?);
    input.shared = shared_templates(layout);
    let of = layout.subject.as_ref().map_or(String::new(), Subject::argument);
    let measured = std::iter::once(entry.name).filter(|_| entry.measured.is_some()).chain(entry.reads.iter().copied());
    let remedy = format!(
        "Measure what is missing or failed: `cs336 measure {} --resume{of}`, for a GPU's records with `--profile gpu` there",
        measured.collect::<Vec<_>>().join(" ")
    );
    input.answer = answer(entry, &input.records).map_err(|error| anyhow!("{error:#}. {remedy}"))?;
    Ok(())
}

/// The problem's answer; a panic of its code is an error too.
pub fn answer(entry: &Problem, records: &Records) -> Result<Answer> {
    let answer = || (entry.answer)(records, Audience::Ours);
    let answer = catch_unwind(AssertUnwindSafe(answer));
    answer.unwrap_or_else(|panic| bail!("its code panicked: {}", panic_message(panic.as_ref())))
}

/// The records that a problem's answer reads: its own, and those of the problems in `reads`.
pub fn answer_records(layout: &Layout, problem: &Problem, source: RecordSource) -> Result<Records> {
    let other = |name: &&str| Ok((name.to_string(), own_records(layout, super::registered(name)?, source)?));
    let others = problem.reads.iter().map(other).collect::<Result<_>>()?;
    Ok(Records { others, ..own_records(layout, problem, source)? })
}

fn own_records(layout: &Layout, problem: &Problem, source: RecordSource) -> Result<Records> {
    let Some(suite) = suite::load(&layout.root, problem)? else { return Ok(Records::default()) };
    let mut unreadable = Vec::new();
    let mut of = |profile| records(layout, problem, &suite, profile, source, &mut unreadable);
    let (cpu, gpu) = (of(Profile::Cpu)?, of(Profile::Gpu)?);
    Ok(Records { suite: Some(suite), cpu, gpu, unreadable, ..Records::default() })
}

/// The records to print, from one file, so that a column never mixes two machines.
fn records(
    layout: &Layout,
    problem: &Problem,
    suite: &Suite,
    profile: Profile,
    source: RecordSource,
    unreadable: &mut Vec<String>,
) -> Result<Option<RecordSet>> {
    // If this machine could run none of the cases, its records must not replace the accepted ones.
    let ran = |file: &RecordFile| file.cases.iter().any(|case| !case.outcome.is_not_run());
    let covers = |file: &RecordFile| ran(file) && suite.cases(profile).all(|(_, params)| file.case(params).is_some());
    let accepted = layout.read_accepted(profile, problem);
    let local = (source == RecordSource::Here).then(|| local_file(layout, problem, profile, &accepted, unreadable));
    let of = layout.subject.as_ref().map_or(String::new(), Subject::argument);
    let again = format!("measure all on one: `cs336 measure {} --profile {profile} --resume{of}`", problem.name);
    let is_used = |file: &RecordFile| layout.subject.is_some() || covers(file);
    let mut local = local.flatten().filter(is_used);
    if let Some(file) = &mut local {
        if let Some(subject) = &layout.subject {
            let left_out = leave_out_other_code(file, subject)?;
            unreadable.extend(
                left_out.map(|left_out| format!("{left_out}: run `cs336 measure {} --resume{of}`", problem.name)),
            );
        }
        let left_out = leave_out_others(file);
        let instead = if is_used(file) { "" } else { from_accepted(&accepted) };
        unreadable.extend(left_out.map(|left_out| format!("{left_out}; {again}{instead}")));
    }
    let file = match local.filter(is_used) {
        Some(file) => {
            // Then nothing else tells what bounds the times of this file.
            let instead = "This answer is from the records of this machine, whose times nothing accepted bounds";
            unreadable.extend(accepted.err().map(|error| format!("{error:#}. {instead}")));
            Some(file)
        }
        None => {
            let mut file = accepted?;
            unreadable.extend(file.as_mut().and_then(leave_out_others).map(|left_out| format!("{left_out}; {again}")));
            file
        }
    };
    let Some(file) = file.filter(|file| layout.subject.is_none() || !file.cases.is_empty()) else { return Ok(None) };
    let why_stale = staleness(layout, problem, suite, profile)?;
    let stale = file.cases.iter().enumerate().filter_map(|(at, case)| Some((at, why_stale(&file, case)?))).collect();
    Ok(Some(RecordSet { file, stale }))
}

/// This machine's own record; none where it cannot be used, which `unreadable` then says.
fn local_file(
    layout: &Layout,
    problem: &Problem,
    profile: Profile,
    accepted: &Result<Option<RecordFile>>,
    unreadable: &mut Vec<String>,
) -> Option<RecordFile> {
    let read = || -> Result<Option<RecordFile>> {
        let Some(local) = layout.read_local(profile, problem)? else { return Ok(None) };
        if let Ok(Some(accepted)) = accepted {
            require_same_bounds(&local, accepted)?;
        }
        Ok(Some(local))
    };
    read().unwrap_or_else(|error| {
        unreadable.push(format!("{}{}", format!("{error:#}").trim_end_matches('.'), from_accepted(accepted)));
        None
    })
}

fn from_accepted(accepted: &Result<Option<RecordFile>>) -> &'static str {
    if matches!(accepted, Ok(Some(_))) { ". This answer is from the accepted records" } else { "" }
}

/// Each registered problem's Markdown, rendered from the accepted records, or why it is not whole. The drift gate compares it.
pub fn accepted_markdown(layout: &Layout) -> impl Iterator<Item = (&'static str, Result<String>)> {
    REGISTRY.iter().map(|entry| {
        let markdown = || {
            let input = problem_input(layout, super::handout_problem(entry.name)?, RecordSource::Accepted);
            Ok(report::render(&with_problems(vec![input]))?.complete()?.markdown)
        };
        (entry.name, markdown())
    })
}

/// The text of a template by its path in the tree, or why there is none, and the remedy.
fn template_text(layout: &Layout, path: &str) -> Result<String, String> {
    read_text(&layout.root.join(path)).map_err(|error| {
        let restored = restoring(&layout.root, path);
        format!("failed to read {path}: {error}. Restore it: {restored}")
    })
}

/// The texts that templates may include, by name: "shared/x.md" is `templates/shared/x.md`. Editors keep other files beside
/// those that they edit, whose names begin with a dot or end otherwise.
fn shared_templates(layout: &Layout) -> Vec<(String, Result<String, String>)> {
    // The folder may be missing.
    let entries = std::fs::read_dir(layout.root.join("templates").join("shared")).into_iter().flatten().flatten();
    let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    let mut names: Vec<_> = names.filter(|name| !name.starts_with('.') && name.ends_with(".md")).collect();
    names.sort();
    let text = |name: String| (format!("shared/{name}"), template_text(layout, &format!("templates/shared/{name}")));
    names.into_iter().map(text).collect()
}
