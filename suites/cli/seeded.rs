//! The bugs of `suites/subjects/seeded`: each is caught by the check that it names, with words, in one table of all.

use std::collections::BTreeSet;

use super::subject::Graded;
use super::*;

/// A bug, the problem and the check that must catch it, and a part of what the check says.
type Bug = (&'static str, &'static str, &'static str, &'static str);

const PER_PARAMETER: &str = "ddp_overlap_individual_parameters";
const OFF: &str = "o is off by up to";
const AWAY: &str = "away from single-process training";
const UNEQUAL: &str = "away from the unsharded optimizer's";

/// The faults of `suites/mutants/attention.rs`, and exponentials that overflow apart. Two are other than there, since a subject's
/// sizes are powers of two and float32: the last key tile is always dropped, and L is rounded to bfloat16.
const ATTENTION: &[Bug] = &[
    ("scale_by_d", "flash_forward", "official_protocol", OFF),
    ("mask_hides_diagonal", "flash_forward", "causal_official_protocol", OFF),
    ("mask_shows_next_key", "flash_forward", "causal_official_protocol", OFF),
    ("mask_ignored", "flash_forward", "causal_official_protocol", OFF),
    ("mask_in_tile_coordinates", "flash_forward", "causal_official_protocol", OFF),
    ("no_maximum", "flash_forward", "large_scores", "o is off by up to NaN"),
    ("maximum_of_first_tile", "flash_forward", "large_scores", "o is off by up to NaN"),
    ("output_not_rescaled", "flash_forward", "official_protocol", OFF),
    ("sum_not_rescaled", "flash_forward", "official_protocol", OFF),
    ("lse_base_two", "flash_forward", "official_protocol", "L is off by up to"),
    ("lse_without_maximum", "flash_forward", "official_protocol", "L is off by up to"),
    ("last_key_tile_dropped", "flash_forward", "official_protocol", OFF),
    ("accumulates_in_bfloat16", "flash_forward", "golden_case", "o: largest absolute error"),
    ("lse_in_bfloat16", "flash_forward", "golden_case", "lse: largest absolute error"),
    ("saves_row_sums_too", "flash_forward", "official_protocol", "exactly one saved tensor must have shape [4, 128]"),
    ("d_missing", "flash_backward", "official_protocol_pytorch", "dq is off by up to"),
    ("d_from_output_only", "flash_backward", "official_protocol_pytorch", "dq is off by up to"),
    ("dk_unscaled", "flash_backward", "official_protocol_pytorch", "dk is off by up to"),
    ("dv_from_dp", "flash_backward", "official_protocol_pytorch", "dv is off by up to"),
    ("dq_overwritten_by_each_tile", "flash_backward", "official_protocol_pytorch", "dq is off by up to"),
    ("probabilities_without_lse", "flash_backward", "official_protocol_pytorch", "dq is off by up to"),
    ("exponentials_apart", "flash_backward", "large_scores_pytorch", "dq is off by up to NaN"),
    ("backward_mask_ignored", "flash_backward", "official_protocol_triton", "is_causal true"),
    ("tensors_on_the_class", "flash_backward", "official_protocol_pytorch", "dq is off by up to"),
    ("tensors_by_size_on_the_class", "flash_backward", "official_protocol_pytorch", "dq is off by up to"),
    ("is_causal_on_the_class", "flash_backward", "official_protocol_pytorch", "dq is off by up to"),
];

/// What no official size shows.
const SIZES: &[Bug] = &[
    ("queries_beyond_128_forgotten", "flash_forward", "drawn_inputs", OFF),
    ("sequences_beyond_4_forgotten", "flash_forward", "drawn_inputs", OFF),
];

