//! The fused step in the emulator against autograd, on the processor.

use super::*;
use crate::attention::ImplementationName;
use crate::model::loss::cross_entropy;
use crate::model::optim::{AdamW, Optimizer as _, zero_grad};
use crate::torch::autocast::autocast;
use crate::torch::autograd::backward;
use crate::torch::random::SEED;
use crate::torch::{Generator, autograd};
use tch::Device;

const CONFIG: Config = Config {
    vocab_size: 50,
    context_length: 7,
    d_model: 48,
    num_layers: 2,
    num_heads: 3,
    d_ff: 72,
    rope_theta: 10_000.0,
};
const BATCH: i64 = 3;

fn model(config: &Config) -> Transformer {
    Transformer::new(config, ImplementationName::Naive, &Generator::new(Device::Cpu, SEED).unwrap()).unwrap()
}

fn tokens(config: &Config, seed: i64) -> Tensor {
    let generator = Generator::new(Device::Cpu, seed).unwrap();
    generator.randint(0, config.vocab_size, &[BATCH, config.context_length], Kind::Int64).unwrap()
}

/// The loss of an eager forward pass, and every parameter's gradient, in float32 or under bfloat16 autocast.
fn eager(model: &Transformer, precision: Precision, tokens: &Tensor, targets: &Tensor) -> (f64, Vec<Tensor>) {
    zero_grad(model.parameters()).unwrap();
    let loss = || cross_entropy(&model.forward(tokens)?, targets);
    let loss = match precision {
        Precision::Float32 => loss(),
        Precision::Bfloat16 => autocast(Device::Cpu, Kind::BFloat16, loss),
    };
    let loss = loss.unwrap();
    backward(&loss).unwrap();
    let gradients = model.parameters().iter().map(|(_, parameter)| parameter.grad().copy()).collect();
    zero_grad(model.parameters()).unwrap();
    (loss.double_value(&[]), gradients)
}

/// The relative Frobenius norm of a - b.
fn error(a: &Tensor, b: &Tensor) -> f64 {
    let [a, b] = [a, b].map(|t| t.to_kind(Kind::Double));
    ((&a - &b).norm() / b.norm()).double_value(&[])
}

fn configs() -> [Config; 4] {
    [
        CONFIG,
        // A vocabulary of whole pieces, heads of 8.
        Config { vocab_size: 64, context_length: 2, d_model: 16, num_layers: 1, num_heads: 2, d_ff: 8, ..CONFIG },
        // A norm whose threads take two pieces of a row each.
        Config { vocab_size: 9, context_length: 2, d_model: 4104, num_layers: 1, num_heads: 9, d_ff: 8, ..CONFIG },
        Config { num_layers: 3, context_length: 40, ..CONFIG },
    ]
}

#[test]
fn loss_and_gradients_in_float32_are_those_of_autograd() {
    for config in configs() {
        let mut model = model(&config);
        let (tokens, targets) = (tokens(&config, 1), tokens(&config, 2));
        let (loss, gradients) = eager(&model, Precision::Float32, &tokens, &targets);
        let step = FusedStep::new(&mut model, BATCH, Precision::Float32, Gradients::Kept, AdamWOptions::default()).unwrap();
        let fused = step.differentiate(&tokens, &targets).unwrap().double_value(&[]);
        assert!((fused / loss - 1.0).abs() < 1e-6, "{config:?}: loss {fused}, autograd's {loss}");
        for ((name, gradient), expected) in step.gradients().unwrap().iter().zip(&gradients) {
            let error = error(gradient, expected);
            assert!(error < 2e-5, "{config:?}: {name} is off by {error:.1e}");
        }
    }
}

/// Against float64, the fused step may be off by no more than 1.1 times what the eager step under autocast is.
#[test]
fn bfloat16_gradients_are_as_near_to_float64_as_those_of_autocast() {
    for config in configs() {
        let mut model = model(&config);
        let (tokens, targets) = (tokens(&config, 1), tokens(&config, 2));
        let (_, exact) = eager(&model, Precision::Float32, &tokens, &targets);
        let (_, autocast) = eager(&model, Precision::Bfloat16, &tokens, &targets);
        let step = FusedStep::new(&mut model, BATCH, Precision::Bfloat16, Gradients::Kept, AdamWOptions::default()).unwrap();
        let _loss = step.differentiate(&tokens, &targets).unwrap();
        let fused = step.gradients().unwrap();
        let total = |gradients: Vec<&Tensor>| {
            let squares = gradients.iter().zip(&exact).map(|(a, b)| {
                let [a, b] = [*a, b].map(|t| t.to_kind(Kind::Double));
                (a - b).square().sum(Kind::Double).double_value(&[])
            });
            squares.sum::<f64>().sqrt()
        };
        let (ours, theirs) = (total(fused.iter().map(|(_, g)| g).collect()), total(autocast.iter().collect()));
        println!("{config:?}: {ours:.3e} against {theirs:.3e}");
        for ((name, gradient), (exact, autocast)) in fused.iter().zip(exact.iter().zip(&autocast)) {
            let (ours, theirs) = (error(gradient, exact), error(autocast, exact));
            println!("  {name}: {ours:.2e} against {theirs:.2e}");
        }
        assert!(ours <= 1.1 * theirs, "{config:?}: {ours:.3e} against {theirs:.3e}");
    }
}

