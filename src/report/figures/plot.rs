//! Draws a figure as SVG, in points, at the width of the text column.
//!
//! We draw plots ourselves. Lengths and sizes are often powers of two, and the plotting crates that we tried do not offer
//! marks at powers of two, a tight range and the document's font.

use std::fmt::Write as _;

use super::area;
use super::axis::{Axis, label};
use crate::harness::answer::figure::{Plot, PlotKind, X};

/// The text column of an A4 page with margins of 25 mm.
pub(super) const WIDTH: f64 = 453.0;
const PLOT_HEIGHT: f64 = 104.0;
pub(super) const LEFT: f64 = 36.0;
pub(super) const RIGHT: f64 = 10.0;
const SIZE: f64 = 8.5;
const FONT: &str = "Libertinus Serif, Georgia, serif";
pub(super) const INK: &str = "#222222";
const FAINT: &str = "#d9d9d9";

/// Okabe and Ito's colours, which colour-blind readers tell apart; black last.
pub(super) const PALETTE: [&str; 7] = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"];

/// The finished SVG of a validated plot.
pub fn svg(plot: &Plot) -> String {
    let legend = legend(plot);
    let marks = area::Marks::of(plot);
    let top = 18.0 + legend.rows as f64 * 13.0 + marks.height();
    let bottom = top + if plot.kind == PlotKind::Area { area::PLOT_HEIGHT } else { PLOT_HEIGHT };
    let y = y_axis(plot);
    let mut out = String::new();
    draw_y(&mut out, &y, top, bottom);
    let _ = write!(out, r#"<path d="M{LEFT} {bottom:.1}H{:.1}" stroke="{INK}" stroke-width=".6"/>"#, WIDTH - RIGHT);
    match plot.kind {
        PlotKind::Line => draw_lines(&mut out, plot, &y, top, bottom),
        PlotKind::Bar => draw_bars(&mut out, plot, &y, top, bottom),
        PlotKind::Area => area::draw(&mut out, plot, &marks, &y, top, bottom),
    }
    text(&mut out, 0.0, 9.0, "start", &plot.y_label);
    text(&mut out, (LEFT + WIDTH - RIGHT) / 2.0, bottom + 26.0, "middle", &plot.x_label);
    file(bottom + 32.0, &(legend.svg + &out))
}

struct Legend {
    svg: String,
    rows: usize,
}

/// Names in rows below the y label; a single series needs none.
fn legend(plot: &Plot) -> Legend {
    let (mut svg, mut rows, mut x) = (String::new(), 1, LEFT);
    if plot.series.len() == 1 {
        return Legend { svg, rows: 0 };
    }
    for (i, series) in plot.series.iter().enumerate() {
        let width = 28.0 + width_of(&series.name);
        if x + width > WIDTH && x > LEFT {
            (x, rows) = (LEFT, rows + 1);
        }
        let y = 8.0 + rows as f64 * 13.0;
        if plot.kind == PlotKind::Line {
            let _ = write!(svg, r#"<path d="M{x:.1} {y:.1}h16" stroke="{}" stroke-width="1.3"/>"#, PALETTE[i]);
        }
        if plot.kind == PlotKind::Area {
            area::swatch(&mut svg, i, x + 6.0, y - 4.0);
        } else if plot.kind == PlotKind::Bar && !plot.log_y {
            let _ = write!(
                svg,
                r#"<rect x="{:.1}" y="{:.1}" width="8" height="8" fill="{}"/>"#,
                x + 6.0,
                y - 4.0,
                PALETTE[i]
            );
        } else {
            marker(&mut svg, i, x + 8.0, y);
        }
        text(&mut svg, x + 20.0, y + 2.8, "start", &series.name);
        x += width + 4.0;
    }
    Legend { svg, rows }
}

fn draw_y(out: &mut String, axis: &Axis, top: f64, bottom: f64) {
    let mut last = f64::INFINITY;
    for &tick in &axis.ticks {
        let y = axis.at(tick, bottom, top);
        let _ = write!(out, r#"<path d="M{LEFT} {y:.1}H{:.1}" stroke="{FAINT}" stroke-width=".5"/>"#, WIDTH - RIGHT);
        if last - y > SIZE * 1.3 {
            text(out, LEFT - 5.0, y + 2.8, "end", &label(tick, &axis.ticks));
            last = y;
        }
    }
}

pub(super) fn draw_x(out: &mut String, axis: &Axis, left: f64, right: f64, bottom: f64) {
    let mut last = f64::NEG_INFINITY;
    for &tick in &axis.ticks {
        let x = axis.at(tick, left, right);
        let _ = write!(out, r#"<path d="M{x:.1} {bottom:.1}v3" stroke="{INK}" stroke-width=".6"/>"#);
        let words = label(tick, &axis.ticks);
        let half = width_of(&words) / 2.0;
        if x - half > last + 4.0 {
            text(out, x, bottom + 12.5, "middle", &words);
            last = x + half;
        }
    }
}

fn draw_lines(out: &mut String, plot: &Plot, y_axis: &Axis, top: f64, bottom: f64) {
    let xs: Vec<f64> = plot.series.iter().flat_map(|s| s.points.iter().filter_map(|p| p.0.number())).collect();
    let axis = if plot.log_x { Axis::log(&xs) } else { Axis::linear(&xs, false) };
    let (left, right) = (LEFT + 8.0, WIDTH - RIGHT - 8.0);
    draw_x(out, &axis, left, right, bottom);
    for (i, series) in plot.series.iter().enumerate() {
        let mut path = String::new();
        let mut marks = String::new();
        let mut pen = 'M';
        // beyond two dozen points marks would hide the line
        let every = series.points.len().div_ceil(24);
        for (k, (x, value)) in series.points.iter().enumerate() {
            let (Some(x), Some(value)) = (x.number(), value) else {
                pen = 'M';
                continue;
            };
            let (x, y) = (axis.at(x, left, right), y_axis.at(*value, bottom, top));
            let _ = write!(path, "{pen}{x:.1} {y:.1}");
            if k % every == 0 {
                marker(&mut marks, i, x, y);
            }
            pen = 'L';
        }
        let _ = write!(
            out,
            r#"<path d="{path}" fill="none" stroke="{}" stroke-width="1.3" stroke-linejoin="round"/>{marks}"#,
            PALETTE[i]
        );
    }
}

fn draw_bars(out: &mut String, plot: &Plot, y_axis: &Axis, top: f64, bottom: f64) {
    let categories = &plot.series[0].points;
    let slot = (WIDTH - RIGHT - LEFT) / categories.len() as f64;
    let bar = (slot * 0.76 / plot.series.len() as f64).min(34.0);
    for (c, (category, _)) in categories.iter().enumerate() {
        let middle = LEFT + slot * (c as f64 + 0.5);
        if let X::Category(name) = category {
            text(out, middle, bottom + 12.5, "middle", name);
        }
        for (i, series) in plot.series.iter().enumerate() {
            let x = middle + bar * (i as f64 - plot.series.len() as f64 / 2.0);
            match series.points[c].1 {
                None => text(out, x + bar / 2.0, bottom - 3.0, "middle", "–"),
                Some(value) if plot.log_y => marker(out, i, x + bar / 2.0, y_axis.at(value, bottom, top)),
                Some(value) => {
                    let (a, b) = (y_axis.at(value, bottom, top), y_axis.at(0.0, bottom, top));
                    let _ = write!(
                        out,
                        r#"<rect x="{:.1}" y="{:.1}" width="{:.1}" height="{:.1}" fill="{}"/>"#,
                        x + 0.5,
                        a.min(b),
                        bar - 1.0,
                        (a - b).abs(),
                        PALETTE[i]
                    );
                }
            }
        }
    }
}

fn y_axis(plot: &Plot) -> Axis {
    let ys: Vec<f64> = match plot.kind {
        PlotKind::Area => area::tops(plot),
        _ => plot.series.iter().flat_map(|s| s.points.iter().filter_map(|p| p.1)).collect(),
    };
    if plot.log_y { Axis::log(&ys) } else { Axis::linear(&ys, true) }
}

/// Each series has its own shape, so that colour is never the only difference.
fn marker(out: &mut String, series: usize, x: f64, y: f64) {
    let colour = PALETTE[series];
    let shape = match series {
        0 => format!(r#"<circle cx="{x:.1}" cy="{y:.1}" r="2.6""#),
        1 => format!(r#"<rect x="{:.1}" y="{:.1}" width="4.8" height="4.8""#, x - 2.4, y - 2.4),
        2 => format!(r#"<path d="M{x:.1} {:.1}l3 5.2h-6z""#, y - 3.4),
        3 => format!(r#"<path d="M{x:.1} {:.1}l3.3 3.3l-3.3 3.3l-3.3-3.3z""#, y - 3.3),
        4 => format!(r#"<path d="M{x:.1} {:.1}l3-5.2h-6z""#, y + 3.4),
        5 => format!(r#"<path d="M{:.1} {:.1}l5 5m0-5l-5 5" stroke="{colour}" stroke-width="1.4""#, x - 2.5, y - 2.5),
        _ => format!(r#"<path d="M{:.1} {y:.1}h6m-3-3v6" stroke="{colour}" stroke-width="1.4""#, x - 3.0),
    };
    let halo = if series < 5 { r##" stroke="#ffffff" stroke-width=".6""## } else { "" };
    let _ = write!(out, r#"{shape} fill="{colour}"{halo}/>"#);
}

/// The SVG file of what is drawn, on white.
pub(super) fn file(height: f64, drawn: &str) -> String {
    format!(
        r#"<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" font-family="{FONT}" font-size="{SIZE}" fill="{INK}"><rect width="{WIDTH}" height="{height}" fill="white"/>{drawn}</svg>{}"#,
        "\n"
    )
}

pub(super) fn text(out: &mut String, x: f64, y: f64, anchor: &str, words: &str) {
    let words = words.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    let _ = write!(out, r#"<text x="{x:.1}" y="{y:.1}" text-anchor="{anchor}">{words}</text>"#);
}

/// An estimate of the text's width in points.
pub(super) fn width_of(words: &str) -> f64 {
    words.chars().count() as f64 * SIZE * 0.44
}
