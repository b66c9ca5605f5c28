//! Starts communication while backward still runs: a unit of parameters as soon as all its gradients are ready, and
//! units strictly in order.
//!
//! Collectives are paired across ranks only by their order, and gradients may become ready in another order on each rank.
//! So a unit that is ready early waits for the units before it.

use std::sync::{Arc, Mutex};

use anyhow::{Context as _, Result, ensure};
use tch::Tensor;

use super::{DataParallel, shared};
use crate::collective::Work;
use crate::torch::hooks::{HookHandle, post_accumulate_grad};
use crate::torch::lock;

/// Watches the parameters of all units from its construction until it is dropped.
pub struct OrderedLaunch {
    state: Arc<Mutex<State>>,
    _hooks: Vec<HookHandle>,
}

struct State {
    units: Vec<Unit>,
    /// Starts the communication of the unit of that index.
    launch: Box<dyn FnMut(usize) -> Result<Box<dyn Work>> + Send>,
    /// All units before this one have been started.
    next: usize,
    works: Vec<Box<dyn Work>>,
    enabled: bool,
}

struct Unit {
    names: Vec<String>,
    fired: Vec<bool>,
}

impl OrderedLaunch {
    /// A unit is its parameters, all of which train. `launch` starts the communication of a unit, given with its index.
    pub fn new<U: AsRef<[(String, Tensor)]> + Send + 'static>(
        units: Vec<U>,
        mut launch: impl FnMut(usize, &U) -> Result<Box<dyn Work>> + Send + 'static,
    ) -> Result<Self> {
        let watched: Vec<_> = units.iter().map(|unit| shared(unit.as_ref())).collect();
        let unit = |parameters: &Vec<(String, Tensor)>| Unit {
            names: parameters.iter().map(|(name, _)| name.clone()).collect(),
            fired: vec![false; parameters.len()],
        };
        let state = Arc::new(Mutex::new(State {
            units: watched.iter().map(unit).collect(),
            launch: Box::new(move |unit| launch(unit, &units[unit])),
            next: 0,
            works: Vec::new(),
            enabled: true,
        }));
        let mut hooks = Vec::new();
        for (unit, parameters) in watched.iter().enumerate() {
            for (member, (name, parameter)) in parameters.iter().enumerate() {
                let state = state.clone();
                let hook = post_accumulate_grad(parameter, move |_| lock(&state).fired(unit, member));
                hooks.push(hook.with_context(|| format!("watching the gradient of {name}"))?);
            }
        }
        Ok(Self { state, _hooks: hooks })
    }
}

impl DataParallel for OrderedLaunch {
    /// Starts the units that no hook has started, then waits for all units: on CUDA the stream waits and not this
    /// thread. Hooks start no unit in passes under `no_sync`, and none with a parameter that the last pass did not use.
    ///
    /// # Errors
    /// Names the unit's parameters; `launch`'s error, for instance of a missing gradient.
    fn finish_gradient_synchronization(&mut self) -> Result<()> {
        let mut state = lock(&self.state);
        while state.next < state.units.len() {
            state.launch_next()?;
        }
        let works = std::mem::take(&mut state.works);
        state.next = 0;
        for (unit, work) in state.units.iter_mut().zip(works) {
            unit.fired.fill(false);
            work.wait().with_context(|| format!("averaging the gradients of {}", unit.description()))?;
        }
        Ok(())
    }

    fn set_gradient_synchronization(&mut self, enabled: bool) {
        lock(&self.state).enabled = enabled;
    }
}

impl State {
    fn fired(&mut self, unit: usize, member: usize) -> Result<()> {
        ensure!(
            unit >= self.next,
            "backward has added to the gradient of {} while it was being averaged: call \
             finish_gradient_synchronization after each backward pass, or run all passes but the last one under no_sync",
            self.units[unit].names[member]
        );
        if !self.enabled {
            return Ok(());
        }
        self.units[unit].fired[member] = true;
        while self.units.get(self.next).is_some_and(|unit| unit.fired.iter().all(|&fired| fired)) {
            self.launch_next()?;
        }
        Ok(())
    }

    fn launch_next(&mut self) -> Result<()> {
        let description = || format!("starting to average the gradients of {}", self.units[self.next].description());
        let work = (self.launch)(self.next).with_context(description)?;
        self.works.push(work);
        self.next += 1;
        Ok(())
    }
}

