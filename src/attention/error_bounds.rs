//! Exact answers in float64, and error bounds that follow from the arithmetic instead of being tuned.

use std::fmt;

use anyhow::{Context as _, Result, anyhow, ensure};
use tch::{Kind, Tensor};

use super::cases::{Inputs, Tally};
use super::{Attention as _, Shape, accumulation_kind, differentiate, naive};

/// The exact results of a case in float64, with the bound that each element's error may reach.
pub struct Expected {
    pub o: Bounded,
    pub lse: Bounded,
    pub dq: Bounded,
    pub dk: Bounded,
    pub dv: Bounded,
}

/// A float64 value and the largest permitted error, element by element.
pub struct Bounded {
    pub value: Tensor,
    pub bound: Tensor,
}

/// Half the distance from 1 to the next number of this kind.
pub(super) fn unit_roundoff(kind: Kind) -> f64 {
    match kind {
        Kind::Double => (-53.0_f64).exp2(),
        Kind::Half => (-11.0_f64).exp2(),
        Kind::BFloat16 => (-8.0_f64).exp2(),
        _ => (-24.0_f64).exp2(),
    }
}

/// Values below the normal range lose bits; float16 is the only kind here whose results come near it.
fn smallest_subnormal(kind: Kind) -> f64 {
    if kind == Kind::Half { (-24.0_f64).exp2() } else { 0.0 }
}

/// The answers of `inputs` in float64: o and lse by Eq. 4-6 and 12, the gradients by libtorch's autograd over Eq. 4-6.
///
/// The bounds follow from the arithmetic, so that they need no tuning and hold for every shape and scale.
/// With u the unit roundoff of the accumulation kind, u_out that of the output, and M = max_ij sum_c |q_ic k_jc| / sqrt(d):
/// a score is a sum of d products (error <= (d+2) u M, Higham's gamma), it is subtracted from a maximum or from lse
/// and exponentiated (each <= 2 u M more), and rescaling by exp(m_old - m_new) telescopes to another 2 u M; a row
/// sum of n terms adds n u. This gives rho, the relative error of any probability. The rest is the triangle
/// inequality: sum_j P_ij = 1, sum_i P_ij <= C, and |dP|, |D| <= G = max_ij sum_c |do_ic v_jc|.
pub fn expected(inputs: &Inputs, is_causal: bool) -> Result<Expected> {
    let kind = inputs.q.kind();
    let [q, k, v, d_o] = [&inputs.q, &inputs.k, &inputs.v, &inputs.d_o].map(|t| t.to_kind(Kind::Double));
    let (_, [dq, dk, dv]) = differentiate([&q, &k, &v], &d_o, |[q, k, v]| naive::attention(q, k, v, is_causal))?;
    let (o, lse) = naive::Naive.forward(&q, &k, &v, is_causal)?;
    let m = Magnitudes::of(&q, &k, &v, &d_o, is_causal)?;

    let (u, u_out) = (unit_roundoff(accumulation_kind(kind)), unit_roundoff(kind));
    let rho = (2.0 * (m.d + 2.0) + 8.0) * u * m.score + (3.0 * m.n_keys + 16.0) * u;
    let rho_backward = rho + 2.0 * u * largest(&lse)?;
    // The error of dS_ij over P_ij: P's own, that of dP and D as sums of d products, and that of o as rounded for D.
    let ds = m.upstream * (2.0 * rho_backward + 2.0 * (m.d + 2.0) * u + u_out);
    let ds_row = ds + 2.0 * m.n_keys * u * m.upstream;
    let ds_column = m.column * (ds + 2.0 * m.n_queries * u * m.upstream);
    let tiny = smallest_subnormal(kind);
    Ok(Expected {
        o: bounded(o, rho * largest(&v)? + tiny, u_out)?,
        lse: bounded(lse, rho, 2.0 * u)?,
        dq: bounded(dq, ds_row * largest(&k)? / m.d.sqrt() + tiny, u_out)?,
        dk: bounded(dk, ds_column * largest(&q)? / m.d.sqrt() + tiny, u_out)?,
        dv: bounded(dv, m.column * (rho_backward + m.n_queries * u) * largest(&d_o)? + tiny, u_out)?,
    })
}

/// The quantities in the bounds.
struct Magnitudes {
    n_queries: f64,
    n_keys: f64,
    d: f64,
    /// M, the largest that a score's terms add up to in absolute value.
    score: f64,
    /// G, the same for the terms of dP.
    upstream: f64,
    /// C, the largest column sum of the probabilities.
    column: f64,
}

