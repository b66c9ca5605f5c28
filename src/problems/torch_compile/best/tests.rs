//! Whole steps through the real Python peer on the CPU, and parameters.

use serde_json::{Value, json};

use super::*;

fn params(changes: &Value) -> Result<Params> {
    let mut params = json!({"size": "tiny", "context_length": 32, "batch_size": 1, "dtype": "float32",
        "attention": "naive", "execution": "eager", "rounds": 2, "warmup": 1, "iterations": 1});
    params.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
    let params: Params = serde_json::from_value(params)?;
    params.validate().map(|()| params)
}

#[test]
fn a_limit_and_an_energy_out_of_range_are_refused_by_key() {
    assert_eq!(params(&json!({})).unwrap().autotune_limit_s, 120);
    for (key, value) in [("autotune_limit_s", json!(3601)), ("energy_s", json!(-1.0)), ("rounds", json!(0))] {
        assert!(params(&json!({key: value})).unwrap_err().to_string().contains(key));
    }
}

/// Compiling takes too long for a test; the CPU's grid measures the mode that compiles.
#[test]
fn a_mode_over_its_time_limit_and_one_without_cuda_graphs_end_their_own_columns_alone() {
    let p = &params(&json!({"autotune_limit_s": 1, "energy_s": 0.1})).unwrap();
    let bench = &ModelBench::new(&p.config(), p.attention, 1, p.dtype, Device::Cpu).unwrap();
    let optimizer = RefCell::new(adamw_for(Device::Cpu, AdamWOptions::default()).unwrap());
    let ours = &ColumnOutcome::of(ours::prepare(p, bench, &optimizer)).unwrap();
    let files = &Files::write(bench).unwrap();
    let case = Comparison { p, bench, files, ours, meter: meter(p, Device::Cpu) };
    assert_eq!(case.meter.as_ref().err().unwrap().as_deref(), Some("a CPU has no energy counter here"));
    let mut missing = None;
    for (mode, expected) in [
        (Mode::ReduceOverhead, "needs a CUDA GPU (for CUDA graphs), has a CPU"),
        (Mode::MaxAutotune, "did not compile within 1 s"),
    ] {
        let (compared, _) = case.beside(mode, &mut missing).unwrap();
        assert!(matches!(&compared.python, ColumnOutcome::NotRun { reason } if reason == expected), "{compared:?}");
        assert_eq!(compared.rust.measured().unwrap().step.samples.len(), 2, "ours takes its turns all the same");
    }
}

#[test]
fn a_captured_step_is_not_run_on_the_cpu_and_pytorch_goes_on() {
    let p = params(&json!({"execution": "captured"})).unwrap();
    let bench = ModelBench::new(&p.config(), p.attention, 1, p.dtype, Device::Cpu).unwrap();
    let optimizer = RefCell::new(adamw_for(Device::Cpu, AdamWOptions::default()).unwrap());
    let ours = ColumnOutcome::of(ours::prepare(&p, &bench, &optimizer)).unwrap();
    assert_eq!(ours.label(), "not run");
}
