//! The kernels of a fused step beside matrix products and attention: their parameters, their shapes and their launches.
//!
//! Each file of `kernels/` says what it computes, how and at what bound.

use anyhow::{Context as _, Result, ensure};
use tch::{Device, Kind, Tensor};

use self::params::{
    Advance, CrossEntropy, EmbeddingGradient, Factors, GainGradients, NormBackward, ResidualNorm, RopeBackward,
    RopeForward, SwigluBackward, SwigluForward, Update, UpdateFloat32,
};
use crate::cuda::{self, Address, Kernel, LaunchConfig, Program, multiprocessors};
use crate::model::optim::AdamWOptions;
use crate::model::{Config, Precision};

mod params;

/// What the kernels of one model are compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    pub precision: Precision,
    pub d_model: u32,
    pub vocabulary: u32,
}

/// Threads of the blocks that set none of their own.
const THREADS: u32 = 256;
/// Threads of a block of `packed_adamw.cu`.
const UPDATE_THREADS: u32 = 512;
/// Numbers that a thread takes at a time.
const PIECE: u32 = 8;
/// The most threads that share a row of a norm.
const NORM_THREADS: u32 = 512;

impl Shape {
    /// Errors: a size that the kernels do not take, by the config's field.
    pub fn of(config: &Config, precision: Precision) -> Result<Self> {
        let multiples = [("d_model / num_heads", config.d_head()), ("d_ff", config.d_ff)];
        for (name, value) in multiples {
            ensure!(value % 8 == 0, "{name} is {value}: a fused step takes multiples of 8");
        }
        Ok(Self { precision, d_model: u32::try_from(config.d_model)?, vocabulary: u32::try_from(config.vocab_size)? })
    }

    /// Pieces of a row of d_model that a thread of a norm takes, and the threads.
    fn norm(&self) -> (u32, u32) {
        let pieces = self.d_model.div_ceil(PIECE);
        let items = pieces.div_ceil(NORM_THREADS);
        (items, pieces.div_ceil(items).next_multiple_of(32))
    }

    /// The files that are compiled for this shape, in the order of [`FILES`].
    pub fn programs(&self) -> [Program; FILES.len()] {
        let (items, threads) = self.norm();
        let low = ("STEP_BFLOAT16", u32::from(self.precision == Precision::Bfloat16));
        let wide = ("ENTROPY_WIDE", u32::from(self.vocabulary.is_multiple_of(PIECE)));
        let [norm, rope, swiglu, entropy, embedding, adamw] = FILES;
        [
            Program::new(norm, [low, ("NORM_THREADS", threads), ("NORM_ITEMS", items)]),
            Program::new(rope, [low]),
            Program::new(swiglu, [low]),
            Program::new(entropy, [low, wide]),
            Program::new(embedding, []),
            Program::new(adamw, [low]),
        ]
    }
}

/// The files of `kernels/` that a fused step runs beside attention's.
pub const FILES: [&str; 6] =
    ["rms_norm.cu", "rope.cu", "swiglu.cu", "cross_entropy.cu", "embedding_gradient.cu", "packed_adamw.cu"];

/// The loaded kernels of one model on one device.
pub struct Kernels {
    shape: Shape,
    norm_blocks: u32,
    residual_norm: Kernel<ResidualNorm<'static>>,
    norm_backward: Kernel<NormBackward<'static>>,
    gain_gradients: Kernel<GainGradients<'static>>,
    rope_forward: Kernel<RopeForward<'static>>,
    rope_backward: Kernel<RopeBackward<'static>>,
    swiglu_forward: Kernel<SwigluForward<'static>>,
    swiglu_backward: Kernel<SwigluBackward<'static>>,
    cross_entropy: Kernel<CrossEntropy<'static>>,
    embedding_gradient: Kernel<EmbeddingGradient<'static>>,
    advance: Kernel<Advance<'static>>,
    update: Kernel<Update<'static>>,
    update_float32: Kernel<UpdateFloat32<'static>>,
}

