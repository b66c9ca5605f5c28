//! Formatting, the last step: base units become what a table or a sentence shows.

use serde_json::Value;

use super::mark;
use super::quantity::Unit;
use crate::printable::printable;
use crate::units::{GB, GIB, MB, MIB};

/// Printed where there is no number, such as the standard deviation of one sample.
pub const NOTHING: &str = "–";

/// The minus sign of every number outside a formula.
const MINUS: &str = "−";

/// The unit and notation in which a number is printed. Templates use the same names as filters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Style {
    Ms,
    Us,
    Sec,
    Mib,
    Gib,
    Mb,
    Gb,
    Gflops,
    Tflops,
    Mhz,
    Fixed,
    Grouped,
    Percent,
    Sci,
}

impl Style {
    /// The name of each style, as a template's filter.
    pub const ALL: [(&'static str, Self); 14] = [
        ("ms", Self::Ms),
        ("us", Self::Us),
        ("sec", Self::Sec),
        ("mib", Self::Mib),
        ("gib", Self::Gib),
        ("mb", Self::Mb),
        ("gb", Self::Gb),
        ("gflops", Self::Gflops),
        ("tflops", Self::Tflops),
        ("mhz", Self::Mhz),
        ("fixed", Self::Fixed),
        ("grouped", Self::Grouped),
        ("percent", Self::Percent),
        ("sci", Self::Sci),
    ];

    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.iter().find(|(known, _)| *known == name).map(|(_, style)| *style)
    }

    /// What a value in base units is multiplied with.
    pub fn scale(self) -> f64 {
        match self {
            Self::Ms => 1e3,
            Self::Us => 1e6,
            Self::Sec | Self::Fixed | Self::Grouped | Self::Sci => 1.0,
            Self::Mib => 1.0 / MIB,
            Self::Gib => 1.0 / GIB,
            Self::Mb => 1.0 / MB,
            Self::Gb => 1.0 / GB,
            Self::Gflops => 1e-9,
            Self::Tflops => 1e-12,
            Self::Mhz => 1e-6,
            Self::Percent => 100.0,
        }
    }

    /// Whether a quantity of this unit can be printed in this style.
    pub fn fits(self, unit: Unit) -> bool {
        match self {
            Self::Ms | Self::Us | Self::Sec => unit == Unit::Seconds,
            Self::Mib | Self::Gib | Self::Mb | Self::Gb => matches!(unit, Unit::Bytes | Unit::BytesPerSecond),
            Self::Gflops | Self::Tflops => unit == Unit::FlopsPerSecond,
            Self::Mhz => unit == Unit::Hertz,
            Self::Percent => unit == Unit::One,
            Self::Fixed | Self::Grouped | Self::Sci => true,
        }
    }
}

/// The one formatter: `digits` stand after the point.
pub fn print(x: f64, style: Style, digits: usize) -> String {
    match style {
        Style::Sci => scientific(x, digits),
        Style::Percent => format!("{}%", grouped(x * style.scale(), digits)),
        _ => grouped(x * style.scale(), digits),
    }
}

/// Milliseconds with three significant digits, from seconds.
pub fn time(seconds: f64) -> String {
    three_digits(seconds * Style::Ms.scale())
}

/// "0.0712", "12.6", "1,014".
pub fn three_digits(x: f64) -> String {
    significant(x, 3)
}

/// So many significant digits, and all that stand before the point.
pub fn significant(x: f64, digits: usize) -> String {
    // The exponent of the rounded number: 9.996 is "10.0".
    let rounded = format!("{x:.0$e}", digits - 1);
    let exponent: i32 = rounded.split_once('e').and_then(|(_, exponent)| exponent.parse().ok()).unwrap_or(0);
    let decimals = if x == 0.0 { 0 } else { (digits as i32 - 1 - exponent).clamp(0, 6) };
    grouped(x, decimals as usize)
}

/// "a", "a and b", "a, b and c".
pub fn listed<S: AsRef<str>>(words: &[S]) -> String {
    let words: Vec<&str> = words.iter().map(AsRef::as_ref).collect();
    match words.split_last() {
        None => String::new(),
        Some((last, [])) => (*last).to_string(),
        Some((last, rest)) => format!("{} and {last}", rest.join(", ")),
    }
}

/// Each item once, in the order of its first appearance.
pub fn distinct<T: PartialEq>(items: impl IntoIterator<Item = T>) -> Vec<T> {
    let mut distinct = Vec::new();
    for item in items {
        if !distinct.contains(&item) {
            distinct.push(item);
        }
    }
    distinct
}

/// "1.02 to 1.35", or "1.02" where both print alike.
pub fn range(low: f64, high: f64, style: Style, digits: usize) -> String {
    let (low, high) = (print(low, style, digits), print(high, style, digits));
    if low == high { low } else { format!("{low} to {high}") }
}

/// "12,345.6".
pub fn grouped(x: f64, digits: usize) -> String {
    let (sign, whole, part) = parts(x, digits);
    let mut out = String::from(sign);
    for (i, digit) in whole.chars().enumerate() {
        if i > 0 && (whole.len() - i) % 3 == 0 {
            out.push(',');
        }
        out.push(digit);
    }
    out + &part
}

