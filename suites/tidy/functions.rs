//! Functions are short, and no test asserts how long something took.

use std::fs;

use super::{root, rust_files};

/// Where unsafe code may be; the last one confines a process between fork and exec.
pub const UNSAFE: [&str; 4] = ["src/torch/", "src/cuda/", "src/collective/nccl", "src/process/confinement.rs"];

/// From the line of `fn` to that of its closing brace.
const MAX_FUNCTION_LINES: usize = 60;

const ASSERTIONS: [&str; 4] = ["assert!(", "assert_eq!(", "assert_ne!(", "ensure!("];
/// Identifiers that read a clock.
const CLOCKS: [&str; 3] = ["elapsed", "Instant", "SystemTime"];

/// A function in rustfmt's layout.
struct Function<'a> {
    name: &'a str,
    /// The number of its first line, from 1.
    line: usize,
    lines: &'a [&'a str],
}

/// Every Rust file: its path from the root, and its text.
fn files() -> Vec<(String, String)> {
    let folders = ["src", "suites"].iter().flat_map(|folder| rust_files(&root().join(folder)));
    let name = |file: &std::path::Path| file.strip_prefix(root()).unwrap().to_string_lossy().into_owned();
    folders.chain([root().join("build.rs")]).map(|file| (name(&file), fs::read_to_string(&file).unwrap())).collect()
}

fn functions<'a>(lines: &'a [&'a str]) -> Vec<Function<'a>> {
    let starts = lines.iter().enumerate().filter_map(|(at, line)| Some((at, function_name(line)?)));
    starts.map(|(at, name)| Function { name, line: at + 1, lines: &lines[at..=last_line(lines, at)] }).collect()
}

/// The name of the function that begins on this line.
fn function_name(line: &str) -> Option<&str> {
    let (before, name) = line.trim_start().split_once("fn ")?;
    let is_qualifier =
        |word: &str| word.starts_with("pub") || ["const", "async", "unsafe", "extern", "\"C\""].contains(&word);
    before.split_whitespace().all(is_qualifier).then(|| words(name).next()).flatten()
}

/// The last line of the function that begins at `first`: a closing brace with the same indentation, or the same line.
fn last_line(lines: &[&str], first: usize) -> usize {
    let closing = format!("{}}}", indentation(lines[first]));
    let mut has_body = false;
    for (at, line) in lines.iter().enumerate().skip(first) {
        if !has_body && (line.ends_with(';') || (at == first && line.ends_with('}'))) || *line == closing {
            return at;
        }
        has_body |= line.ends_with('{');
    }
    lines.len() - 1
}

fn indentation(line: &str) -> &str {
    &line[..line.len() - line.trim_start().len()]
}

fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| c != '_' && !c.is_ascii_alphanumeric()).filter(|word| !word.is_empty())
}

/// The lines that hold tests: all of a suite and of a file of tests, and a module of tests with what follows it.
fn test_lines<'a>(file: &str, lines: &'a [&'a str]) -> &'a [&'a str] {
    let is_module = |pair: &[&str]| pair[0] == "#[cfg(test)]" && pair[1].starts_with("mod ") && pair[1].ends_with('{');
    match lines.windows(2).position(is_module) {
        _ if file.starts_with("suites/") || file.ends_with("tests.rs") => lines,
        Some(first) => &lines[first..],
        None => &[],
    }
}

/// Every assertion of a function, without its quoted texts.
fn assertions(function: &Function) -> Vec<String> {
    let begins = |line: &str| ASSERTIONS.iter().any(|name| line.contains(name));
    let starts = (0..function.lines.len()).filter(|&at| begins(function.lines[at]));
    let text = |first: usize| {
        let indent = indentation(function.lines[first]).len();
        let closes = |line: &&str| indentation(line).len() <= indent;
        let rest = &function.lines[first + 1..];
        let more = match function.lines[first].ends_with(['(', '{', '[', '|']) {
            true => rest.iter().position(closes).map_or(rest.len(), |at| at + 1),
            false => 0,
        };
        let whole = function.lines[first..=first + more].join("\n");
        whole.split('"').step_by(2).collect::<String>()
    };
    starts.map(text).collect()
}

/// The assertions of a function that depend on a clock: on its reading, or on a variable that holds one.
fn timed_assertions(function: &Function) -> Vec<String> {
    let readings = ["= Instant::now()", "SystemTime::now()", ".elapsed()"];
    let reads_a_clock = |line: &&&str| readings.iter().any(|reading| line.contains(reading));
    let bound = |line: &&'_ str| {
        let name = line.trim_start().strip_prefix("let ")?.trim_start_matches("mut ");
        words(name).next().map(str::to_string)
    };
    let held: Vec<String> = function.lines.iter().filter(reads_a_clock).filter_map(bound).collect();
    let is_timed =
        |text: &String| words(text).any(|word| CLOCKS.contains(&word) || held.iter().any(|name| name == word));
    assertions(function).into_iter().filter(is_timed).collect()
}

#[test]
fn functions_are_short() {
    let mut long = Vec::new();
    for (file, text) in files() {
        let lines: Vec<&str> = text.lines().collect();
        let found = functions(&lines).into_iter().filter(|function| function.lines.len() > MAX_FUNCTION_LINES);
        long.extend(found.map(|f| format!("{file}:{} {} has {} lines", f.line, f.name, f.lines.len())));
    }
    assert!(
        long.is_empty(),
        "split these by what they do, {MAX_FUNCTION_LINES} lines at most each:\n{}",
        long.join("\n")
    );
}

/// A busy machine would make such a test fail. Wait for an event, a count or a message with a limit instead:
/// `process::wait_until`.
#[test]
fn no_test_asserts_how_long_something_took() {
    let mut timed = Vec::new();
    for (file, text) in files() {
        let lines: Vec<&str> = text.lines().collect();
        for function in functions(test_lines(&file, &lines)) {
            timed.extend(
                timed_assertions(&function).into_iter().map(|text| format!("{file}, {}: {text}", function.name)),
            );
        }
    }
    assert!(timed.is_empty(), "these depend on the clock:\n{}", timed.join("\n"));
}

#[test]
fn a_function_ends_at_its_own_brace() {
    let text = "pub(crate) const fn one() -> u8 {
    const fn inner() {}
    if true {
        1
    }
}

trait Two {
    pub fn bodiless(
        &self,
    ) -> u8;
    // fn commented() {
    fn three()
    where
        Self: Sized,
    {
        call(|| {
        });
    }
}";
    let lines: Vec<&str> = text.lines().collect();
    let found: Vec<_> = functions(&lines).iter().map(|f| (f.name, f.line, f.lines.len())).collect();
    assert_eq!(found, [("one", 1, 6), ("inner", 2, 1), ("bodiless", 9, 3), ("three", 13, 7)]);
}

#[test]
fn an_assertion_on_the_clock_is_found() {
    let found = |body: &str| {
        let text = format!("fn test() {{\n{}\n}}", body.replace('\'', "\""));
        timed_assertions(&functions(&text.lines().collect::<Vec<_>>())[0]).len()
    };
    assert_eq!(found("    assert!(started.elapsed() < LIMIT);"), 1);
    assert_eq!(found("    assert!(\n        Instant::now() < deadline,\n    );"), 1);
    assert_eq!(found("    let took = started.elapsed();\n    ensure!(took < LIMIT);"), 1);
    assert_eq!(found("    if started.elapsed() > LIMIT {\n        assert!(false, 'elapsed');\n    }"), 0);
    assert_eq!(found("    assert!(wait_until(LIMIT, is_done));\n    let end = started.elapsed();"), 0);
}
