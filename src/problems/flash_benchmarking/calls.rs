//! The host's time of one attention call: ours from Rust, and from Python the wheel's, PyTorch's and FlashAttention-4's.
//!
//! Calls on small inputs follow one another without a wait for the device, so few that its queue does not fill. Each column
//! of Python has a process of its own: one that fails or is late ends alone.

use std::cell::RefCell;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize};
use serde_json::json;
use tch::{Device, Tensor};

use super::verify::Expected;
use crate::attention::implementations::{Prepared, by_name};
use crate::bench::attention::Inputs;
use crate::bench::dtype::Dtype;
use crate::bench::errors::relative_error;
use crate::bench::interleave::{ColumnOutcome, Laps, Turns, Variant, interleave};
use crate::bench::peer::{Installed, Reply, TorchPeer};
use crate::bench::tolerance;
use crate::harness::samples::Samples;
use crate::torch::Generator;
use crate::torch::random::SEED;
use crate::torch::stream::synchronize;

/// An import, or the first calls, which may compile. FlashAttention-4 compiles for 3 to 5 s each (H200, 2026-11).
const PREPARING: Duration = Duration::from_secs(120);
/// A turn of a thousand calls of 100 us takes a tenth of a second.
const TURN: Duration = Duration::from_secs(30);
/// The most calls without a wait, by far fewer than fill the queue of a GPU where each launches one kernel.
const MOST_CALLS: usize = 500;

/// Laps of calls without gradients, and of calls that autograd records.
const MODES: [&str; 2] = ["forward", "recorded"];

/// Causal attention of one small shape.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Params {
    pub dtype: Dtype,
    pub batch: i64,
    pub n_heads: i64,
    pub d_head: i64,
    pub seq: i64,
    /// Back to back between two synchronisations; a sample is their mean.
    pub calls: usize,
    pub rounds: usize,
    pub warmup: usize,
    pub iterations: usize,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Row {
    pub rust: ColumnOutcome<CallTimes>,
    pub wheel: ColumnOutcome<CallTimes>,
    pub sdpa: ColumnOutcome<CallTimes>,
    pub flash_attention_4: ColumnOutcome<CallTimes>,
}

/// The host's seconds of a call.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CallTimes {
    /// Of a package of Python.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// Of o, as a share of the norm.
    pub error: f64,
    /// Without gradients.
    pub forward: Samples,
    /// Recorded by autograd.
    pub recorded: Samples,
}

impl Params {
    pub fn validate(&self) -> Result<()> {
        let Self { batch, n_heads, d_head, seq, calls, .. } = *self;
        for (key, value, most) in [("batch", batch, 64), ("n_heads", n_heads, 64), ("seq", seq, 1024)] {
            ensure!((1..=most).contains(&value), "{key} is {value}: it must lie in 1..{most}");
        }
        ensure!(
            (8..=256).contains(&d_head) && d_head % 8 == 0,
            "d_head is {d_head}: it must be a multiple of 8 to 256"
        );
        ensure!((1..=MOST_CALLS).contains(&calls), "calls is {calls}: it must lie in 1..{MOST_CALLS}");
        self.turns().validate()
    }

    fn turns(&self) -> Turns {
        Turns { rounds: self.rounds, warmup: self.warmup, iterations: self.iterations }
    }
}

/// The columns of Python.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Column {
    Wheel,
    Sdpa,
    #[serde(rename = "flash_attention_4")]
    FlashAttention4,
}

pub fn measure(p: &Params, device: Device) -> Result<Row> {
    in_peers(p, device, |column| match (column, device) {
        (Column::FlashAttention4, Device::Cpu) => Ok(Err("it needs a GPU".into())),
        _ => TorchPeer::start(device).map(Ok),
    })
}

