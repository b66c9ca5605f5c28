//! The measured bucket sizes of one machine: their steps, which is best, and what the handout's model predicts.

use anyhow::{Context as _, Result};
use serde::Serialize;

use super::super::measure::{Model, Row};
use super::super::{COALESCED, STRATEGY};
use super::mb;
use crate::bench::ddp_step::Params;
use crate::bench::ddp_step::link::PooledLink;
use crate::bench::ddp_step::numbers::{NAIVE, StrategyNumbers, hidden};
use crate::bench::ddp_step::tables::size_mb;
use crate::harness::answer::format::listed;
use crate::harness::answer::machines::machines_of;
use crate::harness::answer::{
    Answer, Case, Claim, Paired, Quantity, Range, Records, SameMachine, SameRun, Style, Table, Unit,
};
use crate::harness::record::Machine;
use crate::model::Precision;

pub type BucketCase = Case<Params, Row>;

/// One measured bucket size.
pub struct Size<'a> {
    case: &'a BucketCase,
    row: &'a Row,
    pub mb: f64,
    bucketed: StrategyNumbers,
    coalesced: StrategyNumbers,
    naive: StrategyNumbers,
    /// What the buckets take longer than without their copies.
    copies: Paired,
}

/// The float32 cases that were measured and are stable, by bucket size.
pub fn measured(cases: &[BucketCase]) -> Vec<Size<'_>> {
    let mut sizes: Vec<Size> = cases
        .iter()
        .filter(|case| case.params.dtype == Precision::Float32)
        .filter_map(Size::of)
        .filter(|size| [&size.bucketed, &size.coalesced, &size.naive].iter().all(|numbers| numbers.stable))
        .collect();
    sizes.sort_by(|a, b| a.mb.total_cmp(&b.mb));
    sizes
}

impl<'a> Size<'a> {
    fn of(case: &'a BucketCase) -> Option<Self> {
        let row = case.row()?;
        let of = |name| StrategyNumbers::of(case, &row.steps, name);
        let rounds = |name| Some(row.steps.strategies.get(name)?.step.turns(case.params.rounds));
        Some(Self {
            mb: mb(&case.params),
            bucketed: of(STRATEGY)?,
            coalesced: of(COALESCED)?,
            naive: of(NAIVE)?,
            copies: Paired::difference(&case.id, &rounds(STRATEGY)?, &rounds(COALESCED)?)?,
            case,
            row,
        })
    }

    /// The handout's model with the link of all cases and the calls that were counted.
    fn predicted(&self, link: &PooledLink) -> Quantity {
        let column = &self.row.steps.strategies[STRATEGY];
        link.seconds(Model::overhead(link.overhead.value(), link.bandwidth.value(), column.bytes, column.calls))
    }
}

/// The sizes of the machine that measured the most of them, and the others: steps of two machines cannot be compared.
pub fn of_one_machine(sizes: Vec<Size<'_>>) -> (Vec<Size<'_>>, Vec<Size<'_>>) {
    let count = |machine: &Machine| sizes.iter().filter(|size| size.case.id.machine() == machine).count();
    let Some(machine) = sizes.iter().map(|size| size.case.id.machine()).max_by_key(|machine| count(machine)).cloned()
    else {
        return (sizes, Vec::new());
    };
    sizes.into_iter().partition(|size| *size.case.id.machine() == machine)
}

/// What the sizes say.
#[derive(Serialize)]
pub struct Sizes<'a> {
    #[serde(skip)]
    best: &'a Size<'a>,
    #[serde(skip)]
    second: Option<&'a Size<'a>>,
    /// The size that adds least to the step without communication: in MB, its step, and what it adds.
    mb: f64,
    step: Quantity,
    adds: Quantity,
    /// What that size adds without copies, and the wait for gradients in it.
    remains: Paired,
    tail: Quantity,
    small: Extreme,
    large: Extreme,
    /// The least that copies cost in the smallest buckets, and the most in the best.
    #[serde(skip)]
    small_copies: [Quantity; 2],
    best_calls: u64,
    best_tail: Quantity,
    /// The longest step over the shortest, less one.
    differ: Quantity,
    /// What copies into buckets cost, over all sizes and rounds.
    copies: Range,
    /// What the naive step adds, over the naive step.
    share: Quantity,
    pub link: PooledLink,
    /// By the model: the best bucket, the best measured size in MB, the overhead of the size that is best,
    /// and the fixed costs of the smallest.
    model_bucket: Option<Quantity>,
    preferred: f64,
    predicted: Quantity,
    /// What the model takes the best size to cost beyond the preferred one.
    dispreferred: Quantity,
    fixed_costs: Quantity,
}

