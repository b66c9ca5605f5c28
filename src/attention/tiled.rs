//! FlashAttention-2 in tensor operations: Algorithm 1 forward, Eq. 13-19 with D backward, never a whole score matrix.

use std::ops::Range;

use anyhow::{Result, ensure};
use tch::{Device, Kind, Tensor};

use super::{
    Attention, Shape, accumulation_kind, hidden, repeat_heads, require_saved, sum_heads, supports_floating_point,
};

/// B_q and B_k: how many queries and keys are worked on at a time. The last tile of each may be shorter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tile {
    pub queries: i64,
    pub keys: i64,
}

/// FlashAttention-2 with these tiles.
pub struct Tiled {
    pub tile: Tile,
}

impl Tiled {
    /// A tile size that is common in GPU kernels; on a CPU a tile's scores then fit its second-level cache.
    pub const DEFAULT: Self = Self { tile: Tile { queries: 128, keys: 128 } };
}

impl Attention for Tiled {
    fn name(&self) -> &'static str {
        "tiled"
    }

    fn supports(&self, kind: Kind, _device: Device, _head_dim: i64) -> Result<(), String> {
        supports_floating_point(kind)
    }

    fn forward(&self, q: &Tensor, k: &Tensor, v: &Tensor, is_causal: bool) -> Result<(Tensor, Tensor)> {
        forward(q, k, v, is_causal, self.tile)
    }

    fn backward(&self, saved: [&Tensor; 6], is_causal: bool) -> Result<[Tensor; 3]> {
        backward(saved, is_causal, self.tile)
    }
}

/// Algorithm 1: `(o, lse)` for any shape, `o` in the kind of `q`, `lse` in its accumulation kind.
pub fn forward(q: &Tensor, k: &Tensor, v: &Tensor, is_causal: bool, tile: Tile) -> Result<(Tensor, Tensor)> {
    let _no_graph = tch::no_grad_guard();
    let shape = Shape::of(q, k, v)?;
    tile.validate()?;
    let (k, v) = (&repeat_heads(k, shape.group_size)?, &repeat_heads(v, shape.group_size)?);
    let wide = (accumulation_kind(q.kind()), q.device());
    let o = Tensor::f_empty(q.size(), (q.kind(), q.device()))?;
    let lse = Tensor::f_empty(&q.size()[..q.dim() - 1], wide)?;
    for queries in tiles(shape.n_queries, tile.queries) {
        let (o_i, lse_i) =
            forward_rows(&rows(q, &queries)?.f_to_kind(wide.0)?, k, v, &queries, &shape, is_causal, tile)?;
        rows(&o, &queries)?.f_copy_(&o_i)?;
        lse.f_narrow(-1, queries.start, length(&queries))?.f_copy_(&lse_i)?;
    }
    Ok((o, lse))
}

/// The inner loop of Algorithm 1: one query tile against every key tile that it can see.
fn forward_rows(
    q_i: &Tensor,
    k: &Tensor,
    v: &Tensor,
    queries: &Range<i64>,
    shape: &Shape,
    is_causal: bool,
    tile: Tile,
) -> Result<(Tensor, Tensor)> {
    let column = [&q_i.size()[..q_i.dim() - 1], &[1]].concat();
    let mut o = q_i.f_zeros_like()?;
    let mut l = q_i.f_new_zeros(&column, (q_i.kind(), q_i.device()))?;
    let mut m = q_i.f_new_full(&column, f64::NEG_INFINITY, (q_i.kind(), q_i.device()))?;
    for keys in tiles(shape.n_keys, tile.keys).take_while(|keys| !is_causal || keys.start < queries.end) {
        let (k_j, v_j) = (rows(k, &keys)?.f_to_kind(q_i.kind())?, rows(v, &keys)?.f_to_kind(q_i.kind())?);
        let s = tile_scores(q_i, &k_j, queries, &keys, shape, is_causal)?;
        let m_new = m.f_maximum(&s.f_amax([-1_i64], true)?)?;
        let p = s.f_sub(&m_new)?.f_exp()?;
        // The first tile holds key 0, which every query sees: m_new is finite from here on and exp(-inf - m_new) is 0.
        let rescale = m.f_sub(&m_new)?.f_exp()?;
        l = l.f_mul(&rescale)?.f_add(&p.f_sum_dim_intlist([-1_i64].as_slice(), true, None)?)?;
        o = o.f_mul(&rescale)?.f_add(&p.f_matmul(&v_j)?)?;
        m = m_new;
    }
    Ok((o.f_div(&l)?, m.f_add(&l.f_log()?)?.f_squeeze_dim(-1)?))
}

