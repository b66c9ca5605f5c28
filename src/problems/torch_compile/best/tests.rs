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
    for (key, value) in [("autotune_limit_s", json!(0)), ("energy_s", json!(-1.0)), ("rounds", json!(0))] {
        assert!(params(&json!({key: value})).unwrap_err().to_string().contains(key));
    }
}

#[test]
fn a_mode_over_its_time_limit_and_one_without_cuda_graphs_end_their_own_columns_alone() {
    let row = measure(&params(&json!({"autotune_limit_s": 1, "energy_s": 0.1})).unwrap(), Device::Cpu).unwrap();
    let reason = |compared: &Compared| match &compared.python {
        ColumnOutcome::NotRun { reason } => reason.clone(),
        other => other.label().to_string(),
    };
    // Without a C++ compiler the default mode is not run either.
    let compiled = row.default.compiled.as_ref();
    assert_eq!(compiled.is_some(), reason(&row.default) == "measured");
    if let Some(Compiled { errors, compile, graphs_skipped, .. }) = compiled {
        assert!(errors.gradients < 1e-5 && *graphs_skipped == 0, "{errors:?}");
        assert_eq!(compile.as_ref().unwrap().graphs, 1);
    }
    assert_eq!(reason(&row.reduce_overhead), "needs a CUDA GPU (for CUDA graphs), has a CPU");
    assert_eq!(reason(&row.max_autotune), "did not compile within 1 s");
    for compared in [&row.default, &row.reduce_overhead, &row.max_autotune] {
        assert_eq!(compared.rust.measured().unwrap().step.samples.len(), 2, "ours takes its turns all the same");
    }
    assert!(row.ours.unwrap().loss_error.is_none());
    assert_eq!(row.energy_missing.as_deref(), Some("a CPU has no energy counter here"));
}

#[test]
fn a_captured_step_is_not_run_on_the_cpu_and_pytorch_goes_on() {
    let p = params(&json!({"execution": "captured"})).unwrap();
    let bench = ModelBench::new(&p.config(), p.attention, 1, p.dtype, Device::Cpu).unwrap();
    let optimizer = RefCell::new(adamw_for(Device::Cpu, AdamWOptions::default()).unwrap());
    let ours = ColumnOutcome::of(ours::prepare(p.execution, &bench, &optimizer)).unwrap();
    assert_eq!(ours.label(), "not run");
}
