//! How many of the host's processors are busy while a case runs: those that the case itself uses, and those of others.

use std::time::Instant;

/// The kernel counts processor time in hundredths of a second on every Linux that libtorch is built for.
const TICKS_PER_S: f64 = 100.0;

/// Counts from the start of a case.
pub struct HostLoad {
    busy_s: Option<f64>,
    started: Instant,
}

impl HostLoad {
    pub fn start() -> Self {
        Self { busy_s: busy_s_now(), started: Instant::now() }
    }

    /// The processors that were busy since the start, on average; `None` where the kernel does not say.
    pub fn busy_processors(&self) -> Option<f64> {
        let busy_s = busy_s_now()? - self.busy_s?;
        let busy = busy_s / self.started.elapsed().as_secs_f64();
        // A tick may have been counted before the start.
        (busy.is_finite() && busy >= 0.0).then(|| (busy * 100.0).round() / 100.0)
    }
}

fn busy_s_now() -> Option<f64> {
    busy_s(&std::fs::read_to_string("/proc/stat").ok()?)
}

/// Seconds since boot in which processors worked, over all of them, from the text of /proc/stat (proc_stat(5)).
fn busy_s(stat: &str) -> Option<f64> {
    let all = stat.lines().next()?.strip_prefix("cpu ")?;
    let ticks: Vec<f64> = all.split_whitespace().map(str::parse).collect::<Result<_, _>>().ok()?;
    // A guest's time is part of the user's. A sandbox that counts nothing says 0 everywhere.
    let &[user, nice, system, idle, waiting, interrupt, soft_interrupt, stolen, ..] = ticks.as_slice() else {
        return None;
    };
    let busy = user + nice + system + interrupt + soft_interrupt + stolen;
    (busy + idle + waiting > 0.0).then_some(busy / TICKS_PER_S)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_without_work_and_a_guests_time_are_not_counted() {
        assert_eq!(busy_s("cpu  100 20 30 5000 600 7 8 35 100 0\ncpu0 1 1 1 1 1 1 1 1 1 1\n"), Some(2.0));
    }

    #[test]
    fn a_kernel_that_counts_nothing_gives_no_load() {
        for text in ["", "intr 5\n", "cpu  0 0 0 0 0 0 0 0 0 0\n", "cpu  1 2 3\n", "cpu  1 2 3 four 5 6 7 8\n"] {
            assert_eq!(busy_s(text), None, "{text}");
        }
    }
}