/// Eq. 13-19 by tiles: `[dq, dk, dv]` as [`Attention::backward`]; keys outside, queries inside, as Algorithm 2.
pub fn backward([q, k, v, o, lse, d_o]: [&Tensor; 6], is_causal: bool, tile: Tile) -> Result<[Tensor; 3]> {
    let _no_graph = tch::no_grad_guard();
    let shape = Shape::of(q, k, v)?;
    tile.validate()?;
    let (narrow, wide) = (q.kind(), accumulation_kind(q.kind()));
    require_saved(q, o, lse, d_o)?;
    let (k, v) = (&repeat_heads(k, shape.group_size)?, &repeat_heads(v, shape.group_size)?);
    let (lse, d_o) = (lse.f_unsqueeze(-1)?, d_o.f_to_kind(wide)?);
    let d = d_o.f_mul(&o.f_to_kind(wide)?)?.f_sum_dim_intlist([-1_i64].as_slice(), true, None)?;
    let dq = Tensor::f_zeros(q.size(), (wide, q.device()))?;
    // The heads of a group are added before they are rounded.
    let sums = if shape.group_size == 1 { narrow } else { wide };
    let [dk, dv] = [Tensor::f_empty(k.size(), (sums, k.device()))?, Tensor::f_empty(k.size(), (sums, k.device()))?];
    for keys in tiles(shape.n_keys, tile.keys) {
        let (k_j, v_j) = (rows(k, &keys)?.f_to_kind(wide)?, rows(v, &keys)?.f_to_kind(wide)?);
        let (mut dk_j, mut dv_j) = (k_j.f_zeros_like()?, v_j.f_zeros_like()?);
        for queries in tiles(shape.n_queries, tile.queries).filter(|queries| !is_causal || keys.start < queries.end) {
            let (q_i, d_o_i) = (rows(q, &queries)?.f_to_kind(wide)?, rows(&d_o, &queries)?);
            let s = tile_scores(&q_i, &k_j, &queries, &keys, &shape, is_causal)?;
            let p = s.f_sub(&rows(&lse, &queries)?)?.f_exp()?; // Eq. 14
            dv_j = dv_j.f_add(&p.f_transpose(-2, -1)?.f_matmul(&d_o_i)?)?; // Eq. 15
            let dp = d_o_i.f_matmul(&v_j.f_transpose(-2, -1)?)?; // Eq. 16
            let ds = p.f_mul(&dp.f_sub(&rows(&d, &queries)?)?)?.f_mul_scalar(shape.scale())?; // Eq. 17
            let _in_place = rows(&dq, &queries)?.f_add_(&ds.f_matmul(&k_j)?)?; // Eq. 18
            dk_j = dk_j.f_add(&ds.f_transpose(-2, -1)?.f_matmul(&q_i)?)?; // Eq. 19
        }
        rows(&dk, &keys)?.f_copy_(&dk_j)?;
        rows(&dv, &keys)?.f_copy_(&dv_j)?;
    }
    let [dk, dv] = [dk, dv].map(|t| Ok::<_, anyhow::Error>(sum_heads(&t, shape.group_size)?.f_to_kind(narrow)?));
    Ok([dq.f_to_kind(narrow)?, dk?, dv?])
}

/// Eq. 13 for one pair of tiles; index comparison only where the diagonal passes through it.
fn tile_scores(
    q_i: &Tensor,
    k_j: &Tensor,
    queries: &Range<i64>,
    keys: &Range<i64>,
    shape: &Shape,
    is_causal: bool,
) -> Result<Tensor> {
    let s = q_i.f_matmul(&k_j.f_transpose(-2, -1)?)?.f_mul_scalar(shape.scale())?;
    if !is_causal || keys.end <= queries.start + 1 {
        return Ok(s);
    }
    Ok(s.f_masked_fill(&hidden(queries.clone(), keys.clone(), s.device())?, f64::NEG_INFINITY)?)
}

impl Tile {
    fn validate(self) -> Result<()> {
        let Self { queries, keys } = self;
        ensure!(queries > 0 && keys > 0, "a tile of {queries} queries and {keys} keys is empty");
        Ok(())
    }
}

/// The ranges `[0, size), [size, 2 size), ...` up to `n`, the last one shorter where `n` is no multiple.
fn tiles(n: i64, size: i64) -> impl Iterator<Item = Range<i64>> {
    (0..n).step_by(size as usize).map(move |start| start..n.min(start + size))
}

/// A view of these rows of the second-to-last dimension.
fn rows(t: &Tensor, range: &Range<i64>) -> Result<Tensor> {
    Ok(t.f_narrow(-2, range.start, length(range))?)
}

fn length(range: &Range<i64>) -> i64 {
    range.end - range.start
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_cover_every_index_once() {
        assert_eq!(tiles(7, 3).collect::<Vec<_>>(), [0..3, 3..6, 6..7]);
        assert!(tiles(2, 64).eq(std::iter::once(0..2)));
    }

    #[test]
    fn an_empty_tile_and_a_wrong_lse_are_errors() {
        let t = Tensor::zeros([4, 2], (Kind::Float, Device::Cpu));
        assert!(forward(&t, &t, &t, false, Tile { queries: 0, keys: 4 }).is_err());
        let tile = Tile { queries: 2, keys: 2 };
        let error = backward([&t; 6], false, tile).unwrap_err().to_string();
        assert!(error.contains("lse is [4, 2]"), "{error}");
    }
}
