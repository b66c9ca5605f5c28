//! `cs336 grade --subject`: somebody else's adapters, put to the checks of the problems that they answer.

use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context as _, Result, ensure};

use super::install::install;
use super::{entry, handout_problem, interrupted};
use crate::harness::case::Runner;
use crate::harness::grade::{CheckResult, CheckStatus, ProblemGrade, grade};
use crate::harness::handout::HandoutProblem;
use crate::harness::problem::Verdict;
use crate::harness::store::Layout;
use crate::harness::subject::{Subject, SubjectCheck};
use crate::harness::worker::Worker;
use crate::printable::shown_path;
use crate::problems::SUBJECT_CHECKS;
use crate::process::confinement;
use crate::subject::{attention, unavailable, words_of};
use crate::units::GIB;

#[derive(clap::Args)]
pub struct SubjectArguments {
    /// Grade this checkout of the starter code, or any folder with its adapters.py, instead of this program's own code
    #[arg(long, value_name = "DIR", conflicts_with = "device")]
    pub subject: Option<PathBuf>,
    /// Grade every folder in this folder as a subject; writes grades.csv and a results.json each into --output
    #[arg(long, value_name = "DIR", conflicts_with_all = ["subject", "device", "cases", "junit", "gradescope", "json"])]
    pub subjects: Option<PathBuf>,
    /// Where --subjects writes
    #[arg(long, value_name = "DIR", default_value = "grades", requires = "subjects")]
    pub output: PathBuf,
    /// First make each subject's .venv from its pyproject.toml, with uv if it is there, else pip; this is not confined
    #[arg(long)]
    install: bool,
    /// Of a subject: the most seconds that one call of an adapter may take
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    limit: u64,
    /// Of a subject: the most memory that each of its processes may have, in GiB
    #[arg(long, value_name = "GIB", default_value_t = 16, value_parser = clap::value_parser!(u64).range(1..=65_536))]
    memory: u64,
    /// Of a subject: the seed that its inputs are drawn from; another one each time by default
    #[arg(long, value_parser = clap::value_parser!(i64).range(0..))]
    seed: Option<i64>,
}

impl SubjectArguments {
    /// The subject in `folder`. `cases` must not lie in it, since it could read what they expect.
    pub fn find(&self, folder: &Path, cases: Option<&Path>) -> Result<Subject> {
        if self.install {
            install(folder)?;
        }
        let seed = self.seed.map_or_else(drawn_seed, Ok)?;
        let subject = Subject::find(folder, self.limit, self.memory * GIB as u64, seed)?;
        if let Some(cases) = cases.and_then(|cases| cases.canonicalize().ok()) {
            let is_inside = cases.starts_with(&subject.folder);
            ensure!(
                !is_inside,
                "the cases {} lie in the subject's folder, where it can read them; move them",
                shown_path(cases)
            );
        }
        Ok(subject)
    }
}

/// A seed that a subject cannot foresee, short enough to be typed again.
fn drawn_seed() -> Result<i64> {
    let mut bytes = [0; 4];
    std::io::Read::read_exact(&mut std::fs::File::open("/dev/urandom")?, &mut bytes).context("drawing a seed")?;
    Ok(u32::from_le_bytes(bytes).into())
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
pub fn grades(
    layout: &Layout,
    subject: &Subject,
    problems: &[&'static HandoutProblem],
    mut graded: impl FnMut(&ProblemGrade),
) -> Option<Vec<ProblemGrade>> {
    let (runner, mut worker) = (Runner::new(layout, &interrupted), Worker::new(layout));
    let mut grades = Vec::new();
    for problem in problems {
        let mut results = Vec::new();
        for check in checks().filter(|check| check.problem == problem.name) {
            let started = Instant::now();
            let ending = match runner.subject_check(&mut worker, subject, check) {
                Ok(ending) => ending?,
                Err(error) => CheckStatus::Failed { error: format!("{error:#}") }.printable(),
            };
            let elapsed_s = started.elapsed().as_secs_f64();
            results.push(CheckResult { name: check.name, part: check.part, ending, elapsed_s });
        }
        let grade = grade(problem, entry(problem), &results, &[]);
        graded(&grade);
        grades.push(grade);
    }
    Some(grades)
}

fn checks() -> impl Iterator<Item = &'static SubjectCheck> {
    SUBJECT_CHECKS.iter().copied().flatten()
}

/// The worker's side: runs one check.
pub fn check(subject: &Subject, problem: &str, name: &str) -> Result<CheckStatus> {
    let found = checks().find(|check| (check.problem, check.name) == (problem, name));
    let found = found.with_context(|| format!("{problem} has no check {name:?} for a subject"))?;
    Ok(match (found.run)(subject) {
        Ok(Verdict::Passed { note }) if attention::has_printed() => {
            CheckStatus::Passed { note: format!("{note}; the subject also printed text, which is not read") }
        }
        Ok(Verdict::Passed { note }) => CheckStatus::Passed { note },
        Ok(Verdict::Skipped { reason }) => CheckStatus::Skipped { reason },
        Err(error) => match unavailable(&error) {
            Some(reason) => CheckStatus::Skipped { reason },
            None => CheckStatus::Failed { error: words_of(&error) },
        },
    })
}
