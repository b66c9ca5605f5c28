//! Mixed precision: operators that gain from it compute in a 16-bit kind inside a scope.

use std::cell::Cell;
use std::sync::{Mutex, MutexGuard};

use anyhow::{Result, bail};
use tch::{Device, Kind};

use super::bridge::{check, ffi};
use super::library::cuda_index;
use super::lock;

/// Held by the thread that is in a scope. libtorch keeps the casts of all threads in one map and empties the whole map
/// when one of them leaves (ATen/autocast_mode.cpp), so a second thread would free the casts of the first.
static CASTS: Mutex<()> = Mutex::new(());

thread_local! {
    /// The scopes that this thread is in.
    static DEPTH: Cell<usize> = const { Cell::new(0) };
}

/// Runs `body` with operators on `device`'s type cast as libtorch's autocast lists say, to `dtype` (bf16 or fp16).
///
/// Scopes nest, of one device type or several. The previous setting is restored, also after an error or a panic. The
/// casts of parameters that libtorch caches are dropped on leaving the outermost scope. Autocast belongs to the calling
/// thread, and other threads wait for its end to enter theirs, so `body` must not wait for one that does; a backward computes in the kinds that its forward chose.
///
/// Errors: those of `body`; another `dtype`; [`crate::error::Fault::NotAvailable`] for a GPU that is not there.
pub fn autocast<T>(device: Device, dtype: Kind, body: impl FnOnce() -> Result<T>) -> Result<T> {
    // c10/core/ScalarType.h
    let scalar_type = match dtype {
        Kind::Half => 5,
        Kind::BFloat16 => 15,
        _ => bail!("autocast to {dtype:?}: only Half and BFloat16 are 16-bit floating point"),
    };
    let is_cuda = device != Device::Cpu;
    if is_cuda {
        cuda_index(device)?;
    }
    let alone = (DEPTH.get() == 0).then(|| lock(&CASTS));
    let before = check(ffi::enter_autocast(is_cuda, scalar_type))?;
    DEPTH.set(DEPTH.get() + 1);
    let _scope = Scope { is_cuda, before, _alone: alone };
    body()
}

struct Scope {
    is_cuda: bool,
    before: ffi::AutocastState,
    _alone: Option<MutexGuard<'static, ()>>,
}

impl Drop for Scope {
    fn drop(&mut self) {
        DEPTH.set(DEPTH.get() - 1);
        check(ffi::leave_autocast(self.is_cuda, self.before)).expect("setting thread-local flags does not fail");
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::Barrier;
    use std::time::Duration;

    use tch::Tensor;

    use super::*;
    use crate::torch::allocator_stats::AllocationTracker;
    use crate::torch::autograd::backward;

    fn product(device: Device) -> Kind {
        let a = Tensor::ones([2, 2], (Kind::Float, device));
        a.matmul(&a).kind()
    }

    #[test]
    fn products_are_16_bit_inside_the_scope_and_fp32_outside() {
        for dtype in [Kind::BFloat16, Kind::Half] {
            let inside = autocast(Device::Cpu, dtype, || Ok(product(Device::Cpu))).unwrap();
            assert_eq!((inside, product(Device::Cpu)), (dtype, Kind::Float));
        }
    }

    #[test]
    fn an_error_and_a_panic_leave_the_scope() {
        let error = autocast(Device::Cpu, Kind::BFloat16, || -> Result<()> { bail!("inside") }).unwrap_err();
        assert_eq!((error.to_string().as_str(), product(Device::Cpu)), ("inside", Kind::Float));
        let panicking = || autocast(Device::Cpu, Kind::BFloat16, || -> Result<()> { panic!("inside") });
        assert!(catch_unwind(AssertUnwindSafe(panicking)).is_err());
        assert_eq!(product(Device::Cpu), Kind::Float);
    }

    #[test]
    fn leaving_an_inner_scope_restores_the_outer_dtype() {
        let kinds = autocast(Device::Cpu, Kind::BFloat16, || {
            let inner = autocast(Device::Cpu, Kind::Half, || Ok(product(Device::Cpu)))?;
            Ok((inner, product(Device::Cpu)))
        });
        assert_eq!(kinds.unwrap(), (Kind::Half, Kind::BFloat16));
        assert_eq!(product(Device::Cpu), Kind::Float);
    }

    #[test]
    fn a_parameter_changed_between_scopes_is_cast_again() {
        let mut weight = Tensor::ones([2, 2], (Kind::Float, Device::Cpu)).set_requires_grad(true);
        let x = Tensor::ones([2, 2], (Kind::Float, Device::Cpu));
        let first_element = |weight: &Tensor| {
            autocast(Device::Cpu, Kind::BFloat16, || Ok(x.matmul(weight).double_value(&[0, 0]))).unwrap()
        };
        assert_eq!(first_element(&weight), 2.0);
        tch::no_grad(|| weight.f_fill_(3.0).map(drop)).unwrap();
        assert_eq!(first_element(&weight), 6.0);
    }

    #[test]
    fn another_threads_scope_frees_no_cast_of_this_thread() {
        let weight = Tensor::ones([64, 64], (Kind::Float, Device::Cpu)).set_requires_grad(true);
        let other = Barrier::new(2);
        std::thread::scope(|threads| {
            threads.spawn(|| {
                other.wait();
                autocast(Device::Cpu, Kind::BFloat16, || Ok(())).unwrap();
            });
            autocast(Device::Cpu, Kind::BFloat16, || {
                drop(weight.matmul(&weight));
                let tracker = AllocationTracker::start(Device::Cpu)?;
                other.wait();
                std::thread::sleep(Duration::from_millis(300));
                drop(weight.matmul(&weight));
                // A second cast would stay in the cache until the scope ends.
                assert_eq!(tracker.in_use()?, 0);
                Ok(())
            })
            .unwrap();
        });
    }

    #[test]
    fn gradients_of_fp32_parameters_are_fp32() {
        let weight = Tensor::ones([2, 2], (Kind::Float, Device::Cpu)).set_requires_grad(true);
        let loss = autocast(Device::Cpu, Kind::BFloat16, || Ok(weight.matmul(&weight).sum(Kind::Float))).unwrap();
        backward(&loss).unwrap();
        assert_eq!(weight.grad().kind(), Kind::Float);
        assert_eq!(weight.grad().double_value(&[0, 0]), 4.0);
    }

    #[test]
    fn other_kinds_are_refused() {
        let error = autocast(Device::Cpu, Kind::Float, || Ok(())).unwrap_err();
        assert!(error.to_string().contains("autocast to Float"), "{error}");
    }
}
