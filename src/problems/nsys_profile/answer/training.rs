//! Part (d): what a training step changes in the share of matrix products, and what takes the rest.

use anyhow::Result;
use serde::Serialize;

use super::super::kernels::Class;
use super::super::summary::{Kernel, RangeWork};
use super::{ProfileCase, Profiled, context, is_product, lines, n_of, of_class, products};
use crate::harness::answer::format::{Style, grouped, print};
use crate::harness::answer::{Answer, Cell, Claim, Column, Quantity, Range, Table};

#[derive(Serialize)]
pub struct Training {
    /// Of the example: the share of products in inference and in a step, of AdamW in a step, and of products in a step with
    /// AdamW as tensor operations.
    inference: Quantity,
    step: Quantity,
    adamw: Quantity,
    plain: String,
    /// The share of products over all profiles.
    inferences: Range,
    steps: Range,
    /// "16 of 20" profiles: those whose share falls, and those whose top of the forward pass is the top of both passes.
    fell: String,
    same_top: String,
    /// What else is on top of both passes.
    other_top: &'static str,
    /// "4 (small, large), all at context 1,024", where all the others rise and the backward pass explains it; else empty.
    rose: String,
    #[serde(skip)]
    counts: Counts,
}

/// Of profiles with a training step.
struct Counts {
    all: usize,
    fell: usize,
    rose: usize,
    same_top: usize,
}

/// The share of a training step's time that `part` of its passes takes.
fn in_step(profile: &Profiled, part: impl Fn(&RangeWork) -> f64) -> Option<Quantity> {
    let step = profile.step()?;
    Some(profile.over(step.iter().map(|pass| part(pass)).sum(), step.iter().map(|pass| pass.seconds).sum()))
}

fn in_pass(profile: &Profiled, pass: &RangeWork) -> Quantity {
    profile.over(products(pass), pass.seconds)
}

/// The share of products in inference, in the backward pass and in a step.
struct Shares<'a> {
    profile: Profiled<'a>,
    inference: Quantity,
    backward: Quantity,
    step: Quantity,
}

impl<'a> Shares<'a> {
    fn of(profile: &Profiled<'a>) -> Option<Self> {
        let [_, backward, _] = profile.step()?;
        Some(Self {
            profile: *profile,
            inference: in_pass(profile, profile.inference()),
            backward: in_pass(profile, backward),
            step: in_step(profile, products)?,
        })
    }
}

impl Training {
    /// None where the example has no training step.
    pub fn of(profiles: &[Profiled], example: Profiled, plain: &[Profiled]) -> Option<Self> {
        let own = Shares::of(&example)?;
        let [_, _, adamw] = example.step()?;
        let trained: Vec<Shares> = profiles.iter().filter_map(Shares::of).collect();
        let all = trained.len();
        let inferences: Vec<Quantity> = profiles.iter().map(|p| in_pass(p, p.inference())).collect();
        let steps: Vec<Quantity> = trained.iter().map(|shares| shares.step.clone()).collect();
        let rose: Vec<&Shares> = trained.iter().filter(|s| s.step.value() > s.inference.value()).collect();
        let fell = trained.iter().filter(|s| s.step.value() < s.inference.value()).count();
        let tops = || trained.iter().filter_map(|shares| top(&shares.profile));
        let same_top = tops().filter(|(forward, both)| forward.name == both.name).count();
        let products_lead = tops().all(|(_, both)| is_product(both));
        Some(Self {
            adamw: example.over(adamw.seconds, example.step()?.iter().map(|pass| pass.seconds).sum()),
            plain: plain_adamw(&example, plain).unwrap_or_default(),
            inference: own.inference,
            step: own.step,
            inferences: Range::of(&inferences)?,
            steps: Range::of(&steps)?,
            fell: n_of(fell, all),
            same_top: n_of(same_top, all),
            other_top: if products_lead { "another product" } else { "another" },
            rose: if fell + rose.len() == all { explained(&rose) } else { String::new() },
            counts: Counts { all, fell, rose: rose.len(), same_top },
        })
    }

    pub fn claims(&self, answer: &mut Answer) -> Result<()> {
        let Counts { all, fell, rose, same_top } = self.counts;
        answer.claim(Claim::all("same-in-both", "profiles with the same name on top of both passes", same_top, all))?;
        let claim = Claim::all("products-lose-share", "profiles in which the share falls", fell, all);
        answer.claim(claim.count("in which it rises", rose))
    }
}

/// What leads the forward pass, and forward and backward pass together.
fn top<'a>(profile: &Profiled<'a>) -> Option<(&'a Kernel, &'a Kernel)> {
    Some((profile.inference().kernels.first()?, profile.row.top_of_both.as_ref()?))
}

/// Empty unless all have one context, and a backward pass with a higher share than inference.
fn explained(rose: &[&Shares]) -> String {
    let Some(first) = rose.first() else { return String::new() };
    let at = |shares: &Shares| shares.profile.params().context_length;
    let backward = |shares: &Shares| shares.backward.value() > shares.inference.value();
    if !rose.iter().all(|shares| at(shares) == at(first) && backward(shares)) {
        return String::new();
    }
    let sizes: Vec<&str> = rose.iter().map(|shares| shares.profile.size()).collect();
    format!("{} ({}), all at context {}", rose.len(), sizes.join(", "), context(first.profile.params()))
}

/// " (82.1% with AdamW in plain tensor operations, 4,350 kernels instead of 2)", where the example was measured so, too.
fn plain_adamw(example: &Profiled, plain: &[Profiled]) -> Option<String> {
    let setting = |profile: &Profiled| (profile.params().size, profile.params().context_length);
    let plain = plain.iter().find(|profile| setting(profile) == setting(example))?;
    let share = print(in_step(plain, products)?.value(), Style::Percent, 1);
    let ([_, _, fused], [_, _, operations]) = (example.step()?, plain.step()?);
    let [fused, operations] = [fused, operations].map(|adamw| grouped(adamw.count as f64, 0));
    Some(format!(" ({share} with AdamW in plain tensor operations, {operations} kernels instead of {fused})"))
}

/// Shares of products in each pass, and shares of other work in a step.
pub fn table(cases: &[&ProfileCase]) -> Table {
    let heads = ["inference", "forward", "backward", "whole step", "AdamW's share", "elementwise", "copies"];
    let columns = heads.map(|head| Column::number(head, Style::Percent, 1)).to_vec();
    lines(columns, cases, |profile| {
        let Some([forward, backward, adamw]) = profile.step() else { return Vec::new() };
        let passes = [profile.inference(), forward, backward].map(|pass| Cell::from(in_pass(&profile, pass)));
        let class = |class| in_step(&profile, |pass| of_class(pass, class));
        let all = forward.seconds + backward.seconds + adamw.seconds;
        let step = [
            in_step(&profile, products),
            Some(profile.over(adamw.seconds, all)),
            class(Class::Elementwise),
            class(Class::Copy),
        ];
        [passes.to_vec(), step.map(Cell::from).to_vec()].concat()
    })
}
