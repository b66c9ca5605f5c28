//! Points: what each part of each problem earned, and why points are lost.

use serde::{Deserialize, Serialize};

use super::handout::{DeliverableKind, HandoutProblem, Part};
use super::problem::Problem;
use crate::printable::printable;

/// The points of one problem.
#[derive(Debug, Clone, Serialize)]
pub struct ProblemGrade {
    pub name: &'static str,
    pub title: &'static str,
    pub section: &'static str,
    pub points: f64,
    pub earned: f64,
    pub parts: Vec<PartGrade>,
}

#[derive(Debug, Clone, Serialize)]
pub struct PartGrade {
    /// The handout's letter, or "".
    pub id: &'static str,
    pub points: f64,
    pub earned: f64,
    /// Why points are missing; empty exactly when none are.
    pub lost: Vec<String>,
    pub checks: Vec<CheckResult>,
}

impl ProblemGrade {
    /// Every check's name, how it ended, and its seconds.
    pub fn tests(&self) -> impl Iterator<Item = (&'static str, CheckStatus, f64)> {
        let checks = self.parts.iter().flat_map(|part| &part.checks);
        checks.map(|check| (check.name, check.ending.clone(), check.elapsed_s))
    }
}

/// The result of one check.
#[derive(Debug, Clone, Serialize)]
pub struct CheckResult {
    pub name: &'static str,
    pub part: &'static str,
    pub ending: CheckStatus,
    pub elapsed_s: f64,
}

/// How one check ended.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "status", rename_all = "snake_case")]
pub enum CheckStatus {
    Passed { note: String },
    Skipped { reason: String },
    Failed { error: String },
}

impl CheckStatus {
    /// With text from outside made safe to print.
    pub fn printable(self) -> Self {
        match self {
            Self::Passed { note } => Self::Passed { note: printable(&note) },
            Self::Skipped { reason } => Self::Skipped { reason: printable(&reason) },
            Self::Failed { error } => Self::Failed { error: printable(&error) },
        }
    }
}

/// Grades one problem of the handout; `entry` is `None` while its code does not exist.
///
/// A part earns the share of its checks that passed; a part that hands in more than code also needs records that
/// cover the suite and a template that renders, and earns nothing if `lacking` says what is wrong with them. A skipped
/// check earns nothing.
pub fn grade(
    handout: &HandoutProblem,
    entry: Option<&Problem>,
    checks: &[CheckResult],
    lacking: &[String],
) -> ProblemGrade {
    let parts: Vec<PartGrade> = handout.parts.iter().map(|part| grade_part(part, entry, checks, lacking)).collect();
    ProblemGrade {
        name: handout.name,
        title: handout.title,
        section: handout.section,
        points: handout.points,
        earned: parts.iter().map(|p| p.earned).sum(),
        parts,
    }
}

fn grade_part(part: &Part, entry: Option<&Problem>, checks: &[CheckResult], lacking: &[String]) -> PartGrade {
    let checks: Vec<CheckResult> = checks.iter().filter(|c| c.part == part.id).cloned().collect();
    let graded = |share: f64, lost: Vec<String>, checks| PartGrade {
        id: part.id,
        points: part.points,
        earned: part.points * share,
        lost,
        checks,
    };
    if !entry.is_some_and(|e| e.answers.contains(&part.id)) {
        return graded(0.0, vec!["not answered yet: there is no code for it".into()], checks);
    }
    let mut lost: Vec<String> = checks.iter().filter_map(reason).collect();
    let passed = checks.len() - lost.len();
    let mut share = if checks.is_empty() { 1.0 } else { passed as f64 / checks.len() as f64 };
    let is_code = part.kinds.contains(&DeliverableKind::Code);
    if is_code && checks.is_empty() {
        lost.push("the part hands in code, but none of its checks ran".into());
        share = 0.0;
    }
    if part.kinds.iter().any(|k| *k != DeliverableKind::Code) && !lacking.is_empty() {
        lost.extend_from_slice(lacking);
        share = 0.0;
    }
    graded(share, lost, checks)
}

