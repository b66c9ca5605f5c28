//! The tolerance of FlashAttention's own tests: a kernel's error is at most twice that of the plain operations in the same
//! kind, plus a rounding.
//!
//! [`super::error_bounds`]'s bounds follow from float32 sums of float32 products; a kernel that rounds its probabilities to
//! the kind of `v` for the tensor cores exceeds them by design.

use std::fmt;

use anyhow::{Context as _, Result, anyhow, ensure};
use tch::{Device, Kind, Tensor};

use super::cases::Tally;
use super::error_bounds::{largest, unit_roundoff};
use super::{Attention, differentiate, naive};
use crate::torch::Generator;

/// Inputs and the upstream gradient of one case, in the kind that is tested.
pub struct Case {
    pub name: String,
    pub q: Tensor,
    pub k: Tensor,
    pub v: Tensor,
    pub d_o: Tensor,
    pub is_causal: bool,
}

/// Which passes are checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Passes {
    Forward,
    Both,
}

/// The largest error of each result as a fraction of its tolerance.
#[derive(Debug, Clone, Default)]
pub struct ErrorShares {
    pub cases: u32,
    worst: [f64; 5],
}

/// What a run of both passes gives, in this order.
pub const RESULTS: [&str; 5] = ["o", "lse", "dq", "dk", "dv"];

/// FlashAttention's ragged lengths (of queries, of keys), and tiles, their neighbours and single rows.
pub const RAGGED: [(i64, i64); 18] = [
    (64, 128),
    (128, 128),
    (192, 256),
    (384, 384),
    (1, 1),
    (1, 200),
    (200, 1),
    (63, 65),
    (113, 203),
    (239, 1),
    (799, 3),
    (108, 256),
    (256, 512),
    (640, 128),
    (1023, 1024),
    (1024, 1023),
    (1500, 1500),
    (2048, 2048),
];

impl ErrorShares {
    /// Of all results.
    pub fn largest(&self) -> f64 {
        self.worst.into_iter().fold(0.0, f64::max)
    }
}

impl Case {
    /// Normal values times `scale`; q (leading.., n_queries, d) and k, v (leading.., n_keys, d).
    pub fn draw(
        device: Device,
        leading: &[i64],
        [n_queries, n_keys, d]: [i64; 3],
        kind: Kind,
        is_causal: bool,
        scale: f64,
    ) -> Result<Self> {
        let generator = Generator::new(Device::Cpu, n_queries * 31 + n_keys * 7 + d)?;
        let draw = |n: i64| -> Result<Tensor> {
            let values = generator.randn(&[leading, &[n, d]].concat(), Kind::Float)?;
            Ok(values.f_mul_scalar(scale)?.f_to_kind(kind)?.f_to_device(device)?)
        };
        let (q, k, v, d_o) = (draw(n_queries)?, draw(n_keys)?, draw(n_keys)?, draw(n_queries)?);
        let mask = if is_causal { "causal" } else { "no mask" };
        let name = format!("{leading:?} x {n_queries} x {n_keys} x {d}, {kind:?}, {mask}, scale {scale}");
        Ok(Self { name, q, k, v, d_o, is_causal })
    }

    /// The same with fewer heads of k and v: one for each `group_size` of q's.
    pub fn grouped(mut self, group_size: i64) -> Result<Self> {
        for t in [&mut self.k, &mut self.v] {
            let heads = t.size().iter().rev().nth(2).copied().context("a grouped case has heads")?;
            *t = t.f_narrow(-3, 0, heads / group_size)?.f_contiguous()?;
        }
        self.name += &format!(", {group_size} query heads a group");
        Ok(self)
    }

    /// `[o, lse, dq, dk, dv]` of `implementation`, with the inputs in `kind`.
    pub fn run(&self, implementation: &dyn Attention, kind: Kind) -> Result<[Tensor; 5]> {
        let results = self.results(implementation, kind, Passes::Both)?;
        <[Tensor; 5]>::try_from(results).map_err(|got| anyhow!("{} results", got.len()))
    }

