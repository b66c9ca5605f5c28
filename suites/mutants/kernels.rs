//! Mutants of the CUDA kernels: copies of `kernels/` with one changed line. A check in the emulator must catch each.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context as _, Result, bail, ensure};
use cs336::problems::REGISTRY;
use libtest_mimic::Trial;

/// A process keeps the programs that it has compiled, so every mutant runs in its own process. This variable names its tree.
const ROOT: &str = "CS336_ROOT";
/// The cache's key covers the kernel's text: mutants share unchanged kernels, and a second run compiles nothing.
const CACHE: &str = env!("CARGO_TARGET_TMPDIR");
/// The first argument of a mutant's process, followed by the check.
const WORKER: &str = "kernel-worker";
/// The process prints this before the check's message.
const PASSED: &str = "passed: ";
const REFUSED: &str = "refused: ";

pub(super) struct Mutant {
    pub name: &'static str,
    pub file: &'static str,
    /// The line, which must occur once, and its replacement.
    pub line: &'static str,
    pub changed: &'static str,
    /// As `problem::check`.
    pub check: &'static str,
    pub message: &'static str,
}

pub(super) const FORWARD: &str = "flash_forward::hopper_kernel";
pub(super) const BACKWARD: &str = "flash_backward::hopper_kernels";
pub(super) const PORTABLE_BACKWARD: &str = "flash_backward::portable_kernels";
pub(super) const WRONG: &str = "is off by";
const NOT_AWAITED: &str = "no thread called await_last_kernel";

