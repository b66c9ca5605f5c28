//! Escapes text for Markdown and for typst, so that it prints as it was written.

pub use crate::harness::answer::format::markdown;

/// Escapes text for typst markup; quotes stay bare, so that typst curls them, and a hyphen before a number is a minus.
pub fn typst(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + 16);
    let mut before = None;
    let mut rest = text.chars().peekable();
    while let Some(c) = rest.next() {
        match c {
            '-' if before.is_none_or(|b: char| matches!(b, ' ' | '('))
                && rest.peek().is_some_and(char::is_ascii_digit) =>
            {
                out.push('−');
            }
            '\\' | '`' | '*' | '_' | '#' | '$' | '@' | '<' | '>' | '[' | ']' | '~' | '=' | '+' | '-' | '/' => {
                out.extend(['\\', c]);
            }
            // "..." is a shorthand, and "1." begins an enumeration
            '.' if before.is_none_or(|b: char| b == '.' || b.is_ascii_digit()) || rest.peek() == Some(&'.') => {
                out.push_str("\\.");
            }
            // an apostrophe, which after a digit typst would make a prime
            '\'' if before.is_some_and(char::is_alphanumeric) && rest.peek().is_some_and(|c| c.is_alphabetic()) => {
                out.push('’');
            }
            // "/ term:" is a term list and "https:" a link
            ':' => out.push_str("\\:"),
            '\n' => out.push(' '),
            c if c.is_control() || matches!(c, '\u{2028}' | '\u{2029}') => {
                out.push_str(&format!("\\u{{{:x}}}", c as u32));
            }
            c => out.push(c),
        }
        before = Some(c);
    }
    out
}

/// A typst string literal.
pub fn typst_string(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + 2);
    out.push('"');
    for c in text.chars() {
        match c {
            '"' | '\\' => out.extend(['\\', c]),
            '\n' => out.push_str("\\n"),
            c if c.is_control() => out.push_str(&format!("\\u{{{:x}}}", c as u32)),
            c => out.push(c),
        }
    }
    out.push('"');
    out
}
