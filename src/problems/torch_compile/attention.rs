//! Part (a): plain attention in four columns, Rust and Python, eager and compiled or captured.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize};
use serde_json::json;
use tch::{Device, Kind, Tensor};

use crate::attention::naive;
use crate::bench::device::empty_cache;
use crate::bench::dtype::Dtype;
use crate::bench::errors::{AttentionErrors, relative_error};
use crate::bench::interleave::{ColumnOutcome, Laps, Turns, Variant, interleave, lap, samples};
use crate::bench::peer::{Compile, Software, TorchPeer, Verified};
use crate::bench::tolerance;
use crate::harness::samples::{Samples, Work};
use crate::model::export::write_safetensors;
use crate::torch::Generator;
use crate::torch::autograd::{backward_from, release_grad};
use crate::torch::graph::{Captured, on_side_stream};
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

    /// `products` of 2 b T² d operations each, and `rows` tensors of b T d read or written.
    fn work(&self, products: f64, rows: f64) -> Work {
        let row = (self.batch * self.seq * self.d_model) as f64;
        Work { flops: products * 2.0 * row * self.seq as f64, bytes: rows * 4.0 * row, precision: "float32".into() }
    }
}

pub fn measure(p: &Params, device: Device, peer: &mut TorchPeer) -> Result<Row> {
    let Turns { warmup, iterations, .. } = p.turns();
    let generator = Generator::new(device, SEED)?;
    let given = Given::draw(p.shape(), &generator)?;
    let expected = given.expected()?;
    let folder = tempfile::tempdir().context("making a folder for the peer's inputs")?;
    let file = folder.path().join("attention.safetensors");
    given.write(&expected, &file)?;

    peer.open("attention", json!({ "shape": p.shape() }))?;
    let eager = verify(peer, "eager", &file)?;
    let compiled = verify(peer, "compiled", &file)?;
    let captured = ColumnOutcome::of(CapturedAttention::new(&given))?;
    let errors_captured = match captured.measured() {
        Some(captured) => Some(within_tolerance("captured", captured.prove(&given, &expected, &generator)?)?),
        None => None,
    };
    drop(expected);

    let peer = RefCell::new(peer);
    let python = |column: &'static str| peer.borrow_mut().turn(column, warmup, iterations);
    let [rust_eager, python_eager, python_compiled, rust_captured] = interleave(
        p.turns(),
        [
            Variant::new(|| eager_turn(p, &generator)),
            Variant::prepared(&eager, |_| python("eager")),
            Variant::prepared(&compiled, |_| python("compiled")),
            Variant::prepared(&captured, |captured| captured.turn(warmup, iterations, &generator)),
        ],
    )?;
    let first_call_s = compiled.measured().map(|verified| &verified.first_call_s);
    let compile = peer.borrow_mut().close(first_call_s)?;
    let of = |column: &ColumnOutcome<Verified<AttentionErrors>>| column.measured().map(|verified| verified.errors);
    let errors = [("python_eager", of(&eager)), ("python_compiled", of(&compiled)), ("rust_captured", errors_captured)];
    let passes = |column: ColumnOutcome<Laps>| column.try_map(|laps| Passes::of(&laps, p));
    Ok(Row {
        rust_eager: passes(rust_eager)?,
        python_eager: passes(python_eager)?,
        python_compiled: passes(python_compiled)?,
        rust_captured: passes(rust_captured)?,
        errors: errors.into_iter().filter_map(|(name, errors)| Some((name.to_string(), errors?))).collect(),
        compile,
        software: peer.borrow().software.clone(),
    })
}

/// What the peer computes in `column` from the inputs in `file`, held against what is expected there.
pub fn verify(peer: &mut TorchPeer, column: &str, file: &Path) -> Result<ColumnOutcome<Verified<AttentionErrors>>> {
    ColumnOutcome::of(peer.verify::<AttentionErrors>(column, file))?.try_map(|verified| {
        within_tolerance(&format!("Python {column}"), verified.errors)?;
        Ok(verified)
    })
}

fn within_tolerance(column: &str, errors: AttentionErrors) -> Result<AttentionErrors> {
    let (largest, most) = (errors.largest(), tolerance::attention(Dtype::Float32));
    ensure!(largest <= most, "{column} is off by {largest:.1e} of the norm, more than {most:.0e}: {errors:?}");
    Ok(errors)
}

impl Passes {
    fn of(laps: &Laps, p: &Params) -> Result<Self> {
        // Two products forward, four backward; q, k, v and o; those of the backward pass and the gradients.
        Ok(Self {
            forward: samples(laps, "forward", p.work(2.0, 4.0))?,
            backward: samples(laps, "backward", p.work(4.0, 7.0))?,
        })
    }
}

/// The inputs that every column is verified on.
pub struct Given {
    device: Device,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    d_o: Tensor,
}

impl Given {
    pub fn draw(shape: [i64; 3], generator: &Generator) -> Result<Self> {
        let draw = || generator.randn(&shape, Kind::Float);
        Ok(Self { device: generator.device(), q: draw()?, k: draw()?, v: draw()?, d_o: draw()? })
    }

