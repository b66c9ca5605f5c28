//! The language model that the assignment measures: sizes, memory, the transformer, its loss and its optimizers.

pub mod sizes;
pub mod toy;

pub mod memory;

pub mod norm;
pub mod rope;
pub mod transformer;

pub mod loss;
pub mod optim;

pub use sizes::{Config, Precision, Size, SizeName};
pub use transformer::Transformer;
