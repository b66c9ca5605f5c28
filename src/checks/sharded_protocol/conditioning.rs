//! Cases whose values depend little on rounding: two right programs, which sum in other orders, must agree on them.

use anyhow::Result;
use tch::{Device, Tensor};

use super::{ROWS, STEPS, ShardedCase, squared_error};
use crate::model::optim::{AdamW, Optimizer as _};
use crate::model::toy::Toy;
use crate::torch::Generator;

/// In how many other orders the rows are summed.
const ORDERS: i64 = 4;
/// The most that the order may change, as a share of the tolerance.
const MOST_CHANGED: f64 = 0.1;
/// For the tied model about a third of them is refused.
const MOST_SEEDS: i64 = 20;

impl ShardedCase {
    /// The case with the first of the seeds from its own on whose values depend little on rounding; if none does, the least.
    ///
    /// AdamW's first step is the sign of a gradient: where it is a small difference of large terms, rounding turns it.
    pub fn well_conditioned(self, tolerances: (f64, f64)) -> Result<Self> {
        let mut least = (f64::INFINITY, self.seed);
        for number in 0..MOST_SEEDS {
            let seed = self.seed.wrapping_add(number);
            let changed = Self { seed, ..self.clone() }.changed_by_order(tolerances)?;
            if changed < least.0 {
                least = (changed, seed);
            }
            if changed <= MOST_CHANGED {
                break;
            }
        }
        Ok(Self { seed: least.1, ..self })
    }

    /// The most that another order of the rows changes a value after any step, as a share of the tolerance.
    fn changed_by_order(&self, tolerances: (f64, f64)) -> Result<f64> {
        let trained = self.trained_alone(None)?;
        let mut most = 0f64;
        for number in 0..ORDERS {
            let order = Generator::new(Device::Cpu, number)?.randperm(ROWS)?;
            for (other, value) in self.trained_alone(Some(&order))?.iter().zip(&trained) {
                most = most.max(share_of_tolerance(other, value, tolerances)?);
            }
        }
        Ok(most)
    }

    /// The parameters of a single process after each step, all in one group; each step's rows are in this order.
    fn trained_alone(&self, order: Option<&Tensor>) -> Result<Vec<Tensor>> {
        let generator = Generator::new(Device::Cpu, self.seed)?;
        let network = Toy::new(&self.blueprint, &generator)?;
        let mut adamw = AdamW::new(self.adamw)?;
        let mut values = Vec::new();
        for _ in 0..STEPS {
            let [mut x, mut y] = self.rows(&generator)?;
            if let Some(order) = order {
                (x, y) = (x.f_index_select(0, order)?, y.f_index_select(0, order)?);
            }
            network.zero_grad();
            squared_error(&network, &x, &y)?;
            adamw.step(network.named_parameters())?;
            for (_, parameter) in network.named_parameters() {
                values.push(parameter.f_detach()?.copy());
            }
        }
        Ok(values)
    }
}

/// The largest difference of the two, as a share of what is tolerated there.
fn share_of_tolerance(actual: &Tensor, expected: &Tensor, (rtol, atol): (f64, f64)) -> Result<f64> {
    let tolerated = expected.f_abs()?.f_mul_scalar(rtol)?.f_add_scalar(atol)?;
    Ok(actual.f_sub(expected)?.f_abs()?.f_div(&tolerated)?.f_max()?.f_double_value(&[])?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::toy::Blueprint;
    use crate::parallel::Options;

    const TOLERANCES: (f64, f64) = (1e-4, 1e-5);

    #[test]
    fn a_seed_whose_values_depend_on_rounding_is_drawn_again_and_always_gives_the_same_one() {
        let case =
            |seed| ShardedCase { seed, ..ShardedCase::official(Blueprint::tied(), Options { bucket_size_mb: 1.0 }) };
        let mut drawn_again = 0;
        for seed in 9..13 {
            let chosen = case(seed).well_conditioned(TOLERANCES).unwrap();
            assert!(chosen.changed_by_order(TOLERANCES).unwrap() <= MOST_CHANGED, "seed {seed}");
            let is_refused = case(seed).changed_by_order(TOLERANCES).unwrap() > MOST_CHANGED;
            assert_eq!(chosen.seed != seed, is_refused, "seed {seed}");
            drawn_again += i64::from(is_refused);
        }
        assert!((1..4).contains(&drawn_again), "{drawn_again} of 4 seeds are drawn again");
    }

    #[test]
    fn the_share_of_the_tolerance_is_that_of_the_worst_value() {
        let [actual, expected] = [[1.0f32, 0.0], [1.0, 2e-5]].map(|values| Tensor::from_slice(&values));
        let share = share_of_tolerance(&actual, &expected, (0.0, 1e-5)).unwrap();
        assert!((share - 2.0).abs() < 1e-3, "{share}");
    }
}
