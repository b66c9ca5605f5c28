//! Series over one pair of axes: lines, bars, stacked areas, with ranges, roles and reference lines.

use anyhow::{Result, ensure};

use super::MAX_SERIES;

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
    pub references: Vec<Reference>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PlotKind {
    /// Points joined in order of x.
    Line,
    /// Groups of bars from zero, one group for each category; marks without bars where y is logarithmic.
    Bar,
    /// One bar for each category, from top to bottom, along a horizontal y axis. Series are its segments.
    HorizontalBar,
    /// Series stacked from the first one up. All share one x axis, and each value holds until the next x.
    Area,
}

/// One named series; a value that was not measured is `None` and leaves a gap.
#[derive(Debug, Clone, PartialEq)]
pub struct Series {
    pub name: String,
    pub points: Vec<(X, Option<f64>)>,
    /// The least and the greatest sample of each point, drawn as an error bar; empty if no point has them.
    pub ranges: Vec<Option<[f64; 2]>>,
    /// `None`: the report takes it from the name.
    pub role: Option<(Role, Tone)>,
}

#[derive(Debug, Clone, PartialEq)]
pub enum X {
    Number(f64),
    Category(String),
}

/// What a series shows. A role has the same colour and marker in every figure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    Ours,
    PyTorch,
    /// Attention, data parallelism or another method as its definition writes it.
    Plain,
    Optimizer,
    Communication,
    /// None of these: the figure's first, second, ... series of another kind.
    Other(usize),
}

/// Lightness of a role's colour: light for the forward pass, dark for the backward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tone {
    Light,
    Full,
    Dark,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Phase {
    pub name: String,
    pub from: f64,
    pub to: f64,
}

/// A line across the plot at one y, such as the bandwidth of a link.
#[derive(Debug, Clone, PartialEq)]
pub struct Reference {
    pub name: String,
    pub at: f64,
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
        Self::new(name, points.into_iter().map(|(x, y)| (X::Number(x), y)).collect())
    }

    /// One value for each category, in the order given.
    pub fn over_categories(
        name: impl Into<String>,
        points: impl IntoIterator<Item = (impl Into<String>, Option<f64>)>,
    ) -> Self {
        Self::new(name, points.into_iter().map(|(x, y)| (X::Category(x.into()), y)).collect())
    }

    /// Error bars: the least and the greatest sample of each point, in the order of the points.
    pub fn ranged(mut self, ranges: impl IntoIterator<Item = Option<[f64; 2]>>) -> Self {
        self.ranges = ranges.into_iter().collect();
        self
    }

    /// Sets what the report would take from the name.
    pub fn role(mut self, role: Role, tone: Tone) -> Self {
        self.role = Some((role, tone));
        self
    }

    /// The samples' range of a point.
    pub fn range(&self, point: usize) -> Option<[f64; 2]> {
        self.ranges.get(point).copied().flatten()
    }

    fn new(name: impl Into<String>, points: Vec<(X, Option<f64>)>) -> Self {
        Self { name: name.into(), points, ranges: Vec::new(), role: None }
    }
}

impl Plot {
    /// A plot with linear axes and no phases.
    pub fn new(kind: PlotKind, x_label: &str, y_label: &str, series: Vec<Series>) -> Self {
        let (x_label, y_label) = (x_label.into(), y_label.into());
        let (phases, references) = (Vec::new(), Vec::new());
        Self { kind, x_label, y_label, log_x: false, log_y: false, series, phases, references }
    }

    /// Adds a line across the plot.
    pub fn reference(mut self, name: impl Into<String>, at: f64) -> Self {
        self.references.push(Reference { name: name.into(), at });
        self
    }

    /// Whether the x axis holds names and not numbers.
    pub fn is_categorical(&self) -> bool {
        matches!(self.kind, PlotKind::Bar | PlotKind::HorizontalBar)
    }

    /// Whether the y axis holds ratios, which have no unit.
    pub fn is_ratio(&self) -> bool {
        let label = &self.y_label;
        label.starts_with("times ") || label.contains("ratio") || label.contains(" / ")
    }

    pub fn validate(&self) -> Result<()> {
        if !self.is_categorical() {
            has_unit(&self.x_label)?;
        }
        if !self.is_ratio() {
            has_unit(&self.y_label)?;
        }
        let n = self.series.len();
        ensure!((1..=MAX_SERIES).contains(&n), "{n} series: a figure can hold 1 to {MAX_SERIES}");
        let values = || self.series.iter().flat_map(|s| &s.points).filter_map(|(_, y)| *y);
        ensure!(values().next().is_some(), "no value to plot: every y is none");
        ensure!(values().all(f64::is_finite), "a y is not finite");
        self.series.iter().try_for_each(|series| self.validate_series(series))?;
        let logarithmic = self.log_x || self.log_y;
        ensure!(self.kind != PlotKind::Area || !logarithmic, "stacked areas have no logarithmic axis");
        ensure!(self.kind == PlotKind::Area || self.phases.is_empty(), "only an area figure marks phases");
        ensure!(!self.is_categorical() || !self.log_x, "the categories of a bar figure have no logarithmic axis");
        ensure!(self.kind != PlotKind::HorizontalBar || !self.log_y, "horizontal bars have no logarithmic axis");
        for Reference { name, at } in &self.references {
            ensure!(
                at.is_finite() && (!self.log_y || *at > 0.0),
                "the axis cannot show the reference {name:?} at {at}"
            );
        }
        for Phase { name, from, to } in &self.phases {
            ensure!(from <= to, "phase {name:?} ends before it begins");
        }
        Ok(())
    }

