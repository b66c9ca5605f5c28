//! What fails is said where it belongs, in every edition: claims that do not hold, templates, cases.

use cs336::harness::answer::{Answer, Claim};
use cs336::harness::record::Outcome;
use cs336::report::{self, Rendered};
use serde_json::json;

use super::WRITEUP;
use super::sample::{self, document, problem, squeeze, whole};

/// The three documents: Markdown, the text of the PDF without spaces, and HTML.
fn editions(document: &report::Document) -> (report::Rendered, String, String) {
    let rendered = report::render(document).unwrap();
    report::pdf::compile(&rendered, WRITEUP).unwrap();
    let (printed, html) = (sample::text_of(&rendered), report::html::page(document, &rendered).unwrap());
    (rendered, printed, html)
}

#[test]
fn a_claim_that_does_not_hold_is_named_behind_its_paragraph_in_every_edition() {
    let template = "First. {% if claim(\"c\") %}So.{% else %}Not so.{% endif %} Last.\n\nNext. {% if claim(\"d\") %}Gone.{% endif %}";
    let mut input = whole(template);
    input.answer.claim(Claim::new("c", false).count("of", 2)).unwrap();
    input.answer.claim(Claim::new("d", false).operand_text("x", "<1>")).unwrap();
    let (rendered, printed, html) = editions(&document(vec![input]));
    let words = "First. Not so. Last. *(Does not hold: c.)*\n\nNext. *(Does not hold: d.)*\n";
    assert!(rendered.markdown.contains(words), "{}", rendered.markdown);
    assert!(printed.contains(&squeeze("Last. (Does not hold: c.) Next.")), "{printed}");
    assert!(html.contains("Last. <em>(Does not hold: c.)</em>"), "{html}");
    assert!(rendered.markdown.contains("| `x` | d | no | x \\<1\\> |"), "{}", rendered.markdown);
}

#[test]
fn a_template_that_fails_costs_its_own_problem_alone_and_says_why_in_bold() {
    let broken = problem("broken", &[("", 1.0)], "{{ part(\"\") }}\n\n{{ nothing }}");
    let mut unread = problem("unread", &[("", 2.0)], "");
    unread.fault = Some("snapshots/gpu/unread.json is <not> read".into());
    let late = problem("late", &[("", 2.0)], "{{ part(\"\") }}\n\nEarly words.\n\n## Method\n\n$\\nosuchcommand$");
    let sound = problem("sound", &[("", 4.0)], "{{ part(\"\") }}\n\nSound words.");
    let (rendered, printed, html) = editions(&document(vec![broken, unread, late, sound]));
    let reasons = [
        "This answer could not be built: templates/broken.md:3: `nothing` is undefined",
        "This answer could not be built: snapshots/gpu/unread.json is <not> read.",
        "This answer could not be built: templates/late.md",
    ];
    for (reason, fault) in reasons.iter().zip(&rendered.faults) {
        assert!(fault.reason.starts_with(reason), "{fault}");
        let escaped = report::escape::markdown(reason);
        assert!(rendered.markdown.contains(&format!("\n**{escaped}")), "{reason}: {}", rendered.markdown);
        assert!(printed.contains(&squeeze(reason)), "{reason}: {printed}");
        let escaped = reason.replace('<', "&lt;").replace('>', "&gt;");
        assert!(html.contains(&format!("<strong>{escaped}")), "{reason}: {html}");
    }
    assert_eq!(rendered.faults.len(), reasons.len());
    assert!(!rendered.markdown.contains("Early words."), "half an answer is printed");
    assert!(
        rendered.markdown.contains("Sound words.") && printed.contains("Soundwords.") && html.contains("Sound words.")
    );
    assert_eq!(rendered.answered.iter().map(|a| a.problem).collect::<Vec<_>>(), ["sound"]);
    let error = format!("{:#}", rendered.complete().err().unwrap());
    assert!(error.contains("broken: ") && error.contains("unread: ") && error.contains("late: "), "{error}");
}

#[test]
fn a_mark_of_no_case_costs_its_own_problem_or_the_summary_alone() {
    for key in ["nowhere.gpu.9", "sample.cpu.10", "sample.gpu.0"] {
        let marked = format!("{{{{ part(\"\") }}}}\n\nso \u{e000}{key}\u{e001}5\u{e002}");
        let escaped = format!("{{{{ part(\"\") }}}}\n\nso {{{{ \"\\ue000{key}\\ue0015\\ue002\" }}}}");
        let sound = problem("sound", &[("", 4.0)], "{{ part(\"\") }}\n\nSound words.");
        let two = [("marked", marked), ("escaped", escaped)].map(|(name, text)| problem(name, &[("", 1.0)], &text));
        let mut document = document(two.into_iter().chain([sound]).collect());
        document.summary = Some(Ok(format!("\u{e000}{key}\u{e001}5\u{e002}")));
        let (rendered, _, html) = editions(&document);
        let places: Vec<&str> = rendered.faults.iter().map(|fault| fault.place.as_str()).collect();
        assert_eq!(places, ["templates/summary.md", "marked", "escaped"], "{:?}", rendered.faults);
        let said = rendered.faults.iter().map(|fault| &fault.reason);
        for (reason, file) in said.zip(["summary", "marked", "escaped"]) {
            let words = [&format!("templates/{file}.md: delete the characters U+E000, U+E001, U+E002"), key];
            assert!(words.iter().all(|words| reason.contains(*words)), "{reason}");
        }
        assert!(html.contains("Sound words.") && html.contains("could not be built"));
    }
}

