//! The two small networks of the official distributed tests, and any other chain of linear layers, from a blueprint.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Tensor};

use crate::torch::Generator;

/// A parameter of the official toy model that neither trains nor takes part in the forward pass.
pub const NO_GRAD_FIXED_PARAM: &str = "no_grad_fixed_param";

/// A chain of linear layers with ReLU between them, as data.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Blueprint {
    pub name: String,
    /// Whether the network also holds [`NO_GRAD_FIXED_PARAM`], `[2, 2]` on every rank.
    pub fixed_parameter: bool,
    pub layers: Vec<Layer>,
}

/// `y = x W^T + b` with W of shape (d_out, d_in).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Layer {
    /// PyTorch's module path: the layer's parameters are `<name>.weight` and `<name>.bias`.
    pub name: String,
    pub d_in: i64,
    pub d_out: i64,
    pub weight: Weight,
    pub bias: Bias,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Weight {
    Trained,
    Frozen,
    /// Shares the weight of an earlier layer of the same shape.
    TiedTo(String),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Bias {
    None,
    Trained,
    Frozen,
}

impl Blueprint {
    /// `ToyModel` of the official tests: 10 -> 10 -> 50 -> 5, the middle layer's bias frozen, 850 values trained.
    pub fn toy() -> Self {
        let middle = Layer { bias: Bias::Frozen, ..Layer::trained("fc2.fc", 10, 50) };
        let layers = vec![Layer::trained("fc1", 10, 10), middle, Layer::trained("fc3", 50, 5)];
        Self { name: "toy".into(), fixed_parameter: true, layers }
    }

    /// `ToyModelWithTiedWeights` of the official tests: 10 -> 10 -> 50 -> 10 -> 50 -> 5, `fc4.weight` being
    /// `fc2.weight`, 1,350 values trained.
    pub fn tied() -> Self {
        let fc4 = Layer { weight: Weight::TiedTo("fc2".into()), ..Layer::trained("fc4", 10, 50) };
        let layers = vec![
            Layer::trained("fc1", 10, 10),
            Layer::trained("fc2", 10, 50),
            Layer::trained("fc3", 50, 10),
            fc4,
            Layer::trained("fc5", 50, 5),
        ];
        Self { name: "tied".into(), fixed_parameter: false, layers }
    }

    /// The blueprint of that name among the official two.
    pub fn by_name(name: &str) -> Result<Self> {
        [Self::toy(), Self::tied()]
            .into_iter()
            .find(|blueprint| blueprint.name == name)
            .with_context(|| format!("no model {name:?}: it is \"toy\" or \"tied\""))
    }

    pub fn d_in(&self) -> i64 {
        self.layers.first().map_or(0, |layer| layer.d_in)
    }

    pub fn d_out(&self) -> i64 {
        self.layers.last().map_or(0, |layer| layer.d_out)
    }
}

impl Layer {
    /// A layer whose weight trains and that has no bias.
    pub fn trained(name: impl Into<String>, d_in: i64, d_out: i64) -> Self {
        Self { name: name.into(), d_in, d_out, weight: Weight::Trained, bias: Bias::None }
    }
}

/// A network built from a [`Blueprint`], float32.
pub struct Toy {
    blueprint: Blueprint,
    /// Each tensor once, in the order and under the names of PyTorch's `named_parameters`.
    parameters: Vec<(String, Tensor)>,
}

impl Toy {
    /// On the generator's device. Draws the initial values as `torch.nn.Linear` does: uniform within 1/sqrt(d_in).
    ///
    /// # Errors
    /// When layers do not fit together or a tied weight's layer does not exist.
    pub fn new(blueprint: &Blueprint, generator: &Generator) -> Result<Self> {
        let mut parameters: Vec<(String, Tensor)> = Vec::new();
        // A module's own parameters come before its children's.
        if blueprint.fixed_parameter {
            let fixed = Tensor::f_from_slice(&[2f32, 2.0])?.f_to_device(generator.device())?;
            parameters.push((NO_GRAD_FIXED_PARAM.into(), fixed));
        }
        for pair in blueprint.layers.windows(2) {
            let (from, to) = (&pair[0], &pair[1]);
            ensure!(
                from.d_out == to.d_in,
                "{} gives {} values, but {} takes {}",
                from.name,
                from.d_out,
                to.name,
                to.d_in
            );
        }
        for layer in &blueprint.layers {
            let bound = 1.0 / (layer.d_in as f64).sqrt();
            let mut draw = |name: &str, shape: &[i64], trains: bool| -> Result<()> {
                let values = generator.uniform(-bound, bound, shape, Kind::Float)?;
                parameters.push((format!("{}.{name}", layer.name), values.f_set_requires_grad(trains)?));
                Ok(())
            };
            match &layer.weight {
                Weight::TiedTo(_) => {}
                weight => draw("weight", &[layer.d_out, layer.d_in], *weight == Weight::Trained)?,
            }
            if layer.bias != Bias::None {
                draw("bias", &[layer.d_out], layer.bias == Bias::Trained)?;
            }
        }
        let network = Self { blueprint: blueprint.clone(), parameters };
        for layer in &network.blueprint.layers {
            let (weight, expected) = (network.weight_of(layer)?.size(), [layer.d_out, layer.d_in]);
            ensure!(weight == expected, "{}.weight is tied to {weight:?}, not {expected:?}", layer.name);
        }
        Ok(network)
    }

    /// The same network on `device` with tensors of its own; what is tied here is tied there.
    pub fn deep_copy(&self, device: Device) -> Result<Self> {
        let copy = |(name, tensor): &(String, Tensor)| -> Result<(String, Tensor)> {
            let values = tensor.f_detach()?.f_to_device(device)?.copy();
            Ok((name.clone(), values.f_set_requires_grad(tensor.requires_grad())?))
        };
        let parameters = self.parameters.iter().map(copy).collect::<Result<_>>()?;
        Ok(Self { blueprint: self.blueprint.clone(), parameters })
    }

    /// Each parameter once, trained and frozen, as PyTorch's `named_parameters` lists them.
    pub fn named_parameters(&self) -> &[(String, Tensor)] {
        &self.parameters
    }

    /// Every name with its tensor, a tied one under each of its names, as PyTorch's `state_dict` lists them.
    pub fn state_dict(&self) -> Result<Vec<(String, Tensor)>> {
        let mut state: Vec<_> = self.parameters.iter().map(|(name, t)| (name.clone(), t.shallow_clone())).collect();
        for layer in self.blueprint.layers.iter().filter(|layer| matches!(layer.weight, Weight::TiedTo(_))) {
            state.push((format!("{}.weight", layer.name), self.weight_of(layer)?.shallow_clone()));
        }
        Ok(state)
    }

    /// Takes over the values of every parameter from `values`, by name.
    ///
    /// # Errors
    /// Names a parameter that is missing or of another shape.
    pub fn load(&self, values: &BTreeMap<String, Tensor>) -> Result<()> {
        for (name, parameter) in &self.parameters {
            let value = values.get(name).with_context(|| format!("no values for parameter {name}"))?;
            let (has, needs) = (value.size(), parameter.size());
            ensure!(has == needs, "{name} has shape {has:?}, but the {} model's is {needs:?}", self.blueprint.name);
            parameter.f_detach()?.f_copy_(value)?;
        }
        Ok(())
    }

    /// (rows, d_in) to (rows, d_out).
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let mut x = x.shallow_clone();
        for (i, layer) in self.blueprint.layers.iter().enumerate() {
            if i > 0 {
                x = x.f_relu()?;
            }
            let bias = (layer.bias != Bias::None).then(|| self.parameter(&layer.name, "bias")).transpose()?;
            x = x.f_linear(self.weight_of(layer)?, bias)?;
        }
        Ok(x)
    }

    /// Sets all gradients to zero.
    pub fn zero_grad(&self) {
        self.parameters.iter().for_each(|(_, tensor)| tensor.shallow_clone().zero_grad());
    }

    fn weight_of(&self, layer: &Layer) -> Result<&Tensor> {
        match &layer.weight {
            Weight::TiedTo(other) => self.parameter(other, "weight"),
            _ => self.parameter(&layer.name, "weight"),
        }
    }

    fn parameter(&self, layer: &str, name: &str) -> Result<&Tensor> {
        let full = format!("{layer}.{name}");
        let found = self.parameters.iter().find(|(name, _)| *name == full);
        found.map(|(_, tensor)| tensor).with_context(|| format!("no parameter {full}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::torch::random::SEED;

    fn network(blueprint: &Blueprint) -> Result<Toy> {
        Toy::new(blueprint, &Generator::new(Device::Cpu, SEED)?)
    }

    fn names(network: &Toy) -> Vec<&str> {
        network.named_parameters().iter().map(|(name, _)| name.as_str()).collect()
    }

    /// How many values train, and how many names the state has.
    fn counts(network: &Toy) -> (usize, usize) {
        let trained = network.named_parameters().iter().filter(|(_, tensor)| tensor.requires_grad());
        (trained.map(|(_, tensor)| tensor.numel()).sum(), network.state_dict().unwrap().len())
    }

    #[test]
    fn the_official_models_have_their_parameters_in_order() {
        let toy = network(&Blueprint::toy()).unwrap();
        assert_eq!(names(&toy), ["no_grad_fixed_param", "fc1.weight", "fc2.fc.weight", "fc2.fc.bias", "fc3.weight"]);
        assert_eq!(counts(&toy), (850, 5));
        let tied = network(&Blueprint::tied()).unwrap();
        assert_eq!(names(&tied), ["fc1.weight", "fc2.weight", "fc3.weight", "fc5.weight"]);
        assert_eq!(counts(&tied), (1350, 5));
    }

    #[test]
    fn a_deep_copy_shares_nothing_with_its_original_and_keeps_its_ties() {
        let tied = network(&Blueprint::tied()).unwrap();
        let copy = tied.deep_copy(Device::Cpu).unwrap();
        let (_, weight) = &copy.named_parameters()[1];
        let _ = weight.detach().fill_(0.0);
        assert!(tied.named_parameters()[1].1.abs().sum(Kind::Float).double_value(&[]) > 0.0);
        let (name, tied_weight) = &copy.state_dict().unwrap()[4];
        assert_eq!((name.as_str(), tied_weight.data_ptr()), ("fc4.weight", weight.data_ptr()));
        assert!(weight.requires_grad());
    }

    #[test]
    fn the_gradient_of_a_tied_weight_is_the_sum_of_those_of_two_untied_ones() {
        let mut untied = Blueprint::tied();
        untied.layers[3].weight = Weight::Trained;
        let (tied, untied) = (network(&Blueprint::tied()).unwrap(), network(&untied).unwrap());
        untied.load(&tied.state_dict().unwrap().into_iter().collect()).unwrap();
        let x = Generator::new(Device::Cpu, SEED).unwrap().randn(&[4, 10], Kind::Float).unwrap();
        let gradient = |network: &Toy, i: usize| network.named_parameters()[i].1.grad();
        for network in [&tied, &untied] {
            network.forward(&x).unwrap().sum(Kind::Float).backward();
        }
        let expected = gradient(&untied, 1) + gradient(&untied, 3);
        assert!(gradient(&tied, 1).allclose(&expected, 1e-5, 1e-8, false));
        tied.zero_grad();
        assert_eq!(gradient(&tied, 1).abs().sum(Kind::Float).double_value(&[]), 0.0);
    }

    #[test]
    fn blueprints_and_values_that_do_not_fit_are_refused_by_name() {
        let mut blueprint = Blueprint::toy();
        blueprint.layers[2].d_in = 40;
        let error = network(&blueprint).err().unwrap().to_string();
        assert!(error.contains("fc2.fc gives 50 values, but fc3 takes 40"), "{error}");
        let mut blueprint = Blueprint::tied();
        blueprint.layers[3].weight = Weight::TiedTo("fc3".into());
        assert!(network(&blueprint).err().unwrap().to_string().contains("fc4.weight is tied to"));
        let toy = network(&Blueprint::toy()).unwrap();
        let error = toy.load(&BTreeMap::new()).unwrap_err().to_string();
        assert!(error.contains("no values for parameter no_grad_fixed_param"), "{error}");
    }
}
