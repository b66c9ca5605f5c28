//! One case's crash, panic, hang, kill or impossible figure is that case's outcome, and the others go on.
//!
//! The test program is its own worker: started with the argument `worker`, it serves the broken problems below.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use cs336::error::Fault;
use cs336::harness::problem::{Check, Measure, Measured, Problem, Verdict, no_facts};
use cs336::harness::provenance::{Facts, available_memory_bytes};
use cs336::harness::record::{Outcome, Peaks, Profile, RecordFile};
use cs336::harness::run::{CheckEnding, Pending, Progress, Runner, Scope, Tally, plan};
use cs336::harness::samples::{Samples, Work};
use cs336::harness::store::Layout;
use cs336::harness::worker::{Abilities, Pool, serve};
use libtest_mimic::{Arguments, Trial};
use serde::{Deserialize, Serialize};

/// What a case does to the process that measures it.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Deed {
    Works,
    Fails,
    Panics,
    PanicsInLibtorchsWords,
    Aborts,
    KillsItself,
    Hangs,
    LacksMemory,
    LacksGpu,
    BeatsPhysics,
    Chatters,
    StartsFresh,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Params {
    deed: Deed,
}

#[derive(Serialize, Deserialize)]
struct Row {
    time: Samples,
    process: u32,
}

struct Deeds;

impl Measure for Deeds {
    type Params = Params;
    type Row = Row;
    const REVISION: u32 = 3;

    fn fresh_process(params: &Params) -> bool {
        params.deed == Deed::StartsFresh
    }

    fn predicted_bytes(_: &Params) -> Option<u64> {
        Some(77)
    }

    fn measure(params: &Params, _: Profile) -> Result<Row> {
        let row = |seconds: f64| {
            let work = Work { flops: 1e6, bytes: 0.0, precision: "float32".into() };
            Ok(Row { time: Samples::seconds(vec![seconds], work)?, process: std::process::id() })
        };
        match params.deed {
            Deed::Works | Deed::StartsFresh => row(1.0),
            Deed::Fails => bail!("the reason of the failure"),
            Deed::Panics => panic!("the words of the panic"),
            Deed::PanicsInLibtorchsWords => panic!("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0"),
            Deed::Aborts => std::process::abort(),
            Deed::KillsItself => {
                eprintln!("the last words");
                let status = std::process::Command::new("kill").args(["-9", &std::process::id().to_string()]).status();
                unreachable!("survived {status:?}")
            }
            Deed::Hangs => loop {
                std::thread::sleep(Duration::from_secs(60));
            },
            Deed::LacksMemory => {
                Err(Fault::OutOfMemory { requested_bytes: Some(available_memory_bytes()?), message: "refused".into() }
                    .into())
            }
            Deed::LacksGpu => Err(Fault::NotAvailable { needs: "a GPU".into(), has: "none".into() }.into()),
            Deed::BeatsPhysics => row(1e-9),
            Deed::Chatters => {
                println!("a library prints this");
                row(1.0)
            }
        }
    }
}

const DEEDS: Problem = Problem {
    name: "deeds",
    answers: &[""],
    checks: &[Check { name: "sound", part: "", run: || Verdict::passed("fine") }],
    measured: Some(Measured::of::<Deeds>()),
    facts: no_facts,
};

const UNSOUND: Problem = Problem {
    name: "unsound",
    answers: &[""],
    checks: &[Check { name: "wrong", part: "", run: || bail!("0.5 is not 0.25") }],
    measured: Some(Measured::of::<Deeds>()),
    facts: no_facts,
};

const TEST_REGISTRY: &[Problem] = &[DEEDS, UNSOUND];

struct Quiet;