#[test]
fn a_letter_with_thousands_of_marks_is_set_in_little_memory() {
    // Set as one letter, 20,000 took 24 GB.
    let template = format!("{{{{ part(\"\") }}}}\n\nA{} and on.", "\u{301}".repeat(20_000));
    let (rendered, printed, _) = editions(&document(vec![problem("x", &[("", 1.0)], &template)]));
    assert!(rendered.faults.is_empty() && printed.contains("U+0301") && printed.contains("andon."));
}

#[test]
fn a_failed_case_is_named_with_its_error_and_its_problem_is_not_answered() {
    let mut input = whole("Text.");
    let file = &mut input.records.cpu.as_mut().unwrap().file;
    for case in &mut file.cases[..2] {
        case.outcome = Outcome::Failed { error: "the <worker> died".into() };
    }
    let (rendered, printed, html) = editions(&document(vec![input]));
    let words = "**1 stale**, **2 failed** of 10 cpu cases. sweep (d 16, n 256) and 1 more: the \\<worker\\> died.";
    assert!(rendered.markdown.contains(words), "{}", rendered.markdown);
    assert!(rendered.markdown.contains("Text.") && rendered.markdown.contains("*Not answered:* 4 points."));
    assert!(rendered.answered.is_empty());
    assert!(printed.contains("2failedof10cpucases.") && html.contains("the &lt;worker&gt; died."), "{printed} {html}");
}

/// Each of these took all memory, or as much as it asked for, or the whole stack, or minutes.
#[test]
fn what_a_template_may_take_of_time_and_memory_is_bounded() {
    let doubled: String = (0..40).map(|_| "{% set a = a ~ a %}").collect();
    let joined = (0..9).fold("\", \"".to_string(), |inner, _| format!("answer.words | join({inner})"));
    let nested = format!("{{{{ {joined} }}}}");
    let including = "{% include \"shared/wide.md\" %}".repeat(1000);
    let long = "x ".repeat(600_000);
    let operators = format!("{{{{ {}1 }}}}", "not ".repeat(20_000));
    let attributes = format!("{{{{ answer{} }}}}", ".a".repeat(20_000));
    let filters = format!("{{{{ 1{} }}}}", "|ms".repeat(20_000));
    let (quotes, emphasis) = (">".repeat(100_000) + " x", "*a **b ".repeat(10_000) + &"c** d* ".repeat(8_000));
    for (template, expected) in [
        (doubled.as_str(), "a template cannot use {% set %}"),
        (&nested, "a join is longer than 65536 bytes; join less"),
        (&including, "templates/x.md prints more than 4194304 bytes; print less"),
        ("{% include \"shared/itself.md\" %}", "recursion limit exceeded"),
        ("{% include \"shared/0.md\" %}", "templates/x.md:3: more than 1000000 steps; include each text once"),
        (&long, "bytes long; a template has at most 131072"),
        (&operators, "templates/x.md:3: a tag has more than 200 words and signs"),
        (&attributes, "a tag has more than 200 words and signs"),
        (&filters, "a tag has more than 200 words and signs"),
        (&quotes, "more than 16 elements in one another; nest less"),
        (&emphasis, "more than 16 elements in one another; nest less"),
    ] {
        let mut input = problem("x", &[("", 1.0)], &format!("{{{{ part(\"\") }}}}\n\n{template}"));
        input.answer = Answer::new(&json!({"words": vec!["a".repeat(100); 100]})).unwrap();
        let named = |name: &str, text: String| (format!("shared/{name}.md"), Ok(text));
        let twice = |n: usize| named(&n.to_string(), format!("{{% include \"shared/{}.md\" %}}", n + 1).repeat(2));
        input.shared =
            (0..30).map(twice).chain([named("30", String::new()), named("wide", "x ".repeat(5000))]).collect();
        input.shared.push(named("itself", "{% include \"shared/itself.md\" %}".into()));
        let error = format!("{:#}", report::render(&document(vec![input])).and_then(Rendered::complete).err().unwrap());
        let start: String = template.chars().take(60).collect();
        assert!(error.contains(expected) && error.lines().count() == 1, "{start} gave {error}");
    }
}
