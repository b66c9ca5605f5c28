//! Renders made-up records to a PDF: the output, the errors, and that two renderings are equal.

use cs336::harness::answer::{Answer, Claim, Records};
use cs336::report::{self, Document};
use proptest::prelude::*;
use serde_json::json;

#[path = "report/faults.rs"]
mod faults;
#[path = "report/fonts.rs"]
mod fonts;
#[path = "report/html.rs"]
mod html;
#[path = "report/sample.rs"]
mod sample;
#[path = "report/writing.rs"]
mod writing;

use sample::{
    accepted, attention, body, complete, document, full, long, plain, problem, render, run, squeeze, text_of, whole,
};

const WRITEUP: &str = include_str!("../report/writeup.typ");

#[test]
fn a_template_may_include_a_shared_text() {
    let markdown = render("{% include \"shared/sums.md\" %} So it is.").unwrap().markdown;
    assert!(markdown.contains("Twice two is 4. So it is."), "{markdown}");
}

fn error_of(template: &str) -> String {
    match render(template) {
        Ok(rendered) => match report::pdf(&rendered, WRITEUP) {
            Ok(_) => panic!("no error from {template:?}"),
            Err(error) => format!("{error:#}"),
        },
        Err(error) => format!("{error:#}"),
    }
}

#[test]
fn the_full_document_becomes_the_same_pdf_twice() {
    let rendered = report::render(&full()).unwrap();
    let pdf = report::pdf(&rendered, WRITEUP).unwrap();
    let again = report::render(&full()).unwrap();
    assert_eq!(rendered.markdown, again.markdown);
    assert_eq!(rendered.typst, again.typst);
    assert_eq!(rendered.figures, again.figures);
    assert!(pdf == report::pdf(&again, WRITEUP).unwrap(), "two renderings differ");
    if let Some(out) = std::env::var_os("REPORT_OUT") {
        report::write(std::path::Path::new(&out), &rendered, Some(&pdf)).unwrap();
    }
}

#[test]
fn a_document_of_forty_pages_is_laid_out() {
    let mut many = full();
    for i in 0..12 {
        many.problems.push(attention(&format!("again_{i}")));
        many.problems.push(long(&format!("long_{i}")));
    }
    let pages = report::pdf::compile(&report::render(&many).unwrap(), WRITEUP).unwrap().pages().len();
    assert!(pages >= 40, "{pages} pages");
}

#[test]
fn answers_claims_points_and_captions_are_collected() {
    let rendered = report::render(&full()).unwrap();
    assert_eq!(rendered.answered.len(), 3);
    assert_eq!(rendered.answered.iter().map(|a| a.points).sum::<f64>(), 9.0);
    let claims: Vec<(&str, bool)> = rendered.claims.iter().map(|(_, c)| (c.id.as_str(), c.held)).collect();
    assert_eq!(claims, [("backward-slower", true), ("sorted", true), ("sum", true)]);
    let paths: Vec<&str> = rendered.figures.iter().map(|f| f.0.as_str()).collect();
    assert_eq!(paths, ["figures/sample_attention-scaling.svg", "figures/sample_attention-bars.svg"]);
    let markdown = &rendered.markdown;
    for expected in [
        "9 of 116 points answered. Newest record: 2026-11-21.",
        "## 1.2.1 sample\\_attention (5 points)",
        "[`sample_attention`](#121-sample_attention-5-points): 5/5",
        "| 64 | 16,384 | OOM | OOM | OOM |",
        "**Table 1.** Attention forward",
        "Test Processor 9000, 2 cores, run 20261121T073200Z-4f2a.",
        "**Figure 1.** Time against",
        "**1 stale** of 10 cpu cases.",
        "| `sample_attention` | cpu | 10 | 9 | 1 | – | – | 1 |",
        "*Not answered:* part (a), 5 points; part (b), 8 points; part (c), 2 points.",
    ] {
        assert!(markdown.contains(expected), "{expected:?} is not in:\n{markdown}");
    }
}