fn reason(check: &CheckResult) -> Option<String> {
    match &check.ending {
        CheckStatus::Passed { .. } => None,
        CheckStatus::Skipped { reason } => Some(format!("{} was skipped: {reason}", check.name)),
        CheckStatus::Failed { error } => Some(format!("{} failed: {error}", check.name)),
    }
}

/// How many parts of a problem have answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    All,
    Some,
    None,
}

/// What `cs336 list` shows.
pub fn status(handout: &HandoutProblem, entry: Option<&Problem>) -> Status {
    let answered = handout.parts.iter().filter(|part| entry.is_some_and(|e| e.answers.contains(&part.id))).count();
    match answered {
        0 => Status::None,
        n if n == handout.parts.len() => Status::All,
        _ => Status::Some,
    }
}

impl Status {
    pub fn name(self) -> &'static str {
        match self {
            Self::All => "all",
            Self::Some => "some",
            Self::None => "none",
        }
    }
}

/// Points without trailing zeros: "2", "1.5", "0.33".
pub fn points(value: f64) -> String {
    // The sum of no points is minus zero.
    let text = format!("{:.2}", value + 0.0);
    text.trim_end_matches('0').trim_end_matches('.').to_string()
}

#[cfg(test)]
mod tests {
    use super::super::answer::Answer;
    use super::*;

    const PARTS: &[Part] = &[
        Part { id: "a", points: 2.0, kinds: &[DeliverableKind::Code], question: "" },
        Part { id: "b", points: 1.0, kinds: &[DeliverableKind::Table, DeliverableKind::Written], question: "" },
    ];
    const HANDOUT: HandoutProblem = HandoutProblem { name: "x", title: "X", section: "1", points: 3.0, parts: PARTS };
    const ENTRY: Problem = Problem {
        name: "x",
        answers: &["a", "b"],
        checks: &[],
        measured: None,
        answer: |_, _| Ok(Answer::default()),
        reads: &[],
    };

    fn result(ending: CheckStatus) -> CheckResult {
        CheckResult { name: "c", part: "a", ending, elapsed_s: 0.0 }
    }

    fn passed() -> CheckResult {
        result(CheckStatus::Passed { note: String::new() })
    }

    #[test]
    fn a_complete_answer_earns_all_points() {
        let grade = grade(&HANDOUT, Some(&ENTRY), &[passed()], &[]);
        assert_eq!((grade.earned, grade.parts.iter().all(|p| p.lost.is_empty())), (3.0, true));
    }

    #[test]
    fn a_failed_and_a_skipped_check_each_cost_their_share_and_say_why() {
        let failed = result(CheckStatus::Failed { error: "0.3 > 0.1".into() });
        let skipped = result(CheckStatus::Skipped { reason: "no GPU".into() });
        let grade = grade(&HANDOUT, Some(&ENTRY), &[passed(), failed, skipped, passed()], &[]);
        assert_eq!(grade.parts[0].earned, 1.0);
        assert_eq!(grade.parts[0].lost, ["c failed: 0.3 > 0.1", "c was skipped: no GPU"]);
    }

    #[test]
    fn code_without_a_check_and_a_table_without_records_earn_nothing() {
        let grade = grade(&HANDOUT, Some(&ENTRY), &[], &["no record".into()]);
        assert_eq!(grade.earned, 0.0);
        assert!(grade.parts.iter().all(|p| p.lost.len() == 1));
    }

    #[test]
    fn an_unanswered_problem_earns_nothing_and_says_so() {
        let grade = grade(&HANDOUT, None, &[], &[]);
        assert!(grade.earned == 0.0 && grade.parts[0].lost[0].contains("not answered"));
        assert_eq!(status(&HANDOUT, None), Status::None);
    }

    #[test]
    fn points_have_no_trailing_zeros() {
        assert_eq!([points(2.0), points(1.5), points(1.0 / 3.0), points(0.0)], ["2", "1.5", "0.33", "0"]);
        assert_eq!(points([0.0; 0].iter().sum()), "0");
    }
}
