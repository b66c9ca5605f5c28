//! Statistics of repeated measurements: summaries, a rank test, and whether a timing has changed.
//!
//! Timings are skewed and have outliers, so comparisons rest on ranks and medians, never on means with a t-test.

use anyhow::{Result, ensure};
use serde::Serialize;

/// Chance of calling two samples of one distribution different; also one minus the confidence of an interval.
const ALPHA: f64 = 0.05;
/// The standard normal quantile: P(Z > z) is half of [`ALPHA`].
const Z: f64 = 1.959_963_985;

/// A relative difference below this has no practical importance.
///
/// A rank test sees only the spread *within* a run. Between two runs of one build on one machine, clocks, memory
/// placement and other users move a median by a few percent. Without this bound, a test with many samples would call
/// nearly every pair of runs changed.
const PRACTICAL_BOUND: f64 = 0.05;

/// Statistics of one noisy quantity for the report, in the unit of the samples.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Summary {
    pub n: usize,
    pub mean: f64,
    /// With n - 1; `None` for a single sample.
    pub std: Option<f64>,
    pub median: f64,
    pub min: f64,
    pub max: f64,
}

impl Summary {
    /// None for an empty slice.
    pub fn of(samples: &[f64]) -> Option<Self> {
        (!samples.is_empty()).then(|| Self {
            n: samples.len(),
            mean: mean(samples),
            std: (samples.len() > 1).then(|| std(samples)),
            median: median(samples),
            min: min(samples),
            max: max(samples),
        })
    }
}

/// How newer samples differ from older ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Change {
    /// The whole confidence interval lies within the practical bound: equivalence is shown.
    Same,
    /// The rank test rejects equality, and the ratio is below one by more than the bound.
    Faster,
    /// The rank test rejects equality, and the ratio is above one by more than the bound.
    Slower,
    /// Neither is shown: too few or too noisy samples.
    Indistinct,
}

/// The comparison of two samples of one positive quantity; `ratio` is newer over older.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Comparison {
    pub change: Change,
    /// Two-sided, of the Mann-Whitney test.
    pub p: f64,
    /// The Hodges-Lehmann estimate: the median of all pairwise ratios.
    pub ratio: f64,
    /// Ends of the confidence interval of `ratio`; none where the samples are too few for one.
    pub interval: Option<(f64, f64)>,
}

/// Compares `newer` with `older` at `ALPHA` and `PRACTICAL_BOUND`; every sample must be finite and above zero.
///
/// `Same` needs evidence too: the interval must lie inside the bound (two one-sided tests, Schuirmann 1987). Three noisy
/// samples are therefore `Indistinct`.
pub fn compare(older: &[f64], newer: &[f64]) -> Result<Comparison> {
    ensure!(!older.is_empty() && !newer.is_empty(), "nothing to compare: one of the two samples is empty");
    let fine = |x: &f64| x.is_finite() && *x > 0.0;
    ensure!(older.iter().chain(newer).all(fine), "a sample to compare is not a finite number above zero");
    let p = mann_whitney(older, newer).p;
    let (ratio, interval) = ratio_interval(older, newer);
    let within = |x: f64| (1.0 / (1.0 + PRACTICAL_BOUND)..=1.0 + PRACTICAL_BOUND).contains(&x);
    let change = match interval {
        Some((low, high)) if within(low) && within(high) => Change::Same,
        _ if p < ALPHA && !within(ratio) && ratio < 1.0 => Change::Faster,
        _ if p < ALPHA && !within(ratio) => Change::Slower,
        _ => Change::Indistinct,
    };
    Ok(Comparison { change, p, ratio, interval })
}

/// The arithmetic mean; NaN for an empty slice.
pub fn mean(x: &[f64]) -> f64 {
    x.iter().sum::<f64>() / x.len() as f64
}

/// The sample standard deviation, with n - 1; NaN below two samples.
pub fn std(x: &[f64]) -> f64 {
    let m = mean(x);
    let squares: f64 = x.iter().map(|v| (v - m).powi(2)).sum();
    (squares / (x.len() as f64 - 1.0)).sqrt()
}

