//! One rendering of a template: the claims, tables, figures and parts that it uses, checked against the answer.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use anyhow::{Result, ensure};
use minijinja::{Error, ErrorKind};

use super::figures::PlacedFigure;
use super::{AnsweredPart, ProblemInput, escape, points};
use crate::harness::answer::{Answer, Claim};
use crate::harness::handout::HandoutProblem;

/// The figure of an answer that the report's first page prints, in place of the problem's template.
pub(super) const SUMMARY_FIGURE: &str = "summary";

/// The state of one rendering, shared by the template's functions.
#[derive(Clone)]
pub(super) struct Session {
    problem: HandoutProblem,
    answers: Vec<String>,
    pub answer: Answer,
    pub claims: Vec<Claim>,
    /// The claims that did not hold since the template last printed something.
    pub refuted: Vec<Claim>,
    tables: Vec<String>,
    pub figures: Vec<PlacedFigure>,
    pub answered: Vec<AnsweredPart>,
}

impl Session {
    pub fn new(problem: &ProblemInput) -> Self {
        Self {
            problem: problem.handout,
            answers: problem.answers.clone(),
            answer: problem.answer.clone(),
            claims: Vec::new(),
            refuted: Vec::new(),
            tables: Vec::new(),
            figures: Vec::new(),
            answered: Vec::new(),
        }
    }

    /// The part's heading (where parts have letters) and its question, set apart as a quotation.
    pub fn part(&mut self, id: &str) -> Result<String, Error> {
        let part = self.problem.part(id).filter(|_| self.answers.iter().any(|a| a == id));
        let part = part.ok_or_else(|| {
            let name = self.problem.name;
            invalid(format!("{name} has no part {id:?} to answer; its answers are {}", listed(&self.answers)))
        })?;
        if self.answered.iter().any(|a| a.part == id) {
            return Err(invalid(format!("part {id:?} is answered twice")));
        }
        let mut out = String::from("\n\n");
        if !id.is_empty() {
            let plural = if part.points == 1.0 { "" } else { "s" };
            let _ = writeln!(out, "### ({id}) · {} point{plural}\n", points(part.points));
        }
        let _ = writeln!(out, "> {}", part.question);
        self.answered.push(AnsweredPart { problem: self.problem.name, part: part.id, points: part.points });
        Ok(out + "\n")
    }

    /// Whether a claim of the answer holds. Adds the claim to the list.
    pub fn claim(&mut self, id: &str) -> Result<bool, Error> {
        let claim = named("claim", self.answer.claims(), id)?;
        if !self.claims.iter().any(|c| c.id == id) {
            self.claims.push(claim.clone());
            self.refuted.extend((!claim.held).then(|| claim.clone()));
        }
        Ok(claim.held)
    }

    pub fn table(&mut self, id: &str) -> Result<String, Error> {
        let table = named("table", self.answer.tables(), id)?;
        if self.tables.iter().any(|t| t == id) {
            return Err(invalid(format!("table {id:?} is printed twice")));
        }
        self.tables.push(id.into());
        Ok(format!("\n\n{}\n", table.marked()))
    }

    /// A figure of the answer with its caption. Without a caption, the template's next paragraph must be the caption and begin
    /// with "Figure: ".
    pub fn figure(&mut self, id: &str) -> Result<String, Error> {
        let figure = named("figure", self.answer.figures(), id)?;
        let path = self.path(id);
        if self.figures.iter().any(|f| f.path == path) {
            return Err(invalid(format!("figure {id:?} is printed twice")));
        }
        let (drawing, in_place) = (figure.drawing.clone(), figure.in_place);
        self.figures.push(PlacedFigure { path: path.clone(), drawing, in_place });
        let caption = figure.caption.as_ref().map_or_else(String::new, |caption| format!("Figure: {caption}\n\n"));
        Ok(format!("\n\n![{}]({path})\n\n{caption}", escape::markdown(&figure.alt)))
    }

    /// Errors: a part, claim, table or figure of the answer that the template does not use.
    pub fn all_used(&self) -> Result<()> {
        for id in &self.answers {
            let used = self.answered.iter().any(|a| a.part == id);
            ensure!(used, "part {id:?} is registered as answered, but the template has no {{{{ part({id:?}) }}}}");
        }
        for id in self.answer.claims().keys() {
            ensure!(self.claims.iter().any(|c| c.id == *id), "the template does not use the answer's claim {id:?}");
        }
        for id in self.answer.tables().keys() {
            ensure!(self.tables.contains(id), "the template does not print the answer's table {id:?}");
        }
        for id in self.answer.figures().keys().filter(|id| *id != SUMMARY_FIGURE) {
            let used = self.figures.iter().any(|f| f.path == self.path(id));
            ensure!(used, "the template does not print the answer's figure {id:?}");
        }
        Ok(())
    }

    fn path(&self, figure: &str) -> String {
        format!("figures/{}-{figure}.svg", self.problem.name)
    }
}

/// The item of the answer with this id. The error lists those that exist.
fn named<'a, T>(kind: &str, items: &'a BTreeMap<String, T>, id: &str) -> Result<&'a T, Error> {
    let unknown = || invalid(format!("the answer has no {kind} {id:?}; it has {}", listed(items.keys())));
    items.get(id).ok_or_else(unknown)
}

fn listed<'a>(ids: impl IntoIterator<Item = &'a String>) -> String {
    ids.into_iter().map(|id| format!("{id:?}")).collect::<Vec<_>>().join(", ")
}

pub(super) fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message.into())
}
