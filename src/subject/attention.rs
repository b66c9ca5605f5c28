//! A subject's autograd function behind the trait of our implementations, so that it meets the same checks.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use anyhow::{Result, bail, ensure};
use serde_json::json;
use tch::{Device, Kind, Tensor};

use super::{Folders, SubjectFault, SubjectProcess};
use crate::attention::Attention;
use crate::error::NotGraded;
use crate::harness::subject::Subject;
use crate::process::LockedFolder;
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
    /// Why its adapters cannot be imported. That is not tried again, here and on ranks.
    unusable: Option<SubjectFault>,
    /// The adapters that hung once. They are not called again, since each call would wait for the whole limit.
    hung: BTreeMap<&'static str, SubjectFault>,
}

struct Running {
    process: SubjectProcess,
    /// Holds the process's files; removed after the process has ended.
    _folder: LockedFolder,
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
        let folder = LockedFolder::new("subject").map_err(|e| NotGraded::while_doing("making a folder", e))?;
        let process = SubjectProcess::start(subject, &Folders::make(folder.path())?, "attention")?;
        Ok(Self { process, _folder: folder })
    }
}

/// Calls `body` with what is kept of this subject, after what is kept of another one was dropped.
fn kept_of<T>(subject: &Subject, body: impl FnOnce(&mut Kept) -> T) -> T {
    let mut kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
    let _other = kept.take_if(|kept| kept.subject != *subject);
    let new = || Kept { subject: subject.clone(), running: None, unusable: None, hung: BTreeMap::new() };
    body(kept.get_or_insert_with(new))
}

/// Why the subject's adapters cannot be imported, where an earlier check found that.
pub(super) fn unusable(subject: &Subject) -> Option<SubjectFault> {
    kept_of(subject, |kept| kept.unusable.clone())
}

/// Keeps a fault that every later process of the subject would end with too.
pub(super) fn keep_fault(subject: &Subject, fault: &SubjectFault) {
    kept_of(subject, |kept| {
        if kept.unusable.is_none() {
            kept.unusable = lasting(subject, fault);
        }
    });
}

/// The fault, if every later process would end with it too: it came at the start, and not because the folder is away.
pub(super) fn lasting(subject: &Subject, fault: &SubjectFault) -> Option<SubjectFault> {
    (fault.at_start && subject.require_readable().is_ok()).then(|| fault.clone())
}

/// Runs `body`, which calls `adapter`, with the subject's kept process, or with a new one after a crash or a hang.
pub(super) fn with_kept<T>(
    subject: &Subject,
    adapter: &'static str,
    body: impl FnOnce(&mut SubjectProcess) -> Result<T>,
) -> Result<T> {
    kept_of(subject, |kept| {
        if let Some(fault) = kept.unusable.as_ref().or_else(|| kept.hung.get(adapter)) {
            return Err(fault.clone().into());
        }
        let usable = kept.running.take().filter(|running| running.process.is_usable());
        let result = usable
            .map_or_else(|| Running::start(subject), Ok)
            .and_then(|running| body(&mut kept.running.insert(running).process));
        if let Some(fault) = result.as_ref().err().and_then(|error| error.downcast_ref::<SubjectFault>()) {
            kept.unusable = lasting(subject, fault);
            kept.hung.extend((fault.hangs && !fault.at_start).then(|| (adapter, fault.clone())));
        }
        result
    })
}

/// Whether the kept process has printed anything.
pub fn has_printed() -> bool {
    let mut kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
    let running = kept.as_mut().and_then(|kept| kept.running.as_mut());
    running.is_some_and(|running| !running.process.last_output().is_empty())
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
        let (kind, size, expected) =
            (o.kind(), o.size(), [&q.size()[..q.dim() - 1], &v.size()[v.dim() - 1..]].concat());
        ensure!(kind == q.kind(), SubjectFault::new(format!("o is {kind:?}, must be {:?}", q.kind())));
        ensure!(size == expected, SubjectFault::new(format!("o has shape {size:?}, must have {expected:?}")));
        Ok((o, results.into_values().collect()))
    }
}

/// The gradients at q, k and v of the last forward pass, after two more on other values, which no other layer's pass may change.
fn backward(subject: &Subject, adapter: &'static str, d_o: &Tensor) -> Result<[Tensor; 3]> {
    let doing = format!("another forward pass of {adapter}");
    for turned in [false, true] {
        with_kept(subject, adapter, |process| process.call("another", json!({ "turned": turned }), &doing))?;
    }
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