/// The tables of [`crate::model::rope::Rope`], and the sizes of heads.
pub struct Positions<'a> {
    pub cosines: &'a Tensor,
    pub sines: &'a Tensor,
    pub seq: i64,
    pub d_head: i64,
}

/// What [`Kernels::norm_backward`] reads and writes beside the gradient of the residual stream.
pub struct NormSaved<'a> {
    pub h: &'a Tensor,
    pub inverse_rms: &'a Tensor,
    pub gain: &'a Tensor,
    /// This norm's block of the gains' partial sums, (blocks, d).
    pub partial: &'a Tensor,
}

/// The gradient of the residual stream: in float32, and in the type of the products.
pub struct ResidualGradient {
    pub wide: Tensor,
    /// The same tensor where the products are float32.
    pub low: Tensor,
}

/// One range of packed parameters, with what AdamW keeps for it; each tensor has as many elements as `p`.
pub struct Packed {
    pub p: Tensor,
    pub g: Tensor,
    pub m: Tensor,
    pub v: Tensor,
    /// The copy in the type of the products, where there is one.
    pub low: Option<Tensor>,
}

impl Kernels {
    /// Errors: those of [`cuda::load`].
    pub fn load(device: Device, shape: Shape) -> Result<Self> {
        let programs = shape.programs();
        let modules = programs.iter().map(|program| cuda::load(device, program)).collect::<Result<Vec<_>>>()?;
        let [norm, rope, swiglu, entropy, embedding, adamw] = &modules[..] else { unreachable!("one a file") };
        Ok(Self {
            shape,
            norm_blocks: 2 * multiprocessors(device)?,
            residual_norm: norm.kernel()?,
            norm_backward: norm.kernel()?,
            gain_gradients: norm.kernel()?,
            rope_forward: rope.kernel()?,
            rope_backward: rope.kernel()?,
            swiglu_forward: swiglu.kernel()?,
            swiglu_backward: swiglu.kernel()?,
            cross_entropy: entropy.kernel()?,
            embedding_gradient: embedding.kernel()?,
            advance: adamw.kernel()?,
            update: adamw.kernel()?,
            update_float32: adamw.kernel()?,
        })
    }

    /// Blocks of [`Self::norm_backward`], each of which writes a row of partial sums.
    pub fn norm_blocks(&self) -> i64 {
        self.norm_blocks.into()
    }

    fn norm_config(&self, blocks: u32) -> LaunchConfig {
        // Two sets of a float for each of at most 32 warps.
        LaunchConfig { shared_bytes: 256, ..LaunchConfig::line(blocks, self.shape.norm().1) }
    }

    /// `sum` = `h` + `added`, both (rows, d), and `y` = its norm times `gain`; without `added` the norm is that of `h`.
    pub fn residual_norm(
        &self,
        [h, sum, gain, y, inverse_rms]: [&Tensor; 5],
        added: Option<&Tensor>,
        eps: f64,
    ) -> Result<()> {
        let [h, sum, gain, y, inverse_rms_at] = [h, sum, gain, y, inverse_rms].map(Address::of);
        let added = added.map_or(Address::NULL, Address::of);
        let d = int(self.shape.d_model)?;
        let params = ResidualNorm { h, added, sum, gain, y, inverse_rms: inverse_rms_at, d, eps: eps as f32 };
        let rows = u32::try_from(inverse_rms.numel())?;
        self.residual_norm.launch_early(self.norm_config(rows), &params).context("launching a norm")
    }

    /// Adds the norm's gradient by its input to `gradient`, or sets it where `is_first`.
    pub fn norm_backward(
        &self,
        saved: &NormSaved,
        dy: &Tensor,
        gradient: &ResidualGradient,
        is_first: bool,
    ) -> Result<()> {
        let is_low = self.shape.precision == Precision::Bfloat16;
        let params = NormBackward {
            h: Address::of(saved.h),
            inverse_rms: Address::of(saved.inverse_rms),
            gain: Address::of(saved.gain),
            dy: Address::of(dy),
            dx: Address::of(&gradient.wide),
            dx_low: if is_low { Address::of(&gradient.low) } else { Address::NULL },
            partial: Address::of(saved.partial),
            rows: int(saved.inverse_rms.numel())?,
            d: int(self.shape.d_model)?,
            first: is_first.into(),
        };
        self.norm_backward
            .launch_early(self.norm_config(self.norm_blocks), &params)
            .context("launching a norm's backward pass")
    }

