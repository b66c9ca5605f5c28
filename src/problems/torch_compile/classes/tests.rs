//! Our eager steps on the CPU, and parameters; the CPU's grid measures PyTorch's too.

use serde_json::{Value, json};

use super::*;
use crate::torch::trace::{Event, Source};

fn params(changes: &Value) -> Result<Params> {
    let mut params = json!({"size": "tiny", "context_length": 32, "batch_size": 1, "dtype": "float32",
        "attention": "naive", "mode": "default", "warmup": 1, "steps": 2, "profiled": 2});
    params.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
    let params: Params = serde_json::from_value(params)?;
    params.validate().map(|()| params)
}

#[test]
fn parameters_out_of_range_are_refused_by_key() {
    params(&json!({"mode": "reduce-overhead"})).unwrap();
    let wrong =
        [("mode", json!("max-autotune")), ("warmup", json!(0)), ("steps", json!(1001)), ("profiled", json!(21))];
    for (key, value) in wrong {
        assert!(params(&json!({key: value})).unwrap_err().to_string().contains(key));
    }
}

#[test]
fn an_eager_step_is_timed_and_profiled_and_a_graph_is_not_run_on_the_cpu() {
    let p = params(&json!({})).unwrap();
    let of = |name: StepName| name.ours(p.attention).unwrap();
    assert_eq!(timed(&p, of(StepName::Eager), Device::Cpu).unwrap().samples.len(), 2);
    let profiles = profiled(&p, of(StepName::Eager), Device::Cpu).unwrap();
    assert_eq!(profiles.len(), 2);
    for profile in profiles {
        // A linear layer has three products a step, attention's two have six.
        let layers = p.config().num_layers as u64;
        assert_eq!(profile.classes[&StepClass::Products].count, layers * (3 * 7 + 6) + 3);
        assert!(profile.busy_s > 0.0 && profile.busy_s < profile.host_s, "{profile:?}");
    }
    for name in [StepName::Captured, StepName::Fused] {
        assert_eq!(ColumnOutcome::of(timed(&p, of(name), Device::Cpu)).unwrap().label(), "not run");
    }
}

#[test]
fn a_trace_without_the_products_of_a_step_is_refused() {
    let p = params(&json!({})).unwrap();
    let event =
        |source| Event { source, name: "aten::mm".into(), start_ns: 0, duration_ns: 1, thread: 1, correlation: None };
    let of = |source, count| profiles(&p, Device::Cpu, || Ok((Trace { events: vec![event(source); count] }, 1.0)));
    assert_eq!(of(Source::Operator, 48).unwrap().len(), 2);
    for profiles in [of(Source::Operator, 47), of(Source::Kernel, 48)] {
        assert!(profiles.unwrap_err().to_string().contains("missed kernels"));
    }
}
