//! Tables: columns with a format, rows of typed cells, and how a case that was not measured shows.

use anyhow::{Result, ensure};

use super::format::{NOTHING, Style, print, time};
use super::mark;
use super::quantity::{Quantity, Unit};
use super::records::CaseId;
use super::turns::UNSTABLE;

/// A table of an answer; [`Table::markdown`] is its one text form.
#[derive(Debug, Clone, PartialEq)]
pub struct Table {
    pub columns: Vec<Column>,
    pub rows: Vec<Vec<Cell>>,
    /// Markdown. `None` if the template writes the caption.
    pub caption: Option<String>,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Column {
    /// Markdown, with the unit of its numbers: "step (ms)".
    pub head: String,
    pub format: Format,
}

/// How a column prints its cells.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Format {
    /// Text, aligned left.
    Words,
    /// Text, or numbers formatted as text, aligned right.
    Right,
    /// Numbers in one style with a fixed number of decimals, aligned right.
    Number(Style, usize),
    /// Milliseconds with three significant digits, aligned right.
    Time,
}

#[derive(Debug, Clone, PartialEq)]
pub enum Cell {
    /// Markdown: a name, an outcome ("OOM"), a number that is formatted by itself.
    Text(String),
    Number(Quantity, Emphasis),
    /// A value that does not exist: an en dash.
    Missing,
}

/// What sets a number apart from the others of its table.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Emphasis {
    pub bold: bool,
    /// Its turns disagree: [`UNSTABLE`] follows it.
    pub unstable: bool,
}

impl Column {
    pub fn text(head: impl Into<String>) -> Self {
        Self { head: head.into(), format: Format::Words }
    }

    pub fn right(head: impl Into<String>) -> Self {
        Self { head: head.into(), format: Format::Right }
    }

    pub fn number(head: impl Into<String>, style: Style, digits: usize) -> Self {
        Self { head: head.into(), format: Format::Number(style, digits) }
    }

    pub fn time(head: impl Into<String>) -> Self {
        Self { head: head.into(), format: Format::Time }
    }
}

/// A table that grows by columns: what heads a column stands beside what fills it, for each item's row.
pub struct TableBuilder<T> {
    items: Vec<T>,
    table: Table,
}

impl<T> TableBuilder<T> {
    pub fn text<C: Into<Cell>>(self, head: impl Into<String>, cell: impl Fn(&T) -> C) -> Self {
        self.column(Column::text(head), cell)
    }

    pub fn right<C: Into<Cell>>(self, head: impl Into<String>, cell: impl Fn(&T) -> C) -> Self {
        self.column(Column::right(head), cell)
    }

    /// Numbers in `style` with `digits` after the point; a cell may hold a text in place of its number.
    pub fn number<C: Into<Cell>>(
        self,
        head: impl Into<String>,
        style: Style,
        digits: usize,
        cell: impl Fn(&T) -> C,
    ) -> Self {
        self.column(Column::number(head, style, digits), cell)
    }

    pub fn column<C: Into<Cell>>(mut self, column: Column, cell: impl Fn(&T) -> C) -> Self {
        self.table.columns.push(column);
        for (row, item) in self.table.rows.iter_mut().zip(&self.items) {
            row.push(cell(item).into());
        }
        self
    }

    /// Sets the caption, in Markdown.
    pub fn captioned(self, caption: impl Into<String>) -> Table {
        self.table.captioned(caption)
    }
}

impl<T> From<TableBuilder<T>> for Table {
    fn from(builder: TableBuilder<T>) -> Self {
        builder.table
    }
}

impl Cell {
    pub fn text(text: impl Into<String>) -> Self {
        Self::Text(text.into())
    }

    /// A text that begins with a number, such as "12.6 ± 0.8", gets the mark of the case that it comes from.
    pub fn of_case(self, id: &CaseId) -> Self {
        match self {
            Self::Text(text) if text.starts_with(|c: char| c.is_ascii_digit()) => Self::Text(id.mark(&text)),
            cell => cell,
        }
    }
}

