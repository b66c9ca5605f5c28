//! When each collective of a process group was launched, started and ended; recorded only between `start` and `take`.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use serde::{Deserialize, Serialize};
use tch::Device;

use super::Operation;
use crate::cuda::Event;
use crate::torch::stream::synchronize;

/// One collective. Seconds count from the start of the recording, by the device's clock on CUDA, else by the host's.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TimelineEntry {
    /// The number of this call among all calls of the rank to its group, from 1.
    pub sequence: u64,
    pub operation: Operation,
    /// Bytes of the tensor; for an all-gather of its output, for a reduce-scatter of its input (the size S of nccl-tests).
    pub bytes: u64,
    /// When the host launched it, by the host's clock.
    pub launched_s: f64,
    /// When it started: a group runs one collective at a time, in the order of the calls. Waiting for a late peer counts
    /// as part of the collective.
    pub started_s: f64,
    /// When this rank's part was done. For an average, Gloo divides afterwards, in the thread that waits.
    pub ended_s: f64,
}

/// The timeline of one group.
pub struct Timeline {
    device: Device,
    is_on: AtomicBool,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    origin: Option<Origin>,
    calls: Vec<Call>,
}

/// Second zero on both clocks, taken while the device was idle; they differ by the few microseconds of a launch.
#[derive(Clone)]
struct Origin {
    host: Instant,
    device: Option<Arc<Event>>,
}

/// A collective as the group reports it.
pub(super) struct Call {
    pub sequence: u64,
    pub operation: Operation,
    pub bytes: u64,
    pub launched: Instant,
    pub span: Span,
}

pub(super) enum Span {
    /// `ended` is set by the thread that sees the end; the collective starts when the one before it has ended.
    Host { ended: Arc<OnceLock<Instant>> },
    /// Timed events around the collective on the communication stream.
    Device { started: Event, ended: Arc<Event> },
}

/// A moment in this thread's own work, for drawing computation along with communication.
pub struct Mark {
    origin: Origin,
    host: Instant,
    device: Option<Event>,
}

impl Mark {
    /// Seconds from the start of the recording; on CUDA, waits until the device has reached the moment.
    pub fn seconds(&self) -> Result<f64> {
        match (&self.device, &self.origin.device) {
            (Some(event), Some(zero)) => {
                event.wait()?;
                event.seconds_since(zero)
            }
            _ => Ok(self.host.duration_since(self.origin.host).as_secs_f64()),
        }
    }
}

/// How long [`Timeline::take`] waits for what is still under way.
const PATIENCE: Duration = Duration::from_secs(60);

impl Timeline {
    /// The timeline of a group whose tensors, and whose clock, are on `device`.
    pub(super) fn new(device: Device) -> Self {
        Self { device, is_on: AtomicBool::new(false), state: Mutex::default() }
    }

    /// Starts a new recording: now is second zero. On CUDA, waits until the device is idle.
    pub fn start(&self) -> Result<()> {
        synchronize(self.device)?;
        let device = self.event_now()?.map(Arc::new);
        device.iter().try_for_each(|event| event.wait())?;
        *self.state() = State { origin: Some(Origin { host: Instant::now(), device }), calls: Vec::new() };
        self.is_on.store(true, Ordering::Release);
        Ok(())
    }

    /// Ends the recording, waits until every collective in it has ended, and gives them in the order of the calls.
    ///
    /// # Errors
    /// The recording was not started; or the name of a collective that does not end.
    pub fn take(&self) -> Result<Vec<TimelineEntry>> {
        self.is_on.store(false, Ordering::Release);
        let State { origin, calls } = std::mem::take(&mut *self.state());
        let origin = origin.context("the timeline was not started: call start first")?;
        let mut entries: Vec<TimelineEntry> = Vec::with_capacity(calls.len());
        for call in calls {
            let free_s = entries.last().map_or(0.0, |before| before.ended_s);
            let Call { sequence, operation, .. } = call;
            entries.push(call.entry(&origin, free_s).with_context(|| format!("timing {operation} {sequence}"))?);
        }
        Ok(entries)
    }

