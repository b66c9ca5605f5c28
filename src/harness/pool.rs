//! One worker kept alive over many jobs, and replaced after a job that failed.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Result;

use super::record::Outcome;
use super::worker::{Ending, Job, Reply, Worker};

/// A clean-up takes milliseconds. A worker that needs longer hangs.
const CLEAN_UP_LIMIT: Duration = Duration::from_secs(30);

/// Keeps one worker alive over many jobs, and starts another if it dies.
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

    /// Runs one job. If the job fails, the next job gets a new worker.
    pub fn run(&mut self, job: &Job, limit: Duration, interrupted: &dyn Fn() -> bool) -> Result<Ending> {
        // A worker that died after its last reply must not fail this job.
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

    /// Asks the worker to free what the last job left behind. If that fails, the next job gets a new worker.
    pub fn clean_up(&mut self, interrupted: &dyn Fn() -> bool) {
        if self.worker.is_some() {
            // `run` drops a worker whose clean-up failed.
            let _ = self.run(&Job::CleanUp, CLEAN_UP_LIMIT, interrupted);
        }
    }
}
