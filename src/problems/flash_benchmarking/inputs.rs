//! The tensors of one case, made before any clock starts.

use anyhow::{Context as _, Result};
use tch::{Device, Kind, Tensor};

use crate::torch::Generator;
use crate::torch::autograd::release_grad;

/// q, k and v with the upstream gradient of o; the gradients end in `leaves`.
pub struct Inputs {
    pub leaves: Vec<Tensor>,
    pub q: Tensor,
    pub k: Tensor,
    pub v: Tensor,
    pub d_o: Tensor,
}

impl Inputs {
    /// Standard normal values of `shape` (batch, heads, n, d), each a tensor of its own.
    pub fn draw(shape: [i64; 4], kind: Kind, generator: &Generator) -> Result<Self> {
        let normal = || normal(&shape, kind, generator);
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

    /// dq, dk and dv out of the leaves' gradients, whichever way they are held; the leaves have none afterwards.
    pub fn take_gradients(&self) -> Result<[Tensor; 3]> {
        let gradients = match &self.leaves[..] {
            [one] => one.f_grad()?.f_unbind(0)?,
            several => several.iter().map(Tensor::f_grad).collect::<Result<_, _>>()?,
        };
        self.clear()?;
        <[Tensor; 3]>::try_from(gradients).ok().context("three gradients")
    }

    /// Drops the gradients.
    pub fn clear(&self) -> Result<()> {
        self.leaves.iter().try_for_each(release_grad)
    }
}

fn normal(shape: &[i64], kind: Kind, generator: &Generator) -> Result<Tensor> {
    Ok(generator.randn(shape, Kind::Float)?.f_to_kind(kind)?)
}
