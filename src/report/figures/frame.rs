//! The rectangle of a plot with its axes, its reference lines and its legend.

use super::axis::{Axis, label};
use super::canvas::{Canvas, SIZE, WIDTH, width_of};
use super::palette::Paint;
use crate::harness::answer::figure::{Plot, PlotKind, Reference, Series, X};
use crate::harness::answer::format::three_digits;

/// Where the axes stand.
#[derive(Debug, Clone, Copy)]
pub struct Frame {
    pub left: f64,
    pub right: f64,
    pub top: f64,
    pub bottom: f64,
    /// Between the frame and the first and last x.
    pub inset: f64,
}

impl Frame {
    pub fn x(&self, axis: &Axis, value: f64) -> f64 {
        axis.at(value, self.left + self.inset, self.right - self.inset)
    }

    pub fn y(&self, axis: &Axis, value: f64) -> f64 {
        axis.at(value, self.bottom, self.top)
    }

    /// A faint line at each tick of y, with its number if `words`.
    pub fn draw_y(&self, canvas: &mut Canvas, axis: &Axis, words: bool) {
        let mut last = f64::INFINITY;
        for &tick in &axis.ticks {
            let y = self.y(axis, tick);
            canvas.faint(&format!("M{:.1} {y:.1}H{:.1}", self.left, self.right));
            if words && last - y > SIZE * 1.3 {
                canvas.text(self.left - 5.0, y + 2.8, "end", &label(tick, &axis.ticks));
                last = y;
            }
        }
    }

    /// The line below, with a mark at each tick of x, and its number if `words`.
    pub fn draw_x(&self, canvas: &mut Canvas, axis: &Axis, words: bool) {
        self.draw_base(canvas);
        let mut last = f64::NEG_INFINITY;
        for &tick in &axis.ticks {
            let x = self.x(axis, tick);
            canvas.rule(&format!("M{x:.1} {:.1}v3", self.bottom));
            let number = label(tick, &axis.ticks);
            let half = width_of(&number) / 2.0;
            if words && x - half > last + 4.0 && x + half <= WIDTH {
                canvas.text(x, self.bottom + 12.5, "middle", &number);
                last = x + half;
            }
        }
    }

    pub fn draw_base(&self, canvas: &mut Canvas) {
        canvas.rule(&format!("M{:.1} {:.1}H{:.1}", self.left, self.bottom, self.right));
    }

    /// A line across at each reference; its name stands elsewhere.
    pub fn draw_references(&self, canvas: &mut Canvas, plot: &Plot, axis: &Axis) {
        for Reference { at, .. } in references(plot) {
            let y = self.y(axis, at);
            canvas.rule(&format!("M{:.1} {y:.1}H{:.1}", self.left, self.right));
        }
    }

    /// The finished SVG, with a label below the numbers of the x axis.
    pub fn file(&self, mut canvas: Canvas, label: &str) -> String {
        canvas.text((self.left + self.right) / 2.0, self.bottom + 26.0, "middle", label);
        canvas.file(self.bottom + 32.0)
    }

    /// An error bar from one y to another.
    pub fn draw_range(&self, canvas: &mut Canvas, axis: &Axis, x: f64, range: Option<[f64; 2]>) {
        if let Some([low, high]) = range.map(|ends| ends.map(|end| self.y(axis, end))) {
            canvas.rule(&format!("M{:.1} {low:.1}h4m-2 0V{high:.1}m-2 0h4", x - 2.0));
        }
    }
}

/// The plot's own references, and 1 where its values are ratios.
pub fn references(plot: &Plot) -> Vec<Reference> {
    let mut all = plot.references.clone();
    if plot.is_ratio() && all.iter().all(|reference| reference.at != 1.0) {
        all.push(Reference { name: String::new(), at: 1.0 });
    }
    all
}

