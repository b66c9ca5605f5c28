//! Draws lanes of spans over one time axis, such as communication and computation.

use std::fmt::Write as _;

use super::axis::Axis;
use super::plot::{INK, PALETTE, RIGHT, WIDTH, draw_x, file, text, width_of};
use crate::harness::answer::figure::{Lane, Timeline};

/// A bar as drawn on the page.
struct Bar<'a> {
    name: &'a str,
    from: f64,
    to: f64,
}

/// The least width of a bar. Narrower gaps between equal bars are closed, so that hundreds of short calls in a row stay
/// visible.
const FINEST: f64 = 0.3;

const ROW: f64 = 26.0;
const BAR: f64 = 18.0;

/// The finished SVG.
pub fn svg(timeline: &Timeline) -> String {
    let mut out = String::new();
    // The widths are an estimate, so leave room: a name must not be cut off.
    let left = 12.0 + 1.2 * timeline.lanes.iter().map(|lane| width_of(&lane.name)).fold(0.0, f64::max);
    let axis = Axis::linear(&[0.0, 1e3 * timeline.end_s], true);
    let names = timeline.names();
    let mut x = left;
    for (i, name) in names.iter().enumerate() {
        let _ = write!(out, r#"<rect x="{x:.1}" y="2" width="8" height="8" fill="{}"/>"#, PALETTE[i]);
        text(&mut out, x + 12.0, 9.0, "start", name);
        x += 26.0 + width_of(name);
    }
    let bottom = 16.0 + ROW * timeline.lanes.len() as f64;
    draw_x(&mut out, &axis, left, WIDTH - RIGHT, bottom);
    let _ = write!(out, r#"<path d="M{left:.1} {bottom:.1}H{:.1}" stroke="{INK}" stroke-width=".6"/>"#, WIDTH - RIGHT);
    for (row, lane) in timeline.lanes.iter().enumerate() {
        let y = 16.0 + ROW * row as f64 + (ROW - BAR) / 2.0;
        text(&mut out, left - 5.0, y + BAR / 2.0 + 2.8, "end", &lane.name);
        for Bar { name, from, to } in bars(lane, |ms| axis.at(ms, left, WIDTH - RIGHT)) {
            let colour = names.iter().position(|known| *known == name).map_or(INK, |i| PALETTE[i]);
            // A white edge separates neighbours. It would hide a narrow bar.
            let edge = if to - from > 1.0 { r##" stroke="#ffffff" stroke-width=".15""## } else { "" };
            let _ = write!(
                out,
                r#"<rect x="{from:.2}" y="{y:.1}" width="{:.2}" height="{BAR}" fill="{colour}"{edge}/>"#,
                (to - from).max(FINEST)
            );
        }
    }
    text(&mut out, (left + WIDTH - RIGHT) / 2.0, bottom + 26.0, "middle", &timeline.x_label);
    file(bottom + 32.0, &out)
}

/// The spans in order. Equal spans without a visible gap are merged.
fn bars(lane: &Lane, at: impl Fn(f64) -> f64) -> Vec<Bar<'_>> {
    let mut bars: Vec<Bar<'_>> = Vec::new();
    for span in &lane.spans {
        let (from, to) = (at(1e3 * span.start_s), at(1e3 * span.end_s));
        match bars.last_mut() {
            Some(last) if last.name == span.name && from - last.to < FINEST => last.to = last.to.max(to),
            _ => bars.push(Bar { name: &span.name, from, to }),
        }
    }
    bars
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::answer::figure::Span;

    fn timeline(end_s: f64, spans: Vec<Span>) -> Timeline {
        let lane = |name: &str, spans| Lane { name: name.into(), spans };
        let lanes = vec![lane("computing", spans), lane("communicating", Vec::new())];
        Timeline { x_label: "time (ms)".into(), end_s, lanes }
    }

    fn span(name: &str, start_s: f64, end_s: f64) -> Span {
        Span { name: name.into(), start_s, end_s }
    }

    #[test]
    fn every_span_is_a_bar_and_every_name_a_colour() {
        let spans = vec![span("forward", 0.0, 0.1), span("backward", 0.1, 0.3), span("forward", 0.3, 0.4)];
        let drawn = svg(&timeline(0.4, spans));
        // The page, two swatches and three bars.
        assert_eq!(drawn.matches("<rect").count(), 1 + 2 + 3, "{drawn}");
        assert!(drawn.contains(">communicating</text>") && drawn.contains(">backward</text>"));
    }

    #[test]
    fn short_equal_spans_in_a_row_are_one_bar_and_a_single_one_is_visible() {
        let row = (0..100).map(|i| span("call", 0.2 + 1e-4 * f64::from(i), 0.2 + 1e-4 * f64::from(i) + 9e-5));
        let drawn = svg(&timeline(1.0, row.chain([span("call", 0.8, 0.80001)]).collect()));
        // The page, a swatch, the row and the lone one, which has no edge that would cover it.
        assert_eq!(drawn.matches("<rect").count(), 1 + 1 + 2, "{drawn}");
        assert!(drawn.contains(&format!(r#"width="{FINEST:.2}""#)));
        assert_eq!(drawn.matches("stroke-width=\".15\"").count(), 1);
    }
}
