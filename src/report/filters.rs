//! Template filters that format base units for sentences and tables. A missing number is an en dash.

use minijinja::value::{Value, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State, UndefinedBehavior};

use super::session::invalid;
use crate::harness::answer::format::{self, NOTHING, Style};
use crate::harness::answer::mark;
use crate::harness::answer::quantity::Unit;
use crate::units::GIB;

/// Registers a filter for every [`Style`] (`value | ms(2)`), `memory`, `range`, `listed`, `join` and `length`.
pub fn register(env: &mut Environment<'_>) {
    for (name, style) in Style::ALL {
        env.add_filter(name, move |state: &State, value: Value, digits: Option<usize>| {
            // A count has no decimals by default. Other styles require the number of decimals.
            let digits = digits.or((style == Style::Grouped).then_some(0));
            print(&known(state, value), style, digits.ok_or_else(|| Error::from(ErrorKind::MissingArgument))?)
        });
    }
    env.add_filter("memory", |state: &State, value: Value| memory(known(state, value)));
    env.add_filter("range", |state: &State, value: Value, style: String, digits: usize| {
        range(known(state, value), style, digits)
    });
    env.add_filter("listed", |words: Vec<String>| format::listed(&words));
    env.add_filter("join", |items: Vec<Value>, separator: String| join(&items, &separator));
    env.add_filter("length", |list: Value| list.len().ok_or_else(|| invalid("length expects a list")));
}

/// The items with `separator` between them.
///
/// Errors: a text that no sentence holds, as of joins that are the separators of joins.
fn join(items: &[Value], separator: &str) -> Result<String, Error> {
    const MOST_BYTES: usize = 1 << 16;
    let mut out = String::new();
    for (at, item) in items.iter().enumerate() {
        out += if at > 0 { separator } else { "" };
        out += &item.to_string();
        if out.len() > MOST_BYTES {
            return Err(invalid(format!("a join is longer than {MOST_BYTES} bytes; join less")));
        }
    }
    Ok(out)
}

/// An undefined value is a missing number where the template may name what does not exist.
fn known(state: &State, value: Value) -> Value {
    let may_lack = state.undefined_behavior() == UndefinedBehavior::Chainable;
    if may_lack && value.is_undefined() { Value::from(()) } else { value }
}

/// `answer.peak | memory`: "1.50 GiB", or MiB below one GiB.
fn memory(value: Value) -> Result<String, Error> {
    fits(&value, Style::Gib)?;
    let Some(bytes) = number(&value)? else { return Ok(NOTHING.into()) };
    let (style, unit) = if bytes.abs() >= GIB { (Style::Gib, "GiB") } else { (Style::Mib, "MiB") };
    Ok(marked(&value, &format!("{} {unit}", format::print(bytes, style, 2))))
}

/// `answer.gain | range("fixed", 2)`: "1.02 to 1.35", or "1.02" where both ends print alike.
fn range(value: Value, style: String, digits: usize) -> Result<String, Error> {
    let (style, digits) = (named(&style)?, decimals(digits)?);
    if value.is_none() {
        return Ok(NOTHING.into());
    }
    let (low, high) = (value.get_attr("low")?, value.get_attr("high")?);
    for end in [&low, &high] {
        fits(end, style)?;
    }
    let (Some(first), Some(last)) = (number(&low)?, number(&high)?) else { return Ok(NOTHING.into()) };
    let [first, last] = [first, last].map(|x| format::print(x, style, digits));
    let (first, last) = (marked(&low, &first), (first != last).then(|| marked(&high, &last)));
    Ok(last.map_or(first.clone(), |last| format!("{first} to {last}")))
}

fn print(value: &Value, style: Style, digits: usize) -> Result<String, Error> {
    let digits = decimals(digits)?;
    fits(value, style)?;
    Ok(number(value)?.map_or(NOTHING.into(), |x| marked(value, &format::print(x, style, digits))))
}

