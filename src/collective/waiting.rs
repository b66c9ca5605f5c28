//! Says at intervals what a rank waits for, as long as it waits.

use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use super::environment::{DEADLINE, Environment};
use crate::units::human_seconds;

/// How often a waiting rank says so.
pub const INTERVAL: Duration = Duration::from_secs(10);

/// What a rank waits for at the moment, and when it gives up.
pub struct Waiting {
    awaited: Mutex<String>,
    started: Instant,
    timeout: Duration,
}

impl Waiting {
    /// Runs `body`; until it returns, calls `say` every `interval` with what is awaited.
    pub fn during<T>(
        environment: &Environment,
        interval: Duration,
        say: impl Fn(String) + Send,
        body: impl FnOnce(&Self) -> T,
    ) -> T {
        let &Environment { rank, world_size, timeout, .. } = environment;
        let waiting = &Self { awaited: Mutex::default(), started: Instant::now(), timeout };
        let (done, has_ended) = channel::<()>();
        thread::scope(|scope| {
            // Ends when `done` is dropped.
            scope.spawn(move || {
                while has_ended.recv_timeout(interval) == Err(RecvTimeoutError::Timeout) {
                    let left = human_seconds(waiting.left().as_secs_f64());
                    let awaited = waiting.awaited();
                    say(format!("rank {rank} of {world_size} waits for {awaited}; it gives up in {left} ({DEADLINE})"));
                }
            });
            let _done = done;
            body(waiting)
        })
    }

    /// Says from now on that the rank waits for `awaited`.
    pub fn set(&self, awaited: String) {
        *self.awaited.lock().unwrap_or_else(PoisonError::into_inner) = awaited;
    }

    fn awaited(&self) -> String {
        self.awaited.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The time until the rank gives up.
    pub fn left(&self) -> Duration {
        self.timeout.saturating_sub(self.started.elapsed())
    }
}
