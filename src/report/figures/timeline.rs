//! Draws lanes of spans over one time axis, such as communication and computation; several timelines share the axis.

use super::axis::Axis;
use super::canvas::{Canvas, WIDTH, width_of};
use super::frame::Frame;
use super::palette::Palette;
use crate::harness::answer::figure::{Lane, Timeline};
use crate::harness::answer::format::three_digits;

/// A bar as drawn on the page, with its ends in seconds.
struct Bar<'a> {
    name: &'a str,
    from: f64,
    to: f64,
    seconds: [f64; 2],
}

/// The least width of a bar. Narrower gaps between equal bars are closed, so that hundreds of short calls in a row stay
/// visible.
const FINEST: f64 = 0.3;

const ROW: f64 = 22.0;
const BAR: f64 = 17.0;
const TITLE: f64 = 15.0;

/// The finished SVG.
pub fn svg(timelines: &[(String, Timeline)]) -> String {
    let mut canvas = Canvas::default();
    let lanes = || timelines.iter().flat_map(|(_, timeline)| &timeline.lanes);
    let left = 8.0 + lanes().map(|lane| width_of(&lane.name)).fold(0.0, f64::max);
    let end_s = timelines.iter().map(|(_, timeline)| timeline.end_s).fold(0.0, f64::max);
    let axis = Axis::linear(&[0.0, 1e3 * end_s], false);
    let palette = Palette::new(timelines.iter().flat_map(|(_, timeline)| timeline.names()).map(|name| (name, None)));
    let mut frame = Frame { left, right: WIDTH - 10.0, top: 2.0, bottom: 0.0, inset: 0.0 };
    let mut x = left;
    // A name that fits into its bar in every timeline needs no entry.
    for (name, paint) in palette.entries().filter(|(name, _)| !lanes().all(|lane| is_inside(name, lane, &axis, &frame)))
    {
        canvas.bar([x, frame.top, 8.0, 8.0], &paint.colour, "");
        canvas.text(x + 12.0, frame.top + 7.0, "start", name);
        x += 26.0 + width_of(name);
    }
    frame.top += if x > left { 13.0 } else { 0.0 };
    let titles = timelines.iter().filter(|(name, _)| !name.is_empty()).count();
    frame.bottom = frame.top + TITLE * titles as f64 + ROW * lanes().count() as f64 + 2.0;
    for tick in &axis.ticks {
        canvas.faint(&format!("M{:.1} {:.1}V{:.1}", frame.x(&axis, *tick), frame.top, frame.bottom));
    }
    let mut top = frame.top;
    for (name, timeline) in timelines {
        if !name.is_empty() {
            canvas.text(left, top + TITLE - 4.0, "start", name);
            top += TITLE;
        }
        for lane in &timeline.lanes {
            draw_lane(&mut canvas, lane, &palette, &axis, &Frame { top, ..frame });
            top += ROW;
        }
    }
    frame.draw_x(&mut canvas, &axis, true);
    let x_label = timelines.first().map_or("", |(_, timeline)| &timeline.x_label);
    frame.file(canvas, x_label)
}

/// The lane's name and bars, in a row that begins at the frame's top.
fn draw_lane(canvas: &mut Canvas, lane: &Lane, palette: &Palette, axis: &Axis, frame: &Frame) {
    let middle = frame.top + ROW / 2.0;
    canvas.text(frame.left - 6.0, middle + 2.8, "end", &lane.name);
    for Bar { name, from, to, seconds } in bars(lane, |ms| frame.x(axis, ms)) {
        let fill = &palette.paint(name).colour;
        // A gap separates neighbours. It would hide a narrow bar.
        let width = if to - from > 1.0 { to - from - 0.2 } else { (to - from).max(FINEST) };
        let [start, end] = seconds.map(|s| three_digits(1e3 * s));
        canvas.bar([from, middle - BAR / 2.0, width, BAR], fill, &format!("{name}: {start} to {end} ms"));
        if width_of(name) + 4.0 <= to - from {
            canvas.text_on(fill, (from + to) / 2.0, middle + 2.8, name);
        }
    }
}

