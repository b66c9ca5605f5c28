//! Checks of the fused step against autograd: in the emulator, and on a GPU.

use anyhow::{Context as _, Result, ensure};
use tch::{Device, Kind, Tensor};

use crate::attention::ImplementationName;
use crate::bench::training_step::{KERNELS, loss};
use crate::harness::device::DeviceCheck;
use crate::harness::problem::Verdict;
use crate::model::optim::{AdamW, AdamWOptions, Optimizer as _, zero_grad};
use crate::model::{Config, FusedStep, Gradients, Precision, Transformer};
use crate::torch::autograd::backward;
use crate::torch::random::SEED;
use crate::torch::{Generator, cuda_device};

/// With the kernels of a fused step: all but the optimizer of autograd's.
pub const DEVICE_CHECKS: &[DeviceCheck] = &[DeviceCheck::new(
    "a_fused_step_is_as_accurate_as_an_eager_one",
    "Loss and every gradient of a fused step are as near to float32 as those of an eager step under autocast.",
    on_the_gpu,
)
.with_kernels(KERNELS.split_at(1).1)];

/// Ragged sizes: a vocabulary of no whole pieces of eight, heads of 176 and of 8, a row of several warps, a norm with two pieces
/// a thread, fewer tokens than blocks and more.
const SMALL: [(Config, i64); 3] =
    [(config(50, 7, 528, 2, 3, 72), 3), (config(64, 2, 16, 1, 2, 8), 1), (config(9, 2, 4104, 1, 9, 8), 1)];

/// Small enough for products in the emulator, with rows, columns and sums of no whole tile.
const OWN_PRODUCTS: (Config, i64) = (config(50, 7, 48, 2, 3, 104), 3);

/// Heads of 64 and of 80, and an odd number of tokens; each with the attention of float32 steps, where our kernels have no
/// heads of 80.
const LARGE: [(Config, i64, ImplementationName); 3] = [
    (config(1000, 256, 512, 3, 8, 1024), 2, ImplementationName::Flash),
    (config(10_000, 129, 640, 2, 8, 1280), 3, ImplementationName::Naive),
    (config(50, 33, 256, 2, 4, 512), 1, ImplementationName::Flash),
];

const fn config(
    vocab_size: i64,
    context_length: i64,
    d_model: i64,
    num_layers: i64,
    num_heads: i64,
    d_ff: i64,
) -> Config {
    Config { vocab_size, context_length, d_model, num_layers, num_heads, d_ff, rope_theta: 1e4 }
}

/// How far a fused bfloat16 step may be from float32, relative to an eager step under autocast.
struct Limits {
    /// Of all gradients as one vector.
    whole: f64,
    /// Of each; small models have parameters whose few numbers are off by chance.
    each: f64,
}

/// The emulator's kernels, in seconds.
pub fn matches_autograd() -> Result<Verdict> {
    let mut worst = Worst::default();
    let by = |own_products| move |(config, batch)| (config, batch, own_products);
    for (config, batch, own_products) in SMALL.map(by(false)).into_iter().chain([by(true)(OWN_PRODUCTS)]) {
        let case = Case { config, batch, own_products, attention: [ImplementationName::Naive; 2], device: Device::Cpu };
        case.check(&Limits { whole: 1.1, each: 1.5 }, &mut worst)
            .with_context(|| format!("{config:?}, batch {batch}"))?;
    }
    worst.verdict()
}

fn on_the_gpu() -> Result<Verdict> {
    let device = cuda_device(0)?;
    let mut worst = Worst::default();
    for (config, batch, float32) in LARGE {
        for own_products in [false, true] {
            let case = Case { config, batch, own_products, attention: [float32, ImplementationName::Flash], device };
            case.check(&Limits { whole: 1.1, each: 1.1 }, &mut worst)
                .with_context(|| format!("{config:?}, batch {batch}, own products {own_products}"))?;
        }
    }
    worst.verdict()
}

/// The largest errors seen.
#[derive(Default)]
struct Worst {
    float32: f64,
    /// Of bfloat16 gradients, relative to the eager step's.
    share: f64,
}