/// The smallest or the largest bucket size.
#[derive(Serialize)]
struct Extreme {
    mb: f64,
    calls: u64,
    /// The calls of the naive strategy.
    tensors: u64,
    tail: Quantity,
    /// What it adds more than the best size: in all, as copies, and without copies.
    more: Quantity,
    copies: Quantity,
    without_copies: Quantity,
}

impl Extreme {
    fn of(size: &Size, best: &Size) -> Result<Self> {
        let more =
            |of: &Paired, best: &Paired| Ok::<_, anyhow::Error>(SameMachine::of(&of.all, &best.all)?.difference());
        Ok(Self {
            mb: size.mb,
            calls: size.bucketed.calls,
            tensors: size.naive.calls,
            tail: size.bucketed.tail.clone(),
            more: more(&size.bucketed.beyond_single, &best.bucketed.beyond_single)?,
            copies: more(&size.copies, &best.copies)?,
            without_copies: more(&size.coalesced.beyond_single, &best.coalesced.beyond_single)?,
        })
    }
}

impl<'a> Sizes<'a> {
    /// `None` of no size; `sizes` ascend.
    pub fn of(sizes: &'a [Size<'a>], records: &Records) -> Result<Option<Self>> {
        let (Some(smallest), Some(largest)) = (sizes.first(), sizes.last()) else { return Ok(None) };
        let link = PooledLink::of(records, smallest.case)?.context("no line fits the probes of the link")?;
        let sorted = |key: &dyn Fn(&Size) -> f64| {
            let mut sizes: Vec<&'a Size> = sizes.iter().collect();
            sizes.sort_by(|a, b| key(a).total_cmp(&key(b)));
            sizes
        };
        let ranked = sorted(&|size| size.bucketed.beyond_single.all.value());
        let steps = sorted(&|size| size.bucketed.step.value());
        let [short, long] = [steps[0], steps[steps.len() - 1]].map(|size| &size.bucketed.step);
        let best = ranked[0];
        let model = Model::best(link.overhead.value(), link.bandwidth.value(), best.row.steps.gradient_bytes);
        let bytes = |bytes| Quantity::new(bytes, Unit::Bytes, link.overhead.sources().to_vec());
        let preferred = sorted(&|size| size.predicted(&link).value())[0];
        let predicted = best.predicted(&link);
        let copies = sizes.iter().flat_map(|size| [&size.copies.range.low, &size.copies.range.high]);
        Ok(Some(Self {
            best,
            second: ranked.get(1).copied(),
            mb: best.mb,
            step: best.bucketed.step.clone(),
            adds: best.bucketed.beyond_single.all.clone(),
            remains: best.coalesced.beyond_single.clone(),
            tail: best.coalesced.tail.clone(),
            small: Extreme::of(smallest, best)?,
            large: Extreme::of(largest, best)?,
            small_copies: [&smallest.copies.range.low, &best.copies.range.high].map(Quantity::clone),
            best_calls: best.bucketed.calls,
            best_tail: best.bucketed.tail.clone(),
            differ: SameMachine::of(&SameMachine::of(long, short)?.difference(), short)?.ratio(),
            copies: Range::of(copies).context("every size has its copies")?,
            share: SameRun::of(&best.naive.beyond_single.all, &best.naive.step)?.ratio(),
            model_bucket: model.map(|model| bytes(model.bucket_bytes)),
            preferred: preferred.mb,
            dispreferred: link.seconds(predicted.value() - preferred.predicted(&link).value()),
            predicted,
            fixed_costs: link.of_calls(smallest.bucketed.calls),
            link,
        }))
    }

    pub fn claims(&self, answer: &mut Answer) -> Result<()> {
        let Self { best, second, small, large, copies, small_copies, preferred, .. } = self;
        let most = &best.bucketed.beyond_single.range.high;
        let next = second.map(|size| &size.bucketed.beyond_single.range.low);
        let between =
            best.mb != small.mb && best.mb != large.mb && next.is_some_and(|next| most.value() < next.value());
        let claim = Claim::new("best-lies-between", between).operand_text("best", format!("{} MB", best.mb));
        let claim = claim.operand("adds at most", most);
        answer.claim(match next {
            Some(next) => claim.operand("next size at least", next),
            None => claim,
        })?;
        answer.claim(Claim::above("copies-cost-time", "of any size, at least", &copies.low, 0.0))?;
        if between {
            let [least, most] = small_copies;
            answer.claim(Claim::greater(
                "small-buckets-copy-longer",
                ("at least", least),
                ("the best size at most", most),
            ))?;
        }
        let slowdown = &best.coalesced.slowdown;
        answer.claim(
            Claim::new("backward-is-slower", slowdown.is_positive())
                .operand("added without the tail, at least", &slowdown.range.low),
        )?;
        answer.claim(
            Claim::new("model-finds-the-best", *preferred == best.mb)
                .operand_text("the model's best", format!("{preferred} MB"))
                .operand_text("best", format!("{} MB", best.mb)),
        )?;
        let tail = ("tail of the smallest buckets", &small.tail);
        answer.claim(Claim::less("fixed-costs-are-hidden", tail, ("their calls by the fit", &self.fixed_costs)))
    }
}

