//! Reads a figure from a template's `figure("id", kind=..)` call, until every answer declares its figures in Rust.

use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{Error, ErrorKind};

use crate::harness::answer::figure::{Drawing, Heatmap, Lane, Panel, Phase, Plot, PlotKind, Series, Span, Timeline, X};
use crate::report::filters::number;

/// Reads a `figure()` call by its `kind`.
pub fn drawing(args: &Kwargs) -> Result<Drawing, Error> {
    let read = match args.get::<&str>("kind")? {
        "lanes" => timeline(args).map(Drawing::Timeline)?,
        "heat" => heatmap(args).map(Drawing::Heatmap)?,
        "line" => plot(args, PlotKind::Line).map(Drawing::Plot)?,
        "bar" => plot(args, PlotKind::Bar).map(Drawing::Plot)?,
        "area" => plot(args, PlotKind::Area).map(Drawing::Plot)?,
        other => {
            return Err(invalid(format!(
                "unknown kind {other:?}; there are \"line\", \"bar\", \"area\", \"lanes\" and \"heat\""
            )));
        }
    };
    let checked = match &read {
        Drawing::Plot(plot) => plot.validate(),
        Drawing::Timeline(timeline) => timeline.validate(),
        Drawing::Heatmap(heatmap) => heatmap.validate(),
    };
    checked.map_err(|error| invalid(error.to_string()))?;
    Ok(read)
}

fn plot(args: &Kwargs, kind: PlotKind) -> Result<Plot, Error> {
    let series: Value = args.get("series")?;
    let phases = match args.get::<Option<Value>>("phases")? {
        Some(phases) => phases.try_iter()?.map(|p| phase(&p)).collect::<Result<_, _>>()?,
        None => Vec::new(),
    };
    Ok(Plot {
        kind,
        x_label: args.get::<String>("x_label")?,
        y_label: args.get::<String>("y_label")?,
        log_x: args.get::<Option<bool>>("log_x")?.unwrap_or(false),
        log_y: args.get::<Option<bool>>("log_y")?.unwrap_or(false),
        series: series.try_iter()?.map(|s| self::series(&s, kind)).collect::<Result<_, _>>()?,
        phases,
    })
}

fn series(value: &Value, kind: PlotKind) -> Result<Series, Error> {
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
    if kind != PlotKind::Bar {
        points.sort_by(|a, b| match (&a.0, &b.0) {
            (X::Number(a), X::Number(b)) => a.total_cmp(b),
            _ => std::cmp::Ordering::Equal,
        });
    }
    Ok(Series { name, points })
}

fn phase(value: &Value) -> Result<Phase, Error> {
    let name = value.get_attr("name")?.to_string();
    let end =
        |key: &str| number(&value.get_attr(key)?)?.ok_or_else(|| invalid(format!("phase {name:?} lacks {key:?}")));
    let (from, to) = (end("from")?, end("to")?);
    Ok(Phase { name, from, to })
}

fn x_of(value: &Value, kind: PlotKind) -> Result<X, Error> {
    match (kind, value.kind()) {
        (PlotKind::Bar, ValueKind::String | ValueKind::Number | ValueKind::Bool) => Ok(X::Category(value.to_string())),
        (PlotKind::Line | PlotKind::Area, _) => {
            number(value)?.map(X::Number).ok_or_else(|| invalid("an x of a figure is none; every point needs one"))
        }
        _ => Err(invalid(format!("{value} is no category"))),
    }
}

/// `lanes` is a list of `{name, spans}`, a span `{name, start_s, end_s}` as records hold it.
fn timeline(args: &Kwargs) -> Result<Timeline, Error> {
    let lanes: Value = args.get("lanes")?;
    let lanes = lanes.try_iter()?.map(|lane| self::lane(&lane)).collect::<Result<Vec<_>, _>>()?;
    Ok(Timeline { x_label: args.get("x_label")?, end_s: args.get("end_s")?, lanes })
}

fn lane(value: &Value) -> Result<Lane, Error> {
    let name = value.get_attr("name")?.to_string();
    let spans = value.get_attr("spans")?;
    let spans = spans.try_iter()?.map(|span| self::span(&span)).collect::<Result<_, _>>()?;
    Ok(Lane { name, spans })
}

fn span(value: &Value) -> Result<Span, Error> {
    let name = value.get_attr("name")?.to_string();
    let end =
        |key: &str| number(&value.get_attr(key)?)?.ok_or_else(|| invalid(format!("the span {name:?} lacks {key:?}")));
    let (start_s, end_s) = (end("start_s")?, end("end_s")?);
    Ok(Span { name, start_s, end_s })
}

/// `panels` is a list of `{name, values}`, its values a list of rows, one for each of `y`, with a ratio or none for each
/// of `x`.
fn heatmap(args: &Kwargs) -> Result<Heatmap, Error> {
    let words = |key: &str| -> Result<Vec<String>, Error> {
        Ok(args.get::<Value>(key)?.try_iter()?.map(|v| v.to_string()).collect())
    };
    let panels = args.get::<Value>("panels")?;
    Ok(Heatmap {
        x_label: args.get("x_label")?,
        y_label: args.get("y_label")?,
        x: words("x")?,
        y: words("y")?,
        panels: panels.try_iter()?.map(|panel| self::panel(&panel)).collect::<Result<_, _>>()?,
    })
}

fn panel(value: &Value) -> Result<Panel, Error> {
    let name = value.get_attr("name")?.to_string();
    let rows = value.get_attr("values")?;
    let row = |row: Value| row.try_iter()?.map(|ratio| number(&ratio)).collect::<Result<Vec<_>, Error>>();
    Ok(Panel { name, values: rows.try_iter()?.map(row).collect::<Result<_, _>>()? })
}

fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message.into())
}
