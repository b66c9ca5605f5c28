//! A declared figure: what to plot, read from a template's call and checked before anything is drawn.

use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{Error, ErrorKind};

use super::filters::number;
use super::heat::Heat;
use super::lanes::Lanes;
use super::plot;

/// A figure of one template.
#[derive(Debug, Clone)]
pub struct Figure {
    /// Relative to `writeup.md`: "figures/<problem>-<id>.svg".
    pub path: String,
    pub drawing: Drawing,
}

#[derive(Debug, Clone)]
pub enum Drawing {
    Plot(Plot),
    Lanes(Lanes),
    Heat(Heat),
}

impl Drawing {
    /// Reads a `figure()` call by its `kind`.
    pub fn from_args(args: &Kwargs) -> Result<Self, Error> {
        match args.peek::<&str>("kind")? {
            "lanes" => {
                args.get::<&str>("kind")?;
                Lanes::from_args(args).map(Self::Lanes)
            }
            "heat" => {
                args.get::<&str>("kind")?;
                Heat::from_args(args).map(Self::Heat)
            }
            _ => Plot::from_args(args).map(Self::Plot),
        }
    }

    pub fn svg(&self) -> String {
        match self {
            Self::Plot(plot) => plot::svg(plot),
            Self::Lanes(lanes) => lanes.svg(),
            Self::Heat(heat) => heat.svg(),
        }
    }
}

