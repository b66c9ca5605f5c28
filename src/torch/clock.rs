//! A stopwatch for work on a device: the host's monotonic clock, and on CUDA a pair of events as well.

use std::cell::RefCell;
use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use cxx::UniquePtr;
use tch::Device;

use super::bridge::{check, ffi};
use super::library::cuda_index;
use super::stream::synchronize;

/// What one timed region took.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Lap {
    /// From an idle device until it is idle again, by the host's clock, in seconds: launches and the last wait included.
    pub host_s: f64,
    /// Between events on the stream right before and right after the region's work, by the device's clock, in seconds;
    /// `None` on the CPU. Gaps in which the device waited for the host are inside.
    pub device_s: Option<f64>,
}

/// Times regions of one thread's work on one device.
pub struct Stopwatch {
    device: Device,
    events: Option<RefCell<UniquePtr<ffi::EventPair>>>,
}

impl Stopwatch {
    /// Errors: [`crate::error::Fault::NotAvailable`] for a GPU that is not there.
    pub fn new(device: Device) -> Result<Self> {
        Ok(Self { device, events: events_on(device)?.map(RefCell::new) })
    }

    /// Runs `body` between two synchronisations of the device, the first of them outside the clock.
    ///
    /// The body must leave the thread's current stream as it found it. Laps of one stopwatch do not nest.
    ///
    /// Errors: those of `body`, and those of kernels that failed on the device meanwhile.
    pub fn lap<T>(&self, body: impl FnOnce() -> Result<T>) -> Result<(T, Lap)> {
        let events = self.events.as_ref().map(RefCell::try_borrow_mut).transpose();
        let mut events = events.context("laps of one stopwatch do not nest")?;
        synchronize(self.device)?;
        if let Some(events) = &mut events {
            check(events.pin_mut().record_start())?;
        }
        let start = Instant::now();
        let value = body()?;
        if let Some(events) = &mut events {
            check(events.pin_mut().record_end())?;
        }
        synchronize(self.device)?;
        let host_s = start.elapsed().as_secs_f64();
        let device_s = events.map(|events| check(events.elapsed_seconds())).transpose()?;
        Ok((value, Lap { host_s, device_s }))
    }
}

/// One stretch of a device's work, timed without waiting for it: a stream may have many of them under way.
///
/// Between events on the thread's current stream on CUDA, by the host's clock on the CPU.
pub struct Interval {
    events: Option<UniquePtr<ffi::EventPair>>,
    start: Instant,
    host_s: f64,
}

impl Interval {
    /// Errors: [`crate::error::Fault::NotAvailable`] for a GPU that is not there.
    pub fn new(device: Device) -> Result<Self> {
        Ok(Self { events: events_on(device)?, start: Instant::now(), host_s: 0.0 })
    }

    pub fn start(&mut self) -> Result<()> {
        match &mut self.events {
            Some(events) => check(events.pin_mut().record_start())?,
            None => self.start = Instant::now(),
        }
        Ok(())
    }

    pub fn end(&mut self) -> Result<()> {
        match &mut self.events {
            Some(events) => check(events.pin_mut().record_end())?,
            None => self.host_s = self.start.elapsed().as_secs_f64(),
        }
        Ok(())
    }

    /// Waits for the end on CUDA; an error unless the interval was started and ended.
    pub fn seconds(&self) -> Result<f64> {
        if let Some(events) = &self.events {
            return check(events.elapsed_seconds());
        }
        ensure!(self.host_s > 0.0, "an interval was read that has not ended");
        Ok(self.host_s)
    }
}

/// `None` on the CPU.
fn events_on(device: Device) -> Result<Option<UniquePtr<ffi::EventPair>>> {
    match device {
        Device::Cpu => Ok(None),
        _ => Ok(Some(check(ffi::new_event_pair(cuda_index(device)?))?)),
    }
}

#[cfg(test)]
mod tests {
    use anyhow::bail;

    use super::*;
    use crate::error::{Fault, fault_of};

    #[test]
    fn a_lap_lasts_as_long_as_its_body_and_returns_its_value() {
        let [around, within] = [0; 2].map(|_| Stopwatch::new(Device::Cpu).unwrap());
        let ((value, inner), outer) = around.lap(|| within.lap(|| Ok(7))).unwrap();
        assert_eq!((value, outer.device_s), (7, None));
        assert!(0.0 < inner.host_s && inner.host_s <= outer.host_s, "{inner:?} within {outer:?}");
    }

    #[test]
    fn a_failing_body_gives_no_lap_and_the_stopwatch_stays_usable() {
        let stopwatch = Stopwatch::new(Device::Cpu).unwrap();
        let error = stopwatch.lap(|| -> Result<()> { bail!("inside") }).unwrap_err();
        assert_eq!(error.to_string(), "inside");
        let around = Stopwatch::new(Device::Cpu).unwrap();
        let (((), lap), outer) = around.lap(|| stopwatch.lap(|| Ok(()))).unwrap();
        assert!(lap.host_s <= outer.host_s, "the failed lap counts in {lap:?} within {outer:?}");
    }

    #[test]
    fn an_interval_lasts_from_its_start_to_its_end_and_cannot_be_read_earlier() {
        let mut interval = Interval::new(Device::Cpu).unwrap();
        assert!(interval.seconds().is_err());
        let [around, within] = [0; 2].map(|_| Stopwatch::new(Device::Cpu).unwrap());
        let body = || {
            interval.start()?;
            let ((), inner) = within.lap(|| Ok(()))?;
            interval.end()?;
            Ok(inner)
        };
        let (inner, outer) = around.lap(body).unwrap();
        let seconds = interval.seconds().unwrap();
        assert!(inner.host_s <= seconds && seconds <= outer.host_s, "{inner:?}, {seconds}, {outer:?}");
        assert_eq!(interval.seconds().unwrap(), seconds, "reading it again changes nothing");
    }

    #[test]
    fn a_missing_gpu_is_a_typed_fault() {
        let error = Stopwatch::new(Device::Cuda(63)).map(drop).unwrap_err();
        assert!(matches!(fault_of(&error), Some(Fault::NotAvailable { .. })), "{error:#}");
    }
}