/// As [`measure`], in peers that `start` gives, or its reason why there is none.
fn in_peers(p: &Params, device: Device, start: impl Fn(Column) -> Result<Result<TorchPeer, String>>) -> Result<Row> {
    let generator = Generator::new(device, SEED)?;
    let inputs = Inputs::draw(&[p.batch, p.n_heads, p.seq, p.d_head], p.dtype.kind(), &generator)?;
    let expected = Expected::of(&inputs)?;
    let folder = tempfile::tempdir().context("making a folder for the peers' inputs")?;
    let file = folder.path().join("attention.safetensors");
    inputs.write(expected.outputs(), &file)?;
    let prepare = |column| InPeer::prepare(column, start(column), &file, p.dtype);
    let [wheel, sdpa, fa4] = [Column::Wheel, Column::Sdpa, Column::FlashAttention4].map(prepare);
    let rust = ColumnOutcome::of_any(InRust::prepare(&inputs, &expected, p.dtype));
    let in_peer = |peer: &InPeer| peer.turn(p);
    let columns = interleave(
        p.turns(),
        [
            Variant::prepared(&rust, |rust| rust.turn(p)).alone(),
            Variant::prepared(&wheel, in_peer).alone(),
            Variant::prepared(&sdpa, in_peer).alone(),
            Variant::prepared(&fa4, in_peer).alone(),
        ],
    )?;
    let [laps_of_rust, laps_of_wheel, laps_of_sdpa, laps_of_fa4] = columns;
    let of_peer = |peer: &ColumnOutcome<InPeer>, laps| {
        let of = peer.measured().map(|peer| (Some(peer.version.clone()), peer.error));
        times(of, laps)
    };
    Ok(Row {
        rust: times(rust.measured().map(|rust| (None, rust.error)), laps_of_rust)?,
        wheel: of_peer(&wheel, laps_of_wheel)?,
        sdpa: of_peer(&sdpa, laps_of_sdpa)?,
        flash_attention_4: of_peer(&fa4, laps_of_fa4)?,
    })
}

fn times(of: Option<(Option<String>, f64)>, laps: ColumnOutcome<Laps>) -> Result<ColumnOutcome<CallTimes>> {
    laps.try_map(|mut laps| {
        let (version, error) = of.context("a column that took turns was prepared")?;
        let mut samples =
            |mode: &str| Samples::seconds_unbounded(laps.remove(mode).unwrap_or_default()).context(mode.to_string());
        let [forward, recorded] = MODES.map(&mut samples);
        Ok(CallTimes { version, error, forward: forward?, recorded: recorded? })
    })
}

/// `error` with two digits, if it is within the tolerance.
fn checked(name: &str, error: f64, dtype: Dtype) -> Result<f64> {
    let most = tolerance::attention(dtype);
    ensure!(
        error <= most,
        "{name} disagrees with the definition: o is off by {error:.1e} of its norm, more than {most:.0e}"
    );
    Ok(format!("{error:.1e}").parse()?)
}

/// Our implementation in this process.
struct InRust {
    attention: Prepared,
    /// q, k and v that autograd records, and the same values that it does not.
    leaves: [Tensor; 3],
    plain: [Tensor; 3],
    error: f64,
}

impl InRust {
    /// Our kernels on a GPU, and what the wheel runs on a CPU. Its first calls load or compile kernels.
    fn prepare(inputs: &Inputs, expected: &Expected, dtype: Dtype) -> Result<Self> {
        let device = inputs.device();
        let ours = by_name(if device == Device::Cpu { "tiled" } else { "flash" })?;
        let leaves = [&inputs.q, &inputs.k, &inputs.v].map(Tensor::shallow_clone);
        let plain = leaves.each_ref().map(Tensor::detach);
        let mut rust = Self { attention: ours.prepare_causal(inputs.seq(), device)?, leaves, plain, error: 0.0 };
        for mode in MODES {
            let o = rust.called(mode, |call| call())?;
            ensure!(
                o.requires_grad() == (mode == "recorded"),
                "the result of a {mode} call must require no other gradient"
            );
            let error = relative_error(&expected.compared(&o)?, &expected.outputs()[0])?;
            rust.error = rust.error.max(checked(ours.name, error, dtype)?);
        }
        Ok(rust)
    }

