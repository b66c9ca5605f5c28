//! Part (a): plain attention in four columns, Rust and Python, eager and compiled or captured.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize};
use serde_json::json;
use tch::{Device, Kind, Tensor};

use crate::attention::naive;
use crate::bench::attention::{GraphReplays, Inputs};
use crate::bench::device::empty_cache;
use crate::bench::dtype::Dtype;
use crate::bench::errors::AttentionErrors;
use crate::bench::interleave::{ColumnOutcome, Laps, Turns, Variant, interleave, samples};
use crate::bench::peer::{Compile, Software, TorchPeer, Verified, errors_of};
use crate::bench::timing::lap;
use crate::bench::work::{self, AttentionPass};
use crate::harness::samples::Samples;
use crate::torch::Generator;
use crate::torch::autograd::backward_from;
use crate::torch::random::SEED;

/// One cell of the grid of `pytorch_attention`: float32, no heads, no mask.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Params {
    pub batch: i64,
    pub d_model: i64,
    pub seq: i64,
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
    pub rust_captured: ColumnOutcome<Passes>,
    /// Relative errors of each other column against Rust eager, measured before any timing.
    pub errors: BTreeMap<String, AttentionErrors>,
    pub compile: Option<Compile>,
    pub software: Software,
}

/// From q, k and v to o, recording the graph; and from the upstream gradient to dq, dk and dv.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Passes {
    pub forward: Samples,
    pub backward: Samples,
}

impl Params {
    pub fn validate(&self) -> Result<()> {
        for (key, value) in [("batch", self.batch), ("d_model", self.d_model), ("seq", self.seq)] {
            ensure!((1..=1 << 20).contains(&value), "{key} is {value}: it must lie in 1..2^20");
        }
        self.turns().validate()
    }

    fn turns(&self) -> Turns {
        Turns { rounds: self.rounds, warmup: self.warmup, iterations: self.iterations }
    }

    fn shape(&self) -> [i64; 3] {
        [self.batch, self.seq, self.d_model]
    }

    fn draw(&self, generator: &Generator) -> Result<Inputs> {
        Inputs::draw(&self.shape(), Kind::Float, generator)
    }
}

/// Attention by its definition, without a mask.
pub fn plain(q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
    naive::attention(q, k, v, false)
}

pub fn measure(p: &Params, device: Device, peer: &mut TorchPeer) -> Result<Row> {
    let generator = Generator::new(device, SEED)?;
    let inputs = p.draw(&generator)?;
    let expected = inputs.results(&plain)?;
    let folder = tempfile::tempdir().context("making a folder for the peer's inputs")?;
    let file = folder.path().join("attention.safetensors");
    inputs.write(&expected, &file)?;

    peer.open("attention", json!({ "shape": p.shape() }))?;
    let [eager, compiled] = [verify(peer, "eager", &file)?, verify(peer, "compiled", &file)?];
    let captured = ColumnOutcome::of(CapturedAttention::new(p, &generator))?;
    let captured_errors = captured.measured().map(|captured| captured.prove(&inputs, &expected)).transpose()?;
    drop(expected);

    let peer = RefCell::new(peer);
    let python = |column: &'static str| peer.borrow_mut().turn(column, p.warmup, p.iterations);
    let columns = interleave(
        p.turns(),
        [
            Variant::new(|| turn(p, &generator, eager_passes)),
            Variant::prepared(&eager, |_| python("eager")),
            Variant::prepared(&compiled, |_| python("compiled")),
            Variant::prepared(&captured, |captured| turn(p, &generator, |inputs| captured.passes(inputs))),
        ],
    )?;
    let compile = peer.borrow_mut().close(compiled.measured().map(|verified| &verified.first_call_s))?;
    let mut errors = errors_of([("python_eager", &eager), ("python_compiled", &compiled)]);
    errors.extend(captured_errors.map(|errors| ("rust_captured".to_string(), errors)));
    let work = |pass| work::plain(p.shape(), Dtype::Float32, pass);
    let passes = |laps: Laps| {
        Ok(Passes {
            forward: samples(&laps, "forward", work(AttentionPass::Forward))?,
            backward: samples(&laps, "backward", work(AttentionPass::Backward))?,
        })
    };
    let [rust_eager, python_eager, python_compiled, rust_captured] = columns.map(|column| column.try_map(passes));
    Ok(Row {
        rust_eager: rust_eager?,
        python_eager: python_eager?,
        python_compiled: python_compiled?,
        rust_captured: rust_captured?,
        errors,
        compile,
        software: peer.borrow().software.clone(),
    })
}

/// What the peer computes in `column` from the inputs in `file`, held against what is expected there.
pub fn verify(peer: &mut TorchPeer, column: &str, file: &Path) -> Result<ColumnOutcome<Verified<AttentionErrors>>> {
    peer.verify(column, file, |errors: &AttentionErrors| {
        errors.within_tolerance(&format!("Python {column}"), Dtype::Float32).map(drop)
    })
}

/// Pairs of passes on fresh inputs, as the peer's turn.
fn turn(p: &Params, generator: &Generator, passes: impl Fn(&Inputs) -> Result<[f64; 2]>) -> Result<Laps> {
    let pairs = (0..p.warmup + p.iterations).map(|_| passes(&p.draw(generator)?)).collect::<Result<Vec<_>>>()?;
    empty_cache(generator.device())?;
    let timed = |pass: usize| pairs[p.warmup..].iter().map(|pair| pair[pass]).collect();
    Ok([("forward".to_string(), timed(0)), ("backward".to_string(), timed(1))].into())
}

fn eager_passes(inputs: &Inputs) -> Result<[f64; 2]> {
    let Inputs { q, k, v, d_o, .. } = inputs;
    let (o, forward) = lap(inputs.device(), || plain(q, k, v))?;
    let ((), backward) = lap(inputs.device(), || backward_from(&o, d_o, false))?;
    Ok([forward, backward])
}

/// The passes as CUDA graphs over inputs that stay in their places.
struct CapturedAttention {
    // Declared, and so dropped, before what their kernels read and write.
    replays: GraphReplays,
    inputs: Inputs,
}

impl CapturedAttention {
    fn new(p: &Params, generator: &Generator) -> Result<Self> {
        let inputs = p.draw(generator)?;
        let replays = GraphReplays::new(Box::new(plain), &inputs, false)?;
        empty_cache(inputs.device())?;
        Ok(Self { replays, inputs })
    }

    /// The errors of replays on `inputs`, which the capture did not see.
    fn prove(&self, inputs: &Inputs, expected: &[Tensor; 4]) -> Result<AttentionErrors> {
        self.inputs.load(inputs)?;
        AttentionErrors::of(&self.replays.results()?[0], expected)?.within_tolerance("captured", Dtype::Float32)
    }

    fn passes(&self, inputs: &Inputs) -> Result<[f64; 2]> {
        self.inputs.load(inputs)?;
        let ((), forward) = lap(inputs.device(), || self.replays.replay(AttentionPass::Forward))?;
        let ((), backward) = lap(inputs.device(), || self.replays.replay(AttentionPass::Backward))?;
        Ok([forward, backward])
    }
}