    fn results(&self, implementation: &dyn Attention, kind: Kind, passes: Passes) -> Result<Vec<Tensor>> {
        let inputs = [&self.q, &self.k, &self.v, &self.d_o];
        // Without a copy where the kind is theirs: strides are part of a case.
        let cast = |t: &Tensor| if t.kind() == kind { Ok(t.shallow_clone()) } else { t.f_to_kind(kind) };
        let [q, k, v, d_o] = inputs.map(cast);
        let (q, k, v, d_o) = (q?, k?, v?, d_o?);
        let (o, lse) = implementation.forward(&q, &k, &v, self.is_causal)?;
        if passes == Passes::Forward {
            return Ok(vec![o, lse]);
        }
        let [dq, dk, dv] = implementation.backward([&q, &k, &v, &o, &lse, &d_o], self.is_causal)?;
        Ok(vec![o, lse, dq, dk, dv])
    }

    /// Eq. 4 to 6 in the inputs' kind, differentiated by libtorch.
    fn plain(&self) -> Result<[Tensor; 4]> {
        let attention = |[q, k, v]: &[Tensor; 3]| naive::attention(q, k, v, self.is_causal);
        let (o, [dq, dk, dv]) = differentiate([&self.q, &self.k, &self.v], &self.d_o, attention)?;
        Ok([o, dq, dk, dv])
    }

    /// Checks these passes of each of `implementations`. Errors: the first result beyond the tolerance, with both errors.
    pub fn check_each(&self, implementations: &[&dyn Attention], passes: Passes) -> Result<ErrorShares> {
        self.check_against(self, implementations, passes)
    }

    /// As [`Self::check_each`] of both passes, with the plain operations on the processor, so that on the GPU only
    /// copies and the kernels of `implementations` run: cuBLAS's kernels for long bfloat16 rows fail under racecheck
    /// even if they are excluded from it.
    pub fn check_against_processor(&self, implementations: &[&dyn Attention]) -> Result<ErrorShares> {
        let [q, k, v, d_o] = [&self.q, &self.k, &self.v, &self.d_o].map(|t| t.f_to_device(Device::Cpu));
        let there = Self { name: self.name.clone(), q: q?, k: k?, v: v?, d_o: d_o?, is_causal: self.is_causal };
        self.check_against(&there, implementations, Passes::Both)
    }

    /// Compares with the plain operations on `reference`: the same case, possibly on another device.
    fn check_against(
        &self,
        reference: &Self,
        implementations: &[&dyn Attention],
        passes: Passes,
    ) -> Result<ErrorShares> {
        let answers = || -> Result<_> { Ok((reference.run(&naive::Naive, Kind::Double)?, reference.plain()?)) };
        let (exact, [o, dq, dk, dv]) = answers().with_context(|| format!("the plain operations on {}", self.name))?;
        // The definition's lse in float32 is close enough to the exact one to stand for it.
        let plain = [o, exact[1].shallow_clone(), dq, dk, dv];
        let mut shares = ErrorShares::default();
        for implementation in implementations {
            let compared = || self.compare(&self.results(*implementation, self.q.kind(), passes)?, &exact, &plain);
            shares.merge(&compared().with_context(|| format!("{} on {}", implementation.name(), self.name))?);
        }
        Ok(shares)
    }

    /// The errors of `ours` against `exact` as shares of what those of `plain` allow.
    fn compare(&self, ours: &[Tensor], exact: &[Tensor; 5], plain: &[Tensor; 5]) -> Result<ErrorShares> {
        let difference =
            |a: &Tensor, b: &Tensor| largest(&a.f_to_device(b.device())?.f_to_kind(Kind::Double)?.f_sub(b)?);
        // Sums of some hundred products in float32 differ by 2^-18 with their order.
        let unit = unit_roundoff(self.q.kind()).max(2f64.powi(-18));
        let mut worst = [0.0; 5];
        for (i, what) in RESULTS.iter().enumerate().take(ours.len()) {
            ensure!(ours[i].size() == exact[i].size(), "{what} has shape {:?}", ours[i].size());
            let (error, allowed) = (difference(&ours[i], &exact[i])?, difference(&plain[i], &exact[i])?);
            let magnitude = largest(&exact[i])?;
            let rounding = if i == 1 { 1e-4 * (1.0 + magnitude) } else { 2.0 * unit * magnitude };
            let bound = (2.0 * allowed + rounding).max(CANCELLED);
            // A NaN fails this comparison.
            ensure!(
                error <= bound,
                "{what} is off by {error:.2e}, the plain operations by {allowed:.2e}; {bound:.2e} are allowed"
            );
            worst[i] = error / bound;
        }
        Ok(ErrorShares { cases: 1, worst })
    }
}

/// The error that sums of some hundred float32 products may leave where they cancel exactly: the gradients of a softmax
/// over one key are zero.
const CANCELLED: f64 = 2e-5;

