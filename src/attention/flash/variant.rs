//! What attention kernels are compiled for: a head dimension, an element type and a mask.

use tch::Kind;

use super::DIMENSIONS;

/// Element types, by their number in `kernels/lib/fragment.cuh`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Element {
    BFloat16 = 0,
    Half = 1,
    Float = 2,
}

impl Element {
    pub const ALL: [Self; 3] = [Self::BFloat16, Self::Half, Self::Float];

    pub fn bytes(self) -> u32 {
        if self == Self::Float { 4 } else { 2 }
    }
}

/// Each variant is compiled on its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Variant {
    /// Elements of a tile's row, of which tensors may lack the last in Hopper's kernels.
    pub d: u32,
    pub element: Element,
    pub is_causal: bool,
}

impl Variant {
    /// Errors: which kind or `d` there are no kernels for.
    pub fn of(kind: Kind, d: i64, is_causal: bool) -> Result<Self, String> {
        let element = match kind {
            Kind::BFloat16 => Element::BFloat16,
            Kind::Half => Element::Half,
            Kind::Float => Element::Float,
            _ => return Err(format!("its kernels take bfloat16, float16 and float32, not {kind:?}")),
        };
        if !DIMENSIONS.contains(&d) {
            return Err(format!("its kernels are made for d of 16, 32, 64 and 128, not {d}"));
        }
        Ok(Self { d: d as u32, element, is_causal })
    }

    /// Of these d and types, with either mask.
    pub fn all<const M: usize, const N: usize>(
        dimensions: [i64; M],
        elements: [Element; N],
    ) -> impl Iterator<Item = Self> {
        let masks = |d, element| [false, true].map(|is_causal| Self { d, element, is_causal });
        let types = move |d| elements.into_iter().flat_map(move |element| masks(d, element));
        dimensions.into_iter().flat_map(move |d| types(d as u32))
    }

    pub fn row_bytes(self) -> u32 {
        self.d * self.element.bytes()
    }
}
