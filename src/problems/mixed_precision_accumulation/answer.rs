//! What the sums show: how far each precision strays, where it stops counting, and what rounding alone explains.

use anyhow::{Context as _, Result};
use serde::Serialize;

use super::measure::{Accumulation, Cast, Params, Row, accumulate_in_software};
use crate::bench::dtype::Dtype;
use crate::harness::answer::figure::{Figure, Plot, PlotKind, Series};
use crate::harness::answer::{Answer, Audience, Case, Claim, Quantity, Records, Style, Table, Unit};

type Loop = Case<Params, Row>;

/// How often the short loops and the long ones add.
const SHORT: u32 = 1_000;
const LONG: u32 = 10_000;
/// What they add.
const ADDEND: f64 = 0.01;

/// What the sentences quote.
#[derive(Serialize)]
struct Quoted {
    float32_error: Quantity,
    float16_sum: Quantity,
    mixed_sum: Quantity,
    bfloat16_last_change: u32,
    float16: Rounding,
    bfloat16: Rounding,
}

/// What rounding to one type explains, computed and not measured.
#[derive(Serialize)]
struct Rounding {
    significand_bits: i32,
    addend: f64,
    /// Relative to 0.01.
    addend_off: f64,
    /// Where adding the addend no longer changes the sum.
    stagnates_at: f64,
    half_ulp_there: f64,
}

pub fn answer(records: &Records, _audience: Audience) -> Result<Answer> {
    let set = records.main()?;
    let loops = set.cases::<Accumulation>()?;
    let narrow = |dtype, iterations| find(&loops, dtype, dtype, Cast::Implicit, iterations);
    let float32 = narrow(Dtype::Float32, SHORT)?;
    let float16 = narrow(Dtype::Float16, SHORT)?;
    let bfloat16 = narrow(Dtype::Bfloat16, SHORT)?;
    let float16_long = narrow(Dtype::Float16, LONG)?;
    let implicit = find(&loops, Dtype::Float32, Dtype::Float16, Cast::Implicit, SHORT)?;
    let explicit = find(&loops, Dtype::Float32, Dtype::Float16, Cast::Explicit, SHORT)?;
    let quoted = Quoted {
        float32_error: float32.error.clone(),
        float16_sum: float16.sum.clone(),
        mixed_sum: implicit.sum.clone(),
        bfloat16_last_change: bfloat16.last_change,
        float16: Rounding::of(Dtype::Float16),
        bfloat16: Rounding::of(Dtype::Bfloat16),
    };
    let mut answer = Answer::of(set, &quoted)?;
    let [a, b, c] = [&float16, &implicit, &float32].map(|sum| sum.error.value());
    answer.claim(
        Claim::new("float16-is-worst", a > 10.0 * b && b > c)
            .operand("error in float16", &float16.error)
            .operand("of float16 in float32", &implicit.error)
            .operand("in float32", &float32.error),
    )?;
    answer.claim(
        Claim::new("promotion-converts", implicit.sum.value() == explicit.sum.value())
            .operand("promoted", &implicit.sum)
            .operand("converted", &explicit.sum),
    )?;
    answer.claim(quoted.float16.stagnates("float16-stagnates", &float16_long.sum))?;
    answer.claim(quoted.bfloat16.stagnates("bfloat16-stagnates", &bfloat16.sum))?;
    answer.table("loops", loop_table(&loops))?;
    answer.table("binades", binade_table())?;
    answer.figure("error", error_figure())?;
    Ok(answer)
}

/// One loop's results with their source.
struct Sum {
    sum: Quantity,
    /// The size of the error.
    error: Quantity,
    last_change: u32,
}

/// Errors: there is no such loop, or it was not measured.
fn find(loops: &[Loop], accumulator: Dtype, addend: Dtype, cast: Cast, iterations: u32) -> Result<Sum> {
    let wanted = Params { accumulator, addend, cast, addend_value: ADDEND, iterations };
    let found = loops.iter().find(|case| case.params == wanted).and_then(Case::measured);
    let (case, row) = found.with_context(|| {
        let (accumulator, addend) = (accumulator.name(), addend.name());
        format!("no loop of {iterations} additions of {addend} in {accumulator} was measured")
    })?;
    let number = |x| case.quantity(x, Unit::One);
    Ok(Sum { sum: number(row.sum), error: number(row.error.abs()), last_change: row.last_change })
}

