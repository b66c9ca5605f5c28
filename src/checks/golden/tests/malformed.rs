//! Every key and every tensor of a golden case, damaged in every way: none of the results passes.

use super::*;

/// Values that no key takes. TOML's and Python's spellings of numbers are among them.
const BAD_VALUES: [&str; 12] = [
    "",
    " ",
    "NaN",
    "inf",
    "-inf",
    "-1",
    "1e999",
    "0x10",
    "1_000",
    "None",
    "a\nb\u{1b}[2J\u{202e}",
    "99999999999999999999x",
];

/// Cases that are refused before a rank starts, and those of the model.
const CASES: [&str; 8] = [
    "adamw_float64",
    "attention_bfloat16_one_key",
    "attention_float32_causal",
    "data_parallel_tied",
    "rmsnorm_bfloat16",
    "rope",
    "sharded_optimizer_toy",
    "transformer",
];

/// How a damaged case must end.
#[derive(Clone, Copy, PartialEq)]
enum Ends {
    /// In an error, before anything is compared.
    Refused,
    /// In an error or in a failed comparison.
    Failed,
}

/// What is damaged, and how.
type NamedDamage = (String, Box<dyn Fn(&mut CaseFile)>);
type Damages = Vec<NamedDamage>;

/// Damages a fresh copy of each case; returns how many copies there were. Errors are one line without controls.
fn all_end(ends: Ends, damages: impl Fn(&CaseFile) -> Damages) -> usize {
    let mut damaged = 0;
    for name in CASES {
        for (what, damage) in damages(&golden(name)) {
            let mut case = golden(name);
            damage(&mut case);
            match run_written(&case) {
                Ok(comparisons) => {
                    assert!(ends == Ends::Failed && require(&comparisons).is_err(), "{name} is compared with {what}");
                }
                Err(error) => {
                    let said = format!("{error:#}");
                    assert!(!said.chars().any(char::is_control) && !said.contains('\u{202e}'), "{said:?}");
                }
            }
            damaged += 1;
        }
    }
    damaged
}

#[test]
fn a_case_with_a_bad_value_or_without_a_key_is_refused() {
    let damaged = all_end(Ends::Refused, |case| {
        let keys = case.metadata.keys().filter(|key| *key != "made_by").cloned();
        keys.flat_map(|key| {
            let without = key.clone();
            let mut damages: Damages =
                vec![(format!("no {key}"), Box::new(move |case| drop(case.metadata.remove(&without))))];
            for value in BAD_VALUES {
                let key = key.clone();
                let what = format!("{key} = {value:?}");
                damages.push((what, Box::new(move |case| drop(case.metadata.insert(key.clone(), value.into())))));
            }
            damages
        })
        .collect()
    });
    assert!(damaged > 500, "{damaged} cases");
}

#[test]
fn no_case_passes_with_a_damaged_tensor() {
    type Change = fn(&Tensor) -> Option<Tensor>;
    let changes: [(&str, Change); 6] = [
        ("gone", |_| None),
        ("one dimension more", |t| Some(t.unsqueeze(0).unsqueeze(-1))),
        ("flattened", |t| Some(t.view([-1]).repeat([2]))),
        ("boolean", |t| Some(t.to_kind(DType::Bool))),
        ("twice as wide", |t| Some(Tensor::cat(&[t, t], -1))),
        ("empty", |t| Some(t.narrow(-1, 0, 0))),
    ];
    let damaged = all_end(Ends::Failed, |case| {
        let tensors = case.tensors.iter().filter(|(_, tensor)| tensor.dim() > 0);
        tensors
            .flat_map(|(name, _)| {
                // The gradients of a transformer are optional.
                let changes = &changes[usize::from(name.starts_with("grad."))..];
                changes.iter().map(move |&(what, change)| -> NamedDamage {
                    let key = name.clone();
                    let apply = move |case: &mut CaseFile| {
                        let tensor = case.tensors.remove(&key).unwrap();
                        case.tensors.extend(change(&tensor).map(|tensor| (key.clone(), tensor)));
                    };
                    (format!("{name} {what}"), Box::new(apply))
                })
            })
            .collect()
    });
    assert!(damaged > 300, "{damaged} cases");
}

#[test]
fn a_stray_tensor_is_refused_by_its_escaped_name() {
    let damaged = all_end(Ends::Refused, |_| {
        vec![(
            "a stray tensor".into(),
            Box::new(|case| drop(case.tensors.insert("a\n\u{1b}\u{202e}".into(), zeros(&[1])))),
        )]
    });
    assert_eq!(damaged, CASES.len());
}

#[test]
fn tolerances_that_let_zeros_pass_are_refused() {
    for (name, rtol, atol) in [
        ("rope", "1", "0"),
        ("rope", "1e3", "0"),
        ("rope", "0", "1e300"),
        ("adamw", "0.5", "100"),
        ("attention_float32", "0.9999", "1"),
        // "lse" has larger values, "o" has none.
        ("attention_float32", "0", "4"),
        ("sharded_optimizer_toy", "1.5", "0"),
    ] {
        let mut case = golden(name);
        case.metadata.extend([("rtol".to_string(), rtol.to_string()), ("atol".to_string(), atol.to_string())]);
        let said = format!("{:#}", run(&case).expect_err(name));
        assert!(said.contains("let zeros pass (the largest value expected of "), "{name}: {said}");
    }
    // A large "lse" makes no rounding of the values beside it.
    let mut case = golden("attention_float32");
    let large = &case.tensors["lse"] * 1e9;
    case.tensors.insert("lse".into(), large);
    case.metadata.insert("atol".into(), "0.99".into());
    case.tensors.insert("o".into(), zeros(&case.tensors["o"].size()) + 1e-3);
    let said = format!("{:#}", run(&case).unwrap_err());
    assert!(said.contains("let zeros pass (the largest value expected of \"o\""), "{said}");
    // What rounding leaves where theory has zeros.
    let mut case = golden("attention_float32");
    let noise = &case.tensors["dq"] * 1e-9;
    case.tensors.insert("dq".into(), noise);
    run(&case).unwrap();
    let mut case = golden("rope");
    case.tensors = [("x".to_string(), zeros(&[4, 2])), ("y".to_string(), zeros(&[4, 2]))].into();
    require(&run(&case).unwrap()).unwrap();
    case.metadata.insert("atol".into(), "1".into());
    assert!(run(&case).is_err(), "where zeros are expected, ones would pass");
}

#[test]
fn tolerances_that_let_code_pass_which_trains_nothing_are_refused() {
    for (name, before, after) in [
        ("adamw", "param", "param_after"),
        ("data_parallel_toy", "init.", "final."),
        ("sharded_optimizer_toy", "init.", "final."),
    ] {
        let mut case = golden(name);
        let trained = Vec::from_iter(case.tensors.keys().filter_map(|name| name.strip_prefix(after).map(String::from)));
        for name in trained {
            let nearly = &case.tensors[&format!("{before}{name}")] * 1.000_1;
            case.tensors.insert(format!("{after}{name}"), nearly);
        }
        case.metadata.extend([("rtol".to_string(), "1e-3".to_string()), ("atol".to_string(), "1e-3".to_string())]);
        let said = format!("{:#}", run(&case).expect_err(name));
        assert!(said.contains("let code pass that changes nothing") && said.contains("take larger steps"), "{said}");
    }
}

#[test]
fn every_comparison_prints_its_tolerances() {
    let passed = pair(&[1.0], &[1.0]).to_string();
    assert!(passed.starts_with("passed") && passed.contains("(rtol 1.0e-3)") && passed.contains("(atol 1.0e-6)"));
}
