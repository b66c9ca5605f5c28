//! Heat maps of ratios: a number in every field, and a colour that says on which side of one it lies.

use std::fmt::Write as _;

use minijinja::value::{Kwargs, Value};
use minijinja::{Error, ErrorKind};

use super::filters::number;
use super::plot::{FONT, INK, PALETTE, RIGHT, SIZE, WIDTH, text, width_of};

/// Panels from top to bottom over the same columns and rows.
#[derive(Debug, Clone)]
pub struct Heat {
    x_label: String,
    y_label: String,
    x: Vec<String>,
    y: Vec<String>,
    panels: Vec<Panel>,
}

#[derive(Debug, Clone)]
struct Panel {
    name: String,
    /// Row by row; a ratio that was not measured is `None`.
    values: Vec<Vec<Option<f64>>>,
}

const ROW: f64 = 15.0;
const TITLE: f64 = 17.0;
const GAP: f64 = 6.0;
/// Below it colours would say nothing that the numbers do not; at it and beyond they are full.
const FULL: f64 = 4.0;
const NOTHING: &str = "#eeeeee";

impl Heat {
    /// Reads `x_label`, `y_label`, `x`, `y` and `panels` of a `figure()` call; a panel is `{name, values}`, its values a
    /// list of rows, one for each of `y`, with a ratio or none for each of `x`.
    pub fn from_args(args: &Kwargs) -> Result<Self, Error> {
        let words = |key: &str| -> Result<Vec<String>, Error> {
            Ok(args.get::<Value>(key)?.try_iter()?.map(|v| v.to_string()).collect())
        };
        let panels = args.get::<Value>("panels")?;
        let panels = panels.try_iter()?.map(|panel| Panel::from_value(&panel)).collect::<Result<Vec<_>, _>>()?;
        let heat = Self {
            x_label: args.get("x_label")?,
            y_label: args.get("y_label")?,
            x: words("x")?,
            y: words("y")?,
            panels,
        };
        heat.validate()?;
        Ok(heat)
    }

    fn validate(&self) -> Result<(), Error> {
        for Panel { name, values } in &self.panels {
            let fits = values.len() == self.y.len() && values.iter().all(|row| row.len() == self.x.len());
            if !fits {
                return Err(invalid(format!("panel {name:?} is not {} rows of {}", self.y.len(), self.x.len())));
            }
            if values.iter().flatten().flatten().any(|ratio| *ratio <= 0.0) {
                return Err(invalid(format!("panel {name:?} has a ratio that is not above 0")));
            }
        }
        if self.panels.iter().all(|panel| panel.values.iter().flatten().flatten().next().is_none()) {
            return Err(invalid("no ratio to draw: every value is none"));
        }
        Ok(())
    }

    /// The finished SVG.
    pub fn svg(&self) -> String {
        let mut out = String::new();
        let left = 26.0 + 1.2 * self.y.iter().map(|name| width_of(name)).fold(0.0, f64::max);
        let slot = (WIDTH - RIGHT - left) / self.x.len() as f64;
        legend(&mut out);
        let mut top = 12.0;
        for panel in &self.panels {
            text(&mut out, left, top + TITLE - 5.0, "start", &panel.name);
            text(&mut out, 0.0, top + TITLE - 5.0, "start", &self.y_label);
            top += TITLE;
            for (name, row) in self.y.iter().zip(&panel.values) {
                text(&mut out, left - 5.0, top + ROW / 2.0 + 2.8, "end", name);
                for (i, ratio) in row.iter().enumerate() {
                    field(&mut out, left + slot * i as f64, top, slot, *ratio);
                }
                top += ROW;
            }
            top += GAP;
        }
        for (i, name) in self.x.iter().enumerate() {
            text(&mut out, left + slot * (i as f64 + 0.5), top + 6.0, "middle", name);
        }
        text(&mut out, (left + WIDTH - RIGHT) / 2.0, top + 19.0, "middle", &self.x_label);
        let height = top + 25.0;
        format!(
            r#"<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" font-family="{FONT}" font-size="{SIZE}" fill="{INK}"><rect width="{WIDTH}" height="{height}" fill="white"/>{out}</svg>{}"#,
            "\n"
        )
    }
}

