//! Figures as data: series with axes, spans over time, ratios in a grid; the report draws them.

use anyhow::{Result, ensure};

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
}

#[derive(Debug, Clone, PartialEq)]
pub enum Drawing {
    Plot(Plot),
    Timeline(Timeline),
    Heatmap(Heatmap),
}

/// Series over one pair of axes.
#[derive(Debug, Clone, PartialEq)]
pub struct Plot {
    pub kind: PlotKind,
    /// With the unit, such as "time (ms)".
    pub x_label: String,
    pub y_label: String,
    pub log_x: bool,
    pub log_y: bool,
    pub series: Vec<Series>,
    /// Named stretches of x, marked above an area figure.
    pub phases: Vec<Phase>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PlotKind {
    /// Points joined in order of x.
    Line,
    /// Groups of bars from zero, one group for each category; marks without bars where y is logarithmic.
    Bar,
    /// Series stacked from the first one up. All share one x axis, and each value holds until the next x.
    Area,
}

/// One named series; a value that was not measured is `None` and leaves a gap.
#[derive(Debug, Clone, PartialEq)]
pub struct Series {
    pub name: String,
    pub points: Vec<(X, Option<f64>)>,
}

#[derive(Debug, Clone, PartialEq)]
pub enum X {
    Number(f64),
    Category(String),
}

#[derive(Debug, Clone, PartialEq)]
pub struct Phase {
    pub name: String,
    pub from: f64,
    pub to: f64,
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
        Self { alt: alt.into(), drawing: Drawing::Plot(plot), caption: None }
    }

    pub fn timeline(alt: impl Into<String>, timeline: Timeline) -> Self {
        Self { alt: alt.into(), drawing: Drawing::Timeline(timeline), caption: None }
    }

    pub fn heatmap(alt: impl Into<String>, heatmap: Heatmap) -> Self {
        Self { alt: alt.into(), drawing: Drawing::Heatmap(heatmap), caption: None }
    }

    /// Sets the caption, in Markdown.
    pub fn captioned(mut self, caption: impl Into<String>) -> Self {
        self.caption = Some(caption.into());
        self
    }

    /// Errors: there is nothing to draw, or a value that the figure cannot show.
    pub fn validate(&self) -> Result<()> {
        ensure!(!self.alt.trim().is_empty(), "the alternative text is empty: describe what the figure shows");
        match &self.drawing {
            Drawing::Plot(plot) => plot.validate(),
            Drawing::Timeline(timeline) => timeline.validate(),
            Drawing::Heatmap(heatmap) => heatmap.validate(),
        }
    }
}

impl X {
    pub fn number(&self) -> Option<f64> {
        match self {
            Self::Number(x) => Some(*x),
            Self::Category(_) => None,
        }
    }
}

impl Series {
    /// Points in order of x.
    pub fn over_numbers(name: impl Into<String>, points: impl IntoIterator<Item = (f64, Option<f64>)>) -> Self {
        let mut points: Vec<(f64, Option<f64>)> = points.into_iter().collect();
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        Self { name: name.into(), points: points.into_iter().map(|(x, y)| (X::Number(x), y)).collect() }
    }

    /// One value for each category, in the order given.
    pub fn over_categories(
        name: impl Into<String>,
        points: impl IntoIterator<Item = (impl Into<String>, Option<f64>)>,
    ) -> Self {
        let points = points.into_iter().map(|(x, y)| (X::Category(x.into()), y));
        Self { name: name.into(), points: points.collect() }
    }
}

impl Plot {
    /// A plot with linear axes and no phases.
    pub fn new(kind: PlotKind, x_label: &str, y_label: &str, series: Vec<Series>) -> Self {
        let (x_label, y_label) = (x_label.into(), y_label.into());
        Self { kind, x_label, y_label, log_x: false, log_y: false, series, phases: Vec::new() }
    }

