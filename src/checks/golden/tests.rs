//! Tests of reading and comparing cases, and of the golden cases of the kinds that this folder's files run.

use std::collections::HashMap;

use proptest::prelude::*;
use rstest::rstest;
use safetensors::Dtype;
use tch::Device;

use super::*;
use crate::checks::sharded_protocol::{subject_padding, undivided};

mod files;
mod malformed;

fn file_of(metadata: &[(&str, &str)], shape: Vec<usize>) -> Vec<u8> {
    let data = vec![0u8; 4 * shape.iter().product::<usize>()];
    let view = safetensors::tensor::TensorView::new(Dtype::F32, shape, &data).unwrap();
    let metadata: HashMap<_, _> = metadata.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect();
    safetensors::serialize([("x", view)], Some(metadata)).unwrap()
}

fn run_bytes(bytes: &[u8]) -> Result<Vec<Comparison>> {
    CaseFile::parse(bytes, Path::new("case.safetensors")).and_then(|case| run(&case))
}

fn pair(actual: &[f64], expected: &[f64]) -> Comparison {
    compare("ours", "y", &Tensor::from_slice(actual), &Tensor::from_slice(expected), 1e-3, 1e-6)
}

#[test]
fn every_golden_case_of_the_model_passes() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("suites/cases");
    for name in ["transformer", "adamw", "adamw_bfloat16", "adamw_float64", "rmsnorm", "rmsnorm_bfloat16", "rope"] {
        let case = CaseFile::read(&folder.join(format!("{name}.safetensors"))).unwrap();
        let comparisons = run(&case).unwrap();
        require(&comparisons).unwrap();
    }
}

#[test]
fn every_golden_case_of_attention_passes() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("suites/cases");
    let files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let files: Vec<_> = files
        .filter(|path| path.file_name().unwrap().to_string_lossy().starts_with("attention_"))
        .filter(|path| path.extension().is_some_and(|e| e == "safetensors"))
        .collect();
    assert!(files.iter().any(|path| path.ends_with("attention_bfloat16_one_key.safetensors")));
    for path in files {
        require(&run(&CaseFile::read(&path).unwrap()).unwrap())
            .unwrap_or_else(|e| panic!("{}: {e:#}", shown_path(&path)));
    }
}

/// A valid golden case, to be damaged by a test.
fn golden(name: &str) -> CaseFile {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("suites/cases");
    CaseFile::read(&folder.join(format!("{name}.safetensors"))).unwrap()
}

/// Writes `case` with the safetensors crate, as another program would, and grades the file.
fn run_written(case: &CaseFile) -> Result<Vec<Comparison>> {
    let raw = |tensor: &Tensor| {
        let tensor = tensor.contiguous();
        let mut bytes = vec![0u8; tensor.numel() * tensor.kind().elt_size_in_bytes()];
        tensor.copy_data_u8(&mut bytes, tensor.numel());
        let shape = tensor.size().iter().map(|&n| n as usize).collect();
        let dtype = match tensor.kind() {
            DType::Float => Dtype::F32,
            DType::Double => Dtype::F64,
            DType::BFloat16 => Dtype::BF16,
            DType::Int64 => Dtype::I64,
            DType::Bool => Dtype::BOOL,
            other => panic!("no test writes {other:?}"),
        };
        (dtype, shape, bytes)
    };
    let raw: BTreeMap<_, (Dtype, Vec<usize>, _)> =
        case.tensors.iter().map(|(name, tensor)| (name.clone(), raw(tensor))).collect();
    let views = raw.iter().map(|(name, (dtype, shape, bytes))| {
        (name.as_str(), safetensors::tensor::TensorView::new(*dtype, shape.clone(), bytes).unwrap())
    });
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("case.safetensors");
    let metadata = case.metadata.clone().into_iter().collect();
    safetensors::serialize_to_file(views, Some(metadata), &path).unwrap();
    run(&CaseFile::read(&path)?)
}

