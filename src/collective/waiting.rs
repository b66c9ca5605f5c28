//! Says at intervals what a rank waits for, as long as it waits.

use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

use super::Group;
use super::environment::{DEADLINE, Environment};
use super::network::host_name;
use crate::printable::one_line;
use crate::process::not_started;
use crate::units::human_seconds;

/// How often a waiting rank says so.
pub const INTERVAL: Duration = Duration::from_secs(10);

/// How much longer than its timeout a rank waits for libtorch, so that an error with a reason comes first.
const EXTRA: Duration = Duration::from_secs(6);

/// What a rank waits for at the moment, and when it gives up.
pub struct Waiting {
    rank: usize,
    world_size: usize,
    awaited: Mutex<String>,
    started: Instant,
    timeout: Duration,
    interval: Duration,
    /// Whether the rank waits in a collective, where the timeout is that of each transfer.
    of_transfers: bool,
}

impl Waiting {
    /// Runs `body`; until it returns, calls `say` every `interval` with what is awaited.
    pub fn during<T>(
        environment: &Environment,
        interval: Duration,
        say: impl Fn(String) + Send,
        body: impl FnOnce(&Arc<Self>) -> T,
    ) -> T {
        Self::of(environment, interval, false).run(move |waiting| say(waiting.sentence()), body)
    }

    fn of(environment: &Environment, interval: Duration, of_transfers: bool) -> Arc<Self> {
        let &Environment { rank, world_size, timeout, .. } = environment;
        let (awaited, started) = (Mutex::default(), Instant::now());
        Arc::new(Self { rank, world_size, awaited, started, timeout, interval, of_transfers })
    }

    fn run<T>(self: &Arc<Self>, say: impl Fn(&Self) + Send, body: impl FnOnce(&Arc<Self>) -> T) -> T {
        let (done, has_ended) = channel::<()>();
        thread::scope(|scope| {
            // Ends when `done` is dropped. Where no thread can be started, the rank waits in silence.
            let _ = thread::Builder::new().spawn_scoped(scope, move || {
                while has_ended.recv_timeout(self.interval) == Err(RecvTimeoutError::Timeout) {
                    say(self);
                }
            });
            let _done = done;
            body(self)
        })
    }

    fn sentence(&self) -> String {
        let (Self { rank, world_size, .. }, awaited, left) = (self, self.awaited(), self.left());
        let limit = match self.of_transfers && left.is_zero() {
            true => format!("{DEADLINE} is the limit of each transfer in it"),
            false => format!("it gives up in {} ({DEADLINE})", human_seconds(left.as_secs_f64())),
        };
        format!("rank {rank} of {world_size} waits for {awaited}; {limit}")
    }

    /// Runs `body` on a thread that is abandoned if it is late, as libtorch can wait without a limit. Calls `look` at every
    /// interval meanwhile.
    ///
    /// # Errors
    /// Those of `body` or `look`; or, a few seconds after the timeout, what is awaited still, and the `remedy`.
    pub fn bounded<T: Send + 'static>(
        self: &Arc<Self>,
        remedy: &str,
        look: impl Fn() -> Result<()>,
        body: impl FnOnce(&Self) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let (send, outcome) = channel();
        let waiting = self.clone();
        let started = thread::Builder::new().spawn(move || send.send(body(&waiting)));
        started.map_err(|error| not_started("a thread of a rank", error))?;
        let end = Instant::now() + self.left() + EXTRA;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            match outcome.recv_timeout(left.min(self.interval)) {
                Ok(outcome) => return outcome,
                Err(RecvTimeoutError::Timeout) if left > self.interval => look()?,
                Err(_) => break,
            }
        }
        let (Self { rank, world_size, .. }, timeout) = (&**self, human_seconds(self.timeout.as_secs_f64()));
        bail!(
            "rank {rank} of {world_size} on {} waited for {} in vain for {timeout} ({DEADLINE}). {remedy}",
            host_name(),
            self.awaited()
        )
    }

    /// Says from now on that the rank waits for `awaited`.
    pub fn set(&self, awaited: String) {
        *self.awaited.lock().unwrap_or_else(PoisonError::into_inner) = awaited;
    }

    fn awaited(&self) -> String {
        self.awaited.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Whether an interval has passed since `last`, which is now then.
    pub fn is_due(&self, last: &mut Instant) -> bool {
        let is_due = last.elapsed() >= self.interval;
        if is_due {
            *last = Instant::now();
        }
        is_due
    }

    /// The time until the rank gives up.
    pub fn left(&self) -> Duration {
        self.timeout.saturating_sub(self.started.elapsed())
    }
}

/// Runs `body`, a collective, and says every 10 s on standard error that this rank waits for `awaited`.
pub fn saying<T>(environment: &Environment, awaited: &str, body: impl FnOnce() -> T) -> T {
    let say = |waiting: &Waiting| say(waiting.sentence());
    Waiting::of(environment, INTERVAL, true).run(say, |waiting| {
        waiting.set(awaited.into());
        body()
    })
}

/// Runs `body`, and says every 10 s on standard error in which collective of `group` this rank waits for the `others`, if it has
/// for 5 s.
pub fn saying_collectives<T>(environment: &Environment, group: &Group, others: &str, body: impl FnOnce() -> T) -> T {
    let &Environment { rank, world_size, .. } = environment;
    let look = |_: &Waiting| {
        if let Some((name, since)) = group.recorder.awaited().filter(|(_, since)| *since >= INTERVAL / 2) {
            let since = human_seconds(since.as_secs_f64());
            let limit = format!("{DEADLINE} is the limit of each transfer in it");
            say(format!("rank {rank} of {world_size} has waited for {others} for {since} in {name}; {limit}"));
        }
    };
    Waiting::of(environment, INTERVAL, true).run(look, |_| body())
}

pub(super) fn say(sentence: String) {
    eprintln!("cs336: {}", one_line(&sentence));
}
