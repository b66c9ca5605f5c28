//! What autocast chooses, why layer norm needs float32 inside, and what bfloat16 gains by model size.

use anyhow::Result;
use serde::Serialize;

use self::timings::{Gain, Setting, Slower};
use super::dtypes::{Observed, on_cuda};
use super::layer_norm::{Example, FEATURES, INPUTS, Input, Scheme, examples};
use super::measure::{MixedPrecision, Params, Row};
use crate::bench::dtype::Dtype;
use crate::harness::answer::format::print;
use crate::harness::answer::{Answer, Audience, Case, Cell, Claim, RecordSet, Records, Style, Table};

mod timings;

/// The problem whose records hold the same steps of another run.
pub const OTHER: &str = "benchmarking_script";

type MixedCase = Case<Params, Row>;

/// What the sentences quote.
#[derive(Serialize)]
struct Quoted {
    /// Of the CPU's record, where there is one.
    cpu_machine: Option<String>,
    /// Whether a GPU's types were observed, and what the CPU's layer norm gives under float16 autocast.
    observed: bool,
    cpu_layer_norm: Option<String>,
    #[serde(flatten)]
    layer_norm: LayerNorm,
    #[serde(flatten)]
    setting: Setting,
    /// Of the CPU's small cases, where the answer is a GPU's.
    small: Option<Setting>,
    /// Whether the ratio rises on a GPU, for a reason that the text gives.
    explained: bool,
    gain: Option<Gain>,
    slower: Option<Slower>,
}

/// Layer norm by rounding in software, which needs no record.
#[derive(Serialize)]
struct LayerNorm {
    features: usize,
    /// The largest number of float16, and the binary digits of bfloat16.
    largest: f64,
    digits: i32,
    /// The middle of the last example's numbers, and the mean that bfloat16 sums give of them.
    near: f64,
    stuck: Option<f64>,
    /// The largest error of any output with float32 inside, and the least one of a vector with bfloat16 inside.
    wide: f64,
    narrow: f64,
}

pub fn answer(records: &Records, _audience: Audience) -> Result<Answer> {
    let set = records.main()?;
    let cases = set.cases::<MixedPrecision>()?;
    let cpu = records.cpu().map(RecordSet::cases::<MixedPrecision>).transpose()?;
    let small = cpu.as_ref().filter(|_| set.is_gpu());
    let on_gpu = if set.is_gpu() { observed(&cases) } else { None };
    let on_cpu = cpu.as_ref().and_then(|cases| observed(cases));
    let (examples, pairs) = (examples(), timings::pairs(&cases)?);
    let small_pairs = small.map(|cases| timings::pairs(cases)).transpose()?;
    let gain = Gain::of(&pairs);
    let quoted = Quoted {
        cpu_machine: records.cpu().map(RecordSet::machine).transpose()?,
        observed: on_gpu.is_some(),
        cpu_layer_norm: on_cpu.as_ref().map(|[half, _]| half.ln_output.clone()),
        layer_norm: LayerNorm::of(&examples),
        setting: Setting::of(&pairs),
        small: small_pairs.as_ref().map(|pairs| Setting::of(pairs)),
        explained: set.is_gpu() && gain.as_ref().is_some_and(Gain::rises),
        gain,
        slower: Slower::of(&pairs, records.other(OTHER)?.of(set.profile()))?,
    };
    let mut answer = Answer::of(set, &quoted)?;
    if let Some(seen) = on_gpu {
        answer.claim(as_documented(seen))?;
        answer.table("dtypes-gpu", dtypes_table(seen))?;
    }
    if let Some(seen @ [half, _]) = on_cpu {
        let claim = Claim::new("cpu-layer-norm-differs", half.ln_output != Dtype::Float32.name());
        answer.claim(claim.operand_text("layer norm's output", &half.ln_output))?;
        answer.table("dtypes-cpu", dtypes_table(seen))?;
    }
    answer.table("layer-norm", layer_norm_table(&examples))?;
    answer.table("timings", timings::table(&pairs))?;
    if let Some(gain) = &quoted.gain {
        gain.claims(&mut answer)?;
    }
    if let Some(pairs) = small_pairs {
        answer.table("timings-cpu", timings::table(&pairs))?;
    }
    Ok(answer)
}

