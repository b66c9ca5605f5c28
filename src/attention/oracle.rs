//! The float64 oracle: random and adversarial cases, their exact answers, and error bounds that follow from the arithmetic.

use std::cell::RefCell;
use std::fmt;

use anyhow::{Context as _, Result, anyhow, ensure};
use proptest::sample::select;
use proptest::strategy::Strategy;
use proptest::test_runner::{Config, RngSeed, TestCaseError, TestError, TestRunner};
use tch::{Device, Kind, Tensor};

use super::inputs::Generator;
use super::tiled::Tile;
use super::{Attention as _, accumulation_kind, naive};

/// One case; everything that it needs is drawn from `seed`.
#[derive(Debug, Clone)]
pub struct Case {
    pub leading: Vec<i64>,
    pub n_queries: i64,
    pub n_keys: i64,
    pub d: i64,
    pub tile: Tile,
    pub is_causal: bool,
    pub kind: Kind,
    /// q and k are multiplied by this, scores therefore by its square.
    pub scale: f64,
    pub fill: Fill,
    pub layout: Layout,
    pub seed: u32,
}

/// What the scores look like.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fill {
    Normal,
    /// q is zero: all scores are equal, and `o` is the mean of the visible values.
    EqualScores,
    /// Key j is j+1 times as long, so that the row maximum keeps moving to later tiles.
    Rising,
}

/// How q, k, v and do lie in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layout {
    Contiguous,
    /// All strides reversed, as after a chain of transposes.
    Reversed,
}

/// The inputs of a case, rounded to its kind.
pub struct Inputs {
    pub q: Tensor,
    pub k: Tensor,
    pub v: Tensor,
    pub d_o: Tensor,
}

impl Case {
    /// A small well-behaved case to be varied: `Case { n_keys: 1, ..Case::plain() }`.
    pub fn plain() -> Self {
        Self {
            leading: vec![2],
            n_queries: 24,
            n_keys: 40,
            d: 16,
            tile: Tile { queries: 16, keys: 16 },
            is_causal: false,
            kind: Kind::Float,
            scale: 1.0,
            fill: Fill::Normal,
            layout: Layout::Contiguous,
            seed: 0,
        }
    }

    pub fn inputs(&self) -> Result<Inputs> {
        let mut random = Generator::new(self.seed);
        let mut draw = |n: i64, scale: f64| -> Result<Tensor> {
            let shape = [self.leading.as_slice(), &[n, self.d]].concat();
            let reversed: Vec<i64> = shape.iter().rev().copied().collect();
            let dims: Vec<i64> = (0..shape.len() as i64).rev().collect();
            let drawn = match self.layout {
                Layout::Contiguous => random.randn(&shape, Kind::Double, Device::Cpu)?,
                Layout::Reversed => random.randn(&reversed, Kind::Double, Device::Cpu)?.f_permute(&dims)?,
            };
            Ok(drawn.f_mul_scalar(scale)?)
        };
        let mut q = draw(self.n_queries, self.scale)?;
        let mut k = draw(self.n_keys, self.scale)?;
        let (v, d_o) = (draw(self.n_keys, 1.0)?, draw(self.n_queries, 1.0)?);
        match self.fill {
            Fill::Normal => {}
            Fill::EqualScores => q = q.f_zero_()?,
            Fill::Rising => {
                k = k.f_mul(
                    &Tensor::f_arange_start(1, self.n_keys + 1, (Kind::Double, Device::Cpu))?.f_unsqueeze(-1)?,
                )?;
            }
        }
        let [q, k, v, d_o] = [q, k, v, d_o].map(|t| t.f_to_kind(self.kind));
        Ok(Inputs { q: q?, k: k?, v: v?, d_o: d_o? })
    }
}

