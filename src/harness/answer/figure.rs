//! Figures as data: series with axes, spans over time, ratios in a grid; the report draws them.

use anyhow::{Result, bail, ensure};

mod plot;

pub use plot::{Phase, Plot, PlotKind, Reference, Role, Series, Tone, X};

/// The palette has this many distinguishable colours, for series or for span names.
pub const MAX_SERIES: usize = 7;

/// One figure of an answer.
#[derive(Debug, Clone, PartialEq)]
pub struct Figure {
    /// What the figure shows, for readers who cannot see it.
    pub alt: String,
    pub drawing: Drawing,
    /// Markdown. `None` if the template writes the caption.
    pub caption: Option<String>,
    /// Whether it stands where it is mentioned. Other figures float to the top of a page.
    pub in_place: bool,
}

#[derive(Debug, Clone, PartialEq)]
pub enum Drawing {
    Plot(Plot),
    SmallMultiples(SmallMultiples),
    /// Named timelines from top to bottom on one axis, which ends with the latest of them. A single one needs no name.
    Timelines(Vec<(String, Timeline)>),
    Heatmap(Heatmap),
}

/// Named plots of one kind in rows, with one x axis for all and one y axis for each row.
#[derive(Debug, Clone, PartialEq)]
pub struct SmallMultiples {
    pub columns: usize,
    pub plots: Vec<(String, Plot)>,
}

/// Lanes from top to bottom over one time axis from zero: they show which spans overlap.
#[derive(Debug, Clone, PartialEq)]
pub struct Timeline {
    pub x_label: String,
    /// End of the axis in seconds. Use the same end for figures that readers compare.
    pub end_s: f64,
    pub lanes: Vec<Lane>,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Lane {
    pub name: String,
    pub spans: Vec<Span>,
}

/// In seconds from the start of the axis.
#[derive(Debug, Clone, PartialEq)]
pub struct Span {
    pub name: String,
    pub start_s: f64,
    pub end_s: f64,
}

/// Panels of ratios from top to bottom over the same columns and rows.
#[derive(Debug, Clone, PartialEq)]
pub struct Heatmap {
    pub x_label: String,
    pub y_label: String,
    pub x: Vec<String>,
    pub y: Vec<String>,
    pub panels: Vec<Panel>,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Panel {
    pub name: String,
    /// Row by row; a ratio that was not measured is `None`.
    pub values: Vec<Vec<Option<f64>>>,
}

impl Figure {
    pub fn plot(alt: impl Into<String>, plot: Plot) -> Self {
        Self::new(alt, Drawing::Plot(plot))
    }

    pub fn timeline(alt: impl Into<String>, timeline: Timeline) -> Self {
        Self::timelines(alt, vec![(String::new(), timeline)])
    }

    /// Several timelines on one axis, each under its name.
    pub fn timelines(alt: impl Into<String>, timelines: Vec<(String, Timeline)>) -> Self {
        Self::new(alt, Drawing::Timelines(timelines))
    }

    /// Named plots in rows of `columns`.
    pub fn small_multiples(alt: impl Into<String>, columns: usize, plots: Vec<(String, Plot)>) -> Self {
        Self::new(alt, Drawing::SmallMultiples(SmallMultiples { columns, plots }))
    }

    pub fn heatmap(alt: impl Into<String>, heatmap: Heatmap) -> Self {
        Self::new(alt, Drawing::Heatmap(heatmap))
    }

    /// Sets the caption, in Markdown.
    pub fn captioned(mut self, caption: impl Into<String>) -> Self {
        self.caption = Some(caption.into());
        self
    }

    /// Keeps it where it is mentioned.
    pub fn in_place(self) -> Self {
        Self { in_place: true, ..self }
    }

    /// Errors: there is nothing to draw, a value that the figure cannot show, or an axis without its unit.
    pub fn validate(&self) -> Result<()> {
        ensure!(!self.alt.trim().is_empty(), "the alternative text is empty: describe what the figure shows");
        match &self.drawing {
            Drawing::Plot(plot) => plot.validate(),
            Drawing::SmallMultiples(multiples) => multiples.validate(),
            Drawing::Timelines(timelines) => {
                ensure!(!timelines.is_empty(), "no timeline to draw");
                timelines.iter().try_for_each(|(_, timeline)| timeline.validate())
            }
            Drawing::Heatmap(heatmap) => heatmap.validate(),
        }
    }

