//! Summary of a trace: time by pass, class and kernel. Every kernel is counted exactly once.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize};

use super::step::{BACKWARD, FORWARD, INFERENCE, OPTIMIZER, WARM_UP};
use crate::attention::naive::{FINAL_MATMUL, SCORES, SOFTMAX};
use crate::bench::kernels::{Class, Tally, Units, is_matmul_operator, short_name};
use crate::torch::trace::ranges::{Placed, Ranges, Span, covered_ns};
use crate::torch::trace::{Event, Trace};

/// What the times are those of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Counted {
    /// Kernels, copies and fills of a GPU.
    Kernels,
    /// libtorch's operators on a CPU, each without the operators that it called.
    Operators,
}

/// A value for each pass of a step; the last three where a training step was run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Passes<T> {
    pub inference: T,
    pub forward: Option<T>,
    pub backward: Option<T>,
    pub optimizer: Option<T>,
}

/// What ran in one range.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RangeWork {
    /// From the start to the end of the range on the host, the final wait for the device included.
    pub host_s: f64,
    /// Sum over all kernels launched in the range.
    pub seconds: f64,
    /// From the start of the first of them to the end of the last, for each time that the range was open; of operators,
    /// `host_s`.
    pub span_s: f64,
    /// The part of the span in which at least one of them ran.
    pub busy_s: f64,
    pub count: u64,
    /// Every class, those without a kernel too.
    pub classes: BTreeMap<Class, Tally>,
    /// Those that take the most time, in falling order.
    pub kernels: Vec<Kernel>,
    /// All the others.
    pub rest: Rest,
}

impl RangeWork {
    /// Errors: the classes, or the kernels and the rest, do not add up to the whole; it was busy for longer than its span, or that is
    /// longer than the range.
    pub fn validate(&self) -> Result<()> {
        let Self { host_s, seconds, span_s, busy_s, count, classes, kernels, rest } = self;
        // Counts of a record may be so large that their sum overflows.
        let by_class = (
            classes.values().map(|class| u128::from(class.count)).sum(),
            classes.values().map(|class| class.seconds).sum(),
        );
        let by_name = (
            kernels.iter().map(|kernel| u128::from(kernel.count)).sum::<u128>() + u128::from(rest.count),
            kernels.iter().map(|kernel| kernel.seconds).sum::<f64>() + rest.seconds,
        );
        for (what, (found, sum)) in [("classes", by_class), ("kernels", by_name)] {
            // Each time is rounded.
            let is_near = (sum - seconds).abs() <= 1e-3 * seconds + 1e-7;
            ensure!(
                found == u128::from(*count) && is_near,
                "{found} kernels of {sum:e} s by {what}, of {count} in {seconds:e} s"
            );
        }
        ensure!(
            *busy_s <= 1.001 * span_s && *span_s <= 1.001 * host_s + 1e-5,
            "busy for {busy_s:e} s of a span of {span_s:e} s, in a range of {host_s:e} s"
        );
        Ok(())
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Kernel {
    /// As [`short_name`] gives it.
    pub name: String,
    pub class: Class,
    pub count: u64,
    pub seconds: f64,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rest {
    pub names: u64,
    pub count: u64,
    pub seconds: f64,
}

/// The three ranges of self-attention within the inference pass, over all layers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Attention {
    /// Q Kᵀ, its scale, and the mask.
    pub scores: RangeWork,
    pub softmax: RangeWork,
    pub final_matmul: RangeWork,
    /// The products alone: matmul kernels of the first and the last range.
    pub products: Tally,
}

/// The matrix products of the inference pass, counted twice over.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Matmuls {
    /// Operators that are one product each.
    pub operators: u64,
    pub kernels: u64,
    /// Kernels that sum the parts of a split product.
    pub helpers: u64,
}

/// One matmul kernel of any pass, and where its name says that it multiplies.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MatmulKernel {
    pub name: String,
    pub units: Units,
    pub count: u64,
}

/// How many kernels a range lists by name.
const LISTED: usize = 12;
const LISTED_IN_ATTENTION: usize = 5;

impl<T> Passes<T> {
    pub fn all(&self) -> Vec<&T> {
        let training = [&self.forward, &self.backward, &self.optimizer];
        std::iter::once(&self.inference).chain(training.into_iter().flatten()).collect()
    }

    pub fn map<U>(&self, change: impl Fn(&T) -> U) -> Passes<U> {
        let Self { inference, forward, backward, optimizer } = self;
        Passes {
            inference: change(inference),
            forward: forward.as_ref().map(&change),
            backward: backward.as_ref().map(&change),
            optimizer: optimizer.as_ref().map(&change),
        }
    }
}

