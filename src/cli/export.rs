//! `cs336 export`: one table or figure of an answer, with its provenance as a comment.

use anyhow::{Context as _, Result, bail, ensure};
use pulldown_cmark::{Event, Options, Parser, Tag, TagEnd};

use super::document::{RecordSource, problem_input, with_problems};
use super::{Ended, handout_problem, registered};
use crate::harness::answer::table::Format as ColumnFormat;
use crate::harness::answer::{Cell, Table, mark};
use crate::harness::manifest::restoring;
use crate::harness::record::Profile;
use crate::harness::store::Layout;
use crate::printable::indented;
use crate::report::{self, ProblemInput, figures, markdown};

mod provenance;

use provenance::provenance;

#[derive(clap::Args)]
pub struct Arguments {
    problem: String,
    #[command(flatten)]
    item: Item,
    /// By default md for a table and svg for a figure
    #[arg(long, value_enum)]
    format: Option<Format>,
}

#[derive(clap::Args)]
#[group(required = true, multiple = false)]
struct Item {
    /// The id of a table, as the template names it
    #[arg(long)]
    table: Option<String>,
    /// The id of a figure, as the template names it
    #[arg(long)]
    figure: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Format {
    Tex,
    Typ,
    Md,
    Csv,
    Svg,
}

pub fn run(layout: &Layout, arguments: &Arguments) -> Result<Ended> {
    registered(&arguments.problem)?;
    let input = problem_input(layout, handout_problem(&arguments.problem)?, RecordSource::Here);
    ensure!(input.fault.is_none(), "{}", input.fault.unwrap_or_default());
    input.records.unreadable_files().for_each(|reason| eprintln!("cs336: {}", indented(reason, 4)));
    let name = &arguments.problem;
    let text = match (&arguments.item.table, &arguments.item.figure) {
        (Some(id), _) => {
            let tables = input.answer.tables();
            let mut table =
                tables.get(id).with_context(|| unknown(layout, &input, "table", id, tables.keys()))?.clone();
            let provenance = provenance(&input, Some(&table));
            if table.caption.is_none() {
                table.caption = caption(&report::render(&with_problems(vec![input]))?.markdown, &table);
            }
            export_table(name, id, &table, &provenance, arguments.format.unwrap_or(Format::Md))?
        }
        (None, Some(id)) => {
            let found = input.answer.figures();
            let figure = found.get(id).with_context(|| unknown(layout, &input, "figure", id, found.keys()))?;
            if arguments.format.is_some_and(|format| format != Format::Svg) {
                bail!("a figure is exported as svg; write --format svg, or leave --format out");
            }
            let lines = provenance(&input, None);
            format!("{}\n{}", comment(&format!("figure {id} of {name}\n{lines}")), figures::svg(&figure.drawing))
        }
        (None, None) => bail!("name a table or a figure"),
    };
    print!("{text}");
    Ok(Ended::Well)
}

/// The caption that the template wrote below a table.
fn caption(answer: &str, table: &Table) -> Option<String> {
    let (_, rest) = answer.split_once(table.markdown().trim_end())?;
    let (_, caption) = rest.trim_start().strip_prefix("**Table ")?.split_once(".** ")?;
    caption.split("\n\n").next().map(|caption| caption.trim().to_string())
}

fn unknown<'a>(
    layout: &Layout,
    input: &ProblemInput,
    kind: &str,
    id: &str,
    known: impl Iterator<Item = &'a String>,
) -> String {
    let (problem, records) = (input.handout.name, &input.records);
    let known: Vec<String> = known.map(|id| format!("{id:?}")).collect();
    let known = if known.is_empty() { format!("no {kind} at all") } else { known.join(", ") };
    let is_missing = |profile: &Profile| records.planned(*profile).next().is_some() && records.of(*profile).is_none();
    let missing = Profile::ALL.into_iter().find(is_missing).map_or(String::new(), |profile| {
        let restored = restoring(&layout.root, &format!("snapshots/{profile}/{problem}.json"));
        format!(
            ". Records of the {profile}, which may have more, are missing: {restored}, or `cs336 measure {problem}`"
        )
    });
    format!("{problem} has no {kind} {id:?}; it has {known}{missing}")
}

fn export_table(problem: &str, id: &str, table: &Table, provenance: &str, format: Format) -> Result<String> {
    let note = format!("table {id} of {problem}\n{provenance}");
    let commented = |mark: &str| note.lines().map(|line| format!("{mark} {line}\n")).collect::<String>();
    let caption =
        table.caption.as_ref().map_or(format!("Table `{id}` of `{problem}`."), |caption| mark::plain(caption));
    Ok(match format {
        Format::Md => format!("{}\n\n{}", comment(&note), table.markdown()),
        Format::Csv => without_formulas(&commented("#"), &[',', ';', '\t']) + &csv(table),
        Format::Tex => commented("%") + &tex(table, &caption),
        Format::Typ => {
            let captioned = Table { caption: Some(caption), ..table.clone() }.markdown();
            let converted = markdown::convert(id, &captioned, &mut markdown::Counters::default())?;
            format!("{}{TYPST}\n{}\n", commented("//"), converted.typst)
        }
        Format::Svg => bail!("a table is exported as tex, typ, md or csv; write --format with one of them"),
    })
}

