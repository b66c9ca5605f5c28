//! What the sums show: how far each precision strays, where it stops counting, and what rounding alone explains.

use anyhow::{Context as _, Result};
use serde::Serialize;

use super::measure::{Accumulation, Cast, Params, Row};
use crate::bench::dtype::Dtype;
use crate::harness::answer::{Answer, Audience, Case, Claim, Quantity, Records, Style, Table, Unit};

type Loop = Case<Params, Row>;

/// How often the short loops and the long ones add.
const SHORT: u32 = 1_000;
const LONG: u32 = 10_000;
/// What they add.
const ADDEND: f64 = 0.01;

/// The handout's four loops: dtypes of the accumulator and of the addend, and who converts the addend.
const FOUR: [(Dtype, Dtype, Cast); 4] = [
    (Dtype::Float32, Dtype::Float32, Cast::Implicit),
    (Dtype::Float32, Dtype::Float16, Cast::Implicit),
    (Dtype::Float32, Dtype::Float16, Cast::Explicit),
    (Dtype::Float16, Dtype::Float16, Cast::Implicit),
];

/// What the sentences quote.
#[derive(Serialize)]
struct Quoted {
    float32_sum: Quantity,
    float16_sum: Quantity,
    mixed_sum: Quantity,
    /// Of the long loops in one type.
    long_sum: Quantity,
    long_bfloat16_sum: Quantity,
    #[serde(flatten)]
    float16: Rounding,
    /// Where a bfloat16 sum stops growing.
    bfloat16_limit: f64,
}

/// What rounding to float16 explains, computed and not measured.
#[derive(Serialize)]
struct Rounding {
    addend: f64,
    /// Relative to 0.01.
    excess: f64,
    /// Between neighbouring numbers at the end of a short loop.
    spacing: f64,
    /// Where adding the addend no longer changes the sum, and half the spacing there.
    limit: f64,
    half_spacing: f64,
}

pub fn answer(records: &Records, _audience: Audience) -> Result<Answer> {
    let set = records.main()?;
    let loops = set.cases::<Accumulation>()?;
    let long = |dtype| Ok::<_, anyhow::Error>(find(&loops, dtype, dtype, Cast::Implicit, LONG)?.sum());
    let four = FOUR.map(|(accumulator, addend, cast)| find(&loops, accumulator, addend, cast, SHORT));
    let [float32, implicit, explicit, float16] = four;
    let [float32, implicit, explicit, float16] = [float32?, implicit?, explicit?, float16?];
    let quoted = Quoted {
        float32_sum: float32.sum(),
        float16_sum: float16.sum(),
        mixed_sum: implicit.sum(),
        long_sum: long(Dtype::Float16)?,
        long_bfloat16_sum: long(Dtype::Bfloat16)?,
        float16: Rounding::of(Dtype::Float16),
        bfloat16_limit: Rounding::of(Dtype::Bfloat16).limit,
    };
    let mut answer = Answer::of(set, &quoted)?;
    answer.claim(
        Claim::new("promotion-converts", implicit.row.sum == explicit.row.sum)
            .operand("promoted", &implicit.sum())
            .operand("converted", &explicit.sum()),
    )?;
    answer.table("four", four_table([float32, implicit, explicit, float16]))?;
    answer.table("long", long_table(&loops))?;
    answer.table("binades", binade_table())?;
    Ok(answer)
}

/// A loop that was measured.
struct Sum<'a> {
    case: &'a Loop,
    row: &'a Row,
}

impl Sum<'_> {
    fn sum(&self) -> Quantity {
        self.case.quantity(self.row.sum, Unit::One)
    }

    fn error(&self) -> Quantity {
        self.case.quantity(self.row.error, Unit::One)
    }
}

/// Errors: there is no such loop, or it was not measured.
fn find(loops: &[Loop], accumulator: Dtype, addend: Dtype, cast: Cast, iterations: u32) -> Result<Sum<'_>> {
    let wanted = Params { accumulator, addend, cast, addend_value: ADDEND, iterations };
    let found = loops.iter().find(|case| case.params == wanted).and_then(Case::measured);
    let (case, row) = found.with_context(|| {
        let (accumulator, addend) = (accumulator.name(), addend.name());
        format!("no loop of {iterations} additions of {addend} in {accumulator} was measured")
    })?;
    Ok(Sum { case, row })
}

fn conversion(params: &Params) -> &'static str {
    match params.cast {
        _ if params.accumulator == params.addend => "none",
        Cast::Implicit => "implicit",
        Cast::Explicit => "explicit",
    }
}