/// The y axis that plots share: their values, ranges and references; from zero unless it is logarithmic.
pub fn y_axis<'a>(plots: impl IntoIterator<Item = &'a Plot>) -> Axis {
    let (mut values, mut log) = (Vec::new(), false);
    for plot in plots {
        log |= plot.log_y;
        values.extend(plot.series.iter().flat_map(|series| series.points.iter().filter_map(|point| point.1)));
        values.extend(plot.series.iter().flat_map(|series| series.ranges.iter().flatten().flatten()));
        values.extend(references(plot).iter().map(|reference| reference.at));
    }
    if log { Axis::log(&values) } else { Axis::linear(&values, true) }
}

/// The x axis that plots over numbers share.
pub fn x_axis<'a>(plots: impl IntoIterator<Item = &'a Plot>) -> Axis {
    let (mut values, mut log) = (Vec::new(), false);
    for plot in plots {
        log |= plot.log_x;
        let xs = plot.series.iter().flat_map(|series| series.points.iter().filter_map(|point| point.0.number()));
        values.extend(xs.chain(plot.phases.iter().flat_map(|phase| [phase.from, phase.to])));
    }
    if log { Axis::log(&values) } else { Axis::linear(&values, false) }
}

/// Names in rows below the y label from `left`; the result is the number of rows.
pub fn legend<'a>(
    canvas: &mut Canvas,
    plot: &Plot,
    entries: impl IntoIterator<Item = (&'a str, &'a Paint)>,
    left: f64,
) -> usize {
    let (mut rows, mut x) = (0, f64::INFINITY);
    for (name, paint) in entries {
        let width = 20.0 + width_of(name);
        if x + width > WIDTH {
            (x, rows) = (left, rows + 1);
        }
        let y = 8.0 + rows as f64 * 13.0;
        match plot.kind {
            PlotKind::Line => {
                canvas.path(&format!("M{x:.1} {y:.1}h16"), &stroke(paint), "");
                paint.marker(canvas, x + 8.0, y, "");
            }
            PlotKind::Bar if plot.log_y => paint.marker(canvas, x + 8.0, y, ""),
            _ => canvas.bar([x + 6.0, y - 4.0, 8.0, 8.0], &paint.colour, ""),
        }
        canvas.text(x + 20.0, y + 2.8, "start", name);
        x += width + 12.0;
    }
    rows
}

/// The attributes of a series' line, whose markers have a darker outline where it is pale.
pub fn stroke(Paint { colour, dash, .. }: &Paint) -> String {
    format!(r#"fill="none" stroke="{colour}" stroke-width="1.4" stroke-linejoin="round" stroke-dasharray="{dash}""#)
}

/// What a mark says on hover: "ours, 1,024: 12.3 ms (11.9 to 12.8)".
pub fn title(plot: &Plot, series: &Series, point: usize) -> String {
    let (x, Some(y)) = &series.points[point] else { return String::new() };
    let x = match x {
        X::Number(x) => three_digits_or_whole(*x),
        X::Category(name) => name.clone(),
    };
    let range = series.range(point).map(|[low, high]| format!(" ({} to {})", three_digits(low), three_digits(high)));
    let words = format!("{}, {x}: {} {}", series.name, three_digits(*y), unit(plot));
    words.trim_end().to_string() + &range.unwrap_or_default()
}

/// What stands in parentheses at the end of the y label.
pub fn unit(plot: &Plot) -> &str {
    plot.y_label.rsplit_once('(').and_then(|(_, unit)| unit.strip_suffix(')')).unwrap_or_default()
}

fn three_digits_or_whole(x: f64) -> String {
    if x.fract() == 0.0 { label(x, &[x]) } else { three_digits(x) }
}

/// Room for the numbers of the y axis.
pub fn left_of(axis: &Axis) -> f64 {
    8.0 + axis.ticks.iter().map(|tick| width_of(&label(*tick, &axis.ticks))).fold(16.0, f64::max)
}
