//! The whole document from its problems: summary, answers, and the appendices that templates and records fill.

use std::fmt::Write as _;

use anyhow::{Context as _, Result, bail, ensure};

use super::anchors::{self, PROVENANCE as PROVENANCE_ID, Place};
use super::escape::{self, typst as typst_text, typst_string};
use super::figures::PlacedFigure;
use super::html::{Chapter, Edition, Sets};
use super::markdown::{self, Counters};
use super::provenance;
use super::sections::{self, APPENDICES};
use super::title_page::Front;
use super::{AnsweredPart, Document, Fault, ProblemInput, Rendered};
use super::{figures, points, template, warnings};
use crate::harness::answer::format::NOTHING;
use crate::harness::answer::{Claim, mark};
use crate::harness::handout::{DeliverableKind, HandoutProblem, Part};

/// The title of the appendix about records.
const PROVENANCE: &str = "D. Runs, machines and claims";

/// Renders every problem in order and joins the pieces.
pub fn assemble(document: &Document) -> Result<Rendered> {
    let mut pieces = Pieces { sets: Sets::of(document), ..Pieces::default() };
    if let Err(error) = pieces.summary(document) {
        pieces.fault(template::SUMMARY, &format!("This page could not be built: {error:#}"))?;
    }
    let summary = std::mem::take(&mut pieces.typst);
    let head = std::mem::take(&mut pieces.markdown);
    for problem in &document.problems {
        pieces.problem(problem, document.subject.is_some())?;
    }
    pieces.appendices()?;
    let provenance = provenance::markdown(document, &pieces.claims);
    pieces.counters.place = Place { prefix: PROVENANCE_ID.into(), ..Place::default() };
    pieces.markdown += &format!("\n{}\n", anchors::markdown(PROVENANCE_ID).trim_end());
    pieces.appendix(PROVENANCE, &provenance)?;
    pieces.edition.provenance = (PROVENANCE.into(), provenance);
    let front = Front::new(document, &pieces.answered);
    pieces.edition.front = front.markdown(&pieces.edition.front);
    Ok(Rendered {
        markdown: front.markdown(&head) + &pieces.markdown,
        summary,
        typst: pieces.typst,
        front: serde_json::to_string_pretty(&front)?,
        figures: pieces.figures,
        claims: pieces.claims,
        answered: pieces.answered,
        faults: pieces.faults,
        edition: pieces.edition,
    })
}

/// The document so far, in both forms.
#[derive(Default)]
struct Pieces<'a> {
    /// The records of all problems.
    sets: Sets<'a>,
    markdown: String,
    typst: String,
    counters: Counters,
    figures: Vec<(String, Vec<u8>)>,
    claims: Vec<(&'static str, Claim)>,
    answered: Vec<AnsweredPart>,
    faults: Vec<Fault>,
    /// The same pieces with marks.
    edition: Edition,
    /// What templates put into each of [`APPENDICES`]: a problem, and its text.
    put_off: [Vec<(HandoutProblem, Place, String)>; APPENDICES.len()],
}