fn four_table(four: [Sum; 4]) -> Table {
    Table::of(four)
        .text("Accumulator", |sum| sum.case.params.accumulator.name())
        .text("Addend", |sum| sum.case.params.addend.name())
        .text("Conversion", |sum| conversion(&sum.case.params))
        .number("Sum", Style::Fixed, 4, Sum::sum)
        .number("Error", Style::Fixed, 5, Sum::error)
        .into()
}

/// A line for each long loop, those with a float32 accumulator first.
fn long_table(loops: &[Loop]) -> Table {
    let number = |case: &Loop, of: fn(&Row) -> f64| case.cell(|row| case.quantity(of(row), Unit::One));
    let mut long: Vec<&Loop> = loops.iter().filter(|case| case.params.iterations == LONG).collect();
    long.sort_by_key(|case| case.params.accumulator != Dtype::Float32);
    Table::of(long)
        .text("Accumulator", |case| case.params.accumulator.name())
        .text("Addend", |case| case.params.addend.name())
        .text("Conversion", |case| conversion(&case.params))
        .number("Sum", Style::Fixed, 3, |case| number(case, |row| row.sum))
        .number("Error", Style::Fixed, 3, |case| number(case, |row| row.error))
        .number("Last change at", Style::Grouped, 0, |case| number(case, |row| f64::from(row.last_change)))
        .into()
}

impl Rounding {
    fn of(dtype: Dtype) -> Self {
        let format = dtype.format();
        let addend = format.round(ADDEND);
        let limit = format.stagnates_at(addend);
        Self {
            addend,
            excess: addend / ADDEND - 1.0,
            spacing: format.ulp(f64::from(SHORT) * ADDEND),
            limit,
            half_spacing: format.ulp(limit) / 2.0,
        }
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
        .number("Spacing of float16", Style::Fixed, 5, |from| format.ulp(*from))
        .number("One addition adds", Style::Fixed, 5, |from| step(*from))
        .number("Relative to 0.01", Style::Percent, 1, |from| step(*from) / ADDEND - 1.0)
        .into()
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
            .measured("bfloat16", &params(Bfloat16, Bfloat16, Cast::Implicit, LONG), &row(4.0, 100.0))
            .measured("mixed", &params(Float32, Float16, Cast::Implicit, SHORT), &row(10.002, 10.0))
            .measured("mixed", &params(Float32, Float16, Cast::Explicit, SHORT), &row(explicit_sum, 10.0));
        long(made_up, &params(Float16, Float16, Cast::Implicit, LONG)).records()
    }

    fn measured(sum: f64) -> impl Fn(MadeUp, &Params) -> MadeUp {
        move |made_up, params| made_up.measured("float16", params, &Row { sum, error: sum - 100.0, last_change: 3000 })
    }

    #[test]
    fn the_two_conversions_are_compared() {
        for (explicit, same) in [(10.002, true), (10.003, false)] {
            let answer = answer(&records(explicit, measured(32.0)), Audience::Ours).unwrap();
            assert_eq!(answer.holds("promotion-converts"), Some(same));
        }
    }

    #[test]
    fn quoted_numbers_are_those_of_the_short_loops() {
        let answer = answer(&records(10.002, measured(32.0)), Audience::Ours).unwrap();
        let quoted = answer.quoted();
        assert_eq!(quoted["float16_sum"]["value"], 9.95);
        assert_eq!(quoted["float32_sum"]["value"], 10.0001);
        assert_eq!(quoted["spacing"], 0.0078125);
        assert_eq!((&quoted["long_sum"]["value"], &quoted["limit"]), (&32.0.into(), &32.0.into()));
        assert_eq!(quoted["bfloat16_limit"], 4.0);
    }

    #[test]
    fn short_loops_and_long_ones_have_a_table_each() {
        let answer = answer(&records(10.002, measured(32.0)), Audience::Ours).unwrap();
        let table = |id: &str| answer.tables()[id].markdown();
        assert!(table("four").contains("| float32 | float16 | explicit | 10.0020 | 0.00200 |"), "{}", table("four"));
        assert!(table("four").contains("| float16 | float16 | none | 9.9500 | −0.05000 |"), "{}", table("four"));
        assert!(table("long").contains("| float16 | float16 | none | 32.000 | −68.000 | 3,000 |"), "{}", table("long"));
        assert_eq!(answer.tables()["long"].rows.len(), 2);
    }

    #[test]
    fn a_failed_or_missing_loop_is_named() {
        let failed = records(10.002, |made_up, params| made_up.failed("float16", params));
        let error = format!("{:#}", answer(&failed, Audience::Ours).unwrap_err());
        assert!(error.contains("no loop of 10000 additions of float16 in float16 was measured"), "{error}");
        assert!(format!("{:#}", answer(&Records::default(), Audience::Ours).unwrap_err()).contains("cs336 measure"));
    }
}
