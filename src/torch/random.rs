//! Random numbers from seeded generators; nothing draws from libtorch's process-wide generators.

use anyhow::{Context as _, Result, bail};
use cxx::UniquePtr;
use tch::{Device, Kind, Tensor};

use super::bridge::{check, ffi, share};
use super::library::cuda_index;

/// The seed of everything that is measured or checked and needs no seed of its own.
pub const SEED: i64 = 0;

/// A stream of random numbers on one device.
///
/// The numbers are those of PyTorch: MT19937 on the CPU and Philox on CUDA, each draw by libtorch's own operator. Every
/// method gives what the PyTorch function of its name gives after `torch.manual_seed(seed)` and the same draws before.
pub struct Generator {
    device: Device,
    inner: UniquePtr<ffi::Generator>,
}

impl Generator {
    /// As `torch.Generator(device).manual_seed(seed)`; a negative seed is taken modulo 2^64.
    ///
    /// Errors: [`crate::error::Fault::NotAvailable`] without the device.
    pub fn new(device: Device, seed: i64) -> Result<Self> {
        let index = if device == Device::Cpu { 0 } else { cuda_index(device)? };
        let inner = check(ffi::new_generator(device.is_cuda(), index, seed as u64))
            .with_context(|| format!("making a generator on {device:?}"))?;
        Ok(Self { device, inner })
    }

    /// Where the numbers are drawn, and so the device of every tensor that this gives.
    pub fn device(&self) -> Device {
        self.device
    }

    /// Standard normal values of a floating-point `kind`.
    pub fn randn(&self, shape: &[i64], kind: Kind) -> Result<Tensor> {
        let values = ffi::draw_normal(&self.inner, shape, scalar_type(kind)?);
        drawn(values, || format!("drawing normal {kind:?} values of shape {shape:?}"))
    }

    /// Values of a floating-point `kind`, uniform on [0, 1).
    pub fn rand(&self, shape: &[i64], kind: Kind) -> Result<Tensor> {
        self.uniform(0.0, 1.0, shape, kind)
    }

    /// Values of a floating-point `kind`, uniform on [low, high): as `torch.empty(shape).uniform_(low, high)`.
    pub fn uniform(&self, low: f64, high: f64, shape: &[i64], kind: Kind) -> Result<Tensor> {
        let values = ffi::draw_uniform(&self.inner, shape, scalar_type(kind)?, low, high);
        drawn(values, || format!("drawing uniform {kind:?} values of shape {shape:?}"))
    }

    /// Integers, uniform on [low, high), as values of `kind`.
    ///
    /// Errors: no integer lies in that range.
    pub fn randint(&self, low: i64, high: i64, shape: &[i64], kind: Kind) -> Result<Tensor> {
        let values = ffi::draw_integers(&self.inner, shape, scalar_type(kind)?, low, high);
        drawn(values, || format!("drawing integers from {low} to below {high}, shape {shape:?}"))
    }

    /// The integers from 0 to `n - 1` in random order, int64.
    pub fn randperm(&self, n: i64) -> Result<Tensor> {
        drawn(ffi::draw_permutation(&self.inner, n), || format!("drawing a permutation of {n} numbers"))
    }
}

fn drawn(values: Result<UniquePtr<ffi::Tensor>, cxx::Exception>, what: impl FnOnce() -> String) -> Result<Tensor> {
    Ok(share(&*check(values).with_context(what)?))
}

/// A dtype's number in c10/core/ScalarType.h.
fn scalar_type(kind: Kind) -> Result<i8> {
    Ok(match kind {
        Kind::Int64 => 4,
        Kind::Half => 5,
        Kind::Float => 6,
        Kind::Double => 7,
        Kind::BFloat16 => 15,
        _ => bail!("random numbers of {kind:?}: they can be Int64, Half, BFloat16, Float or Double"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const NORMAL: [f64; 16] = [
        0.5923166871070862,
        -0.3046906888484955,
        -0.3286534547805786,
        -0.15111184120178223,
        0.16215649247169495,
        0.20161223411560059,
        1.0319300889968872,
        -0.9476832747459412,
        1.5362052917480469,
        0.9482693076133728,
        -1.169732928276062,
        1.084093689918518,
        -1.2763019800186157,
        -0.2497432678937912,
        -2.5501511096954346,
        0.015410969965159893,
    ];
    const UNIFORM: [f64; 2] = [0.7786606550216675, 0.5727376937866211];
    const WITHIN: [f64; 2] = [4.508901782048352, -1.0247027781688107];
    const INTEGERS: [f64; 4] = [89.0, 26.0, 44.0, 28.0];
    const ORDER: [f64; 6] = [5.0, 3.0, 2.0, 0.0, 4.0, 1.0];

    fn floats(tensor: &Tensor) -> Vec<f64> {
        Vec::try_from(tensor.to_kind(Kind::Double).view([-1])).unwrap()
    }

    /// The expected values were printed by torch 2.11.0 on the CPU: `torch.manual_seed(336)`, then these five calls.
    #[test]
    fn a_seed_gives_the_numbers_that_pytorch_gives() {
        let generator = Generator::new(Device::Cpu, 336).unwrap();
        let normal = generator.randn(&[16], Kind::Float).unwrap();
        let uniform = generator.rand(&[2], Kind::Float).unwrap();
        let within = generator.uniform(-3.0, 5.0, &[2], Kind::Double).unwrap();
        let integers = generator.randint(-4, 100, &[4], Kind::Int64).unwrap();
        let order = generator.randperm(6).unwrap();
        let near = |tensor: &Tensor, expected: &[f64]| {
            floats(tensor).iter().zip(expected).all(|(value, expected)| (value - expected).abs() < 1e-6)
        };
        assert!(near(&normal, &NORMAL), "{normal:?}");
        assert!(near(&uniform, &UNIFORM), "{uniform:?}");
        assert!(near(&within, &WITHIN), "{within:?}");
        assert_eq!(floats(&integers), INTEGERS);
        assert_eq!(floats(&order), ORDER);
    }

    #[test]
    fn generators_of_one_seed_agree_while_other_threads_draw() {
        let draw = || {
            let generator = Generator::new(Device::Cpu, 7).unwrap();
            let parts: Vec<_> = (0..200).flat_map(|_| floats(&generator.randn(&[17], Kind::Float).unwrap())).collect();
            parts
        };
        let alone = draw();
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(draw)).collect();
            assert!(threads.into_iter().all(|thread| thread.join().unwrap() == alone));
        });
    }

    #[test]
    fn an_empty_range_and_a_missing_device_are_errors() {
        let generator = Generator::new(Device::Cpu, SEED).unwrap();
        let message = generator.randint(3, 3, &[1], Kind::Int64).unwrap_err().to_string();
        assert!(message.contains("from 3 to below 3"), "{message}");
        assert!(generator.randn(&[2], Kind::Int64).is_err());
        assert!(Generator::new(Device::Cuda(99), SEED).is_err());
    }
}
