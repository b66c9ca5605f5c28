//! What a call of attention costs the host: through Rust, through the wheel's operator in Python, and others in Python.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tch::Device;

use super::compare::{LAP, eager};
use super::measure::{ImplementationOutcome, Row};
use super::verify::{Expected, rounded};
use crate::attention::implementations::by_name;
use crate::bench::attention::Inputs;
use crate::bench::dtype::Dtype;
use crate::bench::errors::AttentionErrors;
use crate::bench::interleave::{ColumnOutcome, Laps, Variant, take_turns};
use crate::bench::peer::{TorchPeer, with_kept};
use crate::bench::work::AttentionPass;
use crate::error::Fault;
use crate::harness::samples::Samples;
use crate::torch::Generator;
use crate::torch::random::SEED;
use crate::torch::stream::synchronize;

/// Ours in this program, and the columns of `suites/peers/calls.py`.
pub const RUST: &str = "rust";
pub const WHEEL: &str = "wheel";
pub const IN_PYTHON: [&str; 3] = [WHEEL, "sdpa", "flash_attention_4"];
/// A call of the backward pass alone would need a retained graph, which no training step has.
pub const PASSES: [AttentionPass; 2] = [AttentionPass::Forward, AttentionPass::Both];

/// A shape so small that the host takes longer to launch its kernels than the device to run them.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Calls {
    pub dtype: Dtype,
    pub n_heads: i64,
    pub d_head: i64,
    pub seq: i64,
    pub rounds: usize,
    /// Of each turn; a batch gives one time, the mean of its calls.
    pub batches: usize,
    pub calls: usize,
}

impl Calls {
    pub fn validate(&self) -> Result<()> {
        let counts = [("rounds", self.rounds, 1000), ("batches", self.batches, 1000), ("calls", self.calls, 200)];
        for (key, value, most) in counts {
            // The device's queue takes some thousand launches before the host must wait.
            ensure!((1..=most).contains(&value), "{key} is {value}: it must lie in 1..{most}");
        }
        for (key, value, most) in [("n_heads", self.n_heads, 16), ("d_head", self.d_head, 128), ("seq", self.seq, 1024)]
        {
            ensure!((1..=most).contains(&value), "{key} is {value}: it must lie in 1..{most}");
        }
        Ok(())
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum Reply {
    Accepted(Verified),
    Refused(String),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Verified {
    errors: AttentionErrors,
    version: String,
}

pub fn measure(p: &Calls, device: Device) -> Result<Row> {
    if device == Device::Cpu {
        return Err(Fault::NotAvailable {
            needs: "a GPU, whose kernels the host launches".into(),
            has: "a CPU".into(),
        }
        .into());
    }
    let generator = Generator::new(device, SEED)?;
    let inputs = Inputs::draw(&[1, p.n_heads, p.seq, p.d_head], p.dtype.kind(), &generator)?;
    let folder = tempfile::tempdir().context("making a folder for the peer's inputs")?;
    let file = folder.path().join("attention.safetensors");
    let expected = Expected::of(&inputs)?;
    inputs.write(expected.outputs(), &file)?;
    let ours = by_name("flash")?;
    let attention = ours.prepare_causal(p.seq, device)?;
    let errors = expected.errors(&inputs.results(&attention)?)?.within_tolerance(RUST, p.dtype)?;
    inputs.clear()?;
    with_kept(device, |peer| {
        peer.open("calls", json!({}))?;
        let mut verified = BTreeMap::new();
        for column in IN_PYTHON {
            let of_column = match peer.job("verify", json!({ "column": column, "file": file }))? {
                Reply::Refused(reason) => ColumnOutcome::NotRun { reason },
                Reply::Accepted(Verified { errors, version }) => ColumnOutcome::Measured {
                    row: Verified { errors: errors.within_tolerance(column, p.dtype)?, version },
                },
            };
            verified.insert(column, of_column);
        }
        let mut timings = timed(p, &inputs, peer, &verified)?;
        peer.job::<Value>("close", json!({}))?;
        let mut of_column = |name: &str, errors: Option<AttentionErrors>, version| -> Result<_> {
            let errors = errors.map(rounded).transpose()?;
            let passes = timings.remove(name).unwrap_or_default();
            let (verified_seq, none) = (errors.is_some().then_some(p.seq), BTreeMap::new);
            let outcome = ImplementationOutcome {
                version,
                errors,
                verified_seq,
                predicted_bytes: none(),
                passes,
                energy: BTreeMap::new(),
            };
            Ok((name.to_string(), outcome))
        };
        let mut columns = BTreeMap::from([of_column(RUST, Some(errors), None)?]);
        for (name, of) in &verified {
            let of = of.measured();
            columns.extend([of_column(name, of.map(|of| of.errors), of.map(|of| of.version.clone()))?]);
        }
        Ok(Row { columns, energy_missing: None })
    })
}

type Timings = BTreeMap<String, BTreeMap<AttentionPass, ColumnOutcome<Samples>>>;

fn timed(
    p: &Calls,
    inputs: &Inputs,
    peer: &mut TorchPeer,
    verified: &BTreeMap<&'static str, ColumnOutcome<Verified>>,
) -> Result<Timings> {
    let peer = RefCell::new(peer);
    let peer = &peer;
    let mut names = Vec::new();
    let mut variants = Vec::new();
    for pass in PASSES {
        names.push((RUST, pass));
        variants.push(Variant::new(move || turn(p, inputs, pass)));
        for (&column, of) in verified {
            names.push((column, pass));
            variants.push(Variant::prepared(of, move |_| {
                let settings =
                    json!({ "column": column, "attention_pass": pass, "batches": p.batches, "calls": p.calls });
                Ok([(LAP.to_string(), peer.borrow_mut().job("turn", settings)?)].into())
            }));
        }
    }
    take_turns(p.rounds, &mut variants)?;
    let mut timings = Timings::new();
    for ((name, pass), variant) in names.into_iter().zip(variants) {
        // The host's time has no floor: it ends before the device's does.
        let seconds = variant
            .ended()
            .try_map(|mut laps: Laps| Samples::seconds_unbounded(laps.remove(LAP).context("a turn timed no call")?))?;
        timings.entry(name.to_string()).or_default().insert(pass, seconds);
    }
    Ok(timings)
}

/// As `Calls.turn` of the peer.
fn turn(p: &Calls, inputs: &Inputs, pass: AttentionPass) -> Result<Laps> {
    let device = inputs.device();
    let seconds = eager(by_name("flash")?, pass, inputs, |clear, call| {
        let mut seconds = Vec::with_capacity(p.batches + 1);
        for _ in 0..=p.batches {
            synchronize(device)?;
            let start = Instant::now();
            for _ in 0..p.calls {
                call()?;
                clear()?;
            }
            seconds.push(start.elapsed().as_secs_f64() / p.calls as f64);
        }
        synchronize(device)?;
        // The first batch warms up.
        Ok(seconds.split_off(1))
    })?;
    Ok([(LAP.to_string(), seconds)].into())
}
