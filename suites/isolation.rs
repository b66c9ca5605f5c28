//! A crash, panic, hang, kill or impossible figure is the outcome of that case only. A failure of one rank ends its whole
//! run, with an error that names the rank.
//!
//! The test program is its own worker: with the argument `worker` it serves the failing problems below.

use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use cs336::collective::ranks::set_program;
use cs336::harness::case::Runner;
use cs336::harness::grade::CheckStatus;
use cs336::harness::plan::{Pending, Scope, plan};
use cs336::harness::problem::{Check, Problem, Verdict};
use cs336::harness::provenance::{Facts, machine};
use cs336::harness::record::{Outcome, Peaks, Profile, RecordFile};
use cs336::harness::run::{MeasureSummary, Progress, Tally};
use cs336::harness::schedule::{Clock, PendingTable};
use cs336::harness::store::Layout;
use cs336::harness::subject::Subject;
use cs336::harness::worker::{Abilities, Worker, serve};
use libtest_mimic::{Arguments, Trial};

#[path = "isolation/actions.rs"]
mod actions;
#[path = "isolation/crashes.rs"]
mod crashes;
#[path = "isolation/hosts.rs"]
mod hosts;
#[path = "isolation/namespaces.rs"]
mod namespaces;
#[path = "isolation/processes.rs"]
mod processes;
#[path = "isolation/ranks.rs"]
mod ranks;
#[path = "isolation/visits.rs"]
mod visits;

use actions::{TEST_DEVICE_CHECKS, TEST_REGISTRY, clean_up};

/// Records the started cases in order, and why a problem was refused.
#[derive(Default)]
struct Notes {
    cases: Vec<String>,
    refused: Vec<String>,
}

impl Progress for Notes {
    fn table_started(&mut self, _: &PendingTable) {}
    fn checks_started(&mut self, _: &Problem) {}
    fn case_started(&mut self, case: &Pending) {
        self.cases.push(case.params["action"].as_str().unwrap_or_default().into());
    }
    fn case_ended(&mut self, _: &Pending, _: &Outcome, _: Duration) {}
    fn table_ended(&mut self) {}
    fn noticed(&mut self, _: &str) {}
    fn refused(&mut self, error: &anyhow::Error) {
        self.refused.push(format!("{error:#}"));
    }
}

fn facts() -> Facts {
    let peaks = Peaks {
        flops_per_s: [("float32".to_string(), 1e12)].into(),
        bytes_per_s: 1e12,
        cache_bytes: 0.0,
        source: "a test".into(),
    };
    Facts { gpus: Vec::new(), software: Default::default(), settings: Default::default(), peaks }
}

/// A tree whose suite declares one grid of `actions`.
fn tree(problem: &str, actions: &str) -> Result<(tempfile::TempDir, Layout)> {
    tree_of(problem, &format!("[cpu.all]\naction = [{actions}]\n"))
}

fn tree_of(problem: &str, suite: &str) -> Result<(tempfile::TempDir, Layout)> {
    let folder = tempfile::tempdir()?;
    for name in ["suites", "templates"] {
        std::fs::create_dir(folder.path().join(name))?;
    }
    std::fs::write(folder.path().join(format!("suites/{problem}.toml")), suite)?;
    let layout = Layout::at(folder.path().to_path_buf());
    Ok((folder, layout))
}

fn runner(layout: &Layout) -> Runner<'_> {
    Runner::new(layout, &|| false)
}

/// Tries `body` with a time limit, then with longer ones, because a busy machine can make the first too short. A real
/// failure fails with every limit.
fn in_time(body: impl Fn(Duration) -> Result<()>) -> Result<()> {
    let mut outcome = Ok(());
    for seconds in [2, 20, 80] {
        outcome = body(Duration::from_secs(seconds));
        if outcome.is_ok() {
            break;
        }
    }
    outcome
}

fn visit(runner: &Runner, problem: &'static Problem, scope: Scope, notes: &mut Notes) -> Result<MeasureSummary> {
    let Some(plan) = plan(runner.layout, problem, Profile::Cpu, scope)? else { bail!("nothing is planned") };
    Ok(runner.measure(vec![plan], &facts(), notes))
}

