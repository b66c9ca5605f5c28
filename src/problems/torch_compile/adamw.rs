//! One AdamW step over the parameters of a model: ours against PyTorch's two, beside what a plain copy reaches.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize};
use serde_json::json;
use tch::{Device, Kind, Tensor};

use crate::bench::device::empty_cache;
use crate::bench::interleave::{ColumnOutcome, Laps, Turns, Variant, interleave, samples};
use crate::bench::machine::copy_bandwidth;
use crate::bench::peer::{Software, TorchPeer, Verified, errors_of};
use crate::bench::timing::lap;
use crate::bench::tolerance;
use crate::bench::training_step::work_of_passes;
use crate::harness::samples::Samples;
use crate::model::fused_adamw::adamw_for;
use crate::model::optim::AdamWOptions;
use crate::model::sizes::VOCAB_SIZE;
use crate::model::{Config, SizeName};
use crate::torch::autograd::{backward_from, release_grad};
use crate::torch::random::SEED;
use crate::torch::{Generator, safetensors};

/// Parameter, gradient and both moments are read, all but the gradient written: 7 values of 4 bytes.
pub const BYTES_PER_PARAMETER: f64 = 28.0;

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Params {
    pub size: SizeName,
    pub rounds: usize,
    pub warmup: usize,
    pub iterations: usize,
    /// Steps between two synchronisations: in training the host is ahead of the device, and the launch of a step shows as
    /// little as it does here with several of them.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub steps_in_a_row: usize,
}

fn one() -> usize {
    1
}

