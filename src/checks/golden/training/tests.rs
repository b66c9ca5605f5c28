//! Cases that contradict themselves.

use super::*;

fn golden() -> CaseFile {
    let bytes = include_bytes!("../../../../suites/cases/data_parallel_toy.safetensors");
    CaseFile::parse(bytes, Path::new("data_parallel_toy")).unwrap()
}

#[test]
fn a_case_that_contradicts_itself_is_refused_before_any_rank_starts() {
    let zeros = |shape: &[i64]| Tensor::zeros(shape, (Kind::Float, Device::Cpu));
    let metadata = |key: &'static str, value: &'static str| {
        move |case: &mut CaseFile| drop(case.metadata.insert(key.into(), value.into()))
    };
    let tensor = |name: &'static str, tensor: Tensor| {
        move |case: &mut CaseFile| drop(case.tensors.insert(name.into(), tensor.shallow_clone()))
    };
    type Spoil = Box<dyn Fn(&mut CaseFile)>;
    let cases: Vec<(Spoil, &str)> = vec![
        (Box::new(metadata("model", "xl")), "no model \"xl\""),
        (Box::new(metadata("model", "tied")), "fc2.weight"),
        (Box::new(metadata("world_size", "0")), "world_size is 0"),
        (Box::new(metadata("world_size", "1000")), "world_size is 1000"),
        (Box::new(metadata("world_size", "two")), "\"two\""),
        (Box::new(metadata("world_size", "5")), "12 rows cannot be shared equally among 5 ranks"),
        (Box::new(metadata("lr", "NaN")), "\"lr\" is NaN"),
        (Box::new(metadata("bucket_size_mb", "0")), "bucket_size_mb is 0"),
        (Box::new(metadata("bucket_size_mb", "inf")), "bucket_size_mb is inf"),
        (Box::new(|case: &mut CaseFile| drop(case.metadata.remove("lr"))), "\"lr\""),
        (Box::new(|case: &mut CaseFile| drop(case.tensors.remove("x"))), "\"x\" is missing"),
        (Box::new(|case: &mut CaseFile| drop(case.tensors.remove("init.fc1.weight"))), "init.fc1.weight"),
        (Box::new(|case: &mut CaseFile| drop(case.tensors.remove("final.fc3.weight"))), "final.fc3.weight"),
        (Box::new(tensor("x", zeros(&[5, 12, 9]))), "x has shape [5, 12, 9]"),
        (Box::new(tensor("x", zeros(&[0, 12, 10]))), "y has shape"),
        (Box::new(tensor("y", zeros(&[5, 11, 5]))), "y has shape [5, 11, 5]"),
        (Box::new(tensor("x", zeros(&[5, 12, 10]).to_kind(Kind::Double))), "x is Double, not float32"),
        (Box::new(tensor("init.fc1.weight", zeros(&[10, 11]))), "init.fc1.weight has shape [10, 11]"),
        (Box::new(tensor("init.fc9.weight", zeros(&[1]))), "\"init.fc9.weight\" is not a parameter of the toy model"),
    ];
    assert!(Training::of(&golden()).is_ok());
    for (change, words) in cases {
        let mut case = golden();
        change(&mut case);
        let error = format!("{:#}", run(&case).err().unwrap_or_else(|| panic!("accepted: {words}")));
        assert!(error.contains(words), "{words:?} is not in: {error}");
    }
}
