//! Named ranges of the program, such as "forward" or "softmax", to which profiles and memory histories attribute work.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::thread::{self, ThreadId};

use cxx::UniquePtr;

use super::bridge::ffi;
use super::lock;

/// How many listeners there are; without one a range costs a single load.
static LISTENERS: AtomicUsize = AtomicUsize::new(0);

/// The thread that has the listeners. Its ranges alone are tracked, so that steps on several threads keep theirs apart.
static LISTENING: Mutex<Option<ThreadId>> = Mutex::new(None);
static ENDED: Condvar = Condvar::new();

/// The ranges that are open, outermost first. Any thread may read them: libtorch may run parts of a backward pass on threads
/// of its own while the thread that opened the range waits for it.
static OPEN: Mutex<Vec<&'static str>> = Mutex::new(Vec::new());

/// Runs `body` inside the range `name`; ranges nest. The thread that drives a step opens them.
///
/// A Kineto profile shows the range as a user annotation, NVIDIA's profilers show it as an NVTX range.
pub fn range<T>(name: &'static str, body: impl FnOnce() -> T) -> T {
    if LISTENERS.load(Ordering::Relaxed) == 0 || *lock(&LISTENING) != Some(thread::current().id()) {
        return body();
    }
    lock(&OPEN).push(name);
    let _close = Close { _scope: ffi::open_user_scope(name) };
    body()
}

/// A range of any thread, which libtorch's active profilers record until it is dropped; `None` without a listener. It is not
/// tracked: [`current`] does not show it.
pub fn scope(prefix: &str, name: &str) -> Option<UniquePtr<ffi::UserScope>> {
    (LISTENERS.load(Ordering::Relaxed) > 0).then(|| ffi::open_user_scope(&format!("{prefix}{name}")))
}

/// The open ranges joined by '/', such as "forward/layer/attention"; empty outside all of them and without a listener.
pub fn current() -> String {
    lock(&OPEN).join("/")
}

/// The ranges of the thread that starts one are tracked until it is dropped there. They nest.
#[derive(Debug)]
pub struct Listener(());

impl Listener {
    /// Waits until no other thread has one.
    pub fn start() -> Self {
        let this = thread::current().id();
        let other = |owner: &mut Option<ThreadId>| owner.is_some_and(|owner| owner != this);
        let mut owner = ENDED.wait_while(lock(&LISTENING), other).unwrap_or_else(PoisonError::into_inner);
        *owner = Some(this);
        LISTENERS.fetch_add(1, Ordering::Relaxed);
        Self(())
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        let mut owner = lock(&LISTENING);
        if LISTENERS.fetch_sub(1, Ordering::Relaxed) == 1 {
            *owner = None;
            ENDED.notify_all();
        }
    }
}

/// Closes the innermost range, also when its body panics.
struct Close {
    _scope: UniquePtr<ffi::UserScope>,
}

impl Drop for Close {
    fn drop(&mut self) {
        lock(&OPEN).pop();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_of_another_thread_are_not_tracked_and_its_listener_waits() {
        let listener = Listener::start();
        let nested = Listener::start();
        let seen =
            range("forward", || thread::scope(|scope| scope.spawn(|| range("another's", current)).join().unwrap()));
        assert_eq!(seen, "forward");
        let other = thread::spawn(|| {
            let _listener = Listener::start();
            range("backward", current)
        });
        drop(nested);
        assert_eq!(range("optimizer", current), "optimizer");
        drop(listener);
        assert_eq!(other.join().unwrap(), "backward");
    }
}
