//! Stacked areas over time, with phases marked above.

use std::fmt::Write as _;

use super::axis::Axis;
use super::plot::{INK, LEFT, PALETTE, RIGHT, WIDTH, draw_x, text, width_of};
use crate::harness::answer::figure::{Plot, PlotKind, X};

/// Taller than other figures, so that heights in the stack are easy to read.
pub const PLOT_HEIGHT: f64 = 150.0;
const ROW: f64 = 12.0;

/// Labels of phases, in rows so that they do not overlap.
pub struct Marks {
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

impl Marks {
    pub fn of(plot: &Plot) -> Self {
        let mut marks = Self { labels: Vec::new(), rows: 0 };
        if plot.kind != PlotKind::Area {
            return marks;
        }
        let axis = x_axis(plot);
        let mut ends: Vec<f64> = Vec::new();
        for phase in &plot.phases {
            let at = |x| axis.at(x, LEFT, WIDTH - RIGHT);
            let (from, to) = (at(phase.from), at(phase.to));
            let half = width_of(&phase.name) / 2.0 + 2.0;
            let middle = ((from + to) / 2.0).clamp(LEFT + half, WIDTH - half);
            let row = ends.iter().position(|end| *end <= middle - half).unwrap_or(ends.len());
            ends.resize(ends.len().max(row + 1), 0.0);
            ends[row] = middle + half;
            marks.labels.push(Label { name: phase.name.clone(), from, to, middle, row });
        }
        marks.rows = ends.len();
        marks
    }

    pub fn height(&self) -> f64 {
        self.rows as f64 * ROW
    }

