//! Signals: what Ctrl-C, SIGTERM and SIGHUP do to a verb, and those that would harm any of them.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock, Once};
use std::time::Duration;

use signal_hook::consts::{SIGCHLD, SIGHUP, SIGINT, SIGTERM, SIGXFSZ};

/// The exit code of a command that was interrupted.
pub const EXIT_CODE: u8 = 130;

static INTERRUPTED: LazyLock<Arc<AtomicBool>> = LazyLock::new(Arc::default);

/// Whether an interrupt ends this process at once.
static ENDS_AT_ONCE: LazyLock<Arc<AtomicBool>> = LazyLock::new(Arc::default);

/// Ctrl-C, SIGTERM and SIGHUP. nohup ignores SIGHUP, so that work goes on after a logout.
fn interrupts() -> impl Iterator<Item = i32> {
    [SIGINT, SIGTERM].into_iter().chain(Some(SIGHUP).filter(|&signal| !is_ignored(signal)))
}

/// Makes an interrupt end this process with [`EXIT_CODE`], until the verb watches for it.
pub fn end_at_an_interrupt() {
    ENDS_AT_ONCE.store(true, Ordering::SeqCst);
    for signal in interrupts() {
        // Fails only for signals that cannot be handled.
        let _ = signal_hook::flag::register_conditional_shutdown(signal, EXIT_CODE.into(), ENDS_AT_ONCE.clone());
    }
}

/// After this time another interrupt ends the process at once: it may wait for what never comes, such as a pipe's reader. The
/// terminal, make and a job's manager may each send one at first.
const PATIENCE: Duration = Duration::from_secs(3);

/// Turns interrupts into a flag that long work polls; safe to call more than once.
pub fn watch_for_interrupt() {
    static WATCHED: Once = Once::new();
    WATCHED.call_once(|| drop(std::thread::spawn(end_at_a_later_interrupt)));
    for signal in interrupts() {
        let _ = signal_hook::flag::register(signal, INTERRUPTED.clone());
    }
    ENDS_AT_ONCE.store(false, Ordering::SeqCst);
}

fn end_at_a_later_interrupt() {
    while !interrupted() {
        std::thread::sleep(PATIENCE / 10);
    }
    std::thread::sleep(PATIENCE);
    ENDS_AT_ONCE.store(true, Ordering::SeqCst);
}

pub fn interrupted() -> bool {
    INTERRUPTED.load(Ordering::SeqCst)
}

/// Where the program that started this one ignores SIGCHLD, the kernel would discard how children end. By default SIGXFSZ
/// ends a process that writes more than the limit on file sizes; handled, the write returns an error.
pub fn handle_signals_that_would_harm() {
    let harmful = [(SIGCHLD, is_ignored(SIGCHLD)), (SIGXFSZ, !is_ignored(SIGXFSZ))];
    for (signal, _) in harmful.into_iter().filter(|(_, harms)| *harms) {
        let _ = signal_hook::flag::register(signal, Arc::default());
    }
}

/// Whether this process ignores `signal` (proc(5), `SigIgn` of `status`).
fn is_ignored(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| u64::from_str_radix(line.strip_prefix("SigIgn:")?.trim(), 16).ok());
    mask.is_some_and(|mask| mask >> (signal - 1) & 1 == 1)
}
