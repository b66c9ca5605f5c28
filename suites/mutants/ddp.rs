//! Tests of the data-parallel checks: every broken strategy, and every strategy with a broken collective, must be caught.

use std::collections::BTreeMap;
use std::sync::{Arc, LazyLock};

use anyhow::{Result, anyhow, ensure};
use cs336::checks::data_parallel::{self, WORLD_SIZE, accumulation, official, verdict};
use cs336::checks::mutants::{FAULTS, MUTANTS};
use cs336::checks::protocol::{self, Report};
use cs336::checks::sharded_optimizers::{ADDED_GROUP_APART, UNSHARDED};
use cs336::collective::ranks::set_program;
use cs336::harness::problem::Verdict;
use cs336::model::toy::Blueprint;
use cs336::parallel::trainer;
use cs336::problems::optimizer_state_sharding as sharding;
use libtest_mimic::Trial;

use super::{caught, control};

/// A data-parallel check: its name in the first problem that registers it, and its function for any trainer.
type Check = (&'static str, Run);

#[derive(Clone, Copy)]
enum Run {
    Alone(fn(&str) -> Result<Verdict>),
    /// All mutants in one launch, because starting ranks takes far longer than training such networks.
    Together(fn(&[&str]) -> Result<Vec<Report>>),
}

/// Two buckets of the toy model, one of them with two gradients; and one bucket.
const BUCKET_SIZES_MB: [f64; 2] = [0.0025, 0.01];

const TOY: Check = (
    "naive_ddp::toy_model",
    Run::Together(|names| run(names, |name| official(name, &Blueprint::toy(), &BUCKET_SIZES_MB))),
);
const TIED: Check = (
    "naive_ddp::tied_weights",
    Run::Together(|names| run(names, |name| official(name, &Blueprint::tied(), &BUCKET_SIZES_MB))),
);
/// Several passes a step, or released gradients.
const ACCUMULATION: Check = (
    "ddp_overlap_individual_parameters::gradient_accumulation",
    Run::Together(|names| run(names, |name| accumulation(name, &BUCKET_SIZES_MB))),
);
const RANDOM: Check = ("naive_ddp::random_networks", Run::Alone(data_parallel::random_networks));
const EDGES: Check = ("naive_ddp::edges", Run::Alone(data_parallel::at_the_edges));
const GOLDEN: Check = ("naive_ddp::golden_cases", Run::Alone(data_parallel::golden_cases));
const SHARDED: Check = (
    "optimizer_state_sharding::toy_model",
    Run::Together(|names| run(names, |name| sharding::official(name, &Blueprint::toy()))),
);
const SHARDED_RANDOM: Check = ("optimizer_state_sharding::random_networks", Run::Alone(sharding::random_groups));
const SHARDED_GOLDEN: Check = ("optimizer_state_sharding::golden_cases", Run::Alone(sharding::golden_cases));

fn run<C: protocol::Case>(names: &[&str], trial: impl Fn(&str) -> protocol::Trial<C>) -> Result<Vec<Report>> {
    C::run(WORLD_SIZE, &names.iter().map(|name| trial(name)).collect::<Vec<_>>())
}

const AWAY: &str = "away from single-process training";
const SHARDED_AWAY: &str = "away from the unsharded optimizer's";
const NOT_BROADCAST: &str = "fc1.weight is not that of rank 1 after construction";

/// A mutant's name, the check that must catch it, and a part of the message.
type Case = (&'static str, Check, &'static str);

const CAUGHT: &[Case] = &[
    ("mutant_summed", TOY, AWAY),
    ("mutant_only_first", TOY, AWAY),
    ("mutant_tied_twice", TIED, "fc2.weight is"),
    ("mutant_stale", TOY, AWAY),
    ("mutant_local", TOY, AWAY),
    ("mutant_no_broadcast", TOY, NOT_BROADCAST),
    ("mutant_frozen_apart", TOY, "fc2.fc.bias is not that of rank 1 after construction"),
    ("mutant_last_rank_leads", TOY, "construction changed fc1.weight"),
    ("mutant_bucket_early", TOY, AWAY),
    ("mutant_wrong_hook", TOY, AWAY),
    ("mutant_stale_view", ACCUMULATION, AWAY),
    ("mutant_first_step_only", TOY, AWAY),
    ("mutant_forgets_passes", ACCUMULATION, AWAY),
];

/// Correct trainers with a faulty collective, as `fault@trainer`.
const FAULTS_CAUGHT: &[Case] = &[
    ("summed@flat", TOY, AWAY),
    ("summed@overlap_individual_parameters", TOY, AWAY),
    ("summed@overlap_bucketed", TOY, AWAY),
    ("summed@overlap_coalesced", TOY, AWAY),
    ("summed@zero1", TOY, AWAY),
    ("summed@zero1_in_backward", TOY, AWAY),
    ("local@flat", TOY, AWAY),
    ("local@overlap_individual_parameters", TIED, AWAY),
    ("local@overlap_bucketed", TIED, AWAY),
    ("local@overlap_coalesced", TIED, AWAY),
    ("local@zero1", TOY, AWAY),
    ("local@zero1_in_backward", TOY, AWAY),
    ("no_broadcast@flat", TOY, NOT_BROADCAST),
    ("no_broadcast@overlap_individual_parameters", TOY, NOT_BROADCAST),
    ("no_broadcast@overlap_bucketed", TOY, NOT_BROADCAST),
    ("no_broadcast@overlap_coalesced", TOY, NOT_BROADCAST),
    ("no_broadcast@zero1", TOY, NOT_BROADCAST),
    ("no_broadcast@zero1_in_backward", TOY, NOT_BROADCAST),
    ("wrong_root@overlap_bucketed", TOY, "construction changed fc1.weight"),
    ("no_broadcast@sharded_optimizer", SHARDED, SHARDED_AWAY),
    ("wrong_root@sharded_optimizer", SHARDED, SHARDED_AWAY),
    ("no_gather@zero1", SHARDED, SHARDED_AWAY),
    ("no_gather@zero1_in_backward", SHARDED, SHARDED_AWAY),
    ("wrong_shard@zero1", TOY, AWAY),
    ("wrong_shard@zero1_in_backward", TOY, AWAY),
    (UNSHARDED, SHARDED, "the ranks step [850, 850] of 850 values"),
];

/// Mutants that a check other than the official protocol must catch as well.
const CAUGHT_AGAIN: &[Case] = &[
    ("mutant_summed", GOLDEN, "comparisons failed"),
    ("mutant_stale", RANDOM, AWAY),
    ("mutant_bucket_early", RANDOM, AWAY),
    ("local@flat", EDGES, "is not exactly the value after a step with the mean gradient"),
    (ADDED_GROUP_APART, SHARDED_RANDOM, SHARDED_AWAY),
    ("no_broadcast@sharded_optimizer", SHARDED_GOLDEN, "comparisons failed"),
];

/// The reports of one launch by mutant, or its error; launched for the first test that reads it.
type Reports = LazyLock<Launched, Box<dyn FnOnce() -> Launched + Send>>;
type Launched = Result<BTreeMap<&'static str, Report>, String>;

/// One test for each mutant and check. Trainers without a fault pass the same checks as registered problems.
pub fn trials() -> Vec<Trial> {
    set_program(env!("CARGO_BIN_EXE_cs336").into());
    let cases = || [CAUGHT, FAULTS_CAUGHT, CAUGHT_AGAIN].into_iter().flatten();
    let mut launches: BTreeMap<&str, Arc<Reports>> = BTreeMap::new();
    let is_caught = |&(mutant, (check, run), words): &Case| {
        let name = mutant.replace('@', "_under_");
        let together = match run {
            Run::Alone(run) => return caught("ddp", &name, check, words, move || run(mutant)),
            Run::Together(together) => together,
        };
        let launch = launches.entry(check).or_insert_with(|| {
            let mutants: Vec<&str> = cases().filter(|(_, of, _)| of.0 == check).map(|(mutant, ..)| *mutant).collect();
            Arc::new(LazyLock::new(Box::new(move || {
                let reports = together(&mutants).map_err(|error| format!("{error:#}"))?;
                Ok(mutants.into_iter().zip(reports).collect())
            })))
        });
        let launch = launch.clone();
        caught("ddp", &name, check, words, move || {
            let reports = LazyLock::force(&launch).as_ref().map_err(|error| anyhow!("{error}"))?;
            verdict(reports[mutant].clone())
        })
    };
    let caught: Vec<_> = cases().map(is_caught).collect();
    caught.into_iter().chain([control("ddp", "the_list_of_mutants", every_mutant_is_listed)]).collect()
}

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
