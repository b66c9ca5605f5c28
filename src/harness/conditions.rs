//! The condition of the device while a case is measured: clocks, power, temperature and throttle reasons.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};

use super::stats::Summary;

/// Interval between readings while a case runs. Long enough not to disturb the case.
const EVERY: Duration = Duration::from_millis(100);

/// One reading of the device's sensor.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Reading {
    pub sm_clock_hz: f64,
    pub memory_clock_hz: f64,
    /// Averaged by the driver, over about a second on recent GPUs.
    pub power_w: f64,
    pub temperature_c: f64,
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub throttle: BTreeSet<Throttle>,
}

/// Why the device's clocks are below their maximum. The names are those of NVML.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Throttle {
    GpuIdle,
    ApplicationsClocksSetting,
    SwPowerCap,
    HwSlowdown,
    SyncBoost,
    SwThermalSlowdown,
    HwThermalSlowdown,
    HwPowerBrakeSlowdown,
    DisplayClockSetting,
}

impl Throttle {
    /// Whether a figure measured meanwhile must be measured again. The power cap is normal under matrix products, and
    /// an idle GPU is waiting for work.
    pub fn spoils(self) -> bool {
        matches!(
            self,
            Self::HwSlowdown | Self::SwThermalSlowdown | Self::HwThermalSlowdown | Self::HwPowerBrakeSlowdown
        )
    }

    /// The reason in a sentence: "thermal slowdown (software)".
    pub fn description(self) -> &'static str {
        match self {
            Self::GpuIdle => "idle",
            Self::ApplicationsClocksSetting => "application clocks",
            Self::SwPowerCap => "power cap",
            Self::HwSlowdown => "hardware slowdown",
            Self::SyncBoost => "sync boost",
            Self::SwThermalSlowdown => "thermal slowdown (software)",
            Self::HwThermalSlowdown => "thermal slowdown (hardware)",
            Self::HwPowerBrakeSlowdown => "power brake",
            Self::DisplayClockSetting => "display clocks",
        }
    }
}

/// Reads the sensor. `None` without a device, or if the device reports no readings.
pub type Sensor<'a> = &'a dyn Fn() -> Option<Reading>;

/// The readings before, during and after one case.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Conditions {
    pub before: Reading,
    /// `None` if the case ended before the first reading.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub during: Option<During>,
    pub after: Reading,
    /// Why a first measurement was discarded. The figures are those of the second measurement.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub remeasured_after: BTreeSet<Throttle>,
}

/// A summary of the readings during a case.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct During {
    pub readings: usize,
    pub sm_clock_hz: ReadingRange,
    pub power_w: ReadingRange,
    pub max_temperature_c: f64,
    /// All throttle reasons of these readings.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub throttle: BTreeSet<Throttle>,
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReadingRange {
    pub min: f64,
    pub median: f64,
    pub max: f64,
}

impl ReadingRange {
    fn is_possible(&self) -> bool {
        0.0 <= self.min && self.min <= self.median && self.median <= self.max
    }
}

impl Conditions {
    /// Errors: a range that does not rise, or a clock or a power below zero.
    pub fn validate(&self) -> Result<()> {
        let readings = [&self.before, &self.after].into_iter();
        let of_readings = readings.flat_map(|reading| [reading.sm_clock_hz, reading.memory_clock_hz, reading.power_w]);
        let ranges = self.during.iter().flat_map(|during| [during.sm_clock_hz, during.power_w]);
        ensure!(
            of_readings.into_iter().all(|x| x >= 0.0) && ranges.into_iter().all(|range| range.is_possible()),
            "its conditions have a clock or a power below zero, or a range that does not rise"
        );
        Ok(())
    }

    /// The reasons to measure the case again, without those that held before the case began.
    pub fn spoiled_by(&self) -> BTreeSet<Throttle> {
        let during = self.during.iter().flat_map(|during| &during.throttle);
        during.chain(&self.after.throttle).copied().filter(|reason| reason.spoils()).collect()
    }
}

/// Reads the sensor from the start to the end of one case.
pub struct ConditionsMonitor<'a> {
    sensor: Sensor<'a>,
    before: Option<Reading>,
    during: RefCell<Vec<Reading>>,
    last: Cell<Instant>,
}

impl<'a> ConditionsMonitor<'a> {
    pub fn start(sensor: Sensor<'a>) -> Self {
        Self { sensor, before: sensor(), during: RefCell::default(), last: Cell::new(Instant::now()) }
    }

    /// Takes another reading if the interval has passed. Call it as often as is convenient.
    pub fn poll(&self) {
        self.poll_at(Instant::now());
    }

    fn poll_at(&self, now: Instant) {
        if self.before.is_some() && now.duration_since(self.last.get()) >= EVERY {
            self.during.borrow_mut().extend((self.sensor)());
            self.last.set(now);
        }
    }

    /// `None` without a sensor.
    pub fn end(self) -> Option<Conditions> {
        let (before, after) = (self.before?, (self.sensor)()?);
        let during = summary(&self.during.into_inner());
        Some(Conditions { before, during, after, remeasured_after: BTreeSet::new() })
    }
}

