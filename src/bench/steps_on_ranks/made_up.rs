//! Whole steps on ranks for tests of answers that quote them.

use serde_json::{Value, json};

pub fn params(form: &str) -> Value {
    json!({"measure": "ranks", "backend": "nccl", "world_size": 2, "size": "small", "context_length": 512,
        "batch_size": 2, "dtype": "bfloat16", "attention": "flash", "bucket_size_mb": 100.0, "pytorch": form,
        "rounds": 2, "warmup": 1, "iterations": 1})
}

pub fn row(buckets: f64, pytorch: f64) -> Value {
    let work = json!({"flops": 0.0, "bytes": 8.0, "precision": "bfloat16"});
    let times = |seconds: f64| {
        let samples = json!({"unit": "s", "samples": [seconds, seconds], "work": work});
        json!({"last_rank": samples, "by_rank": [samples, samples]})
    };
    json!({"single": times(0.040), "buckets": times(buckets), "flat": times(0.060), "sharded": times(0.044),
        "pytorch": times(pytorch), "gradient_bytes": 4_000_000_000u64, "reduction_error": 0.002,
        "software": {"protocol": 1, "python": "3.12", "torch": "2.11", "triton": null, "device": "cuda", "threads": 2,
            "tf32": false}})
}
