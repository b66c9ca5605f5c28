//! Broken FlashAttention-2: one compact implementation, a list of single faults, and the check that must catch each.

use anyhow::{Result, bail};
use libtest_mimic::Trial;
use tch::{Kind, Tensor};

use cs336::attention::accumulation_kind;
use cs336::attention::tiled::Tile;
use cs336::harness::problem::Verdict;
use cs336::problems::flash_backward::checks::{self as flash_backward, Saved};
use cs336::problems::flash_forward;
use cs336::torch::autograd;

use super::{caught, control};

/// Single mistakes of the kinds that people make.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum AttentionFault {
    ScaleByD,
    MaskHidesDiagonal,
    MaskShowsNextKey,
    MaskIgnored,
    MaskInTileCoordinates,
    NoMaximum,
    MaximumOfFirstTile,
    OutputNotRescaled,
    SumNotRescaled,
    LseBaseTwo,
    LseWithoutMaximum,
    LastKeyTileDropped,
    AccumulatesInBfloat16,
    LseInInputKind,
    SavesRowSumsToo,
    DMissing,
    DFromOutputOnly,
    DkUnscaled,
    DvFromDp,
    DqOverwrittenByEachTile,
    ProbabilitiesWithoutLse,
    BackwardMaskIgnored,
}

const FORWARD: &str = "flash_forward::forward_matches_naive";
const CAUSAL_FORWARD: &str = "flash_forward::causal_forward_matches_naive";
const ADVERSARIAL: &str = "flash_forward::adversarial_inputs";
const CAUSAL_ADVERSARIAL: &str = "flash_forward::causal_adversarial_inputs";
const OFFICIAL: &str = "flash_forward::official_protocol";
const CAUSAL_OFFICIAL: &str = "flash_forward::causal_official_protocol";
const DIFFERENCES: &str = "flash_backward::finite_differences";
const OFFICIAL_BACKWARD: &str = "flash_backward::official_protocol";
const AUTOGRAD: &str = "flash_backward::backward_matches_autograd";