impl Worst {
    fn verdict(&self) -> Result<Verdict> {
        let Self { float32, share } = self;
        Verdict::passed(format!("largest error {float32:.1e} in float32, {share:.2} of autocast's in bfloat16"))
    }
}

struct Case {
    config: Config,
    batch: i64,
    /// Whether every forward product runs our kernels.
    own_products: bool,
    /// In float32 and in bfloat16.
    attention: [ImplementationName; 2],
    device: Device,
}

impl Case {
    fn check(&self, limits: &Limits, worst: &mut Worst) -> Result<()> {
        // The second batch lacks tokens of the first one, whose gradients of the embedding must not remain.
        let batches = [self.batch(1)?, self.batch(2)?];
        let model = self.model(Precision::Float32)?;
        let mut exact = Vec::new();
        for (tokens, targets) in &batches {
            exact.push(differentiate(&model, tokens, targets, Precision::Float32)?);
        }
        self.compare_float32(&batches, &exact, worst).context("in float32")?;
        self.compare_bfloat16(&batches, &exact, limits, worst).context("in bfloat16")?;
        for precision in [Precision::Float32, Precision::Bfloat16] {
            self.train(precision).with_context(|| format!("training in {}", precision.name()))?;
        }
        Ok(())
    }

    fn compare_float32(&self, batches: &[(Tensor, Tensor)], exact: &[Differentiated], worst: &mut Worst) -> Result<()> {
        let step = self.step(&mut self.model(Precision::Float32)?, Precision::Float32)?;
        for ((tokens, targets), (loss, gradients)) in batches.iter().zip(exact) {
            let fused = step.differentiate(tokens, targets)?.f_double_value(&[])?;
            let error = (fused / loss - 1.0).abs();
            ensure!(error < 2e-6, "the loss is off by {error:.1e}: {fused}, autograd's is {loss}");
            for ((name, gradient), expected) in step.gradients()?.iter().zip(gradients) {
                let error = distance(gradient, expected)? / norm(expected)?;
                // Sums of thousands of terms in another order.
                ensure!(error < 5e-5, "the gradient of {name} is off by {error:.1e}");
                worst.float32 = worst.float32.max(error);
            }
        }
        Ok(())
    }

    fn compare_bfloat16(
        &self,
        batches: &[(Tensor, Tensor)],
        exact: &[Differentiated],
        limits: &Limits,
        worst: &mut Worst,
    ) -> Result<()> {
        let model = self.model(Precision::Bfloat16)?;
        let step = self.step(&mut self.model(Precision::Bfloat16)?, Precision::Bfloat16)?;
        for ((tokens, targets), (loss, exact)) in batches.iter().zip(exact) {
            let (_, eager) = differentiate(&model, tokens, targets, Precision::Bfloat16)?;
            let fused_loss = step.differentiate(tokens, targets)?.f_double_value(&[])?;
            let error = (fused_loss / loss - 1.0).abs();
            ensure!(error < 1e-2, "the loss is off by {error:.1e}: {fused_loss}, in float32 {loss}");
            let (mut ours, mut theirs) = (0.0, 0.0);
            for (((name, fused), eager), exact) in step.gradients()?.iter().zip(&eager).zip(exact) {
                let (fused, eager) = (distance(fused, exact)?, distance(eager, exact)?);
                ensure!(
                    fused <= limits.each * eager,
                    "the gradient of {name} is off by {fused:.2e}, under autocast by {eager:.2e}"
                );
                (ours, theirs) = (ours + fused * fused, theirs + eager * eager);
            }
            let share = f64::sqrt(ours / theirs);
            ensure!(
                share <= limits.whole,
                "the gradients are off by {share:.2} of what they are off by under autocast"
            );
            worst.share = worst.share.max(share);
        }
        Ok(())
    }

