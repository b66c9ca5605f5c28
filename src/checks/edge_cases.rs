//! Edge cases of trainers: several dtypes in one model, a missing gradient, an additional pass, ranks whose models differ.

use anyhow::{Context as _, Result};
use serde_json::Value;
use tch::{Device, Kind, Tensor};

use super::mutants;
use super::protocol::{Report, on_ranks};
use crate::collective::Shared;
use crate::collective::ranks::{RankTask, parse_input};
use crate::model::optim::{Sgd, zero_grad};
use crate::parallel::trainer::{Trainer, zero1};
use crate::parallel::zero1::Stepping;
use crate::parallel::{Options, Replica};
use crate::torch::Generator;
use crate::torch::autograd::backward;

pub const TASK: RankTask = RankTask { name: "data_parallel_edges", run: on_rank };

/// Small enough that the parameters below need several buckets of every dtype.
const OPTIONS: Options = Options { bucket_size_mb: 64e-6 };

/// Name, dtype, shape, whether it trains.
type Spec = (&'static str, Kind, &'static [i64], bool);

const MIXED: [Spec; 9] = [
    ("a", Kind::Float, &[7], true),
    ("b", Kind::BFloat16, &[33], true),
    ("c", Kind::Float, &[3], false),
    ("d", Kind::Half, &[5], true),
    ("e", Kind::BFloat16, &[2, 3], true),
    ("f", Kind::BFloat16, &[4], false),
    ("g", Kind::Float, &[2, 2, 3], true),
    ("h", Kind::Half, &[], true),
    ("i", Kind::BFloat16, &[9], true),
];
const PLAIN: [Spec; 3] =
    [("a", Kind::Float, &[20], true), ("b", Kind::Float, &[20], true), ("c", Kind::Float, &[20], true)];

/// Runs all edge cases of `trainer` on `world_size` ranks.
pub fn run(trainer: &str, world_size: usize) -> Result<Report> {
    Ok(Report::over(on_ranks(&TASK, world_size, &[trainer])?.into_iter().flatten()))
}

fn on_rank(collective: &Shared, input: Value) -> Result<Value> {
    let [trainer] = parse_input(input)?;
    let mut edges = Edges { trainer, collective, report: Report::default() };
    edges.several_dtypes()?;
    edges.missing_gradient()?;
    edges.two_passes(false)?;
    edges.two_passes(true)?;
    edges.models_that_differ()?;
    Ok(serde_json::to_value([edges.report])?)
}

struct Edges<'a> {
    trainer: String,
    collective: &'a Shared,
    report: Report,
}

