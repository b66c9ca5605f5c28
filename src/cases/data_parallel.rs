//! Cases of kind `data_parallel`: what training ends at, held against every strategy on every rank.
//!
//! Metadata `model` ("toy" or "tied"), `world_size`, `lr`, `bucket_size_mb`, `rtol`, `atol`; float32 tensors
//! `init.<parameter>`, `x` (steps, rows, 10), `y` (steps, rows, 5), expected `final.<parameter>`. Each step every rank
//! takes its contiguous slice of that step's rows: mean squared error, plain gradient descent.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tch::{Kind, Tensor};

use super::{CaseFile, Comparison, compare};
use crate::collective::Shared;
use crate::collective::ranks::{Launch, MAX_WORLD_SIZE, RankTask, launch};
use crate::model::toy::{Blueprint, Toy};
use crate::parallel::protocol::train;
use crate::parallel::{Options, STRATEGIES, by_name};

pub const TASK: RankTask = RankTask { name: "data_parallel_case", run: on_rank };

/// Generous for the few steps of a case; a launch that takes longer hangs.
const DEADLINE: Duration = Duration::from_secs(300);

const TRAINING: &str = "training.safetensors";

/// Runs every registered strategy on the case.
pub fn run(case: &CaseFile) -> Result<Vec<Comparison>> {
    let mut comparisons = Vec::new();
    for strategy in STRATEGIES {
        comparisons.extend(compare_strategy(case, strategy.name)?);
    }
    Ok(comparisons)
}

/// Trains as the case says under one strategy and compares each rank's parameters with the expected ones.
///
/// # Errors
/// A case that contradicts itself, naming the entry; a rank that crashed or hung.
pub fn compare_strategy(case: &CaseFile, strategy: &str) -> Result<Vec<Comparison>> {
    let training = Training::of(case)?;
    let ranks = training.run(strategy).with_context(|| format!("training under the {strategy} strategy"))?;
    let (rtol, atol) = case.tolerances()?;
    let mut comparisons = Vec::new();
    for (rank, finals) in ranks.iter().enumerate() {
        let implementation = format!("{strategy}, rank {rank} of {}", training.world_size);
        for name in &training.parameters {
            let actual = finals.get(name).with_context(|| format!("rank {rank} left no {name}"))?;
            let tensor = format!("final.{name}");
            comparisons.push(compare(&implementation, &tensor, actual, case.tensor(&tensor)?, rtol, atol));
        }
    }
    Ok(comparisons)
}

/// A case's contents, checked against each other.
struct Training<'a> {
    case: &'a CaseFile,
    blueprint: Blueprint,
    parameters: Vec<String>,
    world_size: usize,
    lr: f64,
    options: Options,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Input {
    blueprint: Blueprint,
    strategy: String,
    options: Options,
    lr: f64,
    /// Holds [`TRAINING`], and takes each rank's final parameters.
    folder: PathBuf,
}

impl<'a> Training<'a> {
    fn of(case: &'a CaseFile) -> Result<Self> {
        let blueprint = Blueprint::by_name(case.meta("model")?).context("metadata model")?;
        let world_size: usize = case.meta_as("world_size")?;
        ensure!(
            (1..=MAX_WORLD_SIZE).contains(&world_size),
            "metadata world_size is {world_size}, not between 1 and {MAX_WORLD_SIZE}"
        );
        let lr: f64 = case.meta_as("lr")?;
        ensure!(lr.is_finite() && lr >= 0.0, "metadata lr is {lr}: it must be zero or positive");
        let bucket_size_mb: f64 = case.meta_as("bucket_size_mb")?;
        ensure!(
            bucket_size_mb.is_finite() && bucket_size_mb > 0.0,
            "metadata bucket_size_mb is {bucket_size_mb}: it must be finite and above zero"
        );
        let network = Toy::new(&blueprint)?;
        let parameters = network.named_parameters().iter().map(|(name, _)| name.clone()).collect();
        let training = Self { case, blueprint, parameters, world_size, lr, options: Options { bucket_size_mb } };
        training.check_rows()?;
        training.check_parameters(&network)?;
        Ok(training)
    }

    fn check_rows(&self) -> Result<()> {
        let (x, y) = (float(self.case, "x")?.size(), float(self.case, "y")?.size());
        let (d_in, d_out) = (self.blueprint.d_in(), self.blueprint.d_out());
        ensure!(x.len() == 3 && x[2] == d_in, "x has shape {x:?}, not (steps, rows, {d_in})");
        ensure!(y == [x[0], x[1], d_out], "y has shape {y:?}, not [{}, {}, {d_out}] as x calls for", x[0], x[1]);
        let (steps, rows, ranks) = (x[0], x[1], self.world_size);
        ensure!(steps > 0 && rows > 0, "x has shape {x:?}: there is nothing to train on");
        ensure!(rows % ranks as i64 == 0, "{rows} rows cannot be shared equally among {ranks} ranks (world_size)");
        Ok(())
    }

