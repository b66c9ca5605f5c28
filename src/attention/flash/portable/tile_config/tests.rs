//! The shared memory and the shapes of the tile configurations.

use super::*;

#[test]
fn every_variant_fits_a_multiprocessor_of_every_gpu_that_it_is_for() {
    /// What a CTA may have from compute capability 8.0 on; 8.6 and 8.9 have the least.
    const SHARED_LIMIT: u32 = 99 * 1024;
    assert_eq!(Variant::all(crate::attention::flash::DIMENSIONS, Element::ALL).count(), 24);
    for variant in Variant::all(crate::attention::flash::DIMENSIONS, Element::ALL) {
        let (forward, backward) = (ForwardConfig::of(variant), BackwardConfig::of(variant));
        for bytes in [forward.shared_bytes(), backward.most_shared_bytes()] {
            assert!(bytes <= SHARED_LIMIT, "{variant:?} takes {bytes} bytes");
        }
        for pass in [backward.keys, backward.queries] {
            assert_eq!(BackwardConfig::PADDING % backward.rows(pass), 0, "{variant:?}");
            assert_eq!(BackwardConfig::PADDING % pass.stream, 0, "{variant:?}");
        }
    }
}

#[test]
fn shapes_are_as_the_kernels_lay_them_out() {
    let variant = |d, element| Variant { d, element, is_causal: true };
    let float = ForwardConfig::of(variant(64, Element::Float));
    // 16 KiB of Q and two buffers of 16 KiB, so that three blocks take 144 KiB.
    assert_eq!((float.rows(), float.threads(), float.shared_bytes()), (64, 128, 3 * 16_384));
    let wide = ForwardConfig::of(variant(128, Element::Half));
    assert_eq!((wide.rows(), wide.shared_bytes()), (128, 32_768 + 3 * 16_384));
    let backward = BackwardConfig::of(variant(64, Element::BFloat16));
    // K and V of 64 keys; two buffers of Q, dO and two statistics of 64 queries.
    assert_eq!(backward.shared_bytes(backward.keys, 2), 2 * 8192 + 2 * (2 * 8192 + 2 * 256));
    // Q and dO of 128 queries; two buffers of K and V of 32 keys.
    assert_eq!(backward.shared_bytes(backward.queries, 0), 2 * 16_384 + 2 * (2 * 4096));
}
