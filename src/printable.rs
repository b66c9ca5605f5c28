//! Text from outside (names, messages, output of children) made safe to print.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::str::Utf8Chunk;

/// `text` with escapes such as `\u001b` for all that a terminal obeys or hides: control characters, separators of lines,
/// marks of direction, and characters without width. Line breaks and tabs stay. The escapes are JSON's, so that a document
/// of JSON stays the same document.
pub fn printable(text: &str) -> String {
    escaped(text, |c| matches!(c, '\n' | '\t'))
}

/// As [`printable`], in one line: for names.
pub fn one_line(text: &str) -> String {
    escaped(text, |_| false)
}

/// `text` with its later lines behind so many spaces: what a library, a worker or a record says is no line of ours.
pub fn indented(text: &str, spaces: usize) -> String {
    text.replace('\n', &format!("\n{:spaces$}", ""))
}

/// The first few of many names: "rank 1, rank 2 and 1021 more", so that a sentence of a thousand names stays one line.
pub fn first_few(names: impl ExactSizeIterator<Item = String>) -> String {
    const FEW: usize = 8;
    let more = names.len().saturating_sub(FEW);
    let shown = names.take(FEW).collect::<Vec<_>>().join(", ");
    if more > 0 { format!("{shown} and {more} more") } else { shown }
}

/// As [`one_line`], with the backslash escaped too, and each byte that is not UTF-8: no two names become one.
pub fn distinct_name(name: &OsStr) -> String {
    let of = |chunk: Utf8Chunk| {
        let invalid: String = chunk.invalid().iter().map(|byte| format!("\\x{byte:02x}")).collect();
        one_line(&chunk.valid().replace('\\', "\\\\")) + &invalid
    };
    name.as_bytes().utf8_chunks().map(of).collect()
}

/// The name of a file as messages quote it. It can hold any byte but zero, line breaks among them.
pub fn shown_path(path: impl AsRef<Path>) -> String {
    one_line(&path.as_ref().to_string_lossy())
}

/// A path as one word of a command that a person pastes into a shell: quoted where a shell would read it otherwise. What
/// [`one_line`] escapes, and bytes that are not UTF-8, are bytes in `$'..'` of bash and zsh.
pub fn shell_word(path: impl AsRef<Path>) -> String {
    let path = path.as_ref().as_os_str();
    let is_plain = |c: char| c.is_alphanumeric() || "/._-+=:,@%".contains(c);
    match path.to_str().filter(|text| !text.contains(is_hidden)) {
        Some(text) if !text.is_empty() && text.chars().all(is_plain) => text.into(),
        Some(text) => format!("'{}'", text.replace('\'', r"'\''")),
        None => {
            // In octal, which has three digits: a digit after a hexadecimal number may belong to it.
            let ascii = |&byte: &u8| match byte {
                b'\'' | b'\\' => format!("\\{}", char::from(byte)),
                b' '..=b'~' => char::from(byte).to_string(),
                _ => format!("\\{byte:03o}"),
            };
            format!("$'{}'", path.as_bytes().iter().map(ascii).collect::<String>())
        }
    }
}

fn escaped(text: &str, keeps: impl Fn(char) -> bool) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            _ if !is_hidden(c) || keeps(c) => out.push(c),
            '\n' => out.push_str("\\n"),
            _ => c.encode_utf16(&mut [0; 2]).iter().for_each(|unit| out.push_str(&format!("\\u{unit:04x}"))),
        }
    }
    out
}