fn measure(layout: &Layout, problem: &'static Problem, scope: Scope) -> Result<Tally> {
    let mut notes = Notes::default();
    let visit = visit(&runner(layout), problem, scope, &mut notes)?;
    ensure!(notes.refused.is_empty(), "{}", notes.refused.join("; "));
    Ok(visit.tally)
}

fn record(layout: &Layout) -> Result<RecordFile> {
    layout.read_local(Profile::Cpu, &TEST_REGISTRY[0])?.ok_or_else(|| anyhow::anyhow!("no record"))
}

/// Measures one action, followed by one that works, and returns its outcome.
fn outcome_of(action: &str) -> Result<Outcome> {
    let (_folder, layout) = tree("actions", &format!("\"{action}\", \"works\""))?;
    outcome_by(&runner(&layout))
}

fn outcome_by(runner: &Runner) -> Result<Outcome> {
    let mut notes = Notes::default();
    visit(runner, &TEST_REGISTRY[0], Scope::All, &mut notes)?;
    ensure!(notes.refused.is_empty(), "{}", notes.refused.join("; "));
    let record = record(runner.layout)?;
    ensure!(record.cases.len() == 2, "{} cases were recorded", record.cases.len());
    ensure!(
        matches!(record.cases[1].outcome, Outcome::Measured { .. }),
        "the next case: {:?}",
        record.cases[1].outcome
    );
    Ok(record.cases[0].outcome.clone())
}

fn fails_with(action: &str, words: &str) -> Result<()> {
    require_failure(&outcome_of(action)?, words).with_context(|| action.to_string())
}

fn require_failure(outcome: &Outcome, words: &str) -> Result<()> {
    match outcome {
        Outcome::Failed { error } if error.contains(words) => Ok(()),
        other => bail!("it gave {other:?}, not a failure with {words:?}"),
    }
}

fn faults_become_outcomes() -> Result<()> {
    let oom = |action: &str| match outcome_of(action)? {
        Outcome::OutOfMemory { requested_bytes, predicted_bytes: Some(77), .. } => Ok(requested_bytes),
        other => bail!("{action} gave {other:?}"),
    };
    ensure!(oom("panics_in_libtorchs_words")? == Some(2 << 30), "the request was lost");
    ensure!(oom("lacks_memory")?.is_some(), "the request was lost");
    let not_run = outcome_of("lacks_gpu")?;
    ensure!(matches!(&not_run, Outcome::NotRun { needs, .. } if needs == "a GPU"), "{not_run:?}");
    let chatter = outcome_of("chatters")?;
    ensure!(matches!(chatter, Outcome::Measured { .. }), "{chatter:?}");
    Ok(())
}

fn a_hang_ends_at_the_limit() -> Result<()> {
    in_time(|limit| {
        let (_folder, layout) = tree("actions", "\"hangs\", \"works\"")?;
        let outcome = outcome_by(&Runner { limit, ..runner(&layout) })?;
        require_failure(&outcome, &format!("limit of {} s", limit.as_secs()))
    })
}

fn one_worker_serves_all_cases_and_is_replaced_after_a_failure() -> Result<()> {
    let (_folder, layout) = tree("actions", "\"works\", \"chatters\", \"fails\", \"starts_fresh\"")?;
    let tally = measure(&layout, &TEST_REGISTRY[0], Scope::All)?;
    ensure!((tally.measured, tally.failed) == (3, 1), "{tally:?}");
    let process = |i: usize| match &record(&layout)?.cases[i].outcome {
        Outcome::Measured { row } => Ok(row["process"].clone()),
        other => bail!("{other:?}"),
    };
    ensure!(process(0)? == process(1)?, "two workers served two sound cases");
    Ok(())
}

