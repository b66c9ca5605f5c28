//! The passes of one entrant as CUDA graphs, so that a replay costs one launch whatever it holds.

use anyhow::{Result, bail};
use tch::Tensor;

use super::contest::Pass;
use super::entrants::{Entrant, Run};
use super::inputs::Inputs;
use crate::torch::autograd::backward_from;
use crate::torch::graph::{Captured, on_side_stream};

/// Each over the case's inputs, which must outlive it.
pub struct Replays {
    forward: Captured<Tensor>,
    backward: Captured<[Tensor; 3]>,
    both: Captured<[Tensor; 4]>,
    /// Holds what the graphs read beside the inputs.
    _attention: Run<'static>,
}

impl Replays {
    /// Errors: [`crate::error::Fault::NotAvailable`] on the CPU; CUDA's words for what a graph cannot hold.
    pub fn new(entrant: &Entrant, inputs: &Inputs) -> Result<Self> {
        let device = inputs.device();
        let attention = entrant.prepare(inputs.seq(), device)?;
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

    pub fn replay(&self, pass: Pass) -> Result<()> {
        match pass {
            Pass::Forward => self.forward.replay(),
            Pass::Backward => self.backward.replay(),
            Pass::Both => self.both.replay(),
            Pass::Summed => bail!("the leaderboard's function is not captured"),
        }
    }

    /// o, dq, dk and dv as the two single passes give them, and as the joint one does.
    pub fn outputs(&self) -> Result<[[Tensor; 4]; 2]> {
        self.replay(Pass::Forward)?;
        self.replay(Pass::Backward)?;
        self.replay(Pass::Both)?;
        let apart = |t: &Tensor| t.f_detach_copy();
        let [dq, dk, dv] = self.backward.output();
        let single = [apart(self.forward.output())?, apart(dq)?, apart(dk)?, apart(dv)?];
        let [o, dq, dk, dv] = self.both.output();
        Ok([single, [apart(o)?, apart(dq)?, apart(dk)?, apart(dv)?]])
    }
}