fn summary(readings: &[Reading]) -> Option<During> {
    let range = |value: fn(&Reading) -> f64| {
        let Summary { min, median, max, .. } = Summary::of(&readings.iter().map(value).collect::<Vec<_>>())?;
        Some(ReadingRange { min, median, max })
    };
    Some(During {
        readings: readings.len(),
        sm_clock_hz: range(|r| r.sm_clock_hz)?,
        power_w: range(|r| r.power_w)?,
        max_temperature_c: range(|r| r.temperature_c)?.max,
        throttle: readings.iter().flat_map(|r| &r.throttle).copied().collect(),
    })
}

/// "thermal slowdown (software), power brake".
pub fn in_words<'a>(reasons: impl IntoIterator<Item = &'a Throttle>) -> String {
    reasons.into_iter().map(|reason| reason.description()).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reading(sm_clock_hz: f64, throttle: &[Throttle]) -> Reading {
        let throttle = throttle.iter().copied().collect();
        Reading { sm_clock_hz, memory_clock_hz: 3.2e9, power_w: sm_clock_hz / 1e7, temperature_c: 40.0, throttle }
    }

    #[test]
    fn a_monitor_keeps_the_range_and_every_reason() {
        let clocks = [1.0e9, 1.9e9, 1.5e9, 1.8e9, 1.2e9].map(|hz| hz as u64);
        let next = Cell::new(0);
        let sensor = || {
            let i = next.replace(next.get() + 1);
            let reasons: &[Throttle] = if i == 2 { &[Throttle::SwPowerCap] } else { &[] };
            Some(reading(clocks[i] as f64, reasons))
        };
        let watch = ConditionsMonitor::start(&sensor);
        let start = watch.last.get();
        for k in 1..=3 {
            watch.poll_at(start + k * EVERY - Duration::from_millis(1));
            watch.poll_at(start + k * EVERY);
        }
        let conditions = watch.end().unwrap();
        let during = conditions.during.clone().unwrap();
        assert_eq!((conditions.before.sm_clock_hz, conditions.after.sm_clock_hz), (1.0e9, 1.2e9));
        assert_eq!((during.readings, during.sm_clock_hz), (3, ReadingRange { min: 1.5e9, median: 1.8e9, max: 1.9e9 }));
        assert_eq!(during.throttle.iter().copied().collect::<Vec<_>>(), [Throttle::SwPowerCap]);
        assert!(conditions.spoiled_by().is_empty(), "a power cap is a card's normal state");
    }

    #[test]
    fn a_short_case_has_no_readings_during_it_and_no_sensor_gives_no_conditions() {
        let sensor = || Some(reading(1e9, &[Throttle::HwSlowdown]));
        let watch = ConditionsMonitor::start(&sensor);
        watch.poll_at(watch.last.get() + EVERY / 2);
        let conditions = watch.end().unwrap();
        assert_eq!(conditions.during, None);
        assert_eq!(in_words(&conditions.spoiled_by()), "hardware slowdown");
        assert_eq!(ConditionsMonitor::start(&|| None).end(), None);
    }

    #[test]
    fn a_slowdown_before_the_case_began_does_not_spoil_it() {
        let first = Cell::new(true);
        let sensor = || Some(reading(1e9, if first.replace(false) { &[Throttle::HwThermalSlowdown] } else { &[] }));
        assert!(ConditionsMonitor::start(&sensor).end().unwrap().spoiled_by().is_empty());
    }

    #[test]
    fn readings_that_no_sensor_gives_are_refused() {
        let with = |change: fn(&mut Conditions)| {
            let during = summary(&[reading(1.5e9, &[]), reading(1.7e9, &[])]);
            let (before, after) = (reading(1e9, &[]), reading(1.2e9, &[]));
            let mut conditions = Conditions { before, during, after, remeasured_after: BTreeSet::new() };
            change(&mut conditions);
            conditions.validate()
        };
        with(|_| {}).unwrap();
        let changes: [fn(&mut Conditions); 3] = [
            |conditions| conditions.before.sm_clock_hz = -1e300,
            |conditions| conditions.after.power_w = -1.0,
            |conditions| conditions.during.as_mut().unwrap().power_w.min = 1e300,
        ];
        for change in changes {
            let said = with(change).unwrap_err().to_string();
            assert!(said.contains("a clock or a power below zero, or a range that does not rise"), "{said}");
        }
    }

    #[test]
    fn conditions_survive_a_round_trip_through_json() {
        let conditions = Conditions {
            before: reading(1e9, &[Throttle::GpuIdle]),
            during: summary(&[reading(1.5e9, &[]), reading(1.7e9, &[Throttle::SwThermalSlowdown])]),
            after: reading(1.2e9, &[]),
            remeasured_after: [Throttle::HwPowerBrakeSlowdown].into(),
        };
        let text = serde_json::to_string(&conditions).unwrap();
        assert!(text.contains("\"sw_thermal_slowdown\""), "{text}");
        assert_eq!(serde_json::from_str::<Conditions>(&text).unwrap(), conditions);
    }
}
