//! `cs336 grade --device`: checks that need a GPU, one process each. `cs336 accept device` promotes the results.

use std::fs::File;
use std::time::Instant;

use anyhow::{Context as _, Result};
use serde::Serialize;
use serde_json::json;

use super::{Ended, interrupted, watch_for_interrupt};
use crate::bench::machine;
use crate::checks::device::versions;
use crate::harness::case::Runner;
use crate::harness::device::{DEVICE, DeviceCheck, DeviceGroup};
use crate::harness::grade::CheckStatus;
use crate::harness::provenance::open_run;
use crate::harness::record::{Outcome, Profile, RecordFile, Run};
use crate::harness::records_lock::lock_records;
use crate::harness::store::{Layout, write_atomically};
use crate::harness::worker::Worker;
use crate::printable::{indented, printable};
use crate::problems::DEVICE_CHECKS;

/// How one check ended.
#[derive(Serialize)]
struct DeviceResult {
    #[serde(flatten)]
    check: &'static DeviceCheck,
    #[serde(flatten)]
    ending: CheckStatus,
    elapsed_s: f64,
}

/// This machine's record of device checks, written after each result.
struct Recording<'a> {
    layout: &'a Layout,
    group: &'a DeviceGroup,
    run: Run,
    file: RecordFile,
    _lock: File,
}

/// Runs the named checks, or all, and records the results. A check that this machine cannot run is skipped and keeps its
/// earlier result. Without a GPU nothing is recorded.
pub fn run(layout: &Layout, names: &[String], as_json: bool) -> Result<Ended> {
    watch_for_interrupt();
    let group = group(layout)?;
    let chosen = chosen(&group, names)?;
    let gpus = machine::gpus()?.len();
    let mut recording = (gpus > 0).then(|| Recording::open(layout, &group)).transpose()?;
    // Records of a GPU machine are accepted on one without a GPU.
    if recording.is_none() && layout.read_file(&layout.local(Profile::Gpu, DEVICE), DEVICE, Profile::Gpu).is_err() {
        let _lock = lock_records(layout)?;
        set_aside_unreadable(layout)?;
    }
    let (runner, mut worker) = (Runner::new(layout, &interrupted), Worker::new(layout));
    let (mut results, mut unrecorded) = (Vec::new(), None);
    for check in chosen {
        let started = Instant::now();
        let ending = match check.lacks(gpus) {
            Some(reason) => Some(CheckStatus::Skipped { reason }),
            None => match runner.device_check(&mut worker, check) {
                Ok(ending) => ending,
                Err(error) => Some(CheckStatus::Failed { error: printable(&format!("{error:#}")) }),
            },
        };
        let Some(ending) = ending else { return Ok(Ended::Interrupted) };
        let result = DeviceResult { check, ending, elapsed_s: started.elapsed().as_secs_f64() };
        if !as_json {
            print(&result);
        }
        let recorded = recording.iter_mut().try_for_each(|recording| recording.put(&result));
        // The disk may be full; what follows is printed all the same.
        unrecorded = unrecorded.or(recorded.err());
        results.push(result);
    }
    let count = |wanted: fn(&CheckStatus) -> bool| results.iter().filter(|r| wanted(&r.ending)).count();
    let failed = count(|ending| matches!(ending, CheckStatus::Failed { .. }));
    if as_json {
        println!("{}", serde_json::to_string_pretty(&results)?);
    } else {
        let passed = count(|ending| matches!(ending, CheckStatus::Passed { .. }));
        let total = results.len();
        println!("{total} device checks: {passed} passed, {failed} failed, {} skipped", total - passed - failed);
        match recording {
            Some(_) if unrecorded.is_some() => {}
            Some(_) => println!(
                "{} holds the results; `cs336 accept {DEVICE}` promotes them",
                layout.display(&layout.local(Profile::Gpu, DEVICE))
            ),
            None => {
                println!("without a GPU nothing is recorded");
                group.unproven(layout)?.into_iter().for_each(|message| println!("device: {message}"));
            }
        }
    }
    match unrecorded {
        Some(error) => Err(error),
        None => Ok(if failed > 0 { Ended::WithFindings } else { Ended::Well }),
    }
}

