//! Checks of the model, its loss and its optimizer before they are timed.

use anyhow::{Context as _, Result, ensure};
use tch::{Device, Kind, Tensor};

use crate::attention::ImplementationName;
use crate::bench::training_step::captured::CapturedStep;
use crate::bench::training_step::eager::StepBench;
use crate::bench::training_step::{Execution, Params, Row, StepPass, measure_on};
use crate::checks::golden;
use crate::error::{Fault, fault_of};
use crate::harness::problem::Verdict;
use crate::model::optim::{AdamW, AdamWOptions, Optimizer as _, zero_grad};
use crate::model::sizes::{TABLE_1, VOCAB_SIZE};
use crate::model::{Config, Precision, SizeName, Transformer, loss::cross_entropy};
use crate::torch;
use crate::torch::Generator;
use crate::torch::autograd::backward;
use crate::torch::graph::on_side_stream;
use crate::torch::random::SEED;

/// Two layers of four heads: the shape of the golden case.
const SMALL: Config =
    Config { vocab_size: 50, context_length: 16, d_model: 32, num_layers: 2, num_heads: 4, d_ff: 64, rope_theta: 1e4 };

/// The published totals of Table 1 at a vocabulary of 10,000, and the sum over a built model against the formula.
pub fn parameter_counts() -> Result<Verdict> {
    let published = [128_625_408, 423_183_360, 969_411_840, 1_998_235_200, 3_406_809_600];
    for (size, published) in TABLE_1.iter().zip(published) {
        let config = Config::of_size(size, VOCAB_SIZE, 128);
        let listed: i64 = config.parameter_shapes().map(|(_, shape)| shape.iter().product::<i64>()).sum();
        let formula = config.num_parameters();
        ensure!(formula == published, "{}: {formula} parameters by the formula, {published} published", size.name);
        ensure!(listed as u64 == published, "{}: {listed} parameters in the list, {published} published", size.name);
    }
    let built =
        model(ImplementationName::Naive)?.parameters().iter().map(|(_, value)| value.numel() as u64).sum::<u64>();
    let formula = SMALL.num_parameters();
    ensure!(built == formula, "a built model has {built} parameters, the formula says {formula}");
    Verdict::passed(format!("five published totals, and {built} parameters built"))
}

/// The names and their order decide what a checkpoint, a gradient bucket and an optimizer shard hold.
pub fn parameter_names_and_order() -> Result<Verdict> {
    let mut expected = vec!["token_embeddings.weight".to_string()];
    for i in 0..SMALL.num_layers {
        let parts = "attn.q_proj attn.k_proj attn.v_proj attn.output_proj ffn.w1 ffn.w2 ffn.w3 ln1 ln2";
        expected.extend(parts.split(' ').map(|part| format!("layers.{i}.{part}.weight")));
    }
    expected.extend(["ln_final.weight", "lm_head.weight"].map(String::from));
    let model = model(ImplementationName::Naive)?;
    let names: Vec<_> = model.parameters().iter().map(|(name, _)| name.clone()).collect();
    ensure!(names == expected, "the parameters are {names:?}, the reference's {expected:?}");
    let trained = model.parameters().iter().all(|(_, value)| value.requires_grad() && value.is_leaf());
    ensure!(trained, "a parameter is not a leaf that requires a gradient");
    Verdict::passed(format!("{} tensors", names.len()))
}

/// The golden case made by PyTorch's own operators in float64.
pub fn logits_loss_and_gradients() -> Result<Verdict> {
    golden::check(&[("transformer", include_bytes!("../../../suites/cases/transformer.safetensors"))], golden::run)
}

pub fn norm_and_rotary_positions() -> Result<Verdict> {
    let cases: [(&str, &[u8]); 3] = [
        ("rmsnorm", include_bytes!("../../../suites/cases/rmsnorm.safetensors")),
        ("rmsnorm_bfloat16", include_bytes!("../../../suites/cases/rmsnorm_bfloat16.safetensors")),
        ("rope", include_bytes!("../../../suites/cases/rope.safetensors")),
    ];
    golden::check(&cases, golden::run)
}

