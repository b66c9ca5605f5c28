//! Memory and communication of the XXL model under FSDP and tensor parallelism, as formulas.
//!
//! Notation of "How to Scale Your Model" (Austin et al. 2025), part 5: B tokens in the global batch, D = d_model,
//! F = d_ff, N = X Y chips, X of them along the FSDP axis and Y along the tensor axis, M_X and M_Y the number of mesh
//! axes given to each, C FLOP/s a chip, W bytes/s a mesh axis, alpha = C / W.

use serde::Serialize;

/// Bytes of one element.
const FP32: u64 = 4;
const BF16: u64 = 2;

/// Blocks of two linear layers, D -> F and F -> D; attention, embeddings and head are left out.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Model {
    pub d_model: u64,
    pub d_ff: u64,
    pub num_blocks: u64,
}

/// Float32 state that does not depend on the batch, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct StaticBytes {
    pub weights: u64,
    pub gradients: u64,
    pub optimizer: u64,
    pub total: u64,
}

#[derive(Debug, Clone, Copy, Serialize)]
pub struct Chip {
    pub flops_per_s: f64,
    /// Along one mesh axis, both directions together.
    pub bytes_per_s: f64,
}

/// How the chips are divided between the two kinds of parallelism.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Mesh {
    pub x: u64,
    pub y: u64,
    pub m_x: u64,
    pub m_y: u64,
}

/// Seconds of one block's forward pass.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Times {
    pub math: f64,
    pub fsdp: f64,
    pub tensor: f64,
}

/// How the two communications combine: one after the other, or at the same time as each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Reading {
    Added,
    Overlapped,
}

/// The formulas as replaceable functions, so that tests can check that a wrong one is caught.
#[derive(Clone, Copy)]
pub struct Accounting {
    pub parameters: fn(&Model) -> u64,
    pub static_bytes: fn(u64) -> StaticBytes,
    pub activation_bytes_per_token: fn(&Model) -> u64,
    pub devices: fn(u64, f64) -> u64,
    pub bytes_per_device: fn(u64, u64, u64) -> f64,
    pub smallest_fsdp: fn(u64, u64, f64) -> Option<u64>,
    pub times: fn(&Model, &Chip, &Mesh, f64) -> Times,
    pub threshold: fn(&Model, &Chip, &Mesh, Reading) -> Option<f64>,
    pub optimum: fn(&Model, &Chip, u64, u64) -> f64,
}

pub const ACCOUNTING: Accounting = Accounting {
    parameters,
    static_bytes,
    activation_bytes_per_token,
    devices,
    bytes_per_device,
    smallest_fsdp,
    times,
    threshold,
    optimum,
};

impl Mesh {
    pub fn chips(&self) -> u64 {
        self.x * self.y
    }
}

impl Times {
    pub fn communication(&self, reading: Reading) -> f64 {
        match reading {
            Reading::Added => self.fsdp + self.tensor,
            Reading::Overlapped => self.fsdp.max(self.tensor),
        }
    }
}

impl Chip {
    /// alpha = C / W: operations that a chip does while one byte crosses one mesh axis.
    pub fn flops_per_byte(&self) -> f64 {
        self.flops_per_s / self.bytes_per_s
    }
}

/// Two matrices of D F elements a block.
fn parameters(model: &Model) -> u64 {
    2 * model.d_model * model.d_ff * model.num_blocks
}

/// Master weights, accumulated gradients, and Adam's two moments, all float32.
fn static_bytes(parameters: u64) -> StaticBytes {
    let (weights, gradients, optimizer) = (FP32 * parameters, FP32 * parameters, 2 * FP32 * parameters);
    StaticBytes { weights, gradients, optimizer, total: weights + gradients + optimizer }
}

/// The backward pass of a linear layer needs its input: D elements for the first, F for the second, in bfloat16.
fn activation_bytes_per_token(model: &Model) -> u64 {
    BF16 * (model.d_model + model.d_ff) * model.num_blocks
}

/// The fewest devices of `capacity` bytes that together hold `bytes`.
fn devices(bytes: u64, capacity: f64) -> u64 {
    (bytes as f64 / capacity).ceil() as u64
}