#[test]
fn errors_name_the_template_its_line_and_the_remedy() {
    for (template, expected) in [
        ("{{ nothing }}", "templates/x.md:3: `nothing` is undefined"),
        ("{{ answer.sum | parsec(2) }}", "templates/x.md:3: filter parsec is unknown"),
        ("{{ 1 | format(9) }}", "filter format is unknown"),
        ("{{ answer.sum | fixed(99999) }}", "99999 decimals; use at most 17"),
        ("{{ answer.sum | ms }}", "templates/x.md:3: missing argument"),
        ("{{ \"text\" | ms(2) }}", "expects a number"),
        ("{{ answer.seconds | gib(2) }}", "cannot be printed as Gib"),
        ("{% if %}", "templates/x.md:3"),
        ("{{ part(\"\") }}", "part \"\" is answered twice"),
        ("{{ part(\"z\") }}", "no part \"z\" to answer"),
        ("{{ figure(\"f\") }}", "the answer has no figure \"f\""),
        ("{{ table(\"t\") }}", "the answer has no table \"t\""),
        ("{{ must(\"c\") }}", "the answer has no claim \"c\""),
        ("![](figures/x.svg)\n\nFigure: c", "no alternative text"),
        ("![alt](figures/absent.svg)\n\nFigure: c", "figures/absent.svg"),
        ("![alt](figures/x.svg)\n\nNo caption.", "followed by a paragraph \"Figure: ...\""),
        ("| a |\n|---|\n| 1 |\n\nNo caption.", "followed by a paragraph \"Table: ...\""),
        ("| a |\n|---|\n| 1 |", "followed by a paragraph \"Table: ...\""),
        ("| a |\n|---|\n\nTable: c", "a header and no rows"),
        ("$\\nosuchcommand$", "the formula $\\nosuchcommand$ does not convert"),
        ("# Title", "begin at ###"),
        ("a <b>c</b>", "HTML"),
        ("<div>\n\nc", "HTML is not supported; use Markdown"),
        ("    indented", "fence code"),
        ("[here](../suites)", "does not work in a PDF"),
        ("a TODO", "leftover text \"TODO\""),
        ("[2 tools called]", "leftover text"),
        ("a\n\n---", "a line across the page is not supported; use a heading"),
        ("text[^a]\n\n[^a]: note", "a footnote is not supported; say it in the text"),
        ("{% for i in range(9999) %}{% endfor %}", "templates/x.md:3: a template cannot use {% for %}"),
        ("{{ \"a\" * 99999999 }}", "templates/x.md:3: a template cannot use an operator that computes"),
    ] {
        let error = error_of(template);
        assert!(error.contains(expected), "{template}\ngave      {error}\nexpected  {expected}");
        assert!(error.contains("templates/x.md"), "{template}\nnames no template: {error}");
    }
}

#[test]
fn a_part_that_is_registered_and_not_answered_is_an_error() {
    let unanswered = document(vec![problem("x", &[("a", 1.0)], "No part here.")]);
    let error = format!("{:#}", complete(&unanswered).err().unwrap());
    assert!(error.contains("templates/x.md") && error.contains("part \"a\""), "{error}");
    let mut without = problem("x", &[("a", 1.0)], "");
    without.template = None;
    assert!(complete(&document(vec![without])).is_err());
}

/// What a template makes of one claim.
fn claimed(held: bool, template: &str) -> anyhow::Result<report::Rendered> {
    let mut input = whole(template);
    input.answer.claim(Claim::new("c", held).count("of", 2)).unwrap();
    complete(&document(vec![input]))
}

#[test]
fn a_claim_chooses_the_wording_and_is_listed_with_what_decided_it() {
    let template = "It is {% if claim(\"c\") %}so{% else %}not so{% endif %}.";
    for (held, words, listed) in [(true, "It is so.", "yes"), (false, "It is not so.", "no")] {
        let rendered = claimed(held, template).unwrap();
        assert!(rendered.markdown.contains(words) && rendered.claims[0].1.held == held);
        assert!(rendered.markdown.contains(&format!("| `x` | c | {listed} | of 2 |")), "{}", rendered.markdown);
    }
}

#[test]
fn a_claim_that_must_hold_and_one_that_is_stated_nowhere_are_errors() {
    assert!(claimed(true, "So it is.{{ must(\"c\") }}").is_ok());
    for (template, expected) in [
        ("So it is.{{ must(\"c\") }}", "claim \"c\" does not hold on these records"),
        ("Nothing.", "the template does not use the answer's claim \"c\""),
    ] {
        let error = format!("{:#}", claimed(false, template).err().expect("an error"));
        assert!(error.contains(expected) && error.contains("templates/x.md"), "{error}");
    }
}

