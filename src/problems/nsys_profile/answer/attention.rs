//! Part (e): the softmax of attention against its matrix products, in time and in operations.

use anyhow::Result;
use serde::Serialize;

use super::{ProfileCase, Profiled, lines, n_of};
use crate::harness::answer::{Answer, Cell, Claim, Column, Quantity, Range, Style, Table};

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
    more_and_all: (usize, usize),
}

fn d_head(profile: &Profiled) -> i64 {
    profile.params().config().d_head()
}

/// Operations of the softmax over those of the products, which take 4 `d_head` for each score.
fn by_flops(d_head: i64) -> f64 {
    SOFTMAX_FLOPS_PER_SCORE / (4.0 * d_head as f64)
}

/// None where no name of a kernel told a product.
fn ratio(profile: &Profiled) -> Option<Quantity> {
    let attention = &profile.row.attention;
    (attention.products.seconds > 0.0).then(|| profile.over(attention.softmax.seconds, attention.products.seconds))
}

fn excess(profile: &Profiled) -> Option<Quantity> {
    Some(profile.over(ratio(profile)?.value(), by_flops(d_head(profile))))
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
        let softmax = example.row.attention.softmax.seconds;
        Some(Self {
            ratio: ratio(&example),
            more: n_of(more, ratios.len()),
            more_and_all: (more, ratios.len()),
            ratios: Range::of(&ratios)?,
            excesses: Range::of(&excesses)?,
            d_head: d_head(&example),
            by_flops: by_flops(d_head(&example)),
            other_heads: other_heads(profiles, d_head(&example)),
            masked: masked(&example),
            softmax: example.seconds(softmax),
            masked_ratio: example.over(masked(&example).value(), softmax),
        })
    }

    pub fn claims(&self, answer: &mut Answer) -> Result<()> {
        let (more, all) = self.more_and_all;
        let claim = Claim::all("softmax-takes-more-than-its-operations", "profiles in which it does", more, all);
        answer.claim(claim.operand("least ratio of times over that of operations", &self.excesses.low))
    }
}

fn other_heads(profiles: &[Profiled], known: i64) -> String {
    let mut others: Vec<String> = Vec::new();
    for (width, size) in profiles.iter().map(|other| (d_head(other), other.size())) {
        let words = format!("{:.3} for {size}, whose heads are {width} wide", by_flops(width));
        if width != known && !others.contains(&words) {
            others.push(words);
        }
    }
    if others.is_empty() { String::new() } else { format!(" ({})", others.join("; ")) }
}

/// Times of attention in each case's forward pass.
pub fn table(cases: &[&ProfileCase]) -> Table {
    let ms = |head: &str| Column::number(head, Style::Ms, 3);
    let columns = vec![
        ms("$QK^\\top$ and $PV$ (ms)"),
        ms("scale and mask (ms)"),
        ms("softmax (ms)"),
        Column::number("softmax / products, time", Style::Fixed, 3),
        Column::number("by operations", Style::Fixed, 4),
        Column::number("excess", Style::Fixed, 0),
    ];
    lines(columns, cases, |profile| {
        let attention = &profile.row.attention;
        let [products, softmax] = [attention.products.seconds, attention.softmax.seconds].map(|s| profile.seconds(s));
        let by_flops = profile.number(by_flops(d_head(&profile)));
        let [ratio, excess] = [ratio(&profile), excess(&profile)].map(Cell::from);
        vec![products.into(), masked(&profile).into(), softmax.into(), ratio, by_flops.into(), excess]
    })
}