/// Random cases: ragged shapes, free leading dimensions, tiles from one row to more than everything.
pub fn cases(is_causal: impl Strategy<Value = bool>) -> impl Strategy<Value = Case> {
    let leading = select(vec![vec![], vec![2], vec![3], vec![1, 3], vec![2, 2]]);
    let tile = || select(vec![1_i64, 2, 3, 5, 8, 16, 17, 32, 64]);
    let kind = select(vec![Kind::Float, Kind::BFloat16, Kind::Half, Kind::Double]);
    let fill = select(vec![Fill::Normal, Fill::Normal, Fill::EqualScores, Fill::Rising]);
    let layout = select(vec![Layout::Contiguous, Layout::Reversed]);
    let shape = (leading, 1..=48_i64, 1..=48_i64, 1..=40_i64, tile(), tile());
    (shape, is_causal, kind, select(vec![0.1, 1.0, 4.0]), fill, layout, 0..u32::MAX).prop_map(
        |((leading, n_queries, n_keys, d, queries, keys), is_causal, kind, scale, fill, layout, seed)| {
            let tile = Tile { queries, keys };
            Case { leading, n_queries, n_keys, d, tile, is_causal, kind, scale, fill, layout, seed }
        },
    )
}

/// Runs `check` over `count` cases of `cases` and gives the largest error of all; a failure names its smallest case.
///
/// The seed is fixed, so that a failure repeats; `PROPTEST_CASES` and `PROPTEST_RNG_SEED` override count and seed.
pub fn over<C: fmt::Debug>(
    count: u32,
    cases: impl Strategy<Value = C>,
    check: impl Fn(&C) -> Result<Worst>,
) -> Result<Worst> {
    let mut config = Config { failure_persistence: None, ..Config::default() };
    if std::env::var_os("PROPTEST_CASES").is_none() {
        config.cases = count;
    }
    if std::env::var_os("PROPTEST_RNG_SEED").is_none() {
        config.rng_seed = RngSeed::Fixed(336);
    }
    let worst = RefCell::new(Worst::default());
    let outcome = TestRunner::new(config).run(&cases, |case| {
        let reached = check(&case).map_err(|e| TestCaseError::fail(format!("{e:#}")))?;
        worst.borrow_mut().merge(&reached);
        Ok(())
    });
    match outcome {
        Ok(()) => Ok(worst.into_inner()),
        Err(TestError::Fail(reason, case)) => Err(anyhow!("{reason}\nin the smallest failing case {case:?}")),
        Err(TestError::Abort(reason)) => Err(anyhow!("the random cases were given up: {reason}")),
    }
}