fn a_case_that_starts_fresh_has_a_process_of_its_own() -> Result<()> {
    let (_folder, layout) = tree("actions", "\"works\", \"starts_fresh\"")?;
    measure(&layout, &TEST_REGISTRY[0], Scope::All)?;
    let record = record(&layout)?;
    let [Outcome::Measured { row: one }, Outcome::Measured { row: two }] =
        [&record.cases[0].outcome, &record.cases[1].outcome]
    else {
        bail!("{:?}", record.cases)
    };
    ensure!(one["process"] != two["process"], "both were measured by process {}", one["process"]);
    Ok(())
}

fn resume_repeats_what_failed_or_lacked_something_and_keeps_the_rest() -> Result<()> {
    let (_folder, layout) = tree("actions", "\"works\", \"fails\", \"lacks_gpu\"")?;
    measure(&layout, &TEST_REGISTRY[0], Scope::All)?;
    let before = record(&layout)?;
    let tally = measure(&layout, &TEST_REGISTRY[0], Scope::Unfinished { here: &machine(&[])? })?;
    ensure!((tally.measured, tally.failed, tally.not_run) == (0, 1, 1), "{tally:?}");
    ensure!(
        measure(&layout, &TEST_REGISTRY[0], Scope::Outdated)? == Tally::default(),
        "a fresh record was measured again"
    );
    let after = record(&layout)?;
    ensure!(before.cases[0] == after.cases[0] && after.runs.len() == 2, "the sound case or its run was lost");
    // The next measuring drops a case that is no longer in the suite, and measures a new one.
    std::fs::write(layout.root.join("suites/actions.toml"), "[cpu.all]\naction = [\"chatters\", \"works\"]\n")?;
    ensure!(measure(&layout, &TEST_REGISTRY[0], Scope::Outdated)?.measured == 1, "the new case was not measured alone");
    let record = record(&layout)?;
    let names: Vec<_> = record.cases.iter().map(|c| c.params["action"].clone()).collect();
    ensure!(names == ["chatters", "works"], "{names:?}");
    Ok(())
}

fn another_revision_is_stale() -> Result<()> {
    let (_folder, layout) = tree("actions", "\"works\"")?;
    measure(&layout, &TEST_REGISTRY[0], Scope::All)?;
    let mut old = record(&layout)?;
    old.cases[0].revision = 2;
    std::fs::write(layout.local(Profile::Cpu, "actions"), old.to_json()?)?;
    ensure!(measure(&layout, &TEST_REGISTRY[0], Scope::Outdated)?.measured == 1, "a stale case was not measured again");
    ensure!(record(&layout)?.cases[0].revision == 3, "the revision did not move on");
    Ok(())
}

fn a_problem_that_fails_its_checks_is_not_timed() -> Result<()> {
    let (_folder, layout) = tree("unsound", "\"works\"")?;
    let error = match measure(&layout, &TEST_REGISTRY[1], Scope::All) {
        Ok(tally) => bail!("it was timed: {tally:?}"),
        Err(error) => format!("{error:#}"),
    };
    ensure!(error.contains("unsound::wrong") && error.contains("0.5 is not 0.25"), "{error}");
    ensure!(layout.read_local(Profile::Cpu, &TEST_REGISTRY[1])?.is_none(), "a record was written");
    Ok(())
}

fn an_interrupt_keeps_what_was_measured() -> Result<()> {
    let (_folder, layout) = tree("actions", "\"works\", \"hangs\"")?;
    let hangs = || layout.root.join("hanging").exists();
    let runner = Runner::new(&layout, &hangs);
    let tally = visit(&runner, &TEST_REGISTRY[0], Scope::All, &mut Notes::default())?.tally;
    ensure!(tally.interrupted && tally.measured == 1, "{tally:?}");
    ensure!(record(&layout)?.cases.len() == 1, "the running case was recorded, or the measured one lost");
    Ok(())
}

fn an_unknown_check_is_a_failure_with_its_name() -> Result<()> {
    let (_folder, layout) = tree("actions", "\"works\"")?;
    let runner = runner(&layout);
    let stranger = Check { name: "stranger", part: "", run: || Verdict::passed("") };
    match runner.check(&mut Worker::new(&layout), &TEST_REGISTRY[0], &stranger, &Clock::start(None))? {
        Some(CheckStatus::Failed { error }) if error.contains("stranger") => Ok(()),
        other => bail!("{other:?}"),
    }
}

