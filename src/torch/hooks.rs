//! Hooks that fire as soon as a parameter's gradient has been accumulated.

use std::sync::{Arc, Mutex, Weak};

use anyhow::{Context, Result};
use tch::Tensor;

use super::bridge::{self, Outcome, check, ffi};
use super::lock;

/// Calls `hook` with `parameter` each time a backward has finished accumulating into its gradient.
///
/// One parameter may have several hooks; they fire in the order of their registration, once per backward however
/// often the parameter was used. Parameters fire as their gradients get ready: in about the reverse order of use.
/// The hook runs on the thread that called backward. An error or panic of the hook ends the backward with that error.
/// A hook that owns its own parameter keeps it alive until the handle is dropped.
///
/// Errors: `parameter` is not a leaf that requires a gradient.
pub fn post_accumulate_grad(
    parameter: &Tensor,
    hook: impl FnMut(&Tensor) -> Result<()> + Send + 'static,
) -> Result<HookHandle> {
    let list = check(ffi::hooks_of(bridge::borrow(parameter))).context("registering a post-accumulate-grad hook")?;
    let hook: Hook = Arc::new(Mutex::new(Box::new(hook)));
    lock(&list.0).push(hook.clone());
    Ok(HookHandle { list: Arc::downgrade(&list.0), hook })
}

/// A registered hook; dropping it removes the hook (one that is running right now runs to its end).
#[must_use = "dropping the handle removes the hook"]
pub struct HookHandle {
    list: Weak<Mutex<Vec<Hook>>>,
    hook: Hook,
}

impl Drop for HookHandle {
    fn drop(&mut self) {
        if let Some(list) = self.list.upgrade() {
            lock(&list).retain(|hook| !Arc::ptr_eq(hook, &self.hook));
        }
    }
}

type Hook = Arc<Mutex<Box<dyn FnMut(&Tensor) -> Result<()> + Send>>>;

/// A parameter's hooks. libtorch has one place for a hook per tensor; this list is what we put there.
pub(super) struct HookList(Arc<Mutex<Vec<Hook>>>);

pub(super) fn new_hook_list() -> Box<HookList> {
    Box::new(HookList(Arc::default()))
}

impl HookList {
    pub(super) fn run(&self, parameter: &ffi::Tensor) -> Box<Outcome> {
        Outcome::of(
            || "in a post-accumulate-grad hook".to_string(),
            || {
                // A copy, so that a hook may add and remove hooks.
                let hooks = lock(&self.0).clone();
                let parameter = bridge::share(parameter);
                hooks.iter().try_for_each(|hook| lock(hook)(&parameter))
            },
        )
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, channel};

    use anyhow::bail;
    use tch::{Device, Kind};

    use super::*;
    use crate::torch::Generator;
    use crate::torch::autograd::backward;
    use crate::torch::random::SEED;

    fn leaf() -> Tensor {
        Generator::new(Device::Cpu, SEED).unwrap().rand(&[2, 2], Kind::Float).unwrap().set_requires_grad(true)
    }

    /// Hooks that note their parameter's place in `parameters`.
    fn record(parameters: &[&Tensor]) -> (Vec<HookHandle>, Receiver<usize>) {
        let (sender, receiver) = channel();
        let hook = |(i, parameter): (usize, &&Tensor)| {
            let sender = sender.clone();
            post_accumulate_grad(parameter, move |parameter| {
                assert!(parameter.grad().defined());
                Ok(sender.send(i)?)
            })
            .unwrap()
        };
        (parameters.iter().enumerate().map(hook).collect(), receiver)
    }

    fn chain(parameters: &[&Tensor]) -> Tensor {
        let x = Tensor::ones([3, 2], (Kind::Float, Device::Cpu));
        parameters.iter().fold(x, |x, parameter| x.matmul(parameter)).sum(Kind::Float)
    }

    #[test]
    fn hooks_fire_in_reverse_order_at_every_backward_until_removed() {
        let parameters = [leaf(), leaf(), leaf()];
        let parameters: Vec<&Tensor> = parameters.iter().collect();
        let (mut handles, fired) = record(&parameters);
        for _ in 0..2 {
            backward(&chain(&parameters)).unwrap();
            assert_eq!(fired.try_iter().collect::<Vec<_>>(), [2, 1, 0]);
        }
        drop(handles.remove(1));
        backward(&chain(&parameters)).unwrap();
        assert_eq!(fired.try_iter().collect::<Vec<_>>(), [2, 0]);
        drop(handles);
        backward(&chain(&parameters)).unwrap();
        assert_eq!(fired.try_iter().count(), 0);
    }

    #[test]
    fn a_tied_parameter_fires_once_with_the_whole_gradient() {
        let tied = leaf();
        let (_handles, fired) = record(&[&tied]);
        backward(&chain(&[&tied, &tied, &tied])).unwrap();
        assert_eq!(fired.try_iter().collect::<Vec<_>>(), [0]);
    }

    #[test]
    fn several_hooks_on_one_parameter_fire_in_order_of_registration() {
        let parameter = leaf();
        let (_handles, fired) = record(&[&parameter, &parameter]);
        backward(&chain(&[&parameter])).unwrap();
        assert_eq!(fired.try_iter().collect::<Vec<_>>(), [0, 1]);
    }

    #[test]
    fn a_hook_may_change_the_gradient_and_outlive_its_parameter() {
        let parameter = leaf();
        let handle = post_accumulate_grad(&parameter, |parameter| {
            let _ = parameter.grad().f_zero_()?;
            Ok(())
        })
        .unwrap();
        backward(&chain(&[&parameter])).unwrap();
        assert_eq!(parameter.grad().abs().sum(Kind::Float).double_value(&[]), 0.0);
        drop(parameter);
        drop(handle);
    }

    #[test]
    fn an_error_or_panic_in_a_hook_ends_backward_with_its_message() {
        let parameter = leaf();
        let handle = post_accumulate_grad(&parameter, |_| bail!("the peer is gone")).unwrap();
        let error = format!("{:#}", backward(&chain(&[&parameter])).unwrap_err());
        assert_eq!(error, "in a post-accumulate-grad hook: the peer is gone");
        drop(handle);
        let mut calls = 0;
        let _handle = post_accumulate_grad(&parameter, move |_| {
            calls += 1;
            if calls == 1 {
                panic!("on the first call");
            }
            Ok(())
        })
        .unwrap();
        let error = format!("{:#}", backward(&chain(&[&parameter])).unwrap_err());
        assert!(error.contains("panicked: on the first call"), "{error}");
        backward(&chain(&[&parameter])).unwrap();
    }

    #[test]
    fn only_a_leaf_that_requires_a_gradient_takes_a_hook() {
        let parameter = leaf();
        let frozen = parameter.detach();
        for tensor in [&frozen, &(&parameter * 2.0)] {
            let error = format!("{:#}", post_accumulate_grad(tensor, |_| Ok(())).err().unwrap());
            assert!(error.contains("leaf tensor that requires a gradient"), "{error}");
        }
    }
}