    /// `gradient` (norms, d) from `partial` (norms, blocks, d).
    pub fn gain_gradients(&self, partial: &Tensor, gradient: &Tensor) -> Result<()> {
        let norms = u32::try_from(partial.size()[0])?;
        let params = GainGradients {
            partial: Address::of(partial),
            gradient: Address::of(gradient),
            blocks: int(self.norm_blocks)?,
            d: int(self.shape.d_model)?,
        };
        let grid = (self.shape.d_model.div_ceil(THREADS), norms, 1);
        let config = LaunchConfig { grid, ..LaunchConfig::line(1, THREADS) };
        self.gain_gradients.launch(config, &params).context("launching the gains' gradients")
    }

    /// Turns the queries and keys of `qkv` (tokens, 3 d) in place.
    pub fn rope_forward(&self, qkv: &Tensor, positions: &Positions) -> Result<()> {
        let params = RopeForward {
            qkv: Address::of(qkv),
            cosines: Address::of(positions.cosines),
            sines: Address::of(positions.sines),
            seq: int(positions.seq)?,
            width: int(self.shape.d_model)?,
            d_head: int(positions.d_head)?,
        };
        let config = LaunchConfig::line(u32::try_from(qkv.size()[0])?, THREADS);
        self.rope_forward.launch_early(config, &params).context("launching the rotation")
    }

    /// `dqkv` (tokens, 3 d) from the gradients of the turned heads, each contiguous (batch, heads, seq, d_head).
    pub fn rope_backward(&self, [dq, dk, dv]: [&Tensor; 3], dqkv: &Tensor, positions: &Positions) -> Result<()> {
        let params = RopeBackward {
            dq: Address::of(dq),
            dk: Address::of(dk),
            dv: Address::of(dv),
            dqkv: Address::of(dqkv),
            cosines: Address::of(positions.cosines),
            sines: Address::of(positions.sines),
            seq: int(positions.seq)?,
            width: int(self.shape.d_model)?,
            d_head: int(positions.d_head)?,
        };
        let config = LaunchConfig::line(u32::try_from(dqkv.size()[0])?, THREADS);
        self.rope_backward.launch_early(config, &params).context("launching the rotation's backward pass")
    }

    /// `activated` (tokens, d_ff) from `gate_up` (tokens, 2 d_ff).
    pub fn swiglu_forward(&self, gate_up: &Tensor, activated: &Tensor) -> Result<()> {
        let (config, width) = by_pieces(activated)?;
        let params = SwigluForward { gate_up: Address::of(gate_up), activated: Address::of(activated), width };
        self.swiglu_forward.launch_early(config, &params).context("launching SwiGLU")
    }

    /// In place of `gate_up` its gradient, from `d_activated`.
    pub fn swiglu_backward(&self, gate_up: &Tensor, d_activated: &Tensor) -> Result<()> {
        let (config, width) = by_pieces(d_activated)?;
        let params = SwigluBackward { gate_up: Address::of(gate_up), d_activated: Address::of(d_activated), width };
        self.swiglu_backward.launch_early(config, &params).context("launching SwiGLU's backward pass")
    }

    /// `losses` (tokens), and in place of `logits` (tokens, vocabulary) the gradient of the losses' mean.
    pub fn cross_entropy(&self, logits: &Tensor, targets: &Tensor, losses: &Tensor) -> Result<()> {
        let tokens = u32::try_from(losses.numel())?;
        let params = CrossEntropy {
            logits: Address::of(logits),
            targets: Address::of(targets),
            losses: Address::of(losses),
            vocabulary: int(self.shape.vocabulary)?,
            scale: 1.0 / tokens as f32,
        };
        let config = LaunchConfig { shared_bytes: 256, ..LaunchConfig::line(tokens, THREADS) };
        self.cross_entropy.launch(config, &params).context("launching the cross-entropy")
    }

