//! The parameters of every attention kernel: a module for each file of `kernels/`, with that file's names and order.
//!
//! A test compares each struct with the file as NVRTC compiles it.

use crate::cuda::{Address, TensorMap, kernel_params};

/// Entries of a table of splits, which a kernel takes by value.
pub const MOST_ITEMS: usize = 1020;

/// `kernels/flash_forward.cu`
pub mod flash_forward {
    use super::*;

    kernel_params! {
        struct Problem<'a> as "Problem" {
            n_queries, n_keys, heads, batch, d: i32,
            scale_log2: f32,
            heads_at_a_time, group_size: i32,
            lse: Address<'a>,
            // Counts the tiles that CTAs have taken beyond their first ones.
            taken: Address<'a>,
        }

        /// The splits of each head's tiles.
        struct Parts<'a> as "Parts" {
            count, blocks: i32,
            o, lse: Address<'a>,
            items: [u32; MOST_ITEMS],
        }

        struct Forward<'a> as "flash_forward" { q, k, v, o: TensorMap, problem: Problem<'a> }

        /// With FLASH_SPLIT.
        struct SplitForward<'a> as "flash_forward" { q, k, v, o: TensorMap, problem: Problem<'a>, parts: Parts<'a> }

        struct Output<'a> as "Output" { base: Address<'a>, strides: [i64; 3] }

        struct Combine<'a> as "flash_forward_combine" { problem: Problem<'a>, parts: Parts<'a>, o: Output<'a> }
    }
}

/// `kernels/flash_backward.cu`
pub mod flash_backward {
    use super::*;

    kernel_params! {
        struct Problem<'a> as "Problem" {
            n_queries, n_keys, heads, batch, d: i32,
            scale, scale_log2: f32,
            group_size: i32,
            lse_log2, delta, dq_sums: Address<'a>,
        }

        /// The splits of each head's blocks of keys.
        struct Parts<'a> as "Parts" {
            count, blocks: i32,
            dk, dv: Address<'a>,
            items: [u32; MOST_ITEMS],
        }

        struct Outputs<'a> as "Outputs" { o, d_o, lse: Address<'a>, o_strides, do_strides: [i64; 3] }

        struct Prepare<'a> as "flash_backward_prepare" { problem: Problem<'a>, outputs: Outputs<'a> }

        struct Backward<'a> as "flash_backward" { q, k, v, d_o, dk, dv: TensorMap, problem: Problem<'a> }

        /// With FLASH_SPLIT.
        struct SplitBackward<'a> as "flash_backward" {
            q, k, v, d_o, dk, dv: TensorMap,
            problem: Problem<'a>,
            parts: Parts<'a>,
        }

        struct Combine<'a> as "flash_backward_combine" { problem: Problem<'a>, parts: Parts<'a>, dk, dv: Address<'a> }

        struct Finish<'a> as "flash_backward_finish" { problem: Problem<'a>, dq: Address<'a> }
    }
}

/// `kernels/portable_forward.cu`, and of `kernels/lib/fragment.cuh` what both portable files include.
pub mod portable_forward {
    use super::*;

    kernel_params! {
        /// An input, with its strides in elements.
        struct Tensor<'a> as "Tensor" { base: Address<'a>, strides: [i64; 3] }

        struct Problem<'a> as "Problem" {
            n_queries, n_keys, heads, batch: i32,
            scale, scale_log2: f32,
            heads_at_a_time, splits, split_blocks, group_size: i32,
            q, k, v: Tensor<'a>,
            o, lse, split_o, split_lse: Address<'a>,
        }

        struct Forward<'a> as "portable_forward" { problem: Problem<'a> }
        struct Combine<'a> as "portable_combine" { problem: Problem<'a> }
    }
}

/// `kernels/portable_backward.cu`
pub mod portable_backward {
    use super::portable_forward::Tensor;
    use super::*;

    kernel_params! {
        struct Split as "Split" { count: i32, blocks: i32 }

        struct Problem<'a> as "Problem" {
            n_queries, n_keys, heads, batch: i32,
            scale, scale_log2: f32,
            heads_at_a_time, padded_queries: i32,
            keys, queries: Split,
            q, k, v, o, d_o: Tensor<'a>,
            lse, shift, delta, dq, dk, dv, dq_parts, dk_parts, dv_parts, dq_sums, turns: Address<'a>,
            group_size, unused: i32,
        }

        struct Prepare<'a> as "portable_backward_prepare" { problem: Problem<'a> }
        struct Backward<'a> as "portable_backward" { problem: Problem<'a> }
        struct Combine<'a> as "portable_backward_combine" { problem: Problem<'a> }
    }
}

/// `kernels/textbook_forward.cu`
pub mod textbook_forward {
    use super::*;

    kernel_params! {
        struct Forward<'a> as "textbook_forward" { q, k, v, o, lse: Address<'a>, n_queries, n_keys: i32, scale: f32 }
    }
}

/// `kernels/textbook_backward.cu`
pub mod textbook_backward {
    use super::*;

    kernel_params! {
        struct Problem<'a> as "Problem" {
            q, k, v, o, d_o, lse, rowsums, dq, dk, dv: Address<'a>,
            n_queries, n_keys: i32,
            scale: f32,
            unused: i32,
        }

        struct Rowsums<'a> as "textbook_backward_rowsums" { problem: Problem<'a> }
        struct Keys<'a> as "textbook_backward_keys" { problem: Problem<'a> }
        struct Queries<'a> as "textbook_backward_queries" { problem: Problem<'a> }
    }
}

#[cfg(test)]
mod tests;