/// A change that damages a valid case.
enum Damage {
    Meta(&'static str, &'static str),
    Without(&'static str),
    /// Inserts this tensor under the name.
    With(&'static str, Tensor),
    /// Renames the first tensor to the second name.
    Renamed(&'static str, &'static str),
    /// Removes all rows of both tensors.
    Emptied(&'static [&'static str]),
}

use Damage::{Emptied, Meta, Renamed, With, Without};

use crate::printable::shown_path;

impl Damage {
    fn apply(self, case: &mut CaseFile) {
        match self {
            Meta(key, value) => drop(case.metadata.insert(key.into(), value.into())),
            Without(name) => drop(case.tensors.remove(name).expect(name)),
            With(name, tensor) => drop(case.tensors.insert(name.into(), tensor)),
            Renamed(from, to) => {
                let tensor = case.tensors.remove(from).expect(from);
                case.tensors.insert(to.into(), tensor);
            }
            Emptied(names) => {
                for name in names {
                    let tensor = case.tensors[*name].narrow(0, 0, 0);
                    case.tensors.insert(name.to_string(), tensor);
                }
            }
        }
    }
}

fn zeros(shape: &[i64]) -> Tensor {
    Tensor::zeros(shape, (DType::Float, Device::Cpu))
}

fn filled(shape: &[i64], value: i64) -> Tensor {
    Tensor::full(shape, value, (DType::Int64, Device::Cpu))
}

#[rstest]
#[case::no_such_kind("rope", Meta("kind", "ropes"), "no kind of case is called \"ropes\"")]
#[case::beta_of_one("sharded_optimizer_toy", Meta("beta2", "1"), "beta2 is 1")]
#[case::no_weight_decay("data_parallel_toy", Meta("kind", "sharded_optimizer"), "\"beta1\"")]
#[case::extra_final("sharded_optimizer_tied", With("final.fc4.weight", zeros(&[50, 10])), "\"final.fc4.weight\" is not a parameter")]
#[case::tolerance_of_words("attention_float32", Meta("rtol", "tight"), "\"rtol\" is \"tight\"")]
#[case::causal_of_words("attention_float32", Meta("is_causal", "yes"), "\"is_causal\" is \"yes\": write true or false")]
#[case::tolerance_below_zero("adamw", Meta("atol", "-1e-6"), "zero or positive")]
#[case::infinite_tolerance("rope", Meta("rtol", "inf"), "rtol")]
#[case::infinite_bucket("data_parallel_toy", Meta("bucket_size_mb", "inf"), "bucket_size_mb is inf")]
#[case::no_expectation("attention_float32", Without("lse"), "\"lse\" is missing")]
#[case::no_input("rmsnorm", Without("weight"), "\"weight\" is missing")]
#[case::no_upstream_gradient("attention_float32", Without("do"), "dq is expected, but do is missing")]
#[case::no_gradient("attention_float32", Without("dk"), "\"dk\" is missing")]
#[case::misspelt("attention_float32", Renamed("do", "dO"), "[\"dO\"] do not belong to this kind")]
#[case::extra_attention("attention_float32", With("p", zeros(&[2])), "[\"p\"]")]
#[case::extra_adamw("adamw", With("exp_avg", zeros(&[7, 5])), "[\"exp_avg\"]")]
#[case::extra_rmsnorm("rmsnorm", With("bias", zeros(&[48])), "[\"bias\"]")]
#[case::extra_rope("rope", With("cos", zeros(&[40, 8])), "[\"cos\"]")]
#[case::extra_parameter("transformer", With("layers.2.ln1.weight", zeros(&[32])), "\"layers.2.ln1.weight\" is no parameter")]
#[case::extra_gradient("transformer", With("grad.lm_head", zeros(&[32])), "\"grad.lm_head\": the model has no such parameter")]
#[case::empty_batch("attention_float32", Emptied(&["q", "k", "v", "do", "o", "lse", "dq", "dk", "dv"]), "no elements")]
#[case::no_steps("adamw", Emptied(&["grads"]), "no elements")]
#[case::no_sequences("transformer", Emptied(&["tokens", "targets"]), "no elements")]
#[case::endless_rope("rope", With("x", zeros(&[0, 1 << 40, 2])), "no elements")]
#[case::long_rope("rope", With("x", zeros(&[(1 << 20) + 1, 2])), "1048577 positions")]
#[case::other_dtypes("adamw", With("grads", zeros(&[3, 7, 5]).to_kind(DType::Double)), "one floating dtype")]
#[case::other_shape("attention_float32", With("v", zeros(&[2, 31, 16])), "v has shape [2, 31, 16]")]
#[case::token_too_large("transformer", With("tokens", filled(&[2, 12], 50)), "tokens range from 50 to 50")]
#[case::negative_target("transformer", With("targets", filled(&[2, 12], -1)), "below vocab_size, 50")]
#[case::fewer_targets("transformer", With("targets", filled(&[2, 11], 1)), "targets have shape [2, 11], tokens [2, 12]")]
#[case::tokens_of_floats("transformer", With("tokens", zeros(&[2, 12])), "must be int64")]
#[case::one_wide_parameter(
    "transformer",
    With("ln_final.weight", zeros(&[32]).to_kind(DType::Double)),
    "1 of 21 parameters are float64"
)]
fn a_malformed_file_says_what_is_wrong(#[case] name: &str, #[case] damage: Damage, #[case] words: &str) {
    let mut case = golden(name);
    damage.apply(&mut case);
    let error = format!("{:#}", run_written(&case).expect_err("it was graded"));
    assert!(error.contains(words), "{words:?} is not in: {error}");
}

