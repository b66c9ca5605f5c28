//! Autograd functions whose forward and backward are written in Rust, and a backward that keeps its errors' types.

use std::pin::Pin;
use std::sync::Mutex;

use anyhow::{Context, Result, ensure};
use tch::Tensor;

use super::bridge::{self, Outcome, TensorList, check, ffi};
use super::lock;

/// One differentiable operation: what `torch.autograd.Function` is in Python.
///
/// [`backward`] calls it on its own thread; a backward pass that another library starts may use another, so a function relies
/// on no thread-local state.
pub trait Function: Send + 'static {
    /// The outputs, and what `backward` will need; runs once, with gradient recording off.
    fn forward(&mut self, inputs: &[Tensor]) -> Result<Forward>;

    /// One gradient per input (`None` where there is none), each of its input's shape.
    ///
    /// `saved` is [`Forward::saved`]; `grad_outputs` has one place per output, `None` where no gradient arrived.
    fn backward(&self, saved: &[Tensor], grad_outputs: &[Option<Tensor>]) -> Result<Vec<Option<Tensor>>>;
}

/// What a forward gives.
pub struct Forward {
    pub outputs: Vec<Tensor>,
    /// Inputs, outputs or new tensors. libtorch keeps them, notices in-place changes to them, frees them after
    /// backward, and holds an output without a reference cycle.
    pub saved: Vec<Tensor>,
}

/// Runs `function` forward on `inputs` as one node of the graph; gives its outputs.
///
/// Errors: the forward's own (or its panic), with the function's type name before it.
pub fn apply<F: Function>(function: F, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
    let name = std::any::type_name::<F>();
    let callback = Callback { name, num_inputs: inputs.len(), function: Mutex::new(Box::new(function)) };
    let outputs = check(ffi::apply_function(Box::new(callback), &bridge::list(inputs.iter().copied())))?;
    Ok(bridge::share_all(&outputs))
}

/// What the function that made `output` saved for its backward.
///
/// Errors: `output` was not made by [`apply`], or its graph has already been freed by a backward.
pub fn saved_tensors(output: &Tensor) -> Result<Vec<Tensor>> {
    let saved = check(ffi::saved_by(bridge::borrow(output))).context("listing saved tensors")?;
    Ok(bridge::share_all(&saved))
}

/// Accumulates d`loss`/d`leaf` into every leaf's gradient; `loss` is a scalar.
///
/// Errors keep their type through libtorch: a callback's own error, or [`crate::error::Fault::OutOfMemory`].
pub fn backward(loss: &Tensor) -> Result<()> {
    check(ffi::run_backward(bridge::borrow(loss), bridge::borrow(&Tensor::new()), false))
}

/// As [`backward`], from an `output` of any shape and the `gradient` that arrives at it (same shape).
///
/// `retain_graph` keeps the graph for another backward.
pub fn backward_from(output: &Tensor, gradient: &Tensor, retain_graph: bool) -> Result<()> {
    check(ffi::run_backward(bridge::borrow(output), bridge::borrow(gradient), retain_graph))
}

/// Drops the gradient of `parameter`, so that its memory is free until the next backward (`zero_grad` of PyTorch, whose
/// default is `set_to_none`; tch's writes zeros and keeps the memory).
pub fn release_grad(parameter: &Tensor) -> Result<()> {
    check(ffi::release_grad(bridge::borrow(parameter))).context("releasing a gradient")
}

/// Makes `gradient` (of the same shape, dtype and device) the gradient of `parameter`: the next backward adds to it in place.
pub fn set_grad(parameter: &Tensor, gradient: &Tensor) -> Result<()> {
    check(ffi::set_grad(bridge::borrow(parameter), bridge::borrow(gradient))).context("setting a gradient")
}

/// Copies the second tensor of each pair into the first, in a few launches however many there are.
pub fn copy_all<'a>(pairs: impl IntoIterator<Item = (&'a Tensor, &'a Tensor)>) -> Result<()> {
    let (to, from): (Vec<_>, Vec<_>) = pairs.into_iter().unzip();
    if to.is_empty() {
        return Ok(());
    }
    check(ffi::copy_all(&bridge::list(to), &bridge::list(from))).context("copying tensors")
}

