//! Draws heat maps of ratios: a number in every field, and a colour for ratios above and below one.

use std::fmt::Write as _;

use super::plot::{PALETTE, RIGHT, WIDTH, file, text, width_of};
use crate::harness::answer::figure::Heatmap;

const ROW: f64 = 15.0;
const TITLE: f64 = 17.0;
const GAP: f64 = 6.0;
/// At this ratio and beyond, colours are fully saturated.
const FULL: f64 = 4.0;
const NOTHING: &str = "#eeeeee";

/// The finished SVG.
pub fn svg(heatmap: &Heatmap) -> String {
    let mut out = String::new();
    let left = 26.0 + 1.2 * heatmap.y.iter().map(|name| width_of(name)).fold(0.0, f64::max);
    let slot = (WIDTH - RIGHT - left) / heatmap.x.len() as f64;
    legend(&mut out);
    let mut top = 12.0;
    for panel in &heatmap.panels {
        text(&mut out, left, top + TITLE - 5.0, "start", &panel.name);
        text(&mut out, 0.0, top + TITLE - 5.0, "start", &heatmap.y_label);
        top += TITLE;
        for (name, row) in heatmap.y.iter().zip(&panel.values) {
            text(&mut out, left - 5.0, top + ROW / 2.0 + 2.8, "end", name);
            for (i, ratio) in row.iter().enumerate() {
                field(&mut out, left + slot * i as f64, top, slot, *ratio);
            }
            top += ROW;
        }
        top += GAP;
    }
    for (i, name) in heatmap.x.iter().enumerate() {
        text(&mut out, left + slot * (i as f64 + 0.5), top + 6.0, "middle", name);
    }
    text(&mut out, (left + WIDTH - RIGHT) / 2.0, top + 19.0, "middle", &heatmap.x_label);
    file(top + 25.0, &out)
}

/// What the colours mean, at the right of the first line.
fn legend(out: &mut String) {
    let steps = [0.25, 0.5, 1.0, 2.0, 4.0];
    for (i, ratio) in steps.into_iter().enumerate() {
        field(out, WIDTH - RIGHT - 28.0 * (steps.len() - i) as f64, 0.0, 28.0, Some(ratio));
    }
}

fn field(out: &mut String, x: f64, y: f64, width: f64, ratio: Option<f64>) {
    let (colour, words) = match ratio {
        Some(ratio) => (colour(ratio), written(ratio)),
        None => (NOTHING.to_string(), "–".to_string()),
    };
    let _ = write!(
        out,
        r##"<rect x="{x:.1}" y="{y:.1}" width="{width:.1}" height="{ROW}" fill="{colour}" stroke="#ffffff" stroke-width=".8"/>"##
    );
    text(out, x + width / 2.0, y + ROW / 2.0 + 2.8, "middle", &words);
}

/// Three digits, or two below one.
fn written(ratio: f64) -> String {
    let digits = match ratio {
        r if r < 9.995 => 2,
        r if r < 99.95 => 1,
        _ => 0,
    };
    format!("{ratio:.digits$}")
}

/// White at one, towards blue above it and towards vermilion below, by the logarithm; pale enough for black letters.
fn colour(ratio: f64) -> String {
    let share = (ratio.ln() / FULL.ln()).clamp(-1.0, 1.0);
    let full = if share > 0.0 { PALETTE[0] } else { PALETTE[1] };
    let channel = |at: usize| {
        let full = f64::from(u8::from_str_radix(&full[at..at + 2], 16).unwrap_or(0));
        (255.0 + (full - 255.0) * share.abs() * 0.6).round() as u8
    };
    format!("#{:02x}{:02x}{:02x}", channel(1), channel(3), channel(5))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::answer::figure::Panel;

    #[test]
    fn every_field_has_a_rectangle_and_its_number_and_a_missing_one_a_dash() {
        let drawn = svg(&Heatmap {
            x_label: "length".into(),
            y_label: "d".into(),
            x: vec!["128".into(), "256".into()],
            y: vec!["16".into()],
            panels: vec![Panel { name: "forward".into(), values: vec![vec![Some(1.25), None]] }],
        });
        // The page, five steps of the legend and two fields.
        assert_eq!(drawn.matches("<rect").count(), 1 + 5 + 2, "{drawn}");
        for words in [">1.25</text>", ">–</text>", ">forward</text>", ">256</text>", ">length</text>"] {
            assert!(drawn.contains(words), "{words}: {drawn}");
        }
    }

    #[test]
    fn colours_lie_on_their_side_of_white_and_end_at_the_full_factor() {
        assert_eq!(colour(1.0), "#ffffff");
        assert_eq!((colour(4.0), colour(40.0)), (colour(5.0), colour(4.0)));
        assert_ne!(colour(2.0), colour(4.0));
        let (faster, slower) = (colour(2.0), colour(0.5));
        assert!(faster[1..3] < faster[5..7] && slower[1..3] > slower[5..7], "{faster} {slower}");
        assert_eq!((written(0.5), written(12.34), written(123.4)), ("0.50".into(), "12.3".into(), "123".into()));
    }
}
