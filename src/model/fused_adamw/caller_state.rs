//! A step of the fused AdamW over state that the caller keeps.

use anyhow::{Context as _, Result, bail, ensure};
use tch::{Device, Kind, Tensor};

use super::table::{self, Entry};
use super::{AdamWOptions, Kernels, SHAPE};
use crate::cuda::Cache;
use crate::torch::autograd::changed_in_place;
use crate::torch::data_ptr::float32_pair;

/// A parameter, its gradient and its moments, all contiguous float32 of one shape; and its counter, two int64, of which the
/// first counts its steps and the second is the kernel's own.
pub struct CallersItem<'a> {
    pub param: &'a Tensor,
    pub grad: &'a Tensor,
    pub m: &'a Tensor,
    pub v: &'a Tensor,
    pub counter: &'a Tensor,
}

/// As [`super::FusedAdamW::update`]; the kernels are loaded once a device. On the CPU they run in the emulator.
///
/// Errors: what the kernel cannot read, by the parameter's number; memory that two parameters share.
pub fn step(options: &AdamWOptions, device: Device, items: &[CallersItem]) -> Result<()> {
    static LOADED: Cache<(), Kernels> = Cache::new();
    options.validate()?;
    let entries = items.iter().enumerate().map(|(i, item)| item.entry(device).with_context(|| name(i)));
    let entries = entries.collect::<Result<Vec<_>>>()?;
    let names: Vec<String> = (0..items.len()).map(name).collect();
    table::require_apart(&entries, |i| &names[i])?;
    let kernels = LOADED.get(device, (), || Kernels::load(device, SHAPE))?;
    for table in table::tables(&entries, SHAPE.chunk)? {
        kernels.launch(options, &table)?;
    }
    let changed = items.iter().flat_map(|item| [item.param, item.m, item.v, item.counter]);
    changed.into_iter().try_for_each(changed_in_place)
}

fn name(i: usize) -> String {
    format!("parameter {i}")
}

impl CallersItem<'_> {
    fn entry(&self, device: Device) -> Result<Entry> {
        let Self { param, grad, m, v, counter } = *self;
        let (Some(values), Some(moments)) = (float32_pair(param, grad, device)?, float32_pair(m, v, device)?) else {
            for (what, t) in [("it", param), ("its gradient", grad), ("its exp_avg", m), ("its exp_avg_sq", v)] {
                let (kind, on) = (t.kind(), t.device());
                ensure!(
                    kind == Kind::Float && on == device && t.is_contiguous(),
                    "{what} is {kind:?} on {on:?} with strides {:?}; the kernel takes contiguous float32 on {device:?}: \
                     use torch.optim.AdamW for others",
                    t.stride()
                );
            }
            bail!(
                "it has shape {:?}, its gradient {:?}, its moments {:?} and {:?}",
                param.size(),
                grad.size(),
                m.size(),
                v.size()
            )
        };
        ensure!(
            values.elements == moments.elements,
            "it has {} elements and its moments {}",
            values.elements,
            moments.elements
        );
        let (size, kind, on) = (counter.size(), counter.kind(), counter.device());
        ensure!(
            size == [2] && kind == Kind::Int64 && on == device && counter.is_contiguous(),
            "its counter is {size:?}, {kind:?}, on {on:?}; it must be [2], Int64, on {device:?}"
        );
        Ok(Entry {
            p: values.parameter,
            g: values.gradient,
            m: moments.parameter,
            v: moments.gradient,
            progress: counter.data_ptr() as u64,
            elements: values.elements,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::optim::AdamWState;
    use crate::torch::Generator;

    #[test]
    fn a_step_over_the_callers_state_is_adamws() {
        let options = AdamWOptions { weight_decay: 0.1, ..AdamWOptions::default() };
        let generator = Generator::new(Device::Cpu, 13).unwrap();
        let draw = || generator.randn(&[33, 5], Kind::Float).unwrap();
        let (param, counter) = (draw(), Tensor::zeros([2], (Kind::Int64, Device::Cpu)));
        let [m, v] = [param.zeros_like(), param.zeros_like()];
        let plain = param.copy();
        let mut state = AdamWState { step: 0, m: m.copy(), v: v.copy() };
        for steps in 1..4 {
            let grad = draw();
            let item = CallersItem { param: &param, grad: &grad, m: &m, v: &v, counter: &counter };
            step(&options, Device::Cpu, &[item]).unwrap();
            state.update(&options, &plain, &grad).unwrap();
            assert_eq!(counter.int64_value(&[0]), steps);
        }
        for (ours, theirs) in [(&param, &plain), (&m, &state.m), (&v, &state.v)] {
            assert!(ours.allclose(theirs, 1e-5, 1e-7, false));
        }
    }

    #[test]
    fn what_the_kernel_cannot_read_is_named_by_number() {
        let zeros = |kind| Tensor::zeros([4], (kind, Device::Cpu));
        let (float, narrow, counter) = (zeros(Kind::Float), zeros(Kind::BFloat16), zeros(Kind::Int64));
        let error = |grad: &Tensor, counter: &Tensor| {
            let item = CallersItem { param: &float, grad, m: &float, v: &float, counter };
            format!("{:#}", step(&AdamWOptions::default(), Device::Cpu, &[item]).unwrap_err())
        };
        assert!(error(&narrow, &counter).contains("parameter 0: its gradient is BFloat16 on Cpu"));
        assert!(error(&float, &counter).contains("its counter is [4], Int64"));
    }
}