impl From<&str> for Cell {
    fn from(text: &str) -> Self {
        Self::text(text)
    }
}

impl From<String> for Cell {
    fn from(text: String) -> Self {
        Self::Text(text)
    }
}

/// A number without a unit that comes from no record.
impl From<f64> for Cell {
    fn from(number: f64) -> Self {
        Quantity::constant(number, Unit::One).into()
    }
}

impl From<Quantity> for Cell {
    fn from(quantity: Quantity) -> Self {
        Self::Number(quantity, Emphasis::default())
    }
}

impl From<&Quantity> for Cell {
    fn from(quantity: &Quantity) -> Self {
        quantity.clone().into()
    }
}

impl<T: Into<Self>> From<Option<T>> for Cell {
    fn from(cell: Option<T>) -> Self {
        cell.map_or(Self::Missing, Into::into)
    }
}

impl Table {
    pub fn new(columns: Vec<Column>) -> Self {
        Self { columns, rows: Vec::new(), caption: None }
    }

    /// A table with a row for each item, whose columns [`TableBuilder`] adds.
    pub fn of<T>(items: impl IntoIterator<Item = T>) -> TableBuilder<T> {
        let items: Vec<T> = items.into_iter().collect();
        let rows = items.iter().map(|_| Vec::new()).collect();
        TableBuilder { items, table: Self { rows, ..Self::new(Vec::new()) } }
    }

    pub fn row(&mut self, cells: Vec<Cell>) {
        self.rows.push(cells);
    }

    /// Sets the caption, in Markdown.
    pub fn captioned(mut self, caption: impl Into<String>) -> Self {
        self.caption = Some(caption.into());
        self
    }

    /// Errors: no rows, a row with too few or too many cells, or a number that does not fit its column's format.
    pub fn validate(&self) -> Result<()> {
        ensure!(!self.columns.is_empty(), "the table has no columns");
        for (i, row) in self.rows.iter().enumerate() {
            let (cells, columns) = (row.len(), self.columns.len());
            ensure!(cells == columns, "row {i} has {cells} cells for {columns} columns");
            for (cell, column) in row.iter().zip(&self.columns) {
                let Cell::Number(quantity, _) = cell else { continue };
                let fits = match column.format {
                    Format::Number(style, _) => style.fits(quantity.unit()),
                    Format::Time => Style::Ms.fits(quantity.unit()),
                    Format::Words | Format::Right => false,
                };
                ensure!(fits, "row {i}, column {:?}: {} does not fit its format", column.head, quantity.short());
                ensure!(quantity.value().is_finite(), "row {i}, column {:?}: the number is not finite", column.head);
            }
        }
        Ok(())
    }

    /// A pipe table, followed by the caption if there is one.
    pub fn markdown(&self) -> String {
        mark::plain(&self.marked())
    }

    /// [`Self::markdown`] with marks that name the cases of each number.
    pub fn marked(&self) -> String {
        let line = |cells: Vec<&str>| format!("| {} |\n", cells.join(" | "));
        let mut out = line(self.columns.iter().map(|column| column.head.as_str()).collect());
        let marks = self.columns.iter().map(|c| if c.format == Format::Words { ":--" } else { "---:" });
        out += &format!("|{}|\n", marks.collect::<Vec<_>>().join("|"));
        for row in &self.rows {
            let cells: Vec<String> = row.iter().zip(&self.columns).map(|(cell, column)| cell.marked(column)).collect();
            out += &line(cells.iter().map(String::as_str).collect());
        }
        if let Some(caption) = &self.caption {
            out += &format!("\nTable: {caption}\n");
        }
        out
    }
}

impl Cell {
    /// What the cell prints, as plain text or Markdown.
    pub fn markdown(&self, column: &Column) -> String {
        mark::plain(&self.marked(column))
    }

