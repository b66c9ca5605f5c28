//! The condition of the device while a case is measured: clocks, power, temperature, and what held the clocks down.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::stats::Summary;

/// How often a running case is looked at: seldom enough not to disturb it.
const EVERY: Duration = Duration::from_millis(100);

/// One look at the device.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Reading {
    pub sm_clock_hz: f64,
    pub memory_clock_hz: f64,
    /// As the driver averages it, over about a second on recent cards.
    pub power_w: f64,
    pub temperature_c: f64,
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub throttle: BTreeSet<Throttle>,
}

/// What holds a device's clocks below their highest; the names are those of NVIDIA's management library.
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
    /// Whether a figure taken meanwhile says something of a fault instead of the card. At its power cap a card under
    /// matrix products is as it always is, and an idle one waits for us.
    pub fn spoils(self) -> bool {
        matches!(
            self,
            Self::HwSlowdown | Self::SwThermalSlowdown | Self::HwThermalSlowdown | Self::HwPowerBrakeSlowdown
        )
    }

    /// "thermal slowdown (software)", as a sentence says it.
    pub fn words(self) -> &'static str {
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

/// Where readings come from; `None` where there is no device, or one that tells nothing.
pub type Sensor<'a> = &'a dyn Fn() -> Option<Reading>;

/// What was read around and during one case.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Conditions {
    pub before: Reading,
    /// None for a case that ended before the first look.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub during: Option<During>,
    pub after: Reading,
    /// What spoiled a first measurement of this case, which was then measured once more; these are the second's figures.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub remeasured_after: BTreeSet<Throttle>,
}

/// What the readings during a case had in common.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct During {
    pub readings: usize,
    pub sm_clock_hz: Range,
    pub power_w: Range,
    pub max_temperature_c: f64,
    /// Every reason that one of the readings gave.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub throttle: BTreeSet<Throttle>,
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Range {
    pub min: f64,
    pub median: f64,
    pub max: f64,
}

impl Conditions {
    /// The reasons that make these figures worth measuring again; what was so before the case is not its own.
    pub fn spoiled_by(&self) -> BTreeSet<Throttle> {
        let during = self.during.iter().flat_map(|during| &during.throttle);
        during.chain(&self.after.throttle).copied().filter(|reason| reason.spoils()).collect()
    }
}

/// Looks at the device from the start to the end of one case.
pub struct Watch<'a> {
    sensor: Sensor<'a>,
    before: Option<Reading>,
    during: RefCell<Vec<Reading>>,
    last: Cell<Instant>,
}

impl<'a> Watch<'a> {
    pub fn start(sensor: Sensor<'a>) -> Self {
        Self { sensor, before: sensor(), during: RefCell::default(), last: Cell::new(Instant::now()) }
    }

    /// Looks once more if it is time to; call it as often as is convenient.
    pub fn poll(&self) {
        self.poll_at(Instant::now());
    }

    fn poll_at(&self, now: Instant) {
        if self.before.is_some() && now.duration_since(self.last.get()) >= EVERY {
            self.during.borrow_mut().extend((self.sensor)());
            self.last.set(now);
        }
    }

    /// None without a sensor.
    pub fn end(self) -> Option<Conditions> {
        let (before, after) = (self.before?, (self.sensor)()?);
        let during = summary(&self.during.into_inner());
        Some(Conditions { before, during, after, remeasured_after: BTreeSet::new() })
    }
}

fn summary(readings: &[Reading]) -> Option<During> {
    let range = |value: fn(&Reading) -> f64| {
        let Summary { min, median, max, .. } = Summary::of(&readings.iter().map(value).collect::<Vec<_>>())?;
        Some(Range { min, median, max })
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
    reasons.into_iter().map(|reason| reason.words()).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reading(sm_clock_hz: f64, throttle: &[Throttle]) -> Reading {
        let throttle = throttle.iter().copied().collect();
        Reading { sm_clock_hz, memory_clock_hz: 3.2e9, power_w: sm_clock_hz / 1e7, temperature_c: 40.0, throttle }
    }

    #[test]
    fn a_watch_keeps_the_range_and_every_reason() {
        let clocks = [1.0e9, 1.9e9, 1.5e9, 1.8e9, 1.2e9].map(|hz| hz as u64);
        let next = Cell::new(0);
        let sensor = || {
            let i = next.replace(next.get() + 1);
            let reasons: &[Throttle] = if i == 2 { &[Throttle::SwPowerCap] } else { &[] };
            Some(reading(clocks[i] as f64, reasons))
        };
        let watch = Watch::start(&sensor);
        let start = watch.last.get();
        for k in 1..=3 {
            watch.poll_at(start + k * EVERY - Duration::from_millis(1));
            watch.poll_at(start + k * EVERY);
        }
        let conditions = watch.end().unwrap();
        let during = conditions.during.clone().unwrap();
        assert_eq!((conditions.before.sm_clock_hz, conditions.after.sm_clock_hz), (1.0e9, 1.2e9));
        assert_eq!((during.readings, during.sm_clock_hz), (3, Range { min: 1.5e9, median: 1.8e9, max: 1.9e9 }));
        assert_eq!(during.throttle.iter().copied().collect::<Vec<_>>(), [Throttle::SwPowerCap]);
        assert!(conditions.spoiled_by().is_empty(), "a power cap is a card's normal state");
    }

    #[test]
    fn a_short_case_has_no_during_and_no_sensor_gives_no_conditions() {
        let sensor = || Some(reading(1e9, &[Throttle::HwSlowdown]));
        let watch = Watch::start(&sensor);
        watch.poll_at(watch.last.get() + EVERY / 2);
        let conditions = watch.end().unwrap();
        assert_eq!(conditions.during, None);
        assert_eq!(in_words(&conditions.spoiled_by()), "hardware slowdown");
        assert_eq!(Watch::start(&|| None).end(), None);
    }

    #[test]
    fn a_slowdown_that_was_over_before_the_case_began_is_not_its_own() {
        let first = Cell::new(true);
        let sensor = || Some(reading(1e9, if first.replace(false) { &[Throttle::HwThermalSlowdown] } else { &[] }));
        assert!(Watch::start(&sensor).end().unwrap().spoiled_by().is_empty());
    }

    #[test]
    fn conditions_come_back_from_json_as_they_went() {
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