/// The kernels (or operators) of one trace in the ranges of a step.
pub struct Summary<'a> {
    trace: &'a Trace,
    counted: Counted,
    ranges: Ranges,
    placed: Vec<Placed<'a>>,
}

impl<'a> Summary<'a> {
    /// Errors: ranges that do not nest, or of two threads.
    pub fn of(trace: &'a Trace, counted: Counted) -> Result<Self> {
        let ranges = Ranges::of(trace)?;
        let placed = match counted {
            Counted::Kernels => ranges.place_gpu_work(trace),
            Counted::Operators => ranges.place_operators(trace),
        };
        Ok(Self { trace, counted, ranges, placed })
    }

    /// Errors: a trace without the ranges of a step, or with two of one.
    pub fn passes(&self) -> Result<Passes<RangeWork>> {
        let training = self.spans(FORWARD).next().is_some();
        let pass = |name| training.then(|| self.pass(name)).transpose();
        let passes = Passes {
            inference: self.pass(INFERENCE)?,
            forward: pass(FORWARD)?,
            backward: pass(BACKWARD)?,
            optimizer: pass(OPTIMIZER)?,
        };
        self.require_sum(&passes.all())?;
        Ok(passes)
    }

    /// Launched in no pass: drawing the tokens, releasing gradients.
    pub fn outside(&self) -> Tally {
        tally(&self.placed.iter().filter(|piece| !self.in_a_pass(piece)).collect::<Vec<_>>())
    }

    /// Kernels placed by the time at which they ran.
    pub fn launches_unseen(&self) -> u64 {
        self.placed.iter().filter(|piece| !piece.launch_seen).count() as u64
    }

    /// Errors: a kernel is lost, or counted twice, between the trace and the tables.
    fn require_sum(&self, passes: &[&RangeWork]) -> Result<()> {
        let tables = passes.iter().map(|p| (p.kernels.iter().map(|k| k.count).sum::<u64>() + p.rest.count, p.count));
        let classes = passes.iter().map(|p| (p.classes.values().map(|t| t.count).sum(), p.count));
        for (listed, all) in tables.chain(classes) {
            ensure!(listed == all, "a table lists {listed} kernels of {all}");
        }
        let (outside, placed) = (self.outside(), self.placed.len());
        let seconds = outside.seconds + passes.iter().map(|p| p.seconds).sum::<f64>();
        let count = outside.count + passes.iter().map(|p| p.count).sum::<u64>();
        let all: i64 = self.placed.iter().map(|p| p.own_ns).sum();
        ensure!(count == placed as u64, "the passes hold {count} kernels, the trace {placed}");
        let off = (seconds - all as f64 / 1e9).abs();
        ensure!(off < 1e-9 * placed.max(1) as f64, "the passes' times differ from the trace's by {off:.1e} s");
        Ok(())
    }

    fn pass(&self, name: &str) -> Result<RangeWork> {
        let spans: Vec<&Span> = self.spans(name).collect();
        ensure!(spans.len() == 1, "the trace has {} ranges called {name:?}, not one", spans.len());
        self.work(name, &spans, &self.within(&[name]), LISTED).with_context(|| format!("in the range {name:?}"))
    }

    pub fn attention(&self) -> Result<Attention> {
        let part = |name| {
            let pieces = self.within(&[INFERENCE, name]);
            let in_inference = |span: &&Span| self.ranges.inside(span.parent, INFERENCE);
            let spans: Vec<&Span> = self.spans(name).filter(in_inference).collect();
            self.work(name, &spans, &pieces, LISTED_IN_ATTENTION).with_context(|| format!("in the range {name:?}"))
        };
        let (scores, softmax, final_matmul) = (part(SCORES)?, part(SOFTMAX)?, part(FINAL_MATMUL)?);
        let mut products = Tally::default();
        for part in [&scores, &final_matmul] {
            for class in [Class::Matmul, Class::MatmulHelper] {
                let Tally { count, seconds } = part.classes[&class];
                products = Tally { count: products.count + count, seconds: products.seconds + seconds };
            }
        }
        Ok(Attention { scores, softmax, final_matmul, products })
    }

    pub fn matmuls(&self) -> Matmuls {
        let of_class = |class| self.within(&[INFERENCE]).iter().filter(|p| Class::of(p.event) == class).count() as u64;
        let in_pass =
            |event: &&Event| is_matmul_operator(event) && self.ranges.inside(self.ranges.at(event.start_ns), INFERENCE);
        Matmuls {
            operators: self.trace.events.iter().filter(in_pass).count() as u64,
            kernels: of_class(Class::Matmul),
            helpers: of_class(Class::MatmulHelper),
        }
    }

