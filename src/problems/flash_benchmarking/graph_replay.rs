//! The passes of one implementation as CUDA graphs, so that a replay costs one launch whatever it holds.

use anyhow::{Result, bail};
use tch::Tensor;

use super::inputs::Inputs;
use crate::attention::implementations::{Implementation, Prepared};
use crate::bench::work::AttentionPass;
use crate::torch::autograd::backward_from;
use crate::torch::graph::{Captured, on_side_stream};

/// Each over the case's inputs, which must outlive it.
pub struct GraphReplays {
    forward: Captured<Tensor>,
    backward: Captured<[Tensor; 3]>,
    both: Captured<[Tensor; 4]>,
    /// Holds what the graphs read beside the inputs.
    _attention: Prepared,
}

impl GraphReplays {
    /// Errors: [`crate::error::Fault::NotAvailable`] on the CPU; CUDA's error for operations that cannot be captured.
    pub fn new(implementation: &Implementation, inputs: &Inputs) -> Result<Self> {
        let device = inputs.device();
        let attention = implementation.prepare_causal(inputs.seq(), device)?;
        let Inputs { q, k, v, d_o, .. } = inputs;
        on_side_stream(device, || {
            for _ in 0..3 {
                backward_from(&attention(q, k, v)?, d_o, false)?;
                inputs.clear()?;
            }
            Ok(())
        })?;
        let forward = Captured::capture(device, || attention(q, k, v))?;
        let backward = Captured::capture(device, || {
            backward_from(forward.output(), d_o, false)?;
            inputs.take_gradients()
        })?;
        let both = Captured::capture(device, || {
            let o = attention(q, k, v)?;
            backward_from(&o, d_o, false)?;
            let [dq, dk, dv] = inputs.take_gradients()?;
            Ok([o.f_detach()?, dq, dk, dv])
        })?;
        Ok(Self { forward, backward, both, _attention: attention })
    }

    pub fn replay(&self, pass: AttentionPass) -> Result<()> {
        match pass {
            AttentionPass::Forward => self.forward.replay(),
            AttentionPass::Backward => self.backward.replay(),
            AttentionPass::Both => self.both.replay(),
            AttentionPass::Summed => bail!("the leaderboard's function is not captured"),
        }
    }

    /// o, dq, dk and dv as the two single passes give them, and as the joint one does.
    pub fn outputs(&self) -> Result<[[Tensor; 4]; 2]> {
        self.replay(AttentionPass::Forward)?;
        self.replay(AttentionPass::Backward)?;
        self.replay(AttentionPass::Both)?;
        let apart = |t: &Tensor| t.f_detach_copy();
        let [dq, dk, dv] = self.backward.output();
        let single = [apart(self.forward.output())?, apart(dq)?, apart(dk)?, apart(dv)?];
        let [o, dq, dk, dv] = self.both.output();
        Ok([single, [apart(o)?, apart(dq)?, apart(dk)?, apart(dv)?]])
    }
}
