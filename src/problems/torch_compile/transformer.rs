//! Part (b): whole Transformers, their forward pass and their training step, in four columns over the same weights.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};
use serde_json::json;
use tch::{Device, Kind, Tensor};

use super::scratch::scratch;
use super::transformer_bench::{CapturedTransformer, Pass, eager_turn};
use crate::attention::ImplementationName;
use crate::bench::device::{empty_cache, update_for};
use crate::bench::interleave::{ColumnOutcome, Laps, Turns, Variant, interleave, samples};
use crate::bench::model_bench::ModelBench;
use crate::bench::peer::{Compile, Software, TorchPeer, Verified, errors_of};
use crate::bench::tolerance;
use crate::bench::training_step::handout;
use crate::harness::record::Profile;
use crate::harness::samples::{Samples, Work};
use crate::model::fused_adamw::adamw_for;
use crate::model::memory::Memory;
use crate::model::optim::{AdamWOptions, zero_grad};
use crate::model::sizes::VOCAB_SIZE;
use crate::model::{Config, Precision, SizeName};
use crate::torch::{backward, safetensors};

/// How many elements of each gradient are compared one by one, as `suites/peers/transformer.py` does.
const SAMPLED: i64 = 1 << 16;

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Params {
    pub size: SizeName,
    pub context_length: i64,
    #[serde(default = "handout::batch_size")]
    pub batch_size: i64,
    pub dtype: Precision,
    pub rounds: usize,
    pub warmup: usize,
    pub iterations: usize,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Row {
    pub rust_eager: ColumnOutcome<Passes>,
    pub python_eager: ColumnOutcome<Passes>,
    pub python_compiled: ColumnOutcome<Passes>,
    /// Measured once the peer has gone, since the graphs keep their memory.
    pub rust_captured: ColumnOutcome<Passes>,
    /// Rust eager once more, in turns with the captured one: what drifted between the two phases.
    pub rust_eager_again: ColumnOutcome<Passes>,
    /// Relative errors of Python's columns against Rust eager, measured before any timing.
    pub errors: BTreeMap<String, Errors>,
    /// Relative difference of the losses of captured and eager passes.
    pub captured_loss_error: Option<f64>,
    pub compile: Option<Compile>,
    pub software: Software,
}

/// The forward pass with its loss, recorded as a step's is, and forward, backward and optimizer together.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Passes {
    pub forward: Samples,
    pub step: Samples,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Errors {
    pub loss: f64,
    /// Of the eager column alone; the compiled functions give their loss.
    #[serde(default)]
    pub logits: Option<f64>,
    /// All gradients as one vector.
    pub gradients: f64,
    pub worst_gradient: f64,
    pub worst_gradient_name: String,
}

impl Errors {
    pub fn require_within_tolerance(&self, column: &str, dtype: Precision) -> Result<()> {
        let limit = tolerance::transformer(dtype);
        let logits = self.logits.unwrap_or(0.0);
        for (what, error, limit) in [
            ("the loss", self.loss, limit.loss),
            ("the logits", logits, limit.logits),
            ("the gradients", self.gradients, limit.gradients),
            (&self.worst_gradient_name, self.worst_gradient, limit.worst_gradient),
        ] {
            ensure!(error <= limit, "{column} is off by {error:.1e} in {what}, more than {limit:.0e}: {self:?}");
        }
        Ok(())
    }
}

impl Params {
    fn config(&self) -> Config {
        Config::of_size(self.size.size(), VOCAB_SIZE, self.context_length)
    }

    pub fn validate(&self) -> Result<()> {
        self.config().validate_with_batch(self.batch_size)?;
        self.turns().validate()
    }

    /// Beside Python both processes hold parameters and optimizer state, and one at a time has activations and gradients
    /// as well; later, a captured step keeps what it needs while an eager one takes its own.
    pub fn predicted_bytes(&self, profile: Profile) -> u64 {
        let (config, precision) = (self.config(), self.dtype);
        let (batch, seq) = (self.batch_size, self.context_length);
        let memory = Memory { config, batch, seq, precision, attention: ImplementationName::Naive };
        let (step, kept) =
            (memory.step_peak(update_for(profile), true), memory.parameters() + memory.optimizer_state());
        let captured = if profile == Profile::Gpu { step - kept } else { 0 };
        step + captured.max(kept)
    }

    fn turns(&self) -> Turns {
        Turns { rounds: self.rounds, warmup: self.warmup, iterations: self.iterations }
    }
}

/// The first phase with a peer of its own, the second without it.
pub fn measure(p: &Params, device: Device) -> Result<Row> {
    let config = p.config();
    let bench = ModelBench::new(&config, ImplementationName::Naive, p.batch_size, p.dtype, device)?;
    let Beside { columns: [rust_eager, python_eager, python_compiled], errors, compile, software } =
        beside_python(p, &bench)?;
    empty_cache(device)?;
    let ([rust_eager_again, rust_captured], captured_loss_error) = captured(p, &bench)?;
    let passes = |column: ColumnOutcome<Laps>| column.try_map(|laps| Passes::of(&laps, p));
    Ok(Row {
        rust_eager: passes(rust_eager)?,
        python_eager: passes(python_eager)?,
        python_compiled: passes(python_compiled)?,
        rust_captured: passes(rust_captured)?,
        rust_eager_again: passes(rust_eager_again)?,
        errors,
        captured_loss_error,
        compile,
        software,
    })
}

/// Rust eager again and Rust captured, measured alone, and the error of the losses of the passes that could be captured.
fn captured(p: &Params, bench: &ModelBench) -> Result<([ColumnOutcome<Laps>; 2], Option<f64>)> {
    let optimizer = RefCell::new(adamw_for(bench.device, AdamWOptions::default())?);
    let turns = p.turns();
    let mut columns = [(); 2].map(|()| ColumnOutcome::Measured { row: Laps::new() });
    let mut loss_error: Option<f64> = None;
    for pass in Pass::ALL {
        let graph = ColumnOutcome::of(CapturedTransformer::new(bench, pass, &optimizer))?;
        if let Some(graph) = graph.measured() {
            let error = graph.prove(tolerance::replayed_loss(p.dtype))?;
            loss_error = Some(loss_error.map_or(error, |other| other.max(error)));
        }
        let eager = |_: &_| eager_turn(bench, pass, optimizer.borrow_mut().as_mut(), turns);
        let captured = |graph: &CapturedTransformer| graph.turn(turns);
        let measured = interleave(turns, [Variant::prepared(&graph, eager), Variant::prepared(&graph, captured)])?;
        for (column, more) in columns.iter_mut().zip(measured) {
            column.extend(more);
        }
        drop(graph);
        empty_cache(bench.device)?;
    }
    Ok((columns, loss_error))
}

/// What was measured beside Python: Rust eager, Python eager, Python compiled.
struct Beside {
    columns: [ColumnOutcome<Laps>; 3],
    errors: BTreeMap<String, Errors>,
    compile: Option<Compile>,
    software: Software,
}

fn beside_python(p: &Params, bench: &ModelBench) -> Result<Beside> {
    let mut peer = TorchPeer::start(bench.device)?;
    open(&mut peer, bench)?;
    let folder = scratch(expected_bytes(bench))?;
    let file = folder.path().join("expected.safetensors");
    write_expected(bench, &file)?;
    let [eager, compiled] =
        [verify(&mut peer, "eager", p.dtype, &file)?, verify(&mut peer, "compiled", p.dtype, &file)?];
    drop(folder);

    let mut optimizer = adamw_for(bench.device, AdamWOptions::default())?;
    let peer = RefCell::new(peer);
    let python = |column: &'static str| peer.borrow_mut().turn(column, p.warmup, p.iterations);
    let rust = || {
        let mut laps = eager_turn(bench, Pass::Forward, optimizer.as_mut(), p.turns())?;
        laps.extend(eager_turn(bench, Pass::Step, optimizer.as_mut(), p.turns())?);
        Ok(laps)
    };
    let columns = interleave(
        p.turns(),
        [
            Variant::new(rust),
            Variant::prepared(&eager, |_| python("eager")),
            Variant::prepared(&compiled, |_| python("compiled")),
        ],
    )?;
    let compile = peer.borrow_mut().close(compiled.measured().map(|verified| &verified.first_call_s))?;
    let errors = errors_of([("python_eager", &eager), ("python_compiled", &compiled)]);
    Ok(Beside { columns, errors, compile, software: peer.into_inner().software })
}

/// Gives the peer a model of the same shape and weights, by a file that lives no longer than its reading.
pub fn open(peer: &mut TorchPeer, bench: &ModelBench) -> Result<()> {
    let ModelBench { model, dtype, batch_size, .. } = bench;
    let config = model.config();
    let folder = scratch(4 * config.num_parameters())?;
    let weights = folder.path().join("weights.safetensors");
    safetensors::write(model.parameters(), &weights)?;
    let settings = json!({ "config": config, "weights": weights, "dtype": dtype, "batch_size": batch_size });
    peer.open("transformer", settings).map(drop)
}

/// What the peer's `column` gives for the tokens in `file`, held against what is expected there.
pub fn verify(
    peer: &mut TorchPeer,
    column: &str,
    dtype: Precision,
    file: &Path,
) -> Result<ColumnOutcome<Verified<Errors>>> {
    peer.verify(column, file, |errors: &Errors| errors.require_within_tolerance(&format!("Python {column}"), dtype))
}

/// Writes what our own eager pass makes of random tokens: loss, logits, the norm of every gradient, and an evenly spread
/// sample of its elements.
pub fn write_expected(bench: &ModelBench, file: &Path) -> Result<()> {
    let (batch, parameters) = (bench.draw()?, bench.parameters());
    let loss = bench.loss(&batch)?;
    backward(&loss)?;
    let (mut norms, mut samples) = (Vec::new(), Vec::new());
    for (name, parameter) in parameters {
        let gradient = parameter.f_grad()?;
        ensure!(gradient.defined(), "{name} has no gradient");
        norms.push(gradient.f_norm_scalaropt_dtype(2, Kind::Double)?);
        // An odd stride meets every column of a matrix.
        let stride = (gradient.numel() as i64 / SAMPLED).max(1) | 1;
        let sample = gradient.f_flatten(0, -1)?.f_slice(0, 0, None, stride)?.f_detach_copy()?;
        samples.push((format!("grad.{name}"), sample));
    }
    zero_grad(parameters)?;
    let logits = tch::no_grad(|| bench.in_precision(|| bench.model.forward(&batch.tokens)))?;
    let narrow = |t: &Tensor| t.f_detach()?.f_to_kind(Kind::Float);
    let mut tensors = vec![
        ("tokens".to_string(), batch.tokens),
        ("targets".to_string(), batch.targets),
        ("gradient_norms".to_string(), Tensor::f_stack(&norms, 0)?),
        ("loss".to_string(), narrow(&loss)?),
        ("logits".to_string(), narrow(&logits)?),
    ];
    tensors.extend(samples);
    safetensors::write(&tensors, file)
}

/// Never less than [`write_expected`] takes: the logits, and a sample and a norm of each gradient.
pub fn expected_bytes(bench: &ModelBench) -> u64 {
    let config = bench.model.config();
    let positions = (bench.batch_size * config.context_length) as u64;
    4 * positions * (config.vocab_size as u64 + 4) + (2 * 4 * SAMPLED as u64 + 8) * config.num_tensors() + (1 << 20)
}

impl Passes {
    fn of(laps: &Laps, p: &Params) -> Result<Self> {
        let config = p.config();
        let flops = config.forward_flops(p.batch_size, p.context_length);
        let (all, multiplied) = (config.num_parameters() as f64, config.num_matmul_parameters() as f64);
        let work = |flops, bytes| Work { flops, bytes, precision: p.dtype.name().into() };
        // Weights read; then read again with gradients written, and AdamW's 28 bytes a parameter.
        Ok(Self {
            forward: samples(laps, "forward", work(flops, 4.0 * multiplied))?,
            step: samples(laps, "step", work(3.0 * flops, 12.0 * multiplied + 28.0 * all))?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_beyond_its_tolerance_is_told_with_its_place() {
        let fine = Errors {
            loss: 0.0,
            logits: Some(0.0),
            gradients: 0.0,
            worst_gradient: 5e-4,
            worst_gradient_name: "layers.0.ln1.weight".into(),
        };
        fine.require_within_tolerance("Python eager", Precision::Float32).unwrap();
        let words = |errors: Errors| {
            errors.require_within_tolerance("Python eager", Precision::Float32).unwrap_err().to_string()
        };
        assert!(words(Errors { logits: Some(1e-3), ..fine.clone() }).contains("the logits"));
        assert!(words(Errors { worst_gradient: 2e-3, ..fine.clone() }).contains("layers.0.ln1.weight"));
        assert!(words(Errors { gradients: f64::NAN, ..fine }).contains("the gradients"));
    }
}
