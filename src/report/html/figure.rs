//! Figures inline: an SVG that fits its page, with ids of its own and its text as a label.

use std::collections::BTreeSet;

use super::escape::attribute;

/// The figure with its caption; `id` begins its ids, so that two figures of a page have none in common.
pub fn html(svg: &str, id: &str, alt: &str, caption: Option<&str>) -> String {
    let start = svg.find("<svg").unwrap_or_default();
    let (root, drawn) = svg[start..].split_once('>').unwrap_or_default();
    let root = without(&without(root, "width"), "height");
    let label = attribute(alt);
    let caption = caption.map_or(String::new(), |caption| format!("\n<figcaption>{caption}</figcaption>"));
    let drawn = own_ids(drawn.trim_end(), id);
    format!("<figure id=\"{id}\">{root} role=\"img\" aria-label=\"{label}\">{drawn}{caption}</figure>")
}

/// A tag without one attribute.
fn without(tag: &str, name: &str) -> String {
    let opening = format!(" {name}=\"");
    let Some((before, rest)) = tag.split_once(&opening) else { return tag.into() };
    format!("{before}{}", rest.split_once('"').map_or("", |(_, after)| after))
}

/// The drawing with `id-` before each id and each reference to one; of two equal ids the first stays.
fn own_ids(drawn: &str, id: &str) -> String {
    let (mut out, mut known) = (String::new(), BTreeSet::new());
    for (at, piece) in drawn.split(" id=\"").enumerate() {
        match piece.split_once('"').filter(|_| at > 0) {
            None => out += piece,
            Some((name, rest)) if known.insert(name) => out += &format!(" id=\"{id}-{name}\"{rest}"),
            Some((_, rest)) => out += rest,
        }
    }
    out.replace("url(#", &format!("url(#{id}-")).replace("href=\"#", &format!("href=\"#{id}-"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_figure_fits_its_page_and_keeps_its_ids_to_itself() {
        let svg = r##"<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg" width="45" height="9" viewBox="0 0 45 9"><g id="a"/><g id="a"/><use href="#a" stroke-width="1"/></svg>
"##;
        let html = html(svg, "fig", "two \"lines\"", Some("All."));
        assert!(
            html.starts_with(
                r#"<figure id="fig"><svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 45 9" role="img""#
            )
        );
        assert!(html.contains(r#"aria-label="two &quot;lines&quot;""#), "{html}");
        assert!(html.contains(r##"<g id="fig-a"/><g/><use href="#fig-a" stroke-width="1"/></svg>"##), "{html}");
        assert!(html.ends_with("<figcaption>All.</figcaption></figure>"));
    }
}
