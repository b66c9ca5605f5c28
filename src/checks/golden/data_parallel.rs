//! Cases of kind `data_parallel`: final parameters of training, compared for every trainer on every rank.
//!
//! The format of [`super::training`], with metadata `lr` and `bucket_size_mb`. In each step every rank takes its contiguous
//! slice of the step's rows: mean squared error, plain gradient descent.

use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tch::Tensor;

use super::training::{OnRank, Training};
use super::{CaseFile, Comparison};
use crate::checks::mutants;
use crate::checks::protocol::pass;
use crate::collective::Shared;
use crate::collective::ranks::RankTask;
use crate::model::optim::Sgd;
use crate::parallel::Options;
use crate::parallel::trainer;

pub const TASK: RankTask = RankTask { name: "data_parallel_case", run: on_rank };

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct How {
    trainer: String,
    options: Options,
    lr: f64,
}

/// Runs every strategy and both sharded optimizers on the case.
pub fn run(case: &CaseFile) -> Result<Vec<Comparison>> {
    let mut comparisons = Vec::new();
    for trainer in trainer::names() {
        comparisons.extend(compare_trainer(case, trainer)?);
    }
    Ok(comparisons)
}

/// Trains the case with one trainer and compares each rank's parameters with the expected ones.
///
/// # Errors
/// A case that contradicts itself, naming the entry; a rank that crashed or hung.
pub fn compare_trainer(case: &CaseFile, trainer: &str) -> Result<Vec<Comparison>> {
    let training = Training::of(case)?;
    let lr: f64 = case.meta_as("lr")?;
    ensure!(lr.is_finite() && lr >= 0.0, "metadata lr is {lr}: it must be zero or positive");
    let options = Options { bucket_size_mb: case.meta_as("bucket_size_mb")? };
    options.bucket_bytes().context("metadata")?;
    let (rows, ranks) = (training.rows, training.world_size);
    ensure!(rows % ranks as i64 == 0, "{rows} rows cannot be shared equally among {ranks} ranks (world_size)");
    training.compare(trainer, TASK.name, How { trainer: trainer.into(), options, lr })
}

/// Only rank 0 starts from the case's values. The trainer must broadcast them.
fn on_rank(collective: &Shared, input: Value) -> Result<Value> {
    let rank = OnRank::<How>::new(collective, input)?;
    if collective.rank() == 0 {
        rank.load()?;
    }
    let How { trainer, options, lr } = &rank.how;
    let optimizer = Box::new(Sgd::new(*lr)?);
    let mut trainer = mutants::trainer(trainer, rank.network.named_parameters(), optimizer, collective, options)?;
    for (x, y) in rank.steps()? {
        let rows = x.size()[0] / collective.world_size() as i64;
        let mine = |t: &Tensor| t.f_narrow(0, collective.rank() as i64 * rows, rows);
        rank.network.zero_grad();
        pass(&rank.network, &mine(&x)?, &mine(&y)?, 1.0)?;
        trainer.parallel().finish_gradient_synchronization()?;
        trainer.step()?;
    }
    rank.finish()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use tch::{Device, Kind};

    use super::*;

    fn golden() -> CaseFile {
        let bytes = include_bytes!("../../../suites/cases/data_parallel_toy.safetensors");
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
            (Box::new(metadata("lr", "NaN")), "lr is NaN"),
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
            (Box::new(tensor("init.fc9.weight", zeros(&[1]))), "init.fc9.weight is not a parameter of the toy model"),
        ];
        assert!(Training::of(&golden()).is_ok());
        for (change, words) in cases {
            let mut case = golden();
            change(&mut case);
            let error = format!("{:#}", run(&case).err().unwrap_or_else(|| panic!("accepted: {words}")));
            assert!(error.contains(words), "{words:?} is not in: {error}");
        }
    }
}