/// The mutants of `src/checks/mutants`, apart from `mutant_forgets_passes`: no adapter runs several passes.
const INDIVIDUAL: &[Bug] = &[
    ("summed", PER_PARAMETER, "toy_model", AWAY),
    ("only_first", PER_PARAMETER, "toy_model", AWAY),
    ("stale", PER_PARAMETER, "toy_model", AWAY),
    ("local", PER_PARAMETER, "toy_model", AWAY),
    ("no_broadcast", PER_PARAMETER, "toy_model", "fc1.weight is not that of rank 1 after construction"),
    ("frozen_apart", PER_PARAMETER, "toy_model", "fc2.fc.bias is not that of rank 1 after construction"),
    ("last_rank_leads", PER_PARAMETER, "toy_model", "construction changed fc1.weight"),
    ("stale_view", PER_PARAMETER, "toy_model", AWAY),
    ("first_step_only", PER_PARAMETER, "toy_model", AWAY),
];
const TIED: &[Bug] = &[("tied_twice", PER_PARAMETER, "tied_weights", "fc2.weight is")];
const BUCKETED: &[Bug] = &[
    ("bucket_early", "ddp_overlap_bucketed", "toy_model", AWAY),
    ("wrong_hook", "ddp_overlap_bucketed", "toy_model", AWAY),
];

const SHARDED: &[Bug] = &[
    ("updates_not_broadcast", "optimizer_state_sharding", "toy_model", UNEQUAL),
    ("wrong_root", "optimizer_state_sharding", "toy_model", UNEQUAL),
    ("unsharded", "optimizer_state_sharding", "toy_model", "the ranks step [850, 850] of 850 values"),
    ("broadcast_in_bfloat16", "optimizer_state_sharding", "toy_model", UNEQUAL),
    (
        "differences_broadcast",
        "optimizer_state_sharding",
        "toy_model",
        "away from the unsharded optimizer's of the same",
    ),
    ("decay_forgotten", "optimizer_state_sharding", "toy_model", UNEQUAL),
    ("betas_forgotten", "optimizer_state_sharding", "another_optimizer", UNEQUAL),
    ("eps_forgotten", "optimizer_state_sharding", "another_optimizer", UNEQUAL),
    ("always_adamw", "optimizer_state_sharding", "another_optimizer", UNEQUAL),
];

#[rstest]
#[case::attention(&["flash_forward", "flash_backward"], ATTENTION)]
#[case::sizes(&["flash_forward"], SIZES)]
#[case::individual(&[PER_PARAMETER], INDIVIDUAL)]
#[case::tied(&[PER_PARAMETER], TIED)]
#[case::bucketed(&["ddp_overlap_bucketed"], BUCKETED)]
#[case::sharded(&["optimizer_state_sharding"], SHARDED)]
fn every_seeded_bug_is_caught_and_named_in_the_table_and_no_bug_is_not(
    #[case] problems: &[&str],
    #[case] bugs: &[Bug],
) {
    let graded = Graded::new();
    for name in bugs.iter().map(|bug| bug.0).chain(["none"]) {
        graded.add("seeded", name, "bug.txt", name);
    }
    // The checks that these bugs must be caught by: a right subject passes all in another test.
    let checks: BTreeSet<&str> = bugs.iter().map(|bug| bug.2).collect();
    let (table, said) = graded.grade_all(problems, &checks.into_iter().collect::<Vec<_>>());
    assert_eq!(table.lines().count(), bugs.len() + 2, "{said}");
    for (bug, problem, check, words) in bugs {
        let row = table.lines().find(|line| line.starts_with(&format!("{bug},"))).unwrap();
        let of_check = row.split(&format!("{problem}: {check} failed: ")).nth(1).unwrap_or_default();
        let own = of_check.split("; ").next().unwrap();
        assert!(own.contains(words), "{bug}: {words:?} is not said by {check}: {row}");
        assert!(graded.tree.path("grades").join(bug).join("results.json").is_file());
    }
    let sound = table.lines().find(|line| line.starts_with("none,")).unwrap();
    assert!(!sound.contains(" failed: "), "without a bug, points are lost: {sound}");
}

/// `torch.compile` keeps eight versions of a function, and the checks have more sizes.
#[test]
fn a_function_that_is_compiled_for_each_size_earns_all_points() {
    let graded = Graded::new();
    let folder = graded.add("seeded", "compiled", "bug.txt", "compiled");
    let grades = graded.grade(&folder, &["flash_backward"], &[]);
    assert_eq!(grades[0]["earned"], 5.0, "{grades}");
}
