//! A subject's data-parallel module or sharded optimizer on one rank: its Python trains, and a network of ours holds the
//! values that it has after each step.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

use super::attention::{keep_fault, unusable};
use super::{Folders, SubjectFault, SubjectProcess, unavailable, words_of};
use crate::collective::{RanksFault, Shared};
use crate::error::{NotGraded, without_frames};
use crate::harness::subject::{MORE_MEMORY, Subject};
use crate::model::optim::AdamWOptions;
use crate::model::toy::{Blueprint, Toy};
use crate::process::LockedFolder;
use crate::root::read_text;

/// Before the names of an unsharded optimizer's parameters, as in `suites/peers/adapters.py`.
const UNSHARDED: &str = "unsharded.";

/// An adapter that trains, and its settings.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Adapter {
    /// Overlaps a call per parameter; plain gradient descent.
    Individual { lr: f64 },
    /// Overlaps buckets of at most this size; plain gradient descent.
    Bucketed { lr: f64, bucket_size_mb: f64 },
    /// Divides the state of an optimizer of this class.
    Sharded(OptimizerClass, AdamWOptions),
}

/// A class of `torch.optim` for an adapter to wrap.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub enum OptimizerClass {
    AdamW,
    /// AdamW without weight decay, which it is not given: AdamW's own default is another.
    Adam,
}

impl OptimizerClass {
    /// The arguments of its constructor.
    fn arguments(self, options: &AdamWOptions) -> Value {
        let AdamWOptions { lr, beta1, beta2, eps, weight_decay } = *options;
        match self {
            Self::AdamW => json!({ "lr": lr, "betas": [beta1, beta2], "eps": eps, "weight_decay": weight_decay }),
            Self::Adam => json!({ "lr": lr, "betas": [beta1, beta2], "eps": eps }),
        }
    }
}

impl Adapter {
    pub fn name(&self) -> &'static str {
        match self {
            Self::Individual { .. } => "get_ddp_individual_parameters",
            Self::Bucketed { .. } => "get_ddp_bucketed",
            Self::Sharded(..) => "get_sharded_optimizer",
        }
    }

    /// The adapters that are called after backward and, where there are two, before the batch.
    pub(super) fn hooks(&self) -> &'static [&'static str] {
        match self {
            Self::Individual { .. } => &["ddp_individual_parameters_on_after_backward"],
            Self::Bucketed { .. } => &["ddp_bucketed_on_after_backward", "ddp_bucketed_on_train_batch_start"],
            Self::Sharded(..) => &[],
        }
    }

    /// The job that begins, and its settings.
    fn job(&self, blueprint: &Blueprint) -> (&'static str, Value) {
        let (adapter, hooks) = (self.name(), self.hooks());
        let replicate = |lr: f64, bucket_size_mb: Option<f64>| {
            let settings = json!({
                "adapter": adapter, "hooks": hooks, "blueprint": blueprint, "lr": lr, "bucket_size_mb": bucket_size_mb,
            });
            ("replicate", settings)
        };
        match self {
            Self::Individual { lr } => replicate(*lr, None),
            Self::Bucketed { lr, bucket_size_mb } => replicate(*lr, Some(*bucket_size_mb)),
            Self::Sharded(class, options) => {
                let arguments = class.arguments(options);
                (
                    "shard",
                    json!({ "adapter": adapter, "blueprint": blueprint, "optimizer": class, "arguments": arguments }),
                )
            }
        }
    }
}

/// A subject that all ranks of a launch train with.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Trainee {
    pub subject: Subject,
    pub adapter: Adapter,
    pub(super) folders: Folders,
    /// Where a rank leaves the words of its subject's fault; the subject cannot write there.
    pub(super) faults: PathBuf,
}

impl Trainee {
    /// Runs `launch` with a trainee whose files lie in a folder that is removed afterwards.
    ///
    /// Errors: [`SubjectFault`] with the words of each rank whose subject failed, where one did; else [`NotGraded`], or what
    /// this machine lacks.
    pub fn launch<T>(subject: &Subject, adapter: Adapter, launch: impl FnOnce(&Self) -> Result<T>) -> Result<T> {
        if let Some(fault) = unusable(subject) {
            return Err(fault.into());
        }
        let folder = LockedFolder::new("subject").map_err(|e| NotGraded::while_doing("making a folder", e))?;
        let faults = folder.path().join("faults");
        std::fs::create_dir(&faults).map_err(|error| NotGraded::while_doing("making a folder", error))?;
        let folders = Folders::make(folder.path())?;
        let trainee = Self { subject: subject.clone(), adapter, folders, faults };
        launch(&trainee).map_err(|error| {
            // The others then say that a rank is lost.
            if error.downcast_ref().is_some_and(|fault: &RanksFault| fault.out_of_memory) {
                return NotGraded(format!("{error:#}; {MORE_MEMORY}")).into();
            }
            // A rank that cannot write leaves no words.
            let Some(fault) = trainee.fault() else {
                return trainee.folders.require_room().err().unwrap_or_else(|| without_words(error));
            };
            if let Ok(fault) = &fault {
                keep_fault(subject, fault);
            }
            fault.map_or_else(Into::into, Into::into)
        })
    }