#[test]
fn steps_train_as_adamw_on_autograds_gradients() {
    let (mut fused, eager_model) = (model(&CONFIG), model(&CONFIG));
    let options = AdamWOptions { lr: 1e-2, weight_decay: 0.1, ..AdamWOptions::default() };
    let step = FusedStep::new(&mut fused, BATCH, Precision::Float32, Gradients::Kept, options).unwrap();
    let mut adamw = AdamW::new(options).unwrap();
    for i in 0..4 {
        let (tokens, targets) = (tokens(&CONFIG, i), tokens(&CONFIG, i + 100));
        let loss = step.train(&fused, &tokens, &targets).unwrap().double_value(&[]);
        let expected = cross_entropy(&eager_model.forward(&tokens).unwrap(), &targets).unwrap();
        backward(&expected).unwrap();
        adamw.step(eager_model.parameters()).unwrap();
        zero_grad(eager_model.parameters()).unwrap();
        let expected = expected.double_value(&[]);
        assert!((loss / expected - 1.0).abs() < 1e-5, "step {i}: {loss} and {expected}");
    }
    for ((name, parameter), (_, expected)) in fused.parameters().iter().zip(eager_model.parameters()) {
        // Where a gradient is nearly zero, the sign of its rounding error decides the step.
        let error = error(parameter, expected);
        assert!(error < 1e-3, "{name} is off by {error:.1e}");
    }
}

#[test]
fn a_step_repeats_in_every_bit_and_its_copies_are_the_rounded_weights() {
    let run = || {
        let mut model = model(&CONFIG);
        let step = FusedStep::new(&mut model, BATCH, Precision::Bfloat16, Gradients::Kept, AdamWOptions::default()).unwrap();
        for i in 0..3 {
            let _loss = step.train(&model, &tokens(&CONFIG, i), &tokens(&CONFIG, i + 7)).unwrap();
        }
        let layer = &step.weights.layers[1];
        let of = |name: &str| &model.parameters().iter().find(|(n, _)| n == &format!("layers.1.{name}.weight")).unwrap().1;
        let copied = |copy: &Tensor, of: &Tensor| assert_eq!(*copy, of.to_kind(Kind::BFloat16));
        let d = CONFIG.d_model;
        copied(&layer.qkv.narrow(0, d, d), of("attn.k_proj"));
        copied(&layer.output, of("attn.output_proj"));
        copied(&layer.gate_up.narrow(0, CONFIG.d_ff, CONFIG.d_ff), of("ffn.w3"));
        copied(&layer.down, of("ffn.w2"));
        model.parameters().iter().map(|(_, parameter)| parameter.detach().copy()).collect::<Vec<_>>()
    };
    assert_eq!(run(), run());
}

#[test]
fn parameters_keep_their_names_values_and_order_and_can_be_loaded() {
    let mut model = model(&CONFIG);
    let before: Vec<_> = model.parameters().iter().map(|(name, value)| (name.clone(), value.detach().copy())).collect();
    let step = FusedStep::new(&mut model, BATCH, Precision::Bfloat16, Gradients::Kept, AdamWOptions::default()).unwrap();
    let after: Vec<_> = model.parameters().iter().map(|(name, value)| (name.clone(), value.detach().copy())).collect();
    assert_eq!(before, after);
    let (tokens, targets) = (tokens(&CONFIG, 1), tokens(&CONFIG, 2));
    let loss = |step: &FusedStep| step.differentiate(&tokens, &targets).unwrap().double_value(&[]);
    let first = loss(&step);
    let halved = |name: &str| if name.contains("proj") { 0.5 } else { 1.0 };
    model.load(&before.iter().map(|(name, value)| (name.clone(), value * halved(name))).collect()).unwrap();
    assert_eq!(loss(&step), first, "the copies are those of before");
    step.refresh().unwrap();
    assert_ne!(loss(&step), first);
}

#[test]
fn a_saved_parameter_that_a_step_changed_is_noticed() {
    let mut model = model(&CONFIG);
    let step = FusedStep::new(&mut model, BATCH, Precision::Float32, Gradients::Kept, AdamWOptions::default()).unwrap();
    let (tokens, targets) = (tokens(&CONFIG, 1), tokens(&CONFIG, 2));
    let stale = cross_entropy(&model.forward(&tokens).unwrap(), &targets).unwrap();
    let _loss = step.train(&model, &tokens, &targets).unwrap();
    let error = format!("{:#}", autograd::backward(&stale).unwrap_err());
    assert!(error.contains("modified by an inplace operation"), "{error}");
}

#[test]
fn what_a_fused_step_does_not_take_is_refused() {
    let refusal = |config: Config, attention| {
        let generator = Generator::new(Device::Cpu, SEED).unwrap();
        let mut model = Transformer::new(&config, attention, &generator).unwrap();
        let step = FusedStep::new(&mut model, BATCH, Precision::Float32, Gradients::Kept, AdamWOptions::default());
        format!("{:#}", step.err().unwrap())
    };
    let narrow = Config { d_model: 36, ..CONFIG };
    assert!(refusal(narrow, ImplementationName::Naive).contains("d_model / num_heads is 12"));
    assert!(refusal(Config { d_ff: 70, ..CONFIG }, ImplementationName::Naive).contains("d_ff is 70"));

    let mut model = model(&CONFIG);
    let step = FusedStep::new(&mut model, BATCH, Precision::Float32, Gradients::Kept, AdamWOptions::default()).unwrap();
    let right = tokens(&CONFIG, 1);
    for wrong in [right.narrow(0, 0, 2), right.to_kind(Kind::Int), right.narrow(1, 0, 3)] {
        let error = step.differentiate(&wrong, &right).unwrap_err().to_string();
        assert!(error.contains("tokens are") && error.contains("[3, 7]"), "{error}");
    }
}