/// Errors: more decimals than a float64 has significant digits; the standard library panics above 65,535.
fn decimals(digits: usize) -> Result<usize, Error> {
    const MOST: usize = 17;
    if digits <= MOST { Ok(digits) } else { Err(invalid(format!("{digits} decimals; use at most {MOST}"))) }
}

/// `text` with the mark of the quantity's cases.
fn marked(value: &Value, text: &str) -> String {
    let key = value.get_attr("cases").unwrap_or_default();
    mark::marked(text, key.as_str().unwrap_or_default())
}

fn named(style: &str) -> Result<Style, Error> {
    Style::named(style).ok_or_else(|| invalid(format!("unknown unit {style:?}")))
}

/// Errors: a quantity whose unit does not fit the style.
fn fits(value: &Value, style: Style) -> Result<(), Error> {
    let unit = match value.kind() {
        ValueKind::Map => value.get_attr("unit")?,
        _ => return Ok(()),
    };
    let wanted = unit.as_str().unwrap_or_default();
    let known = Unit::ALL.into_iter().find(|unit| unit.symbol() == wanted);
    match known {
        Some(unit) if style.fits(unit) => Ok(()),
        _ => Err(invalid(format!("a quantity in {wanted:?} cannot be printed as {style:?}"))),
    }
}

/// A finite number, or nothing where the value is none.
fn number(value: &Value) -> Result<Option<f64>, Error> {
    match value.kind() {
        ValueKind::None => return Ok(None),
        ValueKind::Number => {}
        ValueKind::Map => {
            let inner = value.get_attr("value")?;
            if inner.kind() != ValueKind::Number {
                return Err(invalid("expects a number, got an object; name one of its fields"));
            }
            return number(&inner);
        }
        kind => {
            let start: String = mark::plain(&value.to_string()).chars().take(40).collect();
            return Err(invalid(format!("expects a number, got {kind} {start:?}")));
        }
    }
    let x = f64::try_from(value.clone())?;
    if x.is_finite() { Ok(Some(x)) } else { Err(invalid(format!("expects a finite number, got {x}"))) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use minijinja::value::Serde;

    use crate::harness::answer::made_up::{machine, source};
    use crate::harness::answer::quantity::{Quantity, Range};

    #[test]
    fn none_is_an_en_dash_and_other_things_are_errors() {
        let print = |value: Value| print(&value, Style::Ms, 2);
        assert_eq!(print(Value::from(())).unwrap(), "–");
        assert!(print(Value::from("12")).is_err());
        assert!(print(Value::from(true)).is_err());
        assert!(print(Value::from(f64::NAN)).is_err());
    }

    #[test]
    fn a_quantity_prints_only_in_styles_of_its_unit() {
        let seconds = Value::from(Serde(Quantity::constant(0.0125, Unit::Seconds)));
        assert_eq!(print(&seconds, Style::Ms, 1).unwrap(), "12.5");
        assert!(print(&seconds, Style::Gib, 1).unwrap_err().to_string().contains("cannot be printed as Gib"));
        let ends = [1.5, 2.0].map(|x| Quantity::constant(x, Unit::One));
        let ends = Value::from(Serde(Range::of(&ends)));
        assert_eq!(range(ends.clone(), "fixed".into(), 1).unwrap(), "1.5 to 2.0");
        assert!(range(ends, "ms".into(), 1).is_err());
    }

    #[test]
    fn a_measured_number_is_marked_with_its_cases() {
        let measured = |x| Quantity::new(x, Unit::Seconds, vec![source("a", machine(None))]);
        let mark = |text| mark::marked(text, "made_up.cpu.0");
        let value = Value::from(Serde(measured(0.0125)));
        assert_eq!(print(&value, Style::Ms, 1).unwrap(), mark("12.5"));
        let between = |low, high| Value::from(Serde(Range { low: measured(low), high: measured(high) }));
        assert_eq!(range(between(1.0, 2.0), "sec".into(), 0).unwrap(), format!("{} to {}", mark("1"), mark("2")));
        assert_eq!(range(between(1.0, 1.01), "sec".into(), 0).unwrap(), mark("1"));
    }
}