#[rstest]
#[case::nan_output("attention_float32", "o", &[2, 32, 16], f64::NAN, "outside the tolerance")]
#[case::nan_gradient("transformer", "grad.ln_final.weight", &[32], f64::NAN, "outside the tolerance")]
#[case::infinite("adamw", "param_after", &[7, 5], f64::INFINITY, "outside the tolerance")]
#[case::shape("rope", "y", &[40, 16], 0.0, "expected [40, 16]")]
#[case::rank("attention_float32", "lse", &[2, 32, 1], 0.0, "expected [2, 32, 1]")]
#[case::losses("transformer", "loss", &[2], 0.0, "expected [2]")]
fn an_expectation_that_no_implementation_can_meet_fails(
    #[case] name: &str,
    #[case] tensor: &'static str,
    #[case] shape: &[i64],
    #[case] value: f64,
    #[case] words: &str,
) {
    let mut case = golden(name);
    With(tensor, Tensor::full(shape, value, (DType::Float, Device::Cpu))).apply(&mut case);
    let comparisons = run_written(&case).unwrap();
    let (held, others): (Vec<_>, Vec<_>) = comparisons.iter().partition(|c| c.tensor == tensor);
    assert!(!held.is_empty() && held.iter().all(|c| !c.passed && c.note.contains(words)), "{held:?}");
    require(&others.into_iter().cloned().collect::<Vec<_>>()).unwrap();
}

#[test]
fn a_loss_of_one_element_may_have_any_rank() {
    let mut case = golden("transformer");
    let loss = case.tensors["loss"].view([1]);
    With("loss", loss).apply(&mut case);
    require(&run_written(&case).unwrap()).unwrap();
}

#[test]
fn a_case_in_float64_passes_as_the_same_case_in_float32_does() {
    let mut case = golden("transformer");
    for (_, tensor) in case.tensors.iter_mut().filter(|(_, tensor)| tensor.kind() == DType::Float) {
        *tensor = tensor.to_kind(DType::Double);
    }
    require(&run_written(&case).unwrap()).unwrap();
}

#[test]
fn equal_tensors_pass_and_differences_are_measured() {
    let fine = pair(&[1.0, -2.0, f64::INFINITY], &[1.0, -2.001, f64::INFINITY]);
    assert!(fine.passed, "{fine}");
    assert!((fine.max_abs_error - 0.001).abs() < 1e-9 && (fine.max_rel_error - 0.001 / 2.001).abs() < 1e-9);
    let wrong = pair(&[1.0, -2.0], &[1.0, -2.01]);
    assert!(!wrong.passed && wrong.note.contains("1 of 2 elements"), "{wrong}");
}

