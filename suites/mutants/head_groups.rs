//! Mutants of groups of heads in the attention kernels, and of tiles of 80 columns; `kernels.rs` runs them.

use super::kernels::{BACKWARD, FORWARD, Mutant, PORTABLE_BACKWARD, WRONG};

pub(super) const MUTANTS: &[Mutant] = &[
    Mutant {
        name: "a_query_head_reads_another_groups_keys",
        file: "flash_forward.cu",
        line: "tile.head / schedule.problem.group_size",
        changed: "(tile.head + 1) / schedule.problem.group_size",
        check: FORWARD,
        message: WRONG,
    },
    Mutant {
        name: "a_groups_second_head_has_the_first_ones_statistics",
        file: "flash_backward.cu",
        line: "      row += (block + 1) * queries;\n",
        changed: "      row = (block + 1) * queries;\n",
        check: BACKWARD,
        message: WRONG,
    },
    Mutant {
        name: "a_groups_heads_are_all_read_as_the_first",
        file: "flash_backward.cu",
        line: "      ++q_head;\n",
        changed: "",
        check: BACKWARD,
        message: WRONG,
    },
    Mutant {
        name: "a_groups_second_head_is_not_masked",
        file: "flash_backward.cu",
        line: "return seen + (number - seen) % (blocks - seen);",
        changed: "return number;",
        check: BACKWARD,
        message: WRONG,
    },
    Mutant {
        name: "a_groups_dq_goes_to_the_first_head_only",
        file: "flash_backward.cu",
        line: "      to += (block + 1) * (queries * d);\n",
        changed: "      to -= (work.blocks - block - 1) * (queries * d);\n",
        check: BACKWARD,
        message: WRONG,
    },
    Mutant {
        name: "the_panel_of_dq_that_warpgroups_share_is_added_twice",
        file: "flash_backward.cu",
        line: "constexpr u32 second = dq_second_at + dq_left_out_bytes;",
        changed: "constexpr u32 second = dq_second_at;",
        check: BACKWARD,
        message: WRONG,
    },
    Mutant {
        name: "a_warpgroups_part_of_dq_begins_a_panel_late",
        file: "flash_backward.cu",
        line: "units(dq_second_column / k_columns * k_panel) * group;",
        changed: "units((dq_second_column / k_columns + 1) * k_panel) * group;",
        check: BACKWARD,
        message: WRONG,
    },
    Mutant {
        name: "a_group_reads_the_first_heads_queries_again",
        file: "portable_backward.cu",
        line: "return {head * problem.group_size + heads, number - heads * of_head};",
        changed: "return {head * problem.group_size, number - heads * of_head};",
        check: PORTABLE_BACKWARD,
        message: WRONG,
    },
    Mutant {
        name: "a_portable_query_head_reads_another_groups_keys",
        file: "portable_forward.cu",
        line: "work.head / problem.group_size",
        changed: "work.head % 2",
        check: "flash_forward::portable_kernel",
        message: WRONG,
    },
];
