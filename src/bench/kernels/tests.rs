//! Names as cuBLAS, CUTLASS, cub and libtorch give them to their kernels.

use super::*;

const MUL: &str = "void at::native::vectorized_elementwise_kernel<4, at::native::BinaryFunctor<float, float, float, \
    at::native::binary_internal::MulFunctor<float> >, std::array<char*, 3ul> >(int, at::native::BinaryFunctor<float, \
    float, float, at::native::binary_internal::MulFunctor<float> >, std::array<char*, 3ul>)";
const DIV: &str = "void at::native::vectorized_elementwise_kernel<4, at::native::BUnaryFunctor<float, float, float, \
    at::native::binary_internal::MulFunctor<float> >, std::array<char*, 2ul> >(int, int)";
const ADD: &str = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, \
    std::array<char*, 3ul> >(int, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul>)";
const SIGMOID: &str = "void at::native::vectorized_elementwise_kernel<4, at::native::sigmoid_kernel_cuda(\
    at::TensorIteratorBase&)::{lambda()#2}::operator()() const::{lambda()#2}::operator()() const::\
    {lambda(float)#1}, std::array<char*, 2ul> >(int, int)";
const MASK: &str = "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<at::native::\
    (anonymous namespace)::masked_fill_kernel(at::TensorIterator&, c10::Scalar const&)::{lambda()#1}::operator()() \
    const::{lambda()#7}::operator()() const::{lambda(float, bool)#1}>(at::TensorIteratorBase&, int const&)::\
    {lambda(int)#1}>(int, int)";
const COPY: &str = "void at::native::elementwise_kernel<128, 2, at::native::gpu_kernel_impl_nocast<at::native::\
    direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()#3}::operator()() const::{lambda()#7}>(\
    at::TensorIteratorBase&)::{lambda(int)#1}>(int, int)";
const MEAN: &str = "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float, float, \
    float, float>, unsigned int, float, 4, 4> >(at::native::ReduceOp<float, at::native::MeanOps<float> >)";
const SUM: &str = "void at::native::reduce_kernel<128, 4, at::native::ReduceOp<float, at::native::func_wrapper_t<float, \
    at::native::sum_functor<float, float, float>::operator()(at::TensorIterator&)::{lambda(float, float)#1}>, unsigned \
    int, float, 4, 4> >(int)";
const WARP: &str =
    "void (anonymous namespace)::softmax_warp_forward<float, float, float, 9, false, false>(float*, float const*, int)";
const ROWS: &str = "void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, float, float, float, at::native::\
    (anonymous namespace)::SoftMaxForwardEpilogue>(float*, float const*, int)";
const CAT: &str = "void at::native::(anonymous namespace)::CatArrayBatchedCopy_vectorized<at::native::(anonymous \
    namespace)::OpaqueType<4u>, unsigned int, 4, 64, 64, 16, 4>(char*, int)";
const ARANGE: &str = "void (anonymous namespace)::elementwise_kernel_with_index<int, at::native::arange_cuda_out(\
    c10::Scalar const&, c10::Scalar const&, c10::Scalar const&, at::Tensor&)::{lambda()#1}>(int, int)";
const LOOKUP: &str = "void at::native::(anonymous namespace)::vectorized_gather_kernel<16, long>(char*, char*, long*)";
const XMMA: &str = "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize256x128x8_stage3_warpsize4x2x1_ffma_aligna4_alignc4_execute_kernel__5x_cublas";
const SPLIT_XMMA: &str = "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize64x64x8_stage3_warpsize1x4x1_ffma_aligna4_alignc4_execute_split_k_kernel__5x_cublas";
const TF32: &str = "sm90_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x32_warpgroupsize2x1x1_execute_segment_k_off_kernel__5x_cublas";
const SIMT: &str = "void cutlass::Kernel2<cutlass_80_simt_sgemm_256x128_8x4_nt_align1>(cutlass_80_simt_sgemm_256x128_8x4_nt_align1::Params)";
const S1688: &str = "void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_128x128_16x5_nn_align4>(int)";
const BF16: &str = "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8>(int)";
const SPLIT: &str =
    "void cublasLt::splitKreduce_kernel<32, 16, int, float, float, float, float, true, true, false>(int)";
const GEMVX: &str = "std::enable_if<!(false), void>::type internal::gemvx::kernel<int, int, float, float, float, float, \
    false, true, false, false, 7, false, cublasGemvParamsEx<int> >(cublasGemvParamsEx<int>)";