/// A crash, a panic or a missing device affects only that device check. Each check has its own process.
fn device_checks_end_each_for_itself() -> Result<()> {
    let (_folder, layout) = tree("actions", "\"works\"")?;
    let runner = runner(&layout);
    let mut worker = Worker::new(&layout);
    let mut end = |check| runner.device_check(&mut worker, check);
    let [aborts, panics, lacks, works] = TEST_DEVICE_CHECKS else { bail!("four device checks") };
    for (check, words) in [(aborts, "signal 6"), (panics, "panicked: a deliberate error")] {
        let ending = end(check)?;
        ensure!(
            matches!(&ending, Some(CheckStatus::Failed { error }) if error.contains(words)),
            "{}: {ending:?}",
            check.name
        );
    }
    let reason = "needs a second GPU, has one".to_string();
    ensure!(end(lacks)? == Some(CheckStatus::Skipped { reason }), "{} did not end in a skip", lacks.name);
    ensure!(end(works)? != end(works)?, "one process ran two device checks");
    Ok(())
}

fn main() -> ExitCode {
    if std::env::args().nth(1).as_deref() == Some("worker") {
        let run_case = |path: &Path, _: Option<&Subject>| bail!("no case runner for {}", path.display());
        let check_subject = |_: &Subject, _: &str, check: &str| bail!("no check {check:?} of a subject");
        return match serve(Abilities {
            subject_problems: &[],
            registry: TEST_REGISTRY,
            device_checks: &[TEST_DEVICE_CHECKS],
            run_case,
            check_subject,
            clean_up,
        }) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("{error:#}");
                ExitCode::FAILURE
            }
        };
    }
    set_program(processes::PROGRAM.into());
    let test = |name: &str, run: fn() -> Result<()>| {
        Trial::test(name, move || run().map_err(|error| format!("{error:#}").into()))
    };
    let mut trials = vec![
        test("an_error_is_a_failure_with_its_reason", || fails_with("fails", "the reason of the failure")),
        test("a_panic_is_a_failure_with_its_message", || fails_with("panics", "panicked: the message of the panic")),
        test("a_crash_is_a_failure_with_its_signal", || fails_with("aborts", "signal 6")),
        test("a_kill_is_a_failure_with_the_last_output", || fails_with("kills_itself", "the last output")),
        test("an_impossible_time_is_a_failure", || fails_with("beats_physics", "faster than this machine can be")),
        test("faults_become_outcomes", faults_become_outcomes),
        test("a_hang_ends_at_the_limit", a_hang_ends_at_the_limit),
        test("one_worker_serves_while_all_is_well", one_worker_serves_all_cases_and_is_replaced_after_a_failure),
        test("a_case_that_starts_fresh_has_a_process_of_its_own", a_case_that_starts_fresh_has_a_process_of_its_own),
        test(
            "resume_repeats_what_failed_or_lacked_something_and_keeps_the_rest",
            resume_repeats_what_failed_or_lacked_something_and_keeps_the_rest,
        ),
        test("another_revision_is_stale", another_revision_is_stale),
        test("a_problem_that_fails_its_checks_is_not_timed", a_problem_that_fails_its_checks_is_not_timed),
        test("an_interrupt_keeps_what_was_measured", an_interrupt_keeps_what_was_measured),
        test("an_unknown_check_is_a_failure_with_its_name", an_unknown_check_is_a_failure_with_its_name),
        test("device_checks_end_each_for_itself", device_checks_end_each_for_itself),
    ];
    trials.extend(visits::TESTS.iter().map(|(name, run)| test(name, *run)));
    // Most of these tests wait for processes or for a limit, so more of them than cores run side by side, and those that
    // wait longest come first.
    let trials: Vec<Trial> =
        [hosts::trials(), ranks::trials(), crashes::trials(), trials].into_iter().flatten().collect();
    let mut arguments = Arguments::from_args();
    arguments.test_threads.get_or_insert(2 * std::thread::available_parallelism().map_or(2, |cores| cores.get()));
    libtest_mimic::run(&arguments, trials).exit_code()
}
