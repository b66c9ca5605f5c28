//! Draws series over one pair of axes: alone, or as small multiples.
//!
//! We draw figures ourselves: lines and areas carry their names, steps of memory keep their height, and one file serves print,
//! hover and dark mode. We tried plotters 0.3 and kuva 0.6. Neither places names in free room, both paint with fixed ink, and
//! our own layout would stay beside them.

use super::axis::Axis;
use super::canvas::{Canvas, WIDTH};
use super::frame::{Frame, left_of, legend, x_axis, y_axis};
use super::lines::Margin;
use super::palette::Palette;
use super::{area, bars, lines};
use crate::harness::answer::figure::{Plot, PlotKind, SmallMultiples};

const HEIGHT: f64 = 104.0;
const INSET: f64 = 6.0;
/// Of a panel of small multiples, and around it.
const PANEL_HEIGHT: f64 = 76.0;
const PANEL_GAP: f64 = 10.0;
const PANEL_TITLE: f64 = 20.0;

/// The finished SVG of a validated plot.
pub fn svg(plot: &Plot) -> String {
    let palette = Palette::of([plot]);
    match plot.kind {
        PlotKind::Area => return area::svg(plot, &palette),
        PlotKind::HorizontalBar => return bars::horizontal(plot, &palette),
        PlotKind::Line | PlotKind::Bar => {}
    }
    let mut canvas = Canvas::default();
    let (x, y) = (x_axis([plot]), y_axis([plot]));
    let margin = Margin::of(plot, HEIGHT);
    let left = left_of(&y);
    let unnamed = palette.entries().filter(|_| plot.series.len() > 1 && !margin.has_series);
    let top = 18.0 + numbers_height(plot) + 13.0 * legend(&mut canvas, plot, unnamed, left) as f64;
    let frame = Frame { left, right: WIDTH - margin.width(), top, bottom: top + HEIGHT, inset: INSET };
    if plot.kind == PlotKind::Bar && plot.series.len() == 1 && !bars::fits(plot, &frame) {
        return bars::horizontal(plot, &palette);
    }
    panel(&mut canvas, plot, &palette, &frame, (&x, &y), (true, true));
    margin.draw(&mut canvas, &palette, &frame, (&x, &y));
    let bottom = frame.bottom + if plot.kind == PlotKind::Bar { bars::second_row(plot, &frame) } else { 0.0 };
    canvas.text(0.0, 9.0, "start", &plot.y_label);
    Frame { bottom, ..frame }.file(canvas, &plot.x_label)
}

/// The finished SVG of plots in rows: one legend, one x axis, and one y axis for each row.
pub fn multiples(multiples: &SmallMultiples) -> String {
    let plots = || multiples.plots.iter().map(|(_, plot)| plot);
    let Some(first) = plots().next() else { return Canvas::default().file(0.0) };
    let (palette, x) = (Palette::of(plots()), x_axis(plots()));
    let rows: Vec<_> = multiples.plots.chunks(multiples.columns).collect();
    let axes: Vec<Axis> = rows.iter().map(|row| y_axis(row.iter().map(|(_, plot)| plot))).collect();
    let left = axes.iter().map(left_of).fold(0.0, f64::max);
    let mut canvas = Canvas::default();
    let mut top = 14.0 + 13.0 * legend(&mut canvas, first, palette.entries(), left) as f64;
    canvas.text(0.0, 9.0, "start", &first.y_label);
    let slot = (WIDTH - 6.0 - left + PANEL_GAP) / multiples.columns as f64;
    for (row, y) in rows.iter().zip(&axes) {
        top += PANEL_TITLE + numbers_height(first);
        for (column, (name, plot)) in row.iter().enumerate() {
            let left = left + slot * column as f64;
            let right = left + slot - PANEL_GAP;
            let frame = Frame { left, right, top, bottom: top + PANEL_HEIGHT, inset: INSET };
            canvas.text((left + right) / 2.0, top - numbers_height(first) - 4.0, "middle", name);
            // A row that is not full leaves columns whose lowest panel stands above the last row.
            let is_lowest = std::ptr::eq(*row, rows[rows.len() - 1]) || column >= rows[rows.len() - 1].len();
            panel(&mut canvas, plot, &palette, &frame, (&x, y), (is_lowest, column == 0));
        }
        top += PANEL_HEIGHT;
    }
    Frame { left, right: WIDTH, top, bottom: top, inset: INSET }.file(canvas, &first.x_label)
}

/// Room above the frame for the number of the highest bar.
fn numbers_height(plot: &Plot) -> f64 {
    if plot.kind == PlotKind::Bar && !plot.log_y { 8.0 } else { 0.0 }
}

/// Axes, reference lines and data in a frame; `words` says whether x and y have their numbers.
fn panel(
    canvas: &mut Canvas,
    plot: &Plot,
    palette: &Palette,
    frame: &Frame,
    (x, y): (&Axis, &Axis),
    words: (bool, bool),
) {
    frame.draw_y(canvas, y, words.1);
    frame.draw_references(canvas, plot, y);
    if plot.kind == PlotKind::Bar {
        frame.draw_base(canvas);
        bars::draw(canvas, plot, palette, frame, y);
    } else {
        frame.draw_x(canvas, x, words.0);
        lines::draw(canvas, plot, palette, frame, (x, y));
    }
}
