//! What the wheel's operators do: C functions over our kernels, which `operators.cc` registers with PyTorch.

use std::path::Path;
use std::pin::Pin;

use anyhow::{Context as _, Result, bail, ensure};
use cxx::CxxString;
use tch::{Device, Kind, Tensor};

use crate::attention::Attention;
use crate::attention::flash::Flash;
use crate::attention::tiled::Tiled;
use crate::cuda;
use crate::model::fused_adamw::{self, CallersItem};
use crate::model::optim::{AdamWOptions, AdamWState};
use crate::torch::operator::{Status, TensorList, extend, run, tensors};

pub mod cubins;

/// `[q, k, v]` to `[o, lse]`.
#[unsafe(no_mangle)]
pub extern "C" fn cs336_flash_forward(
    inputs: &TensorList,
    is_causal: bool,
    is_deterministic: bool,
    outputs: Pin<&mut TensorList>,
    message: Pin<&mut CxxString>,
) -> Status {
    run(message, || {
        let inputs = fixed(tensors(inputs))?;
        let (o, lse) = forward(&inputs, is_causal, is_deterministic)?;
        extend(outputs, &[o, lse]);
        Ok(())
    })
}

/// `[q, k, v, o, lse, d_o]` to `[dq, dk, dv]`.
#[unsafe(no_mangle)]
pub extern "C" fn cs336_flash_backward(
    inputs: &TensorList,
    is_causal: bool,
    is_deterministic: bool,
    outputs: Pin<&mut TensorList>,
    message: Pin<&mut CxxString>,
) -> Status {
    run(message, || {
        let saved: [Tensor; 6] = fixed(tensors(inputs))?;
        let implementation = implementation(&saved[0], is_deterministic)?;
        extend(outputs, &implementation.backward(saved.each_ref(), is_causal)?);
        Ok(())
    })
}

/// One step in place of each parameter, from five lists of equal length, one after the other: parameters, gradients, first and
/// second moments, counters. `options` are lr, beta1, beta2, eps and weight_decay.
#[unsafe(no_mangle)]
pub extern "C" fn cs336_fused_adamw(lists: &TensorList, options: &[f64; 5], message: Pin<&mut CxxString>) -> Status {
    run(message, || {
        let [lr, beta1, beta2, eps, weight_decay] = *options;
        step(&tensors(lists), &AdamWOptions { lr, beta1, beta2, eps, weight_decay })
    })
}

/// Whether our kernels take such inputs; `message` says why not. `cuda_index` is -1 for the CPU.
#[unsafe(no_mangle)]
pub extern "C" fn cs336_unserved(dtype: i8, cuda_index: i32, d: i64, message: Pin<&mut CxxString>) -> Status {
    run(message, || {
        // c10::ScalarType's numbers.
        let kind = match dtype {
            15 => Kind::BFloat16,
            5 => Kind::Half,
            6 => Kind::Float,
            7 => Kind::Double,
            _ => bail!("its kernels take bfloat16, float16 and float32"),
        };
        let device = usize::try_from(cuda_index).map_or(Device::Cpu, Device::Cuda);
        Flash::FASTEST.supports(kind, device, d).map_err(anyhow::Error::msg)
    })
}

/// Takes kernels from the installed package in this folder.
#[unsafe(no_mangle)]
pub extern "C" fn cs336_use_package(folder: &CxxString, message: Pin<&mut CxxString>) -> Status {
    run(message, || cuda::use_package(Path::new(folder.to_str()?)))
}

/// Compiles every kernel of the wheel into the package's folder of cubins.
#[unsafe(no_mangle)]
pub extern "C" fn cs336_write_cubins(message: Pin<&mut CxxString>) -> Status {
    run(message, cubins::write)
}

/// The CPU has no kernels: there our tensor operations follow the same contract.
fn implementation(q: &Tensor, is_deterministic: bool) -> Result<&'static dyn Attention> {
    match (q.device(), is_deterministic) {
        (Device::Cpu, _) => {
            Tiled::DEFAULT.supports(q.kind(), Device::Cpu, 0).map_err(anyhow::Error::msg)?;
            Ok(&Tiled::DEFAULT)
        }
        (_, true) => Ok(&Flash::DETERMINISTIC),
        (_, false) => Ok(&Flash::FASTEST),
    }
}

fn forward([q, k, v]: &[Tensor; 3], is_causal: bool, is_deterministic: bool) -> Result<(Tensor, Tensor)> {
    implementation(q, is_deterministic)?.forward(q, k, v, is_causal)
}

fn step(lists: &[Tensor], options: &AdamWOptions) -> Result<()> {
    ensure!(lists.len().is_multiple_of(5), "{} tensors are not five lists of equal length", lists.len());
    let count = lists.len() / 5;
    let item = |i: usize| {
        let [param, grad, m, v, counter] = [0, 1, 2, 3, 4].map(|list| &lists[list * count + i]);
        CallersItem { param, grad, m, v, counter }
    };
    let items: Vec<_> = (0..count).map(item).collect();
    match items.first().map(|first| first.param.device()) {
        None => Ok(()),
        Some(Device::Cpu) => {
            options.validate()?;
            items
                .iter()
                .enumerate()
                .try_for_each(|(i, item)| step_on_cpu(options, item).with_context(|| format!("parameter {i}")))
        }
        Some(device) => fused_adamw::step(options, device, &items),
    }
}

fn step_on_cpu(options: &AdamWOptions, item: &CallersItem) -> Result<()> {
    let CallersItem { param, grad, m, v, counter } = *item;
    for (what, t) in [("gradient", grad), ("exp_avg", m), ("exp_avg_sq", v)] {
        let (size, kind, of, expected) = (t.size(), t.kind(), param.size(), param.kind());
        ensure!(
            size == of && kind == expected,
            "its {what} is {size:?}, {kind:?}; the parameter is {of:?}, {expected:?}"
        );
    }
    let steps = i32::try_from(counter.f_int64_value(&[0])?)?;
    let mut state = AdamWState { step: steps, m: m.shallow_clone(), v: v.shallow_clone() };
    state.update(options, param, grad)?;
    let _ = counter.f_narrow(0, 0, 1)?.f_fill_(i64::from(state.step))?;
    Ok(())
}

fn fixed<const N: usize>(tensors: Vec<Tensor>) -> Result<[Tensor; N]> {
    tensors.try_into().map_err(|got: Vec<Tensor>| anyhow::anyhow!("{} tensors arrived where {N} belong", got.len()))
}
