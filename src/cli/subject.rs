//! `cs336 grade --subject`: somebody else's adapters, put to the checks of the problems that they answer.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context as _, Result, bail, ensure};

use super::install::install;
use super::{entry, handout_problem, interrupted};
use crate::error::NotGraded;
use crate::harness::case::Runner;
use crate::harness::grade::{CheckResult, CheckStatus, ProblemGrade, grade};
use crate::harness::handout::HandoutProblem;
use crate::harness::problem::{Problem, Verdict};
use crate::harness::store::Layout;
use crate::harness::subject::{MORE_MEMORY, Subject, SubjectCheck, drawn_seed};
use crate::harness::worker::Worker;
use crate::printable::{indented, shown_path};
use crate::problems::{SUBJECT_CHECKS, SUBJECT_PROBLEMS};
use crate::process::{confinement, oom_kills};
use crate::root::owners_folder;
use crate::subject::{attention, require_hidden, unavailable, words_of};
use crate::units::GIB;

const LIMIT_S: u64 = 60;
const MEMORY_GIB: u64 = 16;

#[derive(clap::Args)]
pub struct SubjectArguments {
    /// Take the code in this checkout of the starter code, or any folder with its adapters.py, instead of this program's own
    #[arg(long, value_name = "DIR")]
    pub subject: Option<PathBuf>,
    /// First make each subject's .venv from its pyproject.toml, with uv if it is there, else pip; each command has an hour and is
    /// not confined
    #[arg(long)]
    install: bool,
    /// Of a subject: the most seconds that one call of an adapter may take
    #[arg(long, value_name = "SECONDS", default_value_t = LIMIT_S, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    limit: u64,
    /// Of a subject: the most memory that each of its processes may have, in GiB
    #[arg(long, value_name = "GIB", default_value_t = MEMORY_GIB, value_parser = clap::value_parser!(u64).range(1..=65_536))]
    memory: u64,
    /// Of a subject: the seed that its inputs are drawn from; another one each time by default
    #[arg(long, value_parser = clap::value_parser!(i64).range(0..))]
    seed: Option<i64>,
}

impl SubjectArguments {
    /// The limits and the seed that were given, as the arguments of a command that goes on with the same subject.
    pub fn repeated(&self) -> String {
        let mut arguments = String::new();
        if self.limit != LIMIT_S {
            arguments += &format!(" --limit {}", self.limit);
        }
        if self.memory != MEMORY_GIB {
            arguments += &format!(" --memory {}", self.memory);
        }
        arguments + &self.seed.map_or(String::new(), |seed| format!(" --seed {seed}"))
    }

    /// Errors: an option about subjects, and none is named.
    pub fn require_named(&self) -> Result<()> {
        let given = [
            ("--install", self.install),
            ("--limit", self.limit != LIMIT_S),
            ("--memory", self.memory != MEMORY_GIB),
            ("--seed", self.seed.is_some()),
        ];
        let misplaced = given.iter().find(|(_, is_given)| *is_given && self.subject.is_none());
        misplaced.map_or(Ok(()), |(option, _)| bail!("{option} is about a subject: use it with --subject"))
    }

    /// The tree of the subject that is named, else of ours.
    pub fn layout(&self, layout: &Layout) -> Result<Layout> {
        self.require_named()?;
        let subject = self.subject.as_ref().map(|folder| self.find(folder, None, None)).transpose()?;
        Ok(subject.map_or_else(|| layout.clone(), |subject| layout.of_subject(&subject)))
    }

    /// The subject in `folder`, whose links are its owner's, ours, root's or `maker`'s. `cases` must not lie where it can read, since
    /// it could read what they expect.
    pub fn find(&self, folder: &Path, cases: Option<&Path>, maker: Option<u32>) -> Result<Subject> {
        let real = owners_folder(folder, maker)?;
        require_tree_outside(folder)?;
        if self.install {
            install(folder)?;
        }
        let seed = self.seed.map_or_else(drawn_seed, Ok)?;
        let subject = Subject::find(folder, self.limit, self.memory * GIB as u64, seed)?;
        ensure!(
            subject.folder == real,
            "the subject {} leads to another folder now: grade it again",
            shown_path(folder)
        );
        if let Some(cases) = cases {
            require_hidden(&subject, cases, &Layout::find()?.root.join("suites"))?;
        }
        Ok(subject)
    }
}