    fn new(alt: impl Into<String>, drawing: Drawing) -> Self {
        Self { alt: alt.into(), drawing, caption: None, in_place: false }
    }
}

impl SmallMultiples {
    fn validate(&self) -> Result<()> {
        let Some((_, first)) = self.plots.first() else { bail!("small multiples without a plot") };
        ensure!(self.columns > 0, "small multiples have 0 columns: give at least 1");
        let drawn = matches!(first.kind, PlotKind::Line | PlotKind::Bar);
        ensure!(drawn, "small multiples hold lines or upright bars, not {:?}", first.kind);
        for (name, plot) in &self.plots {
            plot.validate()?;
            let axes = |plot: &Plot| (plot.kind, plot.x_label.clone(), plot.y_label.clone(), plot.log_x, plot.log_y);
            ensure!(axes(plot) == axes(first), "panel {name:?} has other axes than the first");
        }
        Ok(())
    }
}

impl Timeline {
    /// The distinct span names, in order of first appearance.
    pub fn names(&self) -> Vec<&str> {
        let mut names: Vec<&str> = Vec::new();
        for span in self.lanes.iter().flat_map(|lane| &lane.spans) {
            if !names.contains(&span.name.as_str()) {
                names.push(&span.name);
            }
        }
        names
    }

    pub fn validate(&self) -> Result<()> {
        plot::has_unit(&self.x_label)?;
        let spans = || self.lanes.iter().flat_map(|lane| &lane.spans);
        ensure!(spans().next().is_some(), "no span to draw");
        for Span { name, start_s, end_s } in spans() {
            ensure!(start_s <= end_s, "the span {name:?} ends before it begins");
        }
        let last = spans().map(|span| span.end_s).fold(0.0, f64::max);
        ensure!(
            self.end_s.is_finite() && self.end_s >= last,
            "the axis ends at {} s, before the last span does, {last} s",
            self.end_s
        );
        let names = self.names().len();
        ensure!(names <= MAX_SERIES, "spans have {names} names: a timeline can hold at most {MAX_SERIES}");
        Ok(())
    }
}

impl Heatmap {
    pub fn validate(&self) -> Result<()> {
        plot::has_unit(&self.x_label)?;
        for Panel { name, values } in &self.panels {
            let fits = values.len() == self.y.len() && values.iter().all(|row| row.len() == self.x.len());
            ensure!(fits, "panel {name:?} is not {} rows of {}", self.y.len(), self.x.len());
            let fine = values.iter().flatten().flatten().all(|ratio| ratio.is_finite() && *ratio > 0.0);
            ensure!(fine, "panel {name:?} has a ratio that is not above 0");
        }
        let any = self.panels.iter().any(|panel| panel.values.iter().flatten().flatten().next().is_some());
        ensure!(any, "no ratio to draw: every value is none");
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(drawing: Drawing) -> String {
        Figure::new("x", drawing).validate().unwrap_err().to_string()
    }

    #[test]
    fn a_timeline_that_ends_early_and_a_heatmap_of_wrong_size_are_refused() {
        let span = Span { name: "forward".into(), start_s: 0.0, end_s: 2.0 };
        let lanes = vec![Lane { name: "computing".into(), spans: vec![span] }];
        let timeline = Timeline { x_label: "time (ms)".into(), end_s: 1.0, lanes };
        assert!(refused(Drawing::Timelines(vec![(String::new(), timeline)])).contains("before the last span"));
        let heatmap = |values: Vec<Vec<Option<f64>>>| Heatmap {
            x_label: "T (tokens)".into(),
            y_label: "d".into(),
            x: vec!["128".into(), "256".into()],
            y: vec!["16".into()],
            panels: vec![Panel { name: "forward".into(), values }],
        };
        assert!(refused(Drawing::Heatmap(heatmap(vec![vec![Some(1.0)]]))).contains("1 rows of 2"));
        assert!(refused(Drawing::Heatmap(heatmap(vec![vec![Some(0.0), None]]))).contains("not above 0"));
        assert!(refused(Drawing::Heatmap(heatmap(vec![vec![None, None]]))).contains("no ratio"));
        assert!(heatmap(vec![vec![Some(1.0), None]]).validate().is_ok());
    }

    #[test]
    fn small_multiples_share_their_axes() {
        let series = || vec![Series::over_numbers("ours", [(1.0, Some(2.0))])];
        let plot = |unit: &str| Plot::new(PlotKind::Line, "T (tokens)", &format!("time ({unit})"), series());
        let two =
            |unit: &str| Figure::small_multiples("x", 2, vec![("16".into(), plot("ms")), ("32".into(), plot(unit))]);
        assert!(two("ms").validate().is_ok());
        assert!(two("s").validate().unwrap_err().to_string().contains("\"32\" has other axes"));
    }
}