/// A line for each loop, the short one and the long one side by side.
fn loop_table(loops: &[Loop]) -> Table {
    let short = loops.iter().filter(|case| case.params.iterations == SHORT);
    let pairs = short.map(|short| {
        let long = Params { iterations: LONG, ..short.params.clone() };
        (short, loops.iter().find(|case| case.params == long))
    });
    let of = |case: Option<&Loop>, number: fn(&Row) -> f64| {
        let (case, row) = case?.measured()?;
        Some(case.quantity(number(row), Unit::One))
    };
    Table::of(pairs)
        .text("Accumulator", |(short, _)| short.params.accumulator.name())
        .text("Addend", |(short, _)| short.params.addend.name())
        .text("Conversion", |(short, _)| match short.params.cast {
            _ if short.params.accumulator == short.params.addend => "none",
            Cast::Implicit => "implicit",
            Cast::Explicit => "explicit",
        })
        .number("Sum of 1,000", Style::Fixed, 6, |(short, _)| of(Some(short), |row| row.sum))
        .number("Error", Style::Fixed, 6, |(short, _)| of(Some(short), |row| row.error))
        .number("Sum of 10,000", Style::Fixed, 6, |(_, long)| of(*long, |row| row.sum))
        .number("Error", Style::Fixed, 6, |(_, long)| of(*long, |row| row.error))
        .number("Last change at", Style::Grouped, 0, |(_, long)| of(*long, |row| f64::from(row.last_change)))
        .into()
}

impl Rounding {
    fn of(dtype: Dtype) -> Self {
        let format = dtype.format();
        let addend = format.round(ADDEND);
        let stagnates_at = format.stagnates_at(addend);
        Self {
            significand_bits: format.significand_bits,
            addend,
            addend_off: addend / ADDEND - 1.0,
            stagnates_at,
            half_ulp_there: format.ulp(stagnates_at) / 2.0,
        }
    }

    fn stagnates(&self, id: &str, sum: &Quantity) -> Claim {
        let claim = Claim::new(id, sum.value() == self.stagnates_at).operand("sum", sum);
        claim.operand_text("stands still at", self.stagnates_at.to_string())
    }
}

/// How far one addition really moves a float16 sum between powers of two, up to where it moves no more.
fn binade_table() -> Table {
    let format = Dtype::Float16.format();
    let addend = format.round(ADDEND);
    let end = format.stagnates_at(addend);
    let step = |from: f64| format.round(from + addend) - from;
    Table::of(std::iter::successors(Some(1.0), |from| Some(2.0 * from)).take_while(|from| *from <= end))
        .text("Sum between", |from| format!("{from} and {}", 2.0 * from))
        .number("Spacing of float16", Style::Fixed, 6, |from| format.ulp(*from))
        .number("One addition adds", Style::Fixed, 6, |from| step(*from))
        .number("Relative to 0.01", Style::Percent, 1, |from| step(*from) / ADDEND - 1.0)
        .into()
}

/// The size of the running sum's error over a thousand additions, at every 50th.
fn error_figure() -> Figure {
    use Dtype::{Float16, Float32};
    let series = [(Float16, Float16), (Float32, Float16), (Float32, Float32)].map(|(sum, addend)| trace(sum, addend));
    let plot = Plot::new(PlotKind::Line, "additions", "|sum less exact sum|", series.to_vec());
    let alt = "Size of the error of three running sums over 1,000 additions of 0.01, logarithmic: the float16 sum's is \
               always the largest, dips near 450 additions and falls again towards 1,000; the float32 sum of float16 \
               addends rises steadily; the float32 sum of float32 addends stays lowest.";
    Figure::plot(alt, Plot { log_y: true, ..plot })
}

