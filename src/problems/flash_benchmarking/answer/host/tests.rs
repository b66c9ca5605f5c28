//! Made-up calls: the claim both ways and not at all, columns without a time, and a CPU's table.

use serde_json::{Value, json};

use super::super::tests::ended;
use crate::harness::answer::made_up::{MadeUp, printed, seconds};
use crate::harness::answer::{Answer, Records};

const CLAIM: &str = "wheel-call-adds-less-than-5-us";

fn params() -> Value {
    json!({"measure": "calls", "dtype": "bfloat16", "batch": 1, "n_heads": 4, "d_head": 64, "seq": 128, "calls": 200,
        "rounds": 2, "warmup": 1, "iterations": 1})
}

/// Microseconds of a call in two rounds; recorded ones take 2 us more.
fn timed(us: [f64; 2]) -> Value {
    let [forward, recorded] = [0.0, 2.0].map(|more| seconds(&us.map(|us| (us + more) * 1e-6)));
    json!({"kind": "measured", "row": {"version": "9.9", "error": 1e-3, "forward": forward, "recorded": recorded}})
}

fn row(wheel: Value) -> Value {
    let missing = json!({"kind": "not_run", "reason": "flash-attn-4 is not installed: run pip"});
    json!({"rust": timed([10.0, 10.0]), "wheel": wheel, "sdpa": timed([8.0, 10.0]), "flash_attention_4": missing})
}

fn of_wheel(wheel: Value) -> Answer {
    ended(&MadeUp::gpu("x").measured("calls", &params(), &row(wheel)).records())
}

#[test]
fn the_claim_holds_only_if_every_round_does() {
    for (wheel, held) in [([12.0, 14.9], true), ([12.0, 15.1], false), ([9.0, 9.0], true)] {
        assert_eq!(of_wheel(timed(wheel)).holds(CLAIM), Some(held), "{wheel:?}");
    }
    let answer = of_wheel(timed([12.0, 13.0]));
    let more = answer.quoted()["host"]["more"]["low"]["value"].as_f64().unwrap();
    assert!((more - 2.5e-6).abs() < 1e-12, "{more}");
    let missing = of_wheel(json!({"kind": "failed", "error": "the peer gave no answer within 30 s"}));
    assert!(missing.holds(CLAIM).is_none() && missing.quoted()["host"]["more"].is_null());
}

#[test]
fn the_table_has_a_line_for_each_column_and_a_sentence_for_each_that_has_no_time() {
    let answer = of_wheel(json!({"kind": "failed", "error": "the peer gave no answer within 30 s"}));
    let table = answer.tables()["calls"].markdown();
    for line in [
        "| ours, from Rust | 10.0 | 12.0 | 9.9 |",
        "| ours, the wheel | failed | failed |  |",
        "| SDPA | 9.0 † | 11.0 † | 9.9 |",
        "| FlashAttention-4 | not run | not run |  |",
    ] {
        assert!(table.contains(line), "{table}");
    }
    let untimed = [
        "No time of ours, the wheel: the peer gave no answer within 30 s.",
        "No time of FlashAttention-4: flash-attn-4 is not installed: run pip.",
    ];
    assert_eq!(printed(&answer)["host"]["untimed"], json!(untimed));
}

#[test]
fn a_case_that_failed_is_named_and_a_cpu_has_a_table_alone() {
    let failed = ended(&MadeUp::gpu("x").failed("calls", &params()).records());
    assert_eq!(failed.quoted()["endings"][0], "Cells without any time: calls that the host limits (the worker died).");
    assert!(failed.quoted()["host"].is_null() && !failed.tables().contains_key("calls"));
    let cpu = || MadeUp::cpu("x").measured("calls", &params(), &row(timed([11.0, 11.0])));
    let alone = ended(&cpu().records());
    assert!(alone.quoted()["host"].is_null() && alone.claims().is_empty());
    let gpu = MadeUp::gpu("x").measured("calls", &params(), &row(timed([12.0, 12.0]))).set();
    let both = ended(&Records { cpu: Some(cpu().set()), gpu: Some(gpu), ..Records::default() });
    for (id, wheel) in [("calls", "| 12.0 | 14.0 |"), ("cpu-calls", "| 11.0 | 13.0 |")] {
        assert!(both.tables()[id].markdown().contains(wheel), "{id}");
    }
    assert!(alone.tables().contains_key("cpu-calls"));
}
