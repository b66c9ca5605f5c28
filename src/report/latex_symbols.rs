//! Corrects the LaTeX converter's output: current symbol names, whole numbers, paired bars, and gaps between columns.

/// Corrects one converted formula.
///
/// - Symbols get the names of the typst version in use; the converter writes those of typst 0.13.
/// - Digits become numbers, and "10,000" one number instead of two with a comma between them.
/// - Bars become opening and closing ones where they pair up.
/// - In `aligned`, pairs of columns stand apart.
pub fn fixed(converted: &str) -> String {
    let written = Writer::write(converted, true).or_else(|| Writer::write(converted, false));
    written.unwrap_or_else(|| converted.to_string())
}

#[derive(Default)]
struct Writer {
    out: String,
    frames: Vec<Frame>,
    pair_bars: bool,
}

/// An open parenthesis that the converter wrote. Those of the formula are escaped.
#[derive(Default)]
struct Frame {
    kind: Kind,
    bar: bool,
    double_bar: bool,
    /// Column separators so far in this row.
    columns: usize,
}

#[derive(Default, Clone, Copy, PartialEq)]
enum Kind {
    #[default]
    Other,
    /// Its bars grow with their content and must not change.
    Delimited,
    Aligned,
}

impl Writer {
    /// `None` if bars do not pair up or parentheses do not match.
    fn write(converted: &str, pair_bars: bool) -> Option<String> {
        let mut writer = Self { pair_bars, frames: vec![Frame::default()], ..Self::default() };
        let mut rest = converted;
        let mut kind = Kind::Other;
        while let Some(first) = rest.chars().next() {
            let length = match first {
                '#' => writer.copy(rest, rest.find("];").map_or(rest.len(), |end| end + 2)),
                '\\' => writer.escaped(rest),
                c if c.is_ascii_digit() => writer.number(rest),
                c if c.is_ascii_alphabetic() => {
                    let length = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '.').unwrap_or(rest.len());
                    kind = kind_of(&rest[..length]);
                    writer.out.push_str(&current_name(&rest[..length]));
                    rest = &rest[length..];
                    continue;
                }
                '(' => {
                    writer.frames.push(Frame { kind, ..Frame::default() });
                    writer.copy(rest, 1)
                }
                ')' => {
                    writer.close()?;
                    writer.copy(rest, 1)
                }
                '&' => writer.column(),
                '|' => writer.bar(rest)?,
                c => writer.copy(rest, c.len_utf8()),
            };
            kind = Kind::Other;
            rest = &rest[length..];
        }
        writer.close()?;
        writer.frames.is_empty().then_some(writer.out)
    }

    fn copy(&mut self, rest: &str, length: usize) -> usize {
        self.out.push_str(&rest[..length]);
        length
    }

    fn close(&mut self) -> Option<()> {
        let frame = self.frames.pop()?;
        (!frame.bar && !frame.double_bar).then_some(())
    }

    /// An escaped character, or the end of a row.
    fn escaped(&mut self, rest: &str) -> usize {
        let next = rest[1..].chars().next();
        if let (true, Some(frame)) = (next.is_none_or(char::is_whitespace), self.frames.last_mut()) {
            frame.columns = 0;
        }
        self.copy(rest, 1 + next.map_or(0, char::len_utf8))
    }

    fn number(&mut self, rest: &str) -> usize {
        let (number, length) = read_number(rest);
        if number.contains(',') {
            self.out.push_str(&format!("\"{number}\" "));
        } else {
            self.out.push_str(&format!("{number} "));
        }
        length
    }

    /// Columns come in pairs, right and left; before each further pair LaTeX leaves a gap.
    fn column(&mut self) -> usize {
        if let Some(frame) = self.frames.last_mut() {
            frame.columns += 1;
            if frame.kind == Kind::Aligned && frame.columns % 2 == 0 {
                self.out.push_str(" quad ");
            }
        }
        self.out.push('&');
        1
    }

    fn bar(&mut self, rest: &str) -> Option<usize> {
        let length = if rest.starts_with("||") { 2 } else { 1 };
        let frame = self.frames.last_mut()?;
        if !self.pair_bars || frame.kind == Kind::Delimited {
            return Some(self.copy(rest, length));
        }
        let open = if length == 2 { &mut frame.double_bar } else { &mut frame.bar };
        let side = if *open { 'r' } else { 'l' };
        *open = !*open;
        self.out.push_str(&format!(" {side}{} ", if length == 2 { "Vert" } else { "vert" }));
        Some(length)
    }
}

