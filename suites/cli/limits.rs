//! Limits of the kernel on a process are named, with the remedy.

use super::*;

/// A limit on processes counts threads, and does not bind root.
#[test]
fn a_rank_that_cannot_start_a_thread_names_the_limit() {
    let nobody = |program: &str| {
        let mut command = Command::new("setpriv");
        command.args(["--reuid", "65534", "--clear-groups", program]);
        command
    };
    if !nobody("test").args(["-x", env!("CARGO_BIN_EXE_cs336")]).status().is_ok_and(|status| status.success()) {
        eprintln!("skipped: only root can become a user without processes, who must reach the program");
        return;
    }
    let mut rank = nobody("prlimit");
    rank.args(["--nproc=1", env!("CARGO_BIN_EXE_cs336"), "rank", "--task", "nccl_selftest"]);
    rank.envs([("RANK", "1"), ("LOCAL_RANK", "1"), ("WORLD_SIZE", "2")]);
    let output = rank.envs([("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "1")]).output().unwrap();
    let said = output_text(&output);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("raise the limit on processes (ulimit -u)") && !said.contains("panicked"), "{said}");
}

#[rstest]
fn too_few_open_files_are_named_with_the_remedy(#[values(4, 8, 63)] most: u64) {
    let mut list = Command::new("prlimit");
    list.args([&format!("--nofile={most}"), env!("CARGO_BIN_EXE_cs336"), "list"]);
    let output = list.output().unwrap();
    let said = output_text(&output);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains(&format!("may open {most} files here, and cs336 needs 64: raise the limit")), "{said}");
}
