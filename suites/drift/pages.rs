//! The laid-out pages of the report from accepted records: their number, their words, and what stands where.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{LazyLock, Mutex};

use cs336::cli::document::{RecordSource, document};
use cs336::report::{self, Rendered};
use typst::foundations::NativeElement as _;
use typst::introspection::Introspector as _;
use typst::layout::{Abs, Frame, FrameItem, Point, Size};
use typst::model::TableCell;
use typst::text::Glyph;
use typst_layout::PagedDocument;

use super::layout;

/// Pages before the appendices.
const MOST_PAGES: usize = 26;
/// Printed words before the appendices, the questions among them; tables, code and formulas are not counted.
const MOST_WORDS: usize = 7000;
/// The largest empty share of a page's text area at its foot.
const MOST_EMPTY: f64 = 0.15;
/// The same of an appendix, whose tables break only between groups of rows.
const MOST_EMPTY_OF_APPENDIX: f64 = 0.3;
/// In points; smaller letters cannot be read in print.
const LEAST_LETTER: f64 = 8.0;
/// In points, of the monospaced font, whose small letters are a quarter taller.
const LEAST_MONOSPACED: f64 = 7.0;

pub static RENDERED: LazyLock<Rendered> =
    LazyLock::new(|| report::render(&document(&layout(), RecordSource::Accepted).unwrap()).unwrap());

/// Held while typst sets a document, since its trace is one of the whole process.
pub static SETTING: Mutex<()> = Mutex::new(());

/// The pages, and typst's trace of setting them.
static TRACED: LazyLock<(PagedDocument, String)> = LazyLock::new(|| {
    let frame = std::fs::read_to_string(layout().report().join("writeup.typ")).unwrap();
    let rendered = LazyLock::force(&RENDERED);
    let _alone = SETTING.lock();
    // What another test has set is not set again.
    typst::comemo::evict(0);
    typst_timing::enable();
    let pages = report::pdf::compile(rendered, &frame).unwrap();
    typst_timing::disable();
    let mut trace = Vec::new();
    typst_timing::export_json(&mut trace, |_| (String::new(), 0)).unwrap();
    (pages, String::from_utf8(trace).unwrap())
});

static PAGES: LazyLock<&PagedDocument> = LazyLock::new(|| &TRACED.0);