/// A comment of XML and HTML, which two hyphens would end.
fn comment(text: &str) -> String {
    let mut inner = String::with_capacity(text.len());
    for c in text.chars() {
        if c == '-' && inner.ends_with('-') {
            inner.push(' ');
        }
        inner.push(c);
    }
    format!("<!-- {inner}-->")
}

/// What the typst of a table calls.
const TYPST: &str = r#"#let formula(source, block: false, it) = math.equation(alt: source, block: block, it.body)
#let room(digits, point: false) = hide((if point { "." } else { "" }) + "0" * digits)
#let three-line-table(columns: 1, align: (), caption: [], header: (), narrow: (), ..cells) = figure(
  caption: caption,
  table(columns: columns, align: (x, _) => align.at(x), stroke: none,
    table.hline(), table.header(..header), table.hline(stroke: 0.5pt), ..cells.pos(), table.hline()),
)
"#;

/// The header's cells and each row's, as Markdown.
fn lines(table: &Table) -> impl Iterator<Item = Vec<String>> {
    let head = table.columns.iter().map(|column| column.head.clone()).collect();
    let row = |row: &Vec<Cell>| row.iter().zip(&table.columns).map(|(cell, column)| cell.markdown(column)).collect();
    std::iter::once(head).chain(table.rows.iter().map(row))
}

fn csv(table: &Table) -> String {
    let field = |cell: &String| {
        let text = inline(cell, false);
        let number = text.replace(',', "").replace('−', "-");
        match text {
            _ if number.parse::<f64>().is_ok() => number,
            text => csv_field(text),
        }
    };
    lines(table).map(|row| row.iter().map(field).collect::<Vec<_>>().join(",") + "\n").collect()
}

/// A cell of a CSV file, in quotation marks where it needs them, of which no spreadsheet computes a part where it splits at
/// semicolons or tabs: there a quotation mark within a line keeps no text together.
pub fn csv_field(text: String) -> String {
    let cell = without_formulas(&text, &[';', '\t', '\n', '\r']);
    if cell.contains([',', '"', '\n', '\r']) { format!("\"{}\"", cell.replace('"', "\"\"")) } else { cell }
}

/// An apostrophe keeps a spreadsheet from computing `text`, or a part of it behind one of the `separators`.
fn without_formulas(text: &str, separators: &[char]) -> String {
    // Spreadsheets take full-width signs too.
    const FORMULAS: [char; 8] = ['=', '+', '-', '@', '＝', '＋', '－', '＠'];
    let mut cell = String::with_capacity(text.len());
    let mut begins = true;
    for letter in text.chars() {
        if begins && (FORMULAS.contains(&letter) || cell.is_empty() && ['\t', '\r'].contains(&letter)) {
            cell.push('\'');
        }
        cell.push(letter);
        begins = separators.contains(&letter) || begins && letter == '"';
    }
    cell
}

/// A booktabs table.
fn tex(table: &Table, caption: &str) -> String {
    let align: String = table.columns.iter().map(|c| if c.format == ColumnFormat::Words { 'l' } else { 'r' }).collect();
    let row =
        |cells: Vec<String>| cells.iter().map(|cell| inline(cell, true)).collect::<Vec<_>>().join(" & ") + " \\\\\n";
    let mut rows = lines(table).map(row);
    let head = rows.next().unwrap_or_default();
    format!(
        "\\begin{{table}}\n\\centering\n\\caption{{{}}}\n\\begin{{tabular}}{{{align}}}\n\\toprule\n{head}\\midrule\n{}\\bottomrule\n\
         \\end{{tabular}}\n\\end{{table}}\n",
        inline(caption, true),
        rows.collect::<String>()
    )
}

