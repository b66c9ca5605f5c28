//! The whole document from its problems: title page, contents, answers, where numbers come from, and indexes.

use std::fmt::Write as _;

use anyhow::{Context as _, Result, ensure};

use super::escape::{self, typst as typst_text, typst_string};
use super::html::{Chapter, Edition};
use super::markdown::{self, Counters};
use super::title_page::Front;
use super::{AnsweredPart, Document, ProblemInput, Rendered};
use super::{figures, lint, points, run_index, template};
use crate::harness::answer::records::machine_name;
use crate::harness::answer::{Claim, RecordSet, mark};
use crate::harness::handout::{DeliverableKind, HandoutProblem, Part};
use crate::harness::record::Outcome;

/// Renders every problem in order and joins the pieces.
pub fn assemble(document: &Document) -> Result<Rendered> {
    let mut pieces = Pieces::default();
    for problem in &document.problems {
        pieces.problem(problem)?;
    }
    pieces.unanswered(&document.problems)?;
    pieces.claims_index()?;
    if let Some(index) = run_index::index(document) {
        pieces.appendix("Runs", &index)?;
    }
    let front = Front::new(document, &pieces.answered);
    pieces.edition.front = front.markdown();
    Ok(Rendered {
        markdown: pieces.edition.front.clone() + &pieces.markdown,
        typst: pieces.typst,
        front: serde_json::to_string_pretty(&front)?,
        figures: pieces.figures,
        claims: pieces.claims,
        answered: pieces.answered,
        edition: pieces.edition,
    })
}

/// The document so far, in both forms.
#[derive(Default)]
struct Pieces {
    markdown: String,
    typst: String,
    counters: Counters,
    figures: Vec<(String, Vec<u8>)>,
    claims: Vec<(&'static str, Claim)>,
    answered: Vec<AnsweredPart>,
    edition: Edition,
}

impl Pieces {
    fn problem(&mut self, problem: &ProblemInput) -> Result<()> {
        self.check_parts(problem)?;
        let answer = template::fill(problem)?;
        self.problem_heading(problem);
        let marked = answer.as_ref().map_or("", |(marked, _)| marked);
        self.edition.chapters.push(Chapter::new(problem.handout, marked));
        if let Some((marked, used)) = answer {
            let markdown = mark::plain(&marked);
            let origin = template::origin(problem);
            lint::leftovers(&origin, &markdown)?;
            self.convert(&origin, &markdown)?;
            self.figures.extend(used.figures.iter().map(|f| (f.path.clone(), figures::svg(&f.drawing).into_bytes())));
            self.claims.extend(used.claims.into_iter().map(|claim| (problem.handout.name, claim)));
            self.answered.extend(used.answered);
            self.small_print(&provenance(problem)?)?;
        }
        let open = self.open_parts(&problem.handout);
        if !open.is_empty() {
            self.small_print(&format!("*Not answered:* {}.", parts_with_points(&open)))?;
        }
        Ok(())
    }

    fn check_parts(&self, problem: &ProblemInput) -> Result<()> {
        for id in &problem.answers {
            let name = problem.handout.name;
            let known = problem.handout.part(id).is_some();
            ensure!(known, "problem {name} claims to answer part {id:?}, which the handout does not have");
            ensure!(
                problem.template.is_some(),
                "problem {name} answers parts but has no template: add templates/{name}.md"
            );
        }
        Ok(())
    }

    /// The parts without an answer.
    fn open_parts(&self, problem: &HandoutProblem) -> Vec<&'static Part> {
        let is_answered = |part: &Part| self.answered.iter().any(|a| a.problem == problem.name && a.part == part.id);
        problem.parts.iter().filter(|part| !is_answered(part)).collect()
    }

    fn problem_heading(&mut self, problem: &ProblemInput) {
        let HandoutProblem { name, title, section, points, .. } = problem.handout;
        let worth = points_in_words(points);
        let _ = write!(self.markdown, "\n## {title}\n\n`{name}` · section {section} · {worth}\n\n");
        let _ = write!(
            self.typst,
            "\n// from {}\n#problem({}, section: {}, worth: {}, answered: {})[{}]\n\n",
            template::origin(problem),
            typst_string(name),
            typst_string(section),
            typst_string(&worth),
            problem.template.is_some(),
            typst_text(title)
        );
        self.counters.heading = 1;
    }

    fn convert(&mut self, origin: &str, markdown: &str) -> Result<()> {
        let converted = markdown::convert(origin, markdown, &mut self.counters)?;
        let _ = writeln!(self.markdown, "{}", converted.markdown);
        let _ = write!(self.typst, "{}\n\n", converted.typst);
        Ok(())
    }

    /// Small grey text in the PDF, a plain paragraph in Markdown.
    fn small_print(&mut self, markdown: &str) -> Result<()> {
        self.edition.chapters.last_mut().context("small print before the first problem")?.add(markdown);
        let converted = markdown::convert("the small print", markdown, &mut self.counters)?;
        let _ = write!(self.markdown, "{}\n\n", converted.markdown);
        let _ = write!(self.typst, "#small-print[{}]\n\n", converted.typst);
        Ok(())
    }

    fn appendix(&mut self, title: &str, markdown: &str) -> Result<()> {
        self.edition.appendices.push((title.into(), markdown.into()));
        let _ = write!(self.markdown, "\n## {title}\n\n");
        let _ = write!(self.typst, "\n// from the appendix\n#appendix[{}]\n\n", typst_text(title));
        self.counters.heading = 1;
        self.convert("the appendix", &mark::plain(markdown))
    }

