//! Fault tests: the last of several ranks fails as the suite specifies. Recorded are the error message, the time until all ranks
//! have ended, and the processes that are left.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize};

use crate::checks::fault_test::{FaultTest, RankFault, TASK, pids};
use crate::collective::Backend;
use crate::collective::ranks::{Launch, launch, require_devices, validate_world_size};
use crate::harness::problem::Measure;
use crate::harness::record::Profile;
use crate::process::is_alive;

pub struct FaultTests;

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Params {
    pub backend: Backend,
    pub world_size: usize,
    /// The fault of the last rank between barrier 1 and all-reduce 2.
    pub fault: RankFault,
    /// How long the other ranks may wait for a rank that does nothing.
    pub patience_s: f64,
    /// The deadline of the run, which ends a rank that keeps computing.
    pub deadline_s: f64,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Row {
    /// The supervisor's error.
    pub words: String,
    /// Whether the message names the last rank, and the number of a collective.
    pub names_rank: bool,
    pub names_call: bool,
    /// From the start of the ranks to the end of the last.
    pub seconds: f64,
    /// Ranks that were still alive at that time.
    pub left: usize,
    /// Whether a run without a fault, right afterwards, gave every rank the sum.
    pub next_run_works: bool,
}

impl Measure for FaultTests {
    type Params = Params;
    type Row = Row;
    const REVISION: u32 = 1;

    fn validate(params: &Params) -> Result<()> {
        use RankFault::{Late, None, SumForever, SuperviseStalled};
        let ends = !matches!(params.fault, None | Late | SumForever | SuperviseStalled);
        ensure!(ends, "fault is {:?}: it must be one of the last rank that ends its run", params.fault);
        validate_world_size(params.world_size)?;
        for (key, value) in [("patience_s", params.patience_s), ("deadline_s", params.deadline_s)] {
            ensure!((1.0..=600.0).contains(&value), "{key} is {value}: it must lie in 1..600");
        }
        Ok(())
    }

    fn validate_row(params: &Params, row: &Row) -> Result<()> {
        let (found, expected) = ((row.names_rank, row.names_call), names(&row.words, params.world_size - 1));
        ensure!(found == expected, "its words name rank and collective: {expected:?}, and not {found:?}");
        ensure!(row.left <= params.world_size, "{} processes are left, of {} ranks", row.left, params.world_size);
        let least = match &row.words {
            words if words.contains("the deadline of ") => params.deadline_s,
            words if accusation(words).contains(" stalls, idle for ") => params.patience_s,
            _ => 0.0,
        };
        ensure!(row.seconds >= least, "it ended after {} s, and the case waits {least} s", row.seconds);
        Ok(())
    }

    fn measure(params: &Params, _profile: Profile) -> Result<Row> {
        let ranks = params.world_size;
        require_devices(params.backend, ranks)?;
        let folder = tempfile::tempdir().context("making a folder for the ranks' notes")?;
        let [patience, deadline] = [params.patience_s, params.deadline_s].map(Duration::from_secs_f64);
        let run = |fault, deadline| {
            let input = serde_json::to_value(FaultTest { fault, folder: folder.path().into() })?;
            launch(&Launch { backend: params.backend, patience, ..Launch::new(TASK.name, ranks, deadline) }, &input)
        };
        let started = Instant::now();
        let outcome = run(params.fault, deadline);
        let seconds = started.elapsed().as_secs_f64();
        let pids = pids(folder.path())?;
        ensure!(pids.len() == ranks, "{} ranks wrote their process id, not {ranks}: {outcome:?}", pids.len());
        let left = pids.iter().filter(|&&pid| is_alive(pid)).count();
        let words = format!("{:#}", outcome.err().context("the run ended as if nothing had gone wrong")?);
        let (names_rank, names_call) = names(&words, ranks - 1);
        let next = run(RankFault::None, Duration::from_secs(60)).context("the run after the fault")?;
        let sum = (1..=ranks).sum::<usize>() as f64;
        let next_run_works = next.len() == ranks && next.iter().all(|value| value.as_f64() == Some(sum));
        Ok(Row { words, names_rank, names_call, seconds, left, next_run_works })
    }
}

/// The first thing that the supervisor says, without the task; after a deadline, where the first rank was.
pub fn accusation(words: &str) -> &str {
    let words = match words.split_once(": ") {
        Some((task, words)) if task.starts_with("task ") => words,
        _ => words,
    };
    let mut lines = words.split('\n').skip_while(|line| line.contains("deadline"));
    lines.next().unwrap_or_default()
}

/// Whether the supervisor accuses `rank` first, and names barrier 1 or all-reduce 2 by number.
fn names(words: &str, rank: usize) -> (bool, bool) {
    let words = accusation(words);
    let numbers = |of: &str| -> Vec<usize> {
        let digits = |rest: &str| rest.split(|c: char| !c.is_ascii_digit()).next().and_then(|n| n.parse().ok());
        words.split(&format!("{of} ")).skip(1).filter_map(digits).collect()
    };
    let calls = [("barrier", 1), ("all_reduce", 2), ("collective", 2)];
    let accused = match words.split_once(": rank 0 calls ").filter(|_| words.contains("disagree")) {
        // The first whose call is not that of rank 0.
        Some((_, all)) => {
            let mut calls = all.split(", rank ");
            let first = calls.next();
            let other = calls.filter_map(|call| call.split_once(" calls ")).find(|(_, call)| Some(*call) != first);
            other.and_then(|(rank, _)| rank.parse().ok())
        }
        None => numbers("which rank").first().or(numbers("rank").first()).copied(),
    };
    (accused == Some(rank), calls.iter().any(|(of, number)| numbers(of).contains(number)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_names_a_rank_and_a_call_or_it_does_not() {
        assert_eq!(names("rank 0 waits in all_reduce 2 of 4 Float, which rank 3 has not called", 3), (true, true));
        assert_eq!(names("rank 1 of 2 exited with status 7", 1), (true, false));
        assert_eq!(names("a rank failed in all_reduce 12, and rank 12 too", 1), (false, false));
        let other =
            "task fault_test on 3 ranks: rank 1 waits in all_reduce 2, which rank 0 has not called\nrank 2: it waited";
        assert_eq!(names(other, 2), (false, true), "another rank is accused");
        let disagree = "the ranks disagree on collective 2: rank 0 calls all_reduce, rank 1 calls broadcast of 4 Float from rank 0";
        assert_eq!(names(disagree, 1), (true, true));
        let late = "task t on 2 ranks: the deadline of 12 s passed\nrank 0 of 2 was still running\nrank 1: barrier 1";
        assert_eq!(names(late, 1), (false, false));
        let two = "rank 0 waits in all_reduce 2 of 4, which rank 1 has not called: it stalls (x), rank 3 has not called: it works";
        assert_eq!((names(two, 1), names(two, 3)), ((true, true), (false, true)));
        let equal = "the ranks disagree on collective 2: rank 0 calls a of 4 Float, sum, rank 1 calls a of 4 Float, sum, rank 2 calls b";
        assert_eq!((names(equal, 1), names(equal, 2)), ((false, true), (true, true)));
    }

    #[test]
    fn a_run_without_a_fault_is_refused() {
        let params = |fault| Params { backend: Backend::Gloo, world_size: 2, fault, patience_s: 3.0, deadline_s: 60.0 };
        assert!(FaultTests::validate(&params(RankFault::Exit)).is_ok());
        let error = FaultTests::validate(&params(RankFault::None)).unwrap_err().to_string();
        assert!(error.contains("fault is None"), "{error}");
        assert!(FaultTests::validate(&Params { deadline_s: 0.0, ..params(RankFault::Exit) }).is_err());
        assert!(FaultTests::validate(&Params { world_size: 1, ..params(RankFault::Exit) }).is_err());
    }
}
