//! Memory: where it runs out, how what is saved grows, and the counted bytes against the accounting.

use anyhow::Result;
use serde::Serialize;

use super::super::measure::accounting_of;
use super::{AttentionCase, Ran, length};
use crate::bench::attention_memory::Accounting;
use crate::harness::answer::format::{grouped, print};
use crate::harness::answer::{CaseOutcome, Claim, Quantity, RecordSet, SameMachine, Style, Unit};

/// From this length on, as the template says, the score matrices are by far the caching allocator's largest blocks.
const FIFTH_FROM: u32 = 4096;

/// libtorch also keeps the divisor sqrt(d) as a tensor of a few bytes.
pub(super) const SLACK_BYTES: u64 = 64;

/// Whether the device has room for the forward pass; on a CPU a case is refused before it.
pub(super) fn forward_fits(set: &RecordSet, needs: &Accounting) -> Result<bool> {
    Ok(set.is_gpu() && needs.forward_peak_bytes < set.memory_bytes()?)
}

/// What the smallest case that ran out of memory needs, tensor by tensor.
#[derive(Serialize)]
pub(super) struct Exhausted {
    seq: String,
    d: u64,
    memory: u64,
    fits: bool,
    forward: u64,
    /// At the peak of the backward pass, and how many score matrices that holds.
    peak: u64,
    matrices: u64,
    /// "8 \cdot 32,768 \cdot 16 \cdot 4 = 0.016", the last in GiB; so for the score matrices.
    row: String,
    scores: String,
    /// CUDA's fifth block: what the allocator then holds, and whether the tensors alone would fit.
    held: Option<u64>,
    decides: bool,
    /// Of the cases that ran, those that held it: "10 of the 14".
    five: String,
    #[serde(skip)]
    pub claims: Vec<Claim>,
}

/// The shortest case that ran out of memory, and of these the narrowest.
pub(super) fn smallest_exhausted<'a>(plain: &[&'a AttentionCase]) -> Option<&'a AttentionCase> {
    let exhausted = plain.iter().filter(|case| matches!(case.outcome, CaseOutcome::OutOfMemory { .. }));
    exhausted.min_by_key(|case| (case.params.seq, case.params.d_model)).copied()
}

impl Exhausted {
    pub fn of(set: &RecordSet, case: &AttentionCase, plain: &[Ran]) -> Result<Self> {
        let (needs, memory) = (accounting_of(&case.params, set.profile()), set.memory_bytes()?);
        let Accounting { batch: b, d_model: d, element_bytes: s, row_bytes, score_bytes, held_bytes, .. } = needs;
        let seq = length(case.params.seq);
        let product =
            |factors: String, bytes: u64, digits| format!("{factors} = {}", print(bytes as f64, Style::Gib, digits));
        let long: Vec<&Ran> = plain.iter().filter(|ran| ran.seq() >= FIFTH_FROM).collect();
        let five = long.iter().filter(|ran| ran.row.held_bytes >= ran.needs().held_bytes).count();
        let fits = forward_fits(set, &needs)?;
        Ok(Self {
            fits,
            forward: needs.forward_peak_bytes,
            peak: needs.backward_peak_bytes,
            matrices: needs.scores_in_backward,
            row: product(format!(r"{b} \cdot {seq} \cdot {d} \cdot {s}"), row_bytes, 3),
            scores: product(format!(r"{b} \cdot {seq}^2 \cdot {s}"), score_bytes, 1),
            held: held_bytes,
            decides: held_bytes.is_some_and(|held| held > memory) && needs.backward_peak_bytes < memory,
            five: format!("{five} of the {}", long.len()),
            claims: exhausted_claims(case, &needs, fits, five, long.len()),
            seq,
            d,
            memory,
        })
    }
}

fn exhausted_claims(case: &AttentionCase, needs: &Accounting, fits: bool, five: usize, long: usize) -> Vec<Claim> {
    let matrix = Quantity::constant(needs.score_bytes as f64, Unit::Bytes);
    let mut claims = Vec::new();
    if fits {
        let CaseOutcome::OutOfMemory { requested_bytes: asked, .. } = case.outcome else { return claims };
        let words = asked.map(|asked| Quantity::constant(asked as f64, Unit::Bytes).short());
        let claim = Claim::new("fails-at-a-score-matrix", asked == Some(needs.score_bytes));
        let claim = claim.operand_text("asked for", words.unwrap_or("not recorded".into()));
        claims.push(claim.operand("a score matrix", &matrix));
    }
    if needs.held_bytes.is_some() {
        let claim = Claim::new("a-fifth-block-is-held", five > 0);
        claims.push(claim.operand_text("cells", format!("{five} of {long}")));
    }
    claims
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
    growth: Quantity,
    /// At the greater length.
    saved: Quantity,
}

impl Growth {
    pub fn of(low: &Ran, high: &Ran) -> Result<Self> {
        let growth = SameMachine::of(&high.saved(), &low.saved())?.ratio();
        Ok(Self { low: length(low.seq()), high: length(high.seq()), growth, saved: high.saved() })
    }
}