    /// What the ranks have left.
    fn fault(&self) -> Option<Result<SubjectFault, NotGraded>> {
        let files = std::fs::read_dir(&self.faults).into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path()));
        let left = |path: PathBuf| {
            Some((path.file_name()?.to_str()?.to_string(), serde_json::from_str(&read_text(&path).ok()?).ok()?))
        };
        let ranks: BTreeMap<String, Left> = files.filter_map(left).collect();
        let mut faults = Vec::new();
        for (rank, left) in ranks {
            match left {
                Left::Subject(fault) => faults.push((rank, fault)),
                Left::Ours(reason) => return Some(Err(NotGraded(format!("{rank}: {reason}")))),
            }
        }
        let words = |(rank, fault): &(String, SubjectFault)| format!("{rank}: {fault}");
        let (_, first) = faults.first()?;
        Some(Ok(match faults.iter().all(|(_, fault)| fault.words == first.words) {
            true => first.clone(),
            false => SubjectFault {
                hangs: faults.iter().any(|(_, fault)| fault.hangs),
                at_start: faults.iter().any(|(_, fault)| fault.at_start),
                needs_gpu: faults.iter().any(|(_, fault)| fault.needs_gpu),
                ..SubjectFault::new(faults.iter().map(words).collect::<Vec<_>>().join("\n"))
            },
        }))
    }
}

/// A failure of ranks that left no words: what a subject does wrong in a call leaves some.
fn without_words(error: anyhow::Error) -> anyhow::Error {
    match unavailable(&error) {
        Some(_) => error,
        None => NotGraded(without_frames(&format!("{error:#}"))).into(),
    }
}

/// What a rank leaves of an error.
#[derive(Serialize, Deserialize)]
enum Left {
    Subject(SubjectFault),
    /// Words of a failure that is not the subject's.
    Ours(String),
}

/// A network under the subject's training on this rank.
pub struct SubjectRank {
    process: SubjectProcess,
    adapter: &'static str,
    network: Toy,
    unsharded: Option<Toy>,
    fault_file: PathBuf,
    /// The values that this rank's optimizer keeps state for, where the last step reported them.
    pub stepped_numel: usize,
}

impl SubjectRank {
    /// Starts the subject's Python, makes `network` there and gives it to the adapter; `network` then holds what came of it.
    pub fn start(trainee: &Trainee, blueprint: &Blueprint, network: Toy, collective: &Shared) -> Result<Self> {
        let rank = collective.rank();
        let fault_file = trainee.faults.join(format!("rank {rank}"));
        let started = Self::started(trainee, blueprint, network, collective, &fault_file);
        left(&fault_file, started)
    }

    fn started(
        trainee: &Trainee,
        blueprint: &Blueprint,
        network: Toy,
        collective: &Shared,
        fault_file: &Path,
    ) -> Result<Self> {
        let (rank, adapter) = (collective.rank(), trainee.adapter.name());
        let mut process = SubjectProcess::start(&trainee.subject, &trainee.folders, &format!("rank{rank}"))?;
        process.join(collective)?;
        let parameters: Vec<_> =
            network.named_parameters().iter().map(|(name, t)| (format!("init.{name}"), t)).collect();
        let (job, settings) = trainee.adapter.job(blueprint);
        let (_, values) = process.exchange(job, settings, &parameters, adapter)?;
        let is_sharded = matches!(trainee.adapter, Adapter::Sharded(..));
        let unsharded = is_sharded.then(|| network.deep_copy(Device::Cpu)).transpose()?;
        let fault_file = fault_file.into();
        let mut started = Self { process, adapter, network, unsharded, fault_file, stepped_numel: 0 };
        started.take(values)?;
        Ok(started)
    }

    /// The network with the values of now.
    pub fn network(&self) -> &Toy {
        &self.network
    }

    /// The network that an AdamW that is not sharded has trained in the subject's process, as the official test does. The
    /// subject could forge its values: nothing is right because of them.
    pub fn unsharded(&self) -> Option<&Toy> {
        self.unsharded.as_ref()
    }

    /// One step on these rows.
    pub fn step(&mut self, x: &Tensor, y: &Tensor) -> Result<()> {
        let stepped = self.stepped(x, y);
        left(&self.fault_file, stepped)
    }

    fn stepped(&mut self, x: &Tensor, y: &Tensor) -> Result<()> {
        let doing = format!("a training step of {}", self.adapter);
        let (value, values) = self.process.exchange("step", json!({}), &[("x", x), ("y", y)], &doing)?;
        self.stepped_numel = value["stepped_numel"].as_u64().unwrap_or(0) as usize;
        self.take(values)
    }

    fn take(&mut self, mut values: BTreeMap<String, Tensor>) -> Result<()> {
        for (name, value) in &values {
            let kind = value.kind();
            ensure!(
                kind == Kind::Float,
                SubjectFault::new(format!("{}: {name} is {kind:?}, must be Float", self.adapter))
            );
        }
        let fault = |error| SubjectFault::new(format!("{}: {error:#}", self.adapter));
        if let Some(unsharded) = &self.unsharded {
            let own = values.extract_if(.., |name, _| name.starts_with(UNSHARDED));
            let own = own.map(|(name, value)| (name[UNSHARDED.len()..].to_string(), value)).collect();
            unsharded.load(&own).map_err(fault)?;
        }
        Ok(self.network.load(&values).map_err(fault)?)
    }
}

/// Leaves the words of an error for the process that launched this rank.
pub(super) fn left<T>(file: &Path, result: Result<T>) -> Result<T> {
    if let Err(error) = &result {
        let own = error.downcast_ref::<SubjectFault>().cloned();
        let left = match NotGraded::of(error) {
            Some(NotGraded(reason)) => Left::Ours(reason.clone()),
            None => Left::Subject(own.unwrap_or_else(|| SubjectFault::new(words_of(error)))),
        };
        std::fs::write(file, serde_json::to_string(&left)?).context("leaving the words of a fault")?;
    }
    result
}
