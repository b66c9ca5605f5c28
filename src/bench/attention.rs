//! The inputs of timed attention, its results, and its passes as CUDA graphs.

use std::path::Path;

use anyhow::{Context as _, Result, bail};
use tch::{Device, Kind, Tensor};

use super::work::AttentionPass;
use crate::attention::implementations::Prepared;
use crate::torch::Generator;
use crate::torch::autograd::{backward_from, release_grad};
use crate::torch::graph::{Captured, on_side_stream};
use crate::torch::safetensors;

/// q, k and v (.., n, d) with the upstream gradient of o. The gradients end in `leaves`.
pub struct Inputs {
    pub leaves: Vec<Tensor>,
    pub q: Tensor,
    pub k: Tensor,
    pub v: Tensor,
    pub d_o: Tensor,
}

impl Inputs {
    /// Standard normal values of `shape`, each tensor a leaf of its own.
    pub fn draw(shape: &[i64], kind: Kind, generator: &Generator) -> Result<Self> {
        let normal = || normal(shape, kind, generator);
        let leaf = || -> Result<Tensor> { Ok(normal()?.f_set_requires_grad(true)?) };
        let [q, k, v] = [leaf()?, leaf()?, leaf()?];
        let leaves = [&q, &k, &v].map(Tensor::shallow_clone).into();
        Ok(Self { leaves, q, k, v, d_o: normal()? })
    }

    /// As the leaderboard's function has them: parts of one leaf (3, heads, n, d), unpacked under autograd.
    pub fn draw_unpacked(n_heads: i64, seq: i64, d_head: i64, kind: Kind, generator: &Generator) -> Result<Self> {
        let leaf = normal(&[3, n_heads, seq, d_head], kind, generator)?.f_set_requires_grad(true)?;
        let parts = tch::with_grad(|| leaf.f_unbind(0))?;
        let [q, k, v] = <[Tensor; 3]>::try_from(parts).ok().context("three parts")?;
        let d_o = Tensor::f_ones(q.size(), (kind, generator.device()))?;
        Ok(Self { leaves: vec![leaf], q, k, v, d_o })
    }

    pub fn seq(&self) -> i64 {
        self.q.size()[self.q.dim() - 2]
    }

    pub fn head_dim(&self) -> i64 {
        self.q.size()[self.q.dim() - 1]
    }

    pub fn device(&self) -> Device {
        self.q.device()
    }

    /// Copies the values of `other` into these tensors, which graphs read.
    pub fn load(&self, other: &Self) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        for (to, from) in [(&self.q, &other.q), (&self.k, &other.k), (&self.v, &other.v), (&self.d_o, &other.d_o)] {
            to.f_detach()?.f_copy_(from)?;
        }
        Ok(())
    }

    /// o, dq, dk and dv of one forward and one backward pass.
    pub fn results(&self, attention: &dyn Fn(&Tensor, &Tensor, &Tensor) -> Result<Tensor>) -> Result<[Tensor; 4]> {
        let o = attention(&self.q, &self.k, &self.v)?;
        backward_from(&o, &self.d_o, false)?;
        let [dq, dk, dv] = self.take_gradients()?;
        Ok([o.f_detach()?, dq, dk, dv])
    }

    /// dq, dk and dv out of the leaves' gradients, whichever way they are held; the leaves have none afterwards.
    pub fn take_gradients(&self) -> Result<[Tensor; 3]> {
        let gradients = match &self.leaves[..] {
            [one] => one.f_grad()?.f_unbind(0)?,
            several => several.iter().map(Tensor::f_grad).collect::<Result<_, _>>()?,
        };
        self.clear()?;
        <[Tensor; 3]>::try_from(gradients).ok().context("three gradients")
    }

    /// Writes what the Python peer is verified on: the inputs, and the expected o, dq, dk and dv.
    pub fn write(&self, expected: &[Tensor; 4], file: &Path) -> Result<()> {
        let Self { q, k, v, d_o, .. } = self;
        let names = ["q", "k", "v", "d_o", "expected_o", "expected_dq", "expected_dk", "expected_dv"];
        let tensors = [q, k, v, d_o].into_iter().chain(expected);
        safetensors::write(&names.into_iter().zip(tensors).collect::<Vec<_>>(), file)
    }

    /// Drops the gradients.
    pub fn clear(&self) -> Result<()> {
        self.leaves.iter().try_for_each(release_grad)
    }
}

fn normal(shape: &[i64], kind: Kind, generator: &Generator) -> Result<Tensor> {
    Ok(generator.randn(shape, Kind::Float)?.f_to_kind(kind)?)
}

/// The passes of one attention as CUDA graphs, so that a replay costs one launch whatever it holds.
pub struct GraphReplays {
    forward: Captured<Tensor>,
    backward: Captured<[Tensor; 3]>,
    both: Option<Captured<[Tensor; 4]>>,
    /// Holds what the graphs read beside the inputs.
    _attention: Prepared,
}

impl GraphReplays {
    /// Captures the forward and the backward pass over `inputs`, which must outlive the graphs, and `with_both`, the two as
    /// one graph.
    ///
    /// Errors: [`crate::error::Fault::NotAvailable`] on the CPU; CUDA's error for operations that cannot be captured.
    pub fn new(attention: Prepared, inputs: &Inputs, with_both: bool) -> Result<Self> {
        let device = inputs.device();
        on_side_stream(device, || (0..3).try_for_each(|_| inputs.results(&attention).map(drop)))?;
        let forward = Captured::capture(device, || attention(&inputs.q, &inputs.k, &inputs.v))?;
        let backward = Captured::capture(device, || {
            backward_from(forward.output(), &inputs.d_o, false)?;
            inputs.take_gradients()
        })?;
        let both = with_both.then(|| Captured::capture(device, || inputs.results(&attention))).transpose()?;
        Ok(Self { forward, backward, both, _attention: attention })
    }

    pub fn replay(&self, pass: AttentionPass) -> Result<()> {
        match (pass, &self.both) {
            (AttentionPass::Forward, _) => self.forward.replay(),
            (AttentionPass::Backward, _) => self.backward.replay(),
            (AttentionPass::Both, Some(both)) => both.replay(),
            _ => bail!("the pass {pass:?} is not captured"),
        }
    }

    /// o, dq, dk and dv as the two single passes give them, and as the joint one does.
    pub fn results(&self) -> Result<Vec<[Tensor; 4]>> {
        let apart = |t: &Tensor| t.f_detach_copy();
        self.forward.replay()?;
        self.backward.replay()?;
        let [dq, dk, dv] = self.backward.output();
        let mut results = vec![[apart(self.forward.output())?, apart(dq)?, apart(dk)?, apart(dv)?]];
        if let Some(both) = &self.both {
            both.replay()?;
            let [o, dq, dk, dv] = both.output();
            results.push([apart(o)?, apart(dq)?, apart(dk)?, apart(dv)?]);
        }
        Ok(results)
    }
}
