//! Tests of the golden cases: every broken norm, rotation, transformer and AdamW must fail its case.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::Result;
use cs336::checks::golden::transformer::{Inputs, Outputs};
use cs336::checks::golden::{CaseFile, adamw, require, rmsnorm, rope, transformer};
use cs336::model::optim::AdamWOptions;
use libtest_mimic::Trial;
use tch::{Device, Kind, Tensor};

use super::{caught, control};

#[derive(Debug, Clone, Copy, PartialEq)]
enum Norm {
    Sound,
    WithoutEps,
    EpsOutsideTheRoot,
    MeanSubtracted,
    WithoutGain,
    InTheInputsDtype,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Rotation {
    Sound,
    HalvesInsteadOfPairs,
    OtherTheta,
    PositionsFromOne,
    OtherDirection,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Defect {
    Sound,
    Norm(Norm),
    Rotation(Rotation),
    RotatedValues,
    WithoutMask,
    MaskOffByOne,
    WithoutScale,
    ScaleOfTheWholeModel,
    WithoutFinalNorm,
    PostNorm,
    GateSwapped,
    LossSummed,
    LossOfOtherTargets,
    TiedHead,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Step {
    Sound,
    EpsBeforeTheCorrection,
    EpsInsideTheRoot,
    LateDecay,
    WithoutCorrection,
    DecayInTheGradient,
    DecayWithoutLr,
    StepsFromZero,
    BetasSwapped,
}

const NORM: &str = "benchmarking_script::norm_and_rotary_positions";
const MODEL: &str = "benchmarking_script::logits_loss_and_gradients";
const ADAMW: &str = "benchmarking_script::adamw_over_many_steps";

const Y: &str = "FAILED mutant: y: ";
const LOGITS: &str = "FAILED mutant: logits: ";
/// The logits before it pass.
const LOSS: &str = "comparisons failed:\nFAILED mutant: loss: ";

/// The message of the golden case for each defective model.
const DEFECTS: [(Defect, &str); 17] = [
    (Defect::Norm(Norm::WithoutEps), LOGITS),
    (Defect::Norm(Norm::EpsOutsideTheRoot), LOGITS),
    (Defect::Norm(Norm::MeanSubtracted), LOGITS),
    (Defect::Norm(Norm::WithoutGain), LOGITS),
    (Defect::Rotation(Rotation::OtherTheta), LOGITS),
    (Defect::Rotation(Rotation::HalvesInsteadOfPairs), LOGITS),
    (Defect::RotatedValues, LOGITS),
    (Defect::WithoutMask, LOGITS),
    (Defect::MaskOffByOne, LOGITS),
    (Defect::WithoutScale, LOGITS),
    (Defect::ScaleOfTheWholeModel, LOGITS),
    (Defect::WithoutFinalNorm, LOGITS),
    (Defect::PostNorm, LOGITS),
    (Defect::GateSwapped, LOGITS),
    (Defect::LossSummed, LOSS),
    (Defect::LossOfOtherTargets, LOSS),
    (Defect::TiedHead, LOGITS),
];

/// One test for each mutant and control. A control is the same code without a defect and must pass.
pub fn trials() -> Vec<Trial> {
    let norms = [Norm::WithoutEps, Norm::EpsOutsideTheRoot, Norm::MeanSubtracted, Norm::WithoutGain];
    let rotations =
        [Rotation::HalvesInsteadOfPairs, Rotation::OtherTheta, Rotation::PositionsFromOne, Rotation::OtherDirection];
    let steps = [
        Step::EpsBeforeTheCorrection,
        Step::EpsInsideTheRoot,
        Step::LateDecay,
        Step::WithoutCorrection,
        Step::DecayInTheGradient,
        Step::DecayWithoutLr,
        Step::StepsFromZero,
        Step::BetasSwapped,
    ];
    let mut trials = vec![
        control("model", "rms_norm", || norm_case("rmsnorm", Norm::Sound)),
        control("model", "rms_norm_bfloat16", || norm_case("rmsnorm_bfloat16", Norm::Sound)),
        control("model", "rope", || rotation_case(Rotation::Sound)),
        control("model", "transformer", || model_case(Defect::Sound)),
        control("model", "adamw", || step_case(Step::Sound)),
        mutant("rms_norm_bfloat16", Norm::InTheInputsDtype, NORM, Y, || {
            norm_case("rmsnorm_bfloat16", Norm::InTheInputsDtype)
        }),
    ];
    trials.extend(norms.map(|norm| mutant("rms_norm", norm, NORM, Y, move || norm_case("rmsnorm", norm))));
    trials.extend(rotations.map(|rotation| mutant("rope", rotation, NORM, Y, move || rotation_case(rotation))));
    trials
        .extend(DEFECTS.map(|(defect, words)| mutant("transformer", defect, MODEL, words, move || model_case(defect))));
    let after = "FAILED mutant: param_after: ";
    trials.extend(steps.map(|step| mutant("adamw", step, ADAMW, after, move || step_case(step))));
    trials
}

fn mutant(
    what: &str,
    defect: impl std::fmt::Debug,
    check: &'static str,
    words: &'static str,
    run: impl FnOnce() -> Result<f64> + Send + 'static,
) -> Trial {
    caught("model", &format!("{what}_{defect:?}"), check, words, run)
}

fn case(name: &str) -> Result<CaseFile> {
    CaseFile::read(&Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("suites/cases/{name}.safetensors")))
}

fn norm_case(name: &str, norm: Norm) -> Result<f64> {
    require(&rmsnorm::run_with(&case(name)?, "mutant", &|x, weight, eps| Ok(normed(norm, x, weight, eps)))?)
}

fn rotation_case(rotation: Rotation) -> Result<f64> {
    require(&rope::run_with(&case("rope")?, "mutant", &|theta, x| Ok(rotated(rotation, theta, x)))?)
}

fn model_case(defect: Defect) -> Result<f64> {
    require(&transformer::run_with(&case("transformer")?, "mutant", &|inputs| model(defect, inputs))?)
}

fn step_case(step: Step) -> Result<f64> {
    let stepped = |options, param: &Tensor, grads: &Tensor| Ok(stepped(step, options, param, grads));
    require(&adamw::run_with(&case("adamw")?, "mutant", &stepped)?)
}

fn normed(norm: Norm, x: &Tensor, gain: &Tensor, eps: f64) -> Tensor {
    let kind = x.kind();
    if norm == Norm::InTheInputsDtype {
        let root = ((x * x).mean_dim(-1, true, None) + eps).rsqrt();
        return x * root * gain.to_kind(kind);
    }
    let x = x.to_kind(Kind::Float);
    let x = if norm == Norm::MeanSubtracted { &x - x.mean_dim(-1, true, None) } else { x };
    let mean_square = (&x * &x).mean_dim(-1, true, None);
    let y = match norm {
        Norm::WithoutEps => &x / mean_square.sqrt(),
        Norm::EpsOutsideTheRoot => &x / (mean_square.sqrt() + eps),
        _ => &x / (mean_square + eps).sqrt(),
    };
    if norm == Norm::WithoutGain { y.to_kind(kind) } else { (y * gain).to_kind(kind) }
}

/// Rotation by 2 x 2 matrices in float64, unlike the implementation's float32 products.
fn rotated(rotation: Rotation, theta: f64, x: &Tensor) -> Tensor {
    let (seq, d) = (x.size()[x.dim() - 2], x.size()[x.dim() - 1]);
    let theta = if rotation == Rotation::OtherTheta { theta / 10.0 } else { theta };
    let first = if rotation == Rotation::PositionsFromOne { 1.0 } else { 0.0 };
    let options = (Kind::Double, Device::Cpu);
    let positions = Tensor::arange(seq, options) + first;
    let frequencies = (Tensor::arange(d / 2, options) * (-2.0 / d as f64 * theta.ln())).exp();
    let angles = positions.outer(&frequencies);
    let angles = if rotation == Rotation::OtherDirection { -angles } else { angles };
    let (cos, sin) = (angles.cos().to_kind(Kind::Float), angles.sin().to_kind(Kind::Float));
    if rotation == Rotation::HalvesInsteadOfPairs {
        let (a, b) = (x.narrow(-1, 0, d / 2), x.narrow(-1, d / 2, d / 2));
        return Tensor::cat(&[&a * &cos - &b * &sin, &a * &sin + &b * &cos], -1);
    }
    let (a, b) = (x.slice(-1, 0, None, 2), x.slice(-1, 1, None, 2));
    Tensor::stack(&[&a * &cos - &b * &sin, &a * &sin + &b * &cos], -1).flatten(-2, -1)
}

/// A compact second implementation of the model, with one defect.
fn model(defect: Defect, inputs: &Inputs) -> Result<Outputs> {
    let config = &inputs.config;
    let leaves: BTreeMap<String, Tensor> =
        inputs.parameters.iter().map(|(name, value)| (name.clone(), value.copy().set_requires_grad(true))).collect();
    let weight = |name: &str| &leaves[name];
    let norm = match defect {
        Defect::Norm(norm) => norm,
        _ => Norm::Sound,
    };
    let mut h = Tensor::embedding(weight("token_embeddings.weight"), inputs.tokens, -1, false, false);
    for i in 0..config.num_layers {
        let w = |part: &str| weight(&format!("layers.{i}.{part}.weight"));
        let post = defect == Defect::PostNorm;
        let x = if post { h.shallow_clone() } else { normed(norm, &h, w("ln1"), 1e-5) };
        h = &h
            + attention(
                defect,
                config.num_heads,
                config.rope_theta,
                &x,
                &["q", "k", "v", "output"].map(|n| w(&format!("attn.{n}_proj"))),
            );
        let y = if post { normed(norm, &h, w("ln1"), 1e-5) } else { normed(norm, &h, w("ln2"), 1e-5) };
        let (gate, value) = (y.linear(w("ffn.w1"), None::<&Tensor>), y.linear(w("ffn.w3"), None::<&Tensor>));
        let hidden = if defect == Defect::GateSwapped { gate * value.silu() } else { gate.silu() * value };
        h = &h + hidden.linear(w("ffn.w2"), None::<&Tensor>);
    }
    if defect != Defect::WithoutFinalNorm {
        h = normed(norm, &h, weight("ln_final.weight"), 1e-5);
    }
    let head = if defect == Defect::TiedHead { "token_embeddings.weight" } else { "lm_head.weight" };
    let logits = h.linear(weight(head), None::<&Tensor>);
    let targets = if defect == Defect::LossOfOtherTargets { inputs.tokens } else { inputs.targets };
    let picked = logits.log_softmax(-1, None).gather(-1, &targets.unsqueeze(-1), false);
    let loss = if defect == Defect::LossSummed { -picked.sum(None) } else { -picked.mean(None) };
    loss.backward();
    let gradient = |value: &Tensor| if value.grad().defined() { value.grad() } else { value.zeros_like() };
    let gradients = leaves.iter().map(|(name, value)| (name.clone(), gradient(value))).collect();
    Ok(Outputs { logits, loss, gradients })
}

fn attention(defect: Defect, num_heads: i64, theta: f64, x: &Tensor, projections: &[&Tensor; 4]) -> Tensor {
    let (batch, seq, d_model) = x.size3().expect("x is (batch, seq, d_model)");
    let [q, k, v] =
        [0, 1, 2].map(|i| x.linear(projections[i], None::<&Tensor>).view([batch, seq, num_heads, -1]).transpose(1, 2));
    let rotation = match defect {
        Defect::Rotation(rotation) => rotation,
        _ => Rotation::Sound,
    };
    let (q, k) = (rotated(rotation, theta, &q), rotated(rotation, theta, &k));
    let v = if defect == Defect::RotatedValues { rotated(rotation, theta, &v) } else { v };
    let scale = match defect {
        Defect::WithoutScale => 1.0,
        Defect::ScaleOfTheWholeModel => (d_model as f64).sqrt(),
        _ => ((d_model / num_heads) as f64).sqrt(),
    };
    let first_hidden = if defect == Defect::MaskOffByOne { 2 } else { 1 };
    let hidden = Tensor::ones([seq, seq], (Kind::Bool, Device::Cpu)).triu(first_hidden);
    let scores = q.matmul(&k.transpose(-2, -1)) / scale;
    let scores = if defect == Defect::WithoutMask { scores } else { scores.masked_fill(&hidden, f64::NEG_INFINITY) };
    let o = scores.softmax(-1, None).matmul(&v);
    o.transpose(1, 2).reshape([batch, seq, d_model]).linear(projections[3], None::<&Tensor>)
}

/// AdamW by the formulas of the paper and of `torch.optim.AdamW`'s documentation, with one defect.
fn stepped(defect: Step, options: AdamWOptions, param: &Tensor, grads: &Tensor) -> Tensor {
    let AdamWOptions { lr, beta1, beta2, eps, weight_decay } = options;
    let (beta1, beta2) = if defect == Step::BetasSwapped { (beta2, beta1) } else { (beta1, beta2) };
    let (mut p, mut m, mut v) = (param.copy(), param.zeros_like(), param.zeros_like());
    for i in 0..grads.size()[0] {
        let step = if defect == Step::StepsFromZero { i.max(1) } else { i + 1 } as i32;
        let mut g = grads.get(i);
        let decay = match defect {
            Step::DecayWithoutLr => weight_decay,
            _ => lr * weight_decay,
        };
        match defect {
            Step::DecayInTheGradient => g += &p * weight_decay,
            Step::LateDecay => {}
            _ => p *= 1.0 - decay,
        }
        m = m * beta1 + &g * (1.0 - beta1);
        v = v * beta2 + &g * &g * (1.0 - beta2);
        let (correction1, correction2) = (1.0 - beta1.powi(step), 1.0 - beta2.powi(step));
        let update = match defect {
            Step::WithoutCorrection => &m / (v.sqrt() + eps),
            Step::EpsBeforeTheCorrection => &m * (correction2.sqrt() / correction1) / (v.sqrt() + eps),
            Step::EpsInsideTheRoot => &m / correction1 / (&v / correction2 + eps).sqrt(),
            _ => &m / correction1 / ((&v / correction2).sqrt() + eps),
        };
        p -= update * lr;
        if defect == Step::LateDecay {
            p *= 1.0 - decay;
        }
    }
    p
}
