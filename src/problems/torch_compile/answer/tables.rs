//! The tables of every column, with captions that say how often each pass was timed.

use anyhow::Result;

use super::super::attention::Passes;
use super::cases::{AttentionCase, Cases, ModelCase, PassOf, UpdateCase};
use super::part_b::{FORWARD, STEP};
use super::{optimizer, part_a, part_b};
use crate::harness::answer::format::{NOTHING, grouped, print};
use crate::harness::answer::{Answer, Cell, Column, RecordSet, Style, Table, Unit};
use crate::harness::stats;

/// The tables of the records that answer the handout.
pub fn main(answer: &mut Answer, set: &RecordSet, cases: &Cases) -> Result<()> {
    add_attention(answer, "attention", set, &cases.attention)?;
    add_model(answer, "model-forward", set, &cases.models, false)?;
    add_model(answer, "model-step", set, &cases.models, true)?;
    add_updates(answer, set, &cases.updates)
}

/// The tables of a CPU's records where a GPU's answer the handout.
pub fn appendix(answer: &mut Answer, set: &RecordSet, cases: &Cases) -> Result<()> {
    add_attention(answer, "cpu-attention", set, &cases.attention)?;
    add_model(answer, "cpu-model-step", set, &cases.models, true)
}

/// How the passes behind a median were taken.
fn timing(rounds: usize, iterations: usize, warmup: usize) -> String {
    let passes = rounds * iterations;
    format!("medians of {passes} passes a column, taken in {rounds} rounds of turns, each after {warmup} untimed")
}

/// A table for each pass.
fn add_attention(answer: &mut Answer, id: &str, set: &RecordSet, cases: &[AttentionCase]) -> Result<()> {
    let Some(first) = cases.first() else { return Ok(()) };
    let p = first.params;
    for ((pass, of), title) in part_a::PASSES.into_iter().zip(["Forward", "Backward"]) {
        let mut table = Table::new(vec![Column::right("$d$"), Column::right("$T$")]);
        table.columns.extend(part_a::COLUMNS.map(|(head, _)| Column::number(head, Style::Ms, 3)));
        for case in cases {
            let (d, seq) = (case.params.d_model.to_string(), grouped(case.params.seq as f64, 0));
            let mut cells: Vec<Cell> = vec![d.into(), seq.into()];
            cells.extend(part_a::COLUMNS.map(|(_, column)| case.cell(column, of)));
            table.row(cells);
        }
        let caption = format!(
            "{title} pass of plain attention, in ms: {}; batch {}, float32, no mask.{} {}.",
            timing(p.rounds, p.iterations, p.warmup),
            p.batch,
            deviation(cases, of).unwrap_or_default(),
            set.source()
        );
        answer.table(format!("{id}-{pass}"), table.captioned(caption))?;
    }
    Ok(())
}

/// A sentence on the deviation of the eager columns at the shortest length, where it is above a tenth.
fn deviation(cases: &[AttentionCase], pass: PassOf<Passes>) -> Option<String> {
    let measured = || cases.iter().filter(|case| case.row.is_some());
    let shortest = measured().map(|case| case.params.seq).min()?;
    let [(_, rust), (_, python), ..] = part_a::COLUMNS;
    let deviations = measured().filter(|case| case.params.seq == shortest).flat_map(|case| {
        [rust, python].map(|column| case.statistic(column, pass, |x| stats::std(x) / stats::median(x)))
    });
    // One sample has no deviation: it is not a number, which `max` passes over.
    let worst = deviations.flatten().map(|relative| relative.value()).fold(0.0, f64::max);
    let (length, share) = (grouped(shortest as f64, 0), print(worst, Style::Percent, 0));
    let words =
        format!(" At $T = {length}$ the standard deviation of the eager columns reaches {share} of the median.");
    (worst > 0.1).then_some(words)
}

