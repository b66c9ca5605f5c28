//! Lines with their names at their ends.

use std::fmt::Write as _;

use super::axis::Axis;
use super::canvas::{Canvas, SIZE, WIDTH, width_of};
use super::frame::{Frame, references, stroke, title};
use super::palette::Palette;
use crate::harness::answer::figure::{Plot, PlotKind, Series};

/// Names in the right margin: of lines at their last points, and of reference lines.
pub struct Margin<'a> {
    names: Vec<Name<'a>>,
    /// Whether the lines' names are among them; else they need a legend.
    pub has_series: bool,
}

struct Name<'a> {
    words: String,
    /// None for a reference.
    series: Option<&'a Series>,
    at: f64,
}

const GAP: f64 = SIZE * 1.2;
/// Longer names leave too little room for the lines.
const WIDEST: f64 = WIDTH * 0.34;

impl<'a> Margin<'a> {
    pub fn of(plot: &'a Plot, height: f64) -> Self {
        let named = references(plot).into_iter().filter(|reference| !reference.name.is_empty());
        let mut names: Vec<Name> = named.map(|r| Name { words: r.name, series: None, at: r.at }).collect();
        let direct = plot.kind == PlotKind::Line && plot.series.len() > 1;
        let last = |series: &'a Series| {
            let at = series.points.iter().rev().find_map(|point| point.1)?;
            Some(Name { words: series.name.clone(), series: Some(series), at })
        };
        let lines: Vec<Name> = plot.series.iter().filter(|_| direct).filter_map(last).collect();
        let fits = lines.iter().all(|name| width_of(&name.words) <= WIDEST);
        let has_series = fits && !lines.is_empty() && (names.len() + lines.len()) as f64 * GAP <= height;
        if has_series {
            names.extend(lines);
        }
        Self { names, has_series }
    }

    pub fn width(&self) -> f64 {
        let widest = self.names.iter().map(|name| width_of(&name.words)).fold(0.0, f64::max);
        if self.names.is_empty() { 10.0 } else { widest + 14.0 }
    }

    /// The names beside the frame, moved apart where they would touch; a dotted line leads to one that has been moved.
    pub fn draw(&self, canvas: &mut Canvas, palette: &Palette, frame: &Frame, axes: (&Axis, &Axis)) {
        let wanted: Vec<f64> = self.names.iter().map(|name| frame.y(axes.1, name.at)).collect();
        let places = spread(&wanted, frame.top, frame.bottom);
        for ((name, wanted), y) in self.names.iter().zip(&wanted).zip(places) {
            let x = frame.right + 12.0;
            let end = name.series.map_or(frame.right, |series| frame.x(axes.0, last_x(series)));
            if (y - wanted).abs() > 2.0 || end < frame.right - frame.inset - 2.0 {
                let colour = name.series.map_or("currentColor", |series| palette.paint(&series.name).colour.as_str());
                canvas.dotted(&format!("M{:.1} {wanted:.1}L{:.1} {y:.1}", end + 4.0, x - 2.0), colour);
            }
            canvas.text(x, y + 2.8, "start", &name.words);
        }
    }
}

/// Where names stand that want to stand at `wanted`: at least [`GAP`] apart, as near as they can, between `top` and `bottom`.
fn spread(wanted: &[f64], top: f64, bottom: f64) -> Vec<f64> {
    let mut order: Vec<usize> = (0..wanted.len()).collect();
    order.sort_by(|a, b| wanted[*a].total_cmp(&wanted[*b]));
    // Without the gaps, places must not fall: neighbours that would are pooled at their mean.
    let mut pools: Vec<(f64, usize)> = Vec::new();
    for (rank, at) in order.iter().enumerate() {
        pools.push((wanted[*at] - GAP * rank as f64, 1));
        while let [.., (a, n), (b, m)] = pools[..]
            && b < a
        {
            pools.truncate(pools.len() - 2);
            pools.push(((a * n as f64 + b * m as f64) / (n + m) as f64, n + m));
        }
    }
    let level = pools.iter().flat_map(|(mean, n)| std::iter::repeat_n(*mean, *n));
    let highest = bottom - GAP * wanted.len().saturating_sub(1) as f64;
    let mut places = vec![0.0; wanted.len()];
    for (rank, (at, mean)) in order.into_iter().zip(level).enumerate() {
        places[at] = mean.min(highest).max(top) + GAP * rank as f64;
    }
    places
}

fn last_x(series: &Series) -> f64 {
    let last = series.points.iter().rev().find(|point| point.1.is_some());
    last.and_then(|point| point.0.number()).unwrap_or(0.0)
}

/// The lines with their error bars and markers.
pub fn draw(canvas: &mut Canvas, plot: &Plot, palette: &Palette, frame: &Frame, (x_axis, y_axis): (&Axis, &Axis)) {
    let mut drawn: Vec<Vec<(f64, f64, usize)>> = Vec::new();
    for series in &plot.series {
        let mut paint = palette.paint(&series.name).clone();
        let (mut path, mut pen) = (String::new(), 'M');
        let mut marks: Vec<(f64, f64, usize)> = Vec::new();
        for (k, (x, value)) in series.points.iter().enumerate() {
            let (Some(x), Some(value)) = (x.number(), value) else {
                pen = 'M';
                continue;
            };
            let (x, y) = (frame.x(x_axis, x), frame.y(y_axis, *value));
            let _ = write!(path, "{pen}{x:.1} {y:.1}");
            pen = 'L';
            marks.push((x, y, k));
        }
        // Of a line on top of another one every second stretch is left out, and the markers are.
        let is_covering = drawn.iter().any(|other| covers(&marks, other));
        if is_covering {
            paint.dash = "5 5";
        }
        canvas.path(&path, &stroke(&paint), &series.name);
        // Beyond two dozen points markers would hide the line.
        for (x, y, k) in marks.iter().step_by(series.points.len().div_ceil(24)).filter(|_| !is_covering) {
            frame.draw_range(canvas, y_axis, *x, series.range(*k));
            paint.marker(canvas, *x, *y, &title(plot, series, *k));
        }
        drawn.push(marks);
    }
}

fn covers(marks: &[(f64, f64, usize)], other: &[(f64, f64, usize)]) -> bool {
    marks.len() == other.len() && marks.iter().zip(other).all(|(a, b)| a.0 == b.0 && (a.1 - b.1).abs() < 1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_on_top_of_another_leaves_it_visible() {
        let line = |name: &str, y: f64| Series::over_numbers(name, [(1.0, Some(1.0)), (2.0, Some(y))]);
        let dashes = |y| {
            let plot = Plot::new(PlotKind::Line, "n", "time (ms)", vec![line("ours", 100.0), line("cuDNN", y)]);
            super::super::plot::svg(&plot).matches(r#"stroke-dasharray="5 5""#).count()
        };
        assert_eq!((dashes(100.1), dashes(90.0)), (1, 0));
    }

    #[test]
    fn names_that_would_touch_are_moved_apart_and_stay_inside() {
        assert_eq!(spread(&[50.0, 20.0], 0.0, 100.0), [50.0, 20.0]);
        let near = |places: Vec<f64>, expected: [f64; 3]| {
            assert!(places.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-9), "{places:?} {expected:?}");
        };
        near(spread(&[50.0, 50.0, 50.0], 0.0, 100.0), [50.0 - GAP, 50.0, 50.0 + GAP]);
        near(spread(&[99.0, 98.0, 20.0], 0.0, 100.0), [100.0, 100.0 - GAP, 20.0]);
    }
}