/// What the colours mean, at the right of the first line.
fn legend(out: &mut String) {
    let steps = [0.25, 0.5, 1.0, 2.0, 4.0];
    for (i, ratio) in steps.into_iter().enumerate() {
        field(out, WIDTH - RIGHT - 28.0 * (steps.len() - i) as f64, 0.0, 28.0, Some(ratio));
    }
}

fn field(out: &mut String, x: f64, y: f64, width: f64, ratio: Option<f64>) {
    let (colour, words) = match ratio {
        Some(ratio) => (colour(ratio), written(ratio)),
        None => (NOTHING.to_string(), "–".to_string()),
    };
    let _ = write!(
        out,
        r##"<rect x="{x:.1}" y="{y:.1}" width="{width:.1}" height="{ROW}" fill="{colour}" stroke="#ffffff" stroke-width=".8"/>"##
    );
    text(out, x + width / 2.0, y + ROW / 2.0 + 2.8, "middle", &words);
}

/// Three digits, or two below one.
fn written(ratio: f64) -> String {
    let digits = match ratio {
        r if r < 9.995 => 2,
        r if r < 99.95 => 1,
        _ => 0,
    };
    format!("{ratio:.digits$}")
}

/// White at one, towards blue above it and towards vermilion below, by the logarithm; pale enough for black letters.
fn colour(ratio: f64) -> String {
    let share = (ratio.ln() / FULL.ln()).clamp(-1.0, 1.0);
    let full = if share > 0.0 { PALETTE[0] } else { PALETTE[1] };
    let channel = |at: usize| {
        let full = f64::from(u8::from_str_radix(&full[at..at + 2], 16).unwrap_or(0));
        (255.0 + (full - 255.0) * share.abs() * 0.6).round() as u8
    };
    format!("#{:02x}{:02x}{:02x}", channel(1), channel(3), channel(5))
}

impl Panel {
    fn from_value(value: &Value) -> Result<Self, Error> {
        let name = value.get_attr("name")?.to_string();
        let rows = value.get_attr("values")?;
        let row = |row: Value| row.try_iter()?.map(|ratio| number(&ratio)).collect::<Result<Vec<_>, Error>>();
        Ok(Self { name, values: rows.try_iter()?.map(row).collect::<Result<_, _>>()? })
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

    fn heat(values: serde_json::Value) -> Result<Heat, Error> {
        Heat::from_args(&Kwargs::from_iter([
            ("x_label", Value::from("length")),
            ("y_label", Value::from("d")),
            ("x", Value::from(vec!["128", "256"])),
            ("y", Value::from(vec!["16"])),
            ("panels", Value::from(Serde(json!([{"name": "forward", "values": values}])))),
        ]))
    }

    #[test]
    fn every_field_has_a_rectangle_and_its_number_and_a_missing_one_a_dash() {
        let drawn = heat(json!([[1.25, null]])).unwrap().svg();
        // The page, five steps of the legend and two fields.
        assert_eq!(drawn.matches("<rect").count(), 1 + 5 + 2, "{drawn}");
        for words in [">1.25</text>", ">–</text>", ">forward</text>", ">256</text>", ">length</text>"] {
            assert!(drawn.contains(words), "{words}: {drawn}");
        }
    }

    #[test]
    fn colours_lie_on_their_side_of_white_and_end_at_the_full_factor() {
        assert_eq!(colour(1.0), "#ffffff");
        assert_eq!((colour(4.0), colour(40.0)), (colour(5.0), colour(4.0)));
        assert_ne!(colour(2.0), colour(4.0));
        let (faster, slower) = (colour(2.0), colour(0.5));
        assert!(faster[1..3] < faster[5..7] && slower[1..3] > slower[5..7], "{faster} {slower}");
        assert_eq!((written(0.5), written(12.34), written(123.4)), ("0.50".into(), "12.3".into(), "123".into()));
    }

    #[test]
    fn rows_that_do_not_fit_and_ratios_that_are_none_are_refused() {
        assert!(heat(json!([[1.0]])).unwrap_err().to_string().contains("1 rows of 2"));
        assert!(heat(json!([[1.0, 0.0]])).unwrap_err().to_string().contains("not above 0"));
        assert!(heat(json!([[null, null]])).unwrap_err().to_string().contains("no ratio"));
    }
}
