//! Whether an implementation computes attention at all, before anything of it is timed: against the definition in float64.

use anyhow::{Context as _, Result};
use tch::{Device, Kind, Tensor};

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
use crate::harness::subject::{Subject, drawn_seed};
use crate::torch::Generator;

/// Up to this length every element is compared, beyond it those of the last [`TAIL`] positions.
pub const WHOLE: i64 = 1024;
pub const TAIL: i64 = 256;

/// The scores of a head that are in memory at once.
const SCORES: i64 = 1 << 25;

/// o, dq, dk and dv at some positions, in float64.
pub struct Expected {
    positions: Tensor,
    outputs: [Tensor; 4],
}

impl Expected {
    /// Of causal attention on `inputs`, by Eq. 4-11, at all positions up to [`WHOLE`], else at the last [`TAIL`].
    pub fn of(inputs: &Inputs) -> Result<Self> {
        let seq = inputs.seq();
        let from = if seq <= WHOLE { 0 } else { seq - TAIL };
        Self::at(inputs, &Vec::from_iter(from..seq), SCORES)
    }

    /// As [`Self::of`], at as many positions, drawn now: nobody can have computed these alone. The work grows with the square of
    /// the length.
    pub fn drawn(inputs: &Inputs) -> Result<Self> {
        let seq = inputs.seq();
        if seq <= WHOLE {
            return Self::of(inputs);
        }
        let all = Generator::new(Device::Cpu, drawn_seed()?)?.randperm(seq)?;
        let (positions, _) = all.f_narrow(0, 0, TAIL)?.f_sort(0, false)?;
        Self::at(inputs, &Vec::<i64>::try_from(&positions)?, SCORES)
    }

    /// At these positions, in ascending order, with as many `scores` of a head in memory at once. The queries from the first one on are enough: o and dq of a position need its own
    /// query only, and no earlier query sees its key. So the work for the end of a sequence is linear in the length.
    fn at(inputs: &Inputs, positions: &[i64], scores: i64) -> Result<Self> {
        let _no_graph = tch::no_grad_guard();
        let (seq, device) = (inputs.seq(), inputs.q.device());
        let all = Tensor::from_slice(positions).f_to_device(device)?;
        let wide = |t: &Tensor| t.f_detach()?.f_to_kind(Kind::Double);
        let [q, k, v, d_o] = [wide(&inputs.q)?, wide(&inputs.k)?, wide(&inputs.v)?, wide(&inputs.d_o)?];
        let root = (inputs.head_dim() as f64).sqrt();
        let [dk, dv] = [&k, &v].map(|t| t.f_index_select(-2, &all)?.f_zeros_like());
        let (dk, dv, mut o, mut dq) = (dk?, dv?, Vec::new(), Vec::new());
        let rows = (scores / seq).clamp(1, seq);
        let first = *positions.first().context("no positions to compare")?;
        for from in (first..seq).step_by(rows as usize) {
            let until = (from + rows).min(seq);
            let part = |t: &Tensor| t.f_narrow(-2, from, until - from);
            let (q, d_o, k, v) = (part(&q)?, part(&d_o)?, k.f_narrow(-2, 0, until)?, v.f_narrow(-2, 0, until)?);
            let scores = q.f_matmul(&k.f_transpose(-2, -1)?)?.f_div_scalar(root)?;
            let mask = hidden(from..until, 0..until, device)?;
            let p = scores.f_masked_fill(&mask, f64::NEG_INFINITY)?.f_softmax(-1, None)?;
            let dp = d_o.f_matmul(&v.f_transpose(-2, -1)?)?;
            let row_sum = p.f_mul(&dp)?.f_sum_dim_intlist([-1_i64].as_slice(), true, None)?;
            let ds = p.f_mul(&dp.f_sub(&row_sum)?)?.f_div_scalar(root)?;
            // Of the positions, those whose keys these queries see, and those whose queries these are.
            let [before, seen] = [from, until].map(|end| positions.partition_point(|at| *at < end) as i64);
            let keys = all.f_narrow(0, 0, seen)?;
            let at_keys = |t: &Tensor| t.f_index_select(-1, &keys)?.f_transpose(-2, -1);
            let _ = dk.f_narrow(-2, 0, seen)?.f_add_(&at_keys(&ds)?.f_matmul(&q)?)?;
            let _ = dv.f_narrow(-2, 0, seen)?.f_add_(&at_keys(&p)?.f_matmul(&d_o)?)?;
            let queries = all.f_narrow(0, before, seen - before)?.f_sub_scalar(from)?;
            o.push(p.f_index_select(-2, &queries)?.f_matmul(&v)?);
            dq.push(ds.f_index_select(-2, &queries)?.f_matmul(&k)?);
        }
        let joined = |parts: &[Tensor]| Tensor::f_cat(parts, -2);
        Ok(Self { positions: all, outputs: [joined(&o)?, joined(&dq)?, dk, dv] })
    }

