//! Peers that work, die, hang, send an invalid reply or have another protocol version. All are shell scripts.

use std::process::Command;
use std::time::Duration;

use anyhow::Result;
use serde_json::{Value, json};

use super::{NoAnswer, Peer};
use crate::error::{Fault, fault_of};
use crate::process::{is_alive, wait_until};

const PATIENCE: Duration = Duration::from_secs(20);
const GREETING: &str = r#"echo '{"protocol": 1, "name": "fake"}' >&0"#;

fn start(script: &str, patience: Duration) -> Result<Peer> {
    let mut command = Command::new("sh");
    command.args(["-c", script]);
    Peer::start(command, 1, patience)
}

/// A peer that greets and answers its first job with `answer`.
fn answering(answer: &str) -> Peer {
    start(&format!("{GREETING}; read -r job; {answer} >&0; sleep 60"), PATIENCE).unwrap()
}

fn call(peer: &mut Peer) -> Result<Value> {
    peer.call("add", json!({"a": 1}), PATIENCE)
}

#[test]
fn a_job_reaches_the_peer_and_its_result_comes_back() {
    let mut peer = answering(r#"echo chatter; echo "{\"id\": 1, \"result\": $job}""#);
    assert_eq!(peer.greeting()["name"], "fake");
    assert_eq!(call(&mut peer).unwrap(), json!({"id": 1, "job": "add", "settings": {"a": 1}}));
    assert!(peer.is_usable());
}

#[test]
fn refusals_keep_their_kind_and_leave_the_peer_usable() {
    let refused = |kind: &str, message: &str| {
        let mut peer =
            answering(&format!(r#"echo '{{"id": 1, "error": {{"kind": "{kind}", "message": "{message}"}}}}'"#));
        let error = call(&mut peer).unwrap_err();
        assert!(peer.is_usable());
        error
    };
    let error = refused("out_of_memory", "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0");
    assert!(matches!(fault_of(&error), Some(Fault::OutOfMemory { requested_bytes: Some(2_147_483_648), .. })));
    let error = refused("out_of_memory", "no more");
    assert!(matches!(fault_of(&error), Some(Fault::OutOfMemory { requested_bytes: None, .. })), "{error:#}");
    let error = refused("not_available", "no C++ compiler");
    assert!(matches!(fault_of(&error), Some(Fault::NotAvailable { has, .. }) if has == "no C++ compiler"));
    let error = refused("not_available", r#"no", "needs": "a GPU"#);
    assert!(matches!(fault_of(&error), Some(Fault::NotAvailable { needs, .. }) if needs == "a GPU"));
    let error = format!("{:#}", refused("failed", "ValueError: no"));
    assert!(error.contains("\"add\"") && error.ends_with("ValueError: no"), "{error}");
}

#[test]
fn the_error_of_a_dead_peer_has_its_status_and_last_output() {
    let mut peer = answering("echo 'the disk is full'; exit 3");
    let error = format!("{:#}", call(&mut peer).unwrap_err());
    assert!(error.contains("exited with status 3") && error.contains("the disk is full"), "{error}");
    assert!(!peer.is_usable());
    assert!(call(&mut peer).unwrap_err().to_string().contains("has ended"));
    let error = format!("{:#}", start("echo 'no torch here'; exit 1", PATIENCE).err().unwrap());
    assert!(error.contains("to greet") && error.contains("no torch here"), "{error}");
}

#[test]
fn a_peer_that_hangs_is_killed_with_its_helpers() {
    let mut peer = start(&format!("sleep 60 & echo $!; {GREETING}; read -r job; sleep 60"), PATIENCE).unwrap();
    let error = peer.call::<Value>("add", json!({}), Duration::from_millis(300)).unwrap_err();
    assert!(error.downcast_ref::<NoAnswer>().is_some(), "callers branch on it");
    let error = format!("{error:#}");
    assert!(error.contains("no answer within 0.3 s"), "{error}");
    let helper: u32 = error.lines().last().unwrap().trim().parse().unwrap();
    assert!(wait_until(PATIENCE, || !is_alive(helper)), "the helper {helper} outlived its peer");
}

#[test]
fn an_invalid_reply_makes_the_peer_unusable() {
    for (answer, expected) in [
        ("echo 'Hello there'", "not JSON"),
        (r#"echo '{"id": 2, "result": 1}'"#, "answered job 2"),
        (r#"echo '{"id": 1}'"#, "a result or an error"),
        (r#"echo '{"id": 1, "result": 1, "more": 2}'"#, "unknown field"),
        (r#"echo '{"id": 1, "error": {"kind": "tired", "message": ""}}'"#, "tired"),
    ] {
        let mut peer = answering(answer);
        let error = format!("{:#}", call(&mut peer).unwrap_err());
        assert!(error.contains(expected) && !peer.is_usable(), "{answer}: {error}");
    }
}

#[test]
fn what_a_peer_printed_of_a_refused_job_is_not_its_last_output_in_a_later_one() {
    let refusal = r#"{"id": 1, "error": {"kind": "failed", "message": "no"}}"#;
    let mut peer =
        answering(&format!("echo of the first >&2; echo '{refusal}' >&0; read -r job; echo of the second; kill -9 $$"));
    let mut call = || format!("{:#}", peer.call::<Value>("add", json!({}), PATIENCE).unwrap_err());
    assert!(call().ends_with(": no"));
    let said = call();
    assert!(said.contains("of the second") && !said.contains("of the first"), "{said}");
}

#[test]
fn another_version_or_none_is_refused_with_both_numbers() {
    for (greeting, spoken) in [(r#"{"protocol": 2}"#, "protocol 2"), ("{}", "protocol null"), ("[]", "protocol null")] {
        let error = start(&format!("echo '{greeting}' >&0; sleep 60"), PATIENCE).err().unwrap().to_string();
        assert!(error.contains(spoken) && error.contains("this program 1"), "{error}");
    }
}

#[test]
fn a_dropped_peer_is_dead() {
    let peer = start(&format!("{GREETING}; sleep 60"), PATIENCE).unwrap();
    let pid = peer.process.as_ref().unwrap().id();
    assert!(is_alive(pid));
    drop(peer);
    assert!(!is_alive(pid));
}
