//! Floating-point formats and their rounding in software, independent of any tensor library.

use serde::{Deserialize, Serialize};
use tch::Kind;

use crate::model::Precision;

/// The data types of the low-precision problems.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Dtype {
    Float32,
    Float16,
    Bfloat16,
}

/// A binary format as in IEEE 754: normal and subnormal numbers, and infinity beyond the largest.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Format {
    /// Binary digits of the significand, including the leading one.
    pub significand_bits: i32,
    /// The exponent of the smallest normal number.
    pub min_exponent: i32,
    pub largest: f64,
}

impl Dtype {
    pub const ALL: [Self; 3] = [Self::Float32, Self::Float16, Self::Bfloat16];

    pub fn kind(self) -> Kind {
        match self {
            Self::Float32 => Kind::Float,
            Self::Float16 => Kind::Half,
            Self::Bfloat16 => Kind::BFloat16,
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::Float32 => "float32",
            Self::Float16 => "float16",
            Self::Bfloat16 => "bfloat16",
        }
    }

    /// IEEE 754-2019 for binary32 and binary16; bfloat16 is binary32 with 16 fewer digits.
    pub fn format(self) -> Format {
        match self {
            Self::Float32 => Format { significand_bits: 24, min_exponent: -126, largest: f32::MAX as f64 },
            Self::Float16 => Format { significand_bits: 11, min_exponent: -14, largest: 65_504.0 },
            Self::Bfloat16 => {
                Format { significand_bits: 8, min_exponent: -126, largest: 255.0 * 2.0_f64.powi(127 - 7) }
            }
        }
    }
}

impl From<Precision> for Dtype {
    fn from(precision: Precision) -> Self {
        match precision {
            Precision::Float32 => Self::Float32,
            Precision::Bfloat16 => Self::Bfloat16,
        }
    }
}

impl Format {
    /// The distance from `x` to the next larger number of this format; `x` finite.
    pub fn ulp(&self, x: f64) -> f64 {
        let exponent = if x == 0.0 { self.min_exponent } else { exponent(x).max(self.min_exponent) };
        2.0_f64.powi(exponent - (self.significand_bits - 1))
    }

    /// The nearest number of this format, ties to even; infinity beyond the largest.
    ///
    /// For sums of two of its own numbers computed in f64 this is the correctly rounded sum: 53 digits are more than
    /// twice the significand's plus two, so rounding twice does no harm (Figueroa 1995).
    pub fn round(&self, x: f64) -> f64 {
        if !x.is_finite() {
            return x;
        }
        let ulp = self.ulp(x);
        let rounded = (x / ulp).round_ties_even() * ulp;
        if rounded.abs() > self.largest { f64::INFINITY.copysign(x) } else { rounded }
    }

    /// The first power of two at which adding `x` repeatedly stops changing the sum: half an ulp is at least x.
    ///
    /// A power of two has an even significand, so a tie rounds back to it.
    pub fn stagnates_at(&self, x: f64) -> f64 {
        let mut sum = 2.0_f64.powi(exponent(x));
        while self.round(sum + x) != sum {
            sum *= 2.0;
        }
        sum
    }
}

/// The power of two of the leading digit; `x` finite and not zero.
fn exponent(x: f64) -> i32 {
    let biased = ((x.to_bits() >> 52) & 0x7ff) as i32;
    // A subnormal f64 lies below every number of the formats here.
    if biased == 0 { -1075 } else { biased - 1023 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn float32_rounds_as_the_processor_does() {
        let format = Dtype::Float32.format();
        for x in [0.01, 1.0 / 3.0, -2.5e-40, 1e-46, 16_777_217.0, 3.0e38, 3.5e38, -0.0] {
            assert_eq!(format.round(x), f64::from(x as f32), "{x}");
        }
    }

    #[test]
    fn the_half_formats_round_to_known_values() {
        let (half, brain) = (Dtype::Float16.format(), Dtype::Bfloat16.format());
        assert_eq!(half.round(0.01), 0.010_002_136_230_468_75);
        assert_eq!(brain.round(0.01), 0.010_009_765_625);
        assert_eq!((half.round(65_519.0), half.round(65_520.0)), (65_504.0, f64::INFINITY));
        assert_eq!(half.round(6e-8), 2.0_f64.powi(-24)); // the smallest subnormal
        assert_eq!((half.round(2049.0), half.round(2051.0)), (2048.0, 2052.0)); // ties to even
        assert_eq!(brain.round(257.0), 256.0);
    }

    #[test]
    fn sums_stagnate_where_half_an_ulp_exceeds_the_addend() {
        let at = |dtype: Dtype, x: f64| dtype.format().stagnates_at(dtype.format().round(x));
        assert_eq!((at(Dtype::Float16, 0.01), at(Dtype::Bfloat16, 0.01)), (32.0, 4.0));
        assert_eq!((at(Dtype::Float16, 0.001), at(Dtype::Bfloat16, 0.001)), (4.0, 0.5));
        assert_eq!(at(Dtype::Float32, 1.0), 16_777_216.0);
    }
}