impl Progress for Quiet {
    fn checks_started(&mut self, _: &Problem) {}
    fn case_started(&mut self, _: &Pending) {}
    fn case_ended(&mut self, _: &Pending, _: &Outcome, _: Duration) {}
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

/// A tree whose suite declares `deeds`.
fn tree(problem: &str, deeds: &str) -> Result<(tempfile::TempDir, Layout)> {
    let folder = tempfile::tempdir()?;
    for name in ["suites", "templates"] {
        std::fs::create_dir(folder.path().join(name))?;
    }
    std::fs::write(folder.path().join(format!("suites/{problem}.toml")), format!("[cpu.all]\ndeed = [{deeds}]\n"))?;
    let layout = Layout { root: folder.path().to_path_buf() };
    Ok((folder, layout))
}

fn measure(layout: &Layout, problem: &'static Problem, scope: Scope) -> Result<Tally> {
    let runner =
        Runner { layout, program: std::env::current_exe()?, limit: Duration::from_secs(5), interrupted: &|| false };
    let Some(plan) = plan(layout, problem, Profile::Cpu, scope)? else { bail!("nothing is planned") };
    runner.measure(plan, &facts(), &mut Quiet)
}

fn record(layout: &Layout) -> Result<RecordFile> {
    layout.read_local(Profile::Cpu, "deeds")?.ok_or_else(|| anyhow::anyhow!("no record"))
}

/// Measures one deed between two that work, and gives its outcome.
fn outcome_of(deed: &str) -> Result<Outcome> {
    let (_folder, layout) = tree("deeds", &format!("\"{deed}\", \"works\""))?;
    measure(&layout, &TEST_REGISTRY[0], Scope::All)?;
    let record = record(&layout)?;
    ensure!(record.cases.len() == 2, "{} cases were recorded", record.cases.len());
    ensure!(
        matches!(record.cases[1].outcome, Outcome::Measured { .. }),
        "the next case: {:?}",
        record.cases[1].outcome
    );
    Ok(record.cases[0].outcome.clone())
}

fn fails_with(deed: &str, words: &str) -> Result<()> {
    match outcome_of(deed)? {
        Outcome::Failed { error } if error.contains(words) => Ok(()),
        other => bail!("{deed} gave {other:?}, not a failure with {words:?}"),
    }
}

fn faults_become_outcomes() -> Result<()> {
    let oom = |deed: &str| match outcome_of(deed)? {
        Outcome::OutOfMemory { requested_bytes, predicted_bytes: Some(77), .. } => Ok(requested_bytes),
        other => bail!("{deed} gave {other:?}"),
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
    let started = Instant::now();
    fails_with("hangs", "limit of 5 s")?;
    ensure!(started.elapsed() < Duration::from_secs(30), "it took {:?}", started.elapsed());
    Ok(())
}

fn one_worker_serves_while_all_is_well_and_is_replaced_after_a_failure() -> Result<()> {
    let (_folder, layout) = tree("deeds", "\"works\", \"chatters\", \"fails\", \"starts_fresh\"")?;
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
    let (_folder, layout) = tree("deeds", "\"works\", \"starts_fresh\"")?;
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

fn resume_repeats_the_failed_and_keeps_the_rest() -> Result<()> {
    let (_folder, layout) = tree("deeds", "\"works\", \"fails\"")?;
    measure(&layout, &TEST_REGISTRY[0], Scope::All)?;
    let before = record(&layout)?;
    let tally = measure(&layout, &TEST_REGISTRY[0], Scope::Unfinished)?;
    ensure!((tally.measured, tally.failed) == (0, 1), "{tally:?}");
    ensure!(
        measure(&layout, &TEST_REGISTRY[0], Scope::Outdated)? == Tally::default(),
        "a fresh record was measured again"
    );
    let after = record(&layout)?;
    ensure!(before.cases[0] == after.cases[0] && after.runs.len() == 2, "the sound case or its run was lost");
    // A case that leaves the suite leaves the record with the next measuring; a new one is missing until then.
    std::fs::write(layout.root.join("suites/deeds.toml"), "[cpu.all]\ndeed = [\"chatters\", \"works\"]\n")?;
    ensure!(measure(&layout, &TEST_REGISTRY[0], Scope::Outdated)?.measured == 1, "the new case was not measured alone");
    let record = record(&layout)?;
    let names: Vec<_> = record.cases.iter().map(|c| c.params["deed"].clone()).collect();
    ensure!(names == ["chatters", "works"], "{names:?}");
    Ok(())
}

fn another_revision_is_stale() -> Result<()> {
    let (_folder, layout) = tree("deeds", "\"works\"")?;
    measure(&layout, &TEST_REGISTRY[0], Scope::All)?;
    let mut old = record(&layout)?;
    old.cases[0].revision = 2;
    std::fs::write(layout.local(Profile::Cpu, "deeds"), old.to_json()?)?;
    ensure!(measure(&layout, &TEST_REGISTRY[0], Scope::Outdated)?.measured == 1, "a stale case was not measured again");
    ensure!(record(&layout)?.cases[0].revision == 3, "the revision did not move on");
    Ok(())
}

fn what_fails_its_checks_is_not_timed() -> Result<()> {
    let (_folder, layout) = tree("unsound", "\"works\"")?;
    let error = match measure(&layout, &TEST_REGISTRY[1], Scope::All) {
        Ok(tally) => bail!("it was timed: {tally:?}"),
        Err(error) => format!("{error:#}"),
    };
    ensure!(error.contains("unsound::wrong") && error.contains("0.5 is not 0.25"), "{error}");
    ensure!(layout.read_local(Profile::Cpu, "unsound")?.is_none(), "a record was written");
    Ok(())
}

fn an_interrupt_keeps_what_was_measured() -> Result<()> {
    let (_folder, layout) = tree("deeds", "\"works\", \"hangs\"")?;
    let started = Instant::now();
    let late = || started.elapsed() > Duration::from_secs(2);
    let runner = Runner {
        layout: &layout,
        program: std::env::current_exe()?,
        limit: Duration::from_secs(60),
        interrupted: &late,
    };
    let Some(plan) = plan(&layout, &TEST_REGISTRY[0], Profile::Cpu, Scope::All)? else { bail!("nothing is planned") };
    let tally = runner.measure(plan, &facts(), &mut Quiet)?;
    ensure!(tally.interrupted && tally.measured == 1, "{tally:?}");
    ensure!(record(&layout)?.cases.len() == 1, "the running case was recorded, or the measured one lost");
    Ok(())
}

fn an_unknown_check_is_a_failure_with_its_name() -> Result<()> {
    let (_folder, layout) = tree("deeds", "\"works\"")?;
    let runner = Runner {
        layout: &layout,
        program: std::env::current_exe()?,
        limit: Duration::from_secs(5),
        interrupted: &|| false,
    };
    let mut pool = Pool::new(runner.program.clone(), layout.root.clone());
    let stranger = Check { name: "stranger", part: "", run: || Verdict::passed("") };
    match runner.check(&mut pool, &TEST_REGISTRY[0], &stranger)? {
        CheckEnding::Failed { error } if error.contains("stranger") => Ok(()),
        other => bail!("{other:?}"),
    }
}

fn main() -> ExitCode {
    if std::env::args().nth(1).as_deref() == Some("worker") {
        return match serve(Abilities {
            registry: TEST_REGISTRY,
            run_case: |path| bail!("no case runner for {}", path.display()),
        }) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("{error:#}");
                ExitCode::FAILURE
            }
        };
    }
    let test = |name: &str, run: fn() -> Result<()>| {
        Trial::test(name, move || run().map_err(|error| format!("{error:#}").into()))
    };
    let trials = vec![
        test("an_error_is_a_failure_with_its_reason", || fails_with("fails", "the reason of the failure")),
        test("a_panic_is_a_failure_with_its_words", || fails_with("panics", "panicked: the words of the panic")),
        test("a_crash_is_a_failure_with_its_signal", || fails_with("aborts", "signal 6")),
        test("a_kill_is_a_failure_with_the_last_words", || fails_with("kills_itself", "the last words")),
        test("an_impossible_time_is_a_failure", || fails_with("beats_physics", "faster than this machine can be")),
        test("faults_become_outcomes", faults_become_outcomes),
        test("a_hang_ends_at_the_limit", a_hang_ends_at_the_limit),
        test(
            "one_worker_serves_while_all_is_well",
            one_worker_serves_while_all_is_well_and_is_replaced_after_a_failure,
        ),
        test("a_case_that_starts_fresh_has_a_process_of_its_own", a_case_that_starts_fresh_has_a_process_of_its_own),
        test("resume_repeats_the_failed_and_keeps_the_rest", resume_repeats_the_failed_and_keeps_the_rest),
        test("another_revision_is_stale", another_revision_is_stale),
        test("what_fails_its_checks_is_not_timed", what_fails_its_checks_is_not_timed),
        test("an_interrupt_keeps_what_was_measured", an_interrupt_keeps_what_was_measured),
        test("an_unknown_check_is_a_failure_with_its_name", an_unknown_check_is_a_failure_with_its_name),
    ];
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}
