//! The answer on made-up profiles: every claim both ways, the numbers of the sentences, and what is missing.

use std::collections::BTreeMap;

use serde_json::json;

use super::super::kernels::Units;
use super::super::measure::{Collector, OptimizerName, Pass};
use super::super::summary::{Attention, Counted, MatmulKernel, Matmuls, Rest, Tally};
use super::*;
use crate::harness::answer::made_up::{MadeUp, seconds};
use crate::model::Precision;

const CLAIMS: [&str; 9] = [
    "profile-matches-the-clock",
    "all-cases-fit",
    "calls-are-9L-plus-1",
    "products-are-9L-plus-1",
    "no-tf32",
    "top-is-a-product",
    "same-in-both",
    "elementwise-leads-the-rest",
    "softmax-takes-more-than-its-operations",
];

/// What a test changes of a profile: seconds of products, elementwise work and copies in a pass, and the rest.
#[derive(Clone)]
struct Made {
    size: SizeName,
    context: i64,
    optimizer: OptimizerName,
    inference: [f64; 3],
    backward: Option<[f64; 3]>,
    /// The forward pass by the host's clock, against one second in the profile, and how long kernels ran.
    host: f64,
    busy: f64,
    calls: u64,
    kernels: u64,
    units: Units,
    both: &'static str,
    softmax: f64,
    products: f64,
}

/// 12 layers, so 109 products in a forward pass.
fn small() -> Made {
    Made {
        size: SizeName::Small,
        context: 512,
        optimizer: OptimizerName::Fused,
        inference: [0.8, 0.15, 0.05],
        backward: Some([1.4, 0.4, 0.2]),
        host: 1.0,
        busy: 1.0,
        calls: 109,
        kernels: 109,
        units: Units::CudaCores,
        both: "gemm",
        softmax: 0.05,
        products: 0.1,
    }
}

fn pass([products, elementwise, copies]: [f64; 3]) -> RangeWork {
    let kernel = |name: &str, class, seconds| Kernel { name: name.into(), class, count: 1200, seconds };
    let mut kernels = vec![
        kernel("gemm", Class::Matmul, products),
        kernel("mul", Class::Elementwise, elementwise),
        kernel("", Class::Copy, copies),
    ];
    kernels.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
    let seconds = products + elementwise + copies;
    let classes: BTreeMap<Class, Tally> =
        kernels.iter().map(|k| (k.class, Tally { count: k.count, seconds: k.seconds })).collect();
    RangeWork {
        host_s: seconds,
        seconds,
        span_s: seconds,
        busy_s: seconds,
        count: 3600,
        classes,
        kernels,
        rest: Rest::default(),
    }
}

impl Made {
    fn params(&self) -> Params {
        Params {
            size: self.size,
            context_length: self.context,
            batch_size: 4,
            vocab_size: 10_000,
            pass: Pass::TrainingStep,
            dtype: Precision::Float32,
            optimizer: self.optimizer,
            warmup: 2,
            steps: 1,
        }
    }

    fn row(&self) -> Row {
        let samples = |s: f64| serde_json::from_value(seconds(&[s])).unwrap();
        let times = || Passes { inference: samples(self.host), forward: None, backward: None, optimizer: None };
        let trained = |work| self.backward.map(|_| pass(work));
        let (products, softmax) = (self.products, self.softmax);
        Row {
            collector: Collector::Kineto,
            counted: Counted::Kernels,
            host: times(),
            profiled_before: true,
            kernels: times(),
            passes: Passes {
                inference: RangeWork { busy_s: self.busy, span_s: 1.0, ..pass(self.inference) },
                forward: trained(self.inference),
                backward: self.backward.map(pass),
                optimizer: trained([0.0, 0.25, 0.0]),
            },
            top_of_both: self
                .backward
                .map(|_| Kernel { name: self.both.into(), ..pass([1.0, 0.0, 0.0]).kernels[0].clone() }),
            attention: Attention {
                scores: pass([products, 0.12, 0.0]),
                softmax: pass([0.0, softmax, 0.0]),
                final_matmul: pass([0.0; 3]),
                products: Tally { count: 2, seconds: products },
            },
            matmuls: Matmuls { operators: self.calls, kernels: self.kernels, helpers: 0 },
            matmul_kernels: vec![MatmulKernel { name: "gemm".into(), units: self.units, count: 9 }],
            outside: Tally::default(),
            launches_unseen: 0,
            trace: None,
        }
    }
}

