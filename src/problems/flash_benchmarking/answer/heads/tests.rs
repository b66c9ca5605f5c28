//! Sentences and tables of 16 heads: with FlashAttention-4 and without it, not run, in one protocol or in both.

use serde_json::{Value, json};

use super::super::tests::{ended, ended_as, params, row, timed, value};
use crate::harness::answer::Answer;
use crate::harness::answer::made_up::{MadeUp, printed};

fn heads(pace: &str) -> Value {
    let mut heads = params("bfloat16", 64, 16_384, 16, "eager");
    if pace == "rested" {
        heads["pace"] = pace.into();
    }
    heads
}

/// Ours takes `ours` ms in every pass, cuDNN 2.5 ms.
fn columns(ours: f64) -> Value {
    row(&[("flash", &[1e-3 * ours, 1e-3 * ours]), ("sdpa_cudnn", &[2.5e-3, 2.5e-3])])
}

fn with_fa4(mut row: Value, fa4: Value) -> Value {
    row["columns"]["flash_attention_4"] = fa4;
    row
}

fn live(ms: f64) -> Value {
    let pass = timed(&[1e-3 * ms, 1e-3 * ms]);
    let mut entry = ended_as(json!({"forward": pass, "backward": pass, "both": pass}));
    entry["version"] = "4.0.0b36".into();
    entry
}

fn not_run() -> Value {
    let pass = json!({"kind": "not_run", "reason": "flash-attn-4 is not installed: run pip"});
    json!({"passes": {"forward": pass, "backward": pass, "both": pass}})
}

fn answer(sustained: &Value, rested: Option<&Value>) -> Answer {
    let made_up = MadeUp::gpu("x").measured("heads", &heads("sustained"), sustained);
    let made_up = rested.into_iter().fold(made_up, |made_up, row| made_up.measured("rested", &heads("rested"), row));
    ended(&made_up.records())
}

const CLAIM: &str = "faster-than-flash-attention-4";

#[test]
fn flash_attention_3_is_quoted_for_the_protocol_of_each_row() {
    let sustained = answer(&columns(2.0), None);
    let table = sustained.tables()["full-heads"].markdown();
    assert!(table.contains("| 64 | backward | sustained | 2.00 | 2.50 | 2.54 |"), "{table}");
    assert!(!table.contains("rested") && table.matches("\n| 64 |").count() == 3, "{table}");
    assert_eq!(printed(&sustained)["heads"]["over_fa3"], json!(["0.52 to 1.83 (d = 64)"]));
    let both = answer(&columns(2.0), Some(&columns(1.0)));
    let table = both.tables()["full-heads"].markdown();
    assert!(table.contains("| 64 | forward | rested | 1.00 | 2.50 | 0.975 |"), "{table}");
    assert_eq!(printed(&both)["heads"]["over_fa3"], json!(["0.52 to 3.39 (d = 64)"]));
}

#[test]
fn flash_attention_4_has_a_column_and_a_claim_where_it_was_measured() {
    for (ours, holds) in [(2.0, true), (3.0, false)] {
        let row = with_fa4(columns(ours), live(2.4));
        let answer = answer(&row, Some(&row));
        assert_eq!(answer.holds(CLAIM), Some(holds));
        assert_eq!(answer.quoted()["heads"]["version"], "4.0.0b36");
        let ratio = format!("{:.2}", 2.4 / ours);
        assert_eq!(printed(&answer)["heads"]["over_fa4"], json!([format!("{ratio} (d = 64)")]));
        let table = answer.tables()["full-heads"].markdown();
        assert!(table.contains(&format!("| 64 | forward | rested | {ours:.2} | 2.50 | 2.40 | 0.975 |")), "{table}");
    }
}

#[test]
fn without_flash_attention_4_nothing_is_said_of_it() {
    for row in [columns(2.0), with_fa4(columns(2.0), not_run())] {
        let answer = answer(&row, Some(&row));
        assert!(answer.holds(CLAIM).is_none() && answer.quoted()["heads"]["over_fa4"] == json!([]));
        let table = answer.tables()["full-heads"].markdown();
        assert!(!table.contains("FlashAttention-4") && !answer.tables().contains_key("full-energy"), "{table}");
    }
}

