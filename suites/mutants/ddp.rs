//! The grader graded, data parallelism: every broken strategy, and every strategy on a broken network, must be caught.

use anyhow::{Context as _, Result, ensure};
use cs336::checks::data_parallel;
use cs336::checks::mutants::{FAULTS, MUTANTS};
use cs336::checks::protocol::Report;
use cs336::checks::sharded_protocol::{ADDED_GROUP_APART, UNSHARDED};
use cs336::collective::ranks::set_program;
use cs336::harness::problem::Verdict;
use cs336::model::toy::Blueprint;
use cs336::parallel::trainer;
use cs336::problems::optimizer_state_sharding;
use libtest_mimic::{Failed, Trial};

/// Which check must catch a mutant.
#[derive(Clone, Copy)]
enum By {
    /// The official test of the toy model.
    Toy,
    /// That of the model with tied weights.
    Tied,
    /// Several passes a step, or released gradients.
    Accumulation,
    /// The official sharded-optimizer test of the toy model.
    Sharded,
}

const AWAY: &str = "away from single-process training";
const SHARDED_AWAY: &str = "away from the unsharded optimizer's";

/// What the check of each mutant must find, in its own words.
const CAUGHT: &[(&str, By, &str)] = &[
    ("mutant_summed", By::Toy, AWAY),
    ("mutant_only_first", By::Toy, AWAY),
    ("mutant_tied_twice", By::Tied, "fc2.weight is"),
    ("mutant_stale", By::Toy, AWAY),
    ("mutant_local", By::Toy, AWAY),
    ("mutant_no_broadcast", By::Toy, "construction left unbroadcast fc1.weight"),
    ("mutant_frozen_apart", By::Toy, "construction left unbroadcast fc2.fc.bias"),
    ("mutant_last_rank_leads", By::Toy, "construction changed fc1.weight"),
    ("mutant_bucket_early", By::Toy, AWAY),
    ("mutant_wrong_hook", By::Toy, AWAY),
    ("mutant_stale_view", By::Accumulation, AWAY),
    ("mutant_first_step_only", By::Toy, AWAY),
    ("mutant_forgets_passes", By::Accumulation, AWAY),
];

/// The same of sound trainers on a network with a fault, as `fault@trainer`.
const FAULTS_CAUGHT: &[(&str, By, &str)] = &[
    ("summed@flat", By::Toy, AWAY),
    ("summed@overlap_individual_parameters", By::Toy, AWAY),
    ("summed@overlap_bucketed", By::Toy, AWAY),
    ("summed@overlap_coalesced", By::Toy, AWAY),
    ("summed@zero1", By::Toy, AWAY),
    ("summed@zero1_in_backward", By::Toy, AWAY),
    ("local@flat", By::Toy, AWAY),
    ("local@overlap_individual_parameters", By::Tied, AWAY),
    ("local@overlap_bucketed", By::Tied, AWAY),
    ("local@overlap_coalesced", By::Tied, AWAY),
    ("local@zero1", By::Toy, AWAY),
    ("local@zero1_in_backward", By::Toy, AWAY),
    ("no_broadcast@flat", By::Toy, "construction left unbroadcast fc2.fc.bias"),
    ("no_broadcast@overlap_individual_parameters", By::Toy, "construction left unbroadcast fc2.fc.bias"),
    ("no_broadcast@overlap_bucketed", By::Toy, "construction left unbroadcast fc2.fc.bias"),
    ("no_broadcast@overlap_coalesced", By::Toy, "construction left unbroadcast fc2.fc.bias"),
    ("no_broadcast@zero1", By::Toy, "construction left unbroadcast fc1.weight"),
    ("no_broadcast@zero1_in_backward", By::Toy, "construction left unbroadcast fc1.weight"),
    ("wrong_root@overlap_bucketed", By::Toy, "construction changed fc1.weight"),
    ("no_broadcast@sharded_optimizer", By::Sharded, SHARDED_AWAY),
    ("wrong_root@sharded_optimizer", By::Sharded, SHARDED_AWAY),
    ("no_gather@zero1", By::Sharded, SHARDED_AWAY),
    ("no_gather@zero1_in_backward", By::Sharded, SHARDED_AWAY),
    ("wrong_shard@zero1", By::Toy, AWAY),
    ("wrong_shard@zero1_in_backward", By::Toy, AWAY),
    (UNSHARDED, By::Sharded, "the ranks step [850, 850] of 850 values"),
];