    /// What `body` makes of the call of a mode.
    fn called<T>(&self, mode: &str, body: impl FnOnce(&dyn Fn() -> Result<Tensor>) -> Result<T>) -> Result<T> {
        if mode == "recorded" {
            let [q, k, v] = &self.leaves;
            return body(&|| (self.attention)(q, k, v));
        }
        let _no_graph = tch::no_grad_guard();
        let [q, k, v] = &self.plain;
        body(&|| (self.attention)(q, k, v))
    }

    fn turn(&self, p: &Params) -> Result<Laps> {
        let of_mode = |mode: &str| {
            let seconds = self.called(mode, |call| {
                (0..p.warmup + p.iterations)
                    .map(|_| host_seconds(self.plain[0].device(), p.calls, call))
                    .collect::<Result<Vec<_>>>()
            })?;
            Ok((mode.to_string(), seconds[p.warmup..].to_vec()))
        };
        MODES.into_iter().map(of_mode).collect()
    }
}

/// The host's time of a call, of `calls` between two synchronisations that are not timed; as `host_seconds` of
/// `suites/peers/calls.py`.
fn host_seconds(device: Device, calls: usize, call: &dyn Fn() -> Result<Tensor>) -> Result<f64> {
    synchronize(device)?;
    let start = Instant::now();
    for _ in 0..calls {
        drop(call()?);
    }
    let seconds = start.elapsed().as_secs_f64();
    synchronize(device)?;
    Ok(seconds / calls as f64)
}

/// A column that runs in its own Python process. Its first calls gave right results.
struct InPeer {
    peer: RefCell<TorchPeer>,
    version: String,
    error: f64,
}

impl InPeer {
    /// The column's part in the case, or why it has none: not installed, refused by its own checks, wrong, or late.
    fn prepare(
        column: Column,
        started: Result<Result<TorchPeer, String>>,
        file: &Path,
        dtype: Dtype,
    ) -> ColumnOutcome<Self> {
        let attempt = || -> Result<Reply<Self>> {
            let mut peer = match started? {
                Ok(peer) => peer,
                Err(reason) => return Ok(Reply::Refused(reason)),
            };
            let open = json!({ "measure": "calls", "column": column });
            let Installed { version } = match peer.job_within(PREPARING, "open", open)? {
                Reply::Accepted(installed) => installed,
                Reply::Refused(reason) => return Ok(Reply::Refused(reason)),
            };
            let error = match peer.job_within(PREPARING, "verify", json!({ "file": file }))? {
                Reply::Accepted(error) => checked(&format!("{column:?}"), error, dtype)?,
                Reply::Refused(reason) => return Ok(Reply::Refused(reason)),
            };
            Ok(Reply::Accepted(Self { peer: RefCell::new(peer), version, error }))
        };
        match attempt() {
            Ok(Reply::Accepted(prepared)) => ColumnOutcome::Measured { row: prepared },
            Ok(Reply::Refused(reason)) => ColumnOutcome::NotRun { reason },
            Err(error) => ColumnOutcome::of_any(Err(error)),
        }
    }

    fn turn(&self, p: &Params) -> Result<Laps> {
        self.turn_within(TURN, p)
    }

    fn turn_within(&self, limit: Duration, p: &Params) -> Result<Laps> {
        let settings = json!({ "calls": p.calls, "warmup": p.warmup, "iterations": p.iterations });
        let mut peer = self.peer.borrow_mut();
        let laps = peer.job_within(limit, "turn", settings);
        if laps.is_err() {
            // The column takes no more turns, and its process must not disturb the others.
            peer.end();
        }
        laps
    }
}

#[cfg(test)]
mod tests;
