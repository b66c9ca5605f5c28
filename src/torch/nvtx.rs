//! Named ranges of the program, such as "forward" or "softmax", to which profiles and memory histories attribute work.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use cxx::UniquePtr;

use super::bridge::ffi;
use super::lock;

/// How many listeners there are; without one a range costs a single load.
static LISTENERS: AtomicUsize = AtomicUsize::new(0);

/// The ranges that are open, outermost first. They are the process's and not a thread's: libtorch may run parts of a
/// backward pass on threads of its own while the thread that opened the range waits for it.
static OPEN: Mutex<Vec<&'static str>> = Mutex::new(Vec::new());

/// Runs `body` inside the range `name`; ranges nest. Only the thread that drives a step may open ranges.
///
/// A Kineto profile shows the range as a user annotation, NVIDIA's profilers show it as an NVTX range.
pub fn range<T>(name: &'static str, body: impl FnOnce() -> T) -> T {
    if LISTENERS.load(Ordering::Relaxed) == 0 {
        return body();
    }
    lock(&OPEN).push(name);
    let _close = Close { _scope: ffi::open_user_scope(name) };
    body()
}

/// The open ranges joined by '/', such as "forward/layer/attention"; empty outside all of them and without a listener.
pub fn current() -> String {
    lock(&OPEN).join("/")
}

/// Ranges are tracked while at least one of these exists.
#[derive(Debug)]
pub struct Listener(());

impl Listener {
    pub fn start() -> Self {
        LISTENERS.fetch_add(1, Ordering::Relaxed);
        Self(())
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        LISTENERS.fetch_sub(1, Ordering::Relaxed);
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