/// Tells autograd that a kernel outside libtorch has changed `tensor` in place, as every in-place operator does: a graph
/// that saved the old values then refuses its backward pass.
pub fn changed_in_place(tensor: &Tensor) -> Result<()> {
    check(ffi::bump_version(bridge::borrow(tensor))).context("bumping a tensor's version")
}

/// A [`Function`] as C++ holds it: owned by the graph's node, freed with it.
pub(super) struct Callback {
    name: &'static str,
    num_inputs: usize,
    // Two threads may run backward on one graph, and a function need not be `Sync`.
    function: Mutex<Box<dyn Function>>,
}

impl Callback {
    pub(super) fn forward(
        &self,
        inputs: &TensorList,
        mut outputs: Pin<&mut TensorList>,
        mut saved: Pin<&mut TensorList>,
    ) -> Box<Outcome> {
        let context = || format!("in the forward of {}", self.name);
        Outcome::of(context, || {
            let mut function = lock(&self.function);
            let forward = function.forward(&bridge::share_all(inputs))?;
            ensure!(!forward.outputs.is_empty(), "gave no output");
            forward.outputs.iter().for_each(|tensor| ffi::push(outputs.as_mut(), bridge::borrow(tensor)));
            forward.saved.iter().for_each(|tensor| ffi::push(saved.as_mut(), bridge::borrow(tensor)));
            Ok(())
        })
    }

    pub(super) fn backward(
        &self,
        saved: &TensorList,
        grad_outputs: &TensorList,
        mut grad_inputs: Pin<&mut TensorList>,
    ) -> Box<Outcome> {
        let context = || format!("in the backward of {}", self.name);
        Outcome::of(context, || {
            let function = lock(&self.function);
            let gradients = function.backward(&bridge::share_all(saved), &bridge::share_defined(grad_outputs))?;
            ensure!(gradients.len() == self.num_inputs, "{} gradients for {} inputs", gradients.len(), self.num_inputs);
            for gradient in gradients {
                ffi::push(grad_inputs.as_mut(), bridge::borrow(&gradient.unwrap_or_default()));
            }
            Ok(())
        })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use anyhow::bail;
    use tch::{Device, Kind};

    use super::*;
    use crate::error::{Fault, fault_of};
    use crate::torch::Generator;
    use crate::torch::random::SEED;

    /// y = a * exp(b), saving an input and the output.
    struct ScaledExp;

    impl Function for ScaledExp {
        fn forward(&mut self, inputs: &[Tensor]) -> Result<Forward> {
            let exp = inputs[1].f_exp()?;
            let y = inputs[0].f_mul(&exp)?;
            Ok(Forward { outputs: vec![y.shallow_clone()], saved: vec![exp, y] })
        }

        fn backward(&self, saved: &[Tensor], grad_outputs: &[Option<Tensor>]) -> Result<Vec<Option<Tensor>>> {
            let dy = grad_outputs[0].as_ref().context("no gradient")?;
            Ok(vec![Some(dy.f_mul(&saved[0])?), Some(dy.f_mul(&saved[1])?)])
        }
    }

    /// The identity, with a backward that is given and a counter that its drop raises.
    struct Identity<B>(B, Arc<AtomicUsize>);

    impl<B: Fn(&[Option<Tensor>]) -> Result<Vec<Option<Tensor>>> + Send + 'static> Function for Identity<B> {
        fn forward(&mut self, inputs: &[Tensor]) -> Result<Forward> {
            let output = inputs[0].f_add_scalar(0)?;
            Ok(Forward { outputs: vec![output.shallow_clone()], saved: vec![inputs[0].shallow_clone(), output] })
        }

        fn backward(&self, _saved: &[Tensor], grad_outputs: &[Option<Tensor>]) -> Result<Vec<Option<Tensor>>> {
            (self.0)(grad_outputs)
        }
    }

    impl<B> Drop for Identity<B> {
        fn drop(&mut self) {
            self.1.fetch_add(1, Ordering::SeqCst);
        }
    }

