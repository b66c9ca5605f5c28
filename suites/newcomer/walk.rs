//! The whole walk of a newcomer's problem: suite, checks, cases, records, answer, template, Markdown.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::harness::answer::made_up::{MadeUp, machine};
use crate::harness::answer::{Answer, Audience, RecordSet, Records};
use crate::harness::handout::HandoutProblem;
use crate::harness::problem::{Measured, Verdict};
use crate::harness::record::{Profile, RecordFile};
use crate::harness::suite::{self, Suite};
use crate::problems::harmonic_sum::PROBLEM;
use crate::report::{self, Document, ProblemInput};

/// The grid, the parameters and the row of each case.
type Measurements = Vec<(String, Value, Value)>;

fn measure(suite: &Suite, measured: &Measured) -> Measurements {
    let measure = |(grid, params): (&str, &Value)| {
        let row = (measured.measure)(params, Profile::Cpu, None).unwrap();
        (measured.check_row)(params, &row, &machine(None)).unwrap();
        (grid.to_string(), params.clone(), row)
    };
    suite.cases(Profile::Cpu).map(measure).collect()
}

/// As they come back from a record's text.
fn records(suite: Suite, measurements: &Measurements) -> Records {
    let empty = MadeUp::cpu(PROBLEM.name);
    let made_up = measurements.iter().fold(empty, |made_up, (grid, params, row)| made_up.measured(grid, params, row));
    let text = made_up.set().file.to_json().unwrap();
    let file = RecordFile::parse(&text, "harmonic_sum.json").unwrap();
    Records { suite: Some(suite), cpu: Some(RecordSet { file, stale: BTreeMap::new() }), ..Records::default() }
}

fn document(answer: Answer, records: Records) -> Document {
    let mut handout: BTreeMap<String, Vec<HandoutProblem>> = toml::from_str(include_str!("handout.toml")).unwrap();
    let handout = handout.remove("problem").unwrap().remove(0);
    assert_eq!(handout.name, PROBLEM.name);
    let problem = ProblemInput {
        handout,
        answers: PROBLEM.answers.iter().map(ToString::to_string).collect(),
        template: Some(include_str!("templates/harmonic_sum.md").into()),
        answer,
        records,
        ..ProblemInput::default()
    };
    Document {
        title: "A newcomer's problem".into(),
        assignment: "none".into(),
        summary: None,
        subject: None,
        problems: vec![problem],
    }
}

#[test]
fn a_newcomers_problem_goes_from_its_suite_to_its_answer() {
    for check in PROBLEM.checks {
        assert!(matches!((check.run)().unwrap(), Verdict::Passed { .. }), "{}", check.name);
    }
    let measured = PROBLEM.measured.unwrap();
    let origin = "suites/newcomer/suites/harmonic_sum.toml";
    let suite = suite::parse(include_str!("suites/harmonic_sum.toml"), origin, &measured.parse).unwrap();
    let measurements = measure(&suite, &measured);
    assert_eq!(measurements.len(), 6);
    let records = records(suite, &measurements);
    let answer = (PROBLEM.answer)(&records, Audience::Ours).unwrap();
    let quoted = ["ascending_error", "descending_error"].map(|name| answer.quoted()[name]["value"].as_f64().unwrap());
    let rendered = report::render(&document(answer, records)).unwrap().complete().unwrap();
    let rows = measurements.iter().flat_map(|(_, _, row)| ["sum", "error"].map(|name| row[name].as_f64().unwrap()));
    for number in rows.chain(quoted) {
        let text = format!("{:.6}", number.abs());
        assert!(rendered.markdown.contains(&text), "{text} is not in\n{}", rendered.markdown);
    }
    let claims: Vec<_> = rendered.claims.iter().map(|(_, claim)| (claim.id.as_str(), claim.held)).collect();
    assert_eq!(claims, [("small-terms-first-errs-less", true)]);
    assert!(rendered.markdown.contains("So adding small terms first errs less"), "{}", rendered.markdown);
    assert_eq!(rendered.answered.len(), 1);
}
