//! What texts, integers, numbers of bytes and times by rank a record may hold.

use anyhow::{Result, ensure};
use serde_json::{Map, Value};

use super::Machine;
use crate::harness::samples::{Samples, Unit, each_samples};
use crate::json::from_value;
use crate::printable::one_line;
use crate::units::human_bytes;

/// JSON numbers hold larger integers inexactly, and sums of them could overflow.
const MAX_COUNT: u64 = 1 << 53;

/// Errors: an integer beyond [`MAX_COUNT`].
pub(super) fn require_counts(value: &Value) -> Result<()> {
    match value {
        Value::Number(number) if !number.is_f64() => {
            let is_count = number.as_i64().is_some_and(|count| count.unsigned_abs() <= MAX_COUNT);
            ensure!(is_count, "the count {number} is larger than 2^53");
            Ok(())
        }
        Value::Array(items) => items.iter().try_for_each(require_counts),
        Value::Object(fields) => fields.values().try_for_each(require_counts),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => Ok(()),
    }
}

/// The names of what holds bytes at one moment, alone or in a list of moments, beside those that end in `_bytes`. Where they name
/// something else, it is a small number.
const IN_MEMORY: &[&str] =
    &["peak", "in_use", "parameters", "gradients", "optimizer_state", "weight_copies", "saved", "working", "other"];

/// Errors: a number of bytes in `row`, by its name or its unit, that is below zero, or that all memory of `machine` cannot hold.
/// What was predicted, or asked for in vain, may be more.
pub fn check_bytes(row: &Value, machine: &Machine) -> Result<()> {
    let of_gpus = machine.gpus.iter().map(|gpu| gpu.memory_bytes);
    let memory = of_gpus.fold(machine.memory_bytes, u64::saturating_add);
    let fits = |at: &str, bytes: f64| {
        let (is, has) = (bytes as u64, memory);
        ensure!(bytes >= 0.0, "{at} is {bytes} bytes: correct it, or measure again");
        ensure!(is <= has, "{at} is {}, and its machine has {} of memory", human_bytes(is), human_bytes(has));
        Ok(())
    };
    each_samples(row, &mut |at, samples| {
        let bytes = samples.samples.iter().filter(|_| samples.unit == Unit::Bytes);
        bytes.copied().try_for_each(|bytes| fits(at, bytes))
    })?;
    each_field(row, &mut |fields, key, value| {
        let is_held = key != "predicted_bytes" && fields.get("kind").is_none_or(|kind| kind != "out_of_memory");
        let is_bytes = is_held && (key.ends_with("_bytes") || IN_MEMORY.contains(&key));
        let moments = value.as_array().into_iter().flatten();
        let held = moments.chain([value]).filter(|_| is_bytes);
        held.filter_map(Value::as_f64).try_for_each(|bytes| fits(&one_line(key), bytes))
    })
}

/// Errors: more ranks of NCCL than `machine` has GPUs; times by rank in `row` of other than all ranks of its case; beside them a
/// `last_rank` that is not the longest time of any rank, or a `mean` that is not theirs.
pub fn check_ranks(params: &Value, row: &Value, machine: &Machine) -> Result<()> {
    let Some(ranks) = params.get("world_size").and_then(Value::as_u64) else { return Ok(()) };
    let gpus = machine.gpus.len() as u64;
    // Of a CPU's cases no GPU is recorded.
    let has_gpus = gpus == 0 || ranks <= gpus || params.get("backend").is_none_or(|backend| backend != "nccl");
    ensure!(has_gpus, "{ranks} ranks ran over NCCL, each on a GPU, and the machine has {gpus}");
    each_field(row, &mut |fields, key, value| {
        let (Some(times), "by_rank") = (value.as_array(), key) else { return Ok(()) };
        ensure!(times.len() as u64 == ranks, "by_rank has {} entries, of {ranks} ranks", times.len());
        let times = times.iter().map(from_value::<Samples>).collect::<Result<Vec<_>>>()?;
        let longest: OverRanks = |times| times.iter().copied().fold(0.0, f64::max);
        let mean: OverRanks = |times| times.iter().sum::<f64>() / times.len() as f64;
        for (key, over) in [("last_rank", longest), ("mean", mean)] {
            if let Some(all) = fields.get(key) {
                require_over_ranks(key, &from_value(all)?, &times, over)?;
            }
        }
        Ok(())
    })
}

/// One time of those of all ranks.
type OverRanks = fn(&[f64]) -> f64;

/// A record's times are whole nanoseconds.
const ROUNDING_S: f64 = 2e-9;

fn require_over_ranks(name: &str, all: &Samples, by_rank: &[Samples], over: OverRanks) -> Result<()> {
    let count = all.samples.len();
    ensure!(by_rank.iter().all(|rank| rank.samples.len() == count), "{name} and its ranks have other numbers of times");
    for (k, &found) in all.samples.iter().enumerate() {
        let expected = over(&by_rank.iter().map(|rank| rank.samples[k]).collect::<Vec<_>>());
        ensure!(
            (found - expected).abs() <= ROUNDING_S,
            "a time of {name} is {found:e} s, and by its ranks {expected:e} s"
        );
    }
    Ok(())
}

/// Takes an object, and the key and the value of one of its fields.
type VisitField<'a> = dyn FnMut(&Map<String, Value>, &str, &Value) -> Result<()> + 'a;

/// Calls `visit` with every object inside `value`, and the key and the value of each of its fields.
fn each_field(value: &Value, visit: &mut VisitField) -> Result<()> {
    match value {
        Value::Array(items) => items.iter().try_for_each(|item| each_field(item, visit)),
        Value::Object(fields) => {
            fields.iter().try_for_each(|(key, value)| visit(fields, key, value).and_then(|()| each_field(value, visit)))
        }
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => Ok(()),
    }
}

/// Names of machines, software and parameters have at most some hundred.
const MOST_LETTERS: usize = 1_000;

/// Errors: a text or a key that is not one printable line, or too long for one. They are printed as parts of lines; only
/// outcomes, which are printed apart, may hold others.
pub(super) fn require_lines(value: &Value) -> Result<()> {
    let is_line = |text: &str| {
        let letters = text.chars().count();
        ensure!(
            letters <= MOST_LETTERS,
            "a text of {letters} characters: at most {MOST_LETTERS} are one line; correct it"
        );
        ensure!(text == one_line(text), "the text {text:?} is not one printable line; correct it");
        Ok(())
    };
    match value {
        Value::String(text) => is_line(text),
        Value::Array(items) => items.iter().try_for_each(require_lines),
        Value::Object(fields) => fields
            .iter()
            .filter(|(key, _)| *key != "outcome")
            .try_for_each(|(key, value)| is_line(key).and_then(|()| require_lines(value))),
        Value::Null | Value::Bool(_) | Value::Number(_) => Ok(()),
    }
}
