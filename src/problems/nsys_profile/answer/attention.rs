//! Part (e): the softmax of attention against its matrix products, in time and in operations.

use serde::Serialize;

use super::{ProfileCase, Profiled, lines, n_of};
use crate::harness::answer::{Claim, Column, Quantity, Range, Style, Table};

/// Of a softmax: the maximum, the difference from it, its exponential, their sum, and the division by it.
const SOFTMAX_FLOPS_PER_SCORE: f64 = 5.0;

#[derive(Serialize)]
pub struct AttentionTimes {
    /// Time of the softmax over that of the products, over all profiles and in the example.
    ratios: Range,
    ratio: Option<Quantity>,
    /// The ratio of times over that of operations.
    excesses: Range,
    /// "18 of 20" profiles in which it is above one.
    more: String,
    /// Of the example.
    d_head: i64,
    by_flops: f64,
    /// Sizes with other heads: " (0.016 for 2.7B, whose heads are 80 wide)"; empty where there is none.
    other_heads: String,
    masked: Quantity,
    softmax: Quantity,
    masked_ratio: Quantity,
    #[serde(skip)]
    pub claim: Claim,
}

fn d_head(profile: &Profiled) -> i64 {
    profile.params().config().d_head()
}

/// Operations of the softmax over those of the products, which take 4 `d_head` for each score.
fn by_flops(profile: &Profiled) -> f64 {
    SOFTMAX_FLOPS_PER_SCORE / (4.0 * d_head(profile) as f64)
}

/// None where no name of a kernel told a product.
fn ratio(profile: &Profiled) -> Option<Quantity> {
    let attention = &profile.row.attention;
    (attention.products.seconds > 0.0).then(|| profile.over(attention.softmax.seconds, attention.products.seconds))
}

fn excess(profile: &Profiled) -> Option<Quantity> {
    Some(profile.over(ratio(profile)?.value(), by_flops(profile)))
}

/// What runs in the ranges of the products beside them.
fn masked(profile: &Profiled) -> Quantity {
    let attention = &profile.row.attention;
    profile.seconds(attention.scores.seconds + attention.final_matmul.seconds - attention.products.seconds)
}

impl AttentionTimes {
    /// None where no name of a kernel told a product.
    pub fn of(profiles: &[Profiled], example: Profiled) -> Option<Self> {
        let ratios: Vec<Quantity> = profiles.iter().filter_map(ratio).collect();
        let excesses: Vec<Quantity> = profiles.iter().filter_map(excess).collect();
        let more = excesses.iter().filter(|excess| excess.value() > 1.0).count();
        let excesses = Range::of(&excesses)?;
        let id = "softmax-takes-more-than-its-operations";
        let claim = Claim::all(id, "profiles in which it does", more, ratios.len());
        let softmax = example.row.attention.softmax.seconds;
        Some(Self {
            ratio: ratio(&example),
            more: n_of(more, ratios.len()),
            ratios: Range::of(&ratios)?,
            d_head: d_head(&example),
            by_flops: by_flops(&example),
            other_heads: other_heads(profiles, &example),
            masked: masked(&example),
            softmax: example.seconds(softmax),
            masked_ratio: example.over(masked(&example).value(), softmax),
            claim: claim.operand("least ratio of times over that of operations", &excesses.low),
            excesses,
        })
    }
}

fn other_heads(profiles: &[Profiled], example: &Profiled) -> String {
    let mut others: Vec<String> = Vec::new();
    for other in profiles.iter().filter(|other| d_head(other) != d_head(example)) {
        let words = format!("{:.3} for {}, whose heads are {} wide", by_flops(other), other.size(), d_head(other));
        if !others.contains(&words) {
            others.push(words);
        }
    }
    if others.is_empty() { String::new() } else { format!(" ({})", others.join("; ")) }
}

/// Times of attention in each case's forward pass.
pub fn table(cases: &[&ProfileCase]) -> Table {
    let ms = |head: &str| Column::number(head, Style::Ms, 3);
    lines(
        cases,
        [
            (ms("$QK^\\top$ and $PV$ (ms)"), |p| p.seconds(p.row.attention.products.seconds).into()),
            (ms("scale and mask (ms)"), |p| masked(p).into()),
            (ms("softmax (ms)"), |p| p.seconds(p.row.attention.softmax.seconds).into()),
            (Column::number("softmax / products, time", Style::Fixed, 3), |p| ratio(p).into()),
            (Column::number("by operations", Style::Fixed, 4), |p| p.number(by_flops(p)).into()),
            (Column::number("excess", Style::Fixed, 0), |p| excess(p).into()),
        ],
    )
}
