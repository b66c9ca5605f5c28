//! The language model that the assignment measures: sizes, memory, the transformer, its loss and its optimizers.

pub mod fused;
pub mod fused_adamw;
pub mod loss;
pub mod memory;
pub mod norm;
pub mod optim;
pub mod rope;
pub mod sizes;
pub mod toy;
pub mod transformer;

pub use fused::{Exchange, FusedStep, Gradients, Piece, Shard};
pub use fused_adamw::FusedAdamW;
pub use sizes::{Config, Precision, Size, SizeName};
pub use transformer::Transformer;
