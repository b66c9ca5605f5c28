//! Shell scripts as ranks.

use super::*;

fn launch(deadline: Duration) -> Launch<'static> {
    Launch { patience: deadline, ..Launch::new("scripts", 2, deadline) }
}

/// Runs one shell script a rank; gives back the error and the processes that the scripts left behind.
fn run_scripts(scripts: &[&str], deadline: Duration) -> (Result<()>, Vec<i32>) {
    let folder = tempfile::tempdir().unwrap();
    let ranks = scripts.iter().enumerate().map(|(rank, script)| {
        let mut command = Command::new("/bin/sh");
        let pid_file = folder.path().join(format!("{rank}.pid"));
        command.arg("-c").arg(format!("echo $$ > {}\n{script}", pid_file.to_str().unwrap()));
        Rank { command, flight_record: folder.path().join("none") }
    });
    let outcome = supervise(&launch(deadline), ranks.collect(), &Value::Null).map(drop);
    let pid =
        |rank: usize| std::fs::read_to_string(folder.path().join(format!("{rank}.pid"))).ok()?.trim().parse().ok();
    let alive = |pid: &i32| std::path::Path::new(&format!("/proc/{pid}")).exists();
    (outcome, (0..scripts.len()).filter_map(pid).filter(alive).collect())
}

#[test]
fn ranks_that_all_succeed_are_a_success() {
    let (outcome, left) = run_scripts(&["exit 0", "sleep 0.05"], Duration::from_secs(10));
    assert!(outcome.is_ok() && left.is_empty(), "{outcome:?} {left:?}");
}

#[test]
fn the_first_failing_rank_is_named_with_its_status_and_last_output_and_the_rest_are_ended() {
    let (outcome, left) = run_scripts(&["exec sleep 60", "echo the disk is full >&2; exit 3"], Duration::from_secs(30));
    let message = outcome.unwrap_err().to_string();
    assert!(message.starts_with("rank 1 of 2 exited with status 3; its last output:\nthe disk is full"), "{message}");
    assert!(!message.contains("rank 0"), "only the rank that failed on its own is named: {message}");
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn a_rank_that_printed_nothing_is_named_with_its_status_alone() {
    let message = run_scripts(&["exit 1"], Duration::from_secs(30)).0.unwrap_err().to_string();
    assert_eq!(message, "rank 0 of 1 exited with status 1");
}

#[test]
fn every_rank_gets_the_input_and_its_reply_comes_back_in_rank_order() {
    let echo = |number: usize| {
        let mut command = Command::new("/bin/sh");
        command.arg("-c").arg(format!("read -r input; echo printed; echo \"{number} $input\" >&0"));
        Rank { command, flight_record: PathBuf::from("none") }
    };
    let input = serde_json::json!({ "steps": 3 });
    let replies = supervise(&launch(Duration::from_secs(30)), vec![echo(0), echo(1)], &input).unwrap();
    assert_eq!(replies, [0, 1].map(|number| Some(format!("{number} {input}"))));
}

#[test]
fn a_signal_is_named() {
    let (outcome, left) = run_scripts(&["kill -SEGV $$", "exec sleep 60"], Duration::from_secs(30));
    let message = outcome.unwrap_err().to_string();
    assert!(message.starts_with("rank 0 of 2 was ended by signal 11"), "{message}");
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn ranks_that_run_past_the_deadline_are_named_and_ended() {
    // Both scripts must have come to their end, or their sleep, by then: a busy machine gets a later deadline.
    for deadline in [500, 5_000, 50_000].map(Duration::from_millis) {
        let (outcome, left) = run_scripts(&["exit 0", "echo waiting; exec sleep 600"], deadline);
        let message = outcome.unwrap_err().to_string();
        assert!(message.contains(&format!("deadline of {}", human_seconds(deadline.as_secs_f64()))), "{message}");
        assert!(message.contains("rank 1 of 2 was still running") && left.is_empty(), "{message} {left:?}");
        if message.contains("waiting") && !message.contains("rank 0") {
            return;
        }
    }
    panic!("rank 0 was named, or rank 1's output was not, at every deadline");
}

#[test]
fn a_rank_that_cannot_start_ends_those_that_did() {
    let folder = tempfile::tempdir().unwrap();
    let mut sleeper = Command::new("/bin/sleep");
    sleeper.arg("60.0123");
    let ranks = vec![
        Rank { command: sleeper, flight_record: folder.path().join("none") },
        Rank { command: Command::new("/nowhere/cs336"), flight_record: folder.path().join("none") },
    ];
    let message = format!("{:#}", supervise(&launch(Duration::from_secs(30)), ranks, &Value::Null).unwrap_err());
    assert!(message.contains("starting rank 1: failed to start /nowhere/cs336"), "{message}");
}
