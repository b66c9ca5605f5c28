//! Layer normalisation with every step rounded to a narrow format, to find the steps that need float32.

use crate::bench::dtype::{Dtype, Format};

/// Features of one normalised vector.
pub const FEATURES: usize = 1024;
/// PyTorch's default.
pub const EPS: f64 = 1e-5;

/// Inputs spread evenly over `offset` plus or minus `spread`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Input {
    pub name: &'static str,
    pub offset: f64,
    pub spread: f64,
}

pub const INPUTS: [Input; 3] = [
    Input { name: "ordinary", offset: 0.0, spread: 1.0 },
    Input { name: "large", offset: 0.0, spread: 500.0 },
    Input { name: "off centre", offset: 100.0, spread: 1.0 },
];

/// Where the low precision ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scheme {
    /// Every sum, product and root is rounded to the input's format.
    Everything,
    /// Float32 from the loaded input to the stored output, as autocast and fused kernels do it.
    StatisticsInFloat32,
}

/// Without gain and bias; `mean` and `variance` may be infinite, and `output` not a number.
#[derive(Debug, Clone, PartialEq)]
pub struct Normalised {
    pub mean: f64,
    pub variance: f64,
    pub output: Vec<f64>,
}

/// How a vector is normalised. A parameter of the check, so that tests can pass a wrong one.
pub type Normalise = fn(&[f64], Format, Scheme) -> Normalised;

/// (x - mean) / sqrt(variance + eps), with each operation rounded according to the scheme.
///
/// The input is taken to hold numbers of `format`; the output does.
pub fn normalise(x: &[f64], format: Format, scheme: Scheme) -> Normalised {
    let inner = if scheme == Scheme::Everything { format } else { Dtype::Float32.format() };
    let round = |x: f64| inner.round(x);
    let sum = |x: &[f64]| x.iter().fold(0.0, |sum, x| round(sum + x));
    let over_n = round(1.0 / x.len() as f64);
    let mean = round(sum(x) * over_n);
    let centred: Vec<f64> = x.iter().map(|x| round(x - mean)).collect();
    let squares: Vec<f64> = centred.iter().map(|d| round(d * d)).collect();
    let variance = round(sum(&squares) * over_n);
    let scale = round(1.0 / round(round(variance + round(EPS)).sqrt()));
    let output = centred.iter().map(|d| format.round(round(d * scale))).collect();
    Normalised { mean, variance, output }
}

/// One vector normalised under one scheme, beside float64.
#[derive(Debug, Clone, PartialEq)]
pub struct Example {
    pub input: Input,
    pub dtype: Dtype,
    pub scheme: Scheme,
    /// `None` for a number outside the format's range. The variance and the error likewise.
    pub mean: Option<f64>,
    pub variance: Option<f64>,
    pub exact_mean: f64,
    pub exact_variance: f64,
    /// Of the outputs.
    pub largest_error: Option<f64>,
}

/// Each input in each format under each scheme.
pub fn examples() -> Vec<Example> {
    let finite = |x: f64| x.is_finite().then_some(x);
    let mut examples = Vec::new();
    for input in INPUTS {
        for dtype in [Dtype::Float16, Dtype::Bfloat16] {
            let x = vector(&input, dtype.format());
            let exact = exact(&x);
            for scheme in [Scheme::Everything, Scheme::StatisticsInFloat32] {
                let got = normalise(&x, dtype.format(), scheme);
                examples.push(Example {
                    input,
                    dtype,
                    scheme,
                    mean: finite(got.mean),
                    variance: finite(got.variance),
                    exact_mean: exact.mean,
                    exact_variance: exact.variance,
                    largest_error: finite(largest_error(&got.output, &exact.output)),
                });
            }
        }
    }
    examples
}

/// Numbers of `format` in a fixed, well-mixed order: multiples of 1 / 512 visited with an odd stride.
pub fn vector(input: &Input, format: Format) -> Vec<f64> {
    let spot = |i: usize| ((i * 389) % FEATURES) as f64 / (FEATURES as f64 / 2.0) - 1.0;
    (0..FEATURES).map(|i| format.round(input.offset + input.spread * spot(i))).collect()
}

/// The same in float64 without any rounding of our own.
pub fn exact(x: &[f64]) -> Normalised {
    let n = x.len() as f64;
    let mean = x.iter().sum::<f64>() / n;
    let variance = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n;
    Normalised { mean, variance, output: x.iter().map(|x| (x - mean) / (variance + EPS).sqrt()).collect() }
}

/// Infinite where an output is not a number.
pub fn largest_error(got: &[f64], expected: &[f64]) -> f64 {
    let errors = got.iter().zip(expected).map(|(a, b)| (a - b).abs());
    errors.fold(0.0, |largest, e| if e.is_nan() { f64::INFINITY } else { largest.max(e) })
}
