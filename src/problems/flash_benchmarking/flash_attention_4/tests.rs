//! The whole path from a suite's case to a row on the CPU, with a made-up `flash_attn.cute` in the peer.

use std::fs::{create_dir_all, write};

use serde_json::{Value, json};
use tempfile::TempDir;

use super::super::measure::{FlashBenchmarking, ImplementationOutcome, Params};
use super::*;
use crate::attention::implementations::by_name;
use crate::harness::answer::made_up::machine;
use crate::harness::problem::Measured;
use crate::harness::record::Profile;
use crate::torch::random::SEED;

/// Attention in plain operations on (batch, n, heads, d). `MASK` and `RETURNED` are replaced.
const MODULE: &str = "
import torch

def flash_attn_func(q, k, v, causal=False):
    assert causal and q.dtype == torch.bfloat16
    CHECK
    q, k, v = (t.transpose(1, 2).float() for t in (q, k, v))
    scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(DIAGONAL)
    p = scores.masked_fill(hidden, float('-inf')).softmax(-1)
    return (p @ v).transpose(1, 2).bfloat16(), None
";

/// A folder with the package, whose mask hides the keys from `diagonal` on after a query's own place.
fn site(check: &str, diagonal: &str) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let (package, facts) = (folder.path().join("flash_attn/cute"), folder.path().join("flash_attn_4-9.9.dist-info"));
    create_dir_all(&package).unwrap();
    create_dir_all(&facts).unwrap();
    write(package.join("__init__.py"), MODULE.replace("CHECK", check).replace("DIAGONAL", diagonal)).unwrap();
    write(facts.join("METADATA"), "Metadata-Version: 2.1\nName: flash-attn-4\nVersion: 9.9\n").unwrap();
    folder
}

fn peer(site: &TempDir) -> TorchPeer {
    TorchPeer::start_with(Device::Cpu, Some(site.path().into())).unwrap()
}

/// A suite's case.
fn case(seq: i64) -> Value {
    json!({"measure": "cell", "dtype": "bfloat16", "d_model": 64, "seq": seq, "batch": 1, "cache": "warm",
        "pace": "rested", "launch": "eager", "rounds": 2, "warmup_ms": 0.1, "rep_ms": 60_000.0, "most_repeats": 2,
        "energy_s": 0.01})
}

/// As the harness makes it of a suite's case.
fn task(seq: i64) -> Task {
    let case = case(seq);
    let canonical = (Measured::of::<FlashBenchmarking>().parse)(&case, Profile::Gpu).unwrap();
    assert_eq!(canonical, case);
    let Params::Cell(cell) = serde_json::from_value(canonical).unwrap() else { panic!("{case}") };
    Task::of_cell(&cell)
}

/// How FlashAttention-4 ended, out of a row that was written and read again.
fn measured_in(peer: Result<&mut TorchPeer>, seq: i64) -> (ImplementationOutcome, Value) {
    let implementations = ["naive", "flash_attention_4"].map(|name| *by_name(name).unwrap());
    let row = serde_json::to_value(in_peer(&task(seq), &implementations, Device::Cpu, peer).unwrap()).unwrap();
    (Measured::of::<FlashBenchmarking>().check_row)(&case(seq), &row, &machine(None)).unwrap();
    assert_eq!(row["columns"]["naive"]["passes"]["both"]["kind"], "measured");
    (serde_json::from_value(row["columns"]["flash_attention_4"].clone()).unwrap(), row)
}

#[test]
fn its_passes_are_verified_and_timed_in_the_peer() {
    let site = site("", "1");
    let mut peer = peer(&site);
    for seq in [128, WHOLE + 64] {
        let (entry, row) = measured_in(Ok(&mut peer), seq);
        assert_eq!((entry.version.as_deref(), entry.verified_seq), (Some("9.9"), Some(seq)));
        assert!(entry.errors.unwrap().largest() < 1e-2, "{entry:?}");
        for pass in [AttentionPass::Forward, AttentionPass::Backward, AttentionPass::Both] {
            let samples = entry.passes[&pass].measured().unwrap();
            assert!(samples.samples.len() == 2 * 2 && samples.work.is_some(), "{samples:?}");
        }
        assert_eq!(row["energy_missing"], "a CPU has no energy counter here");
    }
    let (task, generator) = (task(128), Generator::new(Device::Cpu, SEED).unwrap());
    let inputs = task.draw(128, &generator).unwrap();
    let opened = ColumnOutcome::Measured { row: RefCell::new(&mut peer) };
    let verified = verify(&opened, &task, &inputs, &generator).unwrap();
    let Some(Verified { runs: Runs::InPeer(peer), .. }) = verified.measured() else { panic!("it must run") };
    assert!(peer.busy(AttentionPass::Both, 0.01).unwrap().calls >= 1);
}

