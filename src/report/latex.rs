//! LaTeX before its conversion: thousands, bars and columns of an alignment, marked up so that they are spaced right.

/// Environments in which every second `&` parts two columns.
const ALIGNED: [&str; 4] = ["aligned", "align", "align*", "split"];
/// Environments whose argument describes columns, in which a bar is a rule.
const COLUMNS: [&str; 3] = ["array", "tabular", "subarray"];
/// A comma that is no punctuation; the converter drops the braces of `{,}`, which say the same.
const PLAIN_COMMA: &str = "\\mathord{,}";
/// Commands that already say what the bar after them is.
const SIZED: [&str; 15] = [
    "\\left", "\\right", "\\middle", "\\big", "\\Big", "\\bigg", "\\Bigg", "\\bigl", "\\Bigl", "\\biggl", "\\bigr",
    "\\Bigr", "\\biggr", "\\bigm", "\\Bigm",
];

/// The formula with its thousands, bars and columns marked up for the converter.
pub fn prepared(latex: &str) -> String {
    let mut tokens = tokens(latex);
    group_thousands(&mut tokens, PLAIN_COMMA);
    for at in 2..tokens.len() {
        if tokens[at - 2..=at].iter().map(|t| t.source).eq(["{", ",", "}"]) {
            tokens[at - 1].set = PLAIN_COMMA.into();
        }
    }
    pair_bars(&mut tokens);
    part_columns(&mut tokens);
    joined(&tokens)
}

/// The formula with `{,}` for the commas of "65,536", which LaTeX would otherwise set as commas of a list.
pub fn with_grouped_thousands(latex: &str) -> String {
    let mut tokens = tokens(latex);
    group_thousands(&mut tokens, "{,}");
    joined(&tokens)
}

/// A command, a command with words as its argument, or one character; `set` is what is written for it.
struct Token<'t> {
    source: &'t str,
    set: String,
}

fn joined(tokens: &[Token<'_>]) -> String {
    tokens.iter().map(|t| t.set.as_str()).collect()
}

/// Words in `\text{..}` and the like are one token with their command, as are `\begin{name}` and `\end{name}`.
fn tokens(latex: &str) -> Vec<Token<'_>> {
    let mut out = Vec::new();
    let mut rest = latex;
    while let Some(first) = rest.chars().next() {
        let length = if first == '\\' { command(rest) } else { first.len_utf8() };
        let (source, after) = rest.split_at(length);
        out.push(Token { source, set: source.into() });
        rest = after;
    }
    out
}

/// The length of the command that `text` begins with.
fn command(text: &str) -> usize {
    let after = &text[1..];
    let letters = after.find(|c: char| !c.is_ascii_alphabetic()).unwrap_or(after.len());
    if letters == 0 {
        return 1 + after.chars().next().map_or(0, char::len_utf8);
    }
    let name = &after[..letters];
    let mut end = 1 + letters;
    if name.starts_with("text") || name == "mbox" || name == "begin" || name == "end" {
        end += group(&text[end..]);
        if COLUMNS.iter().any(|c| text[..end] == format!("\\begin{{{c}}}")) {
            end += group(&text[end..]);
        }
    }
    end
}

/// The length of the group in braces that `text` begins with, 0 if it begins with none.
fn group(text: &str) -> usize {
    let (mut depth, mut escaped) = (0usize, false);
    for (at, c) in text.char_indices() {
        match c {
            '{' if !escaped => depth += 1,
            '}' if !escaped => depth = depth.saturating_sub(1),
            _ => {}
        }
        escaped = c == '\\' && !escaped;
        if depth == 0 {
            return if c == '}' { at + 1 } else { 0 };
        }
    }
    0
}

