//! The filters that turn base units into what a table shows; a missing number is an en dash.

use minijinja::value::{Value, ValueKind};
use minijinja::{Environment, Error, ErrorKind};

use crate::units::{GB, GIB, MB, MIB};

/// What a number that does not exist prints as (the deviation of one sample).
pub const NOTHING: &str = "–";

/// The minus sign of every number outside a formula.
const MINUS: &str = "−";

/// Registers every formatting filter, `cell`, `column`, `scaled` and `geomean`.
pub fn register(env: &mut Environment<'_>) {
    for unit in ["ms", "us", "sec", "mib", "gib", "mb", "gb", "fixed", "sci", "percent"] {
        env.add_filter(unit, move |value: Value, digits: usize| format(&value, unit, digits));
    }
    env.add_filter("grouped", |value: Value, digits: Option<usize>| format(&value, "grouped", digits.unwrap_or(0)));
    env.add_filter("cell", cell);
    env.add_filter("column", column);
    env.add_filter("scaled", scaled);
    env.add_filter("geomean", geomean);
}

/// `list | geomean`: the geometric mean of positive numbers, as of ratios.
fn geomean(values: Value) -> Result<f64, Error> {
    let (mut sum, mut count) = (0.0, 0u32);
    for value in values.try_iter()? {
        match number(&value)? {
            Some(x) if x > 0.0 => (sum, count) = (sum + x.ln(), count + 1),
            _ => return Err(invalid(format!("a geometric mean is of positive numbers, got {value}"))),
        }
    }
    if count == 0 { Err(invalid("a geometric mean of nothing")) } else { Ok((sum / f64::from(count)).exp()) }
}

/// `list | scaled("gib")`: the numbers of a list in another unit, for a figure.
fn scaled(values: Value, unit: String) -> Result<Vec<Value>, Error> {
    let scale = scale(&unit)?;
    values.try_iter()?.map(|value| Ok(number(&value)?.map_or(Value::from(()), |x| Value::from(x * scale)))).collect()
}

/// `case | cell("forward.median", "ms", 2)`: the number inside `case.row`, or the outcome's name.
fn cell(case: Value, path: String, unit: String, digits: usize) -> Result<String, Error> {
    match outcome(&case)?.as_str() {
        "measured" => format(&inside(&case.get_attr("row")?, &path)?, &unit, digits),
        "out_of_memory" => Ok("OOM".into()),
        "not_run" => Ok("not run".into()),
        _ => Ok("failed".into()),
    }
}

/// `cases | column("row.forward.median", "ms")`: a list of numbers for a figure, none where there is no number.
///
/// Without a unit the values stay as they are.
fn column(cases: Value, path: String, unit: Option<String>) -> Result<Vec<Value>, Error> {
    let mut values = Vec::new();
    for case in cases.try_iter()? {
        if path.starts_with("row.") && outcome(&case)? != "measured" {
            values.push(Value::from(()));
            continue;
        }
        let value = inside(&case, &path)?;
        values.push(match (&unit, &unit.as_ref().map_or(Ok(None), |_| number(&value))?) {
            (Some(unit), Some(x)) => Value::from(x * scale(unit)?),
            (Some(_), None) => Value::from(()),
            (None, _) => value,
        });
    }
    Ok(values)
}

fn outcome(case: &Value) -> Result<String, Error> {
    let kind = case.get_attr("kind")?;
    kind.as_str().map(str::to_string).ok_or_else(|| invalid("expects a case: an object with a kind and a row"))
}

/// Follows a dotted path; a step that does not exist is an error that names it.
pub fn inside(value: &Value, path: &str) -> Result<Value, Error> {
    let mut at = value.clone();
    for step in path.split('.') {
        let next = match step.parse::<usize>() {
            Ok(index) if at.kind() == ValueKind::Seq => at.get_item_by_index(index)?,
            _ => at.get_attr(step)?,
        };
        if next.is_undefined() {
            let known: Vec<String> =
                at.try_iter().map(|keys| keys.map(|k| k.to_string()).collect()).unwrap_or_default();
            return Err(invalid(format!("there is no {step:?} of {path:?}; there are {}", known.join(", "))));
        }
        at = next;
    }
    Ok(at)
}

/// The one formatter: `unit` is a filter's name, `digits` stand after the point.
fn format(value: &Value, unit: &str, digits: usize) -> Result<String, Error> {
    let Some(x) = number(value)? else { return Ok(NOTHING.into()) };
    Ok(match unit {
        "grouped" => grouped(x, digits),
        "sci" => scientific(x, digits),
        "percent" => format!("{}%", grouped(x * 100.0, digits)),
        _ => grouped(x * scale(unit)?, digits),
    })
}

