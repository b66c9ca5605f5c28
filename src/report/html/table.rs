//! One HTML table: caption, scopes, a frame that scrolls, and a fold where it is long.

use pulldown_cmark::Alignment;

use super::escape::text_of;
use crate::report::table::LONG;

/// Cells of finished HTML; the first row is the header.
#[derive(Default)]
pub struct Table {
    pub alignments: Vec<Alignment>,
    pub rows: Vec<Vec<String>>,
}

impl Table {
    pub fn html(&self, id: &str, caption: Option<&str>, fold: bool) -> String {
        let Some((head, body)) = self.rows.split_first() else { return String::new() };
        let head: String =
            head.iter().enumerate().map(|(at, cell)| self.cell(at, "th", " scope=\"col\"", cell)).collect();
        let rows: String = body.iter().map(|row| self.row(row)).collect();
        let long = body.len() > LONG;
        let class = if long { " class=\"long\"" } else { "" };
        let caption_html = caption.map_or(String::new(), |caption| format!("<caption>{caption}</caption>"));
        let table = format!(
            "<div class=\"wide\" role=\"group\" aria-label=\"Table\" tabindex=\"0\"><table id=\"{id}\"{class}>\
             {caption_html}\n<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}</tbody></table></div>"
        );
        if !(fold && long) {
            return table;
        }
        let words = caption.map(text_of).unwrap_or_default();
        let first = words.split_inclusive(". ").next().unwrap_or_default();
        format!("<details class=\"table\"><summary>{} rows: {first}</summary>\n{table}</details>", body.len())
    }

    fn row(&self, cells: &[String]) -> String {
        let cells = cells.iter().enumerate().map(|(at, cell)| match at {
            0 => self.cell(at, "th", " scope=\"row\"", cell),
            _ => self.cell(at, "td", "", cell),
        });
        format!("<tr>{}</tr>\n", cells.collect::<String>())
    }

    fn cell(&self, at: usize, tag: &str, scope: &str, html: &str) -> String {
        let class = match self.alignments.get(at) {
            Some(Alignment::Right) => " class=\"n\"",
            _ => "",
        };
        format!("<{tag}{scope}{class}>{html}</{tag}>")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(rows: usize) -> Table {
        let row = |cells: [&str; 2]| cells.map(String::from).to_vec();
        let body = (0..rows).map(|_| row(["xl", "12.5"]));
        Table {
            alignments: vec![Alignment::Left, Alignment::Right],
            rows: std::iter::once(row(["size", "ms"])).chain(body).collect(),
        }
    }

    #[test]
    fn a_table_has_scopes_and_its_caption_and_a_long_one_folds() {
        let short = table(1).html("t", Some("Steps. All."), true);
        assert!(short.contains("<th scope=\"row\">xl</th><td class=\"n\">12.5</td>"), "{short}");
        assert!(short.contains("<caption>Steps. All.</caption>") && !short.contains("<details"));
        let long = table(13).html("t", Some("Steps. All."), true);
        assert!(long.starts_with("<details class=\"table\"><summary>13 rows: Steps. </summary>"), "{long}");
        assert!(table(13).html("t", None, false).starts_with("<div"));
    }
}
