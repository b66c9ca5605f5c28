//! Optimizers with PyTorch's semantics.

use std::collections::BTreeMap;
use std::hint::black_box;

use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Tensor};

use crate::torch::autograd::release_grad;

/// Changes parameters in place by their gradients; a parameter without a gradient is left alone.
pub trait Optimizer: Send {
    /// One step. State is kept by parameter name, so a subset of a model's parameters may be given.
    fn step(&mut self, parameters: &[(String, Tensor)]) -> Result<()>;
}

/// The hyperparameters of [`AdamW`]; `default()` is that of `torch.optim.AdamW`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct AdamWOptions {
    pub lr: f64,
    pub beta1: f64,
    pub beta2: f64,
    pub eps: f64,
    pub weight_decay: f64,
}

impl Default for AdamWOptions {
    fn default() -> Self {
        Self { lr: 1e-3, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 1e-2 }
    }
}

impl AdamWOptions {
    /// Checks the ranges; the error names the option.
    pub fn validate(&self) -> Result<()> {
        let AdamWOptions { lr, beta1, beta2, eps, weight_decay } = *self;
        ensure!(lr >= 0.0 && lr.is_finite(), "lr is {lr}: it must be zero or positive, and finite");
        ensure!((0.0..1.0).contains(&beta1), "beta1 is {beta1}: it must lie in [0, 1)");
        ensure!((0.0..1.0).contains(&beta2), "beta2 is {beta2}: it must lie in [0, 1)");
        ensure!(eps >= 0.0 && eps.is_finite(), "eps is {eps}: it must be zero or positive, and finite");
        ensure!(
            weight_decay >= 0.0 && weight_decay.is_finite(),
            "weight_decay is {weight_decay}: it must be zero or positive, and finite"
        );
        Ok(())
    }
}

/// AdamW (Loshchilov and Hutter 2019) with the semantics of `torch.optim.AdamW`: the decay comes first, and eps is
/// added to the bias-corrected root. (The reference model's own AdamW of 2025 differs in both.)
#[derive(Debug)]
pub struct AdamW {
    options: AdamWOptions,
    state: BTreeMap<String, AdamWState>,
}

/// One parameter's steps so far, and its moments.
#[derive(Debug)]
pub struct AdamWState {
    pub step: i32,
    pub m: Tensor,
    pub v: Tensor,
}

impl AdamW {
    pub fn new(options: AdamWOptions) -> Result<Self> {
        options.validate()?;
        Ok(Self { options, state: BTreeMap::new() })
    }

    /// For the steps from here on.
    pub fn set_lr(&mut self, lr: f64) {
        self.options.lr = lr;
    }

    /// Updates one parameter by `grad` (same shape and dtype), with the state kept under `name`.
    pub fn update(&mut self, name: &str, param: &Tensor, grad: &Tensor) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        ensure!(grad.size() == param.size(), "{name}: gradient {:?}, parameter {:?}", grad.size(), param.size());
        let state = match self.state.entry(name.to_string()) {
            std::collections::btree_map::Entry::Occupied(kept) => kept.into_mut(),
            std::collections::btree_map::Entry::Vacant(free) => {
                free.insert(AdamWState { step: 0, m: param.f_zeros_like()?, v: param.f_zeros_like()? })
            }
        };
        ensure!(state.m.size() == param.size(), "{name} had shape {:?} in earlier steps", state.m.size());
        state.update(&self.options, param, grad)
    }
}

impl AdamWState {
    /// One step of `param` by `grad`, both in the shape and dtype of the moments.
    ///
    /// The operations and their roundings are those of PyTorch's single-tensor path, whose fused addcmul and addcdiv
    /// compute in float32 and round a narrower dtype once. float32 and float64 make no copy here.
    pub fn update(&mut self, options: &AdamWOptions, param: &Tensor, grad: &Tensor) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        let AdamWOptions { lr, beta1, beta2, eps, weight_decay } = *options;
        self.step += 1;
        let [correction1, correction2] = [beta1, beta2].map(|beta| 1.0 - power(beta, self.step.into()));

        let mut param = param.shallow_clone();
        scale(&param, 1.0 - lr * weight_decay)?;
        let _ = self.m.f_lerp_(grad, 1.0 - beta1)?;
        let wide_grad = widened(grad)?;
        scale(&self.v, beta2)?;
        let mut v = widened(&self.v)?;
        let _ = v.f_addcmul_(&wide_grad.f_mul_scalar(1.0 - beta2)?, &wide_grad)?;
        self.v.f_copy_(&v)?;
        drop((wide_grad, v));
        let denominator = self.v.f_sqrt()?.f_div_scalar_(power(correction2, 0.5))?.f_add_scalar_(eps)?;
        let mut after = widened(&param)?;
        let _ = after.f_addcdiv_(&widened(&self.m)?.f_mul_scalar(-lr / correction1)?, &widened(&denominator)?)?;
        param.f_copy_(&after)?;
        Ok(())
    }
}

/// The C library's `pow`, as Python's `**` calls it. `powi` and `sqrt` round differently, which `1 - beta^t` enlarges where
/// beta is near 1; a compiler that saw the exponent could replace one by the other.
fn power(base: f64, exponent: f64) -> f64 {
    base.powf(black_box(exponent))
}