/// A sum without any error has no point: a logarithmic axis cannot show it.
fn trace(accumulator: Dtype, addend: Dtype) -> Series {
    let params = Params { accumulator, addend, cast: Cast::Implicit, addend_value: ADDEND, iterations: SHORT };
    let sums = accumulate_in_software(&params).enumerate().map(|(i, sum)| (i + 1, sum)).filter(|(i, _)| i % 50 == 0);
    let points = sums.map(|(i, sum)| {
        let error = (sum - i as f64 * ADDEND).abs();
        (i as f64, Some(error).filter(|e| *e > 0.0))
    });
    Series::over_numbers(format!("{} sum, {} addend", accumulator.name(), addend.name()), points)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::answer::made_up::MadeUp;

    fn params(accumulator: Dtype, addend: Dtype, cast: Cast, iterations: u32) -> Params {
        Params { accumulator, addend, cast, addend_value: ADDEND, iterations }
    }

    /// Records of every loop that the answer quotes; `ended` may replace the outcome of the long float16 one.
    fn records(explicit_sum: f64, long: impl Fn(MadeUp, &Params) -> MadeUp) -> Records {
        use Dtype::{Bfloat16, Float16, Float32};
        let row = |sum: f64, exact: f64| Row { sum, error: sum - exact, last_change: 401 };
        let made_up = MadeUp::cpu("mixed_precision_accumulation")
            .measured("float32", &params(Float32, Float32, Cast::Implicit, SHORT), &row(10.0001, 10.0))
            .measured("float16", &params(Float16, Float16, Cast::Implicit, SHORT), &row(9.95, 10.0))
            .measured("bfloat16", &params(Bfloat16, Bfloat16, Cast::Implicit, SHORT), &row(4.0, 10.0))
            .measured("mixed", &params(Float32, Float16, Cast::Implicit, SHORT), &row(10.002, 10.0))
            .measured("mixed", &params(Float32, Float16, Cast::Explicit, SHORT), &row(explicit_sum, 10.0));
        long(made_up, &params(Float16, Float16, Cast::Implicit, LONG)).records()
    }

    fn measured(sum: f64) -> impl Fn(MadeUp, &Params) -> MadeUp {
        move |made_up, params| made_up.measured("float16", params, &Row { sum, error: sum - 100.0, last_change: 3000 })
    }

    #[test]
    fn claims_follow_the_sums() {
        let all = answer(&records(10.002, measured(32.0)), Audience::Ours).unwrap();
        for id in ["float16-is-worst", "promotion-converts", "float16-stagnates", "bfloat16-stagnates"] {
            assert_eq!(all.holds(id), Some(true), "{id}");
        }
        let none = answer(&records(10.003, measured(31.0)), Audience::Ours).unwrap();
        assert_eq!(none.holds("promotion-converts"), Some(false));
        assert_eq!(none.holds("float16-stagnates"), Some(false));
    }

    #[test]
    fn quoted_numbers_are_those_of_the_short_loops() {
        let answer = answer(&records(10.002, measured(32.0)), Audience::Ours).unwrap();
        let quoted = answer.quoted();
        assert_eq!(quoted["float16_sum"]["value"], 9.95);
        assert_eq!(quoted["bfloat16_last_change"], 401);
        assert!((quoted["float32_error"]["value"].as_f64().unwrap() - 1e-4).abs() < 1e-9);
        assert_eq!(quoted["float16"]["stagnates_at"], 32.0);
        assert_eq!(quoted["bfloat16"]["stagnates_at"], 4.0);
    }

    #[test]
    fn a_loop_without_its_long_run_shows_dashes() {
        let records = records(10.002, measured(32.0));
        let markdown = loop_table(&records.main().unwrap().cases::<Accumulation>().unwrap()).markdown();
        assert!(markdown.contains("| float32 | float32 | none | 10.000100 | 0.000100 | – | – | – |"), "{markdown}");
        assert!(markdown.contains("| float16 | float16 | none | 9.950000 | −0.050000 | 32.000000 |"), "{markdown}");
    }

    #[test]
    fn a_failed_or_missing_loop_is_named() {
        let failed = records(10.002, |made_up, params| made_up.failed("float16", params));
        let error = format!("{:#}", answer(&failed, Audience::Ours).unwrap_err());
        assert!(error.contains("no loop of 10000 additions of float16 in float16 was measured"), "{error}");
        assert!(format!("{:#}", answer(&Records::default(), Audience::Ours).unwrap_err()).contains("cs336 measure"));
    }
}