/// Standard deviation over mean; NaN below two samples.
pub fn coefficient_of_variation(x: &[f64]) -> f64 {
    std(x) / mean(x)
}

/// The middle value, or the mean of the middle two; NaN for an empty slice.
pub fn median(x: &[f64]) -> f64 {
    let sorted = sorted(x);
    let Some(last) = sorted.len().checked_sub(1) else { return f64::NAN };
    let below = sorted[last / 2];
    below + (sorted[last.div_ceil(2)] - below) * 0.5
}

/// The smallest value; NaN for an empty slice.
pub fn min(x: &[f64]) -> f64 {
    x.iter().copied().fold(f64::NAN, f64::min)
}

/// The largest value; NaN for an empty slice.
pub fn max(x: &[f64]) -> f64 {
    x.iter().copied().fold(f64::NAN, f64::max)
}

/// The Mann-Whitney test of two independent samples.
#[derive(Debug, Clone, Copy, PartialEq)]
struct MannWhitney {
    /// Pairs (i, j) with a_i > b_j, ties counting one half.
    u: f64,
    /// Two-sided.
    p: f64,
}

/// Largest product of sample sizes whose null distribution is counted exactly; beyond it the normal limit is close.
const EXACT_PAIRS: usize = 2500;

/// Exact without ties up to 50 samples a side; else the normal approximation with tie and continuity corrections
/// (Mann and Whitney 1947; Lehmann, Nonparametrics, 1975). Empty samples give p = 1.
fn mann_whitney(a: &[f64], b: &[f64]) -> MannWhitney {
    let pairs = a.len() * b.len();
    let win = |x: f64, y: f64| if x > y { 1.0 } else { f64::from(x == y) * 0.5 };
    let u: f64 = a.iter().map(|&x| b.iter().map(|&y| win(x, y)).sum::<f64>()).sum();
    let smaller = u.min(pairs as f64 - u);
    let ties = tie_sum(a, b);
    let p = if pairs == 0 {
        1.0
    } else if ties == 0.0 && pairs <= EXACT_PAIRS {
        2.0 * lower_tail(a.len(), b.len())[smaller as usize]
    } else {
        let n = (a.len() + b.len()) as f64;
        let variance = pairs as f64 / 12.0 * (n + 1.0 - ties / (n * (n - 1.0)));
        let distance = (pairs as f64 / 2.0 - smaller - 0.5).max(0.0);
        if variance > 0.0 { 2.0 * normal_upper_tail(distance / variance.sqrt()) } else { 1.0 }
    };
    MannWhitney { u, p: p.min(1.0) }
}

/// The Hodges-Lehmann estimate of `newer / older` and its confidence interval by inverting the rank test.
///
/// Deterministic, and without the assumption of a normal distribution; it assumes that a change scales the distribution.
/// The interval runs between the order statistics of the pairwise ratios that the test would not reject.
fn ratio_interval(older: &[f64], newer: &[f64]) -> (f64, Option<(f64, f64)>) {
    let ratios = sorted(&newer.iter().flat_map(|n| older.iter().map(move |o| n / o)).collect::<Vec<_>>());
    let pairs = ratios.len();
    let rejected = if pairs <= EXACT_PAIRS {
        lower_tail(older.len(), newer.len()).iter().take_while(|tail| **tail <= ALPHA / 2.0).count()
    } else {
        let spread = (pairs as f64 * (older.len() + newer.len() + 1) as f64 / 12.0).sqrt();
        (pairs as f64 / 2.0 - Z * spread).max(0.0) as usize
    };
    let interval = (rejected > 0 && pairs > 0).then(|| (ratios[rejected - 1], ratios[pairs - rejected]));
    (median(&ratios), interval)
}

/// P(U <= u) under the null for u = 0 ..= m n, by counting the partitions of u into at most m parts of at most n.
fn lower_tail(m: usize, n: usize) -> Vec<f64> {
    // The generating function is the Gaussian binomial coefficient: multiply by (1 - q^(n+i)), divide by (1 - q^i).
    let mut count = vec![0.0_f64; m * n + 1];
    count[0] = 1.0;
    for i in 1..=m {
        for u in (n + i..count.len()).rev() {
            count[u] -= count[u - n - i];
        }
        for u in i..count.len() {
            count[u] += count[u - i];
        }
    }
    let total: f64 = count.iter().sum();
    let mut sum = 0.0;
    count.iter().map(|c| (sum += c / total, sum).1).collect()
}