/// A registered check's name, and the check of an implementation with a fault, or without one.
type FaultyCheck = (&'static str, fn(Option<AttentionFault>) -> Result<Verdict>);

const CHECKS: &[FaultyCheck] = &[
    (FORWARD, |fault| flash_forward::forward_matches_naive(&forward_with(fault), false)),
    (CAUSAL_FORWARD, |fault| flash_forward::forward_matches_naive(&forward_with(fault), true)),
    (ADVERSARIAL, |fault| flash_forward::adversarial_inputs(&forward_with(fault), false)),
    (CAUSAL_ADVERSARIAL, |fault| flash_forward::adversarial_inputs(&forward_with(fault), true)),
    (OFFICIAL, |fault| flash_forward::official_protocol(&node_with(fault), false)),
    (CAUSAL_OFFICIAL, |fault| flash_forward::official_protocol(&node_with(fault), true)),
    (DIFFERENCES, |fault| flash_backward::finite_differences(&backward_with(fault))),
    (OFFICIAL_BACKWARD, |fault| flash_backward::official_protocol(&node_with(fault))),
    (AUTOGRAD, |fault| flash_backward::backward_matches_autograd(&backward_with(fault))),
];

/// Each fault, the check that must catch it, and a part of the message.
const FAULTS: &[(AttentionFault, &str, &str)] = &[
    (AttentionFault::ScaleByD, OFFICIAL, "o is off by up to"),
    (AttentionFault::MaskHidesDiagonal, CAUSAL_OFFICIAL, "o is off by up to"),
    (AttentionFault::MaskShowsNextKey, CAUSAL_FORWARD, "o is wrong"),
    (AttentionFault::MaskIgnored, CAUSAL_OFFICIAL, "o is off by up to"),
    (AttentionFault::MaskInTileCoordinates, CAUSAL_ADVERSARIAL, "o is wrong"),
    (AttentionFault::NoMaximum, ADVERSARIAL, "scores near a thousand"),
    (AttentionFault::MaximumOfFirstTile, ADVERSARIAL, "scores near a thousand"),
    (AttentionFault::OutputNotRescaled, FORWARD, "o is wrong"),
    (AttentionFault::SumNotRescaled, FORWARD, "o is wrong"),
    (AttentionFault::LseBaseTwo, OFFICIAL, "L is off by up to"),
    (AttentionFault::LseWithoutMaximum, FORWARD, "lse is wrong"),
    (AttentionFault::LastKeyTileDropped, FORWARD, "o is wrong"),
    (AttentionFault::AccumulatesInBfloat16, FORWARD, "o is wrong"),
    (AttentionFault::LseInInputKind, FORWARD, "lse is wrong"),
    (AttentionFault::SavesRowSumsToo, OFFICIAL, "exactly one saved tensor must have shape [4, 128]"),
    (AttentionFault::DMissing, DIFFERENCES, "dq[0] is off the difference quotient"),
    (AttentionFault::DFromOutputOnly, DIFFERENCES, "dq[0] is off the difference quotient"),
    (AttentionFault::DkUnscaled, DIFFERENCES, "dk[0] is off the difference quotient"),
    (AttentionFault::DvFromDp, DIFFERENCES, "dv[0] is off the difference quotient"),
    (AttentionFault::DqOverwrittenByEachTile, AUTOGRAD, "dq is wrong"),
    (AttentionFault::ProbabilitiesWithoutLse, OFFICIAL_BACKWARD, "dq is off by up to"),
    (AttentionFault::BackwardMaskIgnored, OFFICIAL_BACKWARD, "is_causal true"),
];

/// One test for each fault, and one for each check that the correct implementation passes.
pub fn trials() -> Vec<Trial> {
    let faulty = FAULTS.iter().map(|&(fault, name, words)| {
        let (_, check) = CHECKS.iter().find(|(known, _)| *known == name).expect("a check of the table");
        caught("attention", &format!("{fault:?}"), name, words, move || check(Some(fault)))
    });
    let sound = CHECKS.iter().map(|(name, check)| control("attention", name, move || check(None)));
    faulty.chain(sound).collect()
}

fn forward_with(
    fault: Option<AttentionFault>,
) -> impl Fn(&Tensor, &Tensor, &Tensor, bool, Tile) -> Result<(Tensor, Tensor)> {
    move |q, k, v, is_causal, tile| Ok(forward(fault, q, k, v, is_causal, tile))
}

fn backward_with(fault: Option<AttentionFault>) -> impl Fn(&Saved, bool, Tile) -> Result<[Tensor; 3]> {
    move |saved, is_causal, tile| Ok(backward(fault, saved, is_causal, tile))
}

fn node_with(fault: Option<AttentionFault>) -> impl Fn(&Tensor, &Tensor, &Tensor, bool) -> Result<Tensor> {
    move |q, k, v, is_causal| Ok(autograd::apply(Node { fault, is_causal }, &[q, k, v])?.remove(0))
}

/// Algorithm 1 with the given fault.
fn forward(
    fault: Option<AttentionFault>,
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    is_causal: bool,
    tile: Tile,
) -> (Tensor, Tensor) {
    let has = |f| fault == Some(f);
    let wide = if has(AttentionFault::AccumulatesInBfloat16) { Kind::BFloat16 } else { accumulation_kind(q.kind()) };
    let (n_queries, n_keys) = (q.size()[q.dim() - 2], k.size()[k.dim() - 2]);
    let [mut os, mut lses] = [Vec::new(), Vec::new()];
    for i in (0..n_queries).step_by(tile.queries as usize) {
        let q_i = rows(q, i, tile.queries).to_kind(wide);
        let mut o = q_i.zeros_like();
        let mut l = q_i.narrow(-1, 0, 1).zeros_like();
        let mut m = l.full_like(f64::NEG_INFINITY);
        for j in (0..n_keys).step_by(tile.keys as usize) {
            if has(AttentionFault::LastKeyTileDropped) && j > 0 && j + tile.keys > n_keys {
                continue;
            }
            let (k_j, v_j) = (rows(k, j, tile.keys).to_kind(wide), rows(v, j, tile.keys).to_kind(wide));
            let s = scores(fault, &q_i, &k_j, is_causal && !has(AttentionFault::MaskIgnored), i, j);
            let m_new = match fault {
                Some(AttentionFault::NoMaximum) => m.zeros_like(),
                Some(AttentionFault::MaximumOfFirstTile) if j > 0 => m.copy(),
                _ => m.maximum(&s.amax(-1, true)),
            };
            let p = (s - &m_new).exp();
            let rescale = (&m - &m_new).exp();
            l = if has(AttentionFault::SumNotRescaled) { l } else { l * &rescale } + p.sum_dim_intlist(-1, true, None);
            o = if has(AttentionFault::OutputNotRescaled) { o } else { o * &rescale } + p.matmul(&v_j);
            m = m_new;
        }
        let lse = match fault {
            Some(AttentionFault::LseBaseTwo) => m / std::f64::consts::LN_2 + l.log2(),
            Some(AttentionFault::LseWithoutMaximum) => l.log(),
            _ => m + l.log(),
        };
        os.push((o / l).to_kind(q.kind()));
        lses.push(lse.squeeze_dim(-1));
    }
    // Its kind is right again after the round trip, but its value is rounded.
    let stored = if has(AttentionFault::LseInInputKind) { q.kind() } else { accumulation_kind(q.kind()) };
    (Tensor::cat(&os, -2), Tensor::cat(&lses, -1).to_kind(stored).to_kind(accumulation_kind(q.kind())))
}

/// Eq. 13-19 with the given fault.
fn backward(fault: Option<AttentionFault>, saved: &Saved, is_causal: bool, tile: Tile) -> [Tensor; 3] {
    let has = |f| fault == Some(f);
    let kind = saved.q.kind();
    let wide = accumulation_kind(kind);
    let [q, k, v, o, lse, d_o] = [saved.q, saved.k, saved.v, saved.o, saved.lse, saved.d_o].map(|t| t.to_kind(wide));
    let scale = 1.0 / (q.size()[q.dim() - 1] as f64).sqrt();
    let lse = lse.unsqueeze(-1);
    let d = match fault {
        Some(AttentionFault::DMissing) => lse.zeros_like(),
        Some(AttentionFault::DFromOutputOnly) => (&o * &o).sum_dim_intlist(-1, true, None),
        _ => (&o * &d_o).sum_dim_intlist(-1, true, None),
    };
    let (n_queries, n_keys) = (q.size()[q.dim() - 2], k.size()[k.dim() - 2]);
    let dq = q.zeros_like();
    let [mut dks, mut dvs] = [Vec::new(), Vec::new()];
    for j in (0..n_keys).step_by(tile.keys as usize) {
        let (k_j, v_j) = (rows(&k, j, tile.keys), rows(&v, j, tile.keys));
        let (mut dk_j, mut dv_j) = (k_j.zeros_like(), v_j.zeros_like());
        for i in (0..n_queries).step_by(tile.queries as usize) {
            let (q_i, d_o_i) = (rows(&q, i, tile.queries), rows(&d_o, i, tile.queries));
            let s = scores(fault, &q_i, &k_j, is_causal && !has(AttentionFault::BackwardMaskIgnored), i, j);
            let p = match fault {
                Some(AttentionFault::ProbabilitiesWithoutLse) => s.softmax(-1, None).nan_to_num(0.0, None, None),
                _ => (s - rows(&lse, i, tile.queries)).exp(),
            };
            let dp = d_o_i.matmul(&v_j.transpose(-2, -1));
            dv_j += if has(AttentionFault::DvFromDp) { &dp } else { &p }.transpose(-2, -1).matmul(&d_o_i);
            let ds = p * (dp - rows(&d, i, tile.queries));
            let (mut dq_i, part) = (rows(&dq, i, tile.queries), ds.matmul(&k_j) * scale);
            if has(AttentionFault::DqOverwrittenByEachTile) {
                dq_i.copy_(&part);
            } else {
                dq_i += part;
            }
            dk_j += ds.transpose(-2, -1).matmul(&q_i) * if has(AttentionFault::DkUnscaled) { 1.0 } else { scale };
        }
        dks.push(dk_j);
        dvs.push(dv_j);
    }
    [dq.to_kind(kind), Tensor::cat(&dks, -2).to_kind(kind), Tensor::cat(&dvs, -2).to_kind(kind)]
}

/// Eq. 4 for the tiles that start at query `i` and key `j`.
fn scores(fault: Option<AttentionFault>, q_i: &Tensor, k_j: &Tensor, is_causal: bool, i: i64, j: i64) -> Tensor {
    let d = q_i.size()[q_i.dim() - 1] as f64;
    let scale = if fault == Some(AttentionFault::ScaleByD) { 1.0 / d } else { 1.0 / d.sqrt() };
    let s = q_i.matmul(&k_j.transpose(-2, -1)) * scale;
    if !is_causal {
        return s;
    }
    let shift = match fault {
        Some(AttentionFault::MaskHidesDiagonal) => i - j - 1,
        Some(AttentionFault::MaskShowsNextKey) => i - j + 1,
        Some(AttentionFault::MaskInTileCoordinates) => 0,
        _ => i - j,
    };
    let hidden = s.ones_like().to_kind(Kind::Bool).triu(shift + 1);
    s.masked_fill(&hidden, f64::NEG_INFINITY)
}

fn rows(t: &Tensor, start: i64, size: i64) -> Tensor {
    t.narrow(-2, start, size.min(t.size()[t.dim() - 2] - start))
}

/// The broken implementation with the official test's signature.
struct Node {
    fault: Option<AttentionFault>,
    is_causal: bool,
}

const TILE: Tile = Tile { queries: 32, keys: 16 };

impl autograd::Function for Node {
    fn forward(&mut self, inputs: &[Tensor]) -> Result<autograd::Forward> {
        let [q, k, v] = inputs else { bail!("q, k and v") };
        let (o, lse) = forward(self.fault, q, k, v, self.is_causal, TILE);
        let mut saved = vec![q.shallow_clone(), k.shallow_clone(), v.shallow_clone(), o.shallow_clone(), lse];
        if self.fault == Some(AttentionFault::SavesRowSumsToo) {
            saved.push(o.sum_dim_intlist(-1, false, None));
        }
        Ok(autograd::Forward { outputs: vec![o], saved })
    }

    fn backward(&self, saved: &[Tensor], grad_outputs: &[Option<Tensor>]) -> Result<Vec<Option<Tensor>>> {
        let ([q, k, v, o, lse, ..], [Some(d_o)]) = (saved, grad_outputs) else { bail!("what forward saved") };
        Ok(backward(self.fault, &Saved { q, k, v, o, lse, d_o }, self.is_causal, TILE).map(Some).into())
    }
}
