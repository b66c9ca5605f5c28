//! Seeded normal inputs that equal `torch.manual_seed(seed)` followed by `torch.randn` on the CPU.
//!
//! The same MT19937 and the same blocks of sixteen (ATen's `normal_fill`) in Rust: checks on several threads do not
//! share a sequence, as they would with libtorch's process-wide generator.

use anyhow::Result;
use tch::{Device, Kind, Tensor};

const STATE: usize = 624;
const MIDDLE: usize = 397;
/// `normal_fill` turns sixteen uniform numbers at a time into sixteen normal ones.
const BLOCK: usize = 16;

/// MT19937 (Matsumoto and Nishimura, 1998), as `at::mt19937`; see [`crate::torch::Generator`] for libtorch's own.
pub struct ReferenceGenerator {
    state: [u32; STATE],
    next: usize,
}

impl ReferenceGenerator {
    pub fn new(seed: u32) -> Self {
        let mut state = [seed; STATE];
        for i in 1..STATE {
            let previous = state[i - 1];
            state[i] = 1_812_433_253_u32.wrapping_mul(previous ^ (previous >> 30)).wrapping_add(i as u32);
        }
        Self { state, next: STATE }
    }

    /// Standard normal values of `shape`, drawn in float32 and cast to `kind`. Shapes of sixteen or more
    /// elements equal `torch.randn` up to the last bits of its vectorised logarithm and sine.
    pub fn randn(&mut self, shape: &[i64], kind: Kind, device: Device) -> Result<Tensor> {
        let count = usize::try_from(shape.iter().product::<i64>())?;
        let mut values: Vec<f32> = (0..count.max(BLOCK)).map(|_| self.uniform()).collect();
        let whole = values.len() / BLOCK * BLOCK;
        values[..whole].chunks_exact_mut(BLOCK).for_each(box_muller);
        if whole < values.len() {
            let tail = values.len() - BLOCK;
            values[tail..].fill_with(|| self.uniform());
            box_muller(&mut values[tail..]);
        }
        values.truncate(count);
        Ok(Tensor::f_from_slice(&values)?.f_reshape(shape)?.f_to_kind(kind)?.f_to_device(device)?)
    }

    /// Uniform on [0, 1) with 24 random bits.
    fn uniform(&mut self) -> f32 {
        (self.draw() & ((1 << 24) - 1)) as f32 / (1 << 24) as f32
    }

    fn draw(&mut self) -> u32 {
        if self.next == STATE {
            self.renew();
        }
        let mut y = self.state[self.next];
        self.next += 1;
        y ^= y >> 11;
        y ^= (y << 7) & 0x9d2c_5680;
        y ^= (y << 15) & 0xefc6_0000;
        y ^ (y >> 18)
    }

    fn renew(&mut self) {
        for i in 0..STATE {
            let joined = (self.state[i] & 0x8000_0000) | (self.state[(i + 1) % STATE] & 0x7fff_ffff);
            let twist = if joined & 1 == 1 { 0x9908_b0df } else { 0 };
            self.state[i] = self.state[(i + MIDDLE) % STATE] ^ (joined >> 1) ^ twist;
        }
        self.next = 0;
    }
}

/// Turns sixteen uniform numbers into sixteen normal ones: the first eight give radii and the last eight angles.
fn box_muller(block: &mut [f32]) {
    let (radii, angles) = block.split_at_mut(BLOCK / 2);
    for (r, a) in radii.iter_mut().zip(angles) {
        let radius = (-2.0 * (1.0 - *r).ln()).sqrt();
        let (sine, cosine) = (2.0 * std::f32::consts::PI * *a).sin_cos();
        (*r, *a) = (radius * cosine, radius * sine);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The expected values were printed by torch 2.11.0: manual_seed(0), then randn(4, 128, 64) twice.
    #[test]
    fn the_official_inputs_are_those_of_pytorch() {
        let mut random = ReferenceGenerator::new(0);
        let q = random.randn(&[4, 128, 64], Kind::Float, Device::Cpu).unwrap();
        let k = random.randn(&[4, 128, 64], Kind::Float, Device::Cpu).unwrap();
        let near = |t: &Tensor, at: [i64; 3], expected: f64| (t.double_value(&at) - expected).abs() < 1e-5;
        assert!(near(&q, [0, 0, 0], -1.1258398) && near(&q, [0, 0, 3], -0.4338788), "{:?}", q.double_value(&[0, 0, 0]));
        assert!(near(&k, [0, 0, 0], -0.9780122) && near(&k, [0, 0, 1], 0.6038440));
        assert!((q.sum(Kind::Double).double_value(&[]) + 411.00935).abs() < 1e-2);
    }

    #[test]
    fn a_shape_below_one_block_and_one_with_a_tail_are_filled() {
        for count in [1, 15, 16, 17, 40] {
            let x = ReferenceGenerator::new(1).randn(&[count], Kind::Double, Device::Cpu).unwrap();
            assert_eq!((x.size(), x.isfinite().all().int64_value(&[])), (vec![count], 1));
        }
    }
}
