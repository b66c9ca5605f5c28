//! LaTeX formulas: one parser for all editions, and the typst of what it reads.

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use pulldown_latex::event::{
    Content, Dimension, DimensionUnit, EnvironmentFlow, Event, Font, Grouping, ScriptPosition, ScriptType, StateChange,
    Style, Visual,
};
use pulldown_latex::{Parser, Storage};

use super::escape::typst_string;

/// The commands that formulas may use besides single symbols such as `\alpha`, `\le` or `\max`.
pub const COMMANDS: &[&str] = &[
    r"\frac",
    r"\tfrac",
    r"\sqrt",
    r"\tilde",
    r"\mathrm",
    r"\text",
    r"\left",
    r"\right",
    r"\begin{aligned}",
    r"\end{aligned}",
    r"\\",
    r"\,",
    r"\ ",
    r"\qquad",
];

/// What `\ ` sets: as wide as a space between words. The parser calls it a text, in HTML's words.
const SPACE: Event<'_> =
    Event::Space { width: Some(Dimension { value: 1.0 / 3.0, unit: DimensionUnit::Em }), height: None, depth: None };

/// The parsed formula, which both editions are made from.
///
/// Errors name the formula, and the command that is not among [`COMMANDS`].
pub fn events<'a>(latex: &'a str, storage: &'a Storage) -> Result<Vec<Event<'a>>> {
    ensure!(!latex.trim().is_empty(), "an empty formula");
    let refused = |reason: String| anyhow!("the formula ${}$ does not convert: {reason}", latex.trim());
    if let Some(command) = commands(latex).into_iter().find(|command| !is_known(command)) {
        let known = COMMANDS.join(" ");
        return Err(refused(format!("{command} is unknown. Use a symbol or {known}, or extend src/report/latex.rs.")));
    }
    let events = Parser::new(latex, storage).map(|event| match event {
        Ok(Event::Content(Content::Text("&nbsp;"))) => Ok(SPACE),
        other => other,
    });
    // the first line is the reason, the others show the formula
    let reason =
        |error: String| error.lines().next().unwrap_or_default().trim_start_matches("parsing error: ").to_string();
    events.collect::<Result<_, _>>().map_err(|error: pulldown_latex::ParserError| refused(reason(error.to_string())))
}

/// One formula as a typst expression in markup; `block` sets it on a line of its own.
pub fn typst(latex: &str, block: bool) -> Result<String> {
    let storage = Storage::new();
    let events = events(latex, &storage)?;
    let mut writer = Writer { rest: &events, depth: 0 };
    let set = writer.row().and_then(|row| {
        ensure!(writer.rest.is_empty(), "{:?} ends nothing", writer.rest);
        Ok(row)
    });
    let set = set.with_context(|| format!("the formula ${}$ does not convert", latex.trim()))?;
    let alt = typst_string(&latex.split_whitespace().collect::<Vec<_>>().join(" "));
    let block = if block { "block: true, " } else { "" };
    Ok(format!("#formula({alt}, {block}$ {set} $);"))
}

/// Each command of a formula; `\begin` and `\end` with their environment.
pub fn commands(latex: &str) -> Vec<&str> {
    let (mut found, mut rest) = (Vec::new(), latex);
    while let Some(at) = rest.find('\\') {
        let name = &rest[at + 1..];
        let letters = name.find(|c: char| !c.is_ascii_alphabetic()).unwrap_or(name.len());
        let mut length = letters.max(name.chars().next().map_or(0, char::len_utf8));
        if matches!(&name[..length], "begin" | "end") {
            length = name.find('}').map_or(length, |end| end + 1);
        }
        found.push(&rest[at..=at + length]);
        rest = &name[length..];
    }
    found
}

/// Whether a command is one of [`COMMANDS`] or gives one symbol.
fn is_known(command: &str) -> bool {
    let storage = Storage::new();
    let mut alone = Parser::new(command, &storage);
    COMMANDS.contains(&command) || matches!((alone.next(), alone.next()), (Some(Ok(Event::Content(_))), None))
}

/// Writes typst's maths. A space stands only where two words would run together: next to text it would be visible.
struct Writer<'e, 'a> {
    rest: &'e [Event<'a>],
    /// Of the elements that the next one is within.
    depth: usize,
}

/// How deep elements nest at most: typst's stack ends at some hundred.
const MOST_DEPTH: usize = 32;

impl<'e, 'a> Writer<'e, 'a> {
    fn next(&mut self) -> Result<&'e Event<'a>> {
        let (first, rest) = self.rest.split_first().context("it ends too early")?;
        self.rest = rest;
        Ok(first)
    }

    /// Elements up to the end of the group, which is left, or of an alignment's cell.
    fn row(&mut self) -> Result<String> {
        let mut out = String::new();
        while !matches!(self.rest.first(), None | Some(Event::End | Event::EnvironmentFlow(_))) {
            let element = self.element()?;
            if out.ends_with(char::is_alphanumeric) && element.starts_with(char::is_alphanumeric) {
                out.push(' ');
            }
            out += &element;
        }
        Ok(out)
    }

