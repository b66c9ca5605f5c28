//! Axes of a plot: the range of the data, round marks on it, and how a mark is written.

use crate::harness::answer::format::grouped;

/// One axis: maps data values to positions in points.
pub struct Axis {
    log: bool,
    low: f64,
    high: f64,
    pub ticks: Vec<f64>,
}

impl Axis {
    /// Round steps; `zero` makes the axis begin there, as lengths of bars must.
    pub fn linear(values: &[f64], zero: bool) -> Self {
        let (mut low, mut high) = range(values);
        if zero {
            (low, high) = (low.min(0.0), high.max(0.0));
        }
        if low == high {
            (low, high) = (low - 0.5, high + 0.5);
        }
        let raw = (high - low) / 5.0;
        let power = 10f64.powf(raw.log10().floor());
        let step = [1.0, 2.0, 2.5, 5.0, 10.0].into_iter().map(|m| m * power).find(|s| *s >= raw * 0.999);
        let step = step.unwrap_or(10.0 * power);
        if zero {
            (low, high) = ((low / step).floor() * step, (high / step - 1e-9).ceil() * step);
        }
        let first = (low / step - 1e-9).ceil() as i64;
        let last = (high / step + 1e-9).floor() as i64;
        Self { log: false, low, high, ticks: (first..=last).map(|i| i as f64 * step).collect() }
    }

    /// Marks at powers of two if all values are powers of two, else at 1, 2, 5 or whole decades.
    pub fn log(values: &[f64]) -> Self {
        let (low, high) = range(values);
        let margin = ((high / low).ln() * 0.06).max(0.15).exp();
        let decades = (high / low).log10();
        let two = values.iter().all(|v| v.log2().fract() == 0.0) && high / low <= 2f64.powi(12);
        let (low, high) = if two { (low, high) } else { (low / margin, high * margin) };
        let (low, high) = if low == high { (low / 2.0, high * 2.0) } else { (low, high) };
        let candidates: Vec<f64> = if two {
            (-40..=60).map(|e| 2f64.powi(e)).collect()
        } else {
            let steps: &[f64] = if decades < 3.2 { &[1.0, 2.0, 5.0] } else { &[1.0] };
            (-18..=24).flat_map(|e| steps.iter().map(move |s| format!("{s}e{e}").parse().unwrap_or(1.0))).collect()
        };
        let inside = |t: &f64| *t >= low * 0.999_999 && *t <= high * 1.000_001;
        Self { log: true, low, high, ticks: candidates.into_iter().filter(inside).collect() }
    }

    /// The position of a value between `from` and `to`.
    pub fn at(&self, value: f64, from: f64, to: f64) -> f64 {
        let part = match self.log {
            true => (value / self.low).ln() / (self.high / self.low).ln(),
            false => (value - self.low) / (self.high - self.low),
        };
        from + part * (to - from)
    }
}

fn range(values: &[f64]) -> (f64, f64) {
    values.iter().fold((f64::INFINITY, f64::NEG_INFINITY), |(l, h), v| (l.min(*v), h.max(*v)))
}

/// A tick's number: as many decimals as the ticks need, groups of three, powers of ten beyond.
pub fn label(tick: f64, ticks: &[f64]) -> String {
    let size = tick.abs();
    if size != 0.0 && !(1e-4..1e7).contains(&size) {
        let text = format!("{tick:e}");
        let (mantissa, exponent) = text.split_once('e').unwrap_or((&text, "0"));
        let power: String = exponent.chars().map(superscript).collect();
        return if mantissa == "1" { format!("10{power}") } else { format!("{mantissa}·10{power}") };
    }
    let own = |t: f64| {
        (0..=6)
            .find(|d| (t * 10f64.powi(*d)).fract().abs() < 1e-6 || (t * 10f64.powi(*d)).fract().abs() > 1.0 - 1e-6)
            .unwrap_or(6)
    };
    let even = ticks.len() > 2 && (ticks[1] - ticks[0] - (ticks[2] - ticks[1])).abs() < 1e-9 * size.max(1e-9);
    let digits = if even { ticks.iter().map(|t| own(*t)).max().unwrap_or(0) } else { own(tick) } as usize;
    let text = if digits == 0 { grouped(tick, 0) } else { format!("{tick:.digits$}") };
    text.replace('-', "−")
}

fn superscript(digit: char) -> char {
    match digit {
        '-' => '⁻',
        '1' => '¹',
        '2' => '²',
        '3' => '³',
        d => d.to_digit(10).and_then(|d| char::from_u32(0x2070 + d)).unwrap_or(d),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn powers_of_two_are_marked_at_every_power_between_them() {
        assert_eq!(Axis::log(&[256.0, 1024.0, 4096.0]).ticks, [256.0, 512.0, 1024.0, 2048.0, 4096.0]);
    }

    #[test]
    fn other_logarithmic_values_are_marked_at_one_two_five_or_whole_decades() {
        assert_eq!(Axis::log(&[0.9, 11.0]).ticks, [1.0, 2.0, 5.0, 10.0]);
        assert_eq!(Axis::log(&[3e-4, 2e3]).ticks, [1e-3, 1e-2, 0.1, 1.0, 10.0, 100.0, 1e3]);
    }

    #[test]
    fn bars_begin_at_zero_and_steps_are_round() {
        let axis = Axis::linear(&[12.0, 110.0], true);
        assert_eq!(axis.ticks, [0.0, 25.0, 50.0, 75.0, 100.0, 125.0]);
        assert_eq!(axis.at(0.0, 100.0, 0.0), 100.0);
        assert_eq!(axis.at(125.0, 100.0, 0.0), 0.0);
    }

    #[test]
    fn marks_are_written_with_the_decimals_and_groups_they_need() {
        let write = |ticks: &[f64]| ticks.iter().map(|t| label(*t, ticks)).collect::<Vec<_>>();
        assert_eq!(write(&[0.0, 0.5, 1.0]), ["0.0", "0.5", "1.0"]);
        assert_eq!(write(&[-200.0, 0.0, 200.0]), ["−200", "0", "200"]);
        assert_eq!(write(&[-2e3, 0.0, 2e3]), ["−2,000", "0", "2,000"]);
        assert_eq!(write(&[512.0, 1024.0, 16384.0, 1048576.0]), ["512", "1,024", "16,384", "1,048,576"]);
        assert_eq!(write(&[1e-6, 1.0, 1e9]), ["10⁻⁶", "1", "10⁹"]);
    }
}