#[test]
fn every_command_that_the_report_uses_has_a_formula_that_compiles() {
    let formulas = include_str!("report/formulas.txt");
    for formula in formulas.lines() {
        let set = render(&format!("${formula}$")).and_then(|rendered| report::pdf::compile(&rendered, &plain()));
        assert!(set.is_ok(), "{formula}: {:#}", set.unwrap_err());
    }
    let shown = report::latex::commands(formulas);
    let accepted = report::render(&accepted()).unwrap();
    let mut used = report::latex::COMMANDS.to_vec();
    for event in pulldown_cmark::Parser::new_ext(&accepted.markdown, pulldown_cmark::Options::all()) {
        if let pulldown_cmark::Event::InlineMath(latex) | pulldown_cmark::Event::DisplayMath(latex) = &event {
            let unshown = report::latex::commands(latex).into_iter().find(|command| !shown.contains(command));
            assert_eq!(unshown, None, "add a formula with it to suites/report/formulas.txt: ${latex}$");
            used.retain(|command| !report::latex::commands(latex).contains(command));
        }
    }
    assert!(used.is_empty(), "no formula of the report uses {used:?}: remove it from src/report/latex.rs");
}

/// The width of the first line of a formula set by itself, in points.
fn width_of(latex: &str) -> f64 {
    let set = format!("#set page(width: auto, height: auto, margin: 0pt)\n{}", plain());
    let formula = report::latex::typst(latex, false).unwrap();
    let document = report::pdf::compile(&body(formula), &set).unwrap();
    document.pages()[0].frame.width().to_pt()
}

#[test]
fn the_columns_of_an_alignment_stand_apart() {
    let one = width_of(r"\begin{aligned} a &= b \end{aligned}");
    let two = width_of(r"\begin{aligned} a &= b & a &= b \end{aligned}");
    assert!(two > 2.0 * one + 8.0, "two columns of {one} pt in {two} pt");
    let words = width_of(r"\begin{aligned} a &= b && a = b \end{aligned}");
    assert!(words > 2.0 * one + 8.0, "two columns of {one} pt in {words} pt");
}

#[test]
fn the_last_appendix_names_every_commit_and_machine() {
    let mut input = problem("x", &[("", 1.0)], "{{ part(\"\") }}\n\nText.");
    let file = &mut input.records.cpu.as_mut().unwrap().file;
    let mut later = run("20261122T073200Z-4f2b", "2026-11-22T07:32:00Z");
    later.commit = "fedcba9876543210".into();
    later.settings = [("threads", "2"), ("tf32", "off")].map(|(k, v)| (k.to_string(), v.to_string())).into();
    file.cases[0].run = later.id.clone();
    file.runs.push(later);
    let rendered = report::render(&document(vec![input])).unwrap();
    let (_, appendix) = rendered.markdown.split_once("## D. Runs, machines and claims").expect("the appendix");
    for expected in ["`fedcba9876`", "`0123456789`", "2 threads, TF32 off", "8.00 GiB of memory", "0.10 TB/s of memory"]
    {
        assert!(appendix.contains(expected), "{expected:?} is not in:\n{appendix}");
    }
}

#[test]
fn a_long_table_is_folded_in_markdown_with_its_caption() {
    let markdown = report::render(&document(vec![long("x")])).unwrap().markdown;
    let (_, folded) = markdown.split_once("<details>\n<summary>Table 1</summary>\n\n| row |").expect("a folded table");
    let (folded, _) = folded.split_once("\n</details>\n").expect("its end");
    assert!(folded.contains("\n\n**Table 1.** "), "{folded}");
    assert!(!render("| a |\n|---|\n| 1 |\n\nTable: c").unwrap().markdown.contains("<details>"));
}

#[test]
fn appendices_collect_the_sections_of_all_problems_after_the_answers() {
    let parts = |name: &str| {
        let template =
            format!("{{{{ part(\"\") }}}}\n\nAnswer of {name}.\n\n## Method\n\n### Clock\n\nMethod of {name}.\n");
        problem(name, &[("", 1.0)], &template)
    };
    let rendered = report::render(&document(vec![parts("x"), parts("y")])).unwrap();
    let places: Vec<usize> = [
        "Answer of x",
        "Answer of y",
        "## C. Method",
        "### 1.2.1 x",
        "#### Clock",
        "Method of x",
        "### 1.2.1 y",
        "Method of y",
    ]
    .iter()
    .map(|words| rendered.markdown.find(words).unwrap_or_else(|| panic!("{words:?} is not in:\n{}", rendered.markdown)))
    .collect();
    assert!(places.is_sorted(), "{places:?}");
    report::pdf::compile(&rendered, WRITEUP).unwrap();
}

