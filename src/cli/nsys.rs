//! `cs336 nsys`: NVIDIA's nsys in place of the profiler in this process, for the problem nsys_profile.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail, ensure};
use clap::Subcommand;

use super::Ended;
use crate::bench::device::device_for;
use crate::bench::machine;
use crate::harness::floor;
use crate::harness::plan::{Plan, Scope, plan};
use crate::harness::provenance::open_run;
use crate::harness::record::{CaseRecord, Outcome, Profile};
use crate::harness::store::{Layout, Lock, write_atomically};
use crate::harness::suite;
use crate::problems::nsys_profile::measure::{Collector, Params, Row};
use crate::problems::nsys_profile::summary::{Counted, RangeWork, Summary};
use crate::problems::nsys_profile::{PROBLEM, nsys};
use crate::units::human_seconds;

#[derive(Subcommand)]
pub enum Verb {
    /// Run one step of a case under nsys: `nsys profile --trace=cuda,nvtx -o step cs336 nsys step`
    Step {
        /// Replace a key of the gpu grid's first case (repeatable)
        #[arg(long = "set", value_name = "KEY=VALUE")]
        settings: Vec<String>,
    },
    /// Print what `nsys export --type sqlite step.nsys-rep` holds, and put it into this machine's records
    Import {
        /// The SQLite file
        file: PathBuf,
    },
}

pub fn run(layout: &Layout, verb: &Verb) -> Result<Ended> {
    match verb {
        Verb::Step { settings } => step(layout, settings),
        Verb::Import { file } => import(layout, file),
    }
}

fn step(layout: &Layout, settings: &[String]) -> Result<Ended> {
    // nsys sets it for the programs that it starts.
    ensure!(
        std::env::var_os("NSYS_PROFILING_SESSION_ID").is_some(),
        "nsys is not watching: start this as `nsys profile --trace=cuda,nvtx -o step cs336 nsys step`"
    );
    let suite = suite::load(&layout.root, &PROBLEM)?.context("nsys_profile has no suite")?;
    let case = suite::override_case(&suite, Profile::Gpu, settings, &PROBLEM)?;
    nsys::step(&serde_json::from_value(case)?, device_for(Profile::Gpu)?)?;
    eprintln!("next: nsys export --type sqlite <the report>, then cs336 nsys import <the SQLite file>");
    Ok(Ended::Well)
}

fn import(layout: &Layout, file: &Path) -> Result<Ended> {
    let imported = nsys::read(file)?;
    for complaint in &imported.complaints {
        eprintln!("nsys said: {complaint}");
    }
    let params: Params =
        serde_json::from_value(imported.params.clone()).context("the step was one of another version of cs336")?;
    let summary = Summary::of(&imported.trace, Counted::Kernels, Collector::Nsys)?;
    println!("{}", imported.params);
    print(&summary);
    let row = serde_json::to_value(Row::new(&params, summary)?)?;
    match record(layout, &imported, row) {
        Ok(path) => eprintln!("recorded in {path}"),
        Err(reason) => eprintln!("not recorded: {reason:#}"),
    }
    Ok(Ended::Well)
}

/// The kernel tables, pass by pass.
fn print(summary: &Summary) {
    let passes = &summary.passes;
    let training = [("forward", &passes.forward), ("backward", &passes.backward), ("optimizer", &passes.optimizer)];
    let training = training.into_iter().filter_map(|(name, work)| Some((name, work.as_ref()?)));
    for (name, work) in std::iter::once(("inference", &passes.inference)).chain(training) {
        let RangeWork { seconds, span_s, count, kernels, rest, .. } = work;
        println!("\n{name}: {count} kernels, {} in a span of {}", human_seconds(*seconds), human_seconds(*span_s));
        for kernel in kernels {
            let class = serde_json::to_value(kernel.class).ok();
            let class = class.as_ref().and_then(|c| c.as_str()).unwrap_or_default();
            let share = 100.0 * kernel.seconds / seconds;
            println!(
                "{share:6.1} % {:>6} x {:>10}  {class:13} {}",
                kernel.count,
                human_seconds(kernel.seconds),
                kernel.name
            );
        }
        if rest.count > 0 {
            let share = 100.0 * rest.seconds / seconds;
            println!("{share:6.1} % {:>6} x {:>10}  {} others", rest.count, human_seconds(rest.seconds), rest.names);
        }
    }
}

/// Puts the row in place of the case's own, if the case is one of the grid and this is the machine that was profiled.
fn record(layout: &Layout, imported: &nsys::Import, row: serde_json::Value) -> Result<String> {
    let facts = machine::facts(Profile::Gpu)?;
    let here: Vec<_> = facts.gpus.iter().map(|gpu| gpu.name.clone()).collect();
    ensure!(
        !here.is_empty() && here == imported.gpus,
        "the profile is of {:?}, this machine has {here:?}",
        imported.gpus
    );
    let _lock = Lock::acquire(layout)?;
    let plan = plan(layout, &PROBLEM, Profile::Gpu, Scope::Unfinished)?.context("the suite has no gpu grid")?;
    let Plan { mut record, suite, measured, .. } = plan;
    let grid = suite.cases(Profile::Gpu).find(|(_, params)| **params == imported.params);
    let Some((grid, params)) = grid else { bail!("the case is in no gpu grid of suites/nsys_profile.toml") };
    let run = open_run(&layout.root, &suite.hash, &facts)?;
    floor::check(&row, &run.peaks)?;
    let case = CaseRecord {
        grid: grid.into(),
        params: params.clone(),
        run: run.id.clone(),
        revision: measured.revision,
        kernels: Default::default(),
        elapsed_s: 0.0,
        conditions: None,
        outcome: Outcome::Measured { row },
    };
    record.put(case, &run);
    record.sort_like(suite.cases(Profile::Gpu).map(|(_, params)| params));
    let path = layout.local(Profile::Gpu, PROBLEM.name);
    write_atomically(&path, record.to_json()?.as_bytes())?;
    Ok(layout.display(&path))
}
