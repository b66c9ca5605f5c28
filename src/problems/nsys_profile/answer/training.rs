//! Part (d): what a training step changes in the share of matrix products, and what takes the rest.

use anyhow::Result;
use serde::Serialize;

use super::super::summary::RangeWork;
use super::{ProfileCase, Profiled, context, lines, n_of, named, of_class, products};
use crate::bench::kernels::Class;
use crate::harness::answer::format::{Style, listed};
use crate::harness::answer::{Column, Quantity, Range, RecordSet, Table};

#[derive(Serialize)]
pub struct Training {
    /// Of the example: the share of matmuls in inference and in a step, of AdamW in a step, and of products in a step with
    /// AdamW as tensor operations.
    inference: Quantity,
    step: Quantity,
    adamw: Quantity,
    plain: String,
    /// The share of matmuls over all profiles.
    inferences: Range,
    steps: Range,
    /// "16 of 20" profiles: those whose share falls, and those whose top of the forward pass is the top of both passes.
    fell: String,
    same_top: String,
    /// What is on top of both passes of the example: "it still leads, with 192 launches".
    both: String,
    /// "4 (small and large at 1,024)", where all the others rise and the backward pass explains it; else empty.
    rose: String,
}

/// The share of a training step's time that `part` of its passes takes.
fn in_step(profile: &Profiled, part: impl Fn(&RangeWork) -> f64) -> Option<Quantity> {
    let step = profile.step()?;
    Some(profile.over(step.iter().map(|pass| part(pass)).sum(), step.iter().map(|pass| pass.seconds).sum()))
}

fn adamw_in_step(profile: &Profiled) -> Option<Quantity> {
    let [forward, backward, adamw] = profile.step()?;
    Some(profile.over(adamw.seconds, forward.seconds + backward.seconds + adamw.seconds))
}

fn in_pass(profile: &Profiled, pass: &RangeWork) -> Quantity {
    profile.over(products(pass), pass.seconds)
}

impl Training {
    /// None where the example has no training step.
    pub fn of(profiles: &[Profiled], example: Profiled, plain: &[Profiled]) -> Option<Self> {
        let inference = |profile: &Profiled| in_pass(profile, profile.inference());
        let shares = profiles.iter().map(|profile| (*profile, inference(profile), in_step(profile, products)));
        let trained = shares.filter_map(|(profile, inference, step)| Some((profile, inference, step?)));
        let trained: Vec<(Profiled, Quantity, Quantity)> = trained.collect();
        let all = trained.len();
        let rises = |(_, inference, step): &&(Profiled, Quantity, Quantity)| step.value() > inference.value();
        let rose: Vec<Profiled> = trained.iter().filter(rises).map(|(profile, ..)| *profile).collect();
        let fell = trained.iter().filter(|(_, inference, step)| step.value() < inference.value()).count();
        let tops = trained.iter().filter_map(|(profile, ..)| profile.top().zip(profile.row.top_of_both.as_ref()));
        let same_top = tops.filter(|(forward, both)| forward.name == both.name).count();
        let steps: Vec<Quantity> = trained.iter().map(|(_, _, step)| step.clone()).collect();
        let leader = example.row.top_of_both.as_ref()?;
        let same = example.top().is_some_and(|top| top.name == leader.name);
        let name = if same { "it still".into() } else { named(leader) };
        Some(Self {
            both: format!("{name} leads, with {} launches", example.count(leader.count)),
            inference: inference(&example),
            step: in_step(&example, products)?,
            adamw: adamw_in_step(&example)?,
            plain: plain_adamw(&example, plain).unwrap_or_default(),
            inferences: Range::of(profiles.iter().map(inference))?,
            steps: Range::of(&steps)?,
            fell: n_of(fell, all),
            same_top: n_of(same_top, all),
            rose: if fell + rose.len() == all { explained(&rose) } else { String::new() },
        })
    }
}

/// Empty unless all have one context, and a backward pass with a higher share than inference.
fn explained(rose: &[Profiled]) -> String {
    let Some(first) = rose.first() else { return String::new() };
    let alike = |profile: &Profiled| {
        let backward = profile.step().map(|[_, backward, _]| in_pass(profile, backward).value());
        profile.params().context_length == first.params().context_length
            && backward > Some(in_pass(profile, profile.inference()).value())
    };
    if !rose.iter().all(alike) {
        return String::new();
    }
    let sizes: Vec<&str> = rose.iter().map(Profiled::size).collect();
    format!("{} ({} at {})", rose.len(), listed(&sizes), context(first.params()))
}

/// " With AdamW in 4,350 kernels instead of 2, matmuls take ..", where the example was measured so, too.
fn plain_adamw(example: &Profiled, plain: &[Profiled]) -> Option<String> {
    let setting = |profile: &Profiled| (profile.params().size, profile.params().context_length);
    let plain = plain.iter().find(|profile| setting(profile) == setting(example))?;
    let share = in_step(plain, products)?.text(Style::Percent, 1);
    let ([_, _, fused], [_, _, operations]) = (example.step()?, plain.step()?);
    let (fused, operations) = (example.count(fused.count), plain.count(operations.count));
    let place = example.place();
    Some(format!(
        " With AdamW in {operations} kernels instead of {fused}, matmuls take {share} of the step of {place}."
    ))
}

/// How long the kernels of each forward pass run, the share of matmuls in each pass, and of other work in a step.
pub fn table(set: &RecordSet, cases: &[&ProfileCase]) -> Result<Table> {
    let share = |head: &str| Column::number(head, Style::Percent, 1);
    let counted = if set.is_gpu() { "kernels" } else { "operators" };
    let table = lines(
        cases,
        [
            (Column::number(format!("{counted} (ms)"), Style::Ms, 1), |p| p.seconds(p.inference().seconds).into()),
            (Column::number("idle", Style::Percent, 0), |p| {
                p.number(1.0 - p.over(p.inference().busy_s, p.inference().span_s).value()).into()
            }),
            (share("matmuls, inference"), |p| in_pass(p, p.inference()).into()),
            (share("matmuls, backward"), |p| p.step().map(|[_, backward, _]| in_pass(p, backward)).into()),
            (share("matmuls, step"), |p| in_step(p, products).into()),
            (share("AdamW, step"), |p| adamw_in_step(p).into()),
            (share("elementwise, step"), |p| in_step(p, |pass| of_class(pass, Class::Elementwise)).into()),
            (share("copies, step"), |p| in_step(p, |pass| of_class(pass, Class::Copy)).into()),
        ],
    );
    Ok(table.captioned(format!(
        "Time of the {counted} of a forward pass under no_grad and the share of its span without any; then shares of the \
         {counted}' time, where a step is forward, backward and AdamW; {}.",
        set.machine()?
    )))
}
