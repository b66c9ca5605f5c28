//! Shapes and words as SVG text, in points, at the width of the text column.
//!
//! Ink is `currentColor` and the ground is transparent, so that a page in dark mode can set both. Every mark has a `title`,
//! which browsers show on hover.

use std::fmt::Write as _;

/// The text column of an A4 page with margins of 25 mm.
pub const WIDTH: f64 = 453.0;
/// Of all words: above 8 points in print.
pub const SIZE: f64 = 8.5;
/// The document's font, and what browsers have that is as wide.
const FONT: &str = "Libertinus Serif, Times New Roman, Times, serif";

/// Widths of Libertinus Serif's glyphs from space to tilde, in hundredths of the size.
const ADVANCES: [u8; 95] = [
    25, 29, 34, 46, 46, 64, 70, 19, 30, 30, 37, 55, 22, 34, 22, 32, 46, 46, 46, 46, 46, 46, 46, 46, 46, 46, 24, 24, 55,
    55, 55, 44, 90, 70, 59, 65, 70, 56, 48, 68, 73, 30, 32, 64, 53, 84, 70, 70, 54, 70, 59, 48, 60, 66, 65, 95, 66, 57,
    60, 36, 29, 36, 52, 49, 39, 46, 49, 43, 51, 45, 31, 50, 54, 27, 27, 51, 26, 79, 54, 50, 52, 50, 37, 39, 32, 53, 50,
    75, 49, 52, 42, 28, 20, 28, 45,
];

/// What is drawn so far.
#[derive(Default)]
pub struct Canvas(String);

