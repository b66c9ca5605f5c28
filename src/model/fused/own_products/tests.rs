//! Our products in the emulator, beside libtorch's.

use rstest::rstest;

use super::*;
use crate::cuda::emulator;
use crate::cuda::layout::{Expected, Layout, compare};
use crate::model::Precision;
use crate::model::fused::kernels::{self, Kernels};
use crate::torch::Generator;
use crate::torch::random::SEED;

#[test]
fn the_parameters_lie_as_the_kernels_declare_them() {
    let conditions = || vec![format!("threads == {THREADS}"), format!("rows == {ROWS}"), format!("depth == {DEPTH}")];
    for (shape, kernel) in [(false, Layout::of::<Plain>()), (true, Layout::of::<Gated>())] {
        let shape = Shape::on(Device::Cuda(0), shape);
        let tile = [
            format!("outputs == {}", shape.outputs()),
            format!("box == {}", shape.box_rows()),
            format!("panel == {}", shape.panel()),
            format!("1024 + barriers_at + 8 * (2 * stages + 2) == {}", shape.shared_bytes()),
        ];
        let structs = vec![Layout::of::<Problem>()];
        let conditions = conditions().into_iter().chain(tile).collect();
        compare(&shape.program(), &Expected { structs, kernels: vec![kernel], conditions }).unwrap();
    }
}

fn normal(size: [i64; 2], seed: i64) -> Tensor {
    Generator::new(Device::Cpu, seed).unwrap().randn(&size, Kind::BFloat16).unwrap()
}

fn poisoned(size: [i64; 2]) -> Tensor {
    Tensor::full(size, f64::NAN, (Kind::BFloat16, Device::Cpu))
}

fn require_near(got: &Tensor, exact: &Tensor) {
    let rounded = exact.to_kind(Kind::BFloat16).to_kind(Kind::Float);
    let error = ((got.to_kind(Kind::Float) - &rounded).norm() / rounded.norm()).double_value(&[]);
    // Sums in another order round another way now and then.
    assert!(error < 1e-3, "it is off by {error:.1e}");
}

/// One tile and several, ragged in every size, with fewer and with more steps than buffers.
#[rstest]
#[case(1, 8, 8)]
#[case(129, 208, 48)]
#[case(70, 416, 464)]
#[case(400, 16, 144)]
fn a_product_is_that_of_libtorch(#[case] rows: i64, #[case] columns: i64, #[case] inner: i64) {
    let own = OwnProducts::on(Device::Cpu).unwrap().unwrap();
    let (x, weight, y) = (normal([rows, inner], SEED), normal([columns, inner], SEED + 1), poisoned([rows, columns]));
    assert!(OwnProducts::takes(&x, &weight, &y));
    own.forward(&x, &weight, &y).unwrap();
    require_near(&y, &x.to_kind(Kind::Float).matmul(&weight.to_kind(Kind::Float).tr()));
}

#[rstest]
#[case(1, 8, 8)]
#[case(129, 112, 48)]
#[case(70, 208, 464)]
fn a_gated_product_is_that_of_libtorch_and_its_swiglu(#[case] rows: i64, #[case] columns: i64, #[case] inner: i64) {
    let own = OwnProducts::on(Device::Cpu).unwrap().unwrap();
    let (x, weight) = (normal([rows, inner], SEED), normal([2 * columns, inner], SEED + 1) * 0.2);
    let (gate_up, activated) = (poisoned([rows, 2 * columns]), poisoned([rows, columns]));
    own.gated(&x, &weight, &gate_up, &activated).unwrap();
    require_near(&gate_up, &x.to_kind(Kind::Float).matmul(&weight.to_kind(Kind::Float).tr()));
    let [gate, up] = [0, columns].map(|at| gate_up.narrow(1, at, columns).to_kind(Kind::Float));
    require_near(&activated, &(gate.silu() * up));
    let shape = kernels::Shape { precision: Precision::Bfloat16, d_model: 8, vocabulary: 8 };
    let separate = poisoned([rows, columns]);
    Kernels::load(Device::Cpu, shape).unwrap().swiglu_forward(&gate_up, &separate).unwrap();
    assert_eq!(activated, separate, "in every bit as swiglu.cu");
}

#[test]
fn matrices_that_the_copy_engine_cannot_read_are_left_to_the_library() {
    let [x, weight, y] = [[8, 32], [16, 32], [8, 16]].map(poisoned);
    assert!(OwnProducts::takes(&x, &weight, &y));
    assert!(!OwnProducts::takes(&x.to_kind(Kind::Float), &weight, &y));
    assert!(!OwnProducts::takes(&x.narrow(1, 8, 16), &weight, &y));
    assert!(!OwnProducts::takes(&x, &poisoned([12, 32]), &poisoned([8, 12])));
}

/// One block has nine tiles, whose steps go round its buffers several times, in random orders of threads and copies.
#[test]
fn a_product_repeats_in_every_bit_whoever_waits_for_whom() {
    let own = OwnProducts::on(Device::Cpu).unwrap().unwrap();
    let (x, weight) = (normal([300, 328], SEED), normal([416, 328], SEED + 1));
    let run = |seed, multiprocessors| {
        let settings = |settings: &mut emulator::Settings| *settings = emulator::Settings { seed, multiprocessors };
        let y = poisoned([300, 416]);
        emulator::with(settings, || own.forward(&x, &weight, &y)).unwrap();
        y
    };
    let expected = run(1, 132);
    require_near(&expected, &x.to_kind(Kind::Float).matmul(&weight.to_kind(Kind::Float).tr()));
    for seed in 2..6 {
        assert_eq!(run(seed, 1), expected, "seed {seed}");
    }
}