/// What a value in base units is multiplied with.
fn scale(unit: &str) -> Result<f64, Error> {
    Ok(match unit {
        "ms" => 1e3,
        "us" => 1e6,
        "sec" | "fixed" => 1.0,
        "mib" => 1.0 / MIB,
        "gib" => 1.0 / GIB,
        "mb" => 1.0 / MB,
        "gb" => 1.0 / GB,
        "percent" => 100.0,
        _ => return Err(invalid(format!("unknown unit {unit:?}"))),
    })
}

/// A finite number, or nothing where the value is none.
pub fn number(value: &Value) -> Result<Option<f64>, Error> {
    match value.kind() {
        ValueKind::None => return Ok(None),
        ValueKind::Number => {}
        ValueKind::Map => return Err(invalid("expects a number, got an object; name a statistic, such as .median")),
        kind => return Err(invalid(format!("expects a number, got {kind} {value}"))),
    }
    let x = f64::try_from(value.clone())?;
    if x.is_finite() { Ok(Some(x)) } else { Err(invalid(format!("expects a finite number, got {x}"))) }
}

/// Sign, digits before the point, the point and what follows; never "-0.00", since zero has no sign.
fn parts(x: f64, digits: usize) -> (&'static str, String, String) {
    let text = format!("{:.digits$}", x.abs());
    let zero = text.chars().all(|c| matches!(c, '0' | '.'));
    let (whole, part) = text.find('.').map_or((text.as_str(), ""), |at| text.split_at(at));
    (if x < 0.0 && !zero { MINUS } else { "" }, whole.into(), part.into())
}

/// "12,345.6".
pub fn grouped(x: f64, digits: usize) -> String {
    let (sign, whole, part) = parts(x, digits);
    let mut out = String::from(sign);
    for (i, digit) in whole.chars().enumerate() {
        if i > 0 && (whole.len() - i) % 3 == 0 {
            out.push(',');
        }
        out.push(digit);
    }
    out + &part
}

/// "$1.25 \times 10^{-4}$" or "$10^{-4}$", so that both Markdown and typst set it as a formula.
fn scientific(x: f64, digits: usize) -> String {
    let text = format!("{x:.digits$e}");
    match text.split_once('e') {
        Some((mantissa, "0")) => format!("${mantissa}$"),
        Some(("1", exponent)) => format!("$10^{{{exponent}}}$"),
        Some(("-1", exponent)) => format!("$-10^{{{exponent}}}$"),
        Some((mantissa, exponent)) => format!("${mantissa} \\times 10^{{{exponent}}}$"),
        None => text,
    }
}

fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn print(x: f64, unit: &str, digits: usize) -> String {
        format(&Value::from(x), unit, digits).unwrap()
    }

    #[test]
    fn base_units_become_the_named_ones() {
        assert_eq!(print(0.0125, "ms", 2), "12.50");
        assert_eq!(print(0.0125, "us", 0), "12,500");
        assert_eq!(print(0.009_999_6, "us", 0), "10,000");
        assert_eq!(print(1836.6, "fixed", 1), "1,836.6");
        assert_eq!(print(-83_332.942, "fixed", 3), "−83,332.942");
        assert_eq!(print(3.0 * 1024.0 * 1024.0, "mib", 1), "3.0");
        assert_eq!(print(3e9, "gb", 2), "3.00");
        assert_eq!(print(0.125, "percent", 1), "12.5%");
        assert_eq!(print(1234567.0, "grouped", 0), "1,234,567");
        assert_eq!(print(-1234.5, "grouped", 1), "−1,234.5");
        assert_eq!(print(-0.023, "percent", 1), "−2.3%");
        assert_eq!(print(999.0, "grouped", 0), "999");
        assert_eq!(print(1.25e-4, "sci", 2), "$1.25 \\times 10^{-4}$");
        assert_eq!(print(1.25, "sci", 2), "$1.25$");
        assert_eq!(print(1e-5, "sci", 0), "$10^{-5}$");
        assert_eq!(print(-0.001, "fixed", 2), "0.00");
    }

    #[test]
    fn a_list_is_scaled_number_by_number() {
        let list = Value::from(vec![Value::from(1024 * 1024), Value::from(())]);
        assert_eq!(scaled(list, "mib".into()).unwrap(), [Value::from(1.0), Value::from(())]);
        assert!(scaled(Value::from(vec!["x"]), "mib".into()).is_err());
        assert!(scaled(Value::from(Vec::<u8>::new()), "parsec".into()).is_err());
    }

    #[test]
    fn none_is_an_en_dash_and_other_things_are_errors() {
        assert_eq!(format(&Value::from(()), "ms", 2).unwrap(), "–");
        assert!(format(&Value::from("12"), "ms", 2).is_err());
        assert!(format(&Value::from(true), "ms", 2).is_err());
        assert!(format(&Value::from(f64::NAN), "ms", 2).is_err());
        assert!(format(&Value::from(1.0), "parsec", 2).is_err());
    }
}