/// A line of Markdown as plain text or as LaTeX.
fn inline(markdown: &str, tex: bool) -> String {
    let mut out = String::new();
    // a word before keeps a number from opening a list
    let line = format!("x {markdown}");
    for event in Parser::new_ext(&line, Options::ENABLE_MATH) {
        match event {
            Event::Text(text) if tex => out += &tex_escape(&text),
            Event::Text(text) => out += &text,
            Event::Code(code) if tex => out += &format!("\\texttt{{{}}}", tex_escape(&code)),
            Event::Code(code) => out += &code,
            Event::InlineMath(latex) | Event::DisplayMath(latex) if tex => out += &format!("${latex}$"),
            Event::InlineMath(latex) | Event::DisplayMath(latex) => out += &latex,
            Event::Start(Tag::Emphasis) if tex => out += "\\emph{",
            Event::Start(Tag::Strong) if tex => out += "\\textbf{",
            Event::End(TagEnd::Emphasis | TagEnd::Strong) if tex => out += "}",
            Event::SoftBreak | Event::HardBreak => out += " ",
            _ => {}
        }
    }
    out.strip_prefix("x ").unwrap_or_default().to_string()
}

fn tex_escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '\\' => out += "\\textbackslash{}",
            '~' => out += "\\textasciitilde{}",
            '^' => out += "\\textasciicircum{}",
            '−' => out += "$-$",
            '±' => out += "$\\pm$",
            '×' => out += "$\\times$",
            '–' => out += "--",
            '&' | '%' | '$' | '#' | '_' | '{' | '}' => out.extend(['\\', c]),
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::answer::{Column, Quantity, Style, Unit};

    fn table() -> Table {
        let mut table = Table::new(vec![Column::text("size"), Column::number("step (ms)", Style::Ms, 1)]);
        table.row(vec!["`xl`, 50%".into(), Quantity::constant(-1.25, Unit::Seconds).into()]);
        table.captioned("Steps of $2^3$.")
    }

    #[test]
    fn a_table_is_exported_in_each_format() {
        let export = |format| export_table("x", "steps", &table(), "a machine, run r\n", format).unwrap();
        assert_eq!(
            export(Format::Csv),
            "# table steps of x\n# a machine, run r\nsize,step (ms)\n\"xl, 50%\",-1250.0\n"
        );
        let tex = export(Format::Tex);
        assert!(tex.starts_with("% table steps of x\n% a machine, run r\n\\begin{table}"), "{tex}");
        assert!(tex.contains("\\caption{Steps of $2^3$.}") && tex.contains("\\begin{tabular}{lr}"), "{tex}");
        assert!(tex.contains("\\texttt{xl}, 50\\% & $-$1,250.0 \\\\\n"), "{tex}");
        let md = export(Format::Md);
        assert!(md.starts_with("<!-- table steps of x\na machine, run r\n-->\n\n| size |"), "{md}");
        let typ = export(Format::Typ);
        assert!(typ.contains("// a machine, run r\n") && typ.contains("#three-line-table("), "{typ}");
        assert!(export_table("x", "steps", &table(), "", Format::Svg).is_err());
        let hostile = export_table("x", "steps", &table(), "a,=1+1,+2,\"@b\"\n", Format::Csv).unwrap();
        assert!(hostile.contains("\n# a,'=1+1,'+2,\"'@b\"\n"), "{hostile}");
    }

    #[test]
    fn a_cell_that_a_spreadsheet_would_compute_begins_with_an_apostrophe_and_a_number_does_not() {
        for (text, cell) in [
            ("=1,2", "\"'=1,2\""),
            ("-a", "'-a"),
            ("＝1", "'＝1"),
            ("\t=1", "'\t'=1"),
            ("\r=1", "\"'\r'=1\""),
            ("a=1", "a=1"),
            ("a;=1", "a;'=1"),
            ("a\t\"@b", "\"a\t\"\"'@b\""),
            ("a; 1", "a; 1"),
        ] {
            assert_eq!(csv_field(text.into()), cell);
        }
        let mut numbers = Table::new(vec![Column::number("x", Style::Ms, 1)]);
        numbers.row(vec![Quantity::constant(-1.25, Unit::Seconds).into()]);
        assert_eq!(csv(&numbers), "x\n-1250.0\n");
    }

    #[test]
    fn no_text_ends_the_comment_that_it_stands_in() {
        for hostile in ["--->", "---->", "a--b", "-->", "<!--->"] {
            let made = comment(&format!("{hostile}<script>\n"));
            let inner = made.strip_prefix("<!-- ").and_then(|rest| rest.strip_suffix("\n-->")).unwrap();
            assert!(!inner.contains("--"), "{made}");
        }
        assert_eq!(comment("a-b--c\n"), "<!-- a-b- -c\n-->");
    }

    #[test]
    fn an_unknown_name_lists_those_that_exist() {
        let ids = ["a".to_string(), "b".to_string()];
        let mut input = ProblemInput::default();
        input.handout.name = "x";
        let layout = &Layout::at("nowhere".into());
        assert_eq!(unknown(layout, &input, "table", "c", ids.iter()), "x has no table \"c\"; it has \"a\", \"b\"");
        assert_eq!(unknown(layout, &input, "figure", "c", [].iter()), "x has no figure \"c\"; it has no figure at all");
    }
}