    fn validate_series(&self, series: &Series) -> Result<()> {
        let Series { name, points, .. } = series;
        ensure!(!points.is_empty(), "series {name:?} has no points");
        for (x, y) in points {
            ensure!(x.number().is_none() == self.is_categorical(), "series {name:?} has an x of the wrong kind: {x:?}");
            let bad_x = self.log_x && x.number().is_some_and(|x| x <= 0.0);
            let bad_y = self.log_y && y.is_some_and(|y| y <= 0.0);
            ensure!(!bad_x && !bad_y, "series {name:?} has a value <= 0 on a logarithmic axis");
        }
        let same = points.iter().map(|p| &p.0).eq(self.series[0].points.iter().map(|p| &p.0));
        ensure!(!self.is_categorical() || same, "series {name:?} has other categories than the first");
        self.validate_ranges(series)?;
        let stacks = same && points.iter().all(|(_, y)| y.is_some_and(|y| y >= 0.0));
        let stacked = self.kind == PlotKind::Area || (self.kind == PlotKind::HorizontalBar && self.series.len() > 1);
        ensure!(!stacked || stacks, "series {name:?} has another x than the first, or a y that cannot be stacked");
        Ok(())
    }

    fn validate_ranges(&self, series: &Series) -> Result<()> {
        let Series { name, points, ranges, .. } = series;
        let fits = ranges.is_empty() || ranges.len() == points.len();
        ensure!(fits, "series {name:?} has {} ranges for {} points", ranges.len(), points.len());
        for ((_, y), range) in points.iter().zip(ranges) {
            let (Some(y), Some([low, high])) = (y, range) else { continue };
            let fine = low.is_finite() && high.is_finite() && low <= y && y <= high && (!self.log_y || *low > 0.0);
            ensure!(fine, "series {name:?} has a range from {low} to {high} for a value of {y}");
        }
        Ok(())
    }
}

/// Errors: the label of an axis does not end with its unit in parentheses.
pub(super) fn has_unit(label: &str) -> Result<()> {
    ensure!(label.ends_with(')') && label.contains(" ("), "the axis {label:?} has no unit: write \"quantity (unit)\"");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(points: &[(f64, Option<f64>)]) -> Plot {
        Plot::new(PlotKind::Line, "size (bytes)", "time (ms)", vec![Series::over_numbers("ours", points.to_vec())])
    }

    fn refused(plot: Plot) -> String {
        plot.validate().unwrap_err().to_string()
    }

    #[test]
    fn points_are_sorted_by_x_and_a_figure_without_values_is_refused() {
        let plot = line(&[(2.0, None), (1.0, Some(3.0))]);
        assert_eq!(plot.series[0].points, [(X::Number(1.0), Some(3.0)), (X::Number(2.0), None)]);
        assert!(plot.validate().is_ok());
        assert!(refused(line(&[(1.0, None)])).contains("every y is none"));
    }

    #[test]
    fn an_axis_of_numbers_has_its_unit_and_names_and_ratios_have_none() {
        let plot =
            |kind, x: &str, y: &str| Plot { kind, x_label: x.into(), y_label: y.into(), ..line(&[(1.0, Some(1.0))]) };
        assert!(refused(plot(PlotKind::Line, "T", "time (ms)")).contains("the axis \"T\" has no unit"));
        assert!(refused(plot(PlotKind::Line, "T (tokens)", "time")).contains("the axis \"time\" has no unit"));
        assert!(plot(PlotKind::Line, "T (tokens)", "times as fast").validate().is_ok());
        let series = vec![Series::over_categories("ours", [("xl", Some(1.0))])];
        assert!(Plot::new(PlotKind::Bar, "size", "share (%)", series).validate().is_ok());
    }

    #[test]
    fn values_that_an_axis_cannot_show_are_refused() {
        let mut log = line(&[(0.0, Some(1.0))]);
        log.log_x = true;
        assert!(refused(log).contains("logarithmic"));
        let mut bars = line(&[(1.0, Some(1.0))]);
        bars.kind = PlotKind::Bar;
        assert!(refused(bars).contains("wrong kind"));
        let mut many = line(&[(1.0, Some(1.0))]);
        many.series = vec![many.series[0].clone(); MAX_SERIES + 1];
        assert!(refused(many).contains("8 series"));
        let log_y = Plot { log_y: true, ..line(&[(1.0, Some(1.0))]) };
        assert!(refused(log_y.reference("none", 0.0)).contains("reference \"none\" at 0"));
    }

    #[test]
    fn a_range_holds_its_value_and_every_point_has_one_or_none() {
        let ranged = |ranges: &[Option<[f64; 2]>]| {
            let series = Series::over_numbers("ours", [(1.0, Some(3.0)), (2.0, None)]).ranged(ranges.to_vec());
            Plot::new(PlotKind::Line, "size (bytes)", "time (ms)", vec![series])
        };
        assert!(ranged(&[Some([2.0, 4.0]), None]).validate().is_ok());
        assert!(refused(ranged(&[Some([2.0, 4.0])])).contains("1 ranges for 2 points"));
        assert!(refused(ranged(&[Some([3.5, 4.0]), None])).contains("3.5 to 4 for a value of 3"));
    }

    #[test]
    fn segments_of_horizontal_bars_are_not_negative_but_a_single_one_may_be() {
        let bars = |series: &[&str]| {
            let series = series.iter().map(|name| Series::over_categories(*name, [("flat", Some(-2.0))])).collect();
            Plot::new(PlotKind::HorizontalBar, "", "beyond single (ms)", series)
        };
        assert!(bars(&["beyond"]).validate().is_ok());
        assert!(refused(bars(&["wait", "work"])).contains("cannot be stacked"));
    }
}