/// Static state and half of the activations divided by `n`; the other half of the activations stays whole.
fn bytes_per_device(static_bytes: u64, activations: u64, n: u64) -> f64 {
    let half = activations as f64 / 2.0;
    (static_bytes as f64 + half) / n as f64 + half
}

/// The smallest n whose memory is strictly below `capacity`; none where the unsharded half alone reaches it.
fn smallest_fsdp(static_bytes: u64, activations: u64, capacity: f64) -> Option<u64> {
    let half = activations as f64 / 2.0;
    (half < capacity).then(|| ((static_bytes as f64 + half) / (capacity - half)).floor() as u64 + 1)
}

/// One block, forward, `batch` tokens in all. An axis of one device has nothing to communicate.
///
/// Math: two products of 2 B D F operations over N chips. FSDP: both matrices, 2 D F bfloat16 elements already divided
/// by Y, are gathered over M_X axes. Tensor: inputs are gathered and outputs reduce-scattered, 2 B D elements divided
/// by X, over M_Y axes. Like the book, this charges the whole gathered array, not the (n - 1) / n of it that moves.
fn times(model: &Model, chip: &Chip, mesh: &Mesh, batch: f64) -> Times {
    let (d, f, w) = (model.d_model as f64, model.d_ff as f64, chip.bytes_per_s);
    let (x, y) = (mesh.x as f64, mesh.y as f64);
    let fsdp = 2.0 * BF16 as f64 * d * f / (y * w * mesh.m_x as f64);
    let tensor = 2.0 * BF16 as f64 * batch * d / (x * w * mesh.m_y as f64);
    Times {
        math: 4.0 * batch * d * f / (x * y * chip.flops_per_s),
        fsdp: if mesh.x > 1 { fsdp } else { 0.0 },
        tensor: if mesh.y > 1 { tensor } else { 0.0 },
    }
}

/// The tokens per chip above which math takes longer than communication; none where no batch is large enough.
///
/// Both math and tensor time grow with the batch, so tensor parallelism asks F > alpha Y / M_Y of the model, whatever
/// the batch; FSDP's time does not grow, and gives the batch.
fn threshold(model: &Model, chip: &Chip, mesh: &Mesh, reading: Reading) -> Option<f64> {
    let (alpha, f) = (chip.flops_per_byte(), model.d_ff as f64);
    let tensor = if mesh.y > 1 { alpha * mesh.y as f64 / mesh.m_y as f64 } else { 0.0 };
    let fsdp = if mesh.x > 1 { alpha / (mesh.y * mesh.m_x) as f64 } else { 0.0 };
    let per_chip = match reading {
        Reading::Added => f * fsdp / (f - tensor),
        Reading::Overlapped => fsdp,
    };
    (f > tensor).then_some(per_chip)
}

/// Tokens per chip where the communications are added and X is free to be any real number: 4 alpha^2 / (M_X M_Y F).
fn optimum(model: &Model, chip: &Chip, m_x: u64, m_y: u64) -> f64 {
    4.0 * chip.flops_per_byte().powi(2) / ((m_x * m_y) as f64 * model.d_ff as f64)
}

/// The X of [`optimum`] for `chips` chips: sqrt(B N M_X / (F M_Y)).
pub fn optimum_x(model: &Model, batch: f64, chips: u64, m_x: u64, m_y: u64) -> f64 {
    (batch * chips as f64 * m_x as f64 / (model.d_ff as f64 * m_y as f64)).sqrt()
}

/// Every way to write `chips` as X times Y with both whole, X ascending.
pub fn splits(chips: u64, m_x: u64, m_y: u64) -> Vec<Mesh> {
    (1..=chips).filter(|x| chips.is_multiple_of(*x)).map(|x| Mesh { x, y: chips / x, m_x, m_y }).collect()
}

/// The split that is bound by compute at the smallest batch.
pub fn best_split(
    accounting: &Accounting,
    model: &Model,
    chip: &Chip,
    of: &[Mesh],
    how: Reading,
) -> Option<(Mesh, f64)> {
    let of_split = |mesh: &Mesh| (accounting.threshold)(model, chip, mesh, how).map(|tokens| (*mesh, tokens));
    of.iter().filter_map(of_split).min_by(|a, b| a.1.total_cmp(&b.1))
}