    /// `gradient` (vocabulary, d) from the gradients `d_h` (tokens, d) of the embedded `tokens`, both float32.
    pub fn embedding_gradient(&self, tokens: &Tensor, d_h: &Tensor, gradient: &Tensor) -> Result<()> {
        let params = EmbeddingGradient {
            tokens: Address::of(tokens),
            d_h: Address::of(d_h),
            gradient: Address::of(gradient),
            count: int(tokens.numel())?,
            vocabulary: int(self.shape.vocabulary)?,
            d: int(self.shape.d_model)?,
        };
        let config = LaunchConfig::line(self.shape.vocabulary.div_ceil(THREADS / 32), THREADS);
        self.embedding_gradient.launch(config, &params).context("launching the embedding's gradient")
    }

    /// Counts a step in `progress`, two words of 8 bytes.
    pub fn advance(&self, progress: &Tensor, options: &AdamWOptions) -> Result<()> {
        let AdamWOptions { lr, beta1, beta2, .. } = *options;
        let params = Advance { progress: Address::of(progress), lr, beta1, beta2 };
        self.advance.launch(LaunchConfig::line(1, 32), &params).context("launching AdamW's counter")
    }

    /// AdamW for `packed`, whose gradients are float32 or in the type of the products, by the step that `progress` has.
    pub fn update(&self, packed: &Packed, progress: &Tensor, options: &AdamWOptions) -> Result<()> {
        let elements = packed.p.numel() as u64;
        ensure!(elements.is_multiple_of(4), "{elements} packed parameters are no multiple of 4");
        let blocks = u32::try_from(elements.div_ceil(u64::from(8 * UPDATE_THREADS)))?;
        let (config, fours) = (LaunchConfig::line(blocks, UPDATE_THREADS), i64::try_from(elements / 4)?);
        let [p, g, m, v] = [&packed.p, &packed.g, &packed.m, &packed.v].map(Address::of);
        let (progress, factors) = (Address::of(progress), Factors::of(options));
        let is_low = self.shape.precision == Precision::Bfloat16;
        if is_low && packed.g.kind() == Kind::Float {
            let params = UpdateFloat32 { p, g, m, v, progress, factors, fours };
            return self.update_float32.launch(config, &params).context("launching AdamW");
        }
        let low = packed.low.as_ref().map_or(Address::NULL, Address::of);
        let params = Update { p, g, m, v, low, progress, factors, fours };
        self.update.launch(config, &params).context("launching AdamW")
    }
}

/// A thread for every eight numbers of `rows` (tokens, width), a line of blocks a token; and the width.
fn by_pieces(rows: &Tensor) -> Result<(LaunchConfig, i32)> {
    let (tokens, width) = rows.size2()?;
    let threads = u32::try_from(width)? / PIECE;
    let grid = (u32::try_from(tokens)?, threads.div_ceil(THREADS), 1);
    Ok((LaunchConfig { grid, ..LaunchConfig::line(1, THREADS) }, int(width)?))
}

/// In the 32 bits with which the kernels count.
fn int(n: impl TryInto<i32>) -> Result<i32> {
    n.try_into().ok().context("a size is more than the 2^31 - 1 that the kernels of a fused step count")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_norm_has_a_thread_for_every_piece_of_a_row() {
        for (d_model, expected) in
            [(8, (1, 32)), (1600, (1, 224)), (2560, (1, 320)), (4096, (1, 512)), (4104, (2, 288))]
        {
            let shape = Shape { precision: Precision::Float32, d_model, vocabulary: 8 };
            assert_eq!(shape.norm(), expected, "{d_model}");
        }
    }
}