    /// The expected o, dq, dk and dv of the positions that are compared.
    pub fn outputs(&self) -> &[Tensor; 4] {
        &self.outputs
    }

    /// The errors of whole o, dq, dk and dv of an implementation.
    pub fn errors(&self, results: &[Tensor; 4]) -> Result<AttentionErrors> {
        let [o, dq, dk, dv] = results;
        let compared = [self.compared(o)?, self.compared(dq)?, self.compared(dk)?, self.compared(dv)?];
        AttentionErrors::of(&compared, &self.outputs)
    }

    /// The positions of a whole result that are compared.
    pub fn compared(&self, whole: &Tensor) -> Result<Tensor> {
        Ok(whole.f_index_select(-2, &self.positions.f_to_device(whole.device())?)?)
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
    use super::*;
    use crate::attention::{Attention as _, naive::Naive};
    use crate::torch::random::SEED;

    fn draw(shape: &[i64]) -> Inputs {
        Inputs::draw(shape, Kind::Double, &Generator::new(Device::Cpu, SEED).unwrap()).unwrap()
    }

    #[test]
    fn whole_tail_and_drawn_positions_are_what_the_definition_gives() {
        let in_parts = |inputs: &Inputs| Expected::at(inputs, &Vec::from_iter((0..inputs.seq()).step_by(3)), 10_000);
        type Way<'a> = &'a dyn Fn(&Inputs) -> Result<Expected>;
        let [of, drawn, in_parts]: [Way; 3] = [&Expected::of, &Expected::drawn, &in_parts];
        for (seq, count, expected) in
            [(96, 96, of), (WHOLE + 40, TAIL, of), (WHOLE + 40, TAIL, drawn), (300, 100, in_parts)]
        {
            let inputs = draw(&[1, 2, seq, 8]);
            let q = |t: &Tensor| t.detach();
            let (q, k, v) = (q(&inputs.q), q(&inputs.k), q(&inputs.v));
            let (o, lse) = Naive.forward(&q, &k, &v, true).unwrap();
            let [dq, dk, dv] = Naive.backward([&q, &k, &v, &o, &lse, &inputs.d_o], true).unwrap();
            let expected = expected(&inputs).unwrap();
            assert_eq!(expected.positions.size(), [count]);
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
        let expected = Expected::of(&draw(&[1, 1, length, 8])).unwrap();
        let whole = |tail: &Tensor| {
            let whole = Tensor::zeros([1, 1, length, 8], (Kind::Double, Device::Cpu));
            whole.narrow(-2, length - TAIL, TAIL).copy_(tail);
            whole
        };
        for wrong in 0..4 {
            let outputs: Vec<Tensor> = expected.outputs.iter().map(whole).collect();
            let _ = outputs[wrong].narrow(-2, length - TAIL, 1).f_mul_scalar_(1.5).unwrap();
            let errors = expected.errors(&outputs.try_into().unwrap()).unwrap();
            let of = [errors.o, errors.dq, errors.dk, errors.dv];
            assert!(of.iter().enumerate().all(|(i, e)| (*e > 1e-3) == (i == wrong)), "{wrong}: {of:?}");
        }
    }
}
