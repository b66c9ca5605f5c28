//! Data parallelism of a fused step (`model/fused`), whose gradients lie in parts, end to end: nothing is copied into buckets.
//!
//! Weight gradients travel in the type of the products. In bfloat16 that is half of what autograd's float32 gradients are, and
//! each addition on the way rounds its sum to bfloat16.

use std::cell::RefCell;
use std::collections::VecDeque;

use anyhow::{Context as _, Result};
use tch::Tensor;

use super::{Options, broadcast_parameters};
use crate::collective::{Op, Shared, Work};
use crate::model::{Config, Exchange, FusedStep, Piece, Precision, Transformer};

/// Gives every rank's model the parameters of rank 0, and the step their copies for products.
///
/// # Errors
/// As [`broadcast_parameters`].
pub fn broadcast_to_step(model: &Transformer, step: &FusedStep, collective: &Shared) -> Result<()> {
    broadcast_parameters(model.parameters(), collective)?;
    step.refresh()
}

/// Averages each part while the backward pass goes on. For a sharded step it is ZeRO stage 1: a rank receives the mean of its
/// own shares, and gathers each part that the ranks have updated while they update the next.
pub struct FusedBuckets {
    collective: Shared,
    layers: usize,
    works: RefCell<VecDeque<Box<dyn Work>>>,
    gathers: RefCell<Vec<Box<dyn Work>>>,
}

impl FusedBuckets {
    /// A part holds as many whole layers as fit in the options' bucket size, and at least one. The head, and the embedding with
    /// the norms' gains, are parts of their own.
    ///
    /// # Errors
    /// Those of [`Options::bucket_bytes`].
    pub fn new(collective: &Shared, config: &Config, precision: Precision, options: &Options) -> Result<Self> {
        let bytes = match precision {
            Precision::Float32 => 4,
            Precision::Bfloat16 => 2,
        } * config.num_layer_weights();
        let fit = (options.bucket_bytes()? / bytes as f64) as usize;
        let layers = fit.clamp(1, usize::try_from(config.num_layers)?);
        Ok(Self { collective: collective.clone(), layers, works: RefCell::default(), gathers: RefCell::default() })
    }
}

impl Exchange for FusedBuckets {
    fn layers(&self) -> usize {
        self.layers
    }

    fn start(&self, gradients: &[Piece]) -> Result<()> {
        let [wholes, shares] = wholes_and_shares(gradients);
        let work = if gradients.iter().all(Piece::is_cut) {
            self.collective.reduce_scatter_coalesced_async(&shares, &wholes, Op::Average)
        } else {
            self.collective.all_reduce_coalesced_async(&wholes, Op::Average)
        };
        self.works.borrow_mut().push_back(work.context("starting to average gradients")?);
        Ok(())
    }

    fn finish(&self) -> Result<()> {
        let oldest = self.works.borrow_mut().pop_front().context("no exchange of gradients has been started")?;
        oldest.wait().context("averaging gradients")
    }

    fn gather(&self, values: &[Piece]) -> Result<()> {
        let [wholes, shares] = wholes_and_shares(values);
        let work = self.collective.all_gather_coalesced_async(&wholes, &shares);
        self.gathers.borrow_mut().push(work.context("starting to gather updated parameters")?);
        Ok(())
    }

    fn finish_gathers(&self) -> Result<()> {
        self.gathers.take().into_iter().try_for_each(|work| work.wait().context("gathering updated parameters"))
    }
}

fn wholes_and_shares(pieces: &[Piece]) -> [Vec<Tensor>; 2] {
    let of = |values: fn(&Piece) -> &Tensor| pieces.iter().map(|piece| values(piece).shallow_clone()).collect();
    [of(|piece| &piece.whole), of(|piece| &piece.share)]
}

/// Averages all parts in one call after the backward pass.
pub struct FusedFlat {
    collective: Shared,
    layers: usize,
    started: RefCell<Vec<Tensor>>,
}

impl FusedFlat {
    pub fn new(collective: &Shared, config: &Config) -> Result<Self> {
        let layers = usize::try_from(config.num_layers)?;
        Ok(Self { collective: collective.clone(), layers, started: RefCell::default() })
    }
}

impl Exchange for FusedFlat {
    fn layers(&self) -> usize {
        self.layers
    }

    fn start(&self, gradients: &[Piece]) -> Result<()> {
        self.started.borrow_mut().extend(gradients.iter().map(|piece| piece.whole.shallow_clone()));
        Ok(())
    }

    /// The first one averages all; the others have nothing left to do.
    fn finish(&self) -> Result<()> {
        let started = self.started.take();
        // Two calls where the embedding is float32 and the weights are not: Gloo takes one type at a time.
        let (first, others): (Vec<_>, Vec<_>) = started.into_iter().partition({
            let mut kind = None;
            move |t| t.kind() == *kind.get_or_insert(t.kind())
        });
        let calls = [first, others].into_iter().filter(|tensors| !tensors.is_empty());
        let works = calls.map(|tensors| self.collective.all_reduce_coalesced_async(&tensors, Op::Average));
        let works = works.collect::<Result<Vec<_>>>().context("starting to average all gradients")?;
        works.into_iter().try_for_each(|work| work.wait().context("averaging all gradients"))
    }
}
