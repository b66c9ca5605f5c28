//! Ids of tables, figures and appendices: the same in `writeup.md` and in the HTML edition.

use std::collections::BTreeMap;
use std::ops::Range;

/// The id of the appendix about records.
pub const PROVENANCE: &str = "appendix-d";

/// Where a piece of the document stands.
#[derive(Debug, Clone, Default)]
pub struct Place {
    /// What its ids begin with: the problem's name.
    pub prefix: String,
    /// The appendices that it may name: their letters and ids.
    pub appendices: Vec<(char, String)>,
}

/// The tables so far, by the prefix of their ids.
#[derive(Debug, Clone, Default)]
pub struct Tables(BTreeMap<String, usize>);

impl Place {
    /// A place that may name the appendix about records, and these.
    pub fn new(prefix: &str, appendices: impl IntoIterator<Item = (char, String)>) -> Self {
        let provenance = ('D', PROVENANCE.to_string());
        Self { prefix: prefix.into(), appendices: appendices.into_iter().chain([provenance]).collect() }
    }

    /// The words "appendix B" of a text, in order, with the ids that they lead to.
    pub fn named(&self, text: &str) -> Vec<(Range<usize>, &str)> {
        let mut found = Vec::new();
        for (letter, id) in &self.appendices {
            for word in ["appendix", "Appendix"] {
                let name = format!("{word} {letter}");
                let places = text.match_indices(&name).map(|(at, name)| at..at + name.len());
                let whole = |place: &Range<usize>| !text[place.end..].starts_with(char::is_alphanumeric);
                found.extend(places.filter(whole).map(|place| (place, id.as_str())));
            }
        }
        found.sort_by_key(|(place, _)| place.start);
        found
    }
}

impl Tables {
    /// The id of the next table at a place.
    pub fn next(&mut self, place: &Place) -> String {
        let count = self.0.entry(place.prefix.clone()).or_default();
        *count += 1;
        format!("{}-table-{count}", place.prefix)
    }
}

/// The id of the figure at a path relative to `writeup.md`.
pub fn figure(path: &str) -> String {
    format!("figure-{}", slug(path.trim_start_matches("figures/").trim_end_matches(".svg")))
}

/// The id of what a problem puts into an appendix, by the heading in its template.
pub fn appendix(problem: &str, heading: &str) -> String {
    format!("{problem}-{}", slug(heading))
}

/// A place in `writeup.md` that links lead to.
pub fn markdown(id: &str) -> String {
    format!("<a id=\"{id}\"></a>\n\n")
}

/// An id made of words: "CPU grids" is "cpu-grids".
pub fn slug(text: &str) -> String {
    let kept = text.chars().map(|c| if c.is_alphanumeric() || c == '_' { c.to_ascii_lowercase() } else { ' ' });
    kept.collect::<String>().split_whitespace().collect::<Vec<_>>().join("-")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_made_of_words_and_count_within_their_place() {
        assert_eq!(slug("CPU grids (all)"), "cpu-grids-all");
        assert_eq!(figure("figures/a_b-full-rates.svg"), "figure-a_b-full-rates");
        let (mut tables, x, y) = (Tables::default(), Place::new("x", []), Place::new("y", []));
        assert_eq!([&x, &y, &x].map(|place| tables.next(place)), ["x-table-1", "y-table-1", "x-table-2"]);
    }

    #[test]
    fn only_an_appendix_that_exists_is_named() {
        let place = Place::new("x", [('B', "x-tables".to_string())]);
        let text = "Appendix D, appendix B, appendix C, appendix Box";
        assert_eq!(place.named(text), [(0..10, "appendix-d"), (12..22, "x-tables")]);
    }
}