    /// `init.` and `final.` each name every parameter of the model, in its shape, and nothing else.
    fn check_parameters(&self, network: &Toy) -> Result<()> {
        for (name, parameter) in network.named_parameters() {
            for tensor in [format!("init.{name}"), format!("final.{name}")] {
                let (has, needs) = (float(self.case, &tensor)?.size(), parameter.size());
                ensure!(has == needs, "{tensor} has shape {has:?}, but the parameter's is {needs:?}");
            }
        }
        for tensor in self.case.tensors.keys() {
            let known =
                |prefix: &str| tensor.strip_prefix(prefix).is_some_and(|n| self.parameters.iter().any(|p| p == n));
            ensure!(
                tensor == "x" || tensor == "y" || known("init.") || known("final."),
                "tensor {tensor} is none of the {} model's: its parameters are {}",
                self.blueprint.name,
                self.parameters.join(", ")
            );
        }
        Ok(())
    }

    /// The parameters that each rank ends with, by name, in rank order.
    fn run(&self, strategy: &str) -> Result<Vec<BTreeMap<String, Tensor>>> {
        let folder =
            tempfile::Builder::new().prefix("cs336-case-").tempdir().context("making a folder for the case")?;
        let expected = |name: &str| name.starts_with("final.");
        let given = self.case.tensors.iter().filter(|(name, _)| !expected(name));
        let given: Vec<_> = given.map(|(name, tensor)| (name, tensor.contiguous())).collect();
        Tensor::write_safetensors(&given, folder.path().join(TRAINING)).context("writing the ranks' tensors")?;
        let input = Input {
            blueprint: self.blueprint.clone(),
            strategy: strategy.into(),
            options: self.options.clone(),
            lr: self.lr,
            folder: folder.path().into(),
        };
        let run = Launch { task: TASK.name, world_size: self.world_size, deadline: DEADLINE };
        launch(&run, &serde_json::to_value(input)?)?;
        (0..self.world_size).map(|rank| read(&final_file(folder.path(), rank))).collect()
    }
}

/// Only rank 0 starts from the case's values: the others must get them from the strategy.
fn on_rank(collective: &Shared, input: Value) -> Result<Value> {
    let Input { blueprint, strategy, options, lr, folder } = serde_json::from_value(input)?;
    let rank = collective.rank();
    let given = read(&folder.join(TRAINING))?;
    tch::manual_seed(rank as i64);
    let network = Toy::new(&blueprint)?;
    if rank == 0 {
        let initial = given.iter().filter_map(|(name, tensor)| Some((name.strip_prefix("init.")?, tensor)));
        network.load(&initial.map(|(name, tensor)| (name.to_string(), tensor.shallow_clone())).collect())?;
    }
    let mut parallel = (by_name(&strategy)?.construct)(network.named_parameters(), collective, &options)?;
    let rows = given["x"].size()[1] / collective.world_size() as i64;
    for step in 0..given["x"].size()[0] {
        let mine = |name: &str| given[name].f_select(0, step)?.f_narrow(0, rank as i64 * rows, rows);
        train(&network, &mine("x")?, &mine("y")?, lr, || parallel.finish_gradient_synchronization())?;
    }
    Tensor::write_safetensors(network.named_parameters(), final_file(&folder, rank))?;
    Ok(Value::Null)
}

fn final_file(folder: &Path, rank: usize) -> PathBuf {
    folder.join(format!("final-rank{rank}.safetensors"))
}

fn read(file: &Path) -> Result<BTreeMap<String, Tensor>> {
    let tensors = Tensor::read_safetensors(file).with_context(|| format!("reading {}", file.display()))?;
    Ok(tensors.into_iter().collect())
}

/// The case's tensor of that name, which must be float32 as the models are.
fn float<'a>(case: &'a CaseFile, name: &str) -> Result<&'a Tensor> {
    let tensor = case.tensor(name)?;
    ensure!(tensor.kind() == Kind::Float, "{name} is {:?}, not float32", tensor.kind());
    Ok(tensor)
}

#[cfg(test)]
mod tests {
    use tch::Device;

    use super::*;

    fn golden() -> CaseFile {
        let bytes = include_bytes!("../../suites/cases/data_parallel_toy.safetensors");
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
            (Box::new(tensor("init.fc9.weight", zeros(&[1]))), "init.fc9.weight is none of the toy model's"),
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