/// How often typst began a step of this name.
fn traced(step: &str) -> usize {
    TRACED.1.matches(&format!(r#"{{"name":"{step}","cat":"typst","ph":"B""#)).count()
}

/// The labelled places whose label begins with `prefix`: rest of the label, page (from 0) and distance from its top.
fn labelled(prefix: &str) -> Vec<(String, usize, Abs)> {
    let introspector = PAGES.introspector();
    let labelled = introspector.query_labelled();
    let place = |content: &typst::foundations::Content| {
        let name = content.label()?.resolve().as_str().strip_prefix(prefix)?.to_string();
        let position = introspector.position(content.location()?)?;
        Some((name, position.page.get() - 1, position.point.y))
    };
    let mut places: Vec<_> = labelled.iter().filter_map(place).collect();
    places.sort_by_key(|(_, page, y)| (*page, *y));
    places
}

/// The number of pages before the first appendix.
fn body_pages() -> usize {
    labelled("appendix").first().expect("an appendix").1
}

/// Calls `see` with each item of a page and its place on it.
fn walk(frame: &Frame, at: Point, see: &mut impl FnMut(&FrameItem, Point)) {
    for (place, item) in frame.items() {
        match item {
            FrameItem::Group(group) => walk(&group.frame, at + *place, see),
            item => see(item, at + *place),
        }
    }
}

#[test]
fn the_main_body_has_at_most_26_pages() {
    assert!(body_pages() <= MOST_PAGES, "{} pages; move what a grader does not ask for to the appendix", body_pages());
}

#[test]
fn the_main_body_has_at_most_7000_words() {
    let (body, _) = RENDERED.markdown.split_once("\n## A. ").expect("an appendix");
    let mut is_code = false;
    let prose = body.lines().filter(|line| {
        let fence = line.starts_with("```");
        is_code ^= fence;
        !is_code && !fence && !line.starts_with(['|', '<']) && !line.starts_with("![")
    });
    let is_word = |word: &&str| word.chars().any(char::is_alphabetic);
    let count = |line: &str| line.split('$').step_by(2).flat_map(str::split_whitespace).filter(is_word).count();
    let words: usize = prose.map(count).sum();
    assert!(words <= MOST_WORDS, "{words} words; at most {MOST_WORDS}");
}

/// The text area of report/writeup.typ, from the top left corner to the bottom right one.
fn text_area() -> (Point, Point) {
    (Point::new(Abs::mm(25.0), Abs::mm(28.0)), Point::new(Abs::mm(210.0 - 25.0), Abs::mm(297.0 - 26.0)))
}

/// The empty share of a page's text area at its foot.
fn empty_at_foot(page: &Frame) -> f64 {
    let (Point { y: top, .. }, Point { y: bottom, .. }) = text_area();
    let mut lowest = top;
    walk(page, Point::zero(), &mut |item, at| {
        let height = match item {
            FrameItem::Image(_, Size { y, .. }, _) => *y,
            FrameItem::Text(_) | FrameItem::Shape(..) => Abs::zero(),
            FrameItem::Group(_) | FrameItem::Link(..) | FrameItem::Tag(_) => return,
        };
        if at.y + height <= bottom {
            lowest = lowest.max(at.y + height);
        }
    });
    (bottom - lowest) / (bottom - top)
}

#[test]
fn no_page_but_the_last_of_a_half_has_a_hole_at_its_foot() {
    let (body, all) = (body_pages(), PAGES.pages().len());
    let pages = PAGES.pages().iter().enumerate().filter(|(at, _)| ![body - 1, all - 1].contains(at));
    let holes = pages.filter_map(|(at, page)| {
        let (empty, most) = (empty_at_foot(&page.frame), if at < body { MOST_EMPTY } else { MOST_EMPTY_OF_APPENDIX });
        (empty > most).then(|| format!("page {}: {:.0} %", at + 1, 100.0 * empty))
    });
    let holes: Vec<String> = holes.collect();
    assert!(holes.is_empty(), "empty at the foot: {}", holes.join(", "));
}

#[test]
fn every_figure_of_the_main_body_stands_in_its_problem() {
    let problems = labelled("problem-");
    let figures = labelled("figures/");
    assert!(!figures.is_empty(), "the report has no figure");
    for (path, page, y) in figures.iter().filter(|(_, page, _)| *page < body_pages()) {
        let before = problems.iter().rev().find(|(_, at, top)| (at, top) <= (page, y));
        // A figure at the top of a page belongs to the problem that goes on below it.
        let next = problems.iter().find(|(_, at, top)| (at, top) > (page, y));
        let at_top = *y < Abs::mm(60.0);
        let of = |problem: Option<&(String, usize, Abs)>| {
            problem.is_some_and(|(name, ..)| path.starts_with(&format!("{name}-")))
        };
        let summary = path.ends_with("-summary.svg") && *page == 0;
        assert!(
            summary || of(before) || (at_top && of(next)),
            "{path} stands on page {}, {y:?} from its top, outside its problem; problems begin at {problems:?}",
            page + 1
        );
    }
}

/// What the layout of the report costs. A cell whose column and row typst must size is laid out three times, and six times
/// in a table that is measured whole: every text of one is shaped each time.
#[test]
fn the_report_is_laid_out_twice_and_each_cell_shaped_at_most_three_times() {
    assert_eq!(traced("layout document"), 2, "page numbers and references need two layouts");
    let cells = PAGES.introspector().query(&TableCell::ELEM.select()).len();
    let shaped = traced("prepare");
    assert!(shaped > cells && cells > 1000, "{shaped} paragraphs and {cells} cells: typst's trace has changed");
    assert!(shaped <= 3 * cells, "{shaped} paragraphs were shaped for {cells} cells; at most {}", 3 * cells);
}

#[test]
fn no_words_are_printed_over_others() {
    for (number, page) in PAGES.pages().iter().enumerate() {
        // by baseline in half points: where each text begins and ends
        let mut lines: BTreeMap<i64, Vec<(f64, f64, String)>> = BTreeMap::new();
        walk(&page.frame, Point::zero(), &mut |item, at| {
            let FrameItem::Text(text) = item else { return };
            if !text.font.info().family.contains("Math") {
                let (from, width) = (at.x.to_pt(), text.width().to_pt());
                let line = lines.entry((2.0 * at.y.to_pt()).round() as i64).or_default();
                line.push((from, from + width, text.text.to_string()));
            }
        });
        for line in lines.values_mut() {
            line.sort_by(|a, b| a.0.total_cmp(&b.0));
            let over = line.windows(2).find(|pair| pair[0].1 > pair[1].0 + 1.0);
            assert_eq!(over, None, "page {}", number + 1);
        }
    }
}

/// Of a table that is cut at the margin, numbers are missing in print. Above the text area is a page's header, below it
/// its number.
#[test]
fn no_words_and_no_picture_reach_beyond_the_margins() {
    let (first, last) = text_area();
    // typst lets punctuation hang over, as printers do
    let slack = Abs::pt(3.0);
    let mut beyond = Vec::new();
    for (number, page) in PAGES.pages().iter().enumerate() {
        walk(&page.frame, Point::zero(), &mut |item, at| {
            let (size, words) = match item {
                FrameItem::Text(text) => {
                    // a line that was broken ends with its space
                    let is_space = |glyph: &&Glyph| text.text[glyph.range()].trim().is_empty();
                    let spaces =
                        text.glyphs.iter().rev().take_while(is_space).map(|glyph| glyph.x_advance.at(text.size));
                    (Size::new(text.width() - spaces.sum::<Abs>(), Abs::zero()), text.text.to_string())
                }
                FrameItem::Image(_, size, _) => (*size, "a picture".into()),
                _ => return,
            };
            let is_inside =
                at.x >= first.x - slack && at.x + size.x <= last.x + slack && at.y + size.y <= last.y + slack;
            if !is_inside && words != (number + 1).to_string() {
                beyond.push(format!("page {}: {words:?} at {at:?}", number + 1));
            }
        });
    }
    assert!(beyond.is_empty(), "{} items, of them {:#?}", beyond.len(), &beyond[..beyond.len().min(5)]);
}

#[test]
fn no_letter_is_too_small_to_read() {
    let mut small = BTreeSet::new();
    for (number, page) in PAGES.pages().iter().enumerate() {
        walk(&page.frame, Point::zero(), &mut |item, _| {
            let FrameItem::Text(text) = item else { return };
            let family = &text.font.info().family;
            let least = if family.contains("Mono") { LEAST_MONOSPACED } else { LEAST_LETTER };
            if !family.contains("Math") && text.size.to_pt() < least - 0.01 {
                small.insert((number + 1, format!("{:.1} pt", text.size.to_pt()), text.text.to_string()));
            }
        });
    }
    let of_pages: BTreeMap<usize, _> = small.iter().map(|(page, size, text)| (*page, (size, text))).collect();
    assert!(small.is_empty(), "{} texts are smaller than 8 pt, one of each page: {of_pages:?}", small.len());
    for (path, svg) in &RENDERED.figures {
        let svg = std::str::from_utf8(svg).unwrap();
        for size in svg.split("font-size=\"").skip(1).filter_map(|rest| rest.split('"').next()?.parse::<f64>().ok()) {
            assert!(size >= LEAST_LETTER, "{path} has letters of {size} pt");
        }
    }
}