    pub fn validate(&self) -> Result<()> {
        let n = self.series.len();
        ensure!((1..=MAX_SERIES).contains(&n), "{n} series: a figure can hold 1 to {MAX_SERIES}");
        let values = || self.series.iter().flat_map(|s| &s.points).filter_map(|(_, y)| *y);
        ensure!(values().next().is_some(), "no value to plot: every y is none");
        ensure!(values().all(f64::is_finite), "a y is not finite");
        self.series.iter().try_for_each(|series| self.validate_series(series))?;
        let logarithmic = self.log_x || self.log_y;
        ensure!(self.kind != PlotKind::Area || !logarithmic, "stacked areas have no logarithmic axis");
        ensure!(self.kind == PlotKind::Area || self.phases.is_empty(), "only an area figure marks phases");
        ensure!(self.kind != PlotKind::Bar || !self.log_x, "the categories of a bar figure have no logarithmic axis");
        for Phase { name, from, to } in &self.phases {
            ensure!(from <= to, "phase {name:?} ends before it begins");
        }
        Ok(())
    }

    fn validate_series(&self, series: &Series) -> Result<()> {
        let Series { name, points } = series;
        ensure!(!points.is_empty(), "series {name:?} has no points");
        for (x, y) in points {
            let categorical = self.kind == PlotKind::Bar;
            ensure!(x.number().is_none() == categorical, "series {name:?} has an x of the wrong kind: {x:?}");
            let bad_x = self.log_x && x.number().is_some_and(|x| x <= 0.0);
            let bad_y = self.log_y && y.is_some_and(|y| y <= 0.0);
            ensure!(!bad_x && !bad_y, "series {name:?} has a value <= 0 on a logarithmic axis");
        }
        let same = points.iter().map(|p| &p.0).eq(self.series[0].points.iter().map(|p| &p.0));
        ensure!(self.kind != PlotKind::Bar || same, "series {name:?} has other categories than the first");
        let stacks = same && points.iter().all(|(_, y)| y.is_some_and(|y| y >= 0.0));
        ensure!(
            self.kind != PlotKind::Area || stacks,
            "series {name:?} has another x than the first, or a y that cannot be stacked"
        );
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

    fn line(points: &[(f64, Option<f64>)]) -> Plot {
        Plot::new(PlotKind::Line, "n", "time (ms)", vec![Series::over_numbers("ours", points.to_vec())])
    }

    fn refused(drawing: Drawing) -> String {
        Figure { alt: "x".into(), drawing, caption: None }.validate().unwrap_err().to_string()
    }

    #[test]
    fn points_are_sorted_by_x_and_a_figure_without_values_is_refused() {
        let plot = line(&[(2.0, None), (1.0, Some(3.0))]);
        assert_eq!(plot.series[0].points, [(X::Number(1.0), Some(3.0)), (X::Number(2.0), None)]);
        assert!(plot.validate().is_ok());
        assert!(refused(Drawing::Plot(line(&[(1.0, None)]))).contains("every y is none"));
    }

    #[test]
    fn values_that_an_axis_cannot_show_are_refused() {
        let mut log = line(&[(0.0, Some(1.0))]);
        log.log_x = true;
        assert!(refused(Drawing::Plot(log)).contains("logarithmic"));
        let mut bars = line(&[(1.0, Some(1.0))]);
        bars.kind = PlotKind::Bar;
        assert!(refused(Drawing::Plot(bars)).contains("wrong kind"));
        let mut many = line(&[(1.0, Some(1.0))]);
        many.series = vec![many.series[0].clone(); MAX_SERIES + 1];
        assert!(refused(Drawing::Plot(many)).contains("8 series"));
    }

    #[test]
    fn a_timeline_that_ends_early_and_a_heatmap_of_wrong_size_are_refused() {
        let span = Span { name: "forward".into(), start_s: 0.0, end_s: 2.0 };
        let lanes = vec![Lane { name: "computing".into(), spans: vec![span] }];
        let timeline = Timeline { x_label: "time (ms)".into(), end_s: 1.0, lanes };
        assert!(refused(Drawing::Timeline(timeline)).contains("before the last span"));
        let heatmap = |values: Vec<Vec<Option<f64>>>| Heatmap {
            x_label: "T".into(),
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
}
