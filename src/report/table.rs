//! Converts a Markdown table to a three-line table with aligned decimal points.

use std::fmt::Write as _;

use anyhow::{Result, ensure};
use pulldown_cmark::Alignment;

use crate::harness::answer::turns::UNSTABLE;

/// A table of more rows folds in Markdown and in HTML, where it can be filtered too.
pub const LONG: usize = 12;

/// A table under construction; the first row is the header.
#[derive(Debug, Default)]
pub struct TypstTable {
    alignments: Vec<Alignment>,
    rows: Vec<Vec<TypstCell>>,
}

#[derive(Debug, Default)]
struct TypstCell {
    typst: String,
    /// The cell's text if it has no markup.
    plain: Option<String>,
}

impl TypstTable {
    pub fn new(alignments: Vec<Alignment>) -> Self {
        Self { alignments, rows: Vec::new() }
    }

    pub fn begin_row(&mut self) {
        self.rows.push(Vec::new());
    }

    /// The number of rows below the header.
    pub fn rows(&self) -> usize {
        self.rows.len().saturating_sub(1)
    }

    /// Adds a cell to the current row; `plain` is its text if it has no markup.
    pub fn cell(&mut self, typst: String, plain: Option<String>) {
        if let Some(row) = self.rows.last_mut() {
            row.push(TypstCell { typst, plain });
        }
    }

    /// A call of `three-line-table` with `caption` (typst markup); a short table stands on one page unless it `breaks`.
    pub fn typst(&self, caption: &str, breaks: bool) -> Result<String> {
        ensure!(self.rows.len() > 1, "the table has a header and no rows");
        let aligned = self.alignments.iter().map(|a| match a {
            Alignment::Right => "right, ",
            Alignment::Center => "center, ",
            Alignment::Left | Alignment::None => "left, ",
        });
        let mut out = format!(
            "#three-line-table(\n  columns: {},\n  breaks: {breaks},\n  align: ({}),\n  caption: [{caption}],\n",
            self.alignments.len(),
            aligned.collect::<String>()
        );
        let numbers: Vec<Option<Numbers>> = (0..self.alignments.len()).map(|column| self.numbers(column)).collect();
        let groups = self.groups();
        let _ = writeln!(out, "  gaps: ({}),", groups.iter().map(|row| format!("{row}, ")).collect::<String>());
        for (i, row) in self.rows.iter().enumerate() {
            // the first cell of a group stands for those below it
            let repeats = i > 1 && !groups.is_empty() && !groups.contains(&(i - 1));
            let cells = row.iter().zip(&numbers).enumerate().map(|(column, (cell, numbers))| match numbers {
                _ if column == 0 && repeats => "[], ".to_string(),
                Some(numbers) if i > 0 => cell.aligned(numbers) + ", ",
                _ => format!("[{}], ", cell.typst),
            });
            let cells: String = cells.collect();
            out += &if i == 0 { format!("  header: ({cells}),\n") } else { format!("  {cells}\n") };
            if i == 0 {
                let narrow: String =
                    (0..row.len()).map(|column| format!("[{}], ", self.narrow_header(column))).collect();
                out += &format!("  narrow: ({narrow}),\n");
            }
        }
        Ok(out + ");")
    }

    /// The header of a column in two lines of about equal length, or in one if it is one word.
    fn narrow_header(&self, column: usize) -> String {
        let cell = &self.rows[0][column];
        let Some(plain) = &cell.plain else { return cell.typst.clone() };
        let words: Vec<&str> = plain.split_whitespace().collect();
        let halves = (1..words.len()).map(|at| [words[..at].join(" "), words[at..].join(" ")]);
        let shortest = halves.min_by_key(|lines| lines.iter().map(|line| line.chars().count()).max());
        let lines = shortest.map_or(vec![plain.clone()], Vec::from);
        lines.iter().map(|line| super::escape::typst(line)).collect::<Vec<_>>().join(" #linebreak();")
    }

    /// The rows after which a group ends: runs of rows whose first cells are equal, if any two are.
    fn groups(&self) -> Vec<usize> {
        let first: Vec<&str> =
            self.rows[1..].iter().map(|row| row.first().map_or("", |cell| cell.typst.as_str())).collect();
        let repeats = |i: usize| !first[i].is_empty() && first[i] == first[i - 1];
        let ends: Vec<usize> = (1..first.len()).filter(|i| !repeats(*i)).collect();
        if ends.len() + 1 < first.len() { ends } else { Vec::new() }
    }

    /// What the numbers of a right-aligned column have in common; `None` without numbers.
    fn numbers(&self, column: usize) -> Option<Numbers> {
        if self.alignments[column] != Alignment::Right {
            return None;
        }
        let numbers = self.rows.iter().skip(1).filter_map(|row| row.get(column)?.number());
        let numbers: Vec<Number> = numbers.collect();
        let decimals = numbers.iter().map(|number| decimals(&number.text)).max()?;
        Some(Numbers { decimals, marked: numbers.iter().any(|number| number.marked) })
    }
}

/// The numbers of one column.
struct Numbers {
    /// The largest number of decimals.
    decimals: usize,
    /// Whether a mark follows one of them.
    marked: bool,
}