/// One test a mutant, and the controls.
pub fn trials() -> Vec<Trial> {
    set_program(env!("CARGO_BIN_EXE_cs336").into());
    let mut trials = vec![
        trial("mutants::ddp::every_mutant_is_listed", every_mutant_is_listed),
        trial("mutants::ddp::golden_cases_catch_summed_gradients", || {
            fails(data_parallel::golden_cases("mutant_summed"))
        }),
        trial("mutants::ddp::random_networks_catch_a_stale_gradient", || {
            fails(data_parallel::random_networks("mutant_stale"))
        }),
        trial("mutants::ddp::random_networks_catch_an_early_bucket", || {
            fails(data_parallel::random_networks("mutant_bucket_early"))
        }),
        trial("mutants::ddp::random_groups_catch_a_later_group_that_is_not_broadcast", || {
            fails(optimizer_state_sharding::random_groups(ADDED_GROUP_APART))
        }),
        trial("mutants::ddp::golden_cases_catch_a_shard_that_is_not_broadcast", || {
            fails(optimizer_state_sharding::golden_cases("no_broadcast@sharded_optimizer"))
        }),
        trial("mutants::ddp::the_edges_catch_a_network_that_does_not_average", || {
            finds(data_parallel::at_the_edges("local@flat")?, "is not exactly what the mean gradient makes it")
        }),
    ];
    trials.extend(CAUGHT.iter().chain(FAULTS_CAUGHT).map(|&(mutant, by, words)| {
        let name = format!("mutants::ddp::{}_is_caught", mutant.replace('@', "_under_"));
        trial(&name, move || finds(report(mutant, by)?, words))
    }));
    trials
}

fn trial(name: &str, body: impl FnOnce() -> Result<()> + Send + 'static) -> Trial {
    Trial::test(name, || body().map_err(|error| Failed::from(format!("{error:#}"))))
}

/// The trainers without a fault pass the same checks, as the registered problems show.
fn every_mutant_is_listed() -> Result<()> {
    let listed: Vec<_> = CAUGHT.iter().map(|(mutant, ..)| *mutant).collect();
    let exist: Vec<_> = MUTANTS.iter().map(|mutant| mutant.name).collect();
    ensure!(listed == exist, "the table lists {listed:?}, but the mutants are {exist:?}");
    let taken_apart = || FAULTS_CAUGHT.iter().filter_map(|(mutant, ..)| mutant.split_once('@'));
    for (fault, _) in FAULTS {
        ensure!(taken_apart().any(|(listed, _)| listed == *fault), "no mutant has the fault {fault}");
    }
    for name in trainer::names().filter(|name| *name != "naive") {
        ensure!(taken_apart().any(|(_, listed)| listed == name), "{name} meets no fault");
    }
    Ok(())
}

fn report(mutant: &str, by: By) -> Result<Report> {
    // Two buckets of the toy model, one of them with two gradients; and one bucket.
    const BUCKET_SIZES_MB: [f64; 2] = [0.0025, 0.01];
    match by {
        By::Toy => data_parallel::official(mutant, &Blueprint::toy(), &BUCKET_SIZES_MB),
        By::Tied => data_parallel::official(mutant, &Blueprint::tied(), &BUCKET_SIZES_MB),
        By::Accumulation => data_parallel::accumulation(mutant, &BUCKET_SIZES_MB),
        By::Sharded => optimizer_state_sharding::official(mutant, &Blueprint::toy()),
    }
}

/// A mutant must lead to findings; a crash of its ranks would be an error, and proves nothing about the check.
fn finds(report: Report, words: &str) -> Result<()> {
    let found = report.findings.iter().any(|finding| finding.contains(words));
    ensure!(found, "none of {} findings says {words:?}: {:#?}", report.findings.len(), report.findings);
    data_parallel::verdict(report).err().context("the check passed")?;
    Ok(())
}

fn fails(outcome: Result<Verdict>) -> Result<()> {
    let words = format!("{:#}", outcome.err().context("the check passed")?);
    let known = [AWAY, SHARDED_AWAY, "comparisons failed"];
    ensure!(known.iter().any(|known| words.contains(known)), "{words}");
    Ok(())
}