/// Sign, digits before the point, and the point with its decimals. Zero has no sign: never "-0.00".
fn parts(x: f64, digits: usize) -> (&'static str, String, String) {
    let text = format!("{:.digits$}", x.abs());
    let zero = text.chars().all(|c| matches!(c, '0' | '.'));
    let (whole, part) = text.find('.').map_or((text.as_str(), ""), |at| text.split_at(at));
    (if x < 0.0 && !zero { MINUS } else { "" }, whole.into(), part.into())
}

/// "$1.25 \times 10^{-4}$" or "$10^{-4}$", so that both Markdown and typst set it as a formula.
fn scientific(x: f64, digits: usize) -> String {
    let text = format!("{x:.digits$e}");
    match text.split_once('e') {
        Some((mantissa, "0")) => format!("${mantissa}$"),
        Some(("1", exponent)) => format!("$10^{{{exponent}}}$"),
        Some(("-1", exponent)) => format!("$-10^{{{exponent}}}$"),
        Some((mantissa, exponent)) => format!("${mantissa} \\times 10^{{{exponent}}}$"),
        None => text,
    }
}

/// The value with strings that code spans and tables can hold: without backticks, bars, control characters and marks. Line
/// breaks stay, since answers split errors at them.
pub fn plain_strings(value: &Value) -> Value {
    let has_no_place =
        |c: char| (c.is_control() && c != '\n') || matches!(c, '`' | '|' | mark::KEY | mark::TEXT | mark::END);
    match value {
        Value::String(text) => text.replace(has_no_place, " ").into(),
        Value::Array(items) => items.iter().map(plain_strings).collect(),
        Value::Object(fields) => fields.iter().map(|(key, child)| (key.clone(), plain_strings(child))).collect(),
        other => other.clone(),
    }
}

/// Escapes free text (a machine's name, a library's message) for use inside a Markdown line or table cell.
pub fn markdown(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + 8);
    for c in printable(text).chars() {
        match c {
            '\\' | '`' | '*' | '_' | '[' | ']' | '<' | '>' | '|' | '$' | '#' | '&' | '~' | '!' => out.extend(['\\', c]),
            mark::KEY | mark::TEXT | mark::END => {}
            '\n' | '\t' => out.push(' '),
            _ => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base_units_become_the_named_ones() {
        for (x, style, digits, expected) in [
            (0.0125, "ms", 2, "12.50"),
            (0.0125, "us", 0, "12,500"),
            (0.009_999_6, "us", 0, "10,000"),
            (1836.6, "fixed", 1, "1,836.6"),
            (-83_332.942, "fixed", 3, "−83,332.942"),
            (3.0 * 1024.0 * 1024.0, "mib", 1, "3.0"),
            (3e9, "gb", 2, "3.00"),
            (0.125, "percent", 1, "12.5%"),
            (1234567.0, "grouped", 0, "1,234,567"),
            (-1234.5, "grouped", 1, "−1,234.5"),
            (-0.023, "percent", 1, "−2.3%"),
            (999.0, "grouped", 0, "999"),
            (1.25e-4, "sci", 2, "$1.25 \\times 10^{-4}$"),
            (1.25, "sci", 2, "$1.25$"),
            (1e-5, "sci", 0, "$10^{-5}$"),
            (-0.001, "fixed", 2, "0.00"),
            (6.5e14, "tflops", 0, "650"),
            (1.98e9, "mhz", 0, "1,980"),
        ] {
            assert_eq!(print(x, Style::named(style).unwrap(), digits), expected);
        }
        assert_eq!(Style::named("parsec"), None);
    }

    #[test]
    fn times_have_three_significant_digits() {
        for (seconds, expected) in [
            (7.123e-5, "0.0712"),
            (1.2e-4, "0.120"),
            (8.379e-3, "8.38"),
            (9.996e-3, "10.0"),
            (0.05297, "53.0"),
            (0.25, "250"),
            (1.013_58, "1,014"),
            (-0.0125, "−12.5"),
            (0.0, "0"),
        ] {
            assert_eq!(time(seconds), expected);
        }
    }

    #[test]
    fn free_text_in_markdown_is_escaped_and_hides_nothing() {
        assert_eq!(markdown("a|b\u{202e}\n<c>\u{1b}[2J"), r"a\|b\\u202e \<c\>\\u001b\[2J");
    }

    #[test]
    fn lists_have_one_and() {
        assert_eq!(listed(&["a"]), "a");
        assert_eq!(listed(&["a", "b"]), "a and b");
        assert_eq!(listed(&["a", "b", "c"]), "a, b and c");
        assert_eq!(listed::<&str>(&[]), "");
        assert_eq!(distinct(["b", "a", "b"]), ["b", "a"]);
    }

    #[test]
    fn a_range_whose_ends_print_alike_is_one_number() {
        assert_eq!(range(1.02, 1.35, Style::Fixed, 2), "1.02 to 1.35");
        assert_eq!(range(1.021, 1.022, Style::Fixed, 2), "1.02");
    }

    #[test]
    fn a_style_fits_only_its_own_unit() {
        assert!(Style::Ms.fits(Unit::Seconds) && !Style::Ms.fits(Unit::Bytes) && !Style::Ms.fits(Unit::One));
        assert!(Style::Gib.fits(Unit::Bytes) && !Style::Gib.fits(Unit::Seconds));
        assert!(Style::Percent.fits(Unit::One) && !Style::Percent.fits(Unit::Seconds));
    }
}