#[test]
fn a_wrong_result_is_not_timed_and_costs_no_other_column() {
    let site = site("", "2");
    let (entry, _) = measured_in(Ok(&mut peer(&site)), 128);
    for pass in entry.passes.values() {
        assert!(matches!(pass, ColumnOutcome::Failed { error } if error.contains("disagrees")), "{pass:?}");
    }
}

#[test]
fn what_its_own_checks_refuse_is_not_run_in_its_words() {
    let site = site("assert q.shape[-1] == 16, 'd must be 16'", "1");
    let mut peer = peer(&site);
    let (entry, _) = measured_in(Ok(&mut peer), 128);
    for pass in entry.passes.values() {
        assert_eq!(*pass, ColumnOutcome::NotRun { reason: "AssertionError: d must be 16".into() });
    }
    assert!(peer.refuses_unknown_jobs().unwrap(), "the peer goes on");
}

#[test]
fn a_device_error_fails_the_column_and_ends_the_peer() {
    let site = site("raise RuntimeError('CUDA error: an illegal memory access')", "1");
    let mut peer = peer(&site);
    let (entry, _) = measured_in(Ok(&mut peer), 128);
    for pass in entry.passes.values() {
        assert!(matches!(pass, ColumnOutcome::Failed { error } if error.contains("illegal memory")), "{pass:?}");
    }
    assert!(peer.refuses_unknown_jobs().is_ok_and(|goes_on| !goes_on), "a peer with a failed device is not kept");
}

#[test]
fn a_missing_package_or_peer_is_not_run_with_the_remedy() {
    let nothing = tempfile::tempdir().unwrap();
    let (entry, _) = measured_in(Ok(&mut peer(&nothing)), 128);
    let expected = "flash-attn-4 is not installed: run python -m pip install flash-attn-4==4.0.0b36";
    assert_eq!(entry.passes[&AttentionPass::Both], ColumnOutcome::NotRun { reason: expected.into() });
    assert!(entry.version.is_none() && entry.errors.is_none());
    let (entry, _) = measured_in(Err(anyhow::anyhow!("the versions must be equal")), 128);
    let failed = ColumnOutcome::Failed { error: "the versions must be equal".into() };
    assert_eq!(entry.passes[&AttentionPass::Both], failed);
}

#[test]
fn only_cold_launched_cells_in_bfloat16_on_a_gpu_have_a_column() {
    let why = |change: fn(&mut Task), device| {
        let mut task = task(LEAST_SEQ);
        task.protocol.cache = Cache::Cold;
        change(&mut task);
        absent(&task, device)
    };
    let gpu = Device::Cuda(0);
    assert_eq!(why(|_| (), gpu), None);
    assert_eq!(why(|_| (), Device::Cpu), Some("it needs a GPU"));
    let short = "compared from one head of T = 8,192 on, where no pass waits for launches";
    assert_eq!(why(|task| task.shape[2] = LEAST_SEQ / 2, gpu), Some(short));
    assert_eq!(why(|task| task.shape = [3, 1, LEAST_SEQ / 2, 64], gpu), Some(short));
    assert_eq!(why(|task| task.shape = [4, 1, LEAST_SEQ / 2, 64], gpu), None);
    assert_eq!(why(|task| task.shape[3] = 32, gpu), Some("compared at d 64 and 128 only"));
    assert_eq!(why(|task| task.dtype = Dtype::Float32, gpu), Some("compared in bfloat16 only"));
    assert_eq!(why(|task| task.launch = Launch::Graph, gpu), Some("launched by the host only"));
    assert_eq!(why(|task| task.protocol.cache = Cache::Warm, gpu), Some("compared with cold caches only"));
}
