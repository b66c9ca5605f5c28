//! One worker kept alive over many jobs, and replaced after one that did not end well.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Result;

use super::record::Outcome;
use super::worker::{Ending, Job, Reply, Worker};

/// Giving cached memory back takes milliseconds; a worker that needs longer hangs.
const CLEAN_UP_LIMIT: Duration = Duration::from_secs(30);

/// Keeps one worker alive over many jobs and starts another after a death.
pub struct Pool {
    program: PathBuf,
    root: PathBuf,
    worker: Option<Worker>,
}

impl Pool {
    pub fn new(program: PathBuf, root: PathBuf) -> Self {
        Self { program, root, worker: None }
    }

    /// Ends the worker, so that the next job is the first of its process.
    pub fn restart(&mut self) {
        self.worker = None;
    }

    /// Runs one job. A worker whose job did not end well is replaced, so that the next one starts clean.
    pub fn run(&mut self, job: &Job, limit: Duration, interrupted: &dyn Fn() -> bool) -> Result<Ending> {
        // One that died after its last reply must not become this job's failure.
        let mut worker = match self.worker.take().and_then(|mut worker| worker.is_idle().then_some(worker)) {
            Some(worker) => worker,
            None => Worker::start(&self.program, &self.root)?,
        };
        let ending = worker.run(job, limit, interrupted)?;
        let clean = matches!(
            ending,
            Ending::Reply(
                Reply::Passed { .. }
                    | Reply::Skipped { .. }
                    | Reply::Compared { .. }
                    | Reply::Ended { outcome: Outcome::Measured { .. } }
            )
        );
        if clean {
            self.worker = Some(worker);
        }
        Ok(ending)
    }

    /// Has the worker give back what the last job left behind; one that cannot is replaced by the next job.
    pub fn clean_up(&mut self, interrupted: &dyn Fn() -> bool) {
        if self.worker.is_some() {
            // Whatever goes wrong, `run` keeps no worker that did not end well.
            let _ = self.run(&Job::CleanUp, CLEAN_UP_LIMIT, interrupted);
        }
    }
}