    fn leaf(shape: &[i64]) -> Tensor {
        Generator::new(Device::Cpu, SEED).unwrap().rand(shape, Kind::Double).unwrap().set_requires_grad(true)
    }

    fn through<B>(x: &Tensor, backward: B) -> Result<Tensor>
    where
        B: Fn(&[Option<Tensor>]) -> Result<Vec<Option<Tensor>>> + Send + 'static,
    {
        Ok(apply(Identity(backward, Arc::default()), &[x])?.remove(0))
    }

    #[test]
    fn gradients_match_central_differences_in_f64() {
        let (a, b) = (leaf(&[3, 2]), leaf(&[3, 2]));
        let weights = leaf(&[3, 2]).detach();
        let loss = |a: &Tensor, b: &Tensor| (&apply(ScaledExp, &[a, b]).unwrap()[0] * &weights).sum(Kind::Double);
        backward(&loss(&a, &b)).unwrap();
        let step = 1e-6;
        for (which, leaf) in [(0, &a), (1, &b)] {
            for i in 0..6 {
                let nudge = Tensor::zeros([6], (Kind::Double, Device::Cpu));
                let _ = nudge.get(i).fill_(step);
                let nudge = nudge.view([3, 2]);
                let at = |sign: f64| {
                    let moved = leaf.detach() + &nudge * sign;
                    let value = if which == 0 { loss(&moved, &b) } else { loss(&a, &moved) };
                    value.double_value(&[])
                };
                let expected = (at(1.0) - at(-1.0)) / (2.0 * step);
                let actual = leaf.grad().view([6]).double_value(&[i]);
                // Central differences err by step^2 and by rounding / step, about 1e-10 each.
                assert!((expected - actual).abs() < 1e-8, "input {which}, element {i}: {expected} and {actual}");
            }
        }
    }

    #[test]
    fn forward_records_no_graph_and_inputs_without_gradient_make_no_node() {
        let x = leaf(&[2]).detach();
        let y = through(&x, |_| bail!("never called")).unwrap();
        assert!(!y.requires_grad());
        let y = tch::no_grad(|| through(&leaf(&[2]), |_| bail!("never called"))).unwrap();
        assert!(!y.requires_grad() && saved_tensors(&y).is_err());
        let y = through(&leaf(&[2]), |_| bail!("never called")).unwrap();
        assert!(y.requires_grad());
        assert!(!saved_tensors(&y).unwrap()[0].is_set_to(&y));
    }

    #[test]
    fn saved_tensors_are_listed_while_the_graph_lives() {
        let (a, b) = (leaf(&[2, 5]), leaf(&[2, 5]));
        let y = apply(ScaledExp, &[&a, &b]).unwrap().remove(0);
        let saved = saved_tensors(&y).unwrap();
        assert_eq!(saved.iter().map(Tensor::size).collect::<Vec<_>>(), [[2, 5], [2, 5]]);
        assert!(saved[1].equal(&y));
        drop(saved);
        backward_from(&y, &y.ones_like(), false).unwrap();
        let error = format!("{:#}", saved_tensors(&y).unwrap_err());
        assert!(error.contains("already been freed"), "{error}");
        let error = format!("{:#}", saved_tensors(&a).unwrap_err());
        assert!(error.contains("no output of a function"), "{error}");
    }

    #[test]
    fn an_error_in_backward_is_returned_with_its_type() {
        let fault = Fault::OutOfMemory { requested_bytes: Some(7), message: "expected".into() };
        let thrown = fault.clone();
        let y = through(&leaf(&[2]), move |_| Err(thrown.clone().into())).unwrap();
        let error = backward(&y.sum(Kind::Double)).unwrap_err();
        assert_eq!(fault_of(&error), Some(fault));
        assert!(format!("{error:#}").starts_with("in the backward of "), "{error:#}");
    }

    #[test]
    fn a_panic_in_backward_is_returned_as_an_error_and_the_engine_still_works() {
        let x = leaf(&[2]);
        let y = through(&x, |_| panic!("index {} out of range", 3)).unwrap();
        let error = format!("{:#}", backward(&y.sum(Kind::Double)).unwrap_err());
        assert!(error.contains("panicked: index 3 out of range"), "{error}");
        backward(&x.sum(Kind::Double)).unwrap();
    }

