//! Measuring under a budget, repeated measurements of a throttled GPU, and clean-up between cases.

use std::collections::BTreeSet;
use std::fs;
use std::io::Write as _;
use std::time::Duration;

use anyhow::{Result, bail, ensure};
use cs336::harness::case::Runner;
use cs336::harness::conditions::{Conditions, Reading, Throttle};
use cs336::harness::plan::{Scope, plan};
use cs336::harness::provenance::machine;
use cs336::harness::record::{Outcome, Profile};
use cs336::harness::run::{MeasureSummary, Tally};
use cs336::harness::store::Layout;

use super::{Notes, TEST_REGISTRY, facts, in_time, measure, record, runner, tree, tree_of, visit};

type Test = (&'static str, fn() -> Result<()>);

pub const TESTS: &[Test] = &[
    ("a_throttled_case_is_measured_once_more", a_throttled_case_is_measured_once_more),
    ("a_gpu_that_stays_throttled_is_recorded_as_throttled", a_gpu_that_stays_throttled_is_recorded_as_throttled),
    (
        "without_throttling_or_without_a_gpu_a_case_is_measured_once",
        without_throttling_or_without_a_gpu_a_case_is_measured_once,
    ),
    ("a_budget_measures_quick_tables_first", a_budget_measures_quick_tables_first),
    ("a_budget_bounds_the_running_case", a_budget_bounds_the_running_case),
    ("a_case_too_long_for_the_budget_is_not_begun", a_case_too_long_for_the_budget_is_not_begun),
    ("records_copied_to_a_fresh_tree_are_resumed", records_copied_to_a_fresh_tree_are_resumed),
    ("without_a_gpu_no_case_of_the_gpu_profile_runs", without_a_gpu_no_case_of_the_gpu_profile_runs),
    ("a_worker_is_cleaned_up_between_cases", a_worker_is_cleaned_up_between_cases),
    ("a_worker_that_cannot_be_cleaned_up_is_replaced", a_worker_that_cannot_be_cleaned_up_is_replaced),
];

/// The log of the case `dawdles`: a dot for each start, a comma for each end.
fn attempts(layout: &Layout) -> String {
    fs::read_to_string(layout.root.join("attempts")).unwrap_or_default()
}

fn reading(throttle: Option<Throttle>) -> Reading {
    let throttle = throttle.into_iter().collect();
    Reading { sm_clock_hz: 1.98e9, memory_clock_hz: 3.2e9, power_w: 500.0, temperature_c: 60.0, throttle }
}

/// Measures `dawdles` with a sensor that receives the case's log. Returns how often the case was started.
fn watched(sensor: fn(&str) -> Option<Reading>) -> Result<(usize, Option<Conditions>)> {
    let (_folder, layout) = tree("actions", "\"dawdles\"")?;
    let look = || {
        let reading = sensor(&attempts(&layout))?;
        // The case ends after a reading.
        let looks = fs::File::options().create(true).append(true).open(layout.root.join("looks"));
        looks.and_then(|mut looks| looks.write_all(b".")).expect("the tree can be written");
        Some(reading)
    };
    let runner = Runner { sensor: &look, ..runner(&layout) };
    let tally = visit(&runner, &TEST_REGISTRY[0], Scope::All, &mut Notes::default())?.tally;
    ensure!(tally.measured == 1, "{tally:?}");
    Ok((attempts(&layout).matches('.').count(), record(&layout)?.cases.remove(0).conditions))
}

fn a_throttled_case_is_measured_once_more() -> Result<()> {
    let slow_at_first = |noted: &str| Some(reading((noted == ".").then_some(Throttle::HwThermalSlowdown)));
    let (attempts, Some(conditions)) = watched(slow_at_first)? else { bail!("no conditions were recorded") };
    ensure!(attempts == 2, "it was measured {attempts} times");
    ensure!(conditions.remeasured_after == BTreeSet::from([Throttle::HwThermalSlowdown]), "{conditions:?}");
    ensure!(conditions.spoiled_by().is_empty() && conditions.during.is_some(), "{conditions:?}");
    Ok(())
}

fn a_gpu_that_stays_throttled_is_recorded_as_throttled() -> Result<()> {
    let (attempts, conditions) = watched(|_| Some(reading(Some(Throttle::HwPowerBrakeSlowdown))))?;
    let Some(conditions) = conditions else { bail!("no conditions were recorded") };
    ensure!(attempts == 2, "it was measured {attempts} times");
    let reasons = BTreeSet::from([Throttle::HwPowerBrakeSlowdown]);
    ensure!(conditions.remeasured_after == reasons && conditions.spoiled_by() == reasons, "{conditions:?}");
    Ok(())
}

fn without_throttling_or_without_a_gpu_a_case_is_measured_once() -> Result<()> {
    let (attempts, conditions) = watched(|_| Some(reading(Some(Throttle::SwPowerCap))))?;
    let Some(conditions) = conditions else { bail!("no conditions were recorded") };
    ensure!(attempts == 1 && conditions.remeasured_after.is_empty(), "a power cap was measured {attempts} times");
    ensure!(conditions.during.is_some_and(|during| during.throttle.contains(&Throttle::SwPowerCap)), "it was not kept");
    let (attempts, conditions) = watched(|_| None)?;
    ensure!(attempts == 1 && conditions.is_none(), "without a sensor: {attempts} times, {conditions:?}");
    Ok(())
}

fn within(layout: &Layout, budget: Duration, scope: Scope, notes: &mut Notes) -> Result<MeasureSummary> {
    let runner = Runner { budget: Some(budget), limit: Duration::from_secs(600), ..runner(layout) };
    visit(&runner, &TEST_REGISTRY[0], scope, notes)
}

fn a_budget_measures_quick_tables_first() -> Result<()> {
    let (_folder, layout) = tree_of("actions", "[cpu.slow]\naction = \"dawdles\"\n[cpu.quick]\naction = \"works\"\n")?;
    measure(&layout, &TEST_REGISTRY[0], Scope::All)?;
    let mut old = record(&layout)?;
    for case in &mut old.cases {
        case.elapsed_s = if case.params["action"] == "dawdles" { 2.0 } else { 1.0 };
    }
    fs::write(layout.local(Profile::Cpu, "actions"), old.to_json()?)?;
    let mut notes = Notes::default();
    let visit = within(&layout, Duration::from_secs(600), Scope::All, &mut notes)?;
    ensure!(notes.cases == ["works", "dawdles"], "{:?}", notes.cases);
    ensure!(visit.tally.measured == 2 && visit.left.is_empty(), "{visit:?}");
    Ok(())
}

fn a_budget_bounds_the_running_case() -> Result<()> {
    in_time(a_budget_bounds)
}

fn a_budget_bounds(budget: Duration) -> Result<()> {
    let (_folder, layout) = tree("actions", "\"works\", \"hangs\", \"chatters\"")?;
    let visit = within(&layout, budget, Scope::All, &mut Notes::default())?;
    ensure!((visit.tally.measured, visit.tally.failed) == (1, 0), "{visit:?}");
    let left: Vec<_> = visit.left.iter().flat_map(|table| &table.pending).map(|c| c.params["action"].clone()).collect();
    ensure!(left == ["hangs", "chatters"], "{left:?}");
    ensure!(record(&layout)?.cases.len() == 1, "what was cut off was recorded");
    let unfinished = Scope::Unfinished { here: &machine(&[])? };
    let Some(plan) = plan(&layout, &TEST_REGISTRY[0], Profile::Cpu, unfinished)? else { bail!("no plan") };
    ensure!(plan.pending.len() == 2, "--resume would measure {:?}", plan.pending);
    Ok(())
}

fn a_case_too_long_for_the_budget_is_not_begun() -> Result<()> {
    let (_folder, layout) = tree("actions", "\"dawdles\", \"works\"")?;
    measure(&layout, &TEST_REGISTRY[0], Scope::All)?;
    let mut old = record(&layout)?;
    old.cases[0].elapsed_s = 3600.0;
    fs::write(layout.local(Profile::Cpu, "actions"), old.to_json()?)?;
    let mut notes = Notes::default();
    let visit = within(&layout, Duration::from_secs(60), Scope::All, &mut notes)?;
    ensure!(notes.cases == ["works"] && visit.left[0].pending.len() == 1, "{:?}, {visit:?}", notes.cases);
    Ok(())
}

fn records_copied_to_a_fresh_tree_are_resumed() -> Result<()> {
    let (_folder, layout) = tree("actions", "\"works\", \"fails\", \"chatters\"")?;
    measure(&layout, &TEST_REGISTRY[0], Scope::All)?;
    let (_fresh, fresh) = tree("actions", "\"works\", \"dawdles\", \"fails\", \"chatters\"")?;
    let (from, to) = (layout.local(Profile::Cpu, "actions"), fresh.local(Profile::Cpu, "actions"));
    fs::create_dir_all(to.parent().unwrap_or(&to))?;
    fs::copy(from, &to)?;
    let mut notes = Notes::default();
    visit(&runner(&fresh), &TEST_REGISTRY[0], Scope::Unfinished { here: &machine(&[])? }, &mut notes)?;
    ensure!(notes.cases == ["dawdles", "fails"], "{:?}", notes.cases);
    let record = record(&fresh)?;
    ensure!(record.cases.len() == 4 && record.runs.len() == 2, "{record:?}");
    Ok(())
}

/// Also one that needs none, as ranks on the processors of the GPU's machine.
fn without_a_gpu_no_case_of_the_gpu_profile_runs() -> Result<()> {
    let (_folder, layout) = tree_of("actions", "[gpu.all]\naction = [\"works\", \"fails\"]\n")?;
    let Some(plan) = plan(&layout, &TEST_REGISTRY[0], Profile::Gpu, Scope::All)? else { bail!("no plan") };
    let tally = runner(&layout).measure(vec![plan], &facts(), &mut Notes::default()).tally;
    ensure!(tally == Tally { not_run: 2, ..Tally::default() }, "{tally:?}");
    Ok(())
}

/// The rows of two cases measured one after the other.
fn rows(actions: &str) -> Result<[serde_json::Value; 2]> {
    let (_folder, layout) = tree("actions", actions)?;
    measure(&layout, &TEST_REGISTRY[0], Scope::All)?;
    let record = record(&layout)?;
    match [&record.cases[0].outcome, &record.cases[1].outcome] {
        [Outcome::Measured { row: one }, Outcome::Measured { row: two }] => Ok([one.clone(), two.clone()]),
        other => bail!("{other:?}"),
    }
}

fn a_worker_is_cleaned_up_between_cases() -> Result<()> {
    let [one, two] = rows("\"works\", \"chatters\"")?;
    ensure!(one["process"] == two["process"], "two workers served two working cases");
    ensure!(two["clean"] == true, "the state of the first case was not cleaned up before the second");
    Ok(())
}

fn a_worker_that_cannot_be_cleaned_up_is_replaced() -> Result<()> {
    let [one, two] = rows("\"litters\", \"works\"")?;
    ensure!(one["process"] != two["process"], "process {} served on", one["process"]);
    Ok(())
}
