//! Draws the figures of answers as SVG.

mod area;
mod axis;
mod bars;
mod canvas;
mod frame;
mod heatmap;
mod lines;
mod palette;
mod plot;
mod timeline;

use crate::harness::answer::figure::Drawing;

/// A figure of one template.
#[derive(Debug, Clone)]
pub struct PlacedFigure {
    /// Relative to `writeup.md`: "figures/<problem>-<id>.svg".
    pub path: String,
    pub drawing: Drawing,
    /// Whether it stands where it is mentioned, and does not float to the top of a page.
    pub in_place: bool,
}

/// The finished SVG of a validated drawing.
pub fn svg(drawing: &Drawing) -> String {
    match drawing {
        Drawing::Plot(plot) => plot::svg(plot),
        Drawing::SmallMultiples(multiples) => plot::multiples(multiples),
        Drawing::Timelines(timelines) => timeline::svg(timelines),
        Drawing::Heatmap(heatmap) => heatmap::svg(heatmap),
    }
}

#[cfg(test)]
mod tests;
