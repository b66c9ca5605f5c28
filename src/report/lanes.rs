//! Lanes of spans over one time: what ran beside what, such as communication beside computation.

use std::fmt::Write as _;

use minijinja::value::{Kwargs, Value};
use minijinja::{Error, ErrorKind};

use super::axis::Axis;
use super::filters::number;
use super::plot::{FONT, INK, PALETTE, RIGHT, SIZE, WIDTH, draw_x, text, width_of};

/// Rows from top to bottom, all over one axis from zero.
#[derive(Debug, Clone)]
pub struct Lanes {
    x_label: String,
    /// In milliseconds; figures that are to be compared are given one end.
    end: f64,
    lanes: Vec<Lane>,
}

#[derive(Debug, Clone)]
struct Lane {
    name: String,
    spans: Vec<Span>,
}

/// In milliseconds.
#[derive(Debug, Clone)]
struct Span {
    name: String,
    from: f64,
    to: f64,
}

/// What is drawn of spans: as wide as they are on the page.
struct Bar<'a> {
    name: &'a str,
    from: f64,
    to: f64,
}

/// Bars are no narrower, and gaps between equal ones that would be are closed: hundreds of short calls, one after another,
/// are seen as what they are, and not as the paper between them.
const FINEST: f64 = 0.3;

const ROW: f64 = 26.0;
const BAR: f64 = 18.0;

impl Lanes {
    /// Reads `x_label`, `end_s` and `lanes` of a `figure()` call; a lane is `{name, spans}`, a span `{name, start_s, end_s}`
    /// as records hold it.
    pub fn from_args(args: &Kwargs) -> Result<Self, Error> {
        let lanes: Value = args.get("lanes")?;
        let lanes = lanes.try_iter()?.map(|lane| Lane::from_value(&lane)).collect::<Result<Vec<_>, _>>()?;
        if lanes.is_empty() || lanes.iter().all(|lane| lane.spans.is_empty()) {
            return Err(invalid("no span to draw"));
        }
        let lanes = Self { x_label: args.get("x_label")?, end: 1e3 * args.get::<f64>("end_s")?, lanes };
        let last = lanes.lanes.iter().flat_map(|lane| &lane.spans).map(|span| span.to).fold(0.0, f64::max);
        if !lanes.end.is_finite() || lanes.end < last {
            return Err(invalid(format!("the axis ends at {} ms, before the last span does, {last} ms", lanes.end)));
        }
        if lanes.names().len() > PALETTE.len() {
            return Err(invalid(format!(
                "spans of {} names; colours tell {} apart",
                lanes.names().len(),
                PALETTE.len()
            )));
        }
        Ok(lanes)
    }