impl Magnitudes {
    fn of(q: &Tensor, k: &Tensor, v: &Tensor, d_o: &Tensor, is_causal: bool) -> Result<Self> {
        let shape = Shape::of(q, k, v)?;
        let product = |a: &Tensor, b: &Tensor| -> Result<f64> {
            largest(&a.f_abs()?.f_matmul(&b.f_abs()?.f_transpose(-2, -1)?)?)
        };
        let p = naive::scores(q, k, is_causal)?.f_softmax(-1, None)?;
        Ok(Self {
            n_queries: shape.n_queries as f64,
            n_keys: shape.n_keys as f64,
            d: shape.d as f64,
            score: product(q, k)? * shape.scale(),
            upstream: product(d_o, v)?,
            column: largest(&p.f_sum_dim_intlist([-2_i64].as_slice(), false, None)?)?,
        })
    }
}

fn bounded(value: Tensor, absolute: f64, relative: f64) -> Result<Bounded> {
    let bound = value.f_abs()?.f_mul_scalar(1.01 * relative)?.f_add_scalar(absolute)?;
    Ok(Bounded { value, bound })
}

pub(super) fn largest(t: &Tensor) -> Result<f64> {
    Ok(t.f_abs()?.f_max()?.f_double_value(&[])?)
}

/// The largest errors so far, kind by kind.
#[derive(Debug, Clone, Default)]
pub struct LargestErrors {
    pub cases: usize,
    by_kind: Vec<Reached>,
}

#[derive(Debug, Clone)]
struct Reached {
    kind: Kind,
    absolute: f64,
    /// As a fraction of the bound at that element.
    of_bound: f64,
}

impl Tally for LargestErrors {
    fn merge(&mut self, other: &Self) {
        self.cases += other.cases;
        for reached in &other.by_kind {
            match self.by_kind.iter_mut().find(|r| r.kind == reached.kind) {
                Some(r) => {
                    r.absolute = r.absolute.max(reached.absolute);
                    r.of_bound = r.of_bound.max(reached.of_bound);
                }
                None => self.by_kind.push(reached.clone()),
            }
        }
    }
}

impl fmt::Display for LargestErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} cases; largest error", self.cases)?;
        for (i, Reached { kind, absolute, of_bound }) in self.by_kind.iter().enumerate() {
            let comma = if i > 0 { "," } else { "" };
            write!(f, "{comma} {kind:?} {absolute:.1e} ({:.0}% of its bound)", of_bound * 100.0)?;
        }
        Ok(())
    }
}

/// Compares `actual` with `expected`: same shape, the right kind, no element beyond its bound, no NaN.
pub fn compare(name: &str, actual: &Tensor, kind: Kind, expected: &Bounded) -> Result<LargestErrors> {
    ensure!(actual.kind() == kind, "{name} is {:?}, must be {kind:?}", actual.kind());
    let (shape, expected_shape) = (actual.size(), expected.value.size());
    ensure!(shape == expected_shape, "{name} has shape {shape:?}, must have {expected_shape:?}");
    let error = actual.f_to_kind(Kind::Double)?.f_sub(&expected.value)?.f_abs()?;
    // An exact result with a bound of zero (an lse of float64 zero) is 0/0, which must not read as NaN.
    let ratio = error.f_div(&expected.bound.f_clamp_min(f64::MIN_POSITIVE)?)?;
    let (absolute, of_bound) = (largest(&error)?, largest(&ratio)?);
    // A NaN anywhere makes the maximum NaN.
    if of_bound.is_nan() || of_bound > 1.0 {
        let at = ratio.f_nan_to_num(f64::INFINITY, None, None)?.f_argmax(None, false)?.f_int64_value(&[])?;
        let value =
            |t: &Tensor| -> Result<f64> { Ok(t.f_reshape([-1_i64])?.f_to_kind(Kind::Double)?.f_double_value(&[at])?) };
        let (got, exact, bound) = (value(actual)?, value(&expected.value)?, value(&expected.bound)?);
        return Err(anyhow!("element {at} is {got:.9e}, exact is {exact:.9e}, the bound of its error {bound:.2e}"))
            .with_context(|| format!("{name} is wrong"));
    }
    Ok(LargestErrors { cases: 0, by_kind: vec![Reached { kind, absolute, of_bound }] })
}
