//! What the ranks of one run say to each other: the [`Collective`] trait, its backends, and the launcher of rank processes.

use std::sync::Arc;

use anyhow::Result;
use tch::Tensor;

pub mod drill;
pub mod gloo;
pub mod ranks;
mod supervisor;

/// A collective that strategies, hooks and rank tasks share; a hook fires on a thread of libtorch's, hence `Arc`.
pub type Shared = Arc<dyn Collective>;

/// How an all-reduce combines the ranks' values, element by element.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Op {
    Sum,
    /// The sum divided by the world size.
    Average,
}

/// The collective operations of one process group; every rank must make the same calls in the same order.
///
/// Shapes and dtypes must agree on all ranks; tensors must be dense and contiguous. An error carries the backend's own
/// words, and after one the group is of no further use.
pub trait Collective: Send + Sync {
    /// The backend's name: "gloo".
    fn backend(&self) -> &'static str;

    /// This process's number, from 0 to `world_size() - 1`.
    fn rank(&self) -> usize;

    fn world_size(&self) -> usize;

    /// Starts combining `tensor` in place over all ranks; its values are settled once the work has been waited for.
    fn all_reduce_async(&self, tensor: &Tensor, op: Op) -> Result<Box<dyn Work>>;

    /// Replaces `tensor` in place by rank `root`'s values.
    fn broadcast(&self, tensor: &Tensor, root: usize) -> Result<()>;

    /// Every rank's `tensor`, in rank order.
    fn all_gather(&self, tensor: &Tensor) -> Result<Vec<Tensor>>;

    /// This rank's share of the sum over ranks: (world_size * n, ...) gives (n, ...).
    fn reduce_scatter(&self, tensor: &Tensor) -> Result<Tensor>;

    /// Returns once every rank has called it.
    fn barrier(&self) -> Result<()>;

    /// [`Self::all_reduce_async`], waited for.
    fn all_reduce(&self, tensor: &Tensor, op: Op) -> Result<()> {
        self.all_reduce_async(tensor, op)?.wait()
    }
}

/// An operation under way. Dropping it does not cancel anything: the tensor stays in use until the group is done.
pub trait Work: Send {
    fn wait(self: Box<Self>) -> Result<()>;
}