/// Whether a name stands in one of the lane's bars, or is of no bar in it.
fn is_inside(name: &str, lane: &Lane, axis: &Axis, frame: &Frame) -> bool {
    let bars = bars(lane, |ms| frame.x(axis, ms));
    let mut own = bars.iter().filter(|bar| bar.name == name).peekable();
    own.peek().is_none() || own.any(|bar| width_of(name) + 4.0 <= bar.to - bar.from)
}

/// The spans in order. Equal spans without a visible gap are merged.
fn bars(lane: &Lane, at: impl Fn(f64) -> f64) -> Vec<Bar<'_>> {
    let mut bars: Vec<Bar<'_>> = Vec::new();
    for span in &lane.spans {
        let (from, to) = (at(1e3 * span.start_s), at(1e3 * span.end_s));
        match bars.last_mut() {
            Some(last) if last.name == span.name && from - last.to < FINEST => {
                last.to = last.to.max(to);
                last.seconds[1] = last.seconds[1].max(span.end_s);
            }
            _ => bars.push(Bar { name: &span.name, from, to, seconds: [span.start_s, span.end_s] }),
        }
    }
    bars
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::answer::figure::Span;

    fn timeline(end_s: f64, spans: Vec<Span>) -> (String, Timeline) {
        let lane = |name: &str, spans| Lane { name: name.into(), spans };
        let lanes = vec![lane("computing", spans), lane("communicating", Vec::new())];
        (String::new(), Timeline { x_label: "time (ms)".into(), end_s, lanes })
    }

    fn span(name: &str, start_s: f64, end_s: f64) -> Span {
        Span { name: name.into(), start_s, end_s }
    }

    #[test]
    fn every_span_is_a_bar_with_its_name_in_it_or_in_the_legend() {
        let spans = vec![span("forward", 0.0, 0.1), span("backward", 0.1, 0.3), span("optimizer", 0.3, 0.304)];
        let drawn = svg(&[timeline(0.4, spans)]);
        // Three bars and the swatch of the one that is too narrow for its name.
        assert_eq!(drawn.matches("<rect").count(), 3 + 1, "{drawn}");
        for name in ["communicating", "forward", "backward", "optimizer"] {
            assert_eq!(drawn.matches(&format!(">{name}</text>")).count(), 1, "{name}");
        }
        assert!(drawn.contains("<title>backward: 100 to 300 ms</title>"));
    }

    #[test]
    fn short_equal_spans_in_a_row_are_one_bar_and_a_single_one_is_visible() {
        let row = (0..100).map(|i| span("call", 0.2 + 1e-4 * f64::from(i), 0.2 + 1e-4 * f64::from(i) + 9e-5));
        let drawn = svg(&[timeline(1.0, row.chain([span("call", 0.8, 0.80001)]).collect())]);
        // A swatch, the row and the lone one.
        assert_eq!(drawn.matches("<rect").count(), 1 + 2, "{drawn}");
        assert!(drawn.contains(&format!(r#"width="{FINEST:.2}""#)));
    }

    #[test]
    fn stacked_timelines_share_the_axis_of_the_longest() {
        let stacked = |end_s| (format!("to {end_s}"), timeline(end_s, vec![span("forward", 0.0, 0.1)]).1);
        let drawn = svg(&[stacked(0.2), stacked(0.4)]);
        let bar = |from: usize| drawn[from..].find("<rect").map(|at| &drawn[from + at..][..120]);
        let width =
            |bar: Option<&str>| bar.and_then(|bar| bar.split("width=\"").nth(1)?.split('"').next().map(String::from));
        let second = drawn.find(">to 0.4<").unwrap_or_default();
        assert_eq!(width(bar(0)), width(bar(second)), "{drawn}");
        assert_eq!(drawn.matches(">400</text>").count(), 1);
    }
}
