//! Timing of a call between two synchronisations, and of many calls by the protocol of Triton's `do_bench`.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Tensor};

use crate::torch::clock::Interval;
use crate::torch::stream::{spin, synchronize};

/// The size of the buffer cleared before every timed call, as in Triton 3.6's `get_empty_cache_for_benchmark`.
pub const FLUSHED_BYTES: i64 = 256 << 20;

/// Calls whose mean is the estimate, each after a flush.
const ESTIMATES: usize = 5;

/// The rest before a call: half a millisecond, on a GPU counted in cycles of a clock of 1,980 MHz.
const REST: Duration = Duration::from_micros(500);
const REST_CYCLES: i64 = 1_000_000;

/// Whether the inputs are in the cache when a timed call starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Cache {
    /// Not in the last-level cache: a buffer larger than the cache is cleared before every call.
    Cold,
    /// As the previous call left them.
    Warm,
}

/// Whether the device rests before a call. Under its power limit a GPU lowers its clock while calls follow one another.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Pace {
    /// Calls follow one another.
    #[default]
    Sustained,
    /// Half a millisecond without work before each call but a turn's first, after the flush, so that the clock stays up.
    Rested,
}

impl Pace {
    pub fn is_sustained(&self) -> bool {
        *self == Self::Sustained
    }
}

/// Warm-up and repetition time of each pass in each turn.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Protocol {
    pub cache: Cache,
    pub pace: Pace,
    pub warmup_ms: f64,
    pub rep_ms: f64,
    /// The most calls in a turn, so that the record of a short pass stays small; 0 means no limit.
    pub most_repeats: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CallCounts {
    pub warmup: usize,
    pub repeats: usize,
}

impl Protocol {
    pub fn validate(&self) -> Result<()> {
        for (key, ms) in [("warmup_ms", self.warmup_ms), ("rep_ms", self.rep_ms)] {
            ensure!((0.1..=60_000.0).contains(&ms), "{key} is {ms}: it must lie between 0.1 and 60,000");
        }
        Ok(())
    }

    /// The number of calls that fit into the times by the estimate, rounded down, at least one. `estimate_s` is above 0.
    pub fn counts(&self, estimate_s: f64) -> CallCounts {
        let calls = |ms: f64| ((ms / (1e3 * estimate_s)) as usize).max(1);
        let most = if self.most_repeats == 0 { usize::MAX } else { self.most_repeats };
        CallCounts { warmup: calls(self.warmup_ms), repeats: calls(self.rep_ms).min(most) }
    }
}

/// A device, its flush buffer and a protocol.
pub struct TimingBench {
    device: Device,
    protocol: Protocol,
    flushed: Option<Tensor>,
}

impl TimingBench {
    pub fn new(device: Device, protocol: Protocol) -> Result<Self> {
        let flushed = match protocol.cache {
            Cache::Warm => None,
            Cache::Cold => Some(Tensor::f_zeros([FLUSHED_BYTES / 4], (Kind::Int, device))?),
        };
        Ok(Self { device, protocol, flushed })
    }

    pub fn protocol(&self) -> &Protocol {
        &self.protocol
    }

    /// Seconds of each timed call in one turn, which follows `do_bench`: a first call, five calls for the estimate,
    /// warm-up, timed calls. `clear` runs before each call and is not timed.
    pub fn turn(&self, clear: &dyn Fn() -> Result<()>, call: &mut dyn FnMut() -> Result<()>) -> Result<Vec<f64>> {
        clear()?;
        call()?;
        synchronize(self.device)?;
        let counts = self.protocol.counts(self.estimate(clear, call)?);
        self.timed(counts, clear, call)
    }