/// What a case must give, in float64, with the bound that each element's error may reach.
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
fn unit_roundoff(kind: Kind) -> f64 {
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
/// sum of n terms adds n u. This gives rho, the relative error of any probability. The rest is the triangle inequality:
/// sum_j P_ij = 1, sum_i P_ij <= C, and |dP|, |D| <= G = max_ij sum_c |do_ic v_jc|.
pub fn expected(inputs: &Inputs, is_causal: bool) -> Result<Expected> {
    let kind = inputs.q.kind();
    let leaves = [&inputs.q, &inputs.k, &inputs.v].map(|t| t.to_kind(Kind::Double).detach().set_requires_grad(true));
    let d_o = inputs.d_o.f_to_kind(Kind::Double)?;
    let weighted = naive::attention(&leaves[0], &leaves[1], &leaves[2], is_causal)?.f_mul(&d_o)?.f_sum(None)?;
    let gradients = Tensor::f_run_backward(&[weighted], &leaves, false, false)?;
    let [dq, dk, dv] = <[Tensor; 3]>::try_from(gradients).map_err(|_| anyhow!("three leaves, three gradients"))?;
    let [q, k, v] = leaves.map(|t| t.detach());
    let (o, lse) = naive::Naive.forward(&q, &k, &v, is_causal)?;

    let (d, n_keys, n_queries) =
        (q.size()[q.dim() - 1] as f64, k.size()[k.dim() - 2] as f64, q.size()[q.dim() - 2] as f64);
    let (u, u_out) = (unit_roundoff(accumulation_kind(kind)), unit_roundoff(kind));
    let magnitude = largest(&q.f_abs()?.f_matmul(&k.f_abs()?.f_transpose(-2, -1)?)?)? / d.sqrt();
    let rho = (2.0 * (d + 2.0) + 8.0) * u * magnitude + (3.0 * n_keys + 16.0) * u;
    let p = q.f_matmul(&k.f_transpose(-2, -1)?)?.f_div_scalar(d.sqrt())?;
    let p = if is_causal {
        p.f_masked_fill(&super::hidden(0..n_queries as i64, 0..n_keys as i64, Device::Cpu)?, f64::NEG_INFINITY)?
    } else {
        p
    };
    let column = largest(&p.f_softmax(-1, None)?.f_sum_dim_intlist([-2_i64].as_slice(), false, None)?)?; // C
    let upstream = largest(&d_o.f_abs()?.f_matmul(&v.f_abs()?.f_transpose(-2, -1)?)?)?; // G
    let rho_backward = rho + 2.0 * u * largest(&lse)?;
    // The error of dS_ij over P_ij: P's own, that of dP and D as sums of d products, and o as rounded for D.
    let ds = 2.0 * upstream * rho_backward + 2.0 * (d + 2.0) * u * upstream + u_out * upstream;
    let ds_row = ds + 2.0 * n_keys * u * upstream;
    let ds_column = column * (ds + 2.0 * n_queries * u * upstream);

    let bounded = |value: Tensor, absolute: f64, relative: f64| -> Result<Bounded> {
        let bound = value.f_abs()?.f_mul_scalar(1.01 * relative)?.f_add_scalar(absolute)?;
        Ok(Bounded { value, bound })
    };
    let tiny = smallest_subnormal(kind);
    Ok(Expected {
        o: bounded(o, rho * largest(&v)? + tiny, u_out)?,
        lse: bounded(lse, rho, 2.0 * u)?,
        dq: bounded(dq, ds_row * largest(&k)? / d.sqrt() + tiny, u_out)?,
        dk: bounded(dk, ds_column * largest(&q)? / d.sqrt() + tiny, u_out)?,
        dv: bounded(dv, column * (rho_backward + n_queries * u) * largest(&d_o)? + tiny, u_out)?,
    })
}

fn largest(t: &Tensor) -> Result<f64> {
    Ok(t.f_abs()?.f_max()?.f_double_value(&[])?)
}

/// The largest error met so far, as it is and as a fraction of its bound.
#[derive(Debug, Clone, Default)]
pub struct Worst {
    pub cases: usize,
    pub absolute: f64,
    pub of_bound: f64,
}

impl Worst {
    pub fn merge(&mut self, other: &Self) {
        self.cases += other.cases;
        self.absolute = self.absolute.max(other.absolute);
        self.of_bound = self.of_bound.max(other.of_bound);
    }
}

impl fmt::Display for Worst {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { cases, absolute, of_bound } = self;
        write!(f, "{cases} cases, largest error {absolute:.2e}, at most {:.1}% of its bound", of_bound * 100.0)
    }
}

/// Holds `actual` against `expected`: same shape, the right kind, no element beyond its bound, no NaN.
pub fn hold(name: &str, actual: &Tensor, kind: Kind, expected: &Bounded) -> Result<Worst> {
    ensure!(actual.kind() == kind, "{name} is {:?}, must be {kind:?}", actual.kind());
    ensure!(
        actual.size() == expected.value.size(),
        "{name} has shape {:?}, must have {:?}",
        actual.size(),
        expected.value.size()
    );
    let error = actual.f_to_kind(Kind::Double)?.f_sub(&expected.value)?.f_abs()?;
    // An exact result with a bound of zero (an lse of float64 zero) is 0/0, which must not read as NaN.
    let ratio = error.f_div(&expected.bound.f_clamp_min(f64::MIN_POSITIVE)?)?;
    let (absolute, of_bound) = (largest(&error)?, largest(&ratio)?);
    // A NaN anywhere makes the maximum NaN, which is not <= 1.
    if !(of_bound <= 1.0) {
        let at = ratio.f_nan_to_num(f64::INFINITY, None, None)?.f_argmax(None, false)?.f_int64_value(&[])?;
        let value =
            |t: &Tensor| -> Result<f64> { Ok(t.f_reshape([-1_i64])?.f_to_kind(Kind::Double)?.f_double_value(&[at])?) };
        let (got, exact, bound) = (value(actual)?, value(&expected.value)?, value(&expected.bound)?);
        return Err(anyhow!("element {at} is {got:.9e}, exact is {exact:.9e}, the bound of its error {bound:.2e}"))
            .with_context(|| format!("{name} is wrong"));
    }
    Ok(Worst { cases: 0, absolute, of_bound })
}
