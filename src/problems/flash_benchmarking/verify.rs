//! Whether an implementation computes attention at all, before anything of it is timed: against the definition in float64.

use anyhow::{Context as _, Result};
use tch::{Kind, Tensor};

use super::flash_attention_4::{self, InPeer, PeerOutcome};
use super::implementations::takes_part;
use super::measure::Launch;
use super::subject::SubjectFunction;
use super::task::Task;
use crate::attention::hidden;
use crate::attention::implementations::{Implementation, Run};
use crate::bench::attention::{GraphReplays, Inputs};
use crate::bench::errors::AttentionErrors;
use crate::bench::interleave::ColumnOutcome;
use crate::error::{Fault, fault_of};
use crate::harness::subject::Subject;
use crate::torch::Generator;

/// Up to this length every element is compared, beyond it those of the last [`TAIL`] positions.
pub const WHOLE: i64 = 1024;
pub const TAIL: i64 = 256;

/// o, dq, dk and dv at positions `from` and after, in float64.
pub struct Expected {
    from: i64,
    outputs: [Tensor; 4],
}

impl Expected {
    /// Of causal attention on `inputs`, by Eq. 4-11.
    ///
    /// The queries from `from` on are enough: o and dq of a position need its own query only, and no earlier query
    /// sees a key of the tail, so that dk and dv of the tail need none. The work is linear in the length.
    pub fn of(inputs: &Inputs) -> Result<Self> {
        let seq = inputs.seq();
        let from = if seq <= WHOLE { 0 } else { seq - TAIL };
        let _no_graph = tch::no_grad_guard();
        let wide = |t: &Tensor| t.f_detach()?.f_to_kind(Kind::Double);
        let tail = |t: &Tensor| t.f_narrow(-2, from, seq - from);
        let (q, d_o) = (wide(&tail(&inputs.q)?)?, wide(&tail(&inputs.d_o)?)?);
        let (k, v) = (wide(&inputs.k)?, wide(&inputs.v)?);
        let root = (inputs.head_dim() as f64).sqrt();
        let mask = hidden(from..seq, 0..seq, q.device())?;
        let scores = q.f_matmul(&k.f_transpose(-2, -1)?)?.f_div_scalar(root)?;
        let p = scores.f_masked_fill(&mask, f64::NEG_INFINITY)?.f_softmax(-1, None)?;
        let o = p.f_matmul(&v)?;
        let dp = d_o.f_matmul(&v.f_transpose(-2, -1)?)?;
        let row_sum = p.f_mul(&dp)?.f_sum_dim_intlist([-1_i64].as_slice(), true, None)?;
        let ds = p.f_mul(&dp.f_sub(&row_sum)?)?.f_div_scalar(root)?;
        let of_tail = |t: &Tensor| t.f_narrow(-1, from, seq - from)?.f_transpose(-2, -1);
        let (dk, dv) = (of_tail(&ds)?.f_matmul(&q)?, of_tail(&p)?.f_matmul(&d_o)?);
        Ok(Self { from, outputs: [o, ds.f_matmul(&k)?, dk, dv] })
    }

    /// The expected o, dq, dk and dv of the positions that are compared.
    pub fn outputs(&self) -> &[Tensor; 4] {
        &self.outputs
    }

    /// The errors of whole o, dq, dk and dv of an implementation.
    pub fn errors(&self, results: &[Tensor; 4]) -> Result<AttentionErrors> {
        let [o, dq, dk, dv] = results;
        AttentionErrors::of(&[self.tail(o)?, self.tail(dq)?, self.tail(dk)?, self.tail(dv)?], &self.outputs)
    }

    /// The positions of a whole result that are compared.
    pub fn tail(&self, whole: &Tensor) -> Result<Tensor> {
        Ok(whole.f_slice(-2, self.from, None, 1)?)
    }
}

/// An implementation that computes what it should.
pub struct Verified<'p> {
    pub errors: AttentionErrors,
    pub seq: i64,
    pub version: Option<String>,
    pub runs: Runs<'p>,
}

/// How its calls run.
pub enum Runs<'p> {
    Eager,
    Replayed(GraphReplays),
    InPeer(InPeer<'p>),
    InSubject(SubjectFunction<'p>),
}

/// The other processes that have a part in a case.
pub struct Others<'p> {
    pub peer: &'p PeerOutcome<'p>,
    pub subject: Option<&'p Subject>,
}