/// The golden cases made by `torch.optim.AdamW`.
pub fn adamw_over_many_steps() -> Result<Verdict> {
    let cases: [(&str, &[u8]); 2] = [
        ("adamw", include_bytes!("../../../suites/cases/adamw.safetensors")),
        ("adamw_float64", include_bytes!("../../../suites/cases/adamw_float64.safetensors")),
    ];
    golden::check(&cases, golden::run)
}

/// Logits of the same model under every choice of attention.
pub fn attention_choices_agree() -> Result<Verdict> {
    let tokens = tokens(2, 16, &Generator::new(Device::Cpu, SEED)?)?;
    let naive = tch::no_grad(|| model(ImplementationName::Naive)?.forward(&tokens))?;
    let mut largest = 0.0f64;
    for choice in ImplementationName::ON_CPU {
        let logits = tch::no_grad(|| model(choice)?.forward(&tokens))?;
        // Logits are of order 1; the choices differ by the order of float32 sums over at most 16 keys.
        let comparison = golden::compare(choice.name(), "logits", &logits, &naive, 1e-4, 1e-5);
        largest = largest.max(golden::require(&[comparison])?);
    }
    Verdict::passed(format!("{} choices, largest difference {largest:.1e}", ImplementationName::ON_CPU.len()))
}

/// Causality of the whole model: another last token leaves all logits before it as they were.
pub fn later_tokens_change_nothing_before() -> Result<Verdict> {
    let first = tokens(1, 16, &Generator::new(Device::Cpu, SEED)?)?;
    // Random tokens are never 0.
    let second = first.f_detach_copy()?;
    let _ = second.f_narrow(1, 15, 1)?.f_zero_()?;
    for choice in ImplementationName::ON_CPU {
        let model = model(choice)?;
        let [a, b] = [&first, &second].map(|tokens| tch::no_grad(|| model.forward(tokens)));
        let (a, b) = (a?, b?);
        let before = |logits: &Tensor| -> Result<Tensor> { Ok(logits.f_narrow(1, 0, 15)?) };
        let comparison =
            golden::compare(choice.name(), "logits before the last", &before(&b)?, &before(&a)?, 0.0, 1e-6);
        golden::require(&[comparison])?;
        let last = a.f_select(1, 15)?.f_sub(&b.f_select(1, 15)?)?.f_abs()?.f_max()?.f_double_value(&[])?;
        ensure!(last > 1e-3, "{}: the last token does not reach its own logits", choice.name());
    }
    Verdict::passed(format!("{} choices of attention", ImplementationName::ON_CPU.len()))
}

/// Thirty steps on one batch must all but memorise it.
pub fn loss_falls_on_one_batch() -> Result<Verdict> {
    let model = model(ImplementationName::Naive)?;
    let generator = Generator::new(Device::Cpu, SEED)?;
    let (tokens, targets) = (tokens(2, 12, &generator)?, tokens(2, 12, &generator)?);
    let mut adamw = AdamW::new(AdamWOptions { lr: 1e-2, ..AdamWOptions::default() })?;
    let mut losses = Vec::new();
    for _ in 0..30 {
        let loss = cross_entropy(&model.forward(&tokens)?, &targets)?;
        losses.push(loss.f_double_value(&[])?);
        backward(&loss)?;
        adamw.step(model.parameters())?;
        zero_grad(model.parameters())?;
    }
    let (first, last) = (losses[0], losses[losses.len() - 1]);
    // An untrained model has a loss of about log(50) = 3.91.
    ensure!((3.0..6.0).contains(&first), "the loss starts at {first:.3}, far from log(vocab_size)");
    ensure!(last < 0.2 * first, "the loss fell only from {first:.3} to {last:.3} in {} steps", losses.len());
    Verdict::passed(format!("from {first:.2} to {last:.4} in {} steps", losses.len()))
}