/// The sum of t^3 - t over the groups of t equal values.
fn tie_sum(a: &[f64], b: &[f64]) -> f64 {
    let all = sorted(&[a, b].concat());
    let cube = |t: f64| t * t * t - t;
    all.chunk_by(|x, y| x == y).map(|group| cube(group.len() as f64)).sum()
}

/// P(Z > z) for z >= 0, to about 1e-7 (Abramowitz and Stegun 26.2.17).
fn normal_upper_tail(z: f64) -> f64 {
    let t = 1.0 / (1.0 + 0.231_641_9 * z);
    let coefficients = [0.319_381_530, -0.356_563_782, 1.781_477_937, -1.821_255_978, 1.330_274_429];
    let polynomial = coefficients.iter().rev().fold(0.0, |sum, c| (sum + c) * t);
    (-z * z / 2.0).exp() / (2.0 * std::f64::consts::PI).sqrt() * polynomial
}

fn sorted(x: &[f64]) -> Vec<f64> {
    let mut x = x.to_vec();
    x.sort_by(f64::total_cmp);
    x
}

#[cfg(test)]
mod tests {
    use super::*;

    fn close(a: f64, b: f64, tolerance: f64) {
        assert!((a - b).abs() <= tolerance, "{a} is not {b} within {tolerance}");
    }

    #[test]
    fn summaries_agree_with_hand_calculation() {
        let x = [2.0, 4.0, 4.0, 4.0, 5.0, 5.0, 7.0, 9.0];
        let s = Summary::of(&x).unwrap();
        assert_eq!((s.n, s.mean, s.median, s.min, s.max), (8, 5.0, 4.5, 2.0, 9.0));
        close(s.std.unwrap(), (32.0_f64 / 7.0).sqrt(), 1e-15);
        close(coefficient_of_variation(&x), (32.0_f64 / 7.0).sqrt() / 5.0, 1e-15);
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
    }

    #[test]
    fn statistics_of_too_few_samples_are_none_or_nan() {
        assert_eq!(Summary::of(&[]), None);
        assert_eq!(Summary::of(&[3.0]).unwrap().std, None);
        assert!(mean(&[]).is_nan() && median(&[]).is_nan() && min(&[]).is_nan() && std(&[1.0]).is_nan());
    }

    /// P(U = u) = number of arrangements / C(m + n, m), counted by hand for 2 and 3: 1 1 2 2 2 1 1 of 10.
    #[test]
    fn the_null_distribution_is_counted_exactly() {
        let expected = [0.1, 0.2, 0.4, 0.6, 0.8, 0.9, 1.0];
        for (tail, want) in lower_tail(2, 3).iter().zip(expected) {
            close(*tail, want, 1e-15);
        }
        assert_eq!(lower_tail(3, 5).len(), 16);
        let tail = lower_tail(50, 50);
        close(tail[1249] + tail[1250], 1.0, 1e-12); // symmetric about 1250, so the counting has lost no digits
        let sigma = (2500.0_f64 / 12.0 * 101.0).sqrt();
        close(tail[1250] - tail[1249], 1.0 / (sigma * (2.0 * std::f64::consts::PI).sqrt()), 2e-5);
    }

    #[test]
    fn the_exact_p_value_of_complete_separation_is_right() {
        let test = mann_whitney(&[1.0, 2.0, 3.0, 4.0, 5.0], &[6.0, 7.0, 8.0, 9.0, 10.0]);
        assert_eq!(test.u, 0.0);
        close(test.p, 2.0 / 252.0, 1e-12);
        assert_eq!(mann_whitney(&[1.0, 3.0], &[2.0]).p, 1.0);
    }

