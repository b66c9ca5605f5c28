//! Stacked areas over time, drawn by the maximum of each pixel column, with phases marked above.

use std::fmt::Write as _;

use super::axis::Axis;
use super::canvas::{Canvas, WIDTH, edge, width_of};
use super::frame::{Frame, left_of, legend, references, unit, x_axis};
use super::palette::Palette;
use crate::harness::answer::figure::{Plot, Series};
use crate::harness::answer::format::three_digits;

/// Taller than other figures, so that heights in the stack are easy to read.
const HEIGHT: f64 = 150.0;
const RIGHT: f64 = 10.0;
const ROW: f64 = 12.0;
/// The width of a pixel column in points. All moments in a column are drawn as the one with the highest stack: a step that
/// is narrower than a column keeps its height, and equal steps look equal.
const COLUMN: f64 = 0.5;

/// A stretch of x in which the stack is drawn as it is at one moment.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Step {
    from: f64,
    to: f64,
    moment: usize,
}

/// The finished SVG: the stack with names inside where they fit, its phases and its axes.
pub fn svg(plot: &Plot, palette: &Palette) -> String {
    let mut canvas = Canvas::default();
    let stack = stack(plot);
    let tops = &stack[stack.len() - 1];
    let marks = references(plot).into_iter().map(|reference| reference.at);
    let y = Axis::linear(&tops.iter().copied().chain(marks).collect::<Vec<_>>(), true);
    let (x, left) = (x_axis([plot]), left_of(&y));
    let at = |top: f64| Frame { left, right: WIDTH - RIGHT, top, bottom: top + HEIGHT, inset: 0.0 };
    let positions: Vec<f64> =
        plot.series[0].points.iter().filter_map(|p| p.0.number()).map(|v| at(0.0).x(&x, v)).collect();
    let steps = steps(&positions, tops);
    let ends: Vec<f64> = plot.phases.iter().flat_map(|p| [p.from, p.to]).map(|end| at(0.0).x(&x, end)).collect();
    let place = |(i, series): (usize, &Series)| {
        place(&steps, (&stack[i], &stack[i + 1]), &ends, width_of(&series.name), |value| at(0.0).y(&y, value))
    };
    let places: Vec<Option<(f64, f64)>> = plot.series.iter().enumerate().map(place).collect();
    let unnamed = palette.entries().zip(&places).filter(|(_, place)| place.is_none() && plot.series.len() > 1);
    let rows = legend(&mut canvas, plot, unnamed.map(|(entry, _)| entry), left);
    let phases = Phases::of(plot, |value| at(0.0).x(&x, value), left);
    let frame = at(18.0 + 13.0 * rows as f64 + phases.height());
    frame.draw_y(&mut canvas, &y, true);
    for (i, series) in plot.series.iter().enumerate() {
        let fill = &palette.paint(&series.name).colour;
        let outline = outline(&steps, &stack[i + 1], &stack[i], |value| frame.y(&y, value));
        canvas.path(&outline, &format!(r#"fill="{fill}""#), &highest(plot, series));
        if edge(fill) != *fill {
            let (height, upper) = (|value| frame.y(&y, value), &stack[i + 1]);
            let top = start(&steps, upper, &height) + &along(&steps, upper, &height);
            canvas.path(&top, &super::canvas::outline(&edge(fill)), "");
        }
        if let Some((x, y)) = places[i].filter(|_| plot.series.len() > 1) {
            canvas.text_on(fill, x, frame.top + y + 2.8, &series.name);
        }
    }
    frame.draw_x(&mut canvas, &x, true);
    frame.draw_references(&mut canvas, plot, &y);
    phases.draw(&mut canvas, &frame);
    canvas.text(0.0, 9.0, "start", &plot.y_label);
    frame.file(canvas, &plot.x_label)
}

/// The heights of the stack at each moment below the first series, between the series, and above the last one.
fn stack(plot: &Plot) -> Vec<Vec<f64>> {
    let mut stack = vec![vec![0.0; plot.series[0].points.len()]];
    for series in &plot.series {
        let sums =
            stack[stack.len() - 1].iter().zip(&series.points).map(|(below, point)| below + point.1.unwrap_or(0.0));
        stack.push(sums.collect());
    }
    stack
}

/// What each pixel column shows: of the moments in it, and of the one that it begins with, the one with the highest stack.
fn steps(positions: &[f64], tops: &[f64]) -> Vec<Step> {
    let (Some(first), Some(end)) = (positions.first(), positions.last()) else { return Vec::new() };
    let column = |moment: &usize| ((positions[*moment] - first) / COLUMN).floor();
    let moments: Vec<usize> = (0..positions.len()).collect();
    let mut starts: Vec<(f64, usize)> = Vec::new();
    let mut held = 0;
    for inside in moments.chunk_by(|a, b| column(a) == column(b)) {
        let from = first + COLUMN * column(&inside[0]);
        let highest = inside.iter().copied().chain([held]).max_by(|a, b| tops[*a].total_cmp(&tops[*b]));
        held = inside[inside.len() - 1];
        // In the next column the last moment holds, until others begin there.
        starts.extend([(from, highest.unwrap_or(held)), (from + COLUMN, held)]);
    }
    let ends: Vec<f64> = starts.iter().skip(1).map(|start| start.0).chain([*end]).collect();
    let steps = starts.into_iter().zip(ends).map(|((from, moment), to)| Step { from, to, moment });
    steps.filter(|step| step.to > step.from).collect()
}

/// Along the steps from where the path stands.
fn along(steps: &[Step], heights: &[f64], y: &impl Fn(f64) -> f64) -> String {
    steps.iter().map(|Step { to, moment, .. }| format!("V{:.1}H{to:.1}", y(heights[*moment]))).collect()
}

/// The beginning of a path at the first of the steps.
fn start(steps: &[Step], heights: &[f64], y: &impl Fn(f64) -> f64) -> String {
    steps.first().map_or(String::new(), |first| format!("M{:.1} {:.1}", first.from, y(heights[first.moment])))
}

/// Along the upper steps and back along the lower ones.
fn outline(steps: &[Step], upper: &[f64], lower: &[f64], y: impl Fn(f64) -> f64) -> String {
    let mut path = start(steps, lower, &y) + &along(steps, upper, &y);
    for Step { from, moment, .. } in steps.iter().rev() {
        let _ = write!(path, "V{:.1}H{from:.1}", y(lower[*moment]));
    }
    path + "Z"
}

/// Where words of a width stand in an area with the most room above and below, if there is enough for them.
/// No phase ends behind them.
fn place(
    steps: &[Step],
    (lower, upper): (&[f64], &[f64]),
    ends: &[f64],
    width: f64,
    y: impl Fn(f64) -> f64,
) -> Option<(f64, f64)> {
    let (left, right) = (steps.first()?.from, steps.last()?.to);
    let half = width / 2.0 + 3.0;
    let mut best: Option<(f64, f64, f64)> = None;
    let mut middle = left + half;
    while middle + half <= right {
        let below = steps.iter().filter(|step| step.to > middle - half && step.from < middle + half);
        let (top, bottom) = below.fold((f64::NEG_INFINITY, f64::INFINITY), |(top, bottom), step| {
            (top.max(y(upper[step.moment])), bottom.min(y(lower[step.moment])))
        });
        let room = bottom - top;
        let is_crossed = ends.iter().any(|end| (end - middle).abs() < half);
        if room >= ROW && !is_crossed && best.is_none_or(|(most, ..)| room > most + 0.5) {
            best = Some((room, middle, (top + bottom) / 2.0));
        }
        middle += 4.0;
    }
    best.map(|(_, x, y)| (x, y))
}

/// What an area says on hover.
fn highest(plot: &Plot, series: &Series) -> String {
    let most = series.points.iter().filter_map(|point| point.1).fold(0.0, f64::max);
    format!("{}: at most {} {}", series.name, three_digits(most), unit(plot)).trim_end().into()
}

/// Names of phases, in rows so that they do not overlap.
struct Phases {
    labels: Vec<Label>,
    rows: usize,
}

struct Label {
    name: String,
    /// Ends of the phase, and the middle of its name, in points.
    from: f64,
    to: f64,
    middle: f64,
    row: usize,
}

impl Phases {
    fn of(plot: &Plot, at: impl Fn(f64) -> f64, left: f64) -> Self {
        let mut labels = Vec::new();
        let mut ends: Vec<f64> = Vec::new();
        for phase in &plot.phases {
            let (from, to) = (at(phase.from), at(phase.to));
            let half = width_of(&phase.name) / 2.0 + 2.0;
            let middle = ((from + to) / 2.0).clamp(left + half, WIDTH - half);
            let row = ends.iter().position(|end| *end <= middle - half).unwrap_or(ends.len());
            ends.resize(ends.len().max(row + 1), 0.0);
            ends[row] = middle + half;
            labels.push(Label { name: phase.name.clone(), from, to, middle, row });
        }
        Self { labels, rows: ends.len() }
    }

    fn height(&self) -> f64 {
        self.rows as f64 * ROW
    }

    /// Names above the frame, the first row next to it, and a line down at each end of a phase.
    fn draw(&self, canvas: &mut Canvas, frame: &Frame) {
        for label in &self.labels {
            for x in [label.from, label.to] {
                canvas.dotted(&format!("M{x:.1} {:.1}V{:.1}", frame.top - 2.0, frame.bottom), "currentColor");
            }
            canvas.text(label.middle, frame.top - 4.5 - label.row as f64 * ROW, "middle", &label.name);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::answer::figure::{Phase, PlotKind};

    fn plot(phases: &[(&str, f64, f64)]) -> Plot {
        let points = |ys: [f64; 3]| ys.into_iter().enumerate().map(|(x, y)| (x as f64, Some(y))).collect::<Vec<_>>();
        let series = [("low", [1.0, 2.0, 1.0]), ("high", [0.0, 3.0, 0.5])];
        let series = series.map(|(name, ys)| Series::over_numbers(name, points(ys))).to_vec();
        let phase = |(name, from, to): &(&str, f64, f64)| Phase { name: name.to_string(), from: *from, to: *to };
        let phases = phases.iter().map(phase).collect();
        Plot { phases, ..Plot::new(PlotKind::Area, "time (ms)", "memory (GiB)", series) }
    }

    #[test]
    fn a_stack_rises_in_steps_that_hold_until_the_next_moment() {
        let stack = stack(&plot(&[]));
        assert_eq!(stack, [vec![0.0; 3], vec![1.0, 2.0, 1.0], vec![1.0, 5.0, 1.5]]);
        let steps = steps(&[0.0, 10.0, 20.0], &stack[2]);
        let drawn: Vec<_> = steps.iter().map(|step| (step.from, step.moment)).collect();
        assert_eq!(drawn, [(0.0, 0), (0.5, 0), (10.0, 1), (10.5, 1), (20.0, 1)]);
        assert_eq!(outline(&steps[2..3], &stack[2], &stack[1], |y| -y), "M10.0 -2.0V-5.0H10.5V-2.0H10.0Z");
    }

    #[test]
    fn every_peak_is_drawn_however_narrow_it_is() {
        // Two hundred teeth of a thousandth of a point, two in some columns.
        let positions: Vec<f64> = (0..600).map(|k| 0.7 * f64::from(k / 3) / 3.0 + 0.001 * f64::from(k % 3)).collect();
        let tops: Vec<f64> = (0..600).map(|k| if k % 3 == 1 { 100.0 + f64::from(k) } else { 1.0 }).collect();
        let steps = steps(&positions, &tops);
        let shown = |x: f64| steps.iter().find(|step| step.from <= x && x < step.to).map(|step| tops[step.moment]);
        for k in (1..600).step_by(3) {
            let in_column = |other: &usize| (positions[*other] / COLUMN).floor() == (positions[k] / COLUMN).floor();
            let highest = (0..600).filter(in_column).map(|other| tops[other]).fold(0.0, f64::max);
            assert_eq!(shown(positions[k]), Some(highest), "{k}");
        }
        assert!(steps.windows(2).all(|pair| pair[0].to == pair[1].from), "without a gap");
    }

    #[test]
    fn an_area_carries_its_name_where_it_is_thick_and_others_stand_in_the_legend() {
        let step = |from, to, moment| Step { from, to, moment };
        let steps = [step(0.0, 100.0, 0), step(100.0, 200.0, 1)];
        let (lower, upper) = ([0.0, 0.0], [5.0, 40.0]);
        let placed = |upper: &[f64], ends: &[f64], width| place(&steps, (&lower, upper), ends, width, |y| 100.0 - y);
        let (x, y) = placed(&upper, &[], 50.0).unwrap();
        assert!((128.0..172.0).contains(&x) && y == 80.0, "{x} {y}");
        assert_eq!(placed(&[5.0, 9.0], &[], 50.0), None);
        assert_eq!(placed(&upper, &[], 150.0), None);
        assert_eq!(placed(&upper, &[150.0], 50.0), None, "a phase ends there");
    }

    #[test]
    fn overlapping_phase_names_are_placed_in_rows() {
        let rows = |phases: &[(&str, f64, f64)]| {
            let phases = Phases::of(&plot(phases), |x| 30.0 + 200.0 * x, 30.0);
            phases.labels.iter().map(|label| label.row).collect::<Vec<_>>()
        };
        assert_eq!(rows(&[("forward", 0.0, 1.0), ("backward", 1.0, 2.0)]), [0, 0]);
        assert_eq!(rows(&[("forward", 0.0, 1.9), ("backward", 1.9, 1.98), ("optimizer", 1.98, 2.0)]), [0, 0, 1]);
    }
}