    fn unanswered(&mut self, problems: &[ProblemInput]) -> Result<()> {
        let mut rows = String::new();
        let (mut count, mut sum) = (0, 0.0);
        for problem in problems {
            let HandoutProblem { name, section, .. } = problem.handout;
            let open = self.open_parts(&problem.handout);
            let worth = open.iter().map(|p| p.points).sum::<f64>();
            if !open.is_empty() {
                let _ = writeln!(rows, "| {section} | `{name}` | {} | {} |", part_ids(&open), points(worth));
            }
            (count, sum) = (count + open.len(), sum + worth);
        }
        if count == 0 {
            return self.appendix("Unanswered parts", "Every part is answered.");
        }
        let parts = if count == 1 { "one part".into() } else { format!("{count} parts") };
        let table = format!(
            "| Section | Problem | Parts | Points |\n|:---|:---|:---|---:|\n{rows}\nTable: The {parts} without an \
             answer, worth {} together.\n",
            points_in_words(sum)
        );
        self.appendix("Unanswered parts", &table)
    }

    fn claims_index(&mut self) -> Result<()> {
        if self.claims.is_empty() {
            return Ok(());
        }
        let mut table =
            "Each comparison in the prose is a condition over the records, checked when this document is made; \
                         where one does not hold, the prose says so or leaves it out.\n\n\
                         | Problem | Claim | Holds | Decided by |\n|:---|:---|:---|:---|\n"
                .to_string();
        for (problem, Claim { id, held, operands }) in &self.claims {
            let held = if *held { "yes" } else { "no" };
            let operands: Vec<_> = operands.iter().map(|o| format!("{} {}", o.name, mark::marked(&o.value, &o.cases))).collect();
            let operands = operands.join("; ");
            let _ = writeln!(table, "| `{problem}` | {} | {held} | {operands} |", escape::markdown(id));
        }
        let _ = writeln!(table, "\nTable: The {} claims of this document and whether they hold.", self.claims.len());
        self.appendix("Claims", &table)
    }
}

fn points_in_words(n: f64) -> String {
    format!("{} point{}", points(n), if n == 1.0 { "" } else { "s" })
}

/// "(a), (c)", or "whole" for a problem without letters.
fn part_ids(parts: &[&Part]) -> String {
    let ids = parts.iter().map(|p| if p.id.is_empty() { "whole".into() } else { format!("({})", p.id) });
    ids.collect::<Vec<_>>().join(", ")
}

fn parts_with_points(parts: &[&Part]) -> String {
    let words = parts.iter().map(|p| match p.id {
        "" => points_in_words(p.points),
        id => format!("part ({id}), {}", points_in_words(p.points)),
    });
    words.collect::<Vec<_>>().join("; ")
}

/// The runs behind a problem's numbers, with machine, commit and the outcomes of the cases.
fn provenance(problem: &ProblemInput) -> Result<String> {
    let sets: Vec<&RecordSet> = problem.records.sets().collect();
    if sets.is_empty() {
        let mut parts = problem.answers.iter().filter_map(|id| problem.handout.part(id));
        let is_code = parts.all(|p| p.kinds == [DeliverableKind::Code]);
        return Ok(match is_code {
            true => "*Records:* none; this answer is code and its checks.".into(),
            false => "*Records:* none; the numbers of this answer are computed, not measured.".into(),
        });
    }
    let mut paragraphs = Vec::new();
    for set in sets {
        let runs = set.runs();
        let newest = runs.last().with_context(|| format!("the records of {} name no run", problem.handout.name))?;
        let machine = escape::markdown(&machine_name(&newest.machine, set.file.profile));
        let from = runs.iter().map(|run| {
            let commit = run.commit.get(..10).unwrap_or(&run.commit);
            let dirty = if run.dirty { ", with uncommitted changes" } else { "" };
            format!("run {} at commit `{commit}`{dirty}", run.id)
        });
        let from = from.collect::<Vec<_>>().join("; ");
        let cases = cases_in_words(set);
        let seen =
            run_index::Seen::of(set.file.cases.iter()).map_or(String::new(), |seen| format!(" {}.", seen.describe()));
        paragraphs.push(format!("*Records ({}):* {machine}; {from}. {cases}{seen}", set.file.profile));
    }
    Ok(paragraphs.join("\n\n"))
}

/// "24 cases: 22 measured, 2 out of memory; 1 stale."
fn cases_in_words(set: &RecordSet) -> String {
    let count = |matches: fn(&Outcome) -> bool| set.file.cases.iter().filter(|c| matches(&c.outcome)).count();
    let kinds: [(usize, &str); 4] = [
        (count(|o| matches!(o, Outcome::Measured { .. })), "measured"),
        (count(|o| matches!(o, Outcome::OutOfMemory { .. })), "out of memory"),
        (count(|o| matches!(o, Outcome::NotRun { .. })), "not run"),
        (count(|o| matches!(o, Outcome::Failed { .. })), "failed"),
    ];
    let words = kinds.iter().filter(|(n, _)| *n > 0).map(|(n, kind)| format!("{n} {kind}"));
    let words = words.collect::<Vec<_>>().join(", ");
    let n = set.file.cases.len();
    let stale = if set.stale.is_empty() { "none stale".into() } else { format!("**{} stale**", set.stale.len()) };
    format!("{n} case{}: {words}; {stale}.", if n == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn points_have_their_unit() {
        assert_eq!(points_in_words(1.0), "1 point");
        assert_eq!(points_in_words(2.5), "2.5 points");
    }
}
