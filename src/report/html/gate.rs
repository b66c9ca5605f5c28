//! What a reader relies on in the HTML edition: links that lead somewhere, numbers with their cases, no network.

use std::collections::BTreeSet;

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::Value;

use super::cases;
use crate::harness::answer::mark;

/// The largest page, in bytes.
const LARGEST: usize = 5_000_000;

/// Elements without content.
const VOID: [&str; 6] = ["meta", "link", "br", "hr", "input", "img"];

/// What a page holds, for messages.
#[derive(Debug, Default, PartialEq)]
pub struct Counts {
    pub numbers: usize,
    pub cases: usize,
    pub bytes: usize,
}

/// Errors: a mark that is left, an element without its end, an id twice, a link without its target, a number whose case is not in
/// the page's data, a resource of another file, a page that is too large.
pub fn check(page: &str) -> Result<Counts> {
    ensure!(page.len() < LARGEST, "the page has {} bytes; at most {LARGEST} are allowed", page.len());
    let left = page.find([mark::KEY, mark::TEXT, mark::END]);
    ensure!(left.is_none(), "a mark is left in the page: {:?}", around(page, left.unwrap_or_default()));
    let tags = tags(page)?;
    balanced(&tags)?;
    let mut ids = BTreeSet::new();
    for tag in &tags {
        if let Some(id) = tag.attribute("id") {
            ensure!(ids.insert(id), "two elements have the id {id:?}");
        }
    }
    let known = known_cases(page)?;
    let mut counts = Counts { cases: known.len(), bytes: page.len(), ..Counts::default() };
    for tag in &tags {
        local(tag)?;
        for reference in ["href", "aria-labelledby"].iter().filter_map(|name| tag.attribute(name)) {
            let target =
                if tag.attribute("href") == Some(reference) { reference.strip_prefix('#') } else { Some(reference) };
            ensure!(target.is_none_or(|id| ids.contains(id)), "{:?} leads nowhere", tag.text);
        }
        if tag.attribute("class") == Some("q") {
            counts.numbers += 1;
            linked(tag, &known)?;
        }
    }
    Ok(counts)
}

/// The names of the cases in the page's data.
fn known_cases(page: &str) -> Result<BTreeSet<String>> {
    let opening = "<script type=\"application/json\" id=\"data\">";
    let (_, data) = page.split_once(opening).context("the page has no data")?;
    let data: Value = serde_json::from_str(data.split("</script>").next().unwrap_or_default())?;
    Ok(data["cases"].as_object().context("the page's data has no cases")?.keys().cloned().collect())
}

/// A number's link leads to a case of the data, and all the cases that it names are there.
fn linked(tag: &Tag<'_>, known: &BTreeSet<String>) -> Result<()> {
    let first = tag.attribute("href").and_then(|href| href.strip_prefix("#case-")).unwrap_or_default();
    ensure!(known.contains(first), "{:?} names a case that the page's data lacks", tag.text);
    for case in mark::cases(tag.attribute("data-q").unwrap_or_default()) {
        let name = cases::name(&case);
        ensure!(known.contains(&name), "{:?} names {name}, which the page's data lacks", tag.text);
    }
    Ok(())
}

/// Only links of prose may leave the file.
fn local(tag: &Tag<'_>) -> Result<()> {
    for name in ["src", "srcset", "poster", "data", "action"].into_iter().chain((tag.name != "a").then_some("href")) {
        let Some(address) = tag.attribute(name) else { continue };
        let inside = address.starts_with('#') || address.starts_with("data:");
        ensure!(inside, "{:?} needs another file", tag.text);
    }
    Ok(())
}

fn balanced(tags: &[Tag<'_>]) -> Result<()> {
    let mut open: Vec<&str> = Vec::new();
    for tag in tags.iter().filter(|tag| !VOID.contains(&tag.name) && !tag.text.ends_with('/')) {
        if !tag.closes {
            open.push(tag.name);
        } else if open.pop() != Some(tag.name) {
            bail!("</{}> ends no element that is open", tag.name);
        }
    }
    ensure!(open.is_empty(), "{open:?} have no end");
    Ok(())
}

#[derive(Debug)]
struct Tag<'a> {
    name: &'a str,
    /// Between "<" and ">".
    text: &'a str,
    closes: bool,
}

impl<'a> Tag<'a> {
    fn attribute(&self, name: &str) -> Option<&'a str> {
        let opening = format!(" {name}=\"");
        let (_, rest) = self.text.split_once(&opening)?;
        rest.split('"').next()
    }
}

/// Every tag; what scripts and styles contain is not looked at.
fn tags(page: &str) -> Result<Vec<Tag<'_>>> {
    let (mut tags, mut rest) = (Vec::new(), page);
    while let Some(at) = rest.find('<') {
        rest = &rest[at + 1..];
        if rest.starts_with('!') {
            continue;
        }
        let text = rest.split('>').next().unwrap_or_default();
        ensure!(text.len() < rest.len() && !text.contains('<'), "a tag does not end: {:?}", around(rest, 0));
        let inner = text.trim_start_matches('/');
        let name = inner.split([' ', '/', '\n']).next().unwrap_or_default();
        let closes = text.starts_with('/');
        tags.push(Tag { name, text, closes });
        rest = &rest[text.len() + 1..];
        if !closes && matches!(name, "script" | "style") {
            let end = rest.find(&format!("</{name}>")).with_context(|| format!("<{name}> has no end"))?;
            rest = &rest[end..];
        }
    }
    Ok(tags)
}

fn around(text: &str, at: usize) -> String {
    text.get(at..).unwrap_or_default().chars().take(60).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(body: &str) -> String {
        let data = r#"<script type="application/json" id="data">{"runs": {}, "cases": {"x.gpu.0": {}}}</script>"#;
        format!("<!DOCTYPE html><html><meta charset=\"utf-8\"/><p id=\"case-x.gpu.0\">1 &lt; 2</p>{body}{data}</html>")
    }

    #[test]
    fn a_sound_page_is_counted() {
        let counts = check(&page("<a class=\"q\" href=\"#case-x.gpu.0\">1</a><a href=\"https://a.b\">c</a>")).unwrap();
        assert_eq!((counts.numbers, counts.cases), (1, 1));
    }

    #[test]
    fn each_fault_is_named() {
        for (body, expected) in [
            ("<p>", "ends no element that is open"),
            ("<b", "a tag does not end"),
            ("<p id=\"case-x.gpu.0\"></p>", "two elements have the id"),
            ("<a href=\"#nowhere\">1</a>", "leads nowhere"),
            ("<section aria-labelledby=\"nobody\"></section>", "leads nowhere"),
            ("<a class=\"q\" href=\"#case-x.gpu.0\" data-q=\"x.gpu.0-1\">1</a>", "names x.gpu.1"),
            ("<img src=\"http://a.b/c.png\"/>", "needs another file"),
            ("<link href=\"https://a.b/c.css\"/>", "needs another file"),
            ("a\u{E000}b", "a mark is left"),
        ] {
            let error = format!("{:#}", check(&page(body)).unwrap_err());
            assert!(error.contains(expected), "{body}: {error}");
        }
    }
}
