//! Tests of reading and comparing cases, and of the golden cases of the kinds that this folder's files run.

use std::collections::HashMap;

use proptest::prelude::*;

use super::*;

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
    for name in ["transformer", "adamw", "rmsnorm", "rmsnorm_bfloat16", "rope"] {
        let case = CaseFile::read(&folder.join(format!("{name}.safetensors"))).unwrap();
        let comparisons = run(&case).unwrap();
        require(&comparisons).unwrap();
    }
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
fn a_file_that_cannot_be_run_says_what_it_lacks() {
    let fine = [("kind", "rmsnorm"), ("rtol", "1e-4"), ("atol", "1e-5"), ("eps", "1e-5")];
    let words = |metadata: &[(&str, &str)]| format!("{:#}", run_bytes(&file_of(metadata, vec![2])).unwrap_err());
    assert!(words(&fine).contains("\"weight\" is missing"));
    assert!(words(&fine[1..]).contains("lacks \"kind\""));
    assert!(words(&[("kind", "magic")]).contains("known: attention"));
    assert!(words(&[("kind", "sharded_optimizer")]).contains("not implemented"));
    assert!(words(&[fine[0], ("rtol", "-1"), fine[2], fine[3]]).contains("zero or positive"));
    assert!(words(&[fine[0], ("rtol", "NaN"), fine[2], fine[3]]).contains("rtol"));
    assert!(words(&[fine[0], ("rtol", "small"), fine[2], fine[3]]).contains("no f64"));
    let bytes = file_of(&fine, vec![2]);
    let truncated = run_bytes(&bytes[..bytes.len() - 3]).unwrap_err();
    assert!(format!("{truncated:#}").contains("safetensors"), "{truncated:#}");
    assert!(CaseFile::read(Path::new("no/such/case.safetensors")).is_err());
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