/// `t` *= `factor`, in place.
///
/// In a narrow dtype libtorch's `mul_(Scalar)` first rounds the factor to that dtype (0.999 to 1 in bfloat16), since it
/// passes the factor on as the first operand; Python's `mul_(float)`, and a tensor of no dimensions, keep its precision.
/// The view gives `t` at least one dimension: two tensors of none would be multiplied in float64.
fn scale(t: &Tensor, factor: f64) -> Result<()> {
    let factor = Tensor::f_full([0_i64; 0], factor, (Kind::Double, Device::Cpu))?;
    let _ = t.f_unsqueeze(0)?.f_mul_(&factor)?;
    Ok(())
}

/// `t` itself, or its float32 copy where its dtype is narrower.
fn widened(t: &Tensor) -> Result<Tensor> {
    match t.kind() {
        Kind::BFloat16 | Kind::Half => Ok(t.f_to_kind(Kind::Float)?),
        _ => Ok(t.shallow_clone()),
    }
}

impl Optimizer for AdamW {
    fn step(&mut self, parameters: &[(String, Tensor)]) -> Result<()> {
        for (name, param) in parameters {
            let grad = param.f_grad()?;
            if grad.defined() {
                self.update(name, param, &grad).with_context(|| format!("updating {name}"))?;
            }
        }
        Ok(())
    }
}

/// Plain gradient descent, as `torch.optim.SGD` without momentum or decay.
#[derive(Debug)]
pub struct Sgd {
    lr: f64,
}

impl Sgd {
    pub fn new(lr: f64) -> Result<Self> {
        ensure!(lr >= 0.0 && lr.is_finite(), "lr is {lr}: it must be zero or positive, and finite");
        Ok(Self { lr })
    }
}

impl Optimizer for Sgd {
    fn step(&mut self, parameters: &[(String, Tensor)]) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        for (name, param) in parameters {
            let grad = param.f_grad()?;
            if grad.defined() {
                // In a narrow dtype the rate and its product would each be rounded to that dtype.
                let (update, mut after) = (widened(&grad)?.f_mul_scalar(self.lr)?, widened(param)?);
                let _ = after.f_sub_(&update).with_context(|| format!("updating {name}"))?;
                param.shallow_clone().f_copy_(&after)?;
            }
        }
        Ok(())
    }
}

/// Releases every gradient, as `zero_grad` of PyTorch's optimizers does by default; the next backward makes new ones.
pub fn zero_grad(parameters: &[(String, Tensor)]) -> Result<()> {
    parameters.iter().try_for_each(|(_, param)| release_grad(param))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn leaf(values: &[f32]) -> Tensor {
        Tensor::from_slice(values).set_requires_grad(true)
    }

    /// d/dp sum(p * g) is g exactly.
    fn give_gradient(param: &Tensor, grad: &[f32]) {
        (param * Tensor::from_slice(grad)).sum(Kind::Float).backward();
    }

    #[test]
    fn sgd_steps_against_the_gradient_and_skips_parameters_without_one() {
        let parameters = vec![("a".to_string(), leaf(&[1.0, 2.0])), ("b".to_string(), leaf(&[5.0]))];
        give_gradient(&parameters[0].1, &[0.5, -1.0]);
        Sgd::new(0.1).unwrap().step(&parameters).unwrap();
        let expected = Tensor::from_slice(&[0.95f32, 2.1]);
        assert!(parameters[0].1.allclose(&expected, 1e-6, 0.0, false));
        assert_eq!(parameters[1].1.double_value(&[0]), 5.0);
    }

    #[test]
    fn sgd_rounds_a_narrow_parameter_once() {
        let parameters = vec![("a".to_string(), leaf(&[4.03125, -4.0, 1.5]).to_kind(Kind::BFloat16).detach())];
        let param = parameters[0].1.set_requires_grad(true);
        (&param * Tensor::from_slice(&[4.4375f32, -5.71875, -8.5625]).to_kind(Kind::BFloat16))
            .sum(Kind::Float)
            .backward();
        let expected = param.detach().to_kind(Kind::Double) - param.grad().to_kind(Kind::Double) * 0.0123;
        Sgd::new(0.0123).unwrap().step(&parameters).unwrap();
        assert!(param.equal(&expected.to_kind(Kind::BFloat16)), "{:?}", param.to_kind(Kind::Double) - expected);
    }

    #[test]
    fn zero_grad_drops_the_gradient_and_backward_makes_a_new_one() {
        let parameters = vec![("a".to_string(), leaf(&[1.0])), ("b".to_string(), leaf(&[1.0]))];
        give_gradient(&parameters[0].1, &[3.0]);
        zero_grad(&parameters).unwrap();
        assert!(parameters.iter().all(|(_, param)| !param.grad().defined()));
        give_gradient(&parameters[0].1, &[2.0]);
        assert_eq!(parameters[0].1.grad().double_value(&[0]), 2.0);
    }

    #[test]
    fn a_state_of_another_shape_is_refused() {
        let mut adamw = AdamW::new(AdamWOptions::default()).unwrap();
        let zeros = |n| Tensor::zeros([n], (Kind::Float, Device::Cpu));
        adamw.update("a", &zeros(3), &zeros(3)).unwrap();
        assert!(adamw.update("a", &zeros(4), &zeros(4)).unwrap_err().to_string().contains("earlier steps"));
        assert!(AdamW::new(AdamWOptions { beta2: 1.0, ..AdamWOptions::default() }).is_err());
    }
}
