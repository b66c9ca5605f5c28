//! What a process group did and when: the communication lane of a timeline, off unless somebody asks.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use serde::{Deserialize, Serialize};
use tch::Device;

use super::Operation;
use crate::cuda::Event;
use crate::torch::stream::synchronize;

/// One collective. Seconds count from the log's start, on the device's own clock where it has one.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TimelineEntry {
    /// The number of the call among all that this rank has made of its group, from 1.
    pub sequence: u64,
    pub operation: Operation,
    /// The tensor's; for an all-gather its output's, for a reduce-scatter its input's: the sizes S of nccl-tests.
    pub bytes: u64,
    /// When the host handed it over, by the host's clock.
    pub launched_s: f64,
    /// When its turn came: a group does one collective at a time, in the order of the calls. Waiting for a late peer
    /// counts as part of it.
    pub started_s: f64,
    /// When this rank's part was done. Gloo's division for an average comes after it, in whoever waits.
    pub ended_s: f64,
}

/// The log of one group, which anybody who holds the group may start and take.
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

/// Second zero on both clocks, taken while the device was idle: they agree there within a launch's few microseconds.
#[derive(Clone)]
struct Origin {
    host: Instant,
    device: Option<Arc<Event>>,
}

/// A collective as the group hands it in.
pub(super) struct Call {
    pub sequence: u64,
    pub operation: Operation,
    pub bytes: u64,
    pub launched: Instant,
    pub span: Span,
}

pub(super) enum Span {
    /// Set by whoever sees the collective end; it starts when the one before it has ended.
    Host { ended: Arc<OnceLock<Instant>> },
    /// Timed, and around the collective on the communication stream.
    Device { started: Arc<Event>, ended: Arc<Event> },
}

/// A moment on the lane of this thread's own work, to draw computation beside communication.
pub struct Mark {
    origin: Origin,
    at: Moment,
}

enum Moment {
    Host(Instant),
    Device(Event),
}

impl Mark {
    /// Seconds from the log's start; on CUDA, waits until the device has come to it.
    pub fn seconds(&self) -> Result<f64> {
        match (&self.at, &self.origin.device) {
            (Moment::Device(event), Some(zero)) => {
                event.wait()?;
                event.seconds_since(zero)
            }
            (Moment::Host(at), _) => Ok(at.duration_since(self.origin.host).as_secs_f64()),
            (Moment::Device(_), None) => unreachable!("a mark has the clocks of its log"),
        }
    }
}

/// How long [`Timeline::take`] waits for what is still under way.
const PATIENCE: Duration = Duration::from_secs(60);

impl Timeline {
    /// The log of a group whose tensors, and whose clock, are on `device`.
    pub(super) fn new(device: Device) -> Self {
        Self { device, is_on: AtomicBool::new(false), state: Mutex::default() }
    }

    /// Forgets what was logged and begins anew: now is second zero. On CUDA, waits until the device is idle.
    pub fn start(&self) -> Result<()> {
        synchronize(self.device)?;
        let device = match self.device {
            Device::Cpu => None,
            device => {
                let event = Event::new(device, true)?;
                event.record_current()?;
                event.wait()?;
                Some(Arc::new(event))
            }
        };
        *self.state() = State { origin: Some(Origin { host: Instant::now(), device }), calls: Vec::new() };
        self.is_on.store(true, Ordering::Release);
        Ok(())
    }

    /// Ends the log and gives what it holds, in the order of the calls, once all of it has ended.
    ///
    /// # Errors
    /// The log was not started, or names the collective that does not end.
    pub fn take(&self) -> Result<Vec<TimelineEntry>> {
        self.is_on.store(false, Ordering::Release);
        let State { origin, calls } = std::mem::take(&mut *self.state());
        let origin = origin.context("the communication log was not started")?;
        let mut entries: Vec<TimelineEntry> = Vec::with_capacity(calls.len());
        for call in calls {
            let free_s = entries.last().map_or(0.0, |before| before.ended_s);
            let Call { sequence, operation, .. } = call;
            entries.push(call.entry(&origin, free_s).with_context(|| format!("logging {operation} {sequence}"))?);
        }
        Ok(entries)
    }

    /// This moment, on the lane of this thread's work: behind what it has launched so far.
    ///
    /// # Errors
    /// The log was not started.
    pub fn mark(&self) -> Result<Mark> {
        let origin = self.state().origin.clone().context("the communication log was not started")?;
        let at = match self.device {
            Device::Cpu => Moment::Host(Instant::now()),
            device => {
                let event = Event::new(device, true)?;
                event.record_current()?;
                Moment::Device(event)
            }
        };
        Ok(Mark { origin, at })
    }

    pub(super) fn is_on(&self) -> bool {
        self.is_on.load(Ordering::Acquire)
    }

    pub(super) fn note(&self, call: Call) {
        self.state().calls.push(call);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Call {
    /// `free_s` is when the lane was done with the collective before.
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
                // Whoever calls back may be some microseconds late for one and not for the next.
                (started_s, seconds(wait_until(|| Ok(ended.get().copied()))?).max(started_s))
            }
            (Span::Device { .. }, None) => unreachable!("a call has the clocks of its log"),
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
            bail!("it has not ended {} s after the log was taken", PATIENCE.as_secs());
        }
        std::thread::sleep(Duration::from_micros(100));
    }
}

/// The time, in seconds, in which the lane was busy.
///
/// Collectives of one group do not overlap, so it is the sum of what each took.
pub fn busy_seconds(entries: &[TimelineEntry]) -> f64 {
    entries.iter().map(|entry| entry.ended_s - entry.started_s).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn collectives_follow_each_other_on_the_lane() {
        let log = Timeline::new(Device::Cpu);
        assert!(!log.is_on() && log.take().is_err() && log.mark().is_err());
        log.start().unwrap();
        let zero = log.state().origin.as_ref().unwrap().host;
        let at = |millis| zero + Duration::from_millis(millis);
        for (sequence, launched, ended) in [(4, 1, 5), (5, 2, 9), (6, 20, 21)] {
            let span = Span::Host { ended: Arc::new(OnceLock::from(at(ended))) };
            log.note(Call { sequence, operation: Operation::AllReduce, bytes: 8, launched: at(launched), span });
        }
        assert!(log.mark().unwrap().seconds().unwrap() >= 0.0);
        let entries = log.take().unwrap();
        let spans: Vec<_> = entries.iter().map(|e| (e.sequence, e.launched_s, e.started_s, e.ended_s)).collect();
        assert_eq!(spans, [(4, 0.001, 0.001, 0.005), (5, 0.002, 0.005, 0.009), (6, 0.02, 0.02, 0.021)]);
        assert!((busy_seconds(&entries) - 0.009).abs() < 1e-12);
        assert!(!log.is_on() && log.take().is_err());
    }
}
