//! What a fused step promises beside its results, which `benchmarking_script`'s check compares with autograd's.

use super::packed::Part;
use super::*;
use crate::attention::ImplementationName;
use crate::model::loss::cross_entropy;
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

#[test]
fn a_step_repeats_in_every_bit_and_its_copies_are_the_rounded_weights() {
    let run = || {
        let mut model = model(&CONFIG);
        let step =
            FusedStep::new(&mut model, BATCH, Precision::Bfloat16, Gradients::Kept, AdamWOptions::default()).unwrap();
        for i in 0..3 {
            let _loss = step.train(&model, &tokens(&CONFIG, i), &tokens(&CONFIG, i + 7)).unwrap();
        }
        let layer = &step.weights.layers[1];
        let of =
            |name: &str| &model.parameters().iter().find(|(n, _)| n == &format!("layers.1.{name}.weight")).unwrap().1;
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
    let step =
        FusedStep::new(&mut model, BATCH, Precision::Bfloat16, Gradients::Kept, AdamWOptions::default()).unwrap();
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
fn a_ranks_moments_are_those_of_its_shares_end_to_end() {
    let (layer, head, others) = (19_584, 2400, 2400 + 5 * 48);
    for (ranks, shares) in [
        (1, vec![2 * layer, head, others]),
        (2, vec![layer / 2, layer / 2, head / 2, others / 2]),
        (5, vec![2 * layer, head / 5, others / 5]),
    ] {
        let (mut model, shard) = (model(&CONFIG), Shard { rank: ranks - 1, ranks });
        let step = FusedStep::sharded(&mut model, BATCH, Precision::Bfloat16, shard, AdamWOptions::default()).unwrap();
        let parts = [Part::Layers { first: 0, end: 2 }, Part::Head, Part::EmbeddingAndGains];
        let stepped: Vec<_> = parts.into_iter().flat_map(|part| step.packed.stepped(part).unwrap()).collect();
        let sizes = |of: fn(&kernels::Packed) -> &Tensor| stepped.iter().map(|s| of(s).size()[0]).collect::<Vec<_>>();
        assert_eq!(sizes(|s| &s.m), shares);
        assert_eq!([sizes(|s| &s.p), sizes(|s| &s.g), sizes(|s| &s.v)], [shares.clone(), shares.clone(), shares]);
        let addresses: Vec<_> = stepped.iter().map(|s| s.m.data_ptr() as usize).collect();
        for (two, s) in addresses.windows(2).zip(&stepped) {
            assert_eq!(two[1] - two[0], 4 * s.m.numel());
        }
        assert_eq!(step.packed.is_sharded(), ranks > 1);
    }
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