/// Only whole numbers in groups of three: "(4,128,64)" stays a list.
fn group_thousands(tokens: &mut [Token<'_>], comma: &str) {
    let in_number = |t: &Token<'_>| t.source == "," || t.source.bytes().all(|b| b.is_ascii_digit());
    let mut at = 0;
    while at < tokens.len() {
        let end = tokens[at..].iter().position(|t| !in_number(t)).map_or(tokens.len(), |n| at + n);
        let run: String = tokens[at..end].iter().map(|t| t.source).collect();
        let number = run.trim_end_matches(',');
        if is_grouped(number) {
            tokens[at..at + number.len()].iter_mut().filter(|t| t.source == ",").for_each(|t| t.set = comma.into());
        }
        at = end.max(at + 1);
    }
}

fn is_grouped(number: &str) -> bool {
    let mut groups = number.split(',');
    let head = groups.next().unwrap_or_default().len();
    let tail: Vec<usize> = groups.map(str::len).collect();
    (1..=3).contains(&head) && !tail.is_empty() && tail.iter().all(|n| *n == 3)
}

/// Bars of which a group holds an even number open and close in turn; the one of "p(a | b)" stays as it is.
///
/// A pair is an ordinary symbol, so that an operator such as `\max` keeps its distance from the first bar.
fn pair_bars(tokens: &mut [Token<'_>]) {
    let mut groups: Vec<(&str, Vec<usize>)> = vec![("", Vec::new())];
    let mut done: Vec<Vec<usize>> = Vec::new();
    let mut sized = false;
    for (at, token) in tokens.iter().enumerate() {
        match token.source {
            "|" if !sized => groups.last_mut().into_iter().for_each(|g| g.1.push(at)),
            open @ ("{" | "(" | "[" | "\\{" | "\\langle" | "\\lfloor" | "\\lceil") => groups.push((open, Vec::new())),
            "}" => {
                // an interval such as [0, 1) leaves brackets open
                while groups.len() > 1 && groups.last().is_some_and(|g| g.0 != "{") {
                    done.extend(groups.pop().map(|g| g.1));
                }
                if groups.len() > 1 {
                    done.extend(groups.pop().map(|g| g.1));
                }
            }
            ")" | "]" | "\\}" | "\\rangle" | "\\rfloor" | "\\rceil" => {
                if groups.len() > 1 && groups.last().is_some_and(|g| g.0 != "{") {
                    done.extend(groups.pop().map(|g| g.1));
                }
            }
            // a pair does not reach over a cell or a row
            begin if begin == "&" || begin == "\\\\" || begin.starts_with("\\begin") || begin.starts_with("\\end") => {
                done.extend(groups.last_mut().map(|g| std::mem::take(&mut g.1)));
            }
            _ => {}
        }
        sized = SIZED.contains(&token.source) || (sized && token.source.trim().is_empty());
    }
    done.extend(groups.into_iter().map(|g| g.1));
    for bars in done.iter().filter(|bars| bars.len() % 2 == 0) {
        for pair in bars.chunks_exact(2) {
            tokens[pair[0]].set = "\\mathord{\\left|".into();
            tokens[pair[1]].set = "\\right|}".into();
        }
    }
}

/// The converter's columns touch each other; LaTeX leaves a gap before every second one.
fn part_columns(tokens: &mut [Token<'_>]) {
    let mut open: Vec<(bool, usize)> = Vec::new();
    for token in tokens {
        if let Some(name) = token.source.strip_prefix("\\begin{") {
            open.push((ALIGNED.contains(&name.trim_end_matches('}')), 0));
        } else if token.source.starts_with("\\end{") {
            open.pop();
        }
        let Some((aligned, columns)) = open.last_mut() else { continue };
        match token.source {
            "\\\\" => *columns = 0,
            "&" => {
                *columns += 1;
                if *aligned && *columns % 2 == 0 {
                    token.set = "\\quad &".into();
                }
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_commas_of_a_number_are_not_those_of_a_list() {
        assert_eq!(with_grouped_thousands("T = 65,536"), "T = 65{,}536");
        assert_eq!(with_grouped_thousands("1,234,567, x"), "1{,}234{,}567, x");
        assert_eq!(with_grouped_thousands(r"\frac{10,000}{1024}"), r"\frac{10{,}000}{1024}");
        for same in ["(4,128,64)", "x_{1,2}", "1, 024", "1{,}024", "12,3456", r"\text{10,000 bytes}", "1234,567"] {
            assert_eq!(with_grouped_thousands(same), same);
        }
    }

    #[test]
    fn bars_come_in_pairs() {
        assert_eq!(prepared("|q k|"), r"\mathord{\left|q k\right|}");
        assert_eq!(prepared("e^{|L|/256}"), r"e^{\mathord{\left|L\right|}/256}");
        assert_eq!(prepared("|a| + |b(c | d)|"), r"\mathord{\left|a\right|} + \mathord{\left|b(c | d)\right|}");
        for same in ["p(a | b) p(c | d)", r"\{x | x > 0\}", r"\left| x \right|", r"\bigl| x \bigr|", r"\|x\|"] {
            assert_eq!(prepared(same), same);
        }
        let array = r"\begin{array}{|c|} \mathord{\left|a\right|} \end{array}";
        assert_eq!(prepared(r"\begin{array}{|c|} |a| \end{array}"), array);
        assert_eq!(prepared(r"\begin{aligned} |a &= b| \end{aligned}"), r"\begin{aligned} |a &= b| \end{aligned}");
    }

    #[test]
    fn every_second_mark_of_an_alignment_parts_columns() {
        let two = r"\begin{aligned} a &= b & c &= d \\ e &= f && \text{g} \end{aligned}";
        let parted = r"\begin{aligned} a &= b \quad & c &= d \\ e &= f \quad && \text{g} \end{aligned}";
        assert_eq!(prepared(two), parted);
        let matrix = r"\begin{aligned} A &= \begin{matrix} 1 & 2 & 3 \end{matrix} \end{aligned}";
        assert_eq!(prepared(matrix), matrix);
        assert_eq!(prepared(r"\begin{cases} a & b & c \end{cases}"), r"\begin{cases} a & b & c \end{cases}");
    }
}