fn measured(made_up: MadeUp, grid: &str, made: &Made) -> MadeUp {
    made_up.measured(grid, &made.params(), &made.row())
}

fn answered(made: &[Made]) -> Answer {
    let made_up = made.iter().fold(MadeUp::gpu("nsys_profile"), |made_up, made| measured(made_up, GRID, made));
    answer(&made_up.records(), Audience::Ours).unwrap()
}

#[test]
fn claims_follow_the_profiles() {
    let well = answered(&[small()]);
    for id in CLAIMS.iter().chain(&["products-lose-share"]) {
        assert_eq!(well.holds(id), Some(true), "{id}");
    }
    assert_eq!(well.holds("off-where-the-gpu-waits"), None, "nothing is off");
    type Spoil = fn(&mut Made);
    let ill: [(&str, Spoil); 9] = [
        ("profile-matches-the-clock", |made| made.host = 0.5),
        ("calls-are-9L-plus-1", |made| made.calls = 108),
        ("products-are-9L-plus-1", |made| made.kernels = 120),
        ("no-tf32", |made| made.units = Units::TensorCores),
        ("top-is-a-product", |made| made.inference = [0.4, 0.5, 0.1]),
        ("same-in-both", |made| made.both = "gemm_nt"),
        ("elementwise-leads-the-rest", |made| made.inference = [0.8, 0.05, 0.15]),
        ("products-lose-share", |made| made.backward = Some([1.9, 0.1, 0.0])),
        ("softmax-takes-more-than-its-operations", |made| made.softmax = 0.001),
    ];
    for (id, change) in ill {
        let mut made = small();
        change(&mut made);
        assert_eq!(answered(&[made]).holds(id), Some(false), "{id}");
    }
    for (busy, expected) in [(0.3, true), (0.95, false)] {
        let off = answered(&[small(), Made { host: 0.5, busy, context: 128, ..small() }]);
        assert_eq!(off.holds("off-where-the-gpu-waits"), Some(expected));
        assert_eq!(
            (&off.quoted()["agreeing"], &off.quoted()["differing"]),
            (&json!("1 of 2"), &json!("1 (small at 128)"))
        );
        assert_eq!(off.quoted()["off"]["value"], 1.0);
    }
}

#[test]
fn sentences_quote_xl_at_context_512_where_it_was_measured() {
    let xl = Made { size: SizeName::Xl, calls: 433, kernels: 435, ..small() };
    let wide = Made { size: SizeName::Billions2_7, context: 1024, calls: 289, kernels: 289, ..small() };
    let plain = Made { optimizer: OptimizerName::Plain, backward: Some([1.0, 1.0, 0.0]), ..xl.clone() };
    let made_up = MadeUp::gpu("nsys_profile");
    let made_up = [&xl, &small(), &wide].into_iter().fold(made_up, |made_up, made| measured(made_up, GRID, made));
    let answer = answer(&measured(made_up, PLAIN, &plain).records(), Audience::Ours).unwrap();
    let quoted = answer.quoted();
    for (field, expected) in [
        ("example", json!("xl at context 512")),
        ("slow", json!("1,000.0 ms (2.7B at context 1,024)")),
        ("before", json!("3 of 3")),
        ("run", json!(2)),
        ("split", json!(2)),
        ("top", json!("`gemm`")),
        ("top_count", json!("1,200")),
        ("led", json!("3 of 3")),
        ("largest", json!(["`mul` (15.0%, 1,200 times)", "the driver's copies and fills (5.0%, 1,200 times)"])),
        ("other_heads", json!(" (0.016 for 2.7B, whose heads are 80 wide)")),
        ("fell", json!("3 of 3")),
        ("d_head", json!(64)),
    ] {
        assert_eq!(quoted[field], expected, "{field}");
    }
    let value = |field: &str| quoted[field]["value"].as_f64().unwrap();
    let expected = [("inference", 0.8), ("step", 2.2 / 3.25), ("adamw", 0.25 / 3.25), ("ratio", 0.5), ("masking", 0.8)];
    for (field, expected) in expected.into_iter().chain([("masked", 0.12), ("masked_ratio", 2.4)]) {
        assert!((value(field) - expected).abs() < 1e-12, "{field}: {}", value(field));
    }
    assert!((quoted["excesses"]["low"]["value"].as_f64().unwrap() - 0.5 / (5.0 / 256.0)).abs() < 1e-9);
    let plain = quoted["plain"].as_str().unwrap();
    assert!(plain.starts_with(" (55.4% with AdamW") && plain.contains("3,600 kernels instead of 3,600"), "{plain}");
    assert_eq!(answer.tables()["training"].rows.len(), 3, "the plain case is in no table");
}

