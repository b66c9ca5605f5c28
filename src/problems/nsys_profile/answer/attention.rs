//! Part (e): the softmax of attention against its matrix products, in time and in operations.

use anyhow::Result;
use serde::Serialize;

use super::{ProfileCase, Profiled, lines};
use crate::harness::answer::{Column, Quantity, Range, RecordSet, Style, Table};

/// Of a softmax: the maximum, the difference from it, its exponential, their sum, and the division by it.
const SOFTMAX_FLOPS_PER_SCORE: f64 = 5.0;

#[derive(Serialize)]
pub struct AttentionTimes {
    /// Time of the softmax over that of the matmuls in the example.
    ratio: Option<Quantity>,
    /// The ratio of times over that of operations.
    excesses: Range,
    /// Of the example.
    by_flops: f64,
    /// Sizes with other heads: " (0.0156 for 2.7B, with heads of width 80)"; empty where there is none.
    other_heads: String,
    masked: Quantity,
    softmax: Quantity,
}

fn d_head(profile: &Profiled) -> i64 {
    profile.params().config().d_head()
}

/// Operations of the softmax over those of the matmuls, which take 4 `d_head` for each score.
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
        Some(Self {
            ratio: ratio(&example),
            by_flops: by_flops(&example),
            other_heads: other_heads(profiles, &example),
            masked: masked(&example),
            softmax: example.seconds(example.row.attention.softmax.seconds),
            excesses: Range::of(profiles.iter().filter_map(excess))?,
        })
    }
}

fn other_heads(profiles: &[Profiled], example: &Profiled) -> String {
    let mut others: Vec<String> = Vec::new();
    for other in profiles.iter().filter(|other| d_head(other) != d_head(example)) {
        let words = format!("{:.4} for {}, with heads of width {}", by_flops(other), other.size(), d_head(other));
        if !others.contains(&words) {
            others.push(words);
        }
    }
    if others.is_empty() { String::new() } else { format!(" ({})", others.join("; ")) }
}

/// Times of attention in each case's forward pass.
pub fn table(set: &RecordSet, cases: &[&ProfileCase]) -> Result<Table> {
    let ms = |head: &str| Column::number(head, Style::Ms, 2);
    let table = lines(
        cases,
        [
            (ms("$QK^\\top$ and $PV$ (ms)"), |p| p.seconds(p.row.attention.products.seconds).into()),
            (ms("scale and mask (ms)"), |p| masked(p).into()),
            (ms("softmax (ms)"), |p| p.seconds(p.row.attention.softmax.seconds).into()),
            (Column::number("softmax / matmuls", Style::Fixed, 2), |p| ratio(p).into()),
            (Column::number("over the FLOP ratio", Style::Fixed, 1), |p| excess(p).into()),
        ],
    );
    Ok(table.captioned(format!(
        "Kernels of self-attention in one forward pass, over all layers; scale and mask is whatever runs in the ranges of \
         the two matmuls beside them; {}.",
        set.machine()?
    )))
}
