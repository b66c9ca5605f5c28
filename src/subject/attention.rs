//! A subject's autograd function behind the trait of our implementations, so that it meets the same checks.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use anyhow::{Result, bail, ensure};
use serde_json::json;
use tch::{Device, Kind, Tensor};

use super::{Folders, SubjectFault, SubjectProcess, words_of};
use crate::attention::Attention;
use crate::harness::subject::Subject;
use crate::torch::autograd;

/// Which of the two functions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FlashFunction {
    PyTorch,
    Triton,
}

/// What is kept of one subject from check to check.
struct Kept {
    subject: Subject,
    /// One process for all checks, because importing PyTorch takes seconds.
    running: Option<Running>,
    /// The adapters that hung once. They are not called again, since each call would wait for the whole limit.
    hung: BTreeMap<&'static str, SubjectFault>,
}

struct Running {
    /// A failed import is not tried again.
    process: Result<SubjectProcess, SubjectFault>,
    /// Holds the process's files; removed after the process has ended.
    _folder: tempfile::TempDir,
}

static KEPT: Mutex<Option<Kept>> = Mutex::new(None);

/// A subject's autograd function.
pub struct SubjectAttention<'a> {
    pub subject: &'a Subject,
    pub function: FlashFunction,
}

impl FlashFunction {
    pub const fn adapter(self) -> &'static str {
        match self {
            Self::PyTorch => "get_flashattention_autograd_function_pytorch",
            Self::Triton => "get_flashattention_autograd_function_triton",
        }
    }
}

impl Running {
    fn start(subject: &Subject) -> Result<Self> {
        let folder = tempfile::Builder::new().prefix("cs336-subject-").tempdir()?;
        let process = SubjectProcess::start(subject, &Folders::make(folder.path())?, "attention");
        Ok(Self { process: process.map_err(|error| SubjectFault::new(words_of(&error))), _folder: folder })
    }

    fn is_usable(&self) -> bool {
        self.process.as_ref().map_or(true, SubjectProcess::is_usable)
    }
}

/// Runs `body`, which calls `adapter`, with the subject's kept process, or with a new one after a crash or a hang.
pub(super) fn with_kept<T>(
    subject: &Subject,
    adapter: &'static str,
    body: impl FnOnce(&mut SubjectProcess) -> Result<T>,
) -> Result<T> {
    let mut kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
    let _other = kept.take_if(|kept| kept.subject != *subject);
    let kept = kept.get_or_insert_with(|| Kept { subject: subject.clone(), running: None, hung: BTreeMap::new() });
    if let Some(fault) = kept.hung.get(adapter) {
        return Err(fault.clone().into());
    }
    let usable = kept.running.take().filter(Running::is_usable);
    let running = kept.running.insert(usable.map_or_else(|| Running::start(subject), Ok)?);
    let result = running.process.as_mut().map_err(|fault| fault.clone().into()).and_then(body);
    if let Some(fault) = result.as_ref().err().and_then(|error| error.downcast_ref::<SubjectFault>()) {
        kept.hung.extend(fault.hangs.then(|| (adapter, fault.clone())));
    }
    result
}

/// Whether the kept process has printed anything.
pub fn has_printed() -> bool {
    let mut kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
    let running = kept.as_mut().and_then(|kept| kept.running.as_mut());
    running.and_then(|running| running.process.as_mut().ok()).is_some_and(|process| !process.last_output().is_empty())
}

impl SubjectAttention<'_> {
    /// `(q, k, v, is_causal) -> o`, as the official test calls it: its node saves what the subject's saved.
    pub fn differentiable(&self, q: &Tensor, k: &Tensor, v: &Tensor, is_causal: bool) -> Result<Tensor> {
        let (o, saved) = self.call(q, k, v, is_causal)?;
        let node = Node { subject: self.subject.clone(), adapter: self.function.adapter(), computed: Some((o, saved)) };
        Ok(autograd::apply(node, &[q, k, v])?.remove(0))
    }

    /// o, and every tensor that its node saved.
    fn call(&self, q: &Tensor, k: &Tensor, v: &Tensor, is_causal: bool) -> Result<(Tensor, Vec<Tensor>)> {
        let adapter = self.function.adapter();
        let settings = json!({ "adapter": adapter, "is_causal": is_causal });
        let doing = format!("the forward pass of {adapter}");
        let (_, mut results) = with_kept(self.subject, adapter, |process| {
            process.exchange("forward", settings, &[("q", q), ("k", k), ("v", v)], &doing)
        })?;
        let Some(o) = results.remove("o") else { bail!(SubjectFault::new(format!("{doing} left no o"))) };
        Ok((o, results.into_values().collect()))
    }
}

/// The gradients at q, k and v of the last forward pass.
fn backward(subject: &Subject, adapter: &'static str, d_o: &Tensor) -> Result<[Tensor; 3]> {
    let doing = format!("the backward pass of {adapter}");
    let (_, mut results) =
        with_kept(subject, adapter, |process| process.exchange("backward", json!({}), &[("do", d_o)], &doing))?;
    let mut take =
        |name: &str| results.remove(name).ok_or_else(|| SubjectFault::new(format!("{doing} left no {name}")));
    Ok([take("dq")?, take("dk")?, take("dv")?])
}

impl Attention for SubjectAttention<'_> {
    fn name(&self) -> &'static str {
        self.function.adapter()
    }

    fn supports(&self, _: Kind, _: Device, _: i64) -> Result<(), String> {
        Ok(())
    }

    fn forward(&self, q: &Tensor, k: &Tensor, v: &Tensor, is_causal: bool) -> Result<(Tensor, Tensor)> {
        let (o, saved) = self.call(q, k, v, is_causal)?;
        ensure!(o.kind() == q.kind(), "o is {:?}, must be {:?}", o.kind(), q.kind());
        let rows = &q.size()[..q.dim() - 1];
        let mut of_rows = saved.iter().filter(|t| t.size() == rows);
        match (of_rows.next(), of_rows.next()) {
            (Some(lse), None) => Ok((o, lse.shallow_clone())),
            _ => {
                let sizes: Vec<_> = saved.iter().map(Tensor::size).collect();
                bail!("exactly one saved tensor must have shape {rows:?}; the node saved {sizes:?}")
            }
        }
    }

    /// Must follow the forward pass on the same inputs, whose graph the subject's process keeps.
    fn backward(&self, [_, _, _, _, _, d_o]: [&Tensor; 6], _: bool) -> Result<[Tensor; 3]> {
        backward(self.subject, self.function.adapter(), d_o)
    }
}

/// What the subject computed, as a node of our graph.
struct Node {
    subject: Subject,
    adapter: &'static str,
    computed: Option<(Tensor, Vec<Tensor>)>,
}

impl autograd::Function for Node {
    fn forward(&mut self, _: &[Tensor]) -> Result<autograd::Forward> {
        let Some((o, saved)) = self.computed.take() else { bail!("a node runs forward once") };
        Ok(autograd::Forward { outputs: vec![o], saved })
    }

    fn backward(&self, _: &[Tensor], grad_outputs: &[Option<Tensor>]) -> Result<Vec<Option<Tensor>>> {
        let [Some(d_o)] = grad_outputs else { bail!("one gradient arrives") };
        Ok(backward(&self.subject, self.adapter, d_o)?.map(Some).into())
    }
}
