//! The common format of cases that train one of the official toy models on several ranks.
//!
//! Metadata `model` ("toy" or "tied"), `world_size`, `rtol`, `atol`; float32 tensors `init.<parameter>`, `x`
//! (steps, rows, 10), `y` (steps, rows, 5), expected `final.<parameter>`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tch::{Device, Kind, Tensor};

use super::{CaseFile, Comparison, compare};
use crate::collective::Shared;
use crate::collective::ranks::{Launch, MAX_WORLD_SIZE, launch};
use crate::model::toy::{Blueprint, Toy};
use crate::torch::Generator;
use crate::torch::random::SEED;

/// A case has few steps. A launch that takes longer hangs.
const DEADLINE: Duration = Duration::from_secs(300);

const TRAINING: &str = "training.safetensors";

/// A case's contents, checked against each other.
pub struct Training<'a> {
    case: &'a CaseFile,
    blueprint: Blueprint,
    parameters: Vec<String>,
    pub world_size: usize,
    pub rows: i64,
}

impl<'a> Training<'a> {
    /// # Errors
    /// A case that contradicts itself, naming the entry.
    pub fn of(case: &'a CaseFile) -> Result<Self> {
        let blueprint = Blueprint::by_name(case.meta("model")?).context("metadata model")?;
        let world_size: usize = case.meta_as("world_size")?;
        ensure!(
            (1..=MAX_WORLD_SIZE).contains(&world_size),
            "metadata world_size is {world_size}, not between 1 and {MAX_WORLD_SIZE}"
        );
        let network = Toy::new(&blueprint, &Generator::new(Device::Cpu, SEED)?)?;
        let parameters = network.named_parameters().iter().map(|(name, _)| name.clone()).collect();
        let mut training = Self { case, blueprint, parameters, world_size, rows: 0 };
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
                "tensor {tensor} is not a parameter of the {} model; its parameters are {}",
                self.blueprint.name,
                self.parameters.join(", ")
            );
        }
        Ok(())
    }

    /// Trains with `task`, which receives `how`, and compares each rank's parameters with the expected ones.
    ///
    /// # Errors
    /// A rank that crashed or hung.
    pub fn compare(&self, implementation: &str, task: &str, how: impl Serialize) -> Result<Vec<Comparison>> {
        let how = serde_json::to_value(how)?;
        let ranks = self.run(task, how).with_context(|| format!("training by {implementation}"))?;
        let (rtol, atol) = self.case.tolerances()?;
        let mut comparisons = Vec::new();
        for (rank, finals) in ranks.iter().enumerate() {
            let implementation = format!("{implementation}, rank {rank} of {}", self.world_size);
            for name in &self.parameters {
                let actual = finals.get(name).with_context(|| format!("rank {rank} left no {name}"))?;
                let tensor = format!("final.{name}");
                comparisons.push(compare(&implementation, &tensor, actual, self.case.tensor(&tensor)?, rtol, atol));
            }
        }
        Ok(comparisons)
    }

    /// The parameters that each rank ends with, by name, in rank order.
    fn run(&self, task: &str, how: Value) -> Result<Vec<BTreeMap<String, Tensor>>> {
        let folder =
            tempfile::Builder::new().prefix("cs336-case-").tempdir().context("making a folder for the case")?;
        let expected = |name: &str| name.starts_with("final.");
        let given = self.case.tensors.iter().filter(|(name, _)| !expected(name));
        let given: Vec<_> = given.map(|(name, tensor)| (name, tensor.contiguous())).collect();
        Tensor::write_safetensors(&given, folder.path().join(TRAINING)).context("writing the ranks' tensors")?;
        let input = Input { blueprint: self.blueprint.clone(), how, folder: folder.path().into() };
        launch(&Launch::new(task, self.world_size, DEADLINE), &serde_json::to_value(input)?)?;
        (0..self.world_size).map(|rank| read(&final_file(folder.path(), rank))).collect()
    }
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Input {
    blueprint: Blueprint,
    /// The task's own settings.
    how: Value,
    /// Contains [`TRAINING`] and, afterwards, each rank's final parameters.
    folder: PathBuf,
}

/// A case on one rank.
pub struct OnRank<How> {
    pub network: Toy,
    pub how: How,
    given: BTreeMap<String, Tensor>,
    final_file: PathBuf,
}

impl<How: DeserializeOwned> OnRank<How> {
    /// The network has random values until [`OnRank::load`].
    pub fn new(collective: &Shared, input: Value) -> Result<Self> {
        let Input { blueprint, how, folder } = serde_json::from_value(input)?;
        let network = Toy::new(&blueprint, &Generator::new(Device::Cpu, collective.rank() as i64)?)?;
        let given = read(&folder.join(TRAINING))?;
        let how = serde_json::from_value(how)?;
        Ok(Self { network, how, given, final_file: final_file(&folder, collective.rank()) })
    }

    /// Loads the case's initial values.
    pub fn load(&self) -> Result<()> {
        let initial = self.given.iter().filter_map(|(name, tensor)| Some((name.strip_prefix("init.")?, tensor)));
        self.network.load(&initial.map(|(name, tensor)| (name.to_string(), tensor.shallow_clone())).collect())
    }

    /// Each step's `x` (rows, 10) and `y` (rows, 5).
    pub fn steps(&self) -> Result<Vec<(Tensor, Tensor)>> {
        let (x, y) = (&self.given["x"], &self.given["y"]);
        (0..x.size()[0]).map(|step| Ok((x.f_select(0, step)?, y.f_select(0, step)?))).collect()
    }

    /// Writes the network's parameters for the comparison.
    pub fn finish(&self) -> Result<Value> {
        Tensor::write_safetensors(self.network.named_parameters(), &self.final_file)?;
        Ok(Value::Null)
    }
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