    /// The finished SVG.
    pub fn svg(&self) -> String {
        let mut out = String::new();
        // The widths are an estimate, and a name that is cut off reads as a mistake.
        let left = 12.0 + 1.2 * self.lanes.iter().map(|lane| width_of(&lane.name)).fold(0.0, f64::max);
        let axis = Axis::linear(&[0.0, self.end], true);
        let names = self.names();
        let mut x = left;
        for (i, name) in names.iter().enumerate() {
            let _ = write!(out, r#"<rect x="{x:.1}" y="2" width="8" height="8" fill="{}"/>"#, PALETTE[i]);
            text(&mut out, x + 12.0, 9.0, "start", name);
            x += 26.0 + width_of(name);
        }
        let bottom = 16.0 + ROW * self.lanes.len() as f64;
        draw_x(&mut out, &axis, left, WIDTH - RIGHT, bottom);
        let _ =
            write!(out, r#"<path d="M{left:.1} {bottom:.1}H{:.1}" stroke="{INK}" stroke-width=".6"/>"#, WIDTH - RIGHT);
        for (row, lane) in self.lanes.iter().enumerate() {
            let y = 16.0 + ROW * row as f64 + (ROW - BAR) / 2.0;
            text(&mut out, left - 5.0, y + BAR / 2.0 + 2.8, "end", &lane.name);
            for Bar { name, from, to } in lane.bars(|ms| axis.at(ms, left, WIDTH - RIGHT)) {
                let colour = names.iter().position(|known| *known == name).map_or(INK, |i| PALETTE[i]);
                // A white line parts neighbours; of a narrow bar it would leave nothing.
                let edge = if to - from > 1.0 { r##" stroke="#ffffff" stroke-width=".15""## } else { "" };
                let _ = write!(
                    out,
                    r#"<rect x="{from:.2}" y="{y:.1}" width="{:.2}" height="{BAR}" fill="{colour}"{edge}/>"#,
                    (to - from).max(FINEST)
                );
            }
        }
        text(&mut out, (left + WIDTH - RIGHT) / 2.0, bottom + 26.0, "middle", &self.x_label);
        let height = bottom + 32.0;
        format!(
            r#"<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" font-family="{FONT}" font-size="{SIZE}" fill="{INK}"><rect width="{WIDTH}" height="{height}" fill="white"/>{out}</svg>{}"#,
            "\n"
        )
    }

    /// Of the spans, each once, as they first appear.
    fn names(&self) -> Vec<&str> {
        let mut names: Vec<&str> = Vec::new();
        for span in self.lanes.iter().flat_map(|lane| &lane.spans) {
            if !names.contains(&span.name.as_str()) {
                names.push(&span.name);
            }
        }
        names
    }
}

impl Lane {
    /// The spans in their order; equal ones with nothing visible between them are one.
    fn bars(&self, at: impl Fn(f64) -> f64) -> Vec<Bar<'_>> {
        let mut bars: Vec<Bar<'_>> = Vec::new();
        for span in &self.spans {
            let (from, to) = (at(span.from), at(span.to));
            match bars.last_mut() {
                Some(last) if last.name == span.name && from - last.to < FINEST => last.to = last.to.max(to),
                _ => bars.push(Bar { name: &span.name, from, to }),
            }
        }
        bars
    }

    fn from_value(value: &Value) -> Result<Self, Error> {
        let name = value.get_attr("name")?.to_string();
        let spans = value.get_attr("spans")?;
        let spans = spans.try_iter()?.map(|span| Span::from_value(&span)).collect::<Result<_, _>>()?;
        Ok(Self { name, spans })
    }
}

impl Span {
    fn from_value(value: &Value) -> Result<Self, Error> {
        let name = value.get_attr("name")?.to_string();
        let end = |key: &str| {
            number(&value.get_attr(key)?)?.ok_or_else(|| invalid(format!("the span {name:?} lacks {key:?}")))
        };
        let (from, to) = (1e3 * end("start_s")?, 1e3 * end("end_s")?);
        if from > to {
            return Err(invalid(format!("the span {name:?} ends before it begins")));
        }
        Ok(Self { name, from, to })
    }
}

fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message.into())
}

#[cfg(test)]
mod tests {
    use minijinja::value::Serde;
    use serde_json::json;

    use super::*;

    fn lanes(end_s: f64, spans: serde_json::Value) -> Result<Lanes, Error> {
        let lanes = json!([{"name": "computing", "spans": spans}, {"name": "communicating", "spans": []}]);
        Lanes::from_args(&Kwargs::from_iter([
            ("x_label", Value::from("time (ms)")),
            ("end_s", Value::from(end_s)),
            ("lanes", Value::from(Serde(lanes))),
        ]))
    }

    fn span(name: &str, start_s: f64, end_s: f64) -> serde_json::Value {
        json!({"name": name, "start_s": start_s, "end_s": end_s})
    }

    #[test]
    fn every_span_is_a_bar_and_every_name_a_colour() {
        let spans = [span("forward", 0.0, 0.1), span("backward", 0.1, 0.3), span("forward", 0.3, 0.4)];
        let drawn = lanes(0.4, json!(spans)).unwrap().svg();
        // The page, two swatches and three bars.
        assert_eq!(drawn.matches("<rect").count(), 1 + 2 + 3, "{drawn}");
        assert!(drawn.contains(">communicating</text>") && drawn.contains(">backward</text>"));
    }

    #[test]
    fn short_equal_spans_in_a_row_are_one_bar_and_a_lone_one_is_seen() {
        let row = (0..100).map(|i| span("call", 0.2 + 1e-4 * f64::from(i), 0.2 + 1e-4 * f64::from(i) + 9e-5));
        let spans: Vec<_> = row.chain([span("call", 0.8, 0.80001)]).collect();
        let drawn = lanes(1.0, json!(spans)).unwrap().svg();
        // The page, a swatch, the row and the lone one, which has no edge that would cover it.
        assert_eq!(drawn.matches("<rect").count(), 1 + 1 + 2, "{drawn}");
        assert!(drawn.contains(&format!(r#"width="{FINEST:.2}""#)));
        assert_eq!(drawn.matches("stroke-width=\".15\"").count(), 1);
    }

    #[test]
    fn spans_that_do_not_fit_or_run_backwards_are_refused() {
        assert!(lanes(0.2, json!([span("a", 0.0, 0.3)])).unwrap_err().to_string().contains("before the last"));
        assert!(lanes(1.0, json!([span("a", 0.3, 0.1)])).unwrap_err().to_string().contains("ends before"));
        assert!(lanes(1.0, json!([])).unwrap_err().to_string().contains("no span"));
    }
}