/// The types under float16 and under bfloat16 autocast; none where one of the two was not observed.
fn observed(cases: &[MixedCase]) -> Option<[&Observed; 2]> {
    let under = |dtype: Dtype| {
        cases.iter().find_map(|case| match (&case.params, case.row()?) {
            (Params::Dtypes { autocast }, Row::Dtypes(seen)) if *autocast == dtype => Some(seen),
            _ => None,
        })
    };
    Some([under(Dtype::Float16)?, under(Dtype::Bfloat16)?])
}

/// The steps of the toy model's training step that the handout asks for.
fn steps(seen: &Observed) -> [(&'static str, &str); 7] {
    [
        ("Parameters, inside the region", &seen.parameters),
        ("Output of fc1", &seen.fc1_output),
        ("Output of ReLU", &seen.relu_output),
        ("Output of layer norm", &seen.ln_output),
        ("Logits", &seen.logits),
        ("Loss (cross-entropy)", &seen.loss),
        ("Gradients of the parameters", &seen.gradients),
    ]
}

/// Every step under either type is what PyTorch publishes of CUDA.
fn as_documented([half, brain]: [&Observed; 2]) -> Claim {
    let (half_expected, brain_expected) = (on_cuda(Dtype::Float16), on_cuda(Dtype::Bfloat16));
    let pairs = steps(half).into_iter().zip(steps(&half_expected));
    let pairs: Vec<_> = pairs.chain(steps(brain).into_iter().zip(steps(&brain_expected))).collect();
    let same = pairs.iter().filter(|(seen, expected)| seen == expected).count();
    Claim::all("cuda-as-documented", "steps", same, pairs.len())
}

fn dtypes_table([half, brain]: [&Observed; 2]) -> Table {
    Table::of(steps(half).into_iter().zip(steps(brain)))
        .text("Step", |((step, _), _)| *step)
        .text("float16 autocast", |((_, half), _)| *half)
        .text("bfloat16 autocast", |(_, (_, brain))| *brain)
        .into()
}

impl LayerNorm {
    fn of(examples: &[Example]) -> Self {
        let of = |dtype: Option<Dtype>, scheme: Scheme| {
            examples.iter().filter(move |e| e.scheme == scheme && dtype.is_none_or(|dtype| e.dtype == dtype))
        };
        let narrow = || of(Some(Dtype::Bfloat16), Scheme::Everything);
        // An output that is not a number is as far off as can be.
        let error = |example: &Example| example.largest_error.unwrap_or(f64::MAX);
        Self {
            features: FEATURES,
            largest: Dtype::Float16.format().largest,
            digits: Dtype::Bfloat16.format().significand_bits,
            near: INPUTS[INPUTS.len() - 1].offset,
            stuck: narrow().next_back().and_then(|example| example.mean),
            wide: of(None, Scheme::StatisticsInFloat32).map(error).fold(0.0, f64::max),
            narrow: narrow().map(error).fold(f64::MAX, f64::min),
        }
    }
}

fn layer_norm_table(examples: &[Example]) -> Table {
    let or = |x: Option<f64>, word: &str| x.map_or(word.into(), Cell::from);
    let ends = |x: &Input| [x.offset - x.spread, x.offset + x.spread].map(|x| print(x, Style::Fixed, 0));
    let variance = |example: &Example| example.variance.map(|variance| variance / example.exact_variance);
    Table::of(examples)
        .text("Input", |example| ends(&example.input).join(" to "))
        .text("Format", |example| example.dtype.name())
        .text("Statistics in", |example| match example.scheme {
            Scheme::Everything => example.dtype.name(),
            Scheme::StatisticsInFloat32 => Dtype::Float32.name(),
        })
        .number("Exact mean", Style::Fixed, 3, |example| example.exact_mean)
        .number("Mean", Style::Fixed, 3, |example| or(example.mean, "overflow"))
        .number("Variance over exact", Style::Fixed, 2, |example| or(variance(example), "overflow"))
        .number("Largest error", Style::Fixed, 4, |example| or(example.largest_error, "not a number"))
        .into()
}

#[cfg(test)]
mod tests;