impl Edges<'_> {
    /// Values and gradients are small integers, whose sums and means are exact in every dtype. The results must be exact too.
    fn several_dtypes(&mut self) -> Result<()> {
        const STEPS: i64 = 2;
        let parameters = self.drawn(&MIXED, self.collective.rank())?;
        let mut expected = self.drawn(&MIXED, 0)?;
        let mut trainer = self.wrap(&parameters)?;
        for step in 0..STEPS {
            zero_grad(&parameters)?;
            backward(&self.loss(&parameters, step)?)?;
            trainer.parallel().finish_gradient_synchronization()?;
            trainer.step()?;
            self.follow(&mut expected, step)?;
        }
        self.compare("several dtypes", &parameters, &expected)
    }

    fn missing_gradient(&mut self) -> Result<()> {
        let parameters = self.drawn(&PLAIN, self.collective.rank())?;
        let mut trainer = self.wrap(&parameters)?;
        let used = [0, 2].map(|i: usize| (parameters[i].0.clone(), parameters[i].1.shallow_clone()));
        backward(&self.loss(&used, 0)?)?;
        let outcome = trainer.parallel().finish_gradient_synchronization();
        self.expect_error("a parameter without a gradient", outcome, "b has no gradient")
    }

    /// Two passes of one step, with the first finished or not. Either both count, or the second is refused.
    fn two_passes(&mut self, finish_first: bool) -> Result<()> {
        let parameters = self.drawn(&PLAIN, self.collective.rank())?;
        let mut expected = self.drawn(&PLAIN, 0)?;
        let mut trainer = self.wrap(&parameters)?;
        backward(&self.loss(&parameters, 0)?)?;
        if finish_first {
            trainer.parallel().finish_gradient_synchronization()?;
        }
        // A finished first pass has the same mean on every rank, and averaging it again does not change it. Only a trainer
        // that has already used it must refuse a second pass.
        let has_stepped = finish_first && zero1(&self.trainer) == Some(Stepping::InBackward);
        match backward(&self.loss(&parameters, 1)?) {
            Err(error) if has_stepped || !finish_first => {
                return self.expect_error("a second pass", Err(error), "run all passes but the last one under no_sync");
            }
            outcome if has_stepped => return self.expect_error("a second pass", outcome, "under no_sync"),
            outcome => outcome?,
        }
        trainer.parallel().finish_gradient_synchronization()?;
        trainer.step()?;
        (0..2).try_for_each(|step| self.follow(&mut expected, step))?;
        self.compare("two passes", &parameters, &expected)
    }

    fn models_that_differ(&mut self) -> Result<()> {
        let mut specs = PLAIN;
        specs[1].3 = self.collective.rank() > 0;
        let outcome = self.wrap(&self.drawn(&specs, 0)?).map(drop);
        self.expect_error("rank 0 alone freezes a parameter", outcome, "what is frozen must agree")
    }

    fn wrap(&self, parameters: &[(String, Tensor)]) -> Result<Trainer> {
        self.collective.barrier()?;
        let replica = Replica { parameters, collective: self.collective, options: &OPTIONS };
        mutants::trainer(&self.trainer, replica, Box::new(Sgd::new(1.0)?))
    }

    /// The parameters as rank `rank` draws them.
    fn drawn(&self, specs: &[Spec], rank: usize) -> Result<Vec<(String, Tensor)>> {
        let generator = Generator::new(Device::Cpu, rank as i64)?;
        let draw = |&(name, kind, shape, trains): &Spec| -> Result<_> {
            let values = generator.randint(-8, 9, shape, Kind::Float)?.f_to_kind(kind)?;
            Ok((name.to_string(), values.f_set_requires_grad(trains)?))
        };
        specs.iter().map(draw).collect()
    }

    /// The gradients of rank `rank` in `step`: multiples of the world size, so that means are integers.
    fn gradients(&self, parameters: &[(String, Tensor)], step: i64, rank: usize) -> Result<Vec<Tensor>> {
        let generator = Generator::new(Device::Cpu, 1000 * (step + 1) + rank as i64)?;
        let world_size = self.collective.world_size() as i64;
        let draw = |(_, parameter): &(String, Tensor)| -> Result<Tensor> {
            let values = generator.randint(-4, 5, &parameter.size(), Kind::Float)?;
            Ok(values.f_mul_scalar(world_size)?)
        };
        parameters.iter().map(draw).collect()
    }

    /// A loss with those gradients.
    fn loss(&self, parameters: &[(String, Tensor)], step: i64) -> Result<Tensor> {
        let gradients = self.gradients(parameters, step, self.collective.rank())?;
        let mut loss = Tensor::f_zeros([0_i64; 0], (Kind::Float, Device::Cpu))?;
        for ((_, parameter), gradient) in parameters.iter().zip(gradients) {
            loss = loss.f_add(&parameter.f_to_kind(Kind::Float)?.f_mul(&gradient)?.f_sum(Kind::Float)?)?;
        }
        Ok(loss)
    }

    /// Moves `expected` by the mean of all ranks' gradients, learning rate 1.
    fn follow(&self, expected: &mut [(String, Tensor)], step: i64) -> Result<()> {
        let world_size = self.collective.world_size();
        for rank in 0..world_size {
            for ((_, parameter), gradient) in expected.iter().zip(self.gradients(expected, step, rank)?) {
                if parameter.requires_grad() {
                    let _ = parameter.f_detach()?.f_sub_(&gradient.f_div_scalar(world_size as f64)?)?;
                }
            }
        }
        Ok(())
    }

    fn compare(&mut self, what: &str, parameters: &[(String, Tensor)], expected: &[(String, Tensor)]) -> Result<()> {
        for ((name, parameter), (_, expected)) in parameters.iter().zip(expected) {
            self.report.comparisons += 1;
            if !parameter.f_equal(expected)? {
                let kind = parameter.kind();
                self.find(format!(
                    "{what}: {name} ({kind:?}) is not exactly the value after a step with the mean gradient"
                ));
            }
        }
        Ok(())
    }

    fn expect_error(&mut self, what: &str, outcome: Result<()>, message: &str) -> Result<()> {
        self.report.comparisons += 1;
        match outcome.err().map(|error| format!("{error:#}")) {
            Some(said) if said.contains(message) => {}
            Some(said) => self.find(format!("{what}: {message:?} is not in the error: {said}")),
            None => self.find(format!("{what}: no error")),
        }
        self.collective.barrier().context("after an error that every rank should have had")
    }

    fn find(&mut self, finding: String) {
        self.report.findings.push(format!("{}, rank {}: {finding}", self.trainer, self.collective.rank()));
    }
}
