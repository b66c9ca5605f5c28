//! What a fused step does with gradients as they become complete: nothing, AdamW, or an exchange with other ranks before it.

use anyhow::{Result, bail};
use tch::Tensor;

use super::packed::{Part, Values};
use super::shard::{Piece, Shard};
use super::{FusedStep, Gradients};
use crate::model::optim::AdamWOptions;
use crate::model::{Precision, Transformer};

/// Averages gradients over the ranks that train one model. Every rank makes the same calls in the same order.
pub trait Exchange {
    /// Layers whose gradients are given together.
    fn layers(&self) -> usize;

    /// Begins with gradients that this thread's launches so far complete: of each piece the share, at least, becomes the
    /// mean. They stay where they are.
    fn start(&self, gradients: &[Piece]) -> Result<()>;

    /// Later launches of this thread wait for the oldest exchange that has not been finished.
    fn finish(&self) -> Result<()>;

    /// Begins to fill values of all ranks from their shares, which this thread's launches so far complete.
    ///
    /// Errors: as here, if the exchange does not serve a step that is sharded.
    fn gather(&self, _values: &[Piece]) -> Result<()> {
        bail!("this exchange averages gradients alone: train a sharded step with FusedBuckets")
    }

    /// Later launches of this thread wait for all that [`Self::gather`] began.
    fn finish_gathers(&self) -> Result<()> {
        Ok(())
    }
}

impl FusedStep {
    /// A step that keeps its gradients and updates the parameters of `shard` alone, by [`Self::train_on_rank`]. Each rank has
    /// AdamW's moments of its shares.
    pub fn sharded(
        model: &mut Transformer,
        batch: i64,
        precision: Precision,
        shard: Shard,
        options: AdamWOptions,
    ) -> Result<Self> {
        Self::with(model, batch, precision, Gradients::Kept, options, shard)
    }

    /// As [`FusedStep::train`] on this rank's `tokens` and `targets`, with gradients that `exchange` averages: the head's and
    /// those of some layers at a time while the backward pass goes on to the layers before them. AdamW follows the backward
    /// pass, part by part. A sharded step updates this rank's shares, and gathers those of the others for the products.
    ///
    /// Ranks that begin with equal parameters, after as many steps, end with equal ones; those of a sharded step once they
    /// are gathered ([`Self::gather_parameters`]). The loss is this rank's. Weight gradients are averaged in the type of the
    /// products.
    ///
    /// Errors: gradients that are not kept ([`Gradients::Kept`]), since one part would overwrite another on its way.
    pub fn train_on_rank(
        &self,
        model: &Transformer,
        tokens: &Tensor,
        targets: &Tensor,
        exchange: &dyn Exchange,
    ) -> Result<Tensor> {
        self.require_kept()?;
        self.train_then(model, tokens, targets, Then::Exchange(exchange))
    }

    /// To be called on every rank before anything else reads the parameters of a sharded step's model: a rank's step changes
    /// the shares of others in their copies for products alone.
    pub fn gather_parameters(&self, exchange: &dyn Exchange) -> Result<()> {
        if self.packed.has_copies() {
            let layers = Part::Layers { first: 0, end: self.weights.layers.len() };
            for part in [layers, Part::Head] {
                self.gather(part, Values::Masters, exchange)?;
            }
        }
        exchange.finish_gathers()
    }

    fn gather(&self, part: Part, of: Values, exchange: &dyn Exchange) -> Result<()> {
        let cut: Vec<_> = self.packed.pieces(part, of)?.into_iter().filter(Piece::is_cut).collect();
        if cut.is_empty() { Ok(()) } else { exchange.gather(&cut) }
    }
}

/// What follows the gradients of a part.
#[derive(Clone, Copy)]
pub enum Then<'a> {
    Keep,
    Update,
    Exchange(&'a dyn Exchange),
}

impl<'a> Then<'a> {
    pub fn parts(self, step: &'a FusedStep) -> Parts<'a> {
        Parts { step, then: self, exchanged: Vec::new() }
    }
}

/// The parts of one backward pass.
pub struct Parts<'a> {
    step: &'a FusedStep,
    then: Then<'a>,
    exchanged: Vec<Part>,
}

impl Parts<'_> {
    /// To be called when all gradients of `part` have been launched.
    pub fn complete(&mut self, part: Part) -> Result<()> {
        match self.then {
            Then::Keep => Ok(()),
            Then::Update => self.step.update(part),
            Then::Exchange(exchange) => {
                self.exchanged.push(part);
                exchange.start(&self.step.packed.pieces(part, Values::Gradients)?)
            }
        }
    }

    /// The same for layer `i`; the layers of a part come in falling order.
    pub fn complete_layer(&mut self, i: usize) -> Result<()> {
        let together = match self.then {
            Then::Exchange(exchange) => exchange.layers(),
            Then::Keep | Then::Update => self.step.kept,
        };
        let end = self.step.weights.layers.len().min(i + together);
        if i.is_multiple_of(together) { self.complete(Part::Layers { first: i, end }) } else { Ok(()) }
    }

    /// AdamW for the parts that were exchanged.
    pub fn end(self) -> Result<()> {
        let Then::Exchange(exchange) = self.then else { return Ok(()) };
        for part in self.exchanged {
            exchange.finish()?;
            self.step.update(part)?;
            self.step.gather(part, Values::Products, exchange)?;
        }
        exchange.finish_gathers()
    }
}
