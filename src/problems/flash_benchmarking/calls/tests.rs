//! Whole cases on the CPU, with a made-up `cs336` and a made-up `flash_attn.cute` in the peers.

use std::fs::{create_dir_all, write};

use serde_json::Value;
use tempfile::TempDir;

use super::super::measure::{FlashBenchmarking, Row as AnyRow};
use super::*;
use crate::harness::answer::made_up::machine;
use crate::harness::problem::Measured;
use crate::harness::record::Profile;

const WHEEL: &str = "
import torch.nn.functional as F

calls = 0

def flash_attention(q, k, v, is_causal):
    global calls
    calls += 1
    CHECK
    return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
";

const FLASH_ATTENTION_4: &str = "
import torch.nn.functional as F

def flash_attn_func(q, k, v, causal=False):
    o = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=causal)
    return o.transpose(1, 2), None
";

/// A folder with both packages. `check` runs in each call of the wheel.
fn site(check: &str) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (module, package, code) in [
        ("cs336", "cs336", WHEEL.replace("CHECK", check)),
        ("flash_attn/cute", "flash_attn_4", FLASH_ATTENTION_4.into()),
    ] {
        let (module, facts) = (folder.path().join(module), folder.path().join(format!("{package}-9.9.dist-info")));
        create_dir_all(&module).unwrap();
        create_dir_all(&facts).unwrap();
        write(module.join("__init__.py"), code).unwrap();
        let name = package.replace('_', "-");
        write(facts.join("METADATA"), format!("Metadata-Version: 2.1\nName: {name}\nVersion: 9.9\n")).unwrap();
    }
    folder
}

fn case() -> Value {
    json!({"measure": "calls", "dtype": "bfloat16", "batch": 1, "n_heads": 2, "d_head": 16, "seq": 32, "calls": 3,
        "rounds": 2, "warmup": 1, "iterations": 2})
}

fn params() -> Params {
    let mut case = case();
    case.as_object_mut().unwrap().remove("measure");
    serde_json::from_value(case).unwrap()
}

/// The row of a case with these packages, written and read again.
fn measured_with(site: &TempDir) -> Row {
    let start = |_| TorchPeer::start_with(Device::Cpu, Some(site.path().into())).map(Ok);
    let row = AnyRow::Calls(Box::new(in_peers(&params(), Device::Cpu, start).unwrap()));
    let row = serde_json::to_value(row).unwrap();
    (Measured::of::<FlashBenchmarking>().check_row)(&case(), &row, &machine(None)).unwrap();
    serde_json::from_value(row).unwrap()
}

fn assert_measured(column: &ColumnOutcome<CallTimes>, version: Option<&str>) {
    let Some(times) = column.measured() else { panic!("{column:?}") };
    assert_eq!((times.forward.samples.len(), times.recorded.samples.len()), (4, 4));
    assert!(times.error < 2e-2 && version.is_none_or(|version| times.version.as_deref() == Some(version)), "{times:?}");
}

#[test]
fn every_column_is_verified_and_timed_in_both_modes() {
    let row = measured_with(&site(""));
    assert_measured(&row.rust, None);
    assert_measured(&row.wheel, Some("9.9"));
    assert_measured(&row.sdpa, None);
    assert_measured(&row.flash_attention_4, Some("9.9"));
}

#[test]
fn a_column_that_fails_in_its_turns_ends_alone() {
    // Two calls verify it, and each turn makes 2 * 3 * 3.
    let row = measured_with(&site("if calls > 22: raise RuntimeError('its queue is full')"));
    assert!(
        matches!(&row.wheel, ColumnOutcome::Failed { error } if error.contains("its queue is full")),
        "{:?}",
        row.wheel
    );
    assert_measured(&row.rust, None);
    assert_measured(&row.sdpa, None);
    assert_measured(&row.flash_attention_4, Some("9.9"));
}

#[test]
fn a_wrong_result_is_not_timed_and_a_refusal_keeps_its_words() {
    let wrong = measured_with(&site("v = v * 1.1")).wheel;
    assert!(matches!(&wrong, ColumnOutcome::Failed { error } if error.contains("disagrees")), "{wrong:?}");
    let refused = measured_with(&site("assert q.shape[-1] == 64, 'd must be 64'")).wheel;
    assert_eq!(refused, ColumnOutcome::NotRun { reason: "AssertionError: d must be 64".into() });
    let unrecorded = measured_with(&site("q, k, v = q.detach(), k.detach(), v.detach()")).wheel;
    assert!(
        matches!(&unrecorded, ColumnOutcome::Failed { error } if error.contains("require a gradient")),
        "{unrecorded:?}"
    );
}

#[test]
fn a_column_that_is_late_ends_its_process() {
    let (site, folder) = (site("import time; time.sleep(calls > 2)"), tempfile::tempdir().unwrap());
    let file = folder.path().join("attention.safetensors");
    let inputs =
        Inputs::draw(&[1, 2, 32, 16], Dtype::Float32.kind(), &Generator::new(Device::Cpu, SEED).unwrap()).unwrap();
    inputs.write(Expected::of(&inputs).unwrap().outputs(), &file).unwrap();
    let started = TorchPeer::start_with(Device::Cpu, Some(site.path().into())).map(Ok);
    let prepared = InPeer::prepare(Column::Wheel, started, &file, Dtype::Float32);
    let peer = prepared.measured().unwrap_or_else(|| panic!("it must be prepared"));
    let late = format!("{:#}", peer.turn_within(Duration::from_millis(300), &params()).unwrap_err());
    assert!(late.contains("gave no answer within 0.3 s"), "{late}");
    let gone = format!("{:#}", peer.turn(&params()).unwrap_err());
    assert!(gone.contains("the peer has ended"), "{gone}");
}

#[test]
fn a_missing_package_is_not_run_with_the_remedy() {
    let row = measured_with(&tempfile::tempdir().unwrap());
    let expected = "cs336 is not installed: run make wheel, then python -m pip install dist/cs336-*.whl";
    assert_eq!(row.wheel, ColumnOutcome::NotRun { reason: expected.into() });
    let expected = "flash-attn-4 is not installed: run python -m pip install flash-attn-4==4.0.0b36";
    assert_eq!(row.flash_attention_4, ColumnOutcome::NotRun { reason: expected.into() });
    assert_measured(&row.sdpa, None);
}

#[test]
fn more_calls_than_a_queue_holds_and_rows_of_another_measure_are_refused() {
    let measured = Measured::of::<FlashBenchmarking>();
    let mut many = case();
    many["calls"] = 501.into();
    let error = format!("{:#}", (measured.parse)(&many, Profile::Gpu).unwrap_err());
    assert!(error.contains("calls is 501"), "{error}");
    assert_eq!((measured.parse)(&case(), Profile::Cpu).unwrap(), case());
    let error = format!("{:#}", (measured.check_row)(&case(), &json!({"columns": {}}), &machine(None)).unwrap_err());
    assert!(error.contains("of another measure"), "{error}");
}
