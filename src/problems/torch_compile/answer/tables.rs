//! The tables: PyTorch eager beside torch.compile, our own implementations, and AdamW.

use std::collections::BTreeSet;

use anyhow::Result;

use super::super::best::Params;
use super::cases::{AttentionCase, Cases, ModelCase, UpdateCase, machines};
use super::{best, optimizer, part_a, part_b};
use crate::harness::answer::format::{grouped, print};
use crate::harness::answer::{Answer, Cell, Column, RecordSet, Style, Table, Unit};

const RANGES: &str = "Ranges mark times that differ from turn to turn.";

/// Those of the records that answer the handout; what was not planned has no table.
pub fn main(answer: &mut Answer, set: &RecordSet, cases: &Cases) -> Result<()> {
    compared(answer, "", set, cases)?;
    if let Some(case) = cases.attention.first() {
        let machine = machines(&cases.attention);
        let caption = format!(
            "Our plain attention (Rust), eager and captured as a CUDA graph, batch {}, float32, {machine}. {RANGES}",
            case.params.batch
        );
        answer.table("ours-attention", our_attention(&cases.attention).captioned(caption))?;
    }
    if !cases.models.is_empty() {
        let machine = machines(&cases.models);
        let caption = format!(
            "Our model (Rust): eager beside the Python process; eager after that process has ended, in turns with the step \
             captured as a CUDA graph; {machine}. {RANGES}"
        );
        answer.table("ours-models", our_models(&cases.models).captioned(caption))?;
    }
    if !cases.updates.is_empty() {
        let machine = machines(&cases.updates);
        let caption = format!(
            "One AdamW step over all parameters of a model in float32, {machine}. A share is the step's rate over that of \
             a plain copy."
        );
        answer.table("updates", updates(&cases.updates).captioned(caption))?;
    }
    Ok(())
}

/// PyTorch's two implementations.
pub fn compared(answer: &mut Answer, prefix: &str, set: &RecordSet, cases: &Cases) -> Result<()> {
    let runs = set.runs().len();
    let runs = if runs > 1 { " Rows come from several runs." } else { "" };
    if let Some(case) = cases.attention.first() {
        let machine = machines(&cases.attention);
        let caption = format!(
            "Plain attention in PyTorch, eager / torch.compile: batch {}, float32, {machine}. {RANGES}{}",
            case.params.batch,
            runs.replace("Rows", "Cells")
        );
        answer.table(format!("{prefix}attention"), attention(&cases.attention).captioned(caption))?;
    }
    if let Some(case) = cases.models.first() {
        let machine = machines(&cases.models);
        let caption = format!(
            "PyTorch, eager and compiled: forward pass with its loss, and training step (forward, backward, AdamW); \
             context {}, batch {}, {machine}. The ratio is eager over compiled. {RANGES}{runs}",
            case.params.context_length, case.params.batch_size
        );
        answer.table(format!("{prefix}models"), models(&cases.models).captioned(caption))?;
    }
    Ok(())
}

/// Whole steps at their best, and what they cost.
pub fn best(answer: &mut Answer, id: &str, cases: &Cases, unmeasured: &[Params]) -> Result<()> {
    let machine = machines(&cases.best);
    if let Some(table) = best::table(&cases.best, unmeasured, &machine) {
        answer.table(id, table)?;
    }
    if let Some(table) = best::costs(&cases.best, &machine) {
        answer.table(format!("{id}-costs"), table)?;
    }
    Ok(())
}