/// The forward pass of every model, or its training step.
fn add_model(answer: &mut Answer, id: &str, set: &RecordSet, cases: &[ModelCase], step: bool) -> Result<()> {
    let Some(first) = cases.first() else { return Ok(()) };
    let (_, pass) = if step { STEP } else { FORWARD };
    let mut table = Table::new(vec![Column::text("size"), Column::text("arithmetic")]);
    table.columns.extend(part_b::COLUMNS.map(|(head, _)| Column::right(head)));
    table.columns.push(Column::number("compiling (s)", Style::Sec, 1));
    for case in cases {
        let mut cells: Vec<Cell> = vec![case.params.size.size().name.into(), case.params.dtype.name().into()];
        cells.extend(part_b::COLUMNS.map(|(_, column)| {
            let Some(median) = case.median(column, pass) else { return case.ending(column).into() };
            let std = case.statistic(column, pass, stats::std).filter(|std| std.value().is_finite());
            let std = std.map_or(NOTHING.into(), |std| print(std.value(), Style::Ms, 2));
            Cell::text(median.mark(&format!("{} ± {std}", print(median.value(), Style::Ms, 2))))
        }));
        let compile = case.row.and_then(|row| row.compile.as_ref());
        cells.push(compile.and_then(|compile| case.first_calls(compile, step)).into());
        table.row(cells);
    }
    let what = match step {
        true => "Training step (forward, backward and AdamW)",
        false => "Forward pass with the loss, recorded for a backward pass",
    };
    let caption = format!(
        "{what}, in ms ± standard deviations: {}; context {}, batch {}. {}.",
        timings(cases),
        first.params.context_length,
        first.params.batch_size,
        set.source()
    );
    answer.table(id, table.captioned(caption))
}

/// One clause for all sizes that were timed alike, which names them where there are several clauses.
fn timings(cases: &[ModelCase]) -> String {
    let mut clauses: Vec<(String, Vec<&str>)> = Vec::new();
    for case in cases {
        let p = case.params;
        let (clause, size) = (timing(p.rounds, p.iterations, p.warmup), p.size.size().name);
        match clauses.last_mut().filter(|(last, _)| *last == clause) {
            Some((_, sizes)) if sizes.contains(&size) => {}
            Some((_, sizes)) => sizes.push(size),
            None => clauses.push((clause, vec![size])),
        }
    }
    if let [(clause, _)] = &clauses[..] {
        return clause.clone();
    }
    let named = clauses.iter().map(|(clause, sizes)| format!("{clause} ({})", sizes.join(", ")));
    named.collect::<Vec<_>>().join("; ")
}

fn add_updates(answer: &mut Answer, set: &RecordSet, cases: &[UpdateCase]) -> Result<()> {
    let Some(first) = cases.first() else { return Ok(()) };
    let ms = |head| Column::number(head, Style::Ms, 3);
    let share = |head| Column::number(head, Style::Percent, 0);
    let mut table = Table::new(vec![
        Column::text("size"),
        Column::number("parameters", Style::Grouped, 0),
        ms("ours (ms)"),
        share("share of copy"),
        ms("PyTorch fused (ms)"),
        share("share"),
        ms("PyTorch foreach (ms)"),
        share("share"),
        Column::number("copy (GB/s)", Style::Gb, 0),
    ]);
    for case in cases {
        let parameters = case.row.map(|row| case.case.quantity(row.parameters as f64, Unit::One));
        let mut cells: Vec<Cell> = vec![case.params.size.size().name.into(), parameters.into()];
        for column in optimizer::COLUMNS {
            cells.extend([case.cell(column, optimizer::STEP), case.share(column).into()]);
        }
        cells.push(case.copy_rate().into());
        table.row(cells);
    }
    let (rounds, samples) = (first.params.rounds, first.params.rounds * first.params.iterations);
    let steps = match first.params.steps_in_a_row {
        1 => "steps".into(),
        several => format!("means of {several} steps in a row"),
    };
    let caption = format!(
        "One AdamW step over all parameters of a model, in float32: medians of {samples} {steps} a column, taken in \
         {rounds} rounds of turns. {}.",
        set.source()
    );
    answer.table("updates", table.captioned(caption))
}