#[test]
fn nan_infinity_and_another_shape_never_pass() {
    assert!(!pair(&[f64::NAN], &[1.0]).passed);
    assert!(!pair(&[f64::NAN], &[f64::NAN]).passed);
    assert!(!pair(&[1.0], &[f64::NAN]).passed);
    assert!(!pair(&[1.0], &[f64::INFINITY]).passed);
    assert!(!pair(&[f64::NEG_INFINITY], &[f64::INFINITY]).passed);
    assert!(!pair(&[f64::INFINITY], &[1.0]).passed);
    let broadcastable = pair(&[1.0, 1.0], &[1.0]);
    assert!(!broadcastable.passed && broadcastable.note.contains("shape [2], expected [1]"));
    assert!(!pair(&[], &[]).passed);
}

#[test]
fn an_incomplete_file_is_refused_with_the_missing_key() {
    let fine = [("kind", "rmsnorm"), ("rtol", "1e-4"), ("atol", "1e-5"), ("eps", "1e-5")];
    let words = |metadata: &[(&str, &str)]| format!("{:#}", run_bytes(&file_of(metadata, vec![2])).unwrap_err());
    assert!(words(&fine).contains("\"weight\" is missing"));
    assert!(words(&fine[1..]).contains("lacks \"kind\""));
    assert!(words(&[("kind", "magic")]).contains("known: attention"));
    assert!(words(&[("kind", "sharded_optimizer"), fine[1], fine[2]]).contains("lacks \"model\""));
    assert!(words(&[fine[0], ("rtol", "-1"), fine[2], fine[3]]).contains("zero or positive"));
    assert!(words(&[fine[0], ("rtol", "NaN"), fine[2], fine[3]]).contains("rtol"));
    assert!(words(&[fine[0], ("rtol", "small"), fine[2], fine[3]]).contains("write a number"));
    let bytes = file_of(&fine, vec![2]);
    let truncated = run_bytes(&bytes[..bytes.len() - 3]).unwrap_err();
    assert!(format!("{truncated:#}").contains("safetensors"), "{truncated:#}");
    assert!(CaseFile::read(Path::new("no/such/case.safetensors")).is_err());
    let view = safetensors::tensor::TensorView::new(Dtype::U8, vec![1], &[0]).unwrap();
    let bytes = safetensors::serialize([("x\npassed y", view)], Some([("kind".into(), "x".into())].into())).unwrap();
    let forged = format!("{:#}", run_bytes(&bytes).unwrap_err());
    assert!(forged.contains(r"x\npassed y") && forged.lines().count() == 1, "{forged}");
}

proptest! {
    #[test]
    fn no_bytes_make_the_parser_panic(mut bytes in proptest::collection::vec(any::<u8>(), 0..200), tamper in any::<bool>()) {
        if tamper {
            let mut file = file_of(&[("kind", "rmsnorm"), ("rtol", "0"), ("atol", "0"), ("eps", "0")], vec![3]);
            for pair in bytes.chunks_exact(2) {
                let at = usize::from(pair[0]) % file.len();
                file[at] = pair[1];
            }
            bytes = file;
        }
        let _ = run_bytes(&bytes);
    }
}

/// Of the toy model's 850 values 500 are of one parameter.
#[test]
fn a_subject_may_pad_its_shards_and_no_rank_of_many_keeps_all() {
    let is_divided = |owned: &[usize]| undivided(owned, (850, 500), subject_padding(owned.len())).is_none();
    for padded in [&[448, 448][..], &[500, 350], &[512, 384], &[320; 3], &[128; 10], &[64; 16]] {
        assert!(is_divided(padded), "{padded:?}");
    }
    for whole in [&[850, 850][..], &[850, 0], &[850, 0, 0], &[850, 0, 0, 0, 0, 0, 0, 0, 0, 0], &[425, 424]] {
        assert!(!is_divided(whole), "{whole:?}");
    }
    assert_eq!(undivided(&[500, 0], (500, 500), 0), None, "one parameter");
}