    /// Names above `top`, the first row next to it, and a line down at each end of a phase.
    fn draw(&self, out: &mut String, top: f64, bottom: f64) {
        for label in &self.labels {
            for x in [label.from, label.to] {
                let _ = write!(
                    out,
                    r#"<path d="M{x:.1} {:.1}V{bottom:.1}" stroke="{INK}" stroke-width=".5" stroke-dasharray="2 1.5"/>"#,
                    top - 2.0
                );
            }
            text(out, label.middle, top - 4.5 - label.row as f64 * ROW, "middle", &label.name);
        }
    }
}

/// The heights of the whole stack.
pub fn tops(plot: &Plot) -> Vec<f64> {
    let mut tops = vec![0.0; plot.series[0].points.len()];
    plot.series.iter().for_each(|series| add(&mut tops, series.points.iter().map(|p| p.1)));
    tops
}

/// The stack over the whole width, its phases and its x axis.
pub fn draw(out: &mut String, plot: &Plot, marks: &Marks, y_axis: &Axis, top: f64, bottom: f64) {
    let axis = x_axis(plot);
    let (left, right) = (LEFT, WIDTH - RIGHT);
    draw_x(out, &axis, left, right, bottom);
    let xs: Vec<f64> =
        plot.series[0].points.iter().filter_map(|p| p.0.number()).map(|x| axis.at(x, left, right)).collect();
    let mut below = vec![0.0; xs.len()];
    for (i, series) in plot.series.iter().enumerate() {
        let floor = below.clone();
        add(&mut below, series.points.iter().map(|p| p.1));
        let height = |values: &[f64]| values.iter().map(|v| y_axis.at(*v, bottom, top)).collect::<Vec<_>>();
        let path = outline(&xs, &height(&below), &height(&floor));
        let _ = write!(out, r##"<path d="{path}" fill="{}" stroke="#ffffff" stroke-width=".4"/>"##, PALETTE[i]);
        hatch(out, i, &path);
    }
    marks.draw(out, top, bottom);
}

/// Along the upper steps and back along the lower ones.
fn outline(xs: &[f64], upper: &[f64], lower: &[f64]) -> String {
    let mut path = String::new();
    for (k, x) in xs.iter().enumerate() {
        let _ = if k == 0 { write!(path, "M{x:.1} {:.1}", upper[0]) } else { write!(path, "H{x:.1}V{:.1}", upper[k]) };
    }
    for k in (0..xs.len()).rev() {
        let from = lower[k.saturating_sub(1)];
        let _ = if k + 1 == xs.len() {
            write!(path, "V{:.1}V{from:.1}", lower[k])
        } else {
            write!(path, "H{:.1}V{from:.1}", xs[k])
        };
    }
    path + "Z"
}

/// A square of a series' fill.
pub fn swatch(out: &mut String, series: usize, x: f64, y: f64) {
    let path = format!("M{x:.1} {y:.1}h8v8h-8z");
    let _ = write!(out, r#"<path d="{path}" fill="{}"/>"#, PALETTE[series]);
    hatch(out, series, &path);
}

/// White hatching over every other series, in alternating directions, so that neighbours differ in more than colour.
fn hatch(out: &mut String, series: usize, path: &str) {
    let (name, slant) = match series % 4 {
        1 => ("rising", "M0 4L4 0"),
        3 => ("falling", "M0 0L4 4"),
        _ => return,
    };
    let _ = write!(
        out,
        r##"<defs><pattern id="{name}{series}" width="4" height="4" patternUnits="userSpaceOnUse"><path d="{slant}" stroke="#ffffff" stroke-width=".8"/></pattern></defs><path d="{path}" fill="url(#{name}{series})"/>"##
    );
}

fn x_axis(plot: &Plot) -> Axis {
    let number = |x: &X| x.number();
    let xs = plot.series.iter().flat_map(|s| s.points.iter().filter_map(|p| number(&p.0)));
    Axis::linear(&xs.chain(plot.phases.iter().flat_map(|p| [p.from, p.to])).collect::<Vec<_>>(), false)
}

fn add(sums: &mut [f64], values: impl Iterator<Item = Option<f64>>) {
    sums.iter_mut().zip(values).for_each(|(sum, value)| *sum += value.unwrap_or(0.0));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::answer::figure::{Phase, Series};
    use crate::report::figures::plot::svg;

    fn plot(phases: &[(&str, f64, f64)]) -> Plot {
        let series = |name: &str, ys: [f64; 3]| Series {
            name: name.into(),
            points: ys.iter().enumerate().map(|(x, y)| (X::Number(x as f64), Some(*y))).collect(),
        };
        let phase = |(name, from, to): &(&str, f64, f64)| Phase { name: name.to_string(), from: *from, to: *to };
        Plot {
            kind: PlotKind::Area,
            x_label: "time (ms)".into(),
            y_label: "memory (GiB)".into(),
            log_x: false,
            log_y: false,
            series: vec![series("low", [1.0, 2.0, 1.0]), series("high", [0.0, 3.0, 0.5])],
            phases: phases.iter().map(phase).collect(),
        }
    }

    #[test]
    fn a_stack_rises_in_steps_and_its_axis_holds_the_sum() {
        assert_eq!(tops(&plot(&[])), [1.0, 5.0, 1.5]);
        assert_eq!(
            outline(&[0.0, 1.0, 2.0], &[5.0, 6.0, 7.0], &[1.0, 2.0, 3.0]),
            "M0.0 5.0H1.0V6.0H2.0V7.0V3.0V2.0H1.0V1.0H0.0V1.0Z"
        );
        let drawn = svg(&plot(&[]));
        assert_eq!(drawn.matches("<pattern").count(), 2, "the second series and its swatch");
        assert!(!drawn.contains("stroke-dasharray"));
    }

    #[test]
    fn overlapping_phase_names_are_placed_in_rows() {
        let rows =
            |phases: &[(&str, f64, f64)]| Marks::of(&plot(phases)).labels.iter().map(|l| l.row).collect::<Vec<_>>();
        assert_eq!(rows(&[("forward", 0.0, 1.0), ("backward", 1.0, 2.0)]), [0, 0]);
        let crowded = [("forward", 0.0, 1.9), ("backward", 1.9, 1.98), ("optimizer", 1.98, 2.0)];
        assert_eq!(rows(&crowded), [0, 0, 1]);
        let marks = Marks::of(&plot(&crowded));
        assert!(marks.labels.iter().all(|l| l.middle + width_of(&l.name) / 2.0 <= WIDTH));
        assert!(svg(&plot(&crowded)).contains(">optimizer</text>"));
    }
}
