//! `cs336 accept`: shows what changes, then promotes this machine's records and device check results.

use anyhow::{Result, bail};

use super::progress::short;
use super::{Chosen, Ended, device, diff, selected};
use crate::harness::conditions::{Conditions, in_words};
use crate::harness::device::DEVICE;
use crate::harness::drift::{acceptable, drift};
use crate::harness::record::Profile;
use crate::harness::store::{Layout, lock_records, write_atomically};
use crate::harness::suite;

pub fn run(layout: &Layout, chosen: &Chosen, dry_run: bool) -> Result<Ended> {
    let _lock = lock_records(layout)?;
    let (mut accepted, mut refused) = (0, 0);
    let (device_named, named): (Vec<_>, Vec<_>) = chosen.problems.iter().cloned().partition(|name| name == DEVICE);
    let everything = chosen.problems.is_empty();
    if (everything || !device_named.is_empty()) && chosen.profiles().contains(&Profile::Gpu) {
        match device::accept(layout, dry_run)? {
            Some(true) => accepted += 1,
            Some(false) => refused += 1,
            None => {}
        }
    }
    let problems = if everything || !named.is_empty() { selected(&named)? } else { Vec::new() };
    for problem in problems {
        for profile in chosen.profiles() {
            let (Some(local), Some(suite)) =
                (layout.read_local(profile, problem)?, suite::load(&layout.root, problem)?)
            else {
                continue;
            };
            let old = layout.read_accepted(profile, problem)?;
            match &old {
                Some(old) => diff::print(&drift(&local, old)?),
                None => println!("{}: {} cases, none accepted before", problem.name, local.cases.len()),
            }
            if let Err(reason) = acceptable(layout, problem, &suite, &local, old.as_ref()) {
                println!("  refused: {reason:#}");
                refused += 1;
                continue;
            }
            for case in &local.cases {
                let reasons = case.conditions.as_ref().map(Conditions::spoiled_by).unwrap_or_default();
                if !reasons.is_empty() {
                    println!("  slowed down while measured: {}: {}", short(&case.params), in_words(&reasons));
                }
            }
            if !dry_run {
                write_atomically(&layout.accepted(profile, problem.name), local.to_json()?.as_bytes())?;
            }
            accepted += 1;
        }
    }
    if accepted + refused == 0 {
        bail!("nothing to accept: no records here; run `cs336 measure` first");
    }
    let verb = if dry_run { "would be accepted" } else { "accepted into snapshots/" };
    println!("{accepted} {verb}, {refused} refused");
    if accepted > 0 && !dry_run {
        println!(
            "the rendered report changes too: run `INSTA_UPDATE=always cargo test --test drift`, check the diff, and commit both"
        );
    }
    Ok(if refused > 0 { Ended::WithFindings } else { Ended::Well })
}