/// The ranges are those of Unicode's categories Cc, Zl and Zp, of Cf where it changes order or has no width, and
/// noncharacters, which XML forbids.
fn is_hidden(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{fdd0}'..='\u{fdef}')
        || u32::from(c) & 0xfffe == 0xfffe
        || matches!(c, '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}')
        || matches!(c, '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_many_names_the_first_few_are_shown_with_the_number_of_the_others() {
        let names = |count: usize| first_few((0..count).map(|rank| format!("rank {rank}")));
        assert_eq!(names(2), "rank 0, rank 1");
        assert!(names(8).ends_with(", rank 7") && names(65_536).ends_with(", rank 7 and 65528 more"));
    }

    #[test]
    fn different_names_stay_different() {
        let names: [&[u8]; 6] = [b"a", b"\xff", b"\xfe", "\u{fffd}".as_bytes(), b"a\nb", b"a\\nb"];
        let shown = names.map(|name| distinct_name(OsStr::from_bytes(name)));
        assert_eq!(shown[..3], ["a", "\\xff", "\\xfe"]);
        assert_eq!(shown[5], "a\\\\nb");
        let distinct: std::collections::BTreeSet<_> = shown.iter().collect();
        assert_eq!(distinct.len(), shown.len(), "{shown:?}");
    }

    #[test]
    fn controls_line_breaks_marks_of_direction_and_noncharacters_are_escaped() {
        let name = "a\nb\r\u{1b}[2J\u{7f}\u{9b}\u{202e}x\u{2066}\u{2028}\u{200b}\u{e0041}\u{ffff}\u{fdd0}\u{1fffe}";
        let expected = r"a\nb\u000d\u001b[2J\u007f\u009b\u202ex\u2066\u2028\u200b\udb40\udc41\uffff\ufdd0\ud83f\udffe";
        assert_eq!(one_line(name), expected);
        assert_eq!(printable(name), expected.replacen(r"\n", "\n", 1));
    }

    #[test]
    fn json_stays_the_same_document() {
        let document = serde_json::json!({"a\n\u{7f}": ["\u{1b}\u{202e}", "\u{e0041}\t", 1.5]});
        let printed = printable(&serde_json::to_string_pretty(&document).unwrap());
        assert_eq!(serde_json::from_str::<serde_json::Value>(&printed).unwrap(), document);
        assert!(printed.is_ascii() && printed.chars().all(|c| c == '\n' || !c.is_control()), "{printed:?}");
    }

    #[test]
    fn only_the_first_line_begins_where_it_is_printed() {
        assert_eq!(indented("a\nb\n\nc", 2), "a\n  b\n  \n  c");
    }

    #[test]
    fn a_path_is_one_line() {
        assert_eq!(shown_path("a/b\npassed"), r"a/b\npassed");
        let bytes: &std::ffi::OsStr = std::os::unix::ffi::OsStrExt::from_bytes(b"a\xff\x1b");
        assert_eq!(shown_path(bytes), "a\u{fffd}\\u001b");
    }

    #[test]
    fn a_shell_reads_each_path_as_one_word_and_runs_nothing_of_it() {
        use std::ffi::OsStr;
        let plain = ["/srv/ada/a2-systems_1.0", "/srv/张伟/a2"];
        plain.iter().for_each(|path| assert_eq!(shell_word(path), *path));
        assert_eq!(shell_word("/a/o'b $(id)"), r"'/a/o'\''b $(id)'");
        assert_eq!(shell_word("a\u{1b}1\n'\u{202e}"), r"$'a\0331\012\'\342\200\256'");
        let odd: [&[u8]; 7] = [b"", b"a b", b"~", b"a'\\\n7", b"\x1b[2J7", b"\xff0", b"`id`;*?#!\"&|<>"];
        for bytes in odd {
            let line = format!("printf %s {}", shell_word(OsStr::from_bytes(bytes)));
            assert!(line.chars().all(|c| !is_hidden(c)), "{line:?}");
            let output = std::process::Command::new("bash").args(["-c", &line]).output().unwrap();
            assert_eq!(output.stdout, bytes, "{line}");
        }
    }

    #[test]
    fn other_text_stays_as_it_is() {
        for text in ["o \"1.5\" × é ü 你好 \\n", "עברית e\u{301}", ""] {
            assert_eq!((one_line(text), printable(text)), (text.to_string(), text.to_string()));
        }
    }
}