const MUTANTS: &[Mutant] = &[
    Mutant {
        name: "scores_are_read_before_they_are_there",
        file: "flash_forward.cu",
        line: "    wgmma_wait<1>();\n    hold(s);\n    release(bar.k_free(now));\n",
        changed: "    hold(s);\n    release(bar.k_free(now));\n",
        check: FORWARD,
        message: WRONG,
    },
    Mutant {
        name: "outputs_are_not_rescaled",
        file: "flash_forward.cu",
        line: "o[i] *= factor[i / 2 % 2];",
        changed: "o[i] *= 1.0f;",
        check: FORWARD,
        message: WRONG,
    },
    Mutant {
        name: "a_row_keeps_the_score_that_is_subtracted",
        file: "flash_forward.cu",
        line: "constexpr float most_excess = 8.0f;",
        changed: "constexpr float most_excess = 1000.0f;",
        check: FORWARD,
        message: WRONG,
    },
    Mutant {
        name: "the_diagonal_is_one_further",
        file: "flash_forward.cu",
        line: "min(problem.n_keys - 1, row + 8 * r)",
        changed: "min(problem.n_keys - 1, row + 8 * r + 1)",
        check: FORWARD,
        message: WRONG,
    },
    Mutant {
        name: "outputs_leave_before_the_fence",
        file: "flash_forward.cu",
        line: "    fence_to_async();\n",
        changed: "",
        check: FORWARD,
        message: "without a fence behind it",
    },
    Mutant {
        name: "q_is_given_back_by_too_few",
        file: "flash_forward.cu",
        line: "barrier_init(bar.q_free(), 4 * groups);",
        changed: "barrier_init(bar.q_free(), 4 * groups + 1);",
        check: FORWARD,
        message: "can go on",
    },
    Mutant {
        name: "a_tiles_number_is_overwritten_before_it_is_read",
        file: "flash_forward.cu",
        line: "    index = schedule.take(turn + 1);\n",
        changed: "    index = schedule.take(turn + 1);\n    store_word(base + number_at, index);\n",
        check: FORWARD,
        message: "can go on",
    },
    Mutant {
        name: "a_tiles_number_is_read_before_it_is_there",
        file: "flash_forward.cu",
        line: "      barrier_wait(bar.q_full(), ++turn % 2);\n",
        changed: "      ++turn;\n",
        check: FORWARD,
        message: "can go on",
    },
    Mutant {
        name: "fewer_bytes_are_expected_than_come",
        file: "flash_backward.cu",
        line: "barrier_expect(bar.q_full(stage), q_bytes + row_stats);",
        changed: "barrier_expect(bar.q_full(stage), q_bytes);",
        check: BACKWARD,
        message: "the emulator stopped",
    },
    Mutant {
        name: "d_is_not_subtracted",
        file: "flash_backward.cu",
        line: "s[at] * (dp[at] - shift.x)",
        changed: "s[at] * dp[at]",
        check: BACKWARD,
        message: WRONG,
    },
    Mutant {
        name: "ds_is_multiplied_before_both_have_written_it",
        file: "flash_backward.cu",
        line: "      start_dq(dq, ds_units(count + 1 + group));\n",
        changed: "      start_dq(dq, ds_units(count));\n",
        check: BACKWARD,
        message: "without a fence behind it",
    },
    Mutant {
        name: "a_warp_stores_dq_without_waiting_for_its_warpgroup",
        file: "flash_backward.cu",
        line: "    named_sync(dq_free_barrier + group, 128 + 32);\n#pragma",
        changed: "    named_arrive(dq_free_barrier + group, 128 + 32);\n#pragma",
        check: BACKWARD,
        message: WRONG,
    },
    Mutant {
        name: "a_turn_is_passed_on_before_dq_is_multiplied",
        file: "flash_backward.cu",
        line: "    wgmma_wait<dq_first ? 1 : 2>();\n    hold(dv);\n",
        changed: "    pass_turn();\n    wgmma_wait<dq_first ? 1 : 2>();\n    hold(dv);\n",
        check: BACKWARD,
        message: "the emulator stopped",
    },
    Mutant {
        name: "dq_is_added_before_the_fence",
        file: "flash_backward.cu",
        line: "    fence_to_async();\n    named_arrive(dq_full_barrier + group, 128 + 32);\n",
        changed: "    named_arrive(dq_full_barrier + group, 128 + 32);\n",
        check: BACKWARD,
        message: "without a fence behind it",
    },
    Mutant {
        name: "dq_is_overwritten_before_it_is_added",
        file: "flash_backward.cu",
        line: "      copies_out_commit();\n      copies_out_wait_read();\n    }\n    __syncwarp();\n",
        changed: "      copies_out_commit();\n    }\n    __syncwarp();\n",
        check: BACKWARD,
        message: "copies are under way though every thread has ended",
    },
    Mutant {
        name: "dq_is_stored_before_it_is_multiplied",
        file: "flash_backward.cu",
        line: "      wgmma_wait<2>();\n      leave_dq(dq, count);\n",
        changed: "      leave_dq(dq, count);\n",
        check: BACKWARD,
        message: WRONG,
    },
    Mutant {
        name: "v_is_read_before_it_is_there",
        file: "flash_backward.cu",
        line: "    barrier_wait(bar.v_full(), 0);\n    load_v();\n",
        changed: "    load_v();\n    barrier_wait(bar.v_full(), 0);\n",
        check: BACKWARD,
        message: WRONG,
    },
    Mutant {
        name: "the_first_warpgroup_leaves_out_the_last_dq",
        file: "flash_backward.cu",
        line: "    if (group == 0) finish_dq();\n",
        changed: "",
        check: BACKWARD,
        message: "can go on",
    },
    Mutant {
        name: "q_is_given_back_before_dk_is_multiplied",
        file: "flash_backward.cu",
        line: "    wgmma_wait<Last ? 0 : 1>();\n    hold(dk);\n    hold(ds_pairs);\n    release(q_free_barrier + stage, count);\n",
        changed: "    release(q_free_barrier + stage, count);\n    wgmma_wait<Last ? 0 : 1>();\n    hold(dk);\n    hold(ds_pairs);\n",
        check: BACKWARD,
        message: WRONG,
    },
    Mutant {
        name: "only_the_last_statistics_are_waited_for",
        file: "flash_backward.cu",
        line: "    if (count == 0) await_last_kernel();\n",
        changed: "    if (block + 1 == work.blocks) await_last_kernel();\n",
        check: BACKWARD,
        message: WRONG,
    },
    Mutant {
        name: "keys_that_no_query_sees_do_not_wait",
        file: "flash_backward.cu",
        line: "  if (work.is_empty() && starts) await_last_kernel();\n",
        changed: "",
        check: BACKWARD,
        message: NOT_AWAITED,
    },
    Mutant {
        name: "half_of_dq_is_read_before_it_is_there",
        file: "flash_backward.cu",
        line: "Problem problem, element *dq) {\n  await_last_kernel();\n",
        changed: "Problem problem, element *dq) {\n  if (threadIdx.x < 128) await_last_kernel();\n",
        check: BACKWARD,
        message: WRONG,
    },
    Mutant {
        name: "a_tile_is_overwritten_while_it_is_read",
        file: "textbook_forward.cu",
        line: "    // All threads have read the previous tiles.\n    __syncthreads();\n",
        changed: "",
        check: "flash_forward::textbook_kernel",
        message: WRONG,
    },
    Mutant {
        name: "a_tile_is_read_before_it_has_come",
        file: "portable_forward.cu",
        line: "    copies_wait<stages - 2>();\n",
        changed: "    copies_wait<stages - 1>();\n",
        check: "flash_forward::portable_kernel",
        message: "copies are under way though every thread has ended",
    },
    Mutant {
        name: "a_part_without_columns_does_not_wait",
        file: "portable_backward.cu",
        line: "      await_last_kernel();\n      return false;\n",
        changed: "      return false;\n",
        check: PORTABLE_BACKWARD,
        message: NOT_AWAITED,
    },
    Mutant {
        name: "a_warp_reads_statistics_before_they_are_there",
        file: "portable_backward.cu",
        line: "`portable_backward_prepare`.\n    await_last_kernel();\n",
        changed: "`portable_backward_prepare`.\n    if (threadIdx.x >= 32) await_last_kernel();\n",
        check: PORTABLE_BACKWARD,
        message: WRONG,
    },
    Mutant {
        name: "the_last_part_is_not_added",
        file: "portable_backward.cu",
        line: "part < count; ++part",
        changed: "part < count - 1; ++part",
        check: PORTABLE_BACKWARD,
        message: WRONG,
    },
];

