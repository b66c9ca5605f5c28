//! Memory: where it runs out, how what is saved grows, and the counted bytes against the accounting.

use anyhow::Result;
use serde::Serialize;

use super::super::measure::{Params, accounting_of};
use super::{AttentionCase, Ran, length};
use crate::bench::attention_memory::Accounting;
use crate::harness::answer::format::{grouped, print};
use crate::harness::answer::{CaseOutcome, Claim, Quantity, RecordSet, SameMachine, Style, Unit};

/// The lengths of the suite under either profile.
const LENGTHS: [u32; 8] = [256, 1024, 2048, 4096, 8192, 16384, 24576, 32768];

/// From this length on, as the template says, the score matrices are by far the caching allocator's largest blocks.
const FIFTH_FROM: u32 = 4096;

/// As the template says. libtorch also keeps the divisor sqrt(d) as a tensor of a few bytes.
const SLACK_BYTES: u64 = 64;

/// Whether the device has room for the forward pass; on a CPU a case is refused before it.
pub(super) fn forward_fits(set: &RecordSet, needs: &Accounting) -> Result<bool> {
    Ok(set.is_gpu() && needs.forward_peak_bytes < set.memory_bytes()?)
}

/// What the smallest case that ran out of memory needs, tensor by tensor.
#[derive(Serialize)]
pub(super) struct Exhausted {
    seq: String,
    d: u64,
    b: u64,
    s: u64,
    memory: u64,
    fits: bool,
    forward: u64,
    before: u64,
    peak: u64,
    /// "8 \cdot 32,768 \cdot 16 \cdot 4 = 0.016", the last in GiB; so for the score matrices.
    row: String,
    scores: String,
    /// Of six row tensors.
    rows: u64,
    /// The longest case that ran at this width, and its peak.
    longest: String,
    ran_peak: Quantity,
    /// What the lengths between the two would need, in GiB: "1.5 at 4,096, 6.1 at 8,192".
    untried: String,
    /// CUDA's fifth block: what the allocator then holds, and whether the tensors alone would fit.
    held: Option<u64>,
    decides: bool,
    /// Of the cases that ran, those that held it ("10 of the 14") and those that did not.
    five: String,
    four: usize,
    #[serde(skip)]
    pub claims: Vec<Claim>,
}

/// The shortest case that ran out of memory, and of these the narrowest.
pub(super) fn smallest_exhausted<'a>(plain: &[&'a AttentionCase]) -> Option<&'a AttentionCase> {
    let exhausted = plain.iter().filter(|case| matches!(case.outcome, CaseOutcome::OutOfMemory { .. }));
    exhausted.min_by_key(|case| (case.params.seq, case.params.d_model)).copied()
}

impl Exhausted {
    /// None where no case of this width ran.
    pub fn of(set: &RecordSet, case: &AttentionCase, plain: &[Ran]) -> Result<Option<Self>> {
        let longest = plain.iter().rfind(|ran| ran.case.params.d_model == case.params.d_model);
        let Some(longest) = longest else { return Ok(None) };
        let (needs, memory) = (accounting_of(&case.params, set.profile()), set.memory_bytes()?);
        let Accounting { batch: b, d_model: d, element_bytes: s, row_bytes, score_bytes, held_bytes, .. } = needs;
        let seq = length(case.params.seq);
        let product = |factors: String, bytes: u64| format!("{factors} = {}", print(bytes as f64, Style::Gib, 3));
        let long: Vec<&Ran> = plain.iter().filter(|ran| ran.seq() >= FIFTH_FROM).collect();
        let five = long.iter().filter(|ran| ran.row.held_bytes >= ran.needs().held_bytes).count();
        let fits = forward_fits(set, &needs)?;
        Ok(Some(Self {
            fits,
            forward: needs.forward_peak_bytes,
            before: needs.before_backward_bytes,
            peak: needs.backward_peak_bytes,
            row: product(format!(r"{b} \cdot {seq} \cdot {d} \cdot {s}"), row_bytes),
            scores: product(format!(r"{b} \cdot {seq}^2 \cdot {s}"), score_bytes),
            rows: 6 * row_bytes,
            longest: length(longest.seq()),
            ran_peak: longest.bytes(longest.row.backward_peak_bytes),
            untried: untried(longest, &case.params),
            held: held_bytes,
            decides: held_bytes.is_some_and(|held| held > memory) && needs.backward_peak_bytes < memory,
            five: format!("{five} of the {}", long.len()),
            four: long.len() - five,
            claims: exhausted_claims(case, &needs, fits, five, long.len()),
            seq,
            d,
            b,
            s,
            memory,
        }))
    }
}