    /// This moment in this thread's work: on CUDA, after what it has launched so far.
    ///
    /// # Errors
    /// The recording was not started.
    pub fn mark(&self) -> Result<Mark> {
        let origin = self.state().origin.clone().context("the timeline was not started: call start first")?;
        Ok(Mark { origin, host: Instant::now(), device: self.event_now()? })
    }

    /// A timed event after what this thread has launched so far; `None` on the CPU.
    fn event_now(&self) -> Result<Option<Event>> {
        if self.device == Device::Cpu {
            return Ok(None);
        }
        let event = Event::new(self.device, true)?;
        event.record_current()?;
        Ok(Some(event))
    }

    pub(super) fn is_on(&self) -> bool {
        self.is_on.load(Ordering::Acquire)
    }

    pub(super) fn add(&self, call: Call) {
        self.state().calls.push(call);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Call {
    /// `free_s` is when the collective before this one ended.
    fn entry(self, origin: &Origin, free_s: f64) -> Result<TimelineEntry> {
        let Self { sequence, operation, bytes, launched, span } = self;
        let seconds = |moment: Instant| moment.duration_since(origin.host).as_secs_f64();
        let launched_s = seconds(launched);
        let (started_s, ended_s) = match (&span, &origin.device) {
            (Span::Device { started, ended }, Some(zero)) => {
                wait_until(|| Ok(ended.has_passed()?.then_some(())))?;
                (started.seconds_since(zero)?, ended.seconds_since(zero)?)
            }
            (Span::Host { ended }, _) => {
                let started_s = launched_s.max(free_s);
                // A callback may be some microseconds late, so that a collective seems to end before it started.
                (started_s, seconds(wait_until(|| Ok(ended.get().copied()))?).max(started_s))
            }
            (Span::Device { .. }, None) => unreachable!("a call has the clocks of its timeline"),
        };
        Ok(TimelineEntry { sequence, operation, bytes, launched_s, started_s, ended_s })
    }
}

fn wait_until<T>(ready: impl Fn() -> Result<Option<T>>) -> Result<T> {
    let started = Instant::now();
    loop {
        if let Some(value) = ready()? {
            return Ok(value);
        }
        if started.elapsed() > PATIENCE {
            bail!("it has not ended {} s after the recording ended", PATIENCE.as_secs());
        }
        std::thread::sleep(Duration::from_micros(100));
    }
}

/// The seconds in which the group communicated: the sum over its collectives, which do not overlap.
pub fn busy_seconds(entries: &[TimelineEntry]) -> f64 {
    entries.iter().map(|entry| entry.ended_s - entry.started_s).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_collective_starts_when_the_one_before_it_has_ended() {
        let timeline = Timeline::new(Device::Cpu);
        assert!(!timeline.is_on() && timeline.take().is_err() && timeline.mark().is_err());
        timeline.start().unwrap();
        let zero = timeline.state().origin.as_ref().unwrap().host;
        let at = |millis| zero + Duration::from_millis(millis);
        for (sequence, launched, ended) in [(4, 1, 5), (5, 2, 9), (6, 20, 21)] {
            let span = Span::Host { ended: Arc::new(OnceLock::from(at(ended))) };
            timeline.add(Call { sequence, operation: Operation::AllReduce, bytes: 8, launched: at(launched), span });
        }
        assert!(timeline.mark().unwrap().seconds().unwrap() >= 0.0);
        let entries = timeline.take().unwrap();
        let spans: Vec<_> = entries.iter().map(|e| (e.sequence, e.launched_s, e.started_s, e.ended_s)).collect();
        assert_eq!(spans, [(4, 0.001, 0.001, 0.005), (5, 0.002, 0.005, 0.009), (6, 0.02, 0.02, 0.021)]);
        assert!((busy_seconds(&entries) - 0.009).abs() < 1e-12);
        assert!(!timeline.is_on() && timeline.take().is_err());
    }
}