    /// As [`Self::turn`], by the host's clock: each call from an idle device until it is idle again. What is measured beside
    /// another process's calls is timed so. `clear` may take long. Calls that last as long as a turn are estimated by one.
    pub fn turn_by_host(
        &self,
        clear: &dyn Fn() -> Result<()>,
        call: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Vec<f64>> {
        let mut lap = || -> Result<f64> {
            clear()?;
            self.flush()?;
            self.rest()?;
            synchronize(self.device)?;
            let start = Instant::now();
            call()?;
            synchronize(self.device)?;
            Ok(to_the_nanosecond(start.elapsed().as_secs_f64()))
        };
        lap()?;
        let (mut sum, mut estimates) = (0.0, 0);
        while estimates < ESTIMATES && 1e3 * sum < self.protocol.warmup_ms + self.protocol.rep_ms {
            (sum, estimates) = (sum + lap()?, estimates + 1);
        }
        let counts = self.protocol.counts(sum / estimates as f64);
        // What the estimate ran is warm-up too.
        for _ in estimates..counts.warmup {
            lap()?;
        }
        (0..counts.repeats).map(|_| lap()).collect()
    }

    fn timed(
        &self,
        counts: CallCounts,
        clear: &dyn Fn() -> Result<()>,
        call: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Vec<f64>> {
        for _ in 0..counts.warmup {
            clear()?;
            self.rest()?;
            call()?;
        }
        let mut intervals = (0..counts.repeats).map(|_| Interval::new(self.device)).collect::<Result<Vec<_>>>()?;
        for interval in &mut intervals {
            clear()?;
            self.flush()?;
            self.rest()?;
            interval.start()?;
            call()?;
            interval.end()?;
        }
        synchronize(self.device)?;
        intervals.iter().map(|interval| interval.seconds().map(to_the_nanosecond)).collect()
    }

    fn estimate(&self, clear: &dyn Fn() -> Result<()>, call: &mut dyn FnMut() -> Result<()>) -> Result<f64> {
        let mut interval = Interval::new(self.device)?;
        interval.start()?;
        for _ in 0..ESTIMATES {
            clear()?;
            self.flush()?;
            self.rest()?;
            call()?;
        }
        interval.end()?;
        synchronize(self.device)?;
        let seconds = interval.seconds()? / ESTIMATES as f64;
        ensure!(seconds > 0.0, "five calls took no time");
        Ok(seconds)
    }

    fn rest(&self) -> Result<()> {
        match (self.protocol.pace, self.device) {
            (Pace::Sustained, _) => Ok(()),
            (Pace::Rested, Device::Cpu) => {
                std::thread::sleep(REST);
                Ok(())
            }
            (Pace::Rested, gpu) => spin(gpu, REST_CYCLES).context("resting before a call"),
        }
    }

    fn flush(&self) -> Result<()> {
        if let Some(buffer) = &self.flushed {
            let _ = buffer.shallow_clone().f_zero_().context("clearing the cache")?;
        }
        Ok(())
    }
}

/// Calls back to back, without a flush or a rest, and the seconds until the device has finished.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BusyCalls {
    pub calls: usize,
    pub seconds: f64,
}

impl BusyCalls {
    /// As many calls as fill about `seconds`, by the time of five. `clear` runs before each.
    pub fn run(
        device: Device,
        seconds: f64,
        clear: &dyn Fn() -> Result<()>,
        call: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Self> {
        let mut calls = |calls: usize| -> Result<Self> {
            let many = || {
                (0..calls).try_for_each(|_| {
                    clear()?;
                    call()
                })
            };
            let ((), seconds) = lap(device, many)?;
            Ok(Self { calls, seconds })
        };
        calls(1)?;
        let five = calls(ESTIMATES)?;
        calls((seconds * ESTIMATES as f64 / five.seconds.max(1e-9)).ceil().clamp(1.0, 1e6) as usize)
    }
}

/// Runs `body` and returns its value and the seconds until `device` has finished: a monotonic clock between two
/// synchronisations, as in the peer.
pub fn lap<T>(device: Device, body: impl FnOnce() -> Result<T>) -> Result<(T, f64)> {
    synchronize(device)?;
    let start = Instant::now();
    let value = body()?;
    synchronize(device)?;
    Ok((value, start.elapsed().as_secs_f64()))
}

/// Neither clock is finer than a nanosecond, and more digits would double the size of a record.
fn to_the_nanosecond(seconds: f64) -> f64 {
    ((seconds * 1e9).round() / 1e9).max(1e-9)
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};

    use super::*;

    const PROTOCOL: Protocol =
        Protocol { cache: Cache::Warm, pace: Pace::Sustained, warmup_ms: 25.0, rep_ms: 100.0, most_repeats: 0 };

    #[test]
    fn the_number_of_calls_is_rounded_down_and_at_least_one() {
        let counts = |estimate_s| PROTOCOL.counts(estimate_s);
        assert_eq!(counts(1e-3), CallCounts { warmup: 25, repeats: 100 });
        assert_eq!(counts(0.7e-3), CallCounts { warmup: 35, repeats: 142 });
        assert_eq!(counts(0.03), CallCounts { warmup: 1, repeats: 3 });
        assert_eq!(counts(2.0), CallCounts { warmup: 1, repeats: 1 });
        let limited = Protocol { most_repeats: 10, ..PROTOCOL };
        assert_eq!(limited.counts(1e-3), CallCounts { warmup: 25, repeats: 10 });
        assert_eq!(limited.counts(0.03), CallCounts { warmup: 1, repeats: 3 });
    }