#[test]
fn the_summary_quotes_answers_and_prints_their_figures_or_a_dash() {
    let mut input = whole("Text.");
    let figure = sample::bars();
    input.answer.figure("summary", figure).unwrap();
    let mut document = document(vec![input]);
    document.summary = Some(Ok("Twice two is {{ answers.x.sum }}.\n\n{{ figure(\"x\") }}".into()));
    let rendered = report::render(&document).unwrap();
    assert!(rendered.markdown.contains("Twice two is 4.") && rendered.markdown.contains("x-summary.svg"));
    report::pdf::compile(&rendered, WRITEUP).unwrap();
    document.summary = Some(Ok("{{ answers.x.forward }} ms".into()));
    document.problems[0].answer = Answer::new(&json!({"forward": "18–28, 50–75"})).unwrap();
    let ranges = report::render(&document).unwrap();
    assert!(ranges.faults.is_empty() && ranges.markdown.contains("18–28, 50–75 ms"), "{:?}", ranges.faults);
    let lacking = "{{ answers.y.a | gib(1) }}, {{ answers.x.b.c | range(\"ms\", 0) }}, {{ answers.x.sum }}.\n\n{{ figure(\"x\") }}";
    document.summary = Some(Ok(lacking.into()));
    document.problems[0].answer = whole("").answer;
    let rendered = report::render(&document).unwrap();
    assert!(
        rendered.markdown.contains("–, –, 4.\n\n–\n\n**Results that are missing here: 3. "),
        "{}",
        rendered.markdown
    );
    assert_eq!(rendered.faults[0].place, "templates/summary.md");
    document.summary = Some(Ok("{{ figure(\"z\") }}".into()));
    let error = format!("{:#}", complete(&document).err().unwrap());
    assert!(error.contains("templates/summary.md:1") && error.contains("no problem \"z\""), "{error}");
}

#[test]
fn the_results_of_gpus_have_none_of_a_cpu_among_them() {
    let peak = |of_gpu: bool, gpu_is_measured: bool| {
        let mut input = whole("Text.");
        input.answer = Answer::new(&json!({"gpu": of_gpu, "peak": 4})).unwrap();
        if gpu_is_measured {
            input.records = Records { gpu: input.records.cpu, ..Records::default() };
        }
        let summary = Some(Ok("A peak of {{ answers.x.peak }} GiB.".into()));
        report::render(&Document { summary, ..document(vec![input]) }).unwrap().markdown
    };
    assert!(peak(true, true).contains("A peak of 4 GiB.") && peak(false, false).contains("A peak of 4 GiB."));
    assert!(peak(false, true).contains("A peak of – GiB."));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, max_shrink_iters: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_text_comes_back_from_typst_as_it_went_in(text in "[ -~éüßλ×–µ−]{1,60}") {
        let rendered = body(report::escape::typst(&text));
        prop_assert_eq!(text_of(&rendered), squeeze(&text));
    }

    #[test]
    fn any_text_survives_markdown_and_typst(text in "[ -~éüßλ×–µ−]{1,60}") {
        let markdown = format!("x{}", report::escape::markdown(&text));
        let mut counters = report::markdown::Counters::default();
        let converted = report::markdown::convert("a test", &markdown, &mut counters).unwrap();
        prop_assert_eq!(text_of(&body(converted.typst)), squeeze(&format!("x{text}")));
    }

    #[test]
    fn any_code_comes_back_as_it_went_in(text in "[!-_a-~]{1,40}") {
        let rendered = body(format!("#raw({});", report::escape::typst_string(&text)));
        prop_assert_eq!(text_of(&rendered), squeeze(&text));
    }

    #[test]
    fn no_markdown_panics(text in "[ -~\n]{0,120}") {
        let _ = render(&text.replace(['{', '}'], "|"));
    }

    #[test]
    fn no_formula_panics(latex in r"(\\[a-z]{1,8}|[{}_^&()\[\]a-z0-9 +=]){0,24}") {
        let _ = report::latex::typst(&latex, true);
    }
}

#[test]
fn the_runs_stand_at_the_end_with_their_conditions_and_roofs() {
    let markdown = report::render(&full()).unwrap().markdown;
    let (_, runs) = markdown.split_once("### Runs").expect("a list of runs");
    for expected in ["20261121T073200Z-4f2a", "sample_attention", "| 10 | 1,755 | 694 | 62 | power cap |"] {
        assert!(runs.contains(expected), "{expected:?} is not in {runs}");
    }
}
