//! Calls of a subject's autograd function, timed from here: by our clock, each on new inputs, and a sample of them checked.
//!
//! Of the subject's process nothing is trusted but that our Python files run in it as they are: no clock of it, no statement
//! that a call has ended well. A call lasts from our message to its reply, which our Python sends once it has copied the
//! results and all streams are idle. Which calls are checked is drawn after they have ended, from no seed that it could know.
//! Between the arrival of an input and the call that it is for, our Python calls nothing of the subject's; what a subject has
//! Python or PyTorch call by itself (an audit hook, a mode for functions) runs there too, and is left to a reader's eye.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;

use anyhow::{Context as _, Result, ensure};
use serde_json::json;
use tch::Tensor;

use super::SubjectFault;
use super::attention::{FlashFunction, with_kept};
use crate::harness::subject::{Subject, drawn_seed};

/// Of so many calls one is checked, besides the last one of each turn.
const CHECKED_OF: u64 = 4;

/// q, k, v and do of one call, (.., n, d).
pub type CallInputs = [Tensor; 4];
/// Whether o, dq, dk and dv, those that the pass gives, are right for these inputs.
pub type Check<'a> = &'a dyn Fn(&CallInputs, &BTreeMap<String, Tensor>) -> Result<()>;

/// One pass of a subject's function, ready to be called again and again.
pub struct TimedFunction<'a> {
    pub subject: &'a Subject,
    pub function: FlashFunction,
    /// "forward", "backward" or "both".
    pub attention_pass: &'static str,
    pub draw: &'a dyn Fn() -> Result<CallInputs>,
    pub check: Check<'a>,
    /// The inputs of the last call, until it is decided whether it is checked.
    last: RefCell<Option<CallInputs>>,
    /// Draws which calls are checked.
    state: Cell<u64>,
}

impl<'a> TimedFunction<'a> {
    pub fn new(
        subject: &'a Subject,
        function: FlashFunction,
        attention_pass: &'static str,
        draw: &'a dyn Fn() -> Result<CallInputs>,
        check: Check<'a>,
    ) -> Result<Self> {
        let state = Cell::new(drawn_seed()?.unsigned_abs().max(1));
        Ok(Self { subject, function, attention_pass, draw, check, last: RefCell::default(), state })
    }

    /// After a turn. Errors: as [`super::SubjectProcess::rest`].
    pub fn rest(&self) -> Result<()> {
        with_kept(self.subject, self.function.adapter(), |process| process.rest())
    }

    /// Before a call, untimed: checks the last one if it is drawn, and gives the subject new inputs.
    pub fn prepare(&self) -> Result<()> {
        if self.is_drawn() {
            self.check_last()?;
        }
        let inputs = (self.draw)()?;
        let given: Vec<(&str, Tensor)> = ["q", "k", "v", "do"]
            .into_iter()
            .zip(&inputs)
            .map(|(name, t)| Ok((name, three(t)?)))
            .collect::<Result<_>>()?;
        let given: Vec<(&str, &Tensor)> = given.iter().map(|(name, t)| (*name, t)).collect();
        let on_gpu = inputs[0].device().is_cuda();
        let adapter = self.function.adapter();
        let settings = json!({ "adapter": adapter, "on_gpu": on_gpu, "attention_pass": self.attention_pass });
        let doing = format!("preparing a timed call of {adapter}");
        with_kept(self.subject, adapter, |process| {
            process.call("choose", settings, &doing)?;
            // Before a backward pass that is timed alone, the forward pass runs without knowing do.
            process.give("prepare", json!({}), &given[..3], &doing)?;
            process.give("gradient", json!({}), &given[3..], &doing)
        })?;
        *self.last.borrow_mut() = Some(inputs);
        Ok(())
    }

    /// The call that is timed.
    pub fn call(&self) -> Result<()> {
        let doing = format!("a timed call of {}", self.function.adapter());
        with_kept(self.subject, self.function.adapter(), |process| process.call("run", json!({}), &doing)).map(drop)
    }

    /// Checks the results of the last call, on the inputs that it was given, and that it left these as they were.
    pub fn check_last(&self) -> Result<()> {
        let Some(inputs) = self.last.borrow_mut().take() else { return Ok(()) };
        let adapter = self.function.adapter();
        let doing = format!("the results of a timed call of {adapter}");
        let (_, left) = with_kept(self.subject, adapter, |process| process.take("give", json!({}), &doing))?;
        let left: BTreeMap<String, Tensor> =
            left.into_iter().map(|(name, t)| (name, t.to_device(inputs[0].device()))).collect();
        for (name, input) in ["q", "k", "v", "do"].into_iter().zip(&inputs) {
            let now = left.get(name).with_context(|| format!("{doing} lack {name}"))?;
            ensure!(
                three(input)?.f_equal(now)?,
                SubjectFault::new(format!("a timed call of {adapter} changed {name}"))
            );
        }
        let shaped = |(name, t): (&String, &Tensor)| -> Result<_> {
            let (expected, kind) = (three(&inputs[0])?, inputs[0].kind());
            let (size, wanted) = (t.size(), expected.size());
            ensure!(size == wanted, SubjectFault::new(format!("{name} has shape {size:?}, must have {wanted:?}")));
            ensure!(t.kind() == kind, SubjectFault::new(format!("{name} is {:?}, must be {kind:?}", t.kind())));
            Ok((name.clone(), t.f_view(&inputs[0].size()[..])?))
        };
        let results = left.iter().filter(|(name, _)| !["q", "k", "v", "do"].contains(&name.as_str()));
        let results = results.map(shaped).collect::<Result<BTreeMap<_, _>>>()?;
        (self.check)(&inputs, &results).with_context(|| format!("a timed call of {adapter}"))
    }

    fn is_drawn(&self) -> bool {
        self.state.set(next(self.state.get()));
        self.state.get().is_multiple_of(CHECKED_OF)
    }
}

/// The next number of xorshift64, which never is 0.
pub(super) fn next(mut x: u64) -> u64 {
    x ^= x << 13;
    x ^= x >> 7;
    x ^ x << 17
}

/// As a subject takes it, (batch, n, d).
fn three(t: &Tensor) -> Result<Tensor> {
    let size = t.size();
    let [.., n, d] = size[..] else { return Err(anyhow::anyhow!("inputs have two dimensions at least")) };
    Ok(t.f_detach()?.f_contiguous()?.f_view([-1, n, d])?)
}

/// Seconds of messages to the subject's process and back that ask for nothing: what each timed call includes.
pub fn message_seconds(subject: &Subject, function: FlashFunction, count: usize) -> Result<Vec<f64>> {
    let ask = || {
        with_kept(subject, function.adapter(), |process| {
            let start = std::time::Instant::now();
            process.call("nothing", json!({}), "a message")?;
            Ok(start.elapsed().as_secs_f64())
        })
    };
    (0..count).map(|_| ask()).collect()
}