/// A line for each pass and length, "5.24 / 3.21" for each width.
fn attention(cases: &[AttentionCase]) -> Table {
    let lengths: BTreeSet<i64> = cases.iter().map(|case| case.params.seq).collect();
    let widths: BTreeSet<i64> = cases.iter().map(|case| case.params.d_model).collect();
    let mut table = Table::new(vec![Column::text("pass"), Column::right("$T$")]);
    table.columns.extend(widths.iter().map(|d| Column::right(format!("$d = {d}$ (ms)"))));
    for (name, pass) in part_a::PASSES {
        for seq in &lengths {
            let times = |d: &i64| {
                let case = cases.iter().find(|case| case.params.seq == *seq && case.params.d_model == *d)?;
                let times = [part_a::PYTHON, part_a::COMPILED].map(|column| case.text(column, pass));
                Some(Cell::text(times.join(" / ")).of_case(&case.case.id))
            };
            let cells = widths.iter().map(|d| times(d).unwrap_or(Cell::Missing));
            table.row([name.into(), grouped(*seq as f64, 0).into()].into_iter().chain(cells).collect());
        }
    }
    table
}

fn our_attention(cases: &[AttentionCase]) -> Table {
    let [(_, forward), (_, backward)] = part_a::PASSES;
    Table::of(cases)
        .right("$d$", |case| case.params.d_model.to_string())
        .right("$T$", |case| grouped(case.params.seq as f64, 0))
        .right("forward, eager (ms)", |case| case.cell(part_a::RUST, forward))
        .right("forward, captured (ms)", |case| case.cell(part_a::CAPTURED, forward))
        .right("backward, eager (ms)", |case| case.cell(part_a::RUST, backward))
        .right("backward, captured (ms)", |case| case.cell(part_a::CAPTURED, backward))
        .into()
}

fn models(cases: &[ModelCase]) -> Table {
    use part_b::{COMPILED, FORWARD, GAIN, PYTHON, STEP};
    let ratio =
        |case: &ModelCase, pass| case.ratio(GAIN, pass).map(|gain| gain.cell(|times| print(times, Style::Fixed, 2)));
    Table::of(cases)
        .text("size", |case| case.params.size.size().name)
        .text("dtype", |case| case.params.dtype.name())
        .right("forward (ms)", |case| case.cell(PYTHON, FORWARD))
        .right("compiled (ms)", |case| case.cell(COMPILED, FORWARD))
        .number("ratio", Style::Fixed, 2, |case| ratio(case, FORWARD))
        .right("step (ms)", |case| case.cell(PYTHON, STEP))
        .right("compiled (ms)", |case| case.cell(COMPILED, STEP))
        .number("ratio", Style::Fixed, 2, |case| ratio(case, STEP))
        .into()
}

fn our_models(cases: &[ModelCase]) -> Table {
    use part_b::{AGAIN, CAPTURED, FORWARD, RUST, STEP};
    Table::of(cases)
        .text("size", |case| case.params.size.size().name)
        .text("dtype", |case| case.params.dtype.name())
        .right("forward, beside Python (ms)", |case| case.cell(RUST, FORWARD))
        .right("forward, after (ms)", |case| case.cell(AGAIN, FORWARD))
        .right("forward, captured (ms)", |case| case.cell(CAPTURED, FORWARD))
        .right("step, beside Python (ms)", |case| case.cell(RUST, STEP))
        .right("step, after (ms)", |case| case.cell(AGAIN, STEP))
        .right("step, captured (ms)", |case| case.cell(CAPTURED, STEP))
        .into()
}

fn updates(cases: &[UpdateCase]) -> Table {
    use optimizer::{FOREACH, FUSED, RUST, STEP};
    let parameters = |case: &UpdateCase| Some(case.case.quantity(case.row?.parameters as f64 / 1e9, Unit::One));
    let share = |case: &UpdateCase, column| -> Cell { case.share(column).into() };
    Table::of(cases)
        .text("size", |case| case.params.size.size().name)
        .number("parameters (billions)", Style::Fixed, 2, |case| parameters(case))
        .right("ours (ms)", |case| case.cell(RUST, STEP))
        .number("share of copy", Style::Percent, 0, |case| share(case, RUST))
        .right("fused (ms)", |case| case.cell(FUSED, STEP))
        .number("share of copy", Style::Percent, 0, |case| share(case, FUSED))
        .right("foreach (ms)", |case| case.cell(FOREACH, STEP))
        .number("copy (GB/s)", Style::Gb, 0, |case| case.copy_rate())
        .into()
}