/// Errors: the tree of this program is the subject's folder or lies in it, as where the program is started in a submission with
/// `suites/` and `templates/` of its own. What runs from there would be the subject's, unconfined.
pub fn require_tree_outside(subject: &Path) -> Result<()> {
    let root = Layout::find()?.root;
    let is_in = |real: PathBuf| root.canonicalize().is_ok_and(|root| root.starts_with(real));
    ensure!(
        !subject.canonicalize().is_ok_and(is_in),
        "the tree {} lies in the subject {}: start cs336 in another folder, or set CS336_ROOT",
        shown_path(&root),
        shown_path(subject)
    );
    Ok(())
}

/// In what conditions a subject is graded, for people: its Python, the seed, and whether the kernel confines it.
pub fn conditions(subject: &Subject) -> String {
    let confined = match confinement::lacks() {
        None => "confined to its folder".to_string(),
        Some(lacks) => format!("NOT CONFINED: {lacks}"),
    };
    format!("{} (seed {}, {confined})", shown_path(&subject.python), subject.seed)
}

/// The problems that a subject can be graded on: those named, or all that have adapters.
pub fn problems(names: &[String]) -> Result<Vec<&'static HandoutProblem>> {
    let known = || SUBJECT_CHECKS.iter().filter_map(|checks| checks.first()).map(|check| check.problem);
    if names.is_empty() {
        return known().map(handout_problem).collect();
    }
    let chosen = super::once_each(names).map(|name| {
        let problem = handout_problem(name)?;
        let all = || known().collect::<Vec<_>>().join(", ");
        ensure!(
            known().any(|known| known == problem.name),
            "{name} has no adapter, so no subject; adapters have {}",
            all()
        );
        Ok(problem)
    });
    chosen.collect()
}

/// Grades `subject` on one problem after the other; `None` when interrupted.
///
/// Errors: this program or its machine fails, for which the subject is not to blame.
pub fn grades(
    layout: &Layout,
    subject: &Subject,
    problems: &[&'static HandoutProblem],
    only: &[String],
    mut graded: impl FnMut(&ProblemGrade),
) -> Result<Option<Vec<ProblemGrade>>> {
    let (runner, mut worker) = (Runner::new(layout, &interrupted), Worker::new(layout));
    let mut grades = Vec::new();
    for problem in problems {
        let mut results = Vec::new();
        for check in checks().filter(|check| check.problem == problem.name) {
            let started = Instant::now();
            let is_asked = only.is_empty() || only.iter().any(|name| name == check.name);
            let ending = if is_asked {
                let ending = runner.subject_check(&mut worker, subject, check).context("not graded")?;
                let Some(ending) = ending else { return Ok(None) };
                ending
            } else {
                CheckStatus::Skipped { reason: "--check leaves it out".into() }
            };
            let elapsed_s = started.elapsed().as_secs_f64();
            results.push(CheckResult { name: check.name, part: check.part, ending, elapsed_s });
        }
        let grade = grade(problem, entry(problem), &results, &[]);
        graded(&grade);
        grades.push(grade);
    }
    Ok(Some(grades))
}

/// Errors: no problem has a check of one of these names.
pub fn require_checks(names: &[String], problems: &[&HandoutProblem]) -> Result<()> {
    let known: BTreeSet<&str> =
        checks().filter(|check| problems.iter().any(|p| p.name == check.problem)).map(|check| check.name).collect();
    let unknown = names.iter().find(|name| !known.contains(name.as_str()));
    let all = || known.iter().copied().collect::<Vec<_>>().join(", ");
    unknown.map_or(Ok(()), |name| bail!("no check of these problems is called {name:?}; they have {}", all()))
}

fn checks() -> impl Iterator<Item = &'static SubjectCheck> {
    SUBJECT_CHECKS.iter().copied().flatten()
}

/// The named problems that a subject is measured on, or all of them.
pub fn measured_problems(names: &[String]) -> Result<Vec<&'static Problem>> {
    if names.is_empty() {
        return Ok(SUBJECT_PROBLEMS.iter().map(|(problem, _)| problem).collect());
    }
    let all = || SUBJECT_PROBLEMS.iter().map(|(problem, _)| problem.name).collect::<Vec<_>>().join(", ");
    let chosen = super::once_each(names).map(|name| {
        let handout = handout_problem(name)?;
        let found = SUBJECT_PROBLEMS.iter().map(|(problem, _)| problem).find(|problem| problem.name == handout.name);
        found.with_context(|| format!("{name} measures nothing of a subject; {} do", all()))
    });
    chosen.collect()
}

