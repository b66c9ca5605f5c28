//! `cs336 launch --trace`: one trace of two Gloo ranks on one clock, and the rank that comes late.

use std::io::Read as _;
use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

#[test]
fn one_trace_shows_both_ranks_and_names_the_one_that_comes_late() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    std::fs::write(path("input.json"), json!({"fault": "late", "folder": folder.path()}).to_string()).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_cs336"));
    command.args(["launch", "--task", "fault_test", "--world-size", "2", "--input"]).arg(path("input.json"));
    let output = command.arg("--output").arg(path("out")).arg("--trace").arg(path("trace.json.gz")).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.contains("rank 1's clock is "), "{said}");
    assert!(said.contains("rank 1 arrives last at ") && !said.contains("rank 0 arrives last at 2 of 2"), "{said}");
    let mut json = String::new();
    let bytes = std::fs::read(path("trace.json.gz")).unwrap();
    flate2::read::GzDecoder::new(&bytes[..]).read_to_string(&mut json).unwrap();
    let trace: Value = serde_json::from_str(&json).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let launches: Vec<_> = events
        .iter()
        .filter(|e| e["name"].as_str().is_some_and(|name| name.starts_with("launch all_reduce")))
        .collect();
    let (first, last) = (launches[0], launches[1]);
    assert!(launches.len() == 2 && first["name"] == last["name"] && first["pid"] != last["pid"], "{launches:?}");
    let at = |event: &Value| event["ts"].as_f64().unwrap();
    assert!(at(last) > at(first), "rank 1 launched {} us after rank 0", at(last) - at(first));
    let named = |event: &&Value| event["name"] == "process_name";
    let names: Vec<_> = events.iter().filter(named).filter_map(|event| event["args"]["name"].as_str()).collect();
    assert!(
        [0, 1].iter().all(|rank| names.iter().any(|name| name.starts_with(&format!("rank {rank}: ")))),
        "{names:?}"
    );
}

#[test]
fn a_trace_that_a_device_swallows_is_no_error_and_a_pipe_that_nobody_reads_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    std::fs::write(path("input.json"), json!({"fault": "late", "folder": folder.path()}).to_string()).unwrap();
    assert!(Command::new("mkfifo").arg(path("pipe")).status().unwrap().success());
    let launch = |trace: &Path| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_cs336"));
        command.args(["launch", "--task", "fault_test", "--world-size", "2", "--input"]).arg(path("input.json"));
        let output = command.arg("--trace").arg(trace).output().unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (code, said) = launch(Path::new("/dev/null"));
    assert_eq!(code, Some(0), "{said}");
    let (code, said) = launch(&path("pipe"));
    assert!(code == Some(1) && said.contains("/pipe cannot be written: "), "{said}");
    assert!(said.contains("remove what is in its place"), "{said}");
}