/// What the handout asks for: a row for each size but those that another machine measured.
pub fn size_table(sizes: &[Size], left_out: &[Size]) -> Table {
    let left_out = match left_out {
        [] => String::new(),
        sizes => {
            let sizes: Vec<String> = sizes.iter().map(|size| size_mb(size.mb)).collect();
            format!(" Another machine measured buckets of {} MB.", listed(&sizes))
        }
    };
    let pytorch =
        |size: &Size| hidden(size.case, &size.row.steps, size.row.steps.pytorch_ddp.as_ref()?).map(|share| share.all);
    Table::of(sizes)
        .right("bucket (MB)", |size| size_mb(size.mb))
        .right("calls", |size| size.bucketed.calls.to_string())
        .number("step (ms)", Style::Ms, 1, |size| size.bucketed.step.clone())
        .number("above single (ms)", Style::Ms, 1, |size| size.bucketed.beyond_single.all.clone())
        .number("hidden", Style::Percent, 0, |size| size.bucketed.hidden.as_ref().map(|share| share.all.clone()))
        .number("without copies: above single (ms)", Style::Ms, 1, |size| size.coalesced.beyond_single.all.clone())
        .number("without copies: hidden", Style::Percent, 0, |size| size.coalesced.hidden.as_ref().map(|share| share.all.clone()))
        .number("PyTorch DDP: hidden", Style::Percent, 0, |size| pytorch(size))
        .captioned(format!(
            "Steps in buckets, float32, {}. *Single* is the step without communication in the same turns; *hidden* is the share \
             of the naive step's extra time that is saved.{left_out}",
            machines_of(sizes.iter().map(|size| &size.case.id))
        ))
}

/// What the model says of each size, beside what was measured.
pub fn prediction_table(sizes: &[Size], link: &PooledLink) -> Table {
    Table::of(sizes)
        .right("bucket (MB)", |size| size_mb(size.mb))
        .right("calls $n_b$", |size| size.bucketed.calls.to_string())
        .number("predicted overhead (ms)", Style::Ms, 2, |size| size.predicted(link))
        .number("measured tail (ms)", Style::Ms, 2, |size| size.bucketed.tail.clone())
        .number("above single (ms)", Style::Ms, 1, |size| size.bucketed.beyond_single.all.clone())
        .captioned(format!(
            "The model of part (b) with $o$ = {} µs and $w$ = {} GB/s, the fit of `naive_ddp_benchmarking`, \
             against measured float32 steps. {}.",
            link.overhead.text(Style::Us, 0),
            link.bandwidth.text(Style::Gb, 0),
            machines_of(sizes.iter().map(|size| &size.case.id))
        ))
}
