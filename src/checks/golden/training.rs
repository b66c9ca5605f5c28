//! Cases of kinds `data_parallel` and `sharded_optimizer`: final parameters of training one of the official toy models on
//! several ranks, compared for every trainer on every rank.
//!
//! Metadata `model` ("toy" or "tied"), `world_size`, `rtol`, `atol`; float32 tensors `init.<parameter>`, `x`
//! (steps, rows, 10), `y` (steps, rows, 5), expected `final.<parameter>`. [`Method`] has the metadata of each kind.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tch::{Device, Kind, Tensor};

use super::{CaseFile, Comparison, compare};
use crate::checks::sharded_protocol::{subject_padding, trained_numel, undivided};
use crate::checks::subject::launch_of;
use crate::collective::Shared;
use crate::collective::ranks::{Launch, MAX_WORLD_SIZE, RankTask, launch, parse_input};
use crate::harness::subject::Subject;
use crate::model::toy::{Blueprint, Toy};
use crate::parallel::trainer::{self, SHARDED_OPTIMIZER, ZERO1, ZERO1_IN_BACKWARD};
use crate::printable::shown_path;
use crate::subject::SubjectFault;
use crate::subject::rank::{Adapter, Trainee};
use crate::torch::random::SEED;
use crate::torch::{Generator, safetensors};

mod method;

use method::Method;

pub const TASK: RankTask = RankTask { name: "training_case", run: on_rank };

/// A case has few steps. A launch that takes longer hangs.
const DEADLINE: Duration = Duration::from_secs(300);

/// The file of the tensors that the ranks are given.
const GIVEN: &str = "training.safetensors";

/// Runs every trainer of the case's kind, all in one launch.
pub fn run(case: &CaseFile) -> Result<Vec<Comparison>> {
    match case.meta("kind")? {
        "data_parallel" => compare_trainers(case, &trainer::names().collect::<Vec<_>>()),
        _ => compare_trainers(case, &[SHARDED_OPTIMIZER, ZERO1, ZERO1_IN_BACKWARD]),
    }
}

/// Trains the case with each of `trainers` in one launch, and compares each rank's parameters with the expected ones.
///
/// # Errors
/// A case that contradicts itself, naming the entry; a rank that crashed or hung.
pub fn compare_trainers(case: &CaseFile, trainers: &[&str]) -> Result<Vec<Comparison>> {
    let training = Training::of(case)?;
    let (folder, _) = training.train(&Method::of(case, &training)?, trainers, None)?;
    training.compare(trainers, folder.path())
}

/// Trains the case with each adapter of the subject that its kind is for, and compares as [`compare_trainers`] does.
pub fn compare_subject(case: &CaseFile, subject: &Subject) -> Result<Vec<Comparison>> {
    compare_adapters(case, subject, |_| true)
}

/// As [`compare_subject`], with those adapters for which `is_meant` holds.
pub fn compare_adapters(
    case: &CaseFile,
    subject: &Subject,
    is_meant: impl Fn(&Adapter) -> bool,
) -> Result<Vec<Comparison>> {
    let training = Training::of(case)?;
    let method = Method::of(case, &training)?;
    let mut comparisons = Vec::new();
    for adapter in method.adapters().into_iter().filter(is_meant) {
        let (name, is_sharded) = (adapter.name(), matches!(adapter, Adapter::Sharded(..)));
        let train = |trainee: &Trainee| training.train(&method, &[name], Some(trainee));
        let (folder, stepped) = Trainee::launch(subject, adapter, train)?;
        let padding = subject_padding(stepped.len());
        if let Some(words) = undivided(&stepped, training.trained_numel, padding).filter(|_| is_sharded) {
            bail!(SubjectFault::new(words));
        }
        comparisons.extend(training.compare(&[name], folder.path())?);
    }
    Ok(comparisons)
}

/// A case's contents, checked against each other.
struct Training<'a> {
    case: &'a CaseFile,
    blueprint: Blueprint,
    parameters: Vec<String>,
    world_size: usize,
    rows: i64,
    trained_numel: (usize, usize),
}

impl<'a> Training<'a> {
    /// # Errors
    /// A case that contradicts itself, naming the entry.
    fn of(case: &'a CaseFile) -> Result<Self> {
        let blueprint = Blueprint::by_name(case.meta("model")?).context("metadata model")?;
        let world_size: usize = case.meta_as("world_size")?;
        ensure!(
            (1..=MAX_WORLD_SIZE).contains(&world_size),
            "metadata world_size is {world_size}, not between 1 and {MAX_WORLD_SIZE}"
        );
        let network = Toy::new(&blueprint, &Generator::new(Device::Cpu, SEED)?)?;
        let parameters = network.named_parameters().iter().map(|(name, _)| name.clone()).collect();
        let trained_numel = trained_numel(&network);
        let mut training = Self { case, blueprint, parameters, world_size, rows: 0, trained_numel };
        training.rows = training.check_rows()?;
        training.check_parameters(&network)?;
        Ok(training)
    }