    #[test]
    fn a_wrong_number_or_shape_of_gradients_is_an_error() {
        let y = through(&leaf(&[2]), |_| Ok(vec![])).unwrap();
        let error = format!("{:#}", backward(&y.sum(Kind::Double)).unwrap_err());
        assert!(error.contains("0 gradients for 1 inputs"), "{error}");
        let y = through(&leaf(&[2]), |_| Ok(vec![Some(Tensor::zeros([3], (Kind::Double, Device::Cpu)))])).unwrap();
        let error = format!("{:#}", backward(&y.sum(Kind::Double)).unwrap_err());
        assert!(error.contains("shape"), "{error}");
    }

    #[test]
    fn libtorchs_messages_have_no_stack_trace() {
        let error = format!("{:#}", backward(&leaf(&[2])).unwrap_err());
        assert!(error.contains("scalar outputs") && !error.contains("frame #"), "{error}");
    }

    #[test]
    fn a_failed_allocation_is_typed_out_of_memory() {
        let y = through(&leaf(&[1]), |_| Ok(vec![Some(Tensor::f_zeros([1 << 57], (Kind::Double, Device::Cpu))?)]));
        let error = backward(&y.unwrap().sum(Kind::Double)).unwrap_err();
        let requested = Some(1 << 60);
        assert!(
            matches!(fault_of(&error), Some(Fault::OutOfMemory { requested_bytes, .. }) if requested_bytes == requested),
            "{error:#}"
        );
        // The same with no callback between: libtorch itself makes the gradient that selecting an element spreads.
        let wide = leaf(&[1]).expand([1 << 57], false);
        let error = backward(&wide.select(0, 5)).unwrap_err();
        assert_eq!(error.downcast_ref::<Fault>(), fault_of(&error).as_ref());
        assert!(matches!(fault_of(&error), Some(Fault::OutOfMemory { .. })), "{error:#}");
    }

    #[test]
    fn the_function_is_freed_after_use_although_it_saved_its_output() {
        let dropped = Arc::new(AtomicUsize::new(0));
        let count = || dropped.load(Ordering::SeqCst);
        let x = leaf(&[2]);
        let function = |_: &[Option<Tensor>]| bail!("never called");
        let y = apply(Identity(function, dropped.clone()), &[&x]).unwrap();
        assert_eq!(count(), 0);
        drop(y);
        assert_eq!(count(), 1);
        let backward_fn = |grads: &[Option<Tensor>]| Ok(vec![grads[0].as_ref().map(Tensor::shallow_clone)]);
        let y = apply(Identity(backward_fn, dropped.clone()), &[&x]).unwrap().remove(0);
        backward(&y.sum(Kind::Double)).unwrap();
        drop(y);
        assert_eq!(count(), 2);
    }

    #[test]
    fn backward_adds_to_a_gradient_that_was_set_and_its_shape_is_checked() {
        let (parameter, gradient) = (leaf(&[2]), Tensor::ones([2], (Kind::Double, Device::Cpu)));
        set_grad(&parameter, &gradient).unwrap();
        backward(&(&parameter * 2.0).sum(Kind::Double)).unwrap();
        assert_eq!(Vec::<f64>::try_from(&gradient).unwrap(), [3.0, 3.0]);
        for other in [gradient.to_kind(Kind::Float), gradient.unsqueeze(0)] {
            let message = format!("{:#}", set_grad(&parameter, &other).unwrap_err());
            assert!(message.contains("setting a gradient: a gradient of"), "{message}");
        }
    }

    #[test]
    fn copy_all_copies_each_tensor_to_its_counterpart() {
        let (from, to) = ([leaf(&[2]), leaf(&[3, 1])], [leaf(&[2]).detach(), leaf(&[3, 1]).detach()]);
        copy_all(to.iter().zip(&from)).unwrap();
        assert!(to.iter().zip(&from).all(|(to, from)| to.equal(from) && !to.requires_grad()));
        copy_all([]).unwrap();
    }
}