    #[test]
    fn a_turn_calls_and_clears_like_do_bench() {
        let bench = TimingBench::new(Device::Cpu, Protocol { warmup_ms: 4.0, rep_ms: 30.0, ..PROTOCOL }).unwrap();
        let order = RefCell::new(String::new());
        let clear = || {
            order.borrow_mut().push('-');
            Ok(())
        };
        let mut call = || {
            order.borrow_mut().push('x');
            std::thread::sleep(std::time::Duration::from_millis(5));
            Ok(())
        };
        let counts = CallCounts { warmup: 2, repeats: 3 };
        let seconds = bench.timed(counts, &clear, &mut call).unwrap();
        assert!(seconds.len() == 3 && seconds.iter().all(|s| *s >= 5e-3), "{seconds:?}");
        assert_eq!(order.borrow().as_str(), "-x".repeat(2 + 3), "gradients are cleared before each call");
        order.borrow_mut().clear();
        // A call takes 5 ms or more, so at most one warm-up call and six timed calls fit.
        let seconds = bench.turn(&clear, &mut call).unwrap();
        assert!((1..=6).contains(&seconds.len()), "{seconds:?}");
        assert_eq!(order.borrow().as_str(), "-x".repeat(1 + ESTIMATES + 1 + seconds.len()));
    }

    #[test]
    fn a_cold_bench_clears_its_buffer_before_each_timed_call() {
        let protocol = Protocol { cache: Cache::Cold, warmup_ms: 0.1, rep_ms: 3.0, most_repeats: 2, ..PROTOCOL };
        let bench = TimingBench::new(Device::Cpu, protocol).unwrap();
        let buffer = bench.flushed.as_ref().unwrap();
        assert_eq!(buffer.numel() as i64 * 4, FLUSHED_BYTES);
        // Each call dirties the buffer. Timed calls must find it clean; the first call and the warm-up need not.
        let clean = Cell::new(0);
        let mut call = || {
            clean.set(clean.get() + usize::from(buffer.get(0).int64_value(&[]) == 0));
            let _ = buffer.get(0).fill_(1);
            Ok(())
        };
        let seconds = bench.timed(CallCounts { warmup: 1, repeats: 2 }, &|| Ok(()), &mut call).unwrap();
        assert_eq!((seconds.len(), clean.get()), (2, 1 + 2), "the very first call finds zeros too");
    }

    #[test]
    fn a_rested_bench_rests_before_every_call() {
        let bench = TimingBench::new(Device::Cpu, Protocol { pace: Pace::Rested, ..PROTOCOL }).unwrap();
        let (last, waits) = (Cell::new(Instant::now()), RefCell::new(Vec::new()));
        let clear = || {
            last.set(Instant::now());
            Ok(())
        };
        let mut call = || {
            waits.borrow_mut().push(last.get().elapsed());
            Ok(())
        };
        bench.timed(CallCounts { warmup: 2, repeats: 3 }, &clear, &mut call).unwrap();
        bench.estimate(&clear, &mut call).unwrap();
        let waits = waits.into_inner();
        assert!(waits.len() == 5 + ESTIMATES && waits.iter().all(|wait| *wait >= REST), "{waits:?}");
    }

    #[test]
    fn busy_calls_fill_the_time_that_they_are_given() {
        let calls = Cell::new(0);
        let mut call = || {
            calls.set(calls.get() + 1);
            std::thread::sleep(Duration::from_millis(2));
            Ok(())
        };
        let busy = BusyCalls::run(Device::Cpu, 0.05, &|| Ok(()), &mut call).unwrap();
        assert!((1..=25).contains(&busy.calls) && busy.seconds >= 2e-3 * busy.calls as f64, "{busy:?}");
        assert_eq!(calls.get(), 1 + ESTIMATES + busy.calls);
    }

    #[test]
    fn an_invalid_protocol_is_refused_by_key() {
        let wrong = Protocol { rep_ms: 0.0, ..PROTOCOL };
        assert!(wrong.validate().unwrap_err().to_string().contains("rep_ms"));
        let wrong = Protocol { warmup_ms: f64::NAN, ..PROTOCOL };
        assert!(wrong.validate().unwrap_err().to_string().contains("warmup_ms"));
    }
}
