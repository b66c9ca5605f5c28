//! Joules a call and the SM clock, from an energy counter that is read while calls follow one another.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize};

use super::nvml;
use super::timing::BusyCalls;
use crate::harness::samples::Samples;

/// Between two readings of the counter: far less than its own steps.
const EVERY: Duration = Duration::from_millis(1);
/// Readings of the counter for one of the clock.
const CLOCK_EVERY: usize = 10;
/// The share of the busy time before the first step that counts, in which power and clock settle.
const SETTLING: f64 = 0.2;

/// Of calls of one kind, back to back.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Energy {
    /// A call's: one sample.
    pub joules: Samples,
    /// Each reading of the clock meanwhile.
    pub sm_clock: Samples,
}

/// The device's counter of energy in joules, and its SM clock in hertz.
#[derive(Clone, Copy)]
pub struct EnergyMeter<'a> {
    pub energy_j: &'a (dyn Fn() -> Result<f64> + Sync),
    pub sm_clock_hz: &'a (dyn Fn() -> Result<f64> + Sync),
}

impl EnergyMeter<'static> {
    /// The first GPU's.
    ///
    /// Errors: it has no counter.
    pub fn of_gpu() -> Result<Self> {
        nvml::energy_j()?;
        Ok(Self { energy_j: &nvml::energy_j, sm_clock_hz: &nvml::sm_clock_hz })
    }
}

/// When the counter moved, with its new value, and when the clock was read.
#[derive(Default)]
struct Readings {
    joules: Vec<(Instant, f64)>,
    clock_hz: Vec<(Instant, f64)>,
}

impl EnergyMeter<'_> {
    /// What a call of `run` uses. Its busy time must end when it returns.
    ///
    /// The counter moves in steps of up to a tenth of a second. Power is taken between two of its steps while the device
    /// is busy, so that neither a step nor an idle device counts, and a call's energy is power times its time.
    ///
    /// Errors: those of `run` and of the readings; a busy time with fewer than two steps of the counter.
    pub fn measure(self, run: impl FnOnce() -> Result<BusyCalls>) -> Result<Energy> {
        let done = AtomicBool::new(false);
        let (ran, end, readings) = std::thread::scope(|scope| {
            let sampler = scope.spawn(|| self.sample(&done));
            let ran = run();
            let end = Instant::now();
            done.store(true, Ordering::Relaxed);
            (ran, end, sampler.join())
        });
        let BusyCalls { calls, seconds } = ran?;
        let readings = readings.ok().context("the thread that reads the counter panicked")??;
        let start = end.checked_sub(Duration::from_secs_f64((1.0 - SETTLING) * seconds)).unwrap_or(end);
        let is_busy = |(at, _): &&(Instant, f64)| start <= *at && *at <= end;
        let steps: Vec<_> = readings.joules.iter().filter(is_busy).collect();
        ensure!(steps.len() >= 2, "the energy counter moved {} times in {seconds:.2} s; it takes two", steps.len());
        let (first, last) = (steps[0], steps[steps.len() - 1]);
        let power_w = (last.1 - first.1) / (last.0 - first.0).as_secs_f64();
        let clock_hz = readings.clock_hz.iter().filter(is_busy).map(|(_, hz)| *hz);
        Ok(Energy {
            joules: Samples::joules(vec![power_w * seconds / calls as f64])?,
            sm_clock: Samples::hertz(clock_hz.collect()).context("the SM clock")?,
        })
    }

    fn sample(self, done: &AtomicBool) -> Result<Readings> {
        let mut readings = Readings::default();
        let mut before = (self.energy_j)()?;
        for count in 0.. {
            if done.load(Ordering::Relaxed) {
                break;
            }
            let joules = (self.energy_j)()?;
            if joules != before {
                readings.joules.push((Instant::now(), joules));
                before = joules;
            }
            if count % CLOCK_EVERY == 0 {
                readings.clock_hz.push((Instant::now(), (self.sm_clock_hz)()?));
            }
            std::thread::sleep(EVERY);
        }
        Ok(readings)
    }
}

#[cfg(test)]
mod tests {
    use anyhow::bail;

    use super::*;

    /// Idle for 50 ms, then busy for a quarter of a second.
    fn busy() -> Result<BusyCalls> {
        std::thread::sleep(Duration::from_millis(50));
        let start = Instant::now();
        std::thread::sleep(Duration::from_millis(250));
        Ok(BusyCalls { calls: 100, seconds: start.elapsed().as_secs_f64() })
    }

    #[test]
    fn a_calls_energy_is_the_busy_power_times_its_time() {
        let start = Instant::now();
        // 100 W for a device that is idle, then 500 W, in steps of 20 ms.
        let energy_j = || {
            let at = (start.elapsed().as_millis() / 20 * 20) as f64 / 1e3;
            Ok(100.0 * at.min(0.05) + 500.0 * (at - 0.05).max(0.0))
        };
        let meter = EnergyMeter { energy_j: &energy_j, sm_clock_hz: &|| Ok(1.5e9) };
        let mut call_s = 0.0;
        let measured = meter.measure(|| busy().inspect(|busy| call_s = busy.seconds / busy.calls as f64));
        let Energy { joules, sm_clock } = measured.unwrap();
        let [joules] = joules.samples[..] else { panic!("{joules:?}") };
        // 500 W. A step is seen a few milliseconds late on a busy machine.
        assert!((350.0..700.0).contains(&(joules / call_s)), "{joules} J in {call_s} s");
        assert!(sm_clock.samples.len() > 2 && sm_clock.samples.iter().all(|hz| *hz == 1.5e9), "{sm_clock:?}");
    }

    #[test]
    fn a_counter_that_does_not_move_and_an_error_are_told() {
        let meter = |energy_j| EnergyMeter { energy_j, sm_clock_hz: &|| Ok(1.5e9) };
        let error = meter(&|| Ok(7.0)).measure(busy).unwrap_err().to_string();
        assert!(error.contains("moved 0 times"), "{error}");
        assert!(meter(&|| bail!("no counter")).measure(busy).unwrap_err().to_string().contains("no counter"));
        assert!(meter(&|| Ok(7.0)).measure(|| bail!("a bug")).unwrap_err().to_string().contains("a bug"));
    }
}