/// The implementation's part in the case, or why it has none: not supported, wrong, or not to be captured.
pub fn verify<'p>(
    implementation: &Implementation,
    task: &Task,
    inputs: &Inputs,
    generator: &Generator,
    others: &Others<'p>,
) -> Result<ColumnOutcome<Verified<'p>>> {
    match (implementation.run, others.subject) {
        (Run::InPeer, _) => return flash_attention_4::verify(others.peer, task, inputs, generator),
        (Run::InSubject, Some(subject)) => {
            return SubjectFunction::verify(subject, implementation, task, inputs, generator);
        }
        _ => {}
    }
    let device = inputs.device();
    if let Err(reason) = takes_part(implementation, task.dtype.kind(), device, inputs.head_dim()) {
        return Ok(ColumnOutcome::NotRun { reason });
    }
    let attempt = || -> Result<Verified> {
        let small = task.draw(task.seq().min(WHOLE), generator)?;
        let errors = within(implementation, task, &small)?;
        let mut verified = Verified { errors, seq: small.seq(), version: None, runs: Runs::Eager };
        let longest = task.passes[task.passes.len() - 1];
        if task.seq() > small.seq() && task.refused(implementation, longest, device)?.is_none() {
            match within(implementation, task, inputs) {
                Ok(errors) => {
                    verified.errors = worse(verified.errors, errors);
                    verified.seq = task.seq();
                }
                // Single passes may still fit; each reports its own outcome.
                Err(error) if matches!(fault_of(&error), Some(Fault::OutOfMemory { .. })) => inputs.clear()?,
                Err(error) => return Err(error),
            }
        }
        if task.launch == Launch::Graph {
            let attention = implementation.prepare_causal(inputs.seq(), device)?;
            let replays = GraphReplays::new(attention, inputs, true).context("capturing CUDA graphs")?;
            let expected = Expected::of(inputs)?;
            for results in replays.results()? {
                let errors = expected.errors(&results)?.within_tolerance(implementation.name, task.dtype)?;
                verified.errors = worse(verified.errors, errors);
            }
            verified.runs = Runs::Replayed(replays);
        }
        Ok(verified)
    };
    match attempt() {
        Ok(verified) => Ok(ColumnOutcome::Measured { row: verified }),
        Err(error) if fault_of(&error).is_some() => ColumnOutcome::of(Err(error)),
        Err(error) => Ok(ColumnOutcome::Failed { error: format!("{error:#}") }),
    }
}

/// The errors of one forward and backward pass, none beyond the tolerance.
pub fn within(implementation: &Implementation, task: &Task, inputs: &Inputs) -> Result<AttentionErrors> {
    let attention = implementation.prepare_causal(inputs.seq(), inputs.device())?;
    let errors = Expected::of(inputs)?.errors(&inputs.results(&attention)?)?;
    errors.within_tolerance(implementation.name, task.dtype)
}

/// As they are recorded, where plain values must repeat: to two significant digits. On a GPU most columns add up `dq` in any
/// order, so that the others differ from run to run.
pub fn rounded(errors: AttentionErrors) -> Result<AttentionErrors> {
    let round = |error: f64| -> Result<f64> { Ok(format!("{error:.1e}").parse()?) };
    let AttentionErrors { o, dq, dk, dv } = errors;
    Ok(AttentionErrors { o: round(o)?, dq: round(dq)?, dk: round(dk)?, dv: round(dv)? })
}

/// The larger of each.
pub fn worse(a: AttentionErrors, b: AttentionErrors) -> AttentionErrors {
    AttentionErrors { o: a.o.max(b.o), dq: a.dq.max(b.dq), dk: a.dk.max(b.dk), dv: a.dv.max(b.dv) }
}

#[cfg(test)]
mod tests {
    use tch::Device;

    use super::*;
    use crate::attention::{Attention as _, naive::Naive};
    use crate::torch::random::SEED;

    #[test]
    fn whole_and_tail_are_what_the_definition_gives() {
        for seq in [96, WHOLE + 40] {
            let inputs =
                Inputs::draw(&[1, 2, seq, 8], Kind::Double, &Generator::new(Device::Cpu, SEED).unwrap()).unwrap();
            let q = |t: &Tensor| t.detach();
            let (q, k, v) = (q(&inputs.q), q(&inputs.k), q(&inputs.v));
            let (o, lse) = Naive.forward(&q, &k, &v, true).unwrap();
            let [dq, dk, dv] = Naive.backward([&q, &k, &v, &o, &lse, &inputs.d_o], true).unwrap();
            let expected = Expected::of(&inputs).unwrap();
            assert_eq!(expected.from, if seq > WHOLE { seq - TAIL } else { 0 });
            let errors = expected.errors(&[o, dq, dk, dv]).unwrap();
            assert!(errors.largest() < 1e-12, "{errors:?}");
        }
    }

    #[test]
    fn errors_are_recorded_in_two_digits() {
        let errors = AttentionErrors { o: 2.3456e-3, dq: 0.0, dk: 1.0, dv: 9.96e-7 };
        assert_eq!(rounded(errors).unwrap(), AttentionErrors { o: 2.3e-3, dq: 0.0, dk: 1.0, dv: 1e-6 });
    }

    #[test]
    fn an_error_in_any_one_of_the_four_is_seen() {
        let length = WHOLE + 300;
        let inputs =
            Inputs::draw(&[1, 1, length, 8], Kind::Double, &Generator::new(Device::Cpu, SEED).unwrap()).unwrap();
        let expected = Expected::of(&inputs).unwrap();
        let whole = |tail: &Tensor| {
            let whole = Tensor::zeros([1, 1, length, 8], (Kind::Double, Device::Cpu));
            whole.narrow(-2, expected.from, TAIL).copy_(tail);
            whole
        };
        for wrong in 0..4 {
            let outputs: Vec<Tensor> = expected.outputs.iter().map(whole).collect();
            let _ = outputs[wrong].narrow(-2, expected.from, 1).f_mul_scalar_(1.5).unwrap();
            let errors = expected.errors(&outputs.try_into().unwrap()).unwrap();
            let of = [errors.o, errors.dq, errors.dk, errors.dv];
            assert!(of.iter().enumerate().all(|(i, e)| (*e > 1e-3) == (i == wrong)), "{wrong}: {of:?}");
        }
    }
}