/// The tree of the subject, which now knows the adapters that fail a check and so are not timed, and the problems of those whose
/// checks are not graded; of ours it is the same tree. `None` when interrupted.
pub fn checked(layout: &Layout, problems: &[&Problem]) -> Result<Option<Layout>> {
    let Some(mut subject) = layout.subject.clone() else { return Ok(Some(layout.clone())) };
    eprintln!("{}", conditions(&subject));
    let (runner, mut worker) = (Runner::new(layout, &interrupted), Worker::new(layout));
    let measured = |entry: &Problem| problems.iter().any(|problem| problem.name == entry.name);
    let timed: Vec<_> = SUBJECT_PROBLEMS.iter().filter(|(entry, _)| measured(entry)).collect();
    for check in checks() {
        let need = timed.iter().filter(|(_, adapters)| adapters.contains(&check.adapter)).map(|(entry, _)| entry.name);
        // Of an adapter or a problem that is left out already, nothing more is asked.
        let need: Vec<&str> = need.filter(|name| !subject.not_graded.contains_key(*name)).collect();
        if need.is_empty() || subject.refused.contains_key(check.adapter) {
            continue;
        }
        eprintln!("  checking {}::{}", check.problem, check.name);
        match runner.subject_check(&mut worker, &subject, check) {
            Ok(None) => return Ok(None),
            Ok(Some(CheckStatus::Failed { error })) => {
                let words = format!("{}::{}: {error}", check.problem, check.name);
                eprintln!("  {} is not timed: {}", check.adapter, indented(&words, 4));
                subject.refused.insert(check.adapter.into(), words);
            }
            Ok(Some(_)) => {}
            Err(error) => {
                let reasons = need.iter().map(|name| (name.to_string(), format!("{error:#}")));
                subject.not_graded.extend(reasons);
            }
        }
    }
    Ok(Some(layout.of_subject(&subject)))
}

/// The worker's side: runs one check.
pub fn check(subject: &Subject, problem: &str, name: &str) -> Result<CheckStatus> {
    let found = checks().find(|check| (check.problem, check.name) == (problem, name));
    let found = found.with_context(|| format!("{problem} has no check {name:?} for a subject"))?;
    let kills = oom_kills();
    let outcome = (found.run)(subject);
    ending(subject, outcome, oom_kills() > kills)
}

/// `has_killed`: meanwhile the kernel has killed a process because memory ran out, as a compiler that the subject had started.
fn ending(subject: &Subject, outcome: Result<Verdict>, has_killed: bool) -> Result<CheckStatus> {
    Ok(match outcome {
        Ok(Verdict::Passed { note }) if attention::has_printed() => {
            CheckStatus::Passed { note: format!("{note}; the subject also printed text, which is not read") }
        }
        Ok(Verdict::Passed { note }) => CheckStatus::Passed { note },
        Ok(Verdict::Skipped { reason }) => CheckStatus::Skipped { reason },
        Err(error) if NotGraded::of(&error).is_some() => return Err(error),
        Err(error) => {
            subject.require_readable()?;
            match unavailable(&error) {
                Some(reason) => CheckStatus::Skipped { reason },
                None if has_killed => {
                    let killed = "the kernel killed a process meanwhile, because memory ran out";
                    return Err(NotGraded(format!("{}; {killed}; {MORE_MEMORY}", words_of(&error))).into());
                }
                None => CheckStatus::Failed { error: words_of(&error) },
            }
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_during_a_kill_for_want_of_memory_is_not_graded() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("adapters.py"), "").unwrap();
        let subject = Subject::find(folder.path(), LIMIT_S, GIB as u64, 1).unwrap();
        let ended = |has_killed| ending(&subject, Err(anyhow::anyhow!("gcc failed")), has_killed);
        assert_eq!(ended(false).unwrap(), CheckStatus::Failed { error: "gcc failed".into() });
        let error = ended(true).unwrap_err();
        assert!(
            NotGraded::of(&error).is_some_and(|reason| reason.0.starts_with("gcc failed; the kernel killed")),
            "{error:#}"
        );
        let passed = ending(&subject, Ok(Verdict::Passed { note: "right".into() }), true).unwrap();
        assert_eq!(passed, CheckStatus::Passed { note: "right".into() });
    }
}