    /// The rest of a group, with its end.
    fn group(&mut self) -> Result<String> {
        let row = self.row()?;
        ensure!(self.next()? == &Event::End, "a group does not end");
        Ok(if row.is_empty() { "\"\"".into() } else { row })
    }

    /// An element as an argument, which needs no braces.
    fn argument(&mut self) -> Result<String> {
        match self.rest {
            [Event::Begin(Grouping::Normal), Event::StateChange(_), ..] => self.element(),
            [Event::Begin(Grouping::Normal), ..] => {
                self.next()?;
                self.group()
            }
            _ => self.element(),
        }
    }

    fn element(&mut self) -> Result<String> {
        ensure!(self.depth < MOST_DEPTH, "it nests more than {MOST_DEPTH} deep; write it in parts");
        self.depth += 1;
        let written = self.of_any_depth()?;
        self.depth -= 1;
        Ok(written)
    }

    fn of_any_depth(&mut self) -> Result<String> {
        Ok(match self.next()? {
            Event::Content(content) => symbols(content)?,
            Event::Begin(Grouping::Normal) => match self.rest.first() {
                Some(Event::StateChange(StateChange::Font(Some(Font::UpRight)))) => self.upright()?,
                Some(Event::StateChange(StateChange::Style(Style::Text))) => {
                    self.next()?;
                    format!("inline({})", self.group()?)
                }
                _ => format!("class(\"normal\", {})", self.group()?),
            },
            Event::Begin(Grouping::LeftRight(left, right)) => {
                let [left, right] = [left, right].map(|side| side.map_or(String::new(), symbol));
                format!("lr({left}{}{right})", self.group()?)
            }
            Event::Begin(Grouping::Aligned) => self.aligned()?,
            Event::Visual(Visual::SquareRoot) => format!("sqrt({})", self.argument()?),
            Event::Visual(Visual::Fraction(None)) => format!("frac({}, {})", self.argument()?, self.argument()?),
            Event::Script { ty, position } => self.scripts(*ty, *position)?,
            Event::Space { width: Some(Dimension { value, unit: DimensionUnit::Em }), height: None, depth: None } => {
                format!("#h({value}em, weak: true)")
            }
            other => bail!("{other:?} has no typst form"),
        })
    }

    /// The rest of `\mathrm{...}` as one word, so that its letters are spaced as a word's.
    fn upright(&mut self) -> Result<String> {
        self.next()?;
        let mut word = String::new();
        loop {
            match self.next()? {
                Event::End => return Ok(typst_string(&word)),
                Event::Content(Content::Ordinary { content, .. } | Content::BinaryOp { content, .. }) => {
                    word.push(*content)
                }
                Event::Content(Content::Number(number)) => word += number,
                other => bail!("{other:?} cannot stand in \\mathrm"),
            }
        }
    }

    /// A base with its scripts, beside it, or above and below it where it is an operator in a line of its own.
    fn scripts(&mut self, ty: ScriptType, position: ScriptPosition) -> Result<String> {
        let base = match (self.rest, position) {
            ([Event::Content(Content::Function(name)), ..], ScriptPosition::Movable) => {
                self.next()?;
                format!("op({}, limits: #true)", typst_string(name))
            }
            _ => self.argument()?,
        };
        if position == ScriptPosition::AboveBelow {
            return match (ty, self.next()?) {
                (ScriptType::Superscript, Event::Content(Content::Ordinary { content: '~', .. })) => {
                    Ok(format!("tilde({base})"))
                }
                (_, other) => bail!("{other:?} above or below has no typst form"),
            };
        }
        Ok(match ty {
            ScriptType::Subscript => format!("attach({base}, b: {})", self.argument()?),
            ScriptType::Superscript => format!("attach({base}, t: {})", self.argument()?),
            ScriptType::SubSuperscript => format!("attach({base}, b: {}, t: {})", self.argument()?, self.argument()?),
        })
    }

    /// Rows of cells. Columns come in pairs, right and left; before each further pair LaTeX leaves a gap.
    fn aligned(&mut self) -> Result<String> {
        let (mut out, mut columns) = (String::new(), 0);
        loop {
            out += &self.row()?;
            match self.next()? {
                Event::End => return Ok(format!("display({out})")),
                Event::EnvironmentFlow(EnvironmentFlow::Alignment) => {
                    columns += 1;
                    out += if columns % 2 == 0 { "#h(1em)&" } else { "&" };
                }
                Event::EnvironmentFlow(EnvironmentFlow::NewLine { spacing: None, .. }) => {
                    columns = 0;
                    out += " \\ ";
                }
                other => bail!("{other:?} has no typst form in an alignment"),
            }
        }
    }
}