/// A cell that is one number.
struct Number {
    /// With a true minus sign.
    text: String,
    bold: bool,
    /// Whether [`UNSTABLE`] follows.
    marked: bool,
}

impl TypstCell {
    fn number(&self) -> Option<Number> {
        let bold = self.plain.is_none();
        let text = match &self.plain {
            Some(plain) => plain.clone(),
            None => {
                let (strong, rest) = self.typst.strip_prefix("#strong[")?.split_once("];")?;
                (strong.to_string() + rest).replace('\\', "")
            }
        };
        let text = text.trim();
        let (text, marked) = text.strip_suffix(UNSTABLE).map_or((text, false), |number| (number, true));
        let digits = text.trim_start_matches(['-', '−', '+']).trim_end_matches('%');
        let number = digits.starts_with(|c: char| c.is_ascii_digit())
            && digits.chars().all(|c| c.is_ascii_digit() || c == '.' || c == ',')
            && digits.matches('.').count() <= 1;
        number.then(|| Number { text: text.replace('-', "−"), bold, marked })
    }

    /// The cell as a value of typst: a string where it can be, which is set faster than markup.
    fn aligned(&self, numbers: &Numbers) -> String {
        let Some(Number { text, bold, marked }) = self.number() else { return format!("[{}]", self.typst) };
        let missing = numbers.decimals - decimals(&text);
        let mut out = super::escape::typst_string(&text);
        if bold {
            out = format!("strong({out})");
        }
        out += &match (marked, numbers.marked) {
            (true, _) => format!(" + \"{UNSTABLE}\""),
            (false, true) => format!(" + hide(\"{UNSTABLE}\")"),
            (false, false) => String::new(),
        };
        out + &match missing {
            0 => String::new(),
            missing if missing == numbers.decimals => format!(" + room({missing}, point: true)"),
            missing => format!(" + room({missing})"),
        }
    }
}

fn decimals(number: &str) -> usize {
    number.trim_end_matches('%').split_once('.').map_or(0, |(_, part)| part.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(cells: &[&str]) -> String {
        let mut table = TypstTable::new(vec![Alignment::Right]);
        for text in cells {
            table.begin_row();
            table.cell((*text).to_string(), Some((*text).to_string()));
        }
        table.typst("A caption.", false).unwrap()
    }

    #[test]
    fn numbers_with_fewer_decimals_are_padded_and_words_are_not() {
        let typst = table(&["time", "1.25", "12.5", "7", "OOM", "-0.50", "-3%"]);
        assert!(typst.contains("\"12.5\" + room(1), "), "{typst}");
        assert!(typst.contains("\"7\" + room(2, point: true), "), "{typst}");
        assert!(typst.contains("[OOM], ") && typst.contains("\"−0.50\", "), "{typst}");
        assert!(typst.contains("\"−3%\" + room(2, point: true), "), "{typst}");
    }

    #[test]
    fn bold_and_marked_numbers_keep_their_decimals_in_line() {
        let mut table = TypstTable::new(vec![Alignment::Right]);
        let bold = |number: &str| (format!("#strong[{number}];"), None);
        let plain = |text: &str| (text.replace('.', "\\."), Some(text.to_string()));
        let unstable = ("#strong[4\\.5]; †".to_string(), None);
        for (typst, plain) in [plain("time"), plain("1.25"), bold("12\\.5"), plain("3.5 †"), unstable, bold("OOM")] {
            table.begin_row();
            table.cell(typst, plain);
        }
        let typst = table.typst("A caption.", false).unwrap();
        for cell in [
            r#"  "1.25" + hide(" †"), "#,
            r#"  strong("12.5") + hide(" †") + room(1), "#,
            r#"  "3.5" + " †" + room(1), "#,
            r#"  strong("4.5") + " †" + room(1), "#,
            "  [#strong[OOM];], ",
        ] {
            assert!(typst.contains(cell), "{cell}: {typst}");
        }
    }

    #[test]
    fn equal_first_cells_make_groups_that_are_named_once() {
        let grouped = table(&["size", "xl", "xl", "small", "small", "tiny"]);
        assert!(grouped.contains("gaps: (2, 4, )"), "{grouped}");
        assert_eq!(grouped.matches("[xl]").count(), 1);
        let mut code = TypstTable::new(vec![Alignment::None]);
        for cell in ["problem", "#raw(\"a\");", "#raw(\"a\");", "#raw(\"b\");"] {
            code.begin_row();
            code.cell(cell.into(), None);
        }
        let code = code.typst("A caption.", true).unwrap();
        assert!(code.contains("gaps: (2, )") && code.contains("breaks: true"), "markup makes groups too: {code}");
        let plain = table(&["size", "xl", "small"]);
        assert!(plain.contains("gaps: ()"), "a table without repeats has no groups: {plain}");
    }

    #[test]
    fn a_long_header_breaks_into_two_lines() {
        let typst = table(&["peak memory of the step (GiB)", "1"]);
        assert!(typst.contains("narrow: ([peak memory of #linebreak();the step (GiB)], )"), "{typst}");
    }

    #[test]
    fn a_table_without_rows_is_an_error() {
        let mut table = TypstTable::new(vec![Alignment::None]);
        table.begin_row();
        table.cell("a".into(), None);
        assert!(table.typst("", false).is_err());
    }
}