    fn leaves(&self) -> Result<[Tensor; 3]> {
        let leaf = |t: &Tensor| t.f_detach_copy()?.f_set_requires_grad(true);
        Ok([leaf(&self.q)?, leaf(&self.k)?, leaf(&self.v)?])
    }

    /// o, dq, dk and dv by our own eager pass.
    pub fn expected(&self) -> Result<[Tensor; 4]> {
        let leaves = self.leaves()?;
        let [q, k, v] = &leaves;
        let o = naive::attention(q, k, v, false)?;
        backward_from(&o, &self.d_o, false)?;
        let [dq, dk, dv] = [q.f_grad()?, k.f_grad()?, v.f_grad()?];
        Ok([o.f_detach()?, dq, dk, dv])
    }

    pub fn write(&self, expected: &[Tensor; 4], file: &Path) -> Result<()> {
        let inputs = [("q", &self.q), ("k", &self.k), ("v", &self.v), ("d_o", &self.d_o)];
        let outputs = ["expected_o", "expected_dq", "expected_dk", "expected_dv"].into_iter().zip(expected);
        let named = inputs.into_iter().chain(outputs).map(|(name, t)| (name.to_string(), t.shallow_clone()));
        write_safetensors(file, &named.collect::<Vec<_>>())
    }
}

/// Pairs of passes on fresh inputs, as the peer's turn.
fn eager_turn(p: &Params, generator: &Generator) -> Result<Laps> {
    let device = generator.device();
    let mut laps = Laps::new();
    for pass in 0..p.warmup + p.iterations {
        let given = Given::draw(p.shape(), generator)?;
        let leaves = [&given.q, &given.k, &given.v].map(|t| t.shallow_clone().set_requires_grad(true));
        let [q, k, v] = &leaves;
        let (o, forward) = lap(device, || naive::attention(q, k, v, false))?;
        let ((), backward) = lap(device, || backward_from(&o, &given.d_o, false))?;
        if pass >= p.warmup {
            push(&mut laps, forward, backward);
        }
    }
    empty_cache(device)?;
    Ok(laps)
}

fn push(laps: &mut Laps, forward: f64, backward: f64) {
    laps.entry("forward".into()).or_default().push(forward);
    laps.entry("backward".into()).or_default().push(backward);
}

/// The forward pass and the backward pass as one CUDA graph each, over inputs that stay in their places.
struct CapturedAttention {
    // Declared, and so dropped, before what their kernels read and write.
    forward: Captured<Tensor>,
    backward: Captured<[Tensor; 3]>,
    leaves: [Tensor; 3],
    d_o: Tensor,
    device: Device,
}

impl CapturedAttention {
    fn new(given: &Given) -> Result<Self> {
        let (device, leaves, d_o) = (given.device, given.leaves()?, given.d_o.f_detach_copy()?);
        let [q, k, v] = &leaves;
        on_side_stream(device, || {
            for _ in 0..3 {
                backward_from(&naive::attention(q, k, v, false)?, &d_o, false)?;
                leaves.iter().try_for_each(release_grad)?;
            }
            Ok(())
        })?;
        let forward = Captured::capture(device, || naive::attention(q, k, v, false))?;
        let backward = Captured::capture(device, || {
            backward_from(forward.output(), &d_o, false)?;
            Ok([q.f_grad()?, k.f_grad()?, v.f_grad()?])
        })?;
        empty_cache(device)?;
        Ok(Self { forward, backward, leaves, d_o, device })
    }

    /// The inputs of the next replays.
    fn load(&self, given: &Given) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        let [q, k, v] = &self.leaves;
        for (to, from) in [(q, &given.q), (k, &given.k), (v, &given.v), (&self.d_o, &given.d_o)] {
            to.f_detach()?.f_copy_(from)?;
        }
        Ok(())
    }

    fn prove(&self, given: &Given, expected: &[Tensor; 4], generator: &Generator) -> Result<AttentionErrors> {
        // From inputs that the capture did not see.
        let shape = <[i64; 3]>::try_from(given.q.size()).ok().context("q is (b, T, d)")?;
        self.load(&Given::draw(shape, generator)?)?;
        self.forward.replay()?;
        self.backward.replay()?;
        self.load(given)?;
        self.forward.replay()?;
        self.backward.replay()?;
        let [dq, dk, dv] = self.backward.output();
        Ok(AttentionErrors {
            o: relative_error(self.forward.output(), &expected[0])?,
            dq: relative_error(dq, &expected[1])?,
            dk: relative_error(dk, &expected[2])?,
            dv: relative_error(dv, &expected[3])?,
        })
    }

    fn turn(&self, warmup: usize, iterations: usize, generator: &Generator) -> Result<Laps> {
        let shape = <[i64; 3]>::try_from(self.d_o.size()).ok().context("d_o is (b, T, d)")?;
        let mut laps = Laps::new();
        for pass in 0..warmup + iterations {
            self.load(&Given::draw(shape, generator)?)?;
            let ((), forward) = lap(self.device, || self.forward.replay())?;
            let ((), backward) = lap(self.device, || self.backward.replay())?;
            if pass >= warmup {
                push(&mut laps, forward, backward);
            }
        }
        empty_cache(self.device)?;
        Ok(laps)
    }
}