/// A number whose digits the converter separated by spaces, and its length in `rest`.
fn read_number(rest: &str) -> (String, usize) {
    let (mut number, mut after) = take_digits(rest);
    let groupable = number.len() <= 3 && number != "0";
    loop {
        let next = after.trim_start_matches(' ');
        let point = next.strip_prefix('.').map(|part| take_digits(part.trim_start_matches(' ')));
        let group = next.strip_prefix("\\,").map(take_digits);
        match (point, group) {
            (Some((part, beyond)), _) if !number.contains('.') && !part.is_empty() => {
                number += &format!(".{part}");
                after = beyond;
            }
            (_, Some((group, beyond))) if groupable && !number.contains('.') && group.len() == 3 => {
                number += &format!(",{group}");
                after = beyond;
            }
            _ => return (number, rest.len() - after.len()),
        }
    }
}

/// Digits with single spaces between them, and what follows the last.
fn take_digits(text: &str) -> (String, &str) {
    let (mut digits, mut after) = (String::new(), text);
    loop {
        let next = if digits.is_empty() { after } else { after.strip_prefix(' ').unwrap_or(after) };
        match next.chars().next().filter(char::is_ascii_digit) {
            Some(digit) => {
                digits.push(digit);
                after = &next[1..];
            }
            None => return (digits, after),
        }
    }
}

fn kind_of(name: &str) -> Kind {
    match name {
        "lr" => Kind::Delimited,
        "aligned" | "alignedat" => Kind::Aligned,
        _ => Kind::Other,
    }
}

fn current_name(name: &str) -> String {
    let (base, modifiers) = name.split_once('.').unwrap_or((name, ""));
    match (base, modifiers) {
        ("sect", _) => name.replacen("sect", "inter", 1),
        ("diff", _) => name.replacen("diff", "partial", 1),
        ("angle", "l" | "r") => name.replacen("angle", "chevron", 1),
        ("planck", "reduce") => "planck".into(),
        ("ast", "circle") => "ast.op.o".into(),
        ("plus" | "minus" | "times" | "dot" | "dash", _) => name.replace(".circle", ".o"),
        ("bracket", _) => name.replace(".double", ".stroked"),
        ("gt" | "lt", "tri" | "tri.eq" | "tri.not" | "tri.eq.not") => name.replacen(".tri", ".closed", 1),
        ("tack", "r.double") => "tack.rr".into(),
        _ => name.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(latex: &str) -> String {
        let text = fixed(&mitex::convert_math(latex, None).unwrap());
        text.split_whitespace().collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn symbols_get_their_new_names_and_text_keeps_its_words() {
        assert_eq!(set(r"\langle x \cap y \odot z \rangle"), "chevron.l x inter y dot.o z chevron.r");
        assert!(set(r"\text{a diff of sect}").contains("a diff of sect"));
    }

    #[test]
    fn digits_become_numbers_and_grouped_ones_stay_whole() {
        assert_eq!(set("65536"), "65536");
        assert_eq!(set("0.250"), "0.250");
        assert_eq!(set("N = 10,000"), "N = \"10,000\"");
        assert_eq!(set("219,848,638,464"), "\"219,848,638,464\"");
        assert_eq!(set("1{,}024"), "\"1,024\"");
        assert_eq!(set("(4, 128)"), r"\(4 \, 128 \)");
        assert_eq!(set("x_{0,128}"), r"x _(0 \,128 )");
        assert_eq!(set("10^{-4}"), "10 ^(- 4 )");
    }

    #[test]
    fn bars_open_and_close_where_they_pair_up() {
        assert_eq!(set("|x|"), "lvert x rvert");
        assert_eq!(set(r"e^{|L|/256}"), r"e ^( lvert L rvert \/256 )");
        assert_eq!(set("a | b"), "a | b");
        assert!(set(r"\left| x \right|").starts_with("lr(| x"));
        assert_eq!(set(r"\| u \|"), "lVert u rVert");
    }

    #[test]
    fn pairs_of_columns_are_separated_by_a_gap() {
        let text = set(r"\begin{aligned} a &= b & c &= d \\ e &= f & g &= h \end{aligned}");
        assert_eq!(text, r"aligned( a &= b quad & c &= d \ e &= f quad & g &= h )");
    }
}