fn event(source: Source, name: &str) -> Event {
    Event { source, name: name.into(), start_ns: 0, duration_ns: 1, thread: 0, correlation: None }
}

#[test]
fn kernels_are_classed_and_named_for_a_table() {
    let cases = [
        (MUL, Class::Elementwise, "vectorized_elementwise_kernel (mul)"),
        (DIV, Class::Elementwise, "vectorized_elementwise_kernel (mul)"),
        (ADD, Class::Elementwise, "vectorized_elementwise_kernel (add)"),
        (SIGMOID, Class::Elementwise, "vectorized_elementwise_kernel (sigmoid)"),
        (MASK, Class::Elementwise, "elementwise_kernel (masked_fill)"),
        (COPY, Class::Copy, "elementwise_kernel (direct_copy)"),
        (MEAN, Class::Reduction, "reduce_kernel (mean)"),
        (SUM, Class::Reduction, "reduce_kernel (sum)"),
        (WARP, Class::Softmax, "softmax_warp_forward"),
        (ROWS, Class::Softmax, "cunn_SoftMaxForward"),
        (CAT, Class::Copy, "CatArrayBatchedCopy_vectorized"),
        (ARANGE, Class::Elementwise, "elementwise_kernel_with_index (arange)"),
        (LOOKUP, Class::Indexing, "vectorized_gather_kernel"),
        (XMMA, Class::Matmul, "sm80_xmma_gemm_f32_tn_256x128x8"),
        (TF32, Class::Matmul, "sm90_xmma_gemm_f32f32_tf32f32_f32_tn_128x128x32"),
        ("sm80_xmma_gemm_of_tomorrow", Class::Matmul, "sm80_xmma_gemm_of_tomorrow"),
        (SIMT, Class::Matmul, "cutlass_80_simt_sgemm_256x128_8x4_nt_align1"),
        ("ampere_sgemm_128x64_nn", Class::Matmul, "ampere_sgemm_128x64_nn"),
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT", Class::Matmul, "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT"),
        (SPLIT, Class::MatmulHelper, "splitKreduce_kernel"),
        (SPLIT_XMMA, Class::MatmulHelper, "sm80_xmma_gemm_f32_tn_64x64x8_split_k"),
        (GEMVX, Class::Matmul, "gemvx::kernel"),
        ("adamw_float32", Class::Optimizer, "adamw_float32"),
        (
            "void at_cuda_detail::cub::DeviceRadixSortOnesweepKernel<int>(int)",
            Class::Indexing,
            "DeviceRadixSortOnesweepKernel",
        ),
        ("a_kernel_of_tomorrow", Class::Other, "a_kernel_of_tomorrow"),
        ("void strange<", Class::Other, "void strange<"),
        ("", Class::Other, ""),
    ];
    for (name, class, short) in cases {
        assert_eq!((Class::of(&event(Source::Kernel, name)), short_name(name).as_str()), (class, short), "{name}");
    }
    for (source, name, short) in [
        (Source::Memcpy, "Memcpy DtoD (Device -> Device)", "Memcpy DtoD"),
        (Source::Memset, "Memset (Device)", "Memset"),
    ] {
        assert_eq!((Class::of(&event(source, name)), short_name(name).as_str()), (Class::Copy, short));
    }
}

#[test]
fn a_products_name_tells_the_units_that_multiply() {
    let units = |names: &[&str]| names.iter().map(|name| Units::of(name)).collect::<Vec<_>>();
    assert_eq!(units(&[XMMA, SIMT, "ampere_sgemm_128x64_nn", GEMVX]), [Units::CudaCores; 4]);
    assert_eq!(units(&[TF32, S1688, BF16, "nvjet_tss_64x8_64x16_4x1_v_bz_TNT"]), [Units::TensorCores; 4]);
    assert_eq!(units(&["sm99_gemm_of_tomorrow"]), [Units::Unknown]);
}

#[test]
fn operators_are_classed_by_their_whole_name() {
    let class = |name| Class::of(&event(Source::Operator, name));
    assert_eq!([class("aten::mm"), class("aten::addmm"), class("aten::bmm")], [Class::Matmul; 3]);
    assert_eq!([class("aten::add"), class("aten::mul_"), class("aten::exp")], [Class::Elementwise; 3]);
    // Callers of products and views compute nothing themselves.
    assert_eq!([class("aten::matmul"), class("aten::expand"), class("MmBackward0")], [Class::Other; 3]);
    assert!(is_matmul_operator(&event(Source::Operator, "aten::mm")));
    assert!(!is_matmul_operator(&event(Source::Kernel, "aten::mm")));
}