/// The measuring routine gives as many samples as were asked for, of the parts that were asked for and no others.
pub fn every_pass_is_timed() -> Result<Verdict> {
    for pass in [StepPass::Forward, StepPass::ForwardBackward, StepPass::TrainingStep] {
        let params = Params { pass, ..tiny() };
        let Row { warmup, forward, backward, optimizer, total, .. } = measure_on(&params, Device::Cpu, false)?;
        let lengths = [forward, backward, optimizer, Some(total), warmup].map(|s| s.map_or(0, |s| s.samples.len()));
        let expected = match pass {
            StepPass::Forward => [2, 0, 0, 2, 1],
            StepPass::ForwardBackward => [2, 2, 0, 2, 1],
            StepPass::TrainingStep => [2, 2, 2, 2, 1],
        };
        ensure!(lengths == expected, "{pass:?} gave {lengths:?} samples, expected {expected:?}");
    }
    Verdict::passed("three passes")
}

/// Captured steps must leave the parameters where eager steps on the same tokens leave them.
pub fn captured_steps_train_like_eager_ones() -> Result<Verdict> {
    let device = match torch::cuda_device(0) {
        Ok(device) => device,
        Err(error) => match fault_of(&error) {
            Some(Fault::NotAvailable { needs, has }) => return Verdict::skipped(format!("needs {needs}, has {has}")),
            _ => return Err(error),
        },
    };
    let mut notes = Vec::new();
    for dtype in [Precision::Float32, Precision::Bfloat16] {
        let apart = captured_distance(dtype, device).with_context(|| format!("in {}", dtype.name()))?;
        notes.push(format!("{} {apart:.1e}", dtype.name()));
    }
    Verdict::passed(format!("distance after 5 captured steps, over the way trained: {}", notes.join(", ")))
}

/// How far apart eager and captured training end, as a share of the way from the start.
fn captured_distance(dtype: Precision, device: Device) -> Result<f64> {
    const WARMUP: usize = 3;
    let shape = Params { context_length: 64, batch_size: 2, vocab_size: 1000, ..tiny() };
    let params = Params { dtype, execution: Execution::Captured, warmup: WARMUP, steps: 5, ..shape };
    let (mut eager, mut bench) = (StepBench::new(&params, device)?, StepBench::new(&params, device)?);
    let start = eager.model.parameters().iter().map(|(name, p)| Ok((name.clone(), p.f_detach_copy()?)));
    let start = start.collect::<Result<_>>()?;
    bench.model.model.load(&start)?;
    let batches = (0..WARMUP + params.steps).map(|_| eager.model.draw()).collect::<Result<Vec<_>>>()?;

    batches.iter().try_for_each(|batch| eager.train(batch).map(drop))?;
    on_side_stream(device, || batches[..WARMUP].iter().try_for_each(|batch| bench.train(batch).map(drop)))?;
    let captured = CapturedStep::new(bench)?;
    batches[WARMUP..].iter().try_for_each(|batch| captured.replay_on(batch).map(drop))?;

    let (mut apart, mut way) = (0.0, 0.0);
    for ((name, eager), (_, captured)) in eager.model.parameters().iter().zip(captured.model().parameters()) {
        let squares = |other: &Tensor| -> Result<f64> {
            Ok(eager.f_detach()?.f_sub(&other.f_detach()?)?.f_norm()?.f_double_value(&[])?.powi(2))
        };
        apart += squares(captured)?;
        way += squares(&start[name])?;
    }
    let apart = (apart / way).sqrt();
    // Rounding a gradient near zero can reverse its first AdamW step, but there are few of them. A missing or repeated
    // step, or a constant step count, moves the end by at least a tenth of the way.
    ensure!(apart < 1e-2, "captured training ends {apart:.2e} of the way from where eager training ends");
    Ok(apart)
}

/// Two eager training steps of the smallest model.
fn tiny() -> Params {
    Params {
        size: SizeName::Tiny,
        context_length: 8,
        batch_size: 1,
        vocab_size: 50,
        pass: StepPass::TrainingStep,
        dtype: Precision::Float32,
        attention: ImplementationName::Naive,
        execution: Execution::Eager,
        allow_tf32: false,
        warmup: 1,
        steps: 2,
    }
}

fn model(attention: ImplementationName) -> Result<Transformer> {
    Transformer::new(&SMALL, attention, &Generator::new(Device::Cpu, 336)?)
}

/// None of them is 0.
fn tokens(batch: i64, seq: i64, generator: &Generator) -> Result<Tensor> {
    generator.randint(1, SMALL.vocab_size, &[batch, seq], Kind::Int64)
}
