//! The HTML edition: links from numbers to cases, no marks elsewhere, no network, readable colours, and a real browser.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use cs336::harness::answer::{Cell, mark};
use cs336::report::{self, html};

use serde_json::Value;

use crate::sample::{accepted, full};

fn sample() -> String {
    let document = full();
    html::page(&document, &report::render(&document).unwrap()).unwrap()
}

/// The page of the accepted records.
fn page() -> String {
    let document = accepted();
    html::page(&document, &report::render(&document).unwrap()).unwrap()
}

#[test]
fn marks_reach_the_html_edition_alone() {
    let rendered = report::render(&full()).unwrap();
    let is_mark = |c: char| [mark::KEY, mark::TEXT, mark::END].contains(&c);
    assert!(rendered.edition.chapters.iter().any(|chapter| chapter.body.contains(is_mark)));
    for text in [&rendered.markdown, &rendered.typst, &rendered.front] {
        assert!(!text.contains(is_mark));
    }
    assert!(!sample().contains(is_mark));
}

#[test]
fn a_number_links_to_its_case_in_prose_and_in_tables() {
    let page = sample();
    let counts = html::gate::check(&page).unwrap();
    // nine of the ten cases were measured, each with two times and a size
    assert!(counts.numbers > 27 && counts.cases == 9, "{counts:?}");
    for words in
        ["<a class=\"q\" href=\"#case-sample_attention.cpu.7\">", "<details class=\"question\"><summary>Question"]
    {
        assert!(page.contains(words), "{words}");
    }
    assert!(page == sample(), "two renderings differ");
}

#[test]
fn the_page_of_the_accepted_records_is_sound() {
    let counts = html::gate::check(&page()).unwrap();
    assert!(counts.numbers > 1000 && counts.cases > 200, "{counts:?}");
}

/// Each colour of the style by name, light and dark.
fn colours() -> [BTreeMap<String, [f64; 3]>; 2] {
    let (light, dark) = html::STYLE.split_once("prefers-color-scheme: dark").unwrap();
    let dark = dark.split("@media").next().unwrap();
    let read = |text: &str| {
        let found = text.split("--").skip(1).filter_map(|rest| {
            let (name, rest) = rest.split_once(": #")?;
            let channel = |at: usize| Some(f64::from(u8::from_str_radix(rest.get(at..at + 2)?, 16).ok()?) / 255.0);
            Some((name.to_string(), [channel(0)?, channel(2)?, channel(4)?]))
        });
        found.collect::<BTreeMap<_, _>>()
    };
    [read(light), read(dark)]
}

/// The contrast of two colours by WCAG 2.
fn contrast(a: [f64; 3], b: [f64; 3]) -> f64 {
    let linear = |c: f64| if c <= 0.04045 { c / 12.92 } else { ((c + 0.055) / 1.055).powf(2.4) };
    let luminance = |[r, g, b]: [f64; 3]| 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
    let (a, b) = (luminance(a), luminance(b));
    (a.max(b) + 0.05) / (a.min(b) + 0.05)
}

#[test]
fn text_stands_out_from_its_paper_in_light_and_dark() {
    assert!((contrast([0.0; 3], [1.0; 3]) - 21.0).abs() < 1e-9);
    for colours in colours() {
        for paper in ["paper", "panel"] {
            for (text, least) in [("ink", 7.0), ("quiet", 4.5), ("accent", 4.5), ("focus", 3.0)] {
                let found = contrast(colours[text], colours[paper]);
                assert!(found >= least, "{text} on {paper} has a contrast of {found:.2}, below {least}");
            }
        }
    }
}

/// The values of an attribute, in order.
fn attributes<'a>(text: &'a str, opening: &'a str) -> impl Iterator<Item = &'a str> {
    text.split(opening).skip(1).filter_map(|rest| rest.split('"').next())
}

#[test]
fn links_of_the_markdown_lead_to_the_ids_of_the_html_edition() {
    let document = accepted();
    let rendered = report::render(&document).unwrap();
    let page = html::page(&document, &rendered).unwrap();
    let anchors: BTreeSet<&str> = attributes(&rendered.markdown, "<a id=\"").collect();
    assert_eq!(anchors.len(), attributes(&rendered.markdown, "<a id=\"").count(), "an id comes twice");
    for opening in ["<table id=\"", "<figure id=\"", "<details class=\"fold\" id=\""] {
        for id in attributes(&page, opening) {
            assert!(anchors.contains(id), "writeup.md has no {id}");
        }
    }
    let headings = rendered.markdown.lines().filter_map(|line| line.strip_prefix("## "));
    let headings: BTreeSet<String> = headings.map(viewer_anchor).collect();
    let targets = || rendered.markdown.split("](#").skip(1).filter_map(|rest| rest.split(')').next());
    for target in targets() {
        assert!(anchors.contains(target) || headings.contains(target), "{target} leads nowhere");
    }
    assert!(
        targets().any(|target| target == "flash_benchmarking-tables"),
        "appendix B of flash_benchmarking has no link"
    );
}

