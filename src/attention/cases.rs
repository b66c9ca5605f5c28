//! Cases for the checks of attention: random ones from proptest and the shapes of inputs that they are built from.

use std::cell::RefCell;
use std::fmt;
use std::panic::resume_unwind;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use anyhow::{Result, anyhow};
use proptest::sample::select;
use proptest::strategy::Strategy;
use proptest::test_runner::{Config, RngSeed, TestCaseError, TestError, TestRunner};
use tch::{Device, Kind, Tensor};

use super::tiled::Tile;
use crate::torch::Generator;

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
        let generator = Generator::new(Device::Cpu, self.seed.into())?;
        let draw = |n: i64, scale: f64| -> Result<Tensor> {
            let shape = [self.leading.as_slice(), &[n, self.d]].concat();
            let reversed: Vec<i64> = shape.iter().rev().copied().collect();
            let dims: Vec<i64> = (0..shape.len() as i64).rev().collect();
            let drawn = match self.layout {
                Layout::Contiguous => generator.randn(&shape, Kind::Float)?,
                Layout::Reversed => generator.randn(&reversed, Kind::Float)?.f_permute(&dims)?,
            };
            Ok(drawn.f_to_kind(Kind::Double)?.f_mul_scalar(scale)?)
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

/// Random cases: ragged shapes, free leading dimensions, tiles from one row to more than all rows.
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

/// Each waits for a compiler most of the time, or computes on a GPU whose memory holds this many cases.
const THREADS: usize = 16;

/// The combined result of several checks.
pub trait Tally: Default {
    fn merge(&mut self, other: &Self);
}

/// The merged results of `check` for every item, on [`THREADS`] threads, so that kernels are compiled side by side. The
/// threads take the items in their order. Errors: those of `check`; the items that nobody has taken yet are left out then.
pub fn in_threads<I: Send, T: Tally + Send>(
    items: impl IntoIterator<Item = I, IntoIter: Send>,
    check: impl Fn(I) -> Result<T> + Sync,
) -> Result<T> {
    let (items, has_failed) = (Mutex::new(items.into_iter()), AtomicBool::new(false));
    let next = || items.lock().ok()?.next().filter(|_| !has_failed.load(Ordering::Relaxed));
    let check_items = || -> Result<T> {
        let mut all = T::default();
        while let Some(item) = next() {
            all.merge(&check(item).inspect_err(|_| has_failed.store(true, Ordering::Relaxed))?);
        }
        Ok(all)
    };
    let results: Vec<Result<T>> = thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS).map(|_| scope.spawn(check_items)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic))).collect()
    });
    let mut all = T::default();
    for result in results {
        all.merge(&result?);
    }
    Ok(all)
}

/// Runs `check` over `count` cases of `cases` and gives the largest error of all; a failure names its smallest case.
///
/// The seed is fixed, so that a failure repeats; `PROPTEST_CASES` and `PROPTEST_RNG_SEED` override count and seed.
pub fn over<C: fmt::Debug, T: Tally>(
    count: u32,
    cases: impl Strategy<Value = C>,
    check: impl Fn(&C) -> Result<T>,
) -> Result<T> {
    let mut config = Config { failure_persistence: None, ..Config::default() };
    if std::env::var_os("PROPTEST_CASES").is_none() {
        config.cases = count;
    }
    if std::env::var_os("PROPTEST_RNG_SEED").is_none() {
        config.rng_seed = RngSeed::Fixed(336);
    }
    let worst = RefCell::new(T::default());
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

#[cfg(test)]
mod tests {
    use anyhow::ensure;

    use super::*;

    #[derive(Default)]
    struct Count(u32);

    impl Tally for Count {
        fn merge(&mut self, other: &Self) {
            self.0 += other.0;
        }
    }

    #[test]
    fn every_item_is_checked_once_until_one_fails() {
        let count = in_threads(0..1000, |_| Ok(Count(1))).unwrap();
        assert_eq!(count.0, 1000);
        let checked = Mutex::new(0);
        let error = in_threads(0..1_000_000_u32, |i| {
            *checked.lock().unwrap() += 1;
            ensure!(i != 3, "item {i} fails");
            Ok(Count(1))
        });
        assert_eq!(error.err().unwrap().to_string(), "item 3 fails");
        assert!(checked.into_inner().unwrap() < 1_000_000);
    }
}