    /// Worked by hand: a = 1 2 2 3, b = 2 3 4 5; U = 2.5, ties 3^3-3 + 2^3-2 = 30, variance 16/12 (9 - 30/56).
    #[test]
    fn ties_take_the_corrected_normal_approximation() {
        let test = mann_whitney(&[1.0, 2.0, 2.0, 3.0], &[2.0, 3.0, 4.0, 5.0]);
        assert_eq!(test.u, 2.5);
        let z = (8.0 - 2.5 - 0.5) / (16.0_f64 / 12.0 * (9.0 - 30.0 / 56.0)).sqrt();
        close(test.p, 2.0 * normal_upper_tail(z), 1e-12);
        assert_eq!(mann_whitney(&[1.0, 1.0], &[1.0, 1.0]).p, 1.0);
    }

    #[test]
    fn the_normal_tail_hits_known_points() {
        close(normal_upper_tail(0.0), 0.5, 1e-7);
        close(normal_upper_tail(Z), ALPHA / 2.0, 1e-7);
    }

    #[test]
    fn exact_and_approximate_p_values_agree() {
        let a: Vec<f64> = (0..50).map(|i| i as f64 * 2.0).collect();
        let b: Vec<f64> = (0..50).map(|i| i as f64 * 2.0 + 13.0).collect();
        let exact = mann_whitney(&a, &b).p;
        let z = (mann_whitney(&a, &b).u - 1250.0).abs() - 0.5;
        close(exact, 2.0 * normal_upper_tail(z / (2500.0_f64 / 12.0 * 101.0).sqrt()), 2e-3);
    }

    /// 5 against 5: P(U <= 2) = 4/252 <= 0.025 < P(U <= 3), so the interval leaves out two ratios on either side.
    #[test]
    fn the_interval_inverts_the_test() {
        let older = [10.0, 11.0, 12.0, 13.0, 14.0];
        let newer = older.map(|x| 2.0 * x);
        let (ratio, interval) = ratio_interval(&older, &newer);
        close(ratio, 2.0, 1e-12);
        let (low, high) = interval.unwrap();
        close(low * high, 4.0, 1e-12);
        let ratios = sorted(&newer.iter().flat_map(|n| older.iter().map(move |o| n / o)).collect::<Vec<_>>());
        assert_eq!((low, high), (ratios[2], ratios[22]));
        assert_eq!(ratio_interval(&older[..3], &newer[..3]).1, None);
    }

    /// A fixed jitter of about 1 %, with one outlier as timings have.
    fn timings(scale: f64, n: usize) -> Vec<f64> {
        (0..n).map(|i| scale * (1.0 + ((i * 37) % 19) as f64 * 1e-3 + if i == 3 { 0.8 } else { 0.0 })).collect()
    }

    #[test]
    fn a_change_is_claimed_only_with_evidence() {
        let verdict = |a: &[f64], b: &[f64]| compare(a, b).unwrap().change;
        assert_eq!(verdict(&timings(1.0, 15), &timings(1.0004, 15)), Change::Same);
        assert_eq!(verdict(&timings(1.0, 15), &timings(1.03, 15)), Change::Same); // shown to differ, but by too little
        assert_eq!(verdict(&timings(1.0, 15), &timings(1.3, 15)), Change::Slower);
        assert_eq!(verdict(&timings(1.0, 15), &timings(0.7, 15)), Change::Faster);
        assert_eq!(verdict(&timings(1.0, 3), &timings(1.5, 3)), Change::Indistinct); // p is at best 0.1
        assert_eq!(verdict(&[1.0, 3.0, 5.0, 7.0], &[2.0, 4.0, 6.0, 8.0]), Change::Indistinct);
    }

    #[test]
    fn comparing_is_antisymmetric_and_refuses_invalid_samples() {
        let (a, b) = (timings(1.0, 10), timings(1.4, 12));
        let (there, back) = (compare(&a, &b).unwrap(), compare(&b, &a).unwrap());
        assert_eq!((there.change, back.change), (Change::Slower, Change::Faster));
        close(there.p, back.p, 1e-12);
        close(there.ratio * back.ratio, 1.0, 1e-12);
        assert!(compare(&a, &[]).is_err() && compare(&a, &[f64::NAN]).is_err() && compare(&[0.0], &b).is_err());
    }
}