/// One test for each mutant. `suites/checks.rs` tests that the unchanged kernels pass.
pub fn trials() -> Vec<Trial> {
    let trial = |mutant: &'static Mutant| {
        super::caught("kernels", mutant.name, mutant.check, mutant.message, || check_in_a_process(mutant))
    };
    let lists = [MUTANTS, super::five_products::MUTANTS, super::head_groups::MUTANTS, super::fused_step::MUTANTS];
    lists.into_iter().flatten().map(trial).collect()
}

/// In a mutant's process: runs its check and prints the result.
pub fn worker() -> Option<ExitCode> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [first, name] = arguments.as_slice() else { return None };
    if first != WORKER {
        return None;
    }
    let (problem, check) = name.split_once("::")?;
    let problem = REGISTRY.iter().find(|p| p.name == problem)?;
    let check = problem.checks.iter().find(|c| c.name == check)?;
    match (check.run)() {
        Ok(verdict) => println!("{PASSED}{verdict:?}"),
        Err(error) => println!("{REFUSED}{error:#}"),
    }
    Some(ExitCode::SUCCESS)
}

/// The message of the mutant's check, in a process with a changed copy of the kernels.
fn check_in_a_process(mutant: &Mutant) -> Result<String> {
    let tree = tempfile::tempdir()?;
    for folder in ["suites", "templates"] {
        fs::create_dir(tree.path().join(folder))?;
    }
    let kernels = tree.path().join("kernels");
    copy(&Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels"), &kernels)?;
    let path = kernels.join(mutant.file);
    let text = fs::read_to_string(&path)?;
    let found = text.matches(mutant.line).count();
    ensure!(found == 1, "{} holds the line {found} times: correct the mutant", mutant.file);
    fs::write(&path, text.replace(mutant.line, mutant.changed))?;
    let mut worker = Command::new(std::env::current_exe()?);
    worker.args([WORKER, mutant.check]).env(ROOT, tree.path()).env("XDG_CACHE_HOME", CACHE);
    // The first failing case shows as much as the smallest, which takes dozens of cases to find.
    worker.env("PROPTEST_MAX_SHRINK_ITERS", "0");
    let output = worker.output()?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    if let Some(verdict) = said.strip_prefix(PASSED) {
        return Ok(verdict.into());
    }
    let refused = said.strip_prefix(REFUSED).with_context(|| {
        format!("the process ended with {}: {said}{}", output.status, String::from_utf8_lossy(&output.stderr))
    })?;
    ensure!(!refused.contains("failed:"), "a compiler or another program failed: {refused}");
    bail!("{refused}")
}

fn copy(from: &Path, to: &PathBuf) -> std::io::Result<()> {
    fs::create_dir(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let (path, target) = (entry.path(), to.join(entry.file_name()));
        if path.is_dir() {
            copy(&path, &target)?;
        } else {
            fs::copy(path, target)?;
        }
    }
    Ok(())
}
