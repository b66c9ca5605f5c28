//! Endings and times of whole comparisons on the CPU, with an implementation among them that is wrong.

use tch::{Device, Kind, Tensor};

use super::super::compare::eager;
use super::super::flash_attention_4::beside;
use super::*;
use crate::attention::implementations::{Group, Implementation, Run, Timed, Units};
use crate::attention::{Attention, naive::Naive};
use crate::bench::attention::Inputs;
use crate::bench::timing::{Protocol, TimingBench};
use crate::torch::Generator;
use crate::torch::random::SEED;

/// Forgets the mask in its backward pass.
struct Forgetful;

impl Attention for Forgetful {
    fn name(&self) -> &'static str {
        "forgetful"
    }

    fn supports(&self, _kind: Kind, _device: Device, _head_dim: i64) -> Result<(), String> {
        Ok(())
    }

    fn forward(&self, q: &Tensor, k: &Tensor, v: &Tensor, is_causal: bool) -> Result<(Tensor, Tensor)> {
        Naive.forward(q, k, v, is_causal)
    }

    fn backward(&self, saved: [&Tensor; 6], _is_causal: bool) -> Result<[Tensor; 3]> {
        Naive.backward(saved, false)
    }
}

fn task(launch: Launch) -> Task {
    Task {
        shape: [1, 1, 32, 16],
        dtype: Dtype::Float32,
        launch,
        passes: &[AttentionPass::Forward, AttentionPass::Backward, AttentionPass::Both],
        protocol: Protocol {
            cache: Cache::Warm,
            pace: Pace::Sustained,
            warmup_ms: 0.1,
            rep_ms: 60_000.0,
            most_repeats: 3,
        },
        rounds: 2,
        unpacked: false,
        energy_s: 0.0,
    }
}

#[test]
fn every_column_has_an_ending_and_a_wrong_one_no_time() {
    let wrong = Implementation {
        name: "forgetful",
        label: "forgetful",
        group: Group::Ours,
        float32: Units::Vector,
        kernels: &[],
        run: Run::Own(&Forgetful),
        timed: Timed::Everywhere,
    };
    let implementations = [columns(), vec![wrong]].concat();
    let entries = beside(&task(Launch::Eager), &implementations, Device::Cpu).unwrap().columns;
    assert_eq!(entries.len(), implementations.len());
    for name in ["naive", "tiled", "sdpa_flash"] {
        let entry = &entries[name];
        let of = |pass: AttentionPass| entry.passes[&pass].measured().unwrap().samples.len();
        assert_eq!([AttentionPass::Forward, AttentionPass::Backward, AttentionPass::Both].map(of), [6, 6, 6], "{name}");
        assert!(entry.errors.unwrap().largest() < 1e-5 && entry.verified_seq == Some(32), "{name} {entry:?}");
    }
    for pass in entries["forgetful"].passes.values() {
        assert!(matches!(pass, ColumnOutcome::Failed { error } if error.contains("disagrees")), "{pass:?}");
    }
    for name in ["flash", "sdpa_cudnn", "sdpa_efficient", "flash_attention_4"] {
        for pass in entries[name].passes.values() {
            assert!(
                matches!(pass, ColumnOutcome::NotRun { reason } if reason.contains("GPU") || reason.contains("Float"))
            );
        }
    }
}

#[test]
fn a_graph_needs_a_gpu_and_a_case_that_cannot_fit_is_refused() {
    let entries = beside(&task(Launch::Graph), &columns(), Device::Cpu).unwrap().columns;
    let [forward, ..] = entries["naive"].passes.values().collect::<Vec<_>>()[..] else { panic!("{entries:?}") };
    assert!(matches!(forward, ColumnOutcome::NotRun { reason } if reason.contains("CUDA")), "{forward:?}");
    let long = Task { shape: [1, 1, 1 << 24, 16], ..task(Launch::Eager) };
    let refused = |by: &Implementation| long.refused(by, AttentionPass::Forward, Device::Cpu).unwrap();
    let fault = refused(&columns()[0]).unwrap();
    assert!(matches!(fault, Fault::OutOfMemory { requested_bytes: Some(bytes), .. } if bytes > 1 << 49));
    assert!(refused(&columns()[1]).is_none());
}

#[test]
fn the_leaderboards_gradients_accumulate_and_the_grids_do_not() {
    let bench = TimingBench::new(Device::Cpu, task(Launch::Eager).protocol).unwrap();
    let inputs = Inputs::draw_unpacked(2, 32, 16, Kind::Float, &Generator::new(Device::Cpu, SEED).unwrap()).unwrap();
    let gradient = |pass| {
        let timed = eager(&columns()[0], pass, &inputs, |clear, call| bench.turn(clear, call)).unwrap().len();
        let gradient = inputs.leaves[0].grad().abs().sum(Kind::Float).double_value(&[]);
        inputs.clear().unwrap();
        (gradient, timed)
    };
    // The upstream gradient of both is ones. A turn makes a first call, five for the estimate, warm-up and timed ones.
    let ((one, _), (sum, timed)) = (gradient(AttentionPass::Both), gradient(AttentionPass::Summed));
    let calls = sum / one;
    assert!((calls - calls.round()).abs() < 1e-2 && calls.round() as usize >= 1 + 5 + 1 + timed, "{calls} {timed}");
}

#[test]
fn the_longest_cell_in_float32_needs_four_score_matrices_and_the_mask() {
    let task = Task { shape: [1, 1, 65536, 64], ..task(Launch::Eager) };
    let predicted = task.predicted_bytes(&columns()[0], Device::Cuda(0));
    let (m, r, mask) = (1u64 << 34, 1u64 << 24, 1u64 << 32);
    assert_eq!(predicted[&AttentionPass::Forward], 2 * m + mask + 5 * r);
    assert_eq!(predicted[&AttentionPass::Backward], 4 * m + mask + 6 * r);
    assert_eq!(predicted[&AttentionPass::Both], predicted[&AttentionPass::Backward]);
}

#[test]
fn pace_and_energy_are_written_only_where_a_suite_names_them() {
    let cell = serde_json::json!({"measure": "cell", "dtype": "bfloat16", "d_model": 64, "seq": 128, "batch": 1, "cache": "cold",
        "launch": "eager", "rounds": 2, "warmup_ms": 5.0, "rep_ms": 10.0, "most_repeats": 3});
    let written = |params: &serde_json::Value| {
        serde_json::to_value(serde_json::from_value::<Params>(params.clone()).unwrap()).unwrap()
    };
    let mut rested = cell.clone();
    rested["pace"] = "sustained".into();
    rested["energy_s"] = 0.0.into();
    assert_eq!((written(&cell), written(&rested)), (cell.clone(), cell));
    rested["pace"] = "rested".into();
    rested["energy_s"] = 0.5.into();
    assert_eq!(written(&rested), rested);
    rested["energy_s"] = (-1.0).into();
    let error = FlashBenchmarking::validate(&serde_json::from_value(rested).unwrap()).unwrap_err();
    assert!(error.to_string().contains("energy_s is -1"), "{error}");
}
