//! Mutants of the portable backward pass whose tiles of keys make dQ too; `kernels.rs` runs them.

use super::kernels::{Mutant, PORTABLE_BACKWARD, WRONG};

pub(super) const MUTANTS: &[Mutant] = &[
    Mutant {
        name: "ds_is_overwritten_while_it_is_multiplied",
        file: "portable_backward.cu",
        line: "ds_bytes = stream * ds_stride;",
        changed: "ds_bytes = 0;",
        check: PORTABLE_BACKWARD,
        message: WRONG,
    },
    Mutant {
        name: "a_warp_multiplies_before_its_blocks_turn",
        file: "portable_backward.cu",
        line: "await_turn(turn_of(added), rank);\n      __syncthreads();\n",
        changed: "await_turn(turn_of(added), rank);\n",
        check: PORTABLE_BACKWARD,
        message: "can go on",
    },
    Mutant {
        name: "a_later_tile_of_keys_replaces_the_sums_of_dq",
        file: "portable_backward.cu",
        line: "        if (rank == 0) {\n",
        changed: "        if (rank >= 0) {\n",
        check: PORTABLE_BACKWARD,
        message: WRONG,
    },
    Mutant {
        name: "a_turn_is_not_passed_on",
        file: "portable_backward.cu",
        line: "pass_turn(turn_of(passed), rank + 1);",
        changed: "pass_turn(turn_of(passed), rank);",
        check: PORTABLE_BACKWARD,
        message: "can go on",
    },
    Mutant {
        name: "turns_are_not_cleared",
        file: "portable_backward.cu",
        line: "problem.turns[1 + block + threadIdx.x] = 0;",
        changed: "problem.turns[1 + block + threadIdx.x] = 1;",
        check: PORTABLE_BACKWARD,
        message: "can go on",
    },
    Mutant {
        name: "the_last_part_of_dq_is_not_added",
        file: "portable_backward.cu",
        line: "number >= begin - 2; --number",
        changed: "number >= begin; --number",
        check: PORTABLE_BACKWARD,
        message: WRONG,
    },
];