#[test]
fn a_share_that_rises_is_explained_where_all_that_rise_are_alike() {
    let rises = Made { backward: Some([1.9, 0.1, 0.0]), ..small() };
    // 1.5 of 3 seconds are products in the step, too.
    let stays = Made { inference: [0.5, 0.5, 0.0], backward: Some([1.0, 0.75, 0.0]), ..small() };
    let rose = |made: &[Made]| ["rose", "fell"].map(|field| answered(made).quoted()[field].clone());
    assert_eq!(
        rose(&[Made { context: 128, ..small() }, rises.clone()]),
        [json!("1 (small), all at context 512"), json!("1 of 2")]
    );
    assert_eq!(rose(&[rises.clone(), Made { context: 128, ..rises.clone() }]), [json!(""), json!("0 of 2")]);
    assert_eq!(rose(&[stays]), [json!(""), json!("0 of 1")], "a tie neither rises nor falls");
}

#[test]
fn cases_that_were_not_measured_keep_their_lines() {
    let made = small();
    let params = |context| Made { context, ..small() }.params();
    let made_up = measured(MadeUp::gpu("nsys_profile"), GRID, &made);
    let made_up = made_up.out_of_memory(GRID, &params(1024)).failed(GRID, &params(128)).not_run(GRID, &params(256));
    let some = answer(&made_up.records(), Audience::Ours).unwrap();
    assert_eq!(some.holds("all-cases-fit"), Some(false));
    for id in ["times-gpu", "top", "training", "attention"] {
        let words: Vec<&Cell> = some.tables()[id].rows.iter().map(|row| &row[2]).collect();
        assert_eq!(words[1..], [&Cell::from("OOM"), &Cell::from("failed"), &Cell::from("not run")], "{id}");
    }
    let none = answer(&MadeUp::cpu("nsys_profile").failed(GRID, &params(64)).records(), Audience::Ours).unwrap();
    assert_eq!(none.quoted()["measured"], false);
    assert!(none.claims().is_empty() && none.figures().is_empty());
    assert_eq!(none.tables().keys().collect::<Vec<_>>(), ["times-cpu"]);
    let error = answer(&Records::default(), Audience::Ours).unwrap_err().to_string();
    assert!(error.contains("cs336 measure"), "{error}");
}

#[test]
fn without_a_training_step_or_known_products_their_parts_say_so() {
    let forward_only = answered(&[Made { backward: None, ..small() }]);
    assert_eq!((forward_only.quoted()["trained"].clone(), forward_only.holds("same-in-both")), (json!(false), None));
    assert!(!forward_only.tables().contains_key("training") && forward_only.tables().contains_key("top"));
    let unknown = answered(&[Made { products: 0.0, ..small() }]);
    assert_eq!(unknown.quoted()["compared"], false);
    assert_eq!(unknown.holds("softmax-takes-more-than-its-operations"), None);
    let mixed = answered(&[Made { backward: None, ..small() }, Made { context: 128, ..small() }]);
    assert_eq!(mixed.quoted()["example"], "small at context 128", "the training step is what most parts are about");
}