    fn marked(&self, column: &Column) -> String {
        let (quantity, emphasis) = match self {
            Self::Text(text) => return text.clone(),
            Self::Missing => return NOTHING.into(),
            Self::Number(quantity, emphasis) => (quantity, emphasis),
        };
        let text = match column.format {
            Format::Number(style, digits) => print(quantity.value(), style, digits),
            Format::Time => time(quantity.value()),
            // `validate` refuses it.
            Format::Words | Format::Right => quantity.short(),
        };
        let number = mark::marked(&text, &mark::key(quantity.sources()));
        let number = if emphasis.bold { format!("**{number}**") } else { number };
        if emphasis.unstable { number + UNSTABLE } else { number }
    }
}

#[cfg(test)]
mod tests {
    use super::super::made_up::{machine, source};
    use super::*;

    fn table(cell: Cell) -> Table {
        let mut table = Table::new(vec![Column::text("size"), Column::number("step (ms)", Style::Ms, 1)]);
        table.row(vec!["xl".into(), cell]);
        table
    }

    #[test]
    fn a_cell_prints_in_its_columns_format_and_a_missing_value_as_a_dash() {
        let measured = table(Quantity::constant(0.0125, Unit::Seconds).into());
        assert_eq!(measured.markdown(), "| size | step (ms) |\n|:--|---:|\n| xl | 12.5 |\n");
        assert!(table(Cell::Missing).markdown().ends_with("| xl | – |\n"));
        assert!(table("OOM".into()).captioned("Steps.").markdown().ends_with("| xl | OOM |\n\nTable: Steps.\n"));
    }

    #[test]
    fn an_emphasized_number_keeps_its_format_and_its_cases() {
        let source = source("a", machine(None));
        let step = Quantity::new(0.0125, Unit::Seconds, vec![source]);
        let marked = table(Cell::Number(step, Emphasis { bold: true, unstable: true }));
        assert!(marked.markdown().ends_with("| xl | **12.5** † |\n"));
        assert!(marked.marked().contains("**\u{E000}made_up.cpu.0\u{E001}12.5\u{E002}** †"), "{}", marked.marked());
    }

    #[test]
    fn a_number_in_words_is_marked_with_its_case_and_a_word_is_not() {
        let id = source("a", machine(None));
        let cell = |text: &str| Cell::text(text).of_case(&id);
        assert_eq!(cell("1.5 ± 0.1"), Cell::Text(mark::marked("1.5 ± 0.1", "made_up.cpu.0")));
        assert_eq!(cell("OOM"), "OOM".into());
        assert!(table(cell("1.5 ± 0.1")).markdown().ends_with("| xl | 1.5 ± 0.1 |\n"));
    }

    #[test]
    fn columns_fill_a_row_for_each_item() {
        let steps = Table::of([("xl", Some(0.0125)), ("2.7B", None)])
            .text("size", |(size, _)| *size)
            .number("step (ms)", Style::Ms, 1, |(_, step)| step.map(|s| Quantity::constant(s, Unit::Seconds)))
            .captioned("Steps.");
        assert_eq!(
            steps.markdown(),
            "| size | step (ms) |\n|:--|---:|\n| xl | 12.5 |\n| 2.7B | – |\n\nTable: Steps.\n"
        );
        assert!(steps.validate().is_ok());
    }

    #[test]
    fn a_row_of_the_wrong_width_and_a_number_of_the_wrong_unit_are_refused() {
        let mut ragged = table(Cell::Missing);
        ragged.row(vec!["small".into()]);
        assert!(ragged.validate().unwrap_err().to_string().contains("1 cells for 2 columns"));
        let bytes = table(Quantity::constant(1.0, Unit::Bytes).into());
        assert!(bytes.validate().unwrap_err().to_string().contains("does not fit"));
        assert!(table(Quantity::constant(f64::NAN, Unit::Seconds).into()).validate().is_err());
        assert!(table(Quantity::constant(1.0, Unit::Seconds).into()).validate().is_ok());
    }
}
