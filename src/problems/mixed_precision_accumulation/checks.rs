//! The sums against published ones, against rounding in software, and promotion against conversion.

use anyhow::{Result, ensure};
use tch::Device;

use super::measure::{Accumulate, Cast, Params, Row, accumulate_in_software};
use crate::bench::dtype::Dtype;
use crate::harness::problem::Verdict;

/// The published sums, bit for bit: 1,000 times 0.01 and 10,000 times 0.001.
pub fn check_golden(accumulate: Accumulate) -> Result<Verdict> {
    use Dtype::{Bfloat16, Float16, Float32};
    let golden = [
        (Float32, Float32, 10.000133514404297, 10.000411033630371),
        (Float16, Float16, 9.953125, 4.0),
        (Float32, Float16, 10.00213623046875, 10.004043579101562),
        (Bfloat16, Bfloat16, 4.0, 0.5),
        (Float32, Bfloat16, 10.009765625, 9.9945068359375),
    ];
    for (accumulator, addend, hundredths, thousandths) in golden {
        for (addend_value, iterations, expected) in [(0.01, 1000, hundredths), (0.001, 10_000, thousandths)] {
            let params = Params { accumulator, addend, cast: Cast::Implicit, addend_value, iterations };
            let sum = accumulate(&params, Device::Cpu)?.sum;
            ensure!(sum == expected, "{params:?} gives {sum}, the published sum is {expected}");
        }
    }
    Verdict::passed("10 sums equal the published ones in every bit")
}

/// Sums, errors and last changes against rounding done without any tensor.
pub fn check_against_software(accumulate: Accumulate) -> Result<Verdict> {
    use Dtype::{Bfloat16, Float16, Float32};
    let pairs = [(Float32, Float32), (Float16, Float16), (Bfloat16, Bfloat16), (Float32, Float16), (Float32, Bfloat16)];
    let mut loops = 0;
    for (accumulator, addend) in pairs {
        for (addend_value, iterations) in
            [(0.01, 1), (0.01, 1000), (0.01, 5000), (0.1, 777), (3e-6, 2000), (37.0, 3000)]
        {
            let params = Params { accumulator, addend, cast: Cast::Implicit, addend_value, iterations };
            let sums: Vec<f64> = accumulate_in_software(&params).collect();
            let sum = sums.last().copied().unwrap_or(0.0);
            let last_change = sums.len() - sums.iter().rev().take_while(|s| **s == sum).count() + 1;
            let error = sum - addend_value * f64::from(iterations);
            let row = accumulate(&params, Device::Cpu)?;
            let expected = Row { sum, error, last_change: last_change as u32 };
            ensure!(row == expected, "{params:?} gives {row:?}, rounding in software {expected:?}");
            loops += 1;
        }
    }
    Verdict::passed(format!("{loops} loops agree with software rounding in every bit"))
}

/// Promotion by libtorch and conversion by hand must be the same arithmetic.
pub fn check_promotion(accumulate: Accumulate) -> Result<Verdict> {
    // Below 16,384 additions every partial sum of an 11-bit addend is exact in float32, and no arithmetic differs.
    for (addend, iterations) in [(Dtype::Float16, 1000), (Dtype::Bfloat16, 1000), (Dtype::Float16, 40_000)] {
        let of = |cast| {
            let params = Params { accumulator: Dtype::Float32, addend, cast, addend_value: 0.01, iterations };
            accumulate(&params, Device::Cpu)
        };
        let (implicit, explicit) = (of(Cast::Implicit)?, of(Cast::Explicit)?);
        ensure!(implicit == explicit, "{addend:?}: promoted {implicit:?}, converted {explicit:?}");
    }
    Verdict::passed("equal for float16 and bfloat16 addends")
}