    /// Of all passes, by name; empty for operators.
    pub fn matmul_kernels(&self) -> Vec<MatmulKernel> {
        let mut counts = BTreeMap::<&str, u64>::new();
        let products = self.placed.iter().filter(|p| self.in_a_pass(p) && p.event.source.is_gpu());
        for piece in products.filter(|p| Class::of(p.event) == Class::Matmul) {
            *counts.entry(&piece.event.name).or_default() += 1;
        }
        let kernel =
            |(name, count): (&str, u64)| MatmulKernel { name: short_name(name), units: Units::of(name), count };
        counts.into_iter().map(kernel).collect()
    }

    /// Of forward and backward pass together, what takes the most time.
    pub fn top_of_both(&self) -> Option<Kernel> {
        let both: Vec<&Placed> = [FORWARD, BACKWARD].iter().flat_map(|name| self.within(&[name])).collect();
        kernels(&both).into_iter().next()
    }

    fn in_a_pass(&self, piece: &Placed) -> bool {
        let inside = |name| self.ranges.inside(piece.span, name);
        !inside(WARM_UP) && [INFERENCE, FORWARD, BACKWARD, OPTIMIZER].into_iter().any(inside)
    }

    /// The pieces inside ranges of all these names.
    fn within(&self, names: &[&str]) -> Vec<&Placed<'_>> {
        let inside = |p: &&Placed| names.iter().all(|name| self.ranges.inside(p.span, name));
        self.placed.iter().filter(|p| self.in_a_pass(p)).filter(inside).collect()
    }

    fn spans<'b>(&'b self, name: &'b str) -> impl Iterator<Item = &'b Span> {
        self.ranges.named(name).filter(|span| !self.ranges.inside(span.parent, WARM_UP))
    }

    fn work(&self, name: &str, spans: &[&Span], pieces: &[&Placed], listed: usize) -> Result<RangeWork> {
        ensure!(!spans.is_empty() && !pieces.is_empty(), "nothing ran, or the profiler recorded nothing");
        let host_s = seconds(spans.iter().map(|span| span.end_ns - span.start_ns).sum());
        let intervals = pieces.iter().map(|p| (p.event.start_ns, p.event.end_ns()));
        let mut extents = BTreeMap::<Option<usize>, (i64, i64)>::new();
        for piece in pieces {
            let extent = extents.entry(self.ranges.enclosing(piece.span, name)).or_insert((i64::MAX, i64::MIN));
            *extent = (extent.0.min(piece.event.start_ns), extent.1.max(piece.event.end_ns()));
        }
        let span_s = match self.counted {
            Counted::Kernels => seconds(extents.values().map(|(first, last)| last - first).sum()),
            Counted::Operators => host_s,
        };
        let of_class = |class| pieces.iter().copied().filter(|p| Class::of(p.event) == class).collect::<Vec<_>>();
        let classes = Class::ALL.into_iter().map(|class| (class, tally(&of_class(class)))).collect();
        let mut kernels = kernels(pieces);
        let others = kernels.split_off(listed.min(kernels.len()));
        let rest = Rest {
            names: others.len() as u64,
            count: others.iter().map(|k| k.count).sum(),
            // An empty sum of floats is -0.
            seconds: others.iter().map(|k| k.seconds).sum::<f64>() + 0.0,
        };
        let Tally { count, seconds: sum } = tally(pieces);
        let busy_s = seconds(covered_ns(intervals));
        Ok(RangeWork { host_s, seconds: sum, span_s, busy_s, count, classes, kernels, rest })
    }
}

/// By name and class, in falling order of their time.
fn kernels(pieces: &[&Placed]) -> Vec<Kernel> {
    let mut sums = BTreeMap::<(String, Class), (u64, i64)>::new();
    for piece in pieces {
        let sum = sums.entry((short_name(&piece.event.name), Class::of(piece.event))).or_default();
        *sum = (sum.0 + 1, sum.1 + piece.own_ns);
    }
    let kernel = |((name, class), (count, ns))| Kernel { name, class, count, seconds: seconds(ns) };
    let mut kernels: Vec<Kernel> = sums.into_iter().map(kernel).collect();
    kernels.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
    kernels
}

fn tally(pieces: &[&Placed]) -> Tally {
    Tally { count: pieces.len() as u64, seconds: seconds(pieces.iter().map(|p| p.own_ns).sum()) }
}

fn seconds(nanoseconds: i64) -> f64 {
    nanoseconds as f64 / 1e9
}