impl Pieces<'_> {
    fn summary(&mut self, document: &Document) -> Result<()> {
        let Some((markdown, used)) = template::fill_summary(document)? else { return Ok(()) };
        self.sets.require_cases(&markdown).context(template::SUMMARY)?;
        let files = self.drawn(used);
        self.counters.place = Place::new("front", []);
        self.convert(template::SUMMARY, &markdown)?;
        self.edition.front.clone_from(&markdown);
        self.figures.extend(files);
        // A dash behind a digit is that of a range.
        let is_missing = |at: usize| !markdown[..at].ends_with(|c: char| c.is_ascii_digit());
        match markdown.match_indices(NOTHING).filter(|(at, _)| is_missing(*at)).count() {
            0 => Ok(()),
            missing => self
                .fault(template::SUMMARY, &format!("Results that are missing here: {missing}. Their problems say why")),
        }
    }

    /// Adds a problem's heading, and its answer or why there is none.
    fn problem(&mut self, problem: &ProblemInput, is_of_subject: bool) -> Result<()> {
        self.problem_heading(problem);
        self.edition.chapters.push(Chapter::of(problem.handout));
        self.small_print(&warnings::before_answer(&problem.records))?;
        for reason in problem.records.unreadable_files() {
            self.fault(problem.handout.name, reason)?;
        }
        if let Err(error) = self.answer(problem) {
            self.fault(problem.handout.name, &format!("This answer could not be built: {error:#}"))?;
        }
        let open = self.open_parts(&problem.handout);
        // What the handout asks in words is a subject's own to answer.
        if open.is_empty() || is_of_subject {
            Ok(())
        } else {
            self.small_print(&format!("*Not answered:* {}.", parts_with_points(&open)))
        }
    }

    /// Adds a problem's answer, or nothing of it.
    fn answer(&mut self, problem: &ProblemInput) -> Result<()> {
        if let Some(fault) = &problem.fault {
            bail!("{fault}");
        }
        self.check_parts(problem)?;
        let Some((markdown, used)) = template::fill(problem)? else { return Ok(()) };
        let origin = template::origin(problem);
        self.sets.require_cases(&markdown).with_context(|| origin.clone())?;
        let sections = sections::split(&origin, &markdown)?;
        let files = self.drawn(used.figures);
        self.counters.place = sections.place(problem.handout.name);
        // The appendices are set after all answers; what fails there must fail here.
        for text in sections.appendices.iter().flatten() {
            markdown::convert(&origin, &mark::plain(text), &mut self.counters.clone())?;
        }
        self.convert(&origin, &sections.body)?;
        self.chapter(|chapter| chapter.answer(&sections));
        for (pieces, text) in self.put_off.iter_mut().zip(sections.appendices) {
            pieces.extend(text.map(|text| (problem.handout, self.counters.place.clone(), text)));
        }
        self.figures.extend(files);
        self.claims.extend(used.claims.into_iter().map(|claim| (problem.handout.name, claim)));
        // Code needs no records.
        let is_code = |id: &str| problem.handout.part(id).is_some_and(|part| part.kinds == [DeliverableKind::Code]);
        let measured = problem.records.are_complete() && !problem.answer.is_untimed;
        self.answered.extend(used.answered.into_iter().filter(|answered| measured || is_code(answered.part)));
        Ok(())
    }

    /// Records a fault, and says it in bold at this place of the document.
    fn fault(&mut self, place: &str, reason: &str) -> Result<()> {
        let reason = format!("{}.", reason.trim().trim_end_matches('.'));
        let words = format!("**{}**\n", escape::markdown(&reason));
        match self.edition.chapters.last_mut() {
            Some(chapter) => chapter.add(&words),
            None => self.edition.front += &format!("\n{words}\n"),
        }
        self.faults.push(Fault { place: place.into(), reason });
        self.convert(place, &words)
    }

    /// The files of figures. From here on the converter knows which of them stand where they are mentioned.
    fn drawn(&mut self, used: Vec<PlacedFigure>) -> Vec<(String, Vec<u8>)> {
        let mut files = Vec::new();
        for PlacedFigure { path, drawing, in_place } in used {
            files.push((path.clone(), figures::svg(&drawing).into_bytes()));
            self.counters.in_place.extend(in_place.then_some(path));
        }
        files
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
        let HandoutProblem { name, section, points, .. } = problem.handout;
        let worth = points_in_words(points);
        let _ = write!(self.markdown, "\n## {}\n\n", heading(&problem.handout));
        let _ = write!(
            self.typst,
            "\n// from {}\n#problem({}, section: {}, worth: {}, answered: {})\n\n",
            template::origin(problem),
            typst_string(name),
            typst_string(section),
            typst_string(&worth),
            !problem.answers.is_empty(),
        );
        self.counters.heading = 1;
    }

    /// What the HTML edition has of the problem at hand.
    fn chapter(&mut self, add: impl Fn(&mut Chapter)) {
        self.edition.chapters.last_mut().into_iter().for_each(add);
    }

    /// Adds a text without its marks, or nothing of it.
    fn convert(&mut self, origin: &str, markdown: &str) -> Result<()> {
        let mut counters = self.counters.clone();
        let converted = markdown::convert(origin, &mark::plain(markdown), &mut counters)?;
        self.counters = counters;
        let _ = writeln!(self.markdown, "{}", converted.markdown);
        let _ = write!(self.typst, "{}\n\n", converted.typst);
        Ok(())
    }

    /// Small grey text in the PDF, a plain paragraph in Markdown; nothing of an empty text.
    fn small_print(&mut self, markdown: &str) -> Result<()> {
        if markdown.is_empty() {
            return Ok(());
        }
        self.chapter(|chapter| chapter.add(markdown));
        let converted = markdown::convert("the small print", markdown, &mut self.counters)?;
        let _ = write!(self.markdown, "{}\n\n", converted.markdown);
        let _ = write!(self.typst, "#small-print[{}]\n\n", converted.typst);
        Ok(())
    }

    /// The appendices that templates fill, each with its problems in the handout's order.
    fn appendices(&mut self) -> Result<()> {
        for ((name, title, about), pieces) in APPENDICES.iter().zip(std::mem::take(&mut self.put_off)) {
            if pieces.is_empty() {
                continue;
            }
            self.appendix(title, about)?;
            for (problem, place, text) in pieces {
                let anchor = anchors::markdown(&anchors::appendix(problem.name, name));
                let _ = write!(self.markdown, "{anchor}### {}\n\n", heading(&problem));
                self.counters.place = place;
                let _ = writeln!(self.typst, "// from templates/{}.md", problem.name);
                let (section, name) = (typst_text(problem.section), typst_string(problem.name));
                let _ = write!(self.typst, "#heading(level: 2)[{section} #raw({name})]\n\n");
                (self.counters.heading, self.counters.deeper) = (2, 1);
                self.convert(&format!("templates/{}.md", problem.name), &text)?;
                self.counters.deeper = 0;
            }
        }
        Ok(())
    }

    fn appendix(&mut self, title: &str, markdown: &str) -> Result<()> {
        let first = !std::mem::replace(&mut self.counters.in_appendix, true);
        let _ = write!(self.markdown, "\n## {title}\n\n");
        let _ = write!(self.typst, "\n// from the appendix\n#appendix(first: {first})[{}]\n\n", typst_text(title));
        self.counters.heading = 1;
        self.convert("the appendix", markdown)
    }
}

/// "1.1.3 benchmarking_script (4 points)".
fn heading(problem: &HandoutProblem) -> String {
    format!("{} {} ({})", problem.section, escape::markdown(problem.name), points_in_words(problem.points))
}

fn points_in_words(n: f64) -> String {
    format!("{} point{}", points(n), if n == 1.0 { "" } else { "s" })
}

fn parts_with_points(parts: &[&Part]) -> String {
    let words = parts.iter().map(|p| match p.id {
        "" => points_in_words(p.points),
        id => format!("part ({id}), {}", points_in_words(p.points)),
    });
    words.collect::<Vec<_>>().join("; ")
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