    fn check_rows(&self) -> Result<i64> {
        let (x, y) = (float(self.case, "x")?.size(), float(self.case, "y")?.size());
        let (d_in, d_out) = (self.blueprint.d_in(), self.blueprint.d_out());
        ensure!(x.len() == 3 && x[2] == d_in, "x has shape {x:?}, not (steps, rows, {d_in})");
        ensure!(y == [x[0], x[1], d_out], "y has shape {y:?}, not [{}, {}, {d_out}] as x calls for", x[0], x[1]);
        ensure!(x[0] > 0 && x[1] > 0, "x has shape {x:?}: there is nothing to train on");
        Ok(x[1])
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
                "tensor {tensor:?} is not a parameter of the {} model; its parameters are {}",
                self.blueprint.name,
                self.parameters.join(", ")
            );
        }
        Ok(())
    }

    /// Runs all ranks, with trainers of ours or with a subject; gives the folder with the final parameters on each rank, and the
    /// values that each rank's optimizer of the subject keeps state for.
    fn train(
        &self,
        method: &Method,
        trainers: &[&str],
        trainee: Option<&Trainee>,
    ) -> Result<(tempfile::TempDir, Vec<usize>)> {
        let folder =
            tempfile::Builder::new().prefix("cs336-case-").tempdir().context("making a folder for the case")?;
        let given = self.case.tensors.iter().filter(|(name, _)| !name.starts_with("final."));
        safetensors::write(&given.collect::<Vec<_>>(), &folder.path().join(GIVEN))?;
        let input = Input {
            blueprint: self.blueprint.clone(),
            method: method.clone(),
            trainers: trainers.iter().map(|trainer| trainer.to_string()).collect(),
            trainee: trainee.cloned(),
            folder: folder.path().into(),
        };
        let ours = || Launch::new(TASK.name, self.world_size, DEADLINE);
        let plan = trainee.map_or_else(ours, |trainee| launch_of(TASK.name, self.world_size, &trainee.subject));
        let stepped = launch(&plan, &serde_json::to_value(input)?)?;
        Ok((folder, stepped.into_iter().map(serde_json::from_value).collect::<Result<_, _>>()?))
    }

    /// Compares what [`Self::train`] left with the expected values.
    fn compare(&self, trainers: &[&str], folder: &Path) -> Result<Vec<Comparison>> {
        let (rtol, atol) = self.case.tolerances()?;
        let mut comparisons = Vec::new();
        for trainer in trainers {
            for rank in 0..self.world_size {
                let implementation = format!("{trainer}, rank {rank} of {}", self.world_size);
                let finals = read(&final_file(folder, trainer, rank))?;
                for name in &self.parameters {
                    let actual = finals.get(name).with_context(|| format!("{implementation} left no {name}"))?;
                    let tensor = format!("final.{name}");
                    comparisons.push(compare(&implementation, &tensor, actual, self.case.tensor(&tensor)?, rtol, atol));
                }
            }
        }
        Ok(comparisons)
    }
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Input {
    blueprint: Blueprint,
    method: Method,
    trainers: Vec<String>,
    trainee: Option<Trainee>,
    /// Contains [`GIVEN`] and, afterwards, the final parameters.
    folder: PathBuf,
}

/// The tensors that the ranks are given, by name.
type Given = BTreeMap<String, Tensor>;

fn on_rank(collective: &Shared, input: Value) -> Result<Value> {
    let Input { blueprint, method, trainers, trainee, folder } = parse_input(input)?;
    let (rank, given) = (collective.rank(), read(&folder.join(GIVEN))?);
    let mut stepped = 0;
    for trainer in &trainers {
        // Other values on every rank, until the case's are loaded or broadcast.
        let network = Toy::new(&blueprint, &Generator::new(Device::Cpu, rank as i64)?)?;
        let file = final_file(&folder, trainer, rank);
        match &trainee {
            Some(trainee) => {
                let rank = method.train_subject(trainee, &blueprint, network, &given, collective)?;
                stepped = rank.stepped_numel;
                safetensors::write(rank.network().named_parameters(), &file)?;
            }
            None => {
                method
                    .train(trainer, &network, &given, collective)
                    .with_context(|| format!("training by {trainer}"))?;
                safetensors::write(network.named_parameters(), &file)?;
            }
        }
    }
    Ok(stepped.into())
}

fn final_file(folder: &Path, trainer: &str, rank: usize) -> PathBuf {
    folder.join(format!("{trainer}-rank{rank}.safetensors"))
}

fn read(file: &Path) -> Result<Given> {
    let tensors = Tensor::read_safetensors(file).with_context(|| format!("reading {}", shown_path(file)))?;
    Ok(tensors.into_iter().collect())
}

/// The case's tensor of that name, which must be float32 as the models are.
fn float<'a>(case: &'a CaseFile, name: &str) -> Result<&'a Tensor> {
    let tensor = case.tensor(name)?;
    ensure!(tensor.kind() == Kind::Float, "{name} is {:?}, not float32", tensor.kind());
    Ok(tensor)
}

#[cfg(test)]
mod tests;