impl Canvas {
    /// `anchor`: "start", "middle" or "end"; `y` is the baseline.
    pub fn text(&mut self, x: f64, y: f64, anchor: &str, words: &str) {
        if !words.is_empty() {
            let words = escaped(words);
            let _ = write!(self.0, r#"<text x="{x:.1}" y="{y:.1}" text-anchor="{anchor}">{words}</text>"#);
        }
    }

    /// Words in the middle of a fill, black or white, whichever can be read better on it; the page's style turns those of
    /// class `flip` black in dark mode.
    pub fn text_on(&mut self, fill: &str, x: f64, y: f64, words: &str) {
        let (ink, words) = (ink(fill), escaped(words));
        let flip = if ink == ink_in_dark_mode(fill) { "" } else { r#" class="flip""# };
        let _ = write!(self.0, r#"<text x="{x:.1}" y="{y:.1}" text-anchor="middle" fill="{ink}"{flip}>{words}</text>"#);
    }

    /// A filled rectangle: x, y, width, height.
    pub fn rect(&mut self, [x, y, width, height]: [f64; 4], fill: &str, title: &str) {
        let open = format!(r#"rect x="{x:.2}" y="{y:.2}" width="{width:.2}" height="{height:.2}" fill="{fill}""#);
        self.shape(&open, title);
    }

    /// A rectangle that stands out from white paper: a pale one gets an outline, unless it is as narrow as that.
    pub fn bar(&mut self, [x, y, width, height]: [f64; 4], fill: &str, title: &str) {
        self.rect([x, y, width, height], fill, title);
        let edge = edge(fill);
        if edge != fill && width > 1.5 {
            let (x, y, width, height) = (x + 0.3, y + 0.3, width - 0.6, (height - 0.6).max(0.0));
            self.path(&format!("M{x:.1} {y:.1}h{width:.1}v{height:.1}h-{width:.1}z"), &outline(&edge), "");
        }
    }

    /// A path with other attributes, such as its fill.
    pub fn path(&mut self, d: &str, attributes: &str, title: &str) {
        self.shape(&format!(r#"path d="{d}" {attributes}"#), title);
    }

    /// A line in ink, such as an axis or an error bar.
    pub fn rule(&mut self, d: &str) {
        self.path(d, r#"fill="none" stroke="currentColor" stroke-width=".7""#, "");
    }

    /// A line behind the data.
    pub fn faint(&mut self, d: &str) {
        self.path(d, r#"fill="none" stroke="currentColor" stroke-width=".5" stroke-opacity=".18""#, "");
    }

    /// A line that bounds a stretch or leads to a word.
    pub fn dotted(&mut self, d: &str, colour: &str) {
        self.path(d, &format!(r#"fill="none" stroke="{colour}" stroke-width=".6" stroke-dasharray="1.5 1.5""#), "");
    }

    /// The SVG file. Outside the document it is half as wide again, so that its words have the size of a page's.
    pub fn file(self, height: f64) -> String {
        let (drawn, height) = (self.0, height.ceil());
        let [wide, high] = [WIDTH, height].map(|points| (1.5 * points).round());
        format!(
            r##"<svg xmlns="http://www.w3.org/2000/svg" class="cs336-figure" width="{wide}" height="{high}" viewBox="0 0 {WIDTH} {height}" font-family="{FONT}" font-size="{SIZE}" fill="currentColor" color="#222222"><style>@media screen and (prefers-color-scheme:dark){{.cs336-figure{{color:#dddddd}}}}</style>{drawn}</svg>{}"##,
            "\n"
        )
    }

    fn shape(&mut self, open: &str, title: &str) {
        let name = open.split(' ').next().unwrap_or_default();
        let _ = match title {
            "" => write!(self.0, "<{open}/>"),
            _ => write!(self.0, "<{open}><title>{}</title></{name}>", escaped(title)),
        };
    }
}

/// The text's width in points.
pub fn width_of(words: &str) -> f64 {
    let advance = |c: char| match (c as usize).checked_sub(32).and_then(|at| ADVANCES.get(at)) {
        Some(hundredths) => f64::from(*hundredths),
        None => 60.0,
    };
    words.chars().map(advance).sum::<f64>() * SIZE / 100.0
}

/// The least contrast of a shape with its paper (WCAG 2.2, AA).
const SHAPE: f64 = 3.0;
/// The filter of figures in dark mode; `html/style.css` has it too.
pub const BRIGHTNESS: f64 = 1.2;

/// The colour of the outline of a fill or of a line's markers: as dark as it must be to stand out from white paper.
pub fn edge(fill: &str) -> String {
    let mut shades = (0..=20).map(|step| mix(fill, "#000000", f64::from(step) / 20.0));
    shades.find(|shade| contrast(shade, "#ffffff") >= SHAPE).unwrap_or_default()
}

/// The attributes of an outline without a fill.
pub fn outline(edge: &str) -> String {
    format!(r#"fill="none" stroke="{edge}" stroke-width=".6""#)
}

fn ink(fill: &str) -> &'static str {
    if contrast(fill, "#000000") >= contrast(fill, "#ffffff") { "#000000" } else { "#ffffff" }
}

fn ink_in_dark_mode(fill: &str) -> &'static str {
    ink(&brightened(fill))
}

/// A colour under the filter of dark mode.
pub fn brightened(colour: &str) -> String {
    let part = |at| (f64::from(channel(colour, at)) * BRIGHTNESS).min(255.0) as u8;
    format!("#{:02x}{:02x}{:02x}", part(1), part(3), part(5))
}

/// The contrast of two colours "#rrggbb" by WCAG 2.2, from 1 to 21.
pub fn contrast(a: &str, b: &str) -> f64 {
    let (a, b) = (luminance(a), luminance(b));
    (a.max(b) + 0.05) / (a.min(b) + 0.05)
}

/// Relative luminance of "#rrggbb", 0 for black and 1 for white.
pub fn luminance(colour: &str) -> f64 {
    let linear = |at: usize| {
        let share = f64::from(channel(colour, at)) / 255.0;
        if share <= 0.04045 { share / 12.92 } else { ((share + 0.055) / 1.055).powf(2.4) }
    };
    0.2126 * linear(1) + 0.7152 * linear(3) + 0.0722 * linear(5)
}

/// The colour `share` of the way from one colour to another.
pub fn mix(from: &str, to: &str, share: f64) -> String {
    let part = |at: usize| {
        let (a, b) = (f64::from(channel(from, at)), f64::from(channel(to, at)));
        (a + (b - a) * share).round() as u8
    };
    format!("#{:02x}{:02x}{:02x}", part(1), part(3), part(5))
}

fn channel(colour: &str, at: usize) -> u8 {
    colour.get(at..at + 2).and_then(|digits| u8::from_str_radix(digits, 16).ok()).unwrap_or(0)
}

fn escaped(words: &str) -> String {
    words.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}
