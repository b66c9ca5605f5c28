//! Text from outside (names, messages, output of children) made safe to print.

/// `text` with escapes such as `\u{1b}` for all that a terminal obeys or hides: control characters, separators of lines,
/// marks of direction, and characters without width. Line breaks and tabs stay.
pub fn printable(text: &str) -> String {
    escaped(text, |c| matches!(c, '\n' | '\t'))
}

/// As [`printable`], in one line: for names.
pub fn one_line(text: &str) -> String {
    escaped(text, |_| false)
}

fn escaped(text: &str, keeps: impl Fn(char) -> bool) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if is_hidden(c) && !keeps(c) {
            out.extend(c.escape_default());
        } else {
            out.push(c);
        }
    }
    out
}

/// The ranges are those of Unicode's categories Cc, Zl and Zp, and of Cf where it changes order or has no width.
fn is_hidden(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}')
        || matches!(c, '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn controls_line_breaks_and_marks_of_direction_are_escaped() {
        let name = "a\nb\r\u{1b}[2J\u{7f}\u{9b}\u{202e}x\u{2066}\u{2028}\u{200b}";
        let expected = r"a\nb\r\u{1b}[2J\u{7f}\u{9b}\u{202e}x\u{2066}\u{2028}\u{200b}";
        assert_eq!(one_line(name), expected);
        assert_eq!(printable(name), expected.replacen(r"\n", "\n", 1));
    }

    #[test]
    fn other_text_stays_as_it_is() {
        for text in ["o \"1.5\" × é ü 你好 \\n", "עברית e\u{301}", ""] {
            assert_eq!((one_line(text), printable(text)), (text.to_string(), text.to_string()));
        }
    }
}
