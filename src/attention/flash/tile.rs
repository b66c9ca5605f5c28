//! How the kernels are cut for each variant: pure, so that every machine can test it.

use crate::cuda::Program;

/// Head dimensions that the kernels are made for.
pub const DIMENSIONS: [i64; 4] = [16, 32, 64, 128];

/// What the kernels are compiled anew for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Variant {
    pub d: u32,
    /// Float16; bfloat16 otherwise.
    pub is_half: bool,
    pub is_causal: bool,
}

/// What a block may have of shared memory on Hopper, in bytes.
pub const SHARED_LIMIT: u32 = 227 * 1024;
/// Dynamic shared memory begins at any multiple of 16; the kernels' tiles at multiples of this.
const ALIGNMENT: u32 = 1024;

impl Variant {
    pub fn all() -> impl Iterator<Item = Self> {
        let types = |d| [false, true].map(|is_half| [false, true].map(|is_causal| Self { d, is_half, is_causal }));
        DIMENSIONS.into_iter().flat_map(move |d| types(d as u32).into_iter().flatten())
    }

    fn defines(self) -> Vec<(&'static str, String)> {
        let flag = |on: bool| u32::from(on).to_string();
        vec![
            ("FLASH_D", self.d.to_string()),
            ("FLASH_HALF", flag(self.is_half)),
            ("FLASH_CAUSAL", flag(self.is_causal)),
        ]
    }
}

/// Columns of a panel in shared memory: its rows are at most 128 bytes.
fn columns(d: u32) -> u32 {
    d.min(64)
}

/// The forward kernel's cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Forward {
    pub variant: Variant,
    /// Warpgroups that compute, 64 queries each.
    pub groups: u32,
    /// Keys of a block.
    pub keys: u32,
    /// Buffers for blocks of K and V.
    pub stages: u32,
}

impl Forward {
    pub fn of(variant: Variant) -> Self {
        match variant.d {
            128 => Self { variant, groups: 2, keys: 128, stages: 2 },
            _ => Self { variant, groups: 3, keys: 128, stages: 4 },
        }
    }

    pub fn program(&self) -> Program {
        let shape = [("FLASH_GROUPS", self.groups), ("FLASH_KEYS", self.keys), ("FLASH_STAGES", self.stages)];
        let shape = shape.into_iter().map(|(name, value)| (name, value.to_string()));
        Program { file: "flash_forward.cu", defines: self.variant.defines().into_iter().chain(shape).collect() }
    }

    pub fn rows(&self) -> u32 {
        64 * self.groups
    }

    pub fn columns(&self) -> u32 {
        columns(self.variant.d)
    }

    pub fn threads(&self) -> u32 {
        128 * (self.groups + 1)
    }

    /// Q and O, K and V of each buffer, and the barriers.
    pub fn shared_bytes(&self) -> u32 {
        let row = 2 * self.variant.d;
        2 * self.rows() * row + 2 * self.stages * self.keys * row + 8 * (2 + 4 * self.stages) + ALIGNMENT
    }
}

/// The backward kernels' cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Backward {
    pub variant: Variant,
    /// Queries of a block.
    pub queries: u32,
}

impl Backward {
    pub const KEYS: u32 = 128;
    pub const THREADS: u32 = 384;
    const STAGES: u32 = 2;

    pub fn of(variant: Variant) -> Self {
        Self { variant, queries: if variant.d == 128 { 64 } else { 128 } }
    }

    pub fn program(&self) -> Program {
        let shape = [("FLASH_QUERIES", self.queries.to_string())];
        Program { file: "flash_backward.cu", defines: self.variant.defines().into_iter().chain(shape).collect() }
    }

    pub fn columns(&self) -> u32 {
        columns(self.variant.d)
    }

    /// K and V, Q and dO of each buffer with their rows' statistics, two of dS, and the barriers.
    pub fn shared_bytes(&self) -> u32 {
        let row = 2 * self.variant.d;
        let stage = 2 * self.queries * row + 2 * 4 * self.queries;
        2 * Self::KEYS * row
            + Self::STAGES * stage
            + 2 * 2 * self.queries * Self::KEYS
            + 8 * (2 + 4 * Self::STAGES)
            + ALIGNMENT
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_variant_fits_a_multiprocessor() {
        assert_eq!(Variant::all().count(), 16);
        for variant in Variant::all() {
            let (forward, backward) = (Forward::of(variant), Backward::of(variant));
            assert!(forward.shared_bytes() <= SHARED_LIMIT, "{forward:?} takes {} bytes", forward.shared_bytes());
            assert!(backward.shared_bytes() <= SHARED_LIMIT, "{backward:?} takes {} bytes", backward.shared_bytes());
        }
    }

    #[test]
    fn shapes_are_as_the_kernels_lay_them_out() {
        let variant = |d| Variant { d, is_half: false, is_causal: true };
        let wide = Forward::of(variant(128));
        assert_eq!((wide.rows(), wide.threads(), wide.columns()), (128, 384, 64));
        // 64 KiB of Q and O, two buffers of 64 KiB, ten barriers, and what alignment may take.
        assert_eq!(wide.shared_bytes(), 65_536 + 2 * 65_536 + 80 + 1024);
        let middle = Backward::of(variant(64));
        assert_eq!((middle.queries, middle.columns()), (128, 64));
        // 32 KiB of K and V, two buffers of 32 KiB and two rows of 512 bytes each, 64 KiB of dS, ten barriers.
        assert_eq!(middle.shared_bytes(), 32_768 + 2 * (32_768 + 1024) + 65_536 + 80 + 1024);
    }
}
