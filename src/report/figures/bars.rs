//! Bars: upright in groups, or one for each category along a horizontal axis.

use super::axis::Axis;
use super::canvas::{Canvas, WIDTH, width_of};
use super::frame::{Frame, legend, references, title, y_axis};
use super::palette::{Paint, Palette};
use crate::harness::answer::figure::{Plot, Series, X};
use crate::harness::answer::format::three_digits;

const ROW: f64 = 15.0;
const BAR: f64 = 10.0;

/// Upright bars in groups, or markers where y is logarithmic, with error bars; numbers above where all fit.
pub fn draw(canvas: &mut Canvas, plot: &Plot, palette: &Palette, frame: &Frame, axis: &Axis) {
    let categories = names(plot);
    let slot = slot(plot, frame);
    let bar = (slot * 0.76 / plot.series.len() as f64).min(34.0);
    let written = numbers(plot, bar);
    for (c, category) in categories.iter().enumerate() {
        let middle = frame.left + slot * (c as f64 + 0.5);
        let lower = if c % 2 == 1 { second_row(plot, frame) } else { 0.0 };
        canvas.text(middle, frame.bottom + 12.5 + lower, "middle", category);
        for (i, series) in plot.series.iter().enumerate() {
            let x = middle + bar * (i as f64 + 0.5 - plot.series.len() as f64 / 2.0);
            let Some(value) = series.points[c].1 else {
                canvas.text(x, frame.bottom - 3.0, "middle", "–");
                continue;
            };
            let (paint, title, y) =
                (paint(plot, palette, series, category), title(plot, series, c), frame.y(axis, value));
            if plot.log_y {
                frame.draw_range(canvas, axis, x, series.range(c));
                paint.marker(canvas, x, y, &title);
                continue;
            }
            let zero = frame.y(axis, 0.0);
            canvas.bar([x - bar / 2.0 + 0.5, y.min(zero), bar - 1.0, (y - zero).abs()], &paint.colour, &title);
            frame.draw_range(canvas, axis, x, series.range(c));
            if written {
                let highest = series.range(c).map_or(value, |range| range[1]).max(0.0);
                canvas.text(x, frame.y(axis, highest) - 2.5, "middle", &three_digits(value));
            }
        }
    }
}

/// Whether the categories' names fit below upright bars in one row.
pub fn fits(plot: &Plot, frame: &Frame) -> bool {
    names(plot).iter().all(|name| width_of(name) + 4.0 <= slot(plot, frame))
}

/// The height of a second row, for every other name, where one row is too short for them.
pub fn second_row(plot: &Plot, frame: &Frame) -> f64 {
    if fits(plot, frame) { 0.0 } else { 10.0 }
}

/// The finished SVG of horizontal bars: names at the left, the sum of the segments behind each bar.
pub fn horizontal(plot: &Plot, palette: &Palette) -> String {
    let mut canvas = Canvas::default();
    let left = 8.0 + names(plot).iter().map(|name| width_of(name)).fold(0.0, f64::max);
    let entries = palette.entries().filter(|_| plot.series.len() > 1);
    let rows = legend(&mut canvas, plot, entries, left);
    let references = references(plot);
    let named = references.iter().any(|reference| !reference.name.is_empty());
    let top = 2.0 + if rows > 0 { 12.0 + 13.0 * rows as f64 } else { 0.0 } + if named { 11.0 } else { 0.0 };
    let height = ROW * names(plot).len() as f64 + 2.0;
    let frame = Frame { left, right: WIDTH - 34.0, top, bottom: top + height, inset: 0.0 };
    let axis = value_axis(plot);
    let at = |value: f64| frame.x(&axis, value);
    for tick in &axis.ticks {
        canvas.faint(&format!("M{:.1} {:.1}V{:.1}", at(*tick), frame.top, frame.bottom));
    }
    for category in 0..names(plot).len() {
        row(&mut canvas, plot, palette, &frame, category, &at);
    }
    for reference in &references {
        canvas.rule(&format!("M{:.1} {:.1}V{:.1}", at(reference.at), frame.top, frame.bottom));
        let half = width_of(&reference.name) / 2.0;
        canvas.text(at(reference.at).clamp(half, WIDTH - half), frame.top - 3.0, "middle", &reference.name);
    }
    frame.draw_x(&mut canvas, &axis, true);
    frame.file(canvas, &plot.y_label)
}

/// One bar of segments with its name and number.
fn row(canvas: &mut Canvas, plot: &Plot, palette: &Palette, frame: &Frame, category: usize, at: &dyn Fn(f64) -> f64) {
    let name = names(plot)[category];
    let middle = frame.top + ROW * (category as f64 + 0.5) + 1.0;
    canvas.text(frame.left - 6.0, middle + 2.8, "end", name);
    let mut from = 0.0;
    for series in &plot.series {
        let Some(value) = series.points[category].1 else { continue };
        let (a, b) = (at(from), at(from + value));
        let colour = &paint(plot, palette, series, name).colour;
        canvas.bar([a.min(b), middle - BAR / 2.0, (a - b).abs(), BAR], colour, &title(plot, series, category));
        from += value;
    }
    let range = plot.series[0].range(category).filter(|_| plot.series.len() == 1);
    if let Some([low, high]) = range.map(|ends| ends.map(at)) {
        canvas.rule(&format!("M{low:.1} {:.1}v4m0-2H{high:.1}m0-2v4", middle - 2.0));
    }
    let end = range.map_or(from, |range| range[1]).max(0.0);
    let number = total(plot, category).map_or("–".into(), three_digits);
    canvas.text(at(end) + 4.0, middle + 2.8, "start", &number);
}

fn value_axis(plot: &Plot) -> Axis {
    if plot.series.len() == 1 {
        return y_axis([plot]);
    }
    let ends = (0..names(plot).len()).filter_map(|category| total(plot, category));
    Axis::linear(&ends.chain(references(plot).iter().map(|reference| reference.at)).collect::<Vec<_>>(), true)
}

/// The sum of a category's segments; none if nothing was measured.
fn total(plot: &Plot, category: usize) -> Option<f64> {
    let values = plot.series.iter().filter_map(|series| series.points[category].1);
    values.reduce(|a, b| a + b)
}

/// Of a single series each bar has the colour that its category's name says.
fn paint(plot: &Plot, palette: &Palette, series: &Series, category: &str) -> Paint {
    let own = Paint::of_owner(category).filter(|_| plot.series.len() == 1 && series.role.is_none());
    own.unwrap_or_else(|| palette.paint(&series.name).clone())
}

/// Whether every number is narrower than its bar.
fn numbers(plot: &Plot, bar: f64) -> bool {
    let mut values = plot.series.iter().flat_map(|series| &series.points).filter_map(|point| point.1);
    !plot.log_y && values.all(|value| width_of(&three_digits(value)) <= bar)
}

fn names(plot: &Plot) -> Vec<&str> {
    plot.series[0]
        .points
        .iter()
        .map(|(x, _)| match x {
            X::Category(name) => name.as_str(),
            X::Number(_) => "",
        })
        .collect()
}

fn slot(plot: &Plot, frame: &Frame) -> f64 {
    (frame.right - frame.left) / plot.series[0].points.len() as f64
}
