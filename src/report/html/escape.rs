//! Escapes text for HTML, and reads text back out of it.

/// Text between tags.
pub fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

/// Text inside an attribute in double quotes.
pub fn attribute(text: &str) -> String {
    quoted(&escape(text))
}

/// Escaped text inside an attribute in double quotes.
pub fn quoted(escaped: &str) -> String {
    escaped.replace('"', "&quot;")
}

/// The escaped text of HTML, without its tags.
pub fn text_of(html: &str) -> String {
    let mut inside = false;
    let keep = |c: &char| {
        match c {
            '<' => inside = true,
            '>' => {
                inside = false;
                return false;
            }
            _ => {}
        }
        !inside
    };
    html.chars().filter(keep).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_escaped_and_read_back() {
        assert_eq!(attribute("a < \"b\" & c"), "a &lt; &quot;b&quot; &amp; c");
        assert_eq!(text_of("<b>1 &lt; 2</b> so"), "1 &lt; 2 so");
    }
}
