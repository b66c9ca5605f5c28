//! Grades in the formats that graders' tools read: JUnit XML and Gradescope's results.json.

use std::time::Duration;

use anyhow::Result;
use quick_junit::{NonSuccessKind, Report, TestCase, TestCaseStatus, TestSuite};
use serde_json::json;

use super::grade::{CheckStatus, ProblemGrade, points};
use crate::printable::indented;

/// Suites by name, each with its tests: name, how it ended, seconds. All text must be printable.
pub fn junit<'a, T>(suites: impl IntoIterator<Item = (&'a str, T)>) -> Result<String>
where
    T: IntoIterator<Item = (&'a str, CheckStatus, f64)>,
{
    let mut report = Report::new("cs336");
    for (name, tests) in suites {
        let mut suite = TestSuite::new(name);
        for (test, ending, elapsed_s) in tests {
            let status = match &ending {
                CheckStatus::Passed { .. } => TestCaseStatus::success(),
                CheckStatus::Skipped { reason } => saying(TestCaseStatus::skipped(), reason),
                CheckStatus::Failed { error } => saying(TestCaseStatus::non_success(NonSuccessKind::Failure), error),
            };
            let mut case = TestCase::new(test, status);
            case.set_classname(name).set_time(Duration::from_secs_f64(elapsed_s));
            if let CheckStatus::Passed { note } = &ending {
                case.set_system_out(note.as_str());
            }
            suite.add_test_case(case);
        }
        report.add_test_suite(suite);
    }
    Ok(report.to_string()?)
}

/// The message is an attribute, in which a reader of XML loses line breaks: it has the first line, and the text has all.
fn saying(mut status: TestCaseStatus, words: &str) -> TestCaseStatus {
    if let Some((first, _)) = words.split_once('\n') {
        status.set_message(first).set_description(words);
    } else {
        status.set_message(words);
    }
    status
}

/// One test a part: its score, its maximum, and why points are missing. `note` follows the points, on lines of its own.
pub fn gradescope(grades: &[ProblemGrade], note: Option<&str>) -> Result<String> {
    let parts = grades.iter().flat_map(|grade| grade.parts.iter().map(move |part| (grade, part)));
    let tests: Vec<_> = parts
        .map(|(grade, part)| {
            let name =
                if part.id.is_empty() { grade.name.to_string() } else { format!("{} ({})", grade.name, part.id) };
            let passed = part.earned >= part.points - 1e-9;
            json!({
                "name": name,
                "number": grade.section,
                "score": part.earned,
                "max_score": part.points,
                "status": if passed { "passed" } else { "failed" },
                // A subject's words may have lines of their own, which must not look like ours.
                "output": part.lost.iter().map(|reason| indented(reason, 4)).collect::<Vec<_>>().join("\n"),
            })
        })
        .collect();
    // The sum of nothing is -0.0.
    let earned = 0.0 + grades.iter().map(|g| g.earned).sum::<f64>();
    let seconds: f64 = grades.iter().flat_map(|g| &g.parts).flat_map(|p| &p.checks).map(|c| c.elapsed_s).sum();
    let possible: f64 = grades.iter().map(|g| g.points).sum();
    let results = json!({
        "score": earned,
        "execution_time": seconds.ceil() as u64,
        "output": std::iter::once(format!("{} of {} points", points(earned), points(possible)).as_str())
            .chain(note)
            .collect::<Vec<_>>()
            .join("\n"),
        "tests": tests,
    });
    Ok(serde_json::to_string_pretty(&results)? + "\n")
}

#[cfg(test)]
mod tests {
    use super::super::grade::{CheckResult, PartGrade};
    use super::*;

    fn grades() -> Vec<ProblemGrade> {
        let check = |name, ending| CheckResult { name, part: "a", ending, elapsed_s: 0.5 };
        let checks = vec![
            check("fine", CheckStatus::Passed { note: "error 1e-7".into() }),
            check("broken", CheckStatus::Failed { error: "a < b & c\nat q[0]".into() }),
            check("away", CheckStatus::Skipped { reason: "no GPU".into() }),
        ];
        let part = PartGrade {
            id: "a",
            points: 3.0,
            earned: 1.0,
            lost: vec!["broken failed:\nearned 3 points".into()],
            checks,
        };
        vec![ProblemGrade { name: "x", title: "X", section: "1.1", points: 3.0, earned: 1.0, parts: vec![part] }]
    }

    #[test]
    fn junit_holds_every_check_escaped() {
        let grades = grades();
        let xml = junit(grades.iter().map(|grade| (grade.name, grade.tests()))).unwrap();
        for expected in [
            "tests=\"3\"",
            "failures=\"1\"",
            "skipped=\"1\"",
            "message=\"a &lt; b &amp; c\"",
            "b &amp; c\nat q[0]<",
            "no GPU",
        ] {
            assert!(xml.contains(expected), "{expected} is not in {xml}");
        }
    }

    #[test]
    fn gradescope_holds_scores_and_reasons() {
        let value: serde_json::Value = serde_json::from_str(&gradescope(&grades(), Some("seed 7")).unwrap()).unwrap();
        assert_eq!((&value["score"], &value["execution_time"]), (&json!(1.0), &json!(2)));
        assert_eq!(value["output"], "1 of 3 points\nseed 7");
        assert_eq!(value["tests"][0]["output"], "broken failed:\n    earned 3 points");
        assert_eq!(value["tests"][0]["max_score"], 3.0);
    }
}