/// The anchor that Markdown viewers give a heading.
fn viewer_anchor(heading: &str) -> String {
    let kept = heading.chars().filter(|c| c.is_alphanumeric() || matches!(c, '_' | '-' | ' '));
    kept.collect::<String>().to_lowercase().replace(' ', "-")
}

#[test]
fn every_class_of_the_style_is_of_an_element() {
    let (page, script) = (page(), include_str!("../../src/report/html/page.js"));
    let (_, body) = page.split_once("</style>").unwrap();
    // words on some fills alone have a class
    let drawn = include_str!("../../src/report/figures/canvas.rs");
    let comments = html::STYLE.split("/*").map(|piece| piece.split_once("*/").map_or(piece, |(_, rules)| rules));
    let style: String = comments.collect();
    let selectors = style.split('}').filter_map(|rule| rule.rsplit_once('{'));
    for class in selectors.flat_map(|(selector, _)| selector.split('.').skip(1)) {
        let class = class.split(|c: char| !c.is_alphanumeric() && c != '-' && c != '_').next().unwrap();
        if class.starts_with(|c: char| c.is_alphabetic()) {
            let used = |text: &str| {
                let classes = text.split("class=\"").skip(1).filter_map(|rest| rest.split('"').next());
                classes.flat_map(str::split_whitespace).any(|found| found == class)
            };
            let made = script.contains(&format!("class: \"{class}\""));
            assert!(used(body) || used(drawn) || made, "no element has the class {class:?}");
        }
    }
}

/// A browser that draws without a window, if there is one.
fn browser() -> Option<PathBuf> {
    let named = std::env::var_os("CHROME").map(PathBuf::from);
    let known = ["chromium", "chromium-browser", "google-chrome", "chrome-headless-shell"];
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = known.iter().flat_map(|name| std::env::split_paths(&path).map(move |folder| folder.join(name)));
    named.into_iter().chain(found).find(|file| file.is_file())
}

/// A page that shows the write-up in a frame of this width, which may be narrower than any window, and keeps its verdict.
fn around(width: u32) -> String {
    format!(
        "<!DOCTYPE html><body style=\"margin:0\"><iframe src=\"writeup.html\" width=\"{width}\" height=\"1400\" \
         style=\"border:0\"></iframe><script>addEventListener('message', (event) => {{ document.body.dataset.verdict = event.data; \
         }});</script></body>"
    )
}