#[derive(Debug, Clone)]
pub struct Plot {
    pub kind: Kind,
    /// With the unit, such as "time (ms)".
    pub x_label: String,
    pub y_label: String,
    pub log_x: bool,
    pub log_y: bool,
    pub series: Vec<Series>,
    /// Named stretches of x, marked above an area figure.
    pub phases: Vec<Phase>,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Phase {
    pub name: String,
    pub from: f64,
    pub to: f64,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Kind {
    /// Points joined in order of x.
    Line,
    /// Groups of bars from zero, one group for each category; marks without bars where y is logarithmic.
    Bar,
    /// Series stacked from the first one up, over one x of all; each value holds until the next x.
    Area,
}

/// One named series; a value that was not measured is `None` and leaves a gap.
#[derive(Debug, Clone)]
pub struct Series {
    pub name: String,
    pub points: Vec<(X, Option<f64>)>,
}

#[derive(Debug, Clone, PartialEq)]
pub enum X {
    Number(f64),
    Category(String),
}

impl X {
    pub fn number(&self) -> Option<f64> {
        match self {
            Self::Number(x) => Some(*x),
            Self::Category(_) => None,
        }
    }
}

/// As many series as the palette can tell apart.
pub const MAX_SERIES: usize = 7;

impl Plot {
    /// Reads `kind`, `x_label`, `y_label`, `log_x`, `log_y`, `series` and `phases` of a `figure()` call.
    pub fn from_args(args: &Kwargs) -> Result<Self, Error> {
        let kind = match args.get::<&str>("kind")? {
            "line" => Kind::Line,
            "bar" => Kind::Bar,
            "area" => Kind::Area,
            other => {
                return Err(invalid(format!(
                    "unknown kind {other:?}; there are \"line\", \"bar\", \"area\", \"lanes\" and \"heat\""
                )));
            }
        };
        let series: Value = args.get("series")?;
        let phases = match args.get::<Option<Value>>("phases")? {
            Some(phases) => phases.try_iter()?.map(|p| Phase::from_value(&p)).collect::<Result<_, _>>()?,
            None => Vec::new(),
        };
        let plot = Self {
            kind,
            x_label: args.get::<String>("x_label")?,
            y_label: args.get::<String>("y_label")?,
            log_x: args.get::<Option<bool>>("log_x")?.unwrap_or(false),
            log_y: args.get::<Option<bool>>("log_y")?.unwrap_or(false),
            series: series.try_iter()?.map(|s| Series::from_value(&s, kind)).collect::<Result<_, _>>()?,
            phases,
        };
        plot.validate()?;
        Ok(plot)
    }

    fn validate(&self) -> Result<(), Error> {
        let n = self.series.len();
        if n == 0 || n > MAX_SERIES {
            return Err(invalid(format!("{n} series; a figure tells 1 to {MAX_SERIES} apart")));
        }
        if !self.series.iter().any(|s| s.points.iter().any(|(_, y)| y.is_some())) {
            return Err(invalid("no value to plot: every y is none"));
        }
        for series in &self.series {
            for (x, y) in &series.points {
                let bad_x = self.log_x && matches!(x, X::Number(x) if *x <= 0.0);
                if bad_x || (self.log_y && y.is_some_and(|y| y <= 0.0)) {
                    return Err(invalid(format!("series {:?} has a value <= 0 on a logarithmic axis", series.name)));
                }
            }
            let same = series.points.iter().map(|p| &p.0).eq(self.series[0].points.iter().map(|p| &p.0));
            if self.kind == Kind::Bar && !same {
                return Err(invalid(format!("series {:?} has other categories than the first", series.name)));
            }
            if self.kind == Kind::Area && (!same || series.points.iter().any(|(_, y)| y.is_none_or(|y| y < 0.0))) {
                let name = &series.name;
                return Err(invalid(format!(
                    "series {name:?} has another x than the first, or a y that cannot be stacked"
                )));
            }
        }
        if self.kind == Kind::Area && (self.log_x || self.log_y) {
            return Err(invalid("stacked areas have no logarithmic axis"));
        }
        if self.kind != Kind::Area && !self.phases.is_empty() {
            return Err(invalid("only an area figure marks phases"));
        }
        if self.kind == Kind::Bar && self.log_x {
            return Err(invalid("the categories of a bar figure have no logarithmic axis"));
        }
        Ok(())
    }
}

impl Series {
    fn from_value(value: &Value, kind: Kind) -> Result<Self, Error> {
        let name = value.get_attr("name")?.to_string();
        let list = |key: &str| -> Result<Vec<Value>, Error> {
            let list = value.get_attr(key)?;
            if list.is_undefined() {
                return Err(invalid(format!("series {name:?} lacks {key:?}")));
            }
            Ok(list.try_iter()?.collect())
        };
        let (xs, ys) = (list("x")?, list("y")?);
        if xs.len() != ys.len() || xs.is_empty() {
            return Err(invalid(format!("series {name:?} has {} x and {} y", xs.len(), ys.len())));
        }
        let points = xs.iter().zip(&ys).map(|(x, y)| Ok((x_of(x, kind)?, number(y)?)));
        let mut points = points.collect::<Result<Vec<(X, Option<f64>)>, Error>>()?;
        if kind != Kind::Bar {
            points.sort_by(|a, b| match (&a.0, &b.0) {
                (X::Number(a), X::Number(b)) => a.total_cmp(b),
                _ => std::cmp::Ordering::Equal,
            });
        }
        Ok(Self { name, points })
    }
}

impl Phase {
    fn from_value(value: &Value) -> Result<Self, Error> {
        let name = value.get_attr("name")?.to_string();
        let end =
            |key: &str| number(&value.get_attr(key)?)?.ok_or_else(|| invalid(format!("phase {name:?} lacks {key:?}")));
        let (from, to) = (end("from")?, end("to")?);
        if from > to {
            return Err(invalid(format!("phase {name:?} ends before it begins")));
        }
        Ok(Self { name, from, to })
    }
}

fn x_of(value: &Value, kind: Kind) -> Result<X, Error> {
    match (kind, value.kind()) {
        (Kind::Bar, ValueKind::String | ValueKind::Number | ValueKind::Bool) => Ok(X::Category(value.to_string())),
        (Kind::Line | Kind::Area, _) => {
            number(value)?.map(X::Number).ok_or_else(|| invalid("an x of a figure is none; every point needs one"))
        }
        _ => Err(invalid(format!("{value} is no category"))),
    }
}

fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message.into())
}
