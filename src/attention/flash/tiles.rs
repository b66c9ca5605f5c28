//! The tiles of causal self-attention by our kernels on Hopper: what the launches choose for each shape, for tables.

use tch::Kind;

use super::hopper::Hopper;
use super::hopper::tile_config::{self as hopper, TileSize};
use super::launch::KernelSet as _;
use super::portable::tile_config as portable;
use super::prefers_portable;
use super::variant::Variant;
use crate::attention::Shape;

/// The tiles of both passes, and which kernels make them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tiles {
    /// Queries of a tile, and keys of each step of its loop.
    pub forward: [u32; 2],
    /// Keys of a tile of dK and dV, and queries of each step.
    pub key_gradients: [u32; 2],
    /// Queries of a tile of dQ, and keys of each step; `None` where the loop over dK and dV also adds up dQ.
    pub query_gradients: Option<[u32; 2]>,
}

impl Tiles {
    /// Of `heads` heads with as many queries as keys.
    ///
    /// Errors: which kind or `d` no kernel takes.
    pub fn on_hopper(kind: Kind, d: i64, length: u32, heads: u32) -> Result<Self, String> {
        let variant = Hopper::DEFAULT.variant(kind, d, true).or_else(|_| Variant::of(kind, d, true))?;
        if !hopper::ELEMENTS.contains(&variant.element) {
            return Ok(Self::portable_backward(variant, Self::portable_forward(variant)));
        }
        let size = TileSize::fastest(variant.d, length, length, heads);
        let config = hopper::ForwardConfig::of(variant, size);
        let forward = [config.rows(), config.keys];
        let n = i64::from(length);
        let shape = Shape { leading: vec![heads.into()], n_queries: n, n_keys: n, d, group_size: 1 };
        if prefers_portable(&shape) {
            return Ok(Self::portable_backward(variant, forward));
        }
        let queries = hopper::BackwardConfig::of(variant).queries;
        Ok(Self { forward, key_gradients: [hopper::BackwardConfig::KEYS, queries], query_gradients: None })
    }

    fn portable_forward(variant: Variant) -> [u32; 2] {
        let config = portable::ForwardConfig::of(variant);
        [config.rows(), config.keys]
    }

    fn portable_backward(variant: Variant, forward: [u32; 2]) -> Self {
        let config = portable::BackwardConfig::of(variant);
        let [keys, queries] = [config.keys, config.queries].map(|tiles| [config.rows(tiles), tiles.stream]);
        Self { forward, key_gradients: keys, query_gradients: Some(queries) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tiles(kind: Kind, d: i64, length: u32) -> Tiles {
        Tiles::on_hopper(kind, d, length, 1).unwrap()
    }

    #[test]
    fn tiles_grow_with_the_length_and_shrink_with_d() {
        let (short, long) = (tiles(Kind::BFloat16, 64, 8192), tiles(Kind::BFloat16, 64, 16_384));
        assert_eq!((short.forward, long.forward), ([64, 128], [192, 128]));
        assert_eq!(tiles(Kind::BFloat16, 128, 16_384).forward, [128, 128]);
        assert_eq!(tiles(Kind::BFloat16, 128, 128).forward, [64, 64]);
        assert_eq!(tiles(Kind::BFloat16, 80, 65_536).key_gradients, [128, 64]);
        assert_eq!(tiles(Kind::BFloat16, 128, 128).key_gradients, [128, 64]);
    }

    #[test]
    fn short_backward_passes_and_float32_have_tiles_of_their_own_for_dq() {
        assert_eq!(tiles(Kind::BFloat16, 64, 1024).query_gradients, Some([128, 32]));
        assert_eq!(tiles(Kind::BFloat16, 64, 2048).query_gradients, None);
        for length in [128, 65_536] {
            let float = tiles(Kind::Float, 128, length);
            assert_eq!((float.forward, float.key_gradients), ([64, 32], [64, 16]));
            assert_eq!(float.query_gradients, Some([64, 16]));
        }
        assert!(Tiles::on_hopper(Kind::Double, 64, 128, 1).is_err());
    }
}
