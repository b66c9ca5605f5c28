//! What all implementations of one case do: shape, type, passes and protocol.

use std::collections::BTreeMap;

use anyhow::Result;
use tch::Device;

use super::measure::{Cell, Launch, Leaderboard};
use crate::attention::implementations::Implementation;
use crate::bench::attention::Inputs;
use crate::bench::attention_memory::{Accounting, refused_by_prediction};
use crate::bench::dtype::Dtype;
use crate::bench::timing::{Cache, Pace, Protocol};
use crate::bench::work::AttentionPass;
use crate::error::Fault;
use crate::harness::record::Profile;
use crate::torch::Generator;

/// What all implementations of one case do.
pub struct Task {
    /// (batch, heads, n, d).
    pub shape: [i64; 4],
    pub dtype: Dtype,
    pub launch: Launch,
    pub passes: &'static [AttentionPass],
    pub protocol: Protocol,
    pub rounds: usize,
    /// Whether q, k and v are parts of one leaf, as in the leaderboard's function.
    pub unpacked: bool,
    /// Of calls back to back after the timed ones, whose energy is read; 0 for none.
    pub energy_s: f64,
}

impl Task {
    pub fn of_cell(cell: &Cell) -> Self {
        let &Cell { dtype, d_model, seq, batch, cache, pace, launch, rounds, .. } = cell;
        let &Cell { warmup_ms, rep_ms, most_repeats, energy_s, .. } = cell;
        Self {
            shape: [batch, 1, seq, d_model],
            dtype,
            launch,
            passes: &[AttentionPass::Forward, AttentionPass::Backward, AttentionPass::Both],
            protocol: Protocol { cache, pace, warmup_ms, rep_ms, most_repeats },
            rounds,
            unpacked: false,
            energy_s,
        }
    }

    pub fn of_leaderboard(leaderboard: &Leaderboard) -> Self {
        let &Leaderboard { dtype, n_heads, d_head, seq, warmup_ms, rep_ms } = leaderboard;
        Self {
            shape: [1, n_heads, seq, d_head],
            dtype,
            launch: Launch::Eager,
            passes: &[AttentionPass::Summed],
            protocol: Protocol { cache: Cache::Cold, pace: Pace::Sustained, warmup_ms, rep_ms, most_repeats: 0 },
            rounds: 1,
            unpacked: true,
            energy_s: 0.0,
        }
    }

    pub fn seq(&self) -> i64 {
        self.shape[2]
    }

    /// Of all heads, those that a mask hides included.
    pub fn scores(&self) -> i64 {
        let [batch, heads, seq, _] = self.shape;
        batch * heads * seq * seq
    }

    /// The inputs of a given length.
    pub fn draw(&self, seq: i64, generator: &Generator) -> Result<Inputs> {
        let ([batch, heads, _, d], kind) = (self.shape, self.dtype.kind());
        match self.unpacked {
            true => Inputs::draw_unpacked(heads, seq, d, kind, generator),
            false => Inputs::draw(&[batch, heads, seq, d], kind, generator),
        }
    }

    /// Bytes of tensors at the peak of each pass, inputs and a mask of T^2 bytes included; none without a formula.
    pub fn predicted_bytes(&self, implementation: &Implementation, device: Device) -> BTreeMap<AttentionPass, u64> {
        if !implementation.keeps_scores() {
            return BTreeMap::new();
        }
        let [batch, heads, seq, d] = self.shape.map(|n| n.unsigned_abs());
        let element_bytes = self.dtype.kind().elt_size_in_bytes() as u64;
        let profile = if device == Device::Cpu { Profile::Cpu } else { Profile::Gpu };
        let plain = Accounting::of(batch * heads, seq, d, element_bytes, profile);
        let of_pass = |pass| match pass {
            AttentionPass::Forward => plain.forward_peak_bytes,
            AttentionPass::Backward | AttentionPass::Both | AttentionPass::Summed => plain.peak_bytes(),
        };
        self.passes.iter().map(|pass| (*pass, seq * seq + of_pass(*pass))).collect()
    }

    /// A CPU overcommits memory, so the prediction refuses the case. On a GPU the allocator refuses it.
    pub fn refused(&self, by: &Implementation, pass: AttentionPass, device: Device) -> Result<Option<Fault>> {
        let predicted = self.predicted_bytes(by, device).get(&pass).copied();
        let (Device::Cpu, Some(bytes)) = (device, predicted) else { return Ok(None) };
        refused_by_prediction(bytes)
    }
}