/// Runs `selftest.js` on the page at several widths: every link, a sorted and a filtered table, the panel of cases, an enlarged
/// figure. `REPORT_OUT` keeps pictures of the page.
#[test]
fn the_page_works_in_a_browser() {
    let Some(browser) = browser() else {
        eprintln!("skipped: there is no Chromium in PATH, and CHROME names none");
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let script = format!("<script>{}</script></body>", include_str!("selftest.js"));
    std::fs::write(folder.path().join("writeup.html"), page().replace("</body>", &script)).unwrap();
    for (width, scheme) in [(320, "light"), (1280, "light"), (1280, "dark"), (3840, "light")] {
        let file = folder.path().join("around.html");
        std::fs::write(&file, around(width)).unwrap();
        let mut command = Command::new(&browser);
        command.args(["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"]);
        command.args(["--hide-scrollbars", "--virtual-time-budget=20000"]).arg(format!("--window-size={width},1400"));
        command.arg(format!("--user-data-dir={}", folder.path().join("profile").display()));
        command.arg(format!("--blink-settings=preferredColorScheme={}", if scheme == "dark" { 0 } else { 1 }));
        if let Some(out) = std::env::var_os("REPORT_OUT") {
            command.arg(format!("--screenshot={}", Path::new(&out).join(format!("{width}-{scheme}.png")).display()));
        }
        let output = command.arg(format!("file://{}", file.display())).output().unwrap();
        let (dom, log) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        let verdict = dom.split("data-verdict=\"").nth(1).and_then(|rest| rest.split('"').next());
        assert_eq!(verdict, Some("well"), "{width} px, {scheme}: {log}");
        assert!(!log.contains("CONSOLE"), "{width} px, {scheme}: the console says {log}");
    }
}

/// Thresholds, settings and data sheets, and what is computed without a record: the numbers of answers without a link.
const UNLINKED: [(&str, &[&str]); 8] = [
    ("benchmarking_script", &["1.05"]),
    ("nsys_profile", &["0.0156"]),
    ("memory_profiling", &["5", "10", "20"]),
    ("pytorch_attention", &["0.016", "32.0"]),
    ("flash_benchmarking", &["5%"]),
    ("distributed_communication_single_node", &["450", "5%"]),
    ("naive_ddp", &["2", "3", "12", "30"]),
    ("optimizer_state_sharding_accounting", &["7.44", "18.75", "33.64"]),
];

/// What stands outside marks.
fn unmarked(text: &str) -> String {
    let pieces = text.split(mark::KEY).enumerate();
    pieces
        .map(|(i, piece)| if i == 0 { piece } else { piece.split_once(mark::END).map_or("", |(_, rest)| rest) })
        .collect()
}

/// Numbers of prose that look measured and stand outside a mark: with a decimal point or a percent sign, or before a unit.
fn unlinked(text: &str) -> Vec<String> {
    const UNITS: [&str; 8] = ["ms", "µs", "s", "GiB", "MiB", "GB/s", "GB", "times"];
    let prose = unmarked(text);
    // formulas and code hold sizes and names
    let prose: Vec<&str> = prose.split(['$', '`']).step_by(2).collect();
    let prose = prose.join(" ");
    let words: Vec<&str> =
        prose.split([' ', '(', ')', '–', '\n']).map(|word| word.trim_end_matches([',', ';', '.', ':'])).collect();
    let is_measured = |(word, next): (&str, Option<&&str>)| {
        let number = word.trim_end_matches('%').replace(',', "").parse::<f64>().is_ok();
        number && (word.contains('.') || word.ends_with('%') || next.is_some_and(|next| UNITS.contains(next)))
    };
    let found = (0..words.len()).filter(|at| is_measured((words[*at], words.get(at + 1))));
    found.map(|at| words[at].to_string()).collect()
}

/// The texts of a JSON value.
fn texts<'a>(value: &'a Value, found: &mut Vec<&'a str>) {
    match value {
        Value::Object(fields) => fields.values().for_each(|value| texts(value, found)),
        Value::Array(items) => items.iter().for_each(|value| texts(value, found)),
        Value::String(text) => found.push(text),
        _ => {}
    }
}

#[test]
fn every_measured_number_of_an_answer_has_a_link() {
    assert_eq!(
        unlinked(&format!("{} ms, 12.5 times at 2.7B, 5% of 3", mark::marked("1.5", "x.cpu.0"))),
        ["12.5", "5%"]
    );
    let mut unused: Vec<(&str, &str)> =
        UNLINKED.iter().flat_map(|(name, all)| all.iter().map(move |n| (*name, *n))).collect();
    for problem in &accepted().problems {
        let (name, answer) = (problem.handout.name, &problem.answer);
        let mut said = Vec::new();
        texts(answer.quoted(), &mut said);
        said.extend(answer.tables().values().filter_map(|table| table.caption.as_deref()));
        said.extend(answer.figures().values().filter_map(|figure| figure.caption.as_deref()));
        for text in said {
            for number in unlinked(text) {
                let known = UNLINKED.iter().any(|(problem, all)| *problem == name && all.contains(&number.as_str()));
                assert!(known, "{name}: {number} has no link in {text:?}; print it with Quantity::text");
                unused.retain(|found| *found != (name, number.as_str()));
            }
        }
        for (id, table) in answer.tables() {
            let cells = table.rows.iter().flat_map(|row| row.iter().zip(&table.columns));
            let measured =
                |head: &str| ["(ms)", "(µs)", "(MiB)", "(GiB)", "(GB/s)"].iter().any(|unit| head.contains(unit));
            for (cell, column) in cells.filter(|(_, column)| measured(&column.head)) {
                let Cell::Text(text) = cell else { continue };
                let is_linked = !unmarked(text).contains(|c: char| c.is_ascii_digit()) || text.starts_with("needs ");
                assert!(is_linked, "{name}, table {id:?}, {:?}: {text:?} has no link", column.head);
            }
        }
    }
    assert!(unused.is_empty(), "no answer says {unused:?} any more: shorten UNLINKED");
}