#[test]
fn flash_attention_4_is_no_operator_of_pytorch() {
    let row = row(&[("naive", &[4e-3, 4e-3]), ("flash", &[2e-3, 2e-3]), ("sdpa_cudnn", &[3e-3, 3e-3])]);
    let columns = with_fa4(row, live(1.0));
    let long = params("bfloat16", 64, 16_384, 1, "eager");
    let answer = ended(&MadeUp::gpu("x").measured("long", &long, &columns).records());
    assert_eq!(answer.holds("no-pass-slower-than-pytorch"), Some(true));
    let times = answer.tables()["full-times-bfloat16"].markdown();
    assert!(times.contains("| forward, d = 64 | 16,384 | 4.00 | 2.00 | 3.00 | **1.00** |"), "{times}");
}

#[test]
fn short_cells_beside_flash_attention_4_say_that_launches_were_slower() {
    let plain = row(&[("naive", &[4e-3, 4e-3]), ("flash", &[2e-3, 2e-3])]);
    let caption = |seq: i64, columns: &Value| {
        let cell = params("bfloat16", 64, seq, 1, "eager");
        let answer = ended(&MadeUp::gpu("x").measured("grid", &cell, columns).records());
        answer.figures()["speed-up"].caption.clone()
    };
    let beside = with_fa4(plain.clone(), live(1.0));
    let said = [caption(1024, &beside), caption(8192, &beside), caption(1024, &plain)];
    assert_eq!(said.map(|caption| caption.unwrap().contains("launches took longer")), [true, false, false]);
}

#[test]
fn a_reason_for_not_running_is_listed_once() {
    let columns = with_fa4(columns(2.0), not_run());
    let cell = params("bfloat16", 64, 1024, 1, "eager");
    let answer = ended(&MadeUp::gpu("x").measured("grid", &cell, &columns).records());
    let expected = "Not run on this machine: FlashAttention-4 in bfloat16 (flash-attn-4 is not installed: run pip).";
    assert_eq!(answer.quoted()["endings"], json!([expected]));
}

#[test]
fn joules_and_clocks_have_a_table_where_they_were_read() {
    let mut row = columns(2.0);
    for (column, joules) in [("flash", 1.5), ("sdpa_cudnn", 2.0)] {
        row["columns"][column]["energy"]["forward"] = json!({
            "joules": {"unit": "J", "samples": [joules]},
            "sm_clock": {"unit": "Hz", "samples": [1.6e9, 1.7e9, 1.75e9]},
        });
    }
    let answer = answer(&columns(2.0), Some(&row));
    let table = answer.tables()["full-energy"].markdown();
    assert!(table.contains("| 64 | forward | 1.50 | 2.00 | 1,700 | 1,700 |") && !table.contains("backward"), "{table}");
    assert_eq!(value(&answer, "/heads/energy/low"), 0.75);
}

#[test]
fn shorter_heads_are_compared_with_the_faster_of_the_others() {
    let row = with_fa4(columns(2.0), live(2.4));
    let answer = |columns: &Value| {
        let cell = params("bfloat16", 64, 4096, 32, "eager");
        ended(&MadeUp::gpu("x").measured("heads_4096", &cell, columns).records())
    };
    let said = |columns: &Value| printed(&answer(columns))["shorter"]["ratios"].clone();
    assert_eq!(said(&row), json!(["0.83 (32 heads of 4,096, d = 64)"]));
    assert_eq!(said(&with_fa4(columns(2.0), not_run())), json!(["0.80 (32 heads of 4,096, d = 64)"]));
    let table = answer(&row).tables()["full-shorter-heads"].markdown();
    assert!(table.contains("| 32 | 4,096 | 64 | backward | 2.00 | 2.50 | 2.40 | 0.83 |"), "{table}");
}