fn is_one(count: &usize) -> bool {
    *count == 1
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Row {
    pub rust: ColumnOutcome<Update>,
    pub python_fused: ColumnOutcome<Update>,
    pub python_foreach: ColumnOutcome<Update>,
    /// Plain copies within the device, right before the turns; what is read and written is counted.
    pub copy: Samples,
    pub parameters: u64,
    pub tensors: u64,
    /// Relative errors of Python's columns against ours after three steps on the same gradients.
    pub errors: BTreeMap<String, f64>,
    pub software: Software,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Update {
    pub step: Samples,
}

#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Errors {
    parameters: f64,
}

impl Params {
    pub fn validate(&self) -> Result<()> {
        let steps = self.steps_in_a_row;
        ensure!((1..=1000).contains(&steps), "steps_in_a_row is {steps}: it must lie in 1..1000");
        self.turns().validate()
    }

    /// Neither vocabulary nor context changes what a step is; the handout's vocabulary gives the counts of its table.
    pub fn config(&self) -> Config {
        Config::of_size(self.size.size(), VOCAB_SIZE, 1)
    }

    fn turns(&self) -> Turns {
        Turns { rounds: self.rounds, warmup: self.warmup, iterations: self.iterations }
    }
}

pub fn measure(p: &Params, device: Device, peer: &mut TorchPeer) -> Result<Row> {
    let generator = Generator::new(device, SEED)?;
    let config = p.config();
    let shapes: Vec<Vec<i64>> = config.parameter_shapes().map(|(_, shape)| shape).collect();
    let folder = tempfile::tempdir().context("making a folder for the peer's inputs")?;
    let file = folder.path().join("adamw.safetensors");
    write_steps(&file, &generator)?;
    peer.open("adamw", json!({ "shapes": [] }))?;
    let [fused, foreach] = [verify(peer, "fused", &file)?, verify(peer, "foreach", &file)?];

    peer.open("adamw", json!({ "shapes": shapes, "steps_in_a_row": p.steps_in_a_row }))?;
    let copy = copy_bandwidth(device)?;
    empty_cache(device)?;
    let parameters = random_parameters(&shapes, &generator)?;
    let peer = RefCell::new(peer);
    let python = |column: &'static str| peer.borrow_mut().turn(column, p.warmup, p.iterations);
    let columns = interleave(
        p.turns(),
        [
            Variant::new(|| step_turn(&parameters, device, p)),
            Variant::prepared(&fused, |_| python("fused")),
            Variant::prepared(&foreach, |_| python("foreach")),
        ],
    )?;
    peer.borrow_mut().close(None)?;
    let [_, _, work] = work_of_passes(&config, 0.0, "float32");
    let update = |laps: Laps| Ok(Update { step: samples(&laps, "step", work.clone())? });
    let [rust, python_fused, python_foreach] = columns.map(|column| column.try_map(update));
    let errors = errors_of([("python_fused", &fused), ("python_foreach", &foreach)]);
    Ok(Row {
        rust: rust?,
        python_fused: python_fused?,
        python_foreach: python_foreach?,
        copy,
        parameters: config.num_parameters(),
        tensors: config.num_tensors(),
        errors: errors.into_iter().map(|(name, errors)| (name, errors.parameters)).collect(),
        software: peer.borrow().software.clone(),
    })
}

/// What the peer reaches in `column` by the steps in `file`, held against where ours ended.
pub fn verify(peer: &mut TorchPeer, column: &str, file: &Path) -> Result<ColumnOutcome<Verified<Errors>>> {
    peer.verify(column, file, |&Errors { parameters: error }| {
        let most = tolerance::ADAMW;
        ensure!(error <= most, "Python's {column} AdamW ends {error:.1e} from ours, more than {most:.0e}");
        Ok(())
    })
}

/// Three steps of our optimizer on small tensors: where they start, their gradients, and where they end.
pub fn write_steps(file: &Path, generator: &Generator) -> Result<()> {
    const STEPS: usize = 3;
    let parameters = random_parameters(&[vec![33, 7], vec![64], vec![5, 3]], generator)?;
    let mut optimizer = adamw_for(generator.device(), AdamWOptions::default())?;
    let mut tensors = Vec::new();
    for (i, parameter) in &parameters {
        tensors.push((format!("param.{i}"), parameter.f_detach_copy()?));
    }
    for step in 0..STEPS {
        for (i, parameter) in &parameters {
            give_gradient(parameter, generator)?;
            tensors.push((format!("grad.{i}.{step}"), parameter.f_grad()?.f_detach_copy()?));
        }
        optimizer.step(&parameters)?;
    }
    for (i, parameter) in &parameters {
        tensors.push((format!("after.{i}"), parameter.f_detach_copy()?));
    }
    safetensors::write(&tensors, file)
}

fn random_parameters(shapes: &[Vec<i64>], generator: &Generator) -> Result<Vec<(String, Tensor)>> {
    let parameter = |(i, shape): (usize, &Vec<i64>)| -> Result<(String, Tensor)> {
        let parameter = generator.randn(shape, Kind::Float)?.f_set_requires_grad(true)?;
        give_gradient(&parameter, generator)?;
        Ok((i.to_string(), parameter))
    };
    shapes.iter().enumerate().map(parameter).collect()
}

/// A random gradient: what arrives at a leaf is its gradient.
fn give_gradient(parameter: &Tensor, generator: &Generator) -> Result<()> {
    release_grad(parameter)?;
    backward_from(parameter, &generator.randn(&parameter.size(), Kind::Float)?, false)
}

/// Steps of a new optimizer, whose untimed ones make its state, as the peer's turn.
fn step_turn(parameters: &[(String, Tensor)], device: Device, p: &Params) -> Result<Laps> {
    let &Params { warmup, iterations, steps_in_a_row, .. } = p;
    let mut optimizer = adamw_for(device, AdamWOptions::default())?;
    let mut seconds = Vec::new();
    for _ in 0..warmup + iterations {
        let row = lap(device, || (0..steps_in_a_row).try_for_each(|_| optimizer.step(parameters)))?.1;
        seconds.push(row / steps_in_a_row as f64);
    }
    drop(optimizer);
    empty_cache(device)?;
    Ok([("step".to_string(), seconds.split_off(warmup))].into())
}