fn symbols(content: &Content<'_>) -> Result<String> {
    Ok(match content {
        // as in the prose around the formula
        Content::Text(text) => format!("#text(font: \"Libertinus Serif\", {})", typst_string(text)),
        // typst would read "10,000" as two numbers
        Content::Number(number) if number.contains(',') => typst_string(number),
        Content::Number(number) => number.to_string(),
        Content::Function(name) => format!("op({})", typst_string(name)),
        Content::Relation { content, .. } => {
            std::str::from_utf8(content.encode_utf8_to_buf(&mut [0; 8]))?.chars().map(symbol).collect()
        }
        Content::Ordinary { content, stretchy: false }
        | Content::LargeOp { content, .. }
        | Content::BinaryOp { content, .. }
        | Content::Delimiter { content, size: None, .. }
        | Content::Punctuation(content) => symbol(*content),
        other => bail!("{other:?} has no typst form"),
    })
}

/// The character as typst source that prints it: typst reads ASCII punctuation as markup unless a backslash precedes it.
fn symbol(c: char) -> String {
    if c.is_ascii_punctuation() { format!("\\{c}") } else { c.into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(latex: &str) -> String {
        let typst = typst(latex, false).unwrap();
        let (_, set) = typst.split_once("$ ").unwrap();
        set.strip_suffix(" $);").unwrap().to_string()
    }

    #[test]
    fn a_formula_keeps_its_source_as_alternative_text() {
        let typst = typst("O_i =\n\\frac{1}{2}", true).unwrap();
        assert_eq!(typst, r#"#formula("O_i = \\frac{1}{2}", block: true, $ attach(O, b: i)\=frac(1, 2) $);"#);
    }

    #[test]
    fn an_unknown_command_is_named_with_its_formula() {
        for (latex, command) in [
            (r"a \notacommand b", r"\notacommand"),
            (r"\alpha \hat x", r"\hat"),
            (r"\begin{pmatrix} a \end{pmatrix}", r"\begin{pmatrix}"),
            (r"\bigl( a", r"\bigl"),
            (r"a \", r"\"),
        ] {
            let error = typst(latex, false).unwrap_err().to_string();
            assert!(
                error.starts_with(&format!("the formula ${latex}$ does not convert: {command} is unknown")),
                "{error}"
            );
        }
    }

    #[test]
    fn empty_and_unbalanced_formulas_are_errors() {
        for latex in [" ", r"\frac{1}{", "a}{b", r"\left( a", "a & b", "x_"] {
            assert!(typst(latex, true).is_err(), "{latex}");
        }
        assert_eq!(set(r"\{ a \}"), r"\{a\}");
    }

    #[test]
    fn a_formula_that_nests_too_deep_for_typst_is_an_error() {
        let nested = |depth: usize| format!("{}x{}", r"\frac{".repeat(depth), "}{y}".repeat(depth));
        let roots = |depth: usize| format!("{}x", r"\sqrt ".repeat(depth));
        for (fits, too_deep) in [(nested(10), nested(200)), (roots(10), roots(200))] {
            typst(&fits, true).unwrap();
            let error = format!("{:#}", typst(&too_deep, true).unwrap_err());
            assert!(error.ends_with("it nests more than 32 deep; write it in parts"), "{error}");
        }
    }

    #[test]
    fn numbers_stay_whole_and_words_do_not_run_together() {
        assert_eq!(set("N = 10,000"), r#"N\="10,000""#);
        assert_eq!(set("(4, 128)"), r"\(4\,128\)");
        assert_eq!(set("0.250 Q K"), "0.250 Q K");
        assert_eq!(set("10^{-4}"), "attach(10, t: −4)");
        assert_eq!(set("1{,}024"), r#"1 class("normal", \,)024"#);
    }

    #[test]
    fn words_and_operators_keep_their_letters_together() {
        assert_eq!(set(r"\mathrm{softmax}(x)"), r#""softmax"\(x\)"#);
        assert_eq!(set(r"S \text{ and } P"), r#"S#text(font: "Libertinus Serif", " and ")P"#);
        assert_eq!(set(r"\log_2 e"), r#"attach(op("log"), b: 2)e"#);
        assert_eq!(set(r"\max_{ij} \tilde P"), r#"attach(op("max", limits: #true), b: i j)tilde(P)"#);
    }

    #[test]
    fn delimiters_grow_where_the_formula_says_so() {
        assert_eq!(set(r"e^{|L|}"), r"attach(e, t: \|L\|)");
        assert_eq!(set(r"\left| x \right|"), r"lr(\|x\|)");
        assert_eq!(set(r"\tfrac12 \sqrt{d}"), "inline(frac(1, 2))sqrt(d)");
    }

    #[test]
    fn pairs_of_columns_are_separated_by_a_gap() {
        let text = set(r"\begin{aligned} a &= b & c &= d \\ e &= f && g \end{aligned}");
        assert_eq!(text, r"display(a&\=b#h(1em)&c&\=d \ e&\=f#h(1em)&&g)");
    }
}
