//! One collective operation with its tensors, and its name in records and errors.

use std::fmt;
use std::slice::from_ref;

use serde::{Deserialize, Serialize};
use tch::Tensor;

use super::Op;

/// An operation to start. Several tensors have one dtype, each is handled on its own, and together they are one call with
/// one wait.
#[derive(Debug, Clone, Copy)]
pub enum Request<'a> {
    /// Reduces each of `tensors` in place over all ranks.
    AllReduce { tensors: &'a [Tensor], op: Op },
    /// Replaces `tensor` in place by rank `root`'s values.
    Broadcast { tensor: &'a Tensor, root: usize },
    /// Fills each of `outputs` (world_size * n, ...) with every rank's counterpart in `inputs` (n, ...), in rank order. An
    /// input may be this rank's share of its output.
    AllGather { outputs: &'a [Tensor], inputs: &'a [Tensor] },
    /// Fills each of `outputs` (n, ...) with this rank's share of its counterpart in `inputs` (world_size * n, ...) combined
    /// over all ranks. An output may be this rank's share of its input.
    ReduceScatter { outputs: &'a [Tensor], inputs: &'a [Tensor], op: Op },
    /// Is done once every rank has started it.
    Barrier,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Operation {
    AllReduce,
    Broadcast,
    AllGather,
    ReduceScatter,
    Barrier,
}

impl<'a> Request<'a> {
    pub(super) fn operation(&self) -> Operation {
        match self {
            Self::AllReduce { .. } => Operation::AllReduce,
            Self::Broadcast { .. } => Operation::Broadcast,
            Self::AllGather { .. } => Operation::AllGather,
            Self::ReduceScatter { .. } => Operation::ReduceScatter,
            Self::Barrier => Operation::Barrier,
        }
    }

    /// The tensors that the operation fills, and those that it only reads.
    pub(super) fn tensors(&self) -> (&'a [Tensor], &'a [Tensor]) {
        match *self {
            Self::AllReduce { tensors, .. } => (tensors, &[]),
            Self::Broadcast { tensor, .. } => (from_ref(tensor), &[]),
            Self::AllGather { outputs, inputs } | Self::ReduceScatter { outputs, inputs, .. } => (outputs, inputs),
            Self::Barrier => (&[], &[]),
        }
    }

    /// The tensors that are of full size on this rank.
    fn wholes(&self) -> &'a [Tensor] {
        let (outputs, inputs) = self.tensors();
        if matches!(self, Self::ReduceScatter { .. }) { inputs } else { outputs }
    }

    /// The bytes of the full-size tensors.
    pub(super) fn bytes(&self) -> u64 {
        let of = |tensor: &Tensor| (tensor.numel() * tensor.kind().elt_size_in_bytes()) as u64;
        self.wholes().iter().map(of).sum()
    }

    /// What must agree between the ranks of a call besides the operation: "of 4 Float, sum".
    pub(super) fn detail(&self) -> String {
        let wholes = self.wholes();
        let elements: usize = wholes.iter().map(Tensor::numel).sum();
        let tensors = match wholes {
            [] => String::new(),
            [tensor] => format!("of {elements} {:?}", tensor.kind()),
            [tensor, ..] => format!("of {elements} {:?} in {}", tensor.kind(), wholes.len()),
        };
        match *self {
            Self::AllReduce { op: Op::Sum, .. } | Self::ReduceScatter { op: Op::Sum, .. } => tensors + ", sum",
            Self::AllReduce { .. } | Self::ReduceScatter { .. } => tensors + ", average",
            Self::Broadcast { root, .. } => format!("{tensors} from rank {root}"),
            Self::AllGather { .. } | Self::Barrier => tensors,
        }
    }
}

impl Operation {
    /// PyTorch's name of the operation.
    pub fn name(self) -> &'static str {
        match self {
            Self::AllReduce => "all_reduce",
            Self::Broadcast => "broadcast",
            Self::AllGather => "all_gather",
            Self::ReduceScatter => "reduce_scatter",
            Self::Barrier => "barrier",
        }
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
