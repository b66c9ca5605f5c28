//! Broken strategies that communicate after the backward pass.

use anyhow::Result;
use tch::Tensor;

use crate::collective::{Op, Shared};
use crate::parallel::{DataParallel, Strategy, broadcast_parameters, gradient_of, trained};

pub const SUMMED: Strategy =
    Strategy { name: "mutant_summed", construct: |p, c, _| broken(p, c, Start::Right, Gradients::Summed) };
pub const ONLY_FIRST: Strategy =
    Strategy { name: "mutant_only_first", construct: |p, c, _| broken(p, c, Start::Right, Gradients::OnlyFirst) };
pub const TIED_TWICE: Strategy =
    Strategy { name: "mutant_tied_twice", construct: |p, c, _| broken(p, c, Start::Right, Gradients::TiedTwice) };
pub const STALE: Strategy =
    Strategy { name: "mutant_stale", construct: |p, c, _| broken(p, c, Start::Right, Gradients::Stale) };
pub const LOCAL: Strategy =
    Strategy { name: "mutant_local", construct: |p, c, _| broken(p, c, Start::Right, Gradients::Local) };
pub const NO_BROADCAST: Strategy =
    Strategy { name: "mutant_no_broadcast", construct: |p, c, _| broken(p, c, Start::Apart, Gradients::Right) };
pub const FROZEN_APART: Strategy =
    Strategy { name: "mutant_frozen_apart", construct: |p, c, _| broken(p, c, Start::FrozenApart, Gradients::Right) };
pub const LAST_RANK_LEADS: Strategy =
    Strategy { name: "mutant_last_rank_leads", construct: |p, c, _| broken(p, c, Start::LastRank, Gradients::Right) };

/// How the initial parameters are distributed.
#[derive(Clone, Copy, PartialEq)]
enum Start {
    Right,
    /// Nothing is broadcast.
    Apart,
    /// Only parameters that train are broadcast.
    FrozenApart,
    /// The last rank's values are broadcast, and rank 0 loses its own.
    LastRank,
}

/// How a step's gradients are averaged.
#[derive(Clone, Copy, PartialEq)]
enum Gradients {
    Right,
    /// The division by the world size is forgotten.
    Summed,
    /// Only the first trained parameter's gradient is averaged.
    OnlyFirst,
    /// A weight that two layers share is handled once per use: summed once, divided twice.
    TiedTwice,
    /// Communicated before the backward pass has accumulated: the ranks average the previous step's gradients.
    Stale,
    /// Never communicated.
    Local,
}

struct Broken {
    trained: Vec<(String, Tensor)>,
    collective: Shared,
    gradients: Gradients,
    previous: Vec<Tensor>,
}

fn broken(
    parameters: &[(String, Tensor)],
    collective: &Shared,
    start: Start,
    gradients: Gradients,
) -> Result<Box<dyn DataParallel>> {
    let trained = trained(parameters);
    match start {
        Start::Right => broadcast_parameters(parameters, collective)?,
        Start::Apart => {}
        Start::FrozenApart => broadcast_parameters(&trained, collective)?,
        Start::LastRank => {
            let last = collective.world_size() - 1;
            parameters.iter().try_for_each(|(_, parameter)| collective.broadcast(&parameter.f_detach()?, last))?;
        }
    }
    let previous = trained.iter().map(|(_, parameter)| parameter.f_zeros_like()).collect::<Result<_, _>>()?;
    Ok(Box::new(Broken { trained, collective: collective.clone(), gradients, previous }))
}

impl DataParallel for Broken {
    fn finish_gradient_synchronization(&mut self) -> Result<()> {
        let world_size = self.collective.world_size() as f64;
        for (i, (name, parameter)) in self.trained.iter().enumerate() {
            let mut gradient = gradient_of(name, parameter)?;
            match self.gradients {
                Gradients::Local => continue,
                Gradients::OnlyFirst if i > 0 => continue,
                Gradients::Summed => self.collective.all_reduce(&gradient, Op::Sum)?,
                Gradients::Right | Gradients::OnlyFirst => self.collective.all_reduce(&gradient, Op::Average)?,
                Gradients::TiedTwice => {
                    self.collective.all_reduce(&gradient, Op::Average)?;
                    // Only the official tied model has a parameter with this name: the shared weight.
                    if name == "fc2.weight" {
                        let _ = gradient.f_div_scalar_(world_size)?;
                    }
                }
                Gradients::Stale => {
                    let current = gradient.f_detach()?.copy();
                    gradient.f_copy_(&std::mem::replace(&mut self.previous[i], current))?;
                    self.collective.all_reduce(&gradient, Op::Average)?;
                }
            }
        }
        Ok(())
    }
}
