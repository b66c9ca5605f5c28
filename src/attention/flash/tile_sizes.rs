//! The tile sizes of every attention kernel. Host and compiler take them from this table alone: `program` of each
//! configuration hands its row to the compiler as macros.

use super::hopper::tile_config::TileSize;
use super::portable::tile_config::Element;

/// `flash_forward.cu`: warpgroups that compute (64 queries each), keys of a block, buffers of K and V.
pub(super) fn hopper_forward(size: TileSize, d: u32) -> [u32; 3] {
    match (size, d) {
        (TileSize::Small, 128) => [1, 64, 2],
        (TileSize::Small, _) => [1, 128, 2],
        (TileSize::Large, 128) => [2, 128, 2],
        (TileSize::Large, _) => [3, 128, 4],
    }
}

/// `flash_backward.cu`: queries of a block. A tile has 128 keys and two buffers, which the file states itself.
pub(super) fn hopper_backward(d: u32) -> u32 {
    if d == 128 { 64 } else { 128 }
}

/// `portable_forward.cu`: warps, tiles of 16 queries of each warp, keys of a block, buffers of K and V, and the CTAs that
/// share a multiprocessor.
pub(super) fn portable_forward(element: Element, d: u32) -> [u32; 5] {
    match (element, d) {
        (Element::Float, 16) => [4, 1, 64, 2, 3],
        (Element::Float, 32 | 64) => [4, 1, 32, 2, 3],
        (Element::Float, _) => [4, 1, 32, 2, 2],
        (_, 16) => [4, 2, 64, 3, 3],
        (_, 32 | 64) => [4, 2, 64, 3, 2],
        _ => [4, 2, 32, 3, 2],
    }
}

/// `portable_backward.cu`: warps, buffers, and the CTAs that share a multiprocessor.
pub(super) const PORTABLE_BACKWARD: [u32; 3] = [4, 2, 2];

/// `portable_backward.cu`: for dk and dv, tiles of 16 keys of each warp and queries of a block; for dq, tiles of 16
/// queries of each warp and keys of a block.
pub(super) fn portable_backward(element: Element, d: u32) -> [[u32; 2]; 2] {
    match (element, d) {
        (Element::Float, 128) => [[1, 16], [1, 16]],
        (Element::Float, _) => [[1, 32], [1, 32]],
        (_, 16) => [[2, 64], [2, 64]],
        (_, 32) => [[2, 32], [2, 64]],
        (_, 64) => [[1, 64], [2, 32]],
        _ => [[1, 32], [1, 64]],
    }
}

/// `textbook_forward.cu`: B_q and B_k. With these, two CTAs and more fit a multiprocessor.
pub(super) fn textbook_forward(d: u32) -> [u32; 2] {
    [64, if d == 128 { 32 } else { 64 }]
}

/// `textbook_backward.cu`: B_q and B_k.
pub(super) fn textbook_backward(d: u32) -> [u32; 2] {
    match d {
        128 => [32, 32],
        64 => [64, 32],
        _ => [64, 64],
    }
}