impl Unit {
    fn description(&self) -> String {
        match self.names.as_slice() {
            [] => "no parameter".into(),
            [only] => only.clone(),
            [first, .., last] => format!("{first} to {last} ({} parameters)", self.names.len()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, channel};

    use tch::{Device, Kind};

    use super::*;
    use crate::torch::autograd::backward;

    struct Done;

    impl Work for Done {
        fn wait(self: Box<Self>) -> Result<()> {
            Ok(())
        }
    }

    fn leaf(name: &str) -> (String, Tensor) {
        (name.into(), Tensor::ones([2], (Kind::Float, Device::Cpu)).set_requires_grad(true))
    }

    /// Units of `parameters` by index, and the units as they are launched.
    fn watched(parameters: &[(String, Tensor)], units: &[&[usize]]) -> (OrderedLaunch, Receiver<usize>) {
        let (sender, launched) = channel();
        let member = |&i: &usize| (parameters[i].0.clone(), parameters[i].1.shallow_clone());
        let units: Vec<Vec<_>> = units.iter().map(|unit| unit.iter().map(member).collect()).collect();
        let launch = move |unit, _: &Vec<_>| {
            sender.send(unit)?;
            Ok(Box::new(Done) as Box<dyn Work>)
        };
        (OrderedLaunch::new(units, launch).unwrap(), launched)
    }

    fn use_of(parameters: &[&(String, Tensor)]) {
        let sum = parameters.iter().map(|(_, parameter)| parameter.sum(Kind::Float)).reduce(|a, b| a + b).unwrap();
        backward(&sum).unwrap();
    }

    #[test]
    fn a_unit_starts_when_it_and_all_units_before_it_are_complete() {
        let parameters = [leaf("a"), leaf("b"), leaf("c")];
        let (mut ordered, launched) = watched(&parameters, &[&[0, 1], &[2]]);
        for _ in 0..2 {
            let seen = || launched.try_iter().collect::<Vec<_>>();
            use_of(&[&parameters[2]]);
            assert_eq!(seen(), [0usize; 0]);
            use_of(&[&parameters[0]]);
            assert_eq!(seen(), [0usize; 0]);
            use_of(&[&parameters[1]]);
            assert_eq!(seen(), [0, 1]);
            ordered.finish_gradient_synchronization().unwrap();
            assert_eq!(seen(), [0usize; 0]);
        }
    }

    #[test]
    fn a_disabled_pass_starts_nothing_and_finish_starts_the_remaining_units() {
        let parameters = [leaf("a"), leaf("b")];
        let (mut ordered, launched) = watched(&parameters, &[&[0], &[1]]);
        ordered.set_gradient_synchronization(false);
        use_of(&[&parameters[0], &parameters[1]]);
        assert_eq!(launched.try_iter().count(), 0);
        ordered.set_gradient_synchronization(true);
        use_of(&[&parameters[0]]);
        assert_eq!(launched.try_iter().collect::<Vec<_>>(), [0]);
        ordered.finish_gradient_synchronization().unwrap();
        assert_eq!(launched.try_iter().collect::<Vec<_>>(), [1]);
    }

    #[test]
    fn a_second_backward_pass_before_finish_is_an_error_that_names_the_parameter() {
        let parameters = [leaf("a"), leaf("b")];
        let (mut ordered, _launched) = watched(&parameters, &[&[0], &[1]]);
        for enabled in [true, false] {
            use_of(&[&parameters[0]]);
            ordered.set_gradient_synchronization(enabled);
            let message = format!("{:#}", backward(&parameters[0].1.sum(Kind::Float)).unwrap_err());
            assert!(message.contains("the gradient of a while it was being averaged") && message.contains("no_sync"));
            ordered.set_gradient_synchronization(true);
            ordered.finish_gradient_synchronization().unwrap();
        }
    }

    #[test]
    fn dropping_it_removes_its_hooks() {
        let parameters = [leaf("a")];
        let (ordered, launched) = watched(&parameters, &[&[0]]);
        drop(ordered);
        use_of(&[&parameters[0]]);
        assert_eq!(launched.try_iter().count(), 0);
    }
}