    /// Steps on batches of their own: each loss must be that of an eager forward pass on the same parameters, and in
    /// float32 the parameters must end where AdamW on autograd's gradients takes them.
    fn train(&self, precision: Precision) -> Result<()> {
        let options = AdamWOptions { lr: 1e-3, weight_decay: 0.1, ..AdamWOptions::default() };
        let (mut fused, plain) = (self.model(precision)?, self.model(precision)?);
        let start = plain.parameters().iter().map(|(_, p)| p.f_detach_copy()).collect::<Result<Vec<_>, _>>()?;
        let step = FusedStep::new(&mut fused, self.batch, precision, Gradients::Passing, options)?;
        let step = self.of_products(step)?;
        let mut adamw = AdamW::new(options)?;
        for i in 0..4 {
            let (tokens, targets) = self.batch(10 + i)?;
            let eager = tch::no_grad(|| loss(&fused, &tokens, &targets, precision))?.f_double_value(&[])?;
            let got = step.train(&fused, &tokens, &targets)?.f_double_value(&[])?;
            let (error, limit) = ((got / eager - 1.0).abs(), if precision == Precision::Float32 { 1e-5 } else { 4e-3 });
            ensure!(error < limit, "the loss of step {i} is off by {error:.1e}: {got}, of an eager pass {eager}");
            if precision == Precision::Float32 {
                backward(&loss(&plain, &tokens, &targets, precision)?)?;
                adamw.step(plain.parameters())?;
                zero_grad(plain.parameters())?;
            }
        }
        if precision == Precision::Bfloat16 {
            return Ok(());
        }
        for (((name, fused), (_, plain)), start) in fused.parameters().iter().zip(plain.parameters()).zip(&start) {
            let apart = distance(fused, plain)? / distance(plain, start)?;
            // Where a gradient is nearly zero, the sign of its rounding error decides the first steps.
            ensure!(apart < 2e-2, "{name} ends {apart:.1e} of the way trained from where autograd takes it");
        }
        Ok(())
    }

    fn model(&self, precision: Precision) -> Result<Transformer> {
        let [float32, bfloat16] = self.attention;
        let attention = if precision == Precision::Float32 { float32 } else { bfloat16 };
        Transformer::new(&self.config, attention, &Generator::new(self.device, SEED)?)
    }

    fn step(&self, model: &mut Transformer, precision: Precision) -> Result<FusedStep> {
        let step = FusedStep::new(model, self.batch, precision, Gradients::Kept, AdamWOptions::default())?;
        self.of_products(step)
    }

    fn of_products(&self, step: FusedStep) -> Result<FusedStep> {
        if self.own_products { step.with_own_products() } else { Ok(step) }
    }

    /// Tokens and targets.
    fn batch(&self, seed: i64) -> Result<(Tensor, Tensor)> {
        let generator = Generator::new(self.device, seed)?;
        let draw = || {
            let size = [self.batch, self.config.context_length];
            generator.randint(0, self.config.vocab_size, &size, Kind::Int64)
        };
        Ok((draw()?, draw()?))
    }
}

/// A loss, and every parameter's gradient.
type Differentiated = (f64, Vec<Tensor>);

/// By autograd.
fn differentiate(
    model: &Transformer,
    tokens: &Tensor,
    targets: &Tensor,
    precision: Precision,
) -> Result<Differentiated> {
    let loss = loss(model, tokens, targets, precision)?;
    backward(&loss)?;
    let gradients = model.parameters().iter().map(|(_, parameter)| parameter.grad().f_detach_copy());
    let gradients = gradients.collect::<Result<_, _>>()?;
    zero_grad(model.parameters())?;
    Ok((loss.f_double_value(&[])?, gradients))
}

fn distance(a: &Tensor, b: &Tensor) -> Result<f64> {
    let [a, b] = [a, b].map(|t| t.f_detach()?.f_to_kind(Kind::Double));
    Ok(a?.f_sub(&b?)?.f_norm()?.f_double_value(&[])?)
}

fn norm(t: &Tensor) -> Result<f64> {
    Ok(t.f_to_kind(Kind::Double)?.f_norm()?.f_double_value(&[])?)
}