impl Tally for ErrorShares {
    fn merge(&mut self, other: &Self) {
        self.cases += other.cases;
        for (worst, other) in self.worst.iter_mut().zip(other.worst) {
            *worst = worst.max(other);
        }
    }
}

impl fmt::Display for ErrorShares {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shares = RESULTS.iter().zip(self.worst).map(|(what, share)| format!("{what} {:.0} %", 100.0 * share));
        let cases = if self.cases == 1 { "1 case".to_string() } else { format!("{} cases", self.cases) };
        write!(f, "{cases}; largest errors of what is allowed: {}", shares.collect::<Vec<_>>().join(", "))
    }
}

/// Large scores, equal rows, heads that lie inside rows, and a `do` of strides 0, for d columns.
pub fn adversarial(device: Device, d: i64, kind: Kind) -> Result<Vec<Case>> {
    let shape = [150, 150, d];
    let named = |what: &str, case: Case| Case { name: format!("{what}: {}", case.name), ..case };
    let large = Case::draw(device, &[2], shape, kind, true, 6.0)?;
    let mut equal = Case::draw(device, &[2], shape, kind, false, 1.0)?;
    equal.k = equal.k.f_narrow(-2, 0, 1)?.f_expand_as(&equal.k)?.copy();
    let mut strided = Case::draw(device, &[2, 2], shape, kind, true, 1.0)?;
    let turn = |t: &Tensor| t.f_transpose(1, 2)?.f_contiguous()?.f_transpose(1, 2);
    (strided.q, strided.k, strided.v) = (turn(&strided.q)?, turn(&strided.k)?, turn(&strided.v)?);
    let mut ones = Case::draw(device, &[2], shape, kind, true, 1.0)?;
    ones.d_o = Tensor::f_ones([1, 1, 1], (kind, device))?.f_expand_as(&ones.q)?;
    Ok(vec![
        named("large scores", large),
        named("equal rows", equal),
        named("heads inside rows", strided),
        named("do of ones", ones),
    ])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The definition with one injected fault.
    struct Broken(fn([Tensor; 5]) -> [Tensor; 5]);

    impl Attention for Broken {
        fn name(&self) -> &'static str {
            "broken"
        }

        fn supports(&self, _: Kind, _: Device, _: i64) -> Result<(), String> {
            Ok(())
        }

        fn forward(&self, q: &Tensor, k: &Tensor, v: &Tensor, is_causal: bool) -> Result<(Tensor, Tensor)> {
            let (o, lse) = naive::Naive.forward(q, k, v, is_causal)?;
            let [o, lse, ..] = (self.0)([o, lse, q.copy(), k.copy(), v.copy()]);
            Ok((o, lse))
        }

        fn backward(&self, saved: [&Tensor; 6], is_causal: bool) -> Result<[Tensor; 3]> {
            let [_, _, _, o, lse, _] = saved;
            let [dq, dk, dv] = naive::Naive.backward(saved, is_causal)?;
            let [.., dq, dk, dv] = (self.0)([o.copy(), lse.copy(), dq, dk, dv]);
            Ok([dq, dk, dv])
        }
    }

    #[test]
    fn the_definition_is_within_the_tolerance_and_small_faults_are_not() {
        for kind in [Kind::Float, Kind::BFloat16, Kind::Half] {
            let case = Case::draw(Device::Cpu, &[2], [40, 50, 16], kind, true, 1.0).unwrap();
            case.check_each(&[&Broken(|results| results)], Passes::Both).unwrap();
            let breaks: [fn([Tensor; 5]) -> [Tensor; 5]; 5] = [
                |[o, lse, dq, dk, dv]| [o * 1.05, lse, dq, dk, dv],
                |[o, lse, dq, dk, dv]| [o, lse * std::f64::consts::LOG2_E, dq, dk, dv],
                |[o, lse, dq, dk, dv]| [o, lse, dq * 0.95, dk, dv],
                |[o, lse, dq, dk, dv]| [o, lse, dq, dk.roll(1, -2), dv],
                |[o, lse, dq, dk, dv]| [o, lse, dq, dk, dv * f64::NAN],
            ];
            for (what, wrong) in RESULTS.iter().zip(breaks) {
                let error = format!("{:#}", case.check_each(&[&Broken(wrong)], Passes::Both).unwrap_err());
                assert!(error.contains(&format!("{what} is off by")), "{kind:?}, {what}: {error}");
            }
        }
    }
}