/// Promotes this machine's results; `false` if there are none. An error says why they are refused.
pub fn accept(layout: &Layout, dry_run: bool) -> Result<bool> {
    let local = layout.read_file(&layout.local(Profile::Gpu, DEVICE), DEVICE, Profile::Gpu);
    let local = local.context("run `cs336 grade --device`, which moves these results aside")?;
    let Some(local) = local else { return Ok(false) };
    let group = group(layout)?;
    println!("{DEVICE}: {} results, {} checks", local.cases.len(), group.checks.len());
    group.acceptable(&local).context(DEVICE)?;
    if !dry_run {
        write_atomically(&layout.accepted(Profile::Gpu, DEVICE), group.recorded(layout)?.to_json()?.as_bytes())?;
    }
    Ok(true)
}

/// Which checks have no valid accepted result; `None` if all have one.
pub fn unproven(layout: &Layout) -> Result<Option<String>> {
    group(layout)?.unproven(layout)
}

fn group(layout: &Layout) -> Result<DeviceGroup> {
    DeviceGroup::new(layout, DEVICE_CHECKS.iter().copied().flatten().collect(), versions())
}

fn chosen(group: &DeviceGroup, names: &[String]) -> Result<Vec<&'static DeviceCheck>> {
    if names.is_empty() {
        return Ok(group.checks.clone());
    }
    let named = |name| {
        let check = group.checks.iter().copied().find(|check| check.name == name);
        check.with_context(|| format!("no device check is called {name:?}; see `cs336 grade --device --json`"))
    };
    super::once_each(names).map(named).collect()
}

/// Moves this machine's results aside where they cannot be read.
fn set_aside_unreadable(layout: &Layout) -> Result<()> {
    let path = layout.local(Profile::Gpu, DEVICE);
    if let Err(error) = layout.read_file(&path, DEVICE, Profile::Gpu) {
        eprintln!("{}; {}", indented(&format!("{error:#}"), 4), layout.set_aside(&path, "unreadable")?);
    }
    Ok(())
}

impl<'a> Recording<'a> {
    fn open(layout: &'a Layout, group: &'a DeviceGroup) -> Result<Self> {
        let _lock = lock_records(layout)?;
        set_aside_unreadable(layout)?;
        let mut facts = machine::facts(Profile::Gpu)?;
        facts.software.extend(versions().into_iter().map(|(name, version)| (name.to_string(), version)));
        // There is no suite file.
        let run = open_run(&layout.root, "", &facts, &interrupted)?;
        Ok(Self { layout, group, run, file: group.recorded(layout)?, _lock })
    }

    fn put(&mut self, result: &DeviceResult) -> Result<()> {
        let outcome = match &result.ending {
            CheckStatus::Passed { note } => Outcome::Measured { row: json!({ "note": note }) },
            CheckStatus::Failed { error } => Outcome::Failed { error: error.clone() },
            CheckStatus::Skipped { .. } => return Ok(()),
        };
        self.group.require_same_kernels(self.layout, result.check)?;
        self.group.put(&mut self.file, &self.run, result.check, outcome, result.elapsed_s);
        write_atomically(&self.layout.local(Profile::Gpu, DEVICE), self.file.to_json()?.as_bytes())
    }
}

fn print(DeviceResult { check, ending, elapsed_s }: &DeviceResult) {
    match ending {
        CheckStatus::Passed { note } if note.is_empty() => println!("passed  {} ({elapsed_s:.1} s)", check.name),
        CheckStatus::Passed { note } => println!("passed  {} ({elapsed_s:.1} s): {}", check.name, indented(note, 8)),
        CheckStatus::Skipped { reason } => println!("skipped {}: {}", check.name, indented(reason, 8)),
        CheckStatus::Failed { error } => {
            println!("FAILED  {}: {}\n        {}", check.name, check.proves, indented(error.trim_end(), 8))
        }
    }
}
