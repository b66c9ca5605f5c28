//! Made-up traces with the names that Triton, cuDNN, cuBLAS, libtorch and our kernels give.

use super::*;
use crate::harness::samples::Work;
use crate::model::sizes::TABLE_1;

fn event(source: Source, name: &str, start_ns: i64, end_ns: i64) -> Event {
    Event { source, name: name.into(), start_ns, duration_ns: end_ns - start_ns, thread: 7, correlation: None }
}

fn class(name: &str) -> StepClass {
    StepClass::of(&event(Source::Kernel, name, 0, 1))
}

#[test]
fn every_kernel_of_our_fused_step_has_its_class() {
    let of = |names: &[&str]| names.iter().map(|name| class(name)).collect::<Vec<_>>();
    let elementwise = [
        "residual_rms_norm",
        "rms_norm_backward",
        "rms_norm_gain_gradients",
        "rope_forward",
        "rope_backward",
        "swiglu_forward",
        "swiglu_backward",
        "cross_entropy",
        "embedding_gradient",
    ];
    assert_eq!(of(&elementwise), [StepClass::Elementwise; 9]);
    let attention =
        ["flash_forward", "flash_forward_combine", "flash_backward_prepare", "flash_backward", "portable_combine"];
    assert_eq!(of(&attention), [StepClass::Attention; 5]);
    let optimizer = ["packed_adamw", "packed_adamw_advance", "packed_adamw_float32", "adamw_update"];
    assert_eq!(of(&optimizer), [StepClass::Optimizer; 4]);
    assert_eq!(of(&["nvjet_sm90_tst_128x256_64x4_1x2_h_bz_coopA_TNT", "product"]), [StepClass::Products; 2]);
}

#[test]
fn kernels_of_compiled_pytorch_are_classed_by_what_they_compute() {
    let of = |names: &[&str]| names.iter().map(|name| class(name)).collect::<Vec<_>>();
    assert_eq!(
        of(&["triton_poi_fused__to_copy_3", "triton_poi_fused__to_copy_t_12", "triton_poi_fused__unsafe_view_clone_0"]),
        [StepClass::Copies; 3]
    );
    assert_eq!(
        of(&[
            "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_2",
            "triton_poi_fused__scaled_dot_product_flash_attention_mul_neg_1",
            "triton_per_fused_nll_loss_forward_0",
            "triton_poi_fused_5",
        ]),
        [StepClass::Elementwise; 4]
    );
    assert_eq!(of(&["triton_tem_fused_mm_7", "nvjet_tst_256x128_64x4_2x1_v_bz_NNN"]), [StepClass::Products; 2]);
    assert_eq!(
        of(&[
            "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_27_64x64x64_4x1x1_kernel0_0",
            "void cudnn::fusion::compute_dot_do_o_specialized<true, 384, 128, 128>(int)",
            "void cudnn::fusion::convert_dq_to_16bits<true, 384>(int)",
            "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(int)",
            "void pytorch_flash::flash_bwd_convert_dq_kernel<int>(int)",
        ]),
        [StepClass::Attention; 5]
    );
    let adam = "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous \
        namespace)::FusedOptimizerTensorListMetadata<4>, at::native::(anonymous namespace)::FusedAdamMathFunctor<float, \
        4, (at::native::ADAM_MODE)1, false> >(int)";
    let cast = "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)\
        ::{lambda()#3}::operator()() const::{lambda()#7}>(int)";
    let loss =
        "void at::native::(anonymous namespace)::nll_loss_forward_reduce_cuda_kernel_2d<float, float, long>(int)";
    assert_eq!(of(&[adam, cast, loss]), [StepClass::Optimizer, StepClass::Copies, StepClass::Elementwise]);
    assert_eq!(class("a_kernel_of_tomorrow"), StepClass::Other);
}

#[test]
fn overlapping_kernels_are_counted_once_and_the_classes_add_up_to_the_busy_time() {
    let trace = Trace {
        events: vec![
            event(Source::Call, "cudaGraphLaunch", 0, 900),
            event(Source::Operator, "aten::mm", 0, 900),
            event(Source::Kernel, "swiglu_forward", 150, 220),
            event(Source::Kernel, "nvjet_a", 100, 200),
            // Inside another one: it adds nothing to the busy time.
            event(Source::Kernel, "flash_forward", 110, 120),
            event(Source::Memcpy, "Memcpy DtoD (Device -> Device)", 300, 310),
            event(Source::Kernel, "a_kernel_of_tomorrow", 400, 401),
        ],
    };
    let profile = StepProfile::of(&trace, 1e-6).unwrap();
    let nanoseconds = |class| (profile.classes[&class].seconds * 1e9).round() as i64;
    assert_eq!(StepClass::ALL.map(nanoseconds), [100, 0, 20, 0, 10, 1]);
    assert_eq!(((profile.busy_s * 1e9).round(), profile.count()), (131.0, 5));
    assert_eq!((profile.kernels[0].name.as_str(), profile.kernels[0].class), ("nvjet_a", StepClass::Products));
    let json = serde_json::to_value(&profile).unwrap();
    assert_eq!(serde_json::from_value::<StepProfile>(json).unwrap(), profile);
    let empty = Trace { events: vec![event(Source::Call, "cudaGraphLaunch", 0, 900)] };
    assert!(StepProfile::of(&empty, 1.0).unwrap_err().to_string().contains("neither kernels nor operators"));
}

#[test]
fn on_a_cpu_operators_stand_in_for_kernels_with_their_own_times() {
    let trace = Trace {
        events: vec![
            event(Source::Range, "Optimizer.step#AdamW.step", 0, 500),
            event(Source::Operator, "CompiledFunction", 0, 100),
            event(Source::Operator, "aten::mm", 10, 70),
            event(Source::Operator, "aten::_to_copy", 200, 210),
            event(Source::Operator, "aten::copy_", 201, 208),
        ],
    };
    let profile = StepProfile::of(&trace, 1e-6).unwrap();
    let nanoseconds = |class| (profile.classes[&class].seconds * 1e9).round() as i64;
    assert_eq!(StepClass::ALL.map(nanoseconds), [60, 0, 40, 0, 7, 3]);
}

#[test]
fn the_floor_of_xl_is_that_of_the_peaks_by_hand() {
    let samples = |flops, bytes| {
        let work = Work { flops, bytes, precision: "bfloat16".into() };
        Samples::seconds(vec![1.5, 1.0], work).unwrap()
    };
    let config = Config::of_size(&TABLE_1[3], 10_000, 512);
    // 750 TFLOP/s and 4.2 TB/s.
    let rates = [samples(750e12, 0.0), samples(0.0, 4.2e12)];
    let floor = StepFloor::of(&config, 4, Precision::Bfloat16, &rates[0], &rates[1]).unwrap();
    let ms = |seconds: f64| (1e4 * seconds).round() / 10.0;
    assert_eq!((ms(floor.products_s), ms(floor.attention_s), ms(floor.optimizer_s)), (32.5, 0.8, 13.3));
    assert!((floor.total_s() - 46.5e-3).abs() < 1e-4, "{floor:?}");
    assert_eq!(floor.of_class(StepClass::Elementwise), None);
    // Without the work of its samples a rate is not known.
    let unknown = Samples::seconds_unbounded(vec![1.0]).unwrap();
    assert_eq!(StepFloor::of(&config, 4, Precision::Bfloat16, &rates[0], &unknown), None);
}