fn exhausted_claims(case: &AttentionCase, needs: &Accounting, fits: bool, five: usize, long: usize) -> Vec<Claim> {
    let bytes = |bytes: u64| Quantity::constant(bytes as f64, Unit::Bytes);
    let (matrix, peak) = (bytes(needs.score_bytes), bytes(needs.backward_peak_bytes));
    let scores = bytes(needs.scores_in_backward * needs.score_bytes);
    let mut claims = vec![
        Claim::new("one-score-matrix", scores.value() > 0.9 * peak.value())
            .operand("score matrices", &scores)
            .operand("peak", &peak)
            .operand_text("wanted", "above 0.9 of it"),
    ];
    if fits {
        let CaseOutcome::OutOfMemory { requested_bytes: asked, .. } = case.outcome else { return claims };
        let words = asked.map_or("not recorded".into(), |asked| bytes(asked).short());
        let claim = Claim::new("fails-at-a-score-matrix", asked == Some(needs.score_bytes));
        claims.push(claim.operand_text("asked for", words).operand("a score matrix", &matrix));
    }
    if needs.held_bytes.is_some() {
        let claim = Claim::new("a-fifth-block-is-held", five > 0);
        claims.push(claim.operand_text("cells", format!("{five} of {long}")));
    }
    claims
}

fn untried(longest: &Ran, exhausted: &Params) -> String {
    let between = LENGTHS.into_iter().filter(|seq| *seq > longest.seq() && *seq < exhausted.seq);
    let words = between.map(|seq| {
        let needs = accounting_of(&Params { seq, ..exhausted.clone() }, longest.case.id.profile);
        format!("{} at {}", print(needs.backward_peak_bytes as f64, Style::Gib, 1), length(seq))
    });
    words.collect::<Vec<_>>().join(", ")
}

/// The largest difference of a counted figure from the accounting, as a share of what the formula gives; none where no case
/// ran.
pub(super) fn accounting_error(plain: &[Ran]) -> Option<(Quantity, Claim)> {
    let (mut shares, mut largest) = (Vec::new(), 0);
    for ran in plain {
        let (row, needs) = (ran.row, ran.needs());
        for (counted, needed) in [
            (row.forward_peak_bytes, needs.forward_peak_bytes),
            (row.before_backward_bytes, needs.before_backward_bytes),
            (row.backward_peak_bytes, needs.backward_peak_bytes),
        ] {
            let difference = counted.abs_diff(needed);
            largest = largest.max(difference);
            shares.push(ran.case.quantity(difference as f64 / needed as f64, Unit::One));
        }
    }
    let claim = Claim::new("accounting-holds", largest <= SLACK_BYTES)
        .operand_text("largest difference", format!("{} bytes", grouped(largest as f64, 0)))
        .operand_text("wanted", format!("at most {SLACK_BYTES}"));
    Some((Quantity::largest(&shares)?.clone(), claim))
}

/// How the memory that the forward pass leaves behind grows between the two greatest lengths.
#[derive(Serialize)]
pub(super) struct Growth {
    low: String,
    high: String,
    length: f64,
    growth: Quantity,
    /// The formula's, both axes logarithmic.
    slope: f64,
    /// At the greater length.
    saved: Quantity,
    #[serde(skip)]
    pub claim: Claim,
}

impl Growth {
    pub fn of(low: &Ran, high: &Ran) -> Result<Self> {
        let length_ratio = f64::from(high.seq()) / f64::from(low.seq());
        let growth = SameMachine::of(&high.saved(), &low.saved())?.ratio();
        let [least, most] = [0.9, 1.02].map(|factor| factor * length_ratio.powi(2));
        let wanted = [least, most].map(|bound| print(bound, Style::Fixed, 2)).join(" to ");
        Ok(Self {
            low: length(low.seq()),
            high: length(high.seq()),
            length: length_ratio,
            slope: high.needs().saved_exponent(),
            saved: high.saved(),
            claim: Claim::new("saved-is-quadratic", growth.value() > least && growth.value() < most)
                .operand("growth of what is saved", &growth)
                .operand_text("wanted", wanted),
            growth,
        })
    }
}
