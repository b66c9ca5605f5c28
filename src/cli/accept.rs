//! `cs336 accept`: shows what changes, then promotes this machine's records and device check results.

use anyhow::{Result, bail, ensure};

use super::progress::short;
use super::{Chosen, Ended, device, diff, selected};
use crate::harness::conditions::{Conditions, in_words};
use crate::harness::device::DEVICE;
use crate::harness::drift::{acceptable, drift};
use crate::harness::manifest::is_bundle;
use crate::harness::problem::Problem;
use crate::harness::record::Profile;
use crate::harness::records_lock::lock_records;
use crate::harness::store::{Layout, write_atomically};
use crate::harness::suite;
use crate::printable::indented;

pub fn run(layout: &Layout, chosen: &Chosen, dry_run: bool) -> Result<Ended> {
    let _lock = (!dry_run).then(|| lock_records(layout)).transpose()?;
    let (device_named, named): (Vec<_>, Vec<_>) = chosen.problems.iter().cloned().partition(|name| name == DEVICE);
    let everything = chosen.problems.is_empty();
    let is_of_gpus = chosen.profiles().contains(&Profile::Gpu);
    ensure!(device_named.is_empty() || is_of_gpus, "{DEVICE} has results of GPUs alone; leave out `--profile cpu`");
    // A wrong name is told before anything is written.
    let problems = if everything || !named.is_empty() { selected(&named)? } else { Vec::new() };
    let mut ends = Vec::new();
    if (everything || !device_named.is_empty()) && is_of_gpus {
        ends.push(device::accept(layout, dry_run));
    }
    for problem in problems {
        ends.extend(chosen.profiles().into_iter().map(|profile| promote(layout, problem, profile, dry_run)));
    }
    let (mut accepted, mut refused) = (0, 0);
    for end in ends {
        match end {
            Ok(true) => accepted += 1,
            Ok(false) => {}
            Err(reason) => {
                println!("refused: {}", indented(&format!("{reason:#}"), 4));
                refused += 1;
            }
        }
    }
    if accepted + refused == 0 {
        if named.is_empty() && !everything {
            bail!("nothing to accept: no results of device checks here; run `cs336 grade --device` on a GPU first");
        }
        bail!("nothing to accept: no records here; run `cs336 measure` first");
    }
    let verb = if dry_run { "would be accepted" } else { "accepted into snapshots/" };
    println!("{accepted} {verb}, {refused} refused");
    if accepted > 0 && !dry_run && !is_bundle(&layout.root) {
        println!(
            "where this changes the rendered report, as `cs336 writeup --check` says, run `INSTA_UPDATE=always cargo test --test drift`, \
             check the diff, and commit both"
        );
    }
    Ok(if refused > 0 { Ended::WithFindings } else { Ended::Well })
}

/// Promotes one problem's records; `false` if there are none here. An error says why they are refused.
fn promote(layout: &Layout, problem: &Problem, profile: Profile, dry_run: bool) -> Result<bool> {
    let Some(local) = layout.read_local(profile, problem)? else { return Ok(false) };
    let Some(suite) = suite::load(&layout.root, problem)? else { return Ok(false) };
    let old = layout.read_accepted(profile, problem)?;
    match &old {
        Some(old) => diff::print(&drift(&local, old)?),
        None => println!("{}: {} cases, none accepted before", problem.name, local.cases.len()),
    }
    acceptable(layout, problem, &suite, &local, old.as_ref())?;
    for case in &local.cases {
        let reasons = case.conditions.as_ref().map(Conditions::spoiled_by).unwrap_or_default();
        if !reasons.is_empty() {
            println!("  slowed down while measured: {}: {}", short(&case.params), in_words(&reasons));
        }
    }
    if !dry_run {
        write_atomically(&layout.accepted(profile, problem.name), local.to_json()?.as_bytes())?;
    }
    Ok(true)
}
