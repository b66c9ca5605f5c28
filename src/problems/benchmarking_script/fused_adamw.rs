//! Checks of the fused AdamW on a GPU, and its speed relative to the copy bandwidth.

use anyhow::{Result, ensure};
use tch::{Device, Kind, Tensor};

use crate::harness::problem::Verdict;
use crate::model::FusedAdamW;
use crate::model::optim::{AdamW, AdamWOptions};
use crate::torch::graph::{Captured, on_side_stream};
use crate::torch::random::SEED;
use crate::torch::{self, Generator};

pub mod variants;

const OPTIONS: AdamWOptions = AdamWOptions { lr: 1e-2, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.1 };

/// Every length that a thread, a chunk or a launch can end in, parameters that do not start on 16 bytes, and steps in
/// which some have no gradient.
///
/// The reference is [`AdamW`] in float64. The fused kernel rounds differently from the plain float32 one (fused
/// multiply-adds, the corrections as factors) but no more often, so it may be at most twice as far off.
pub fn matches_plain() -> Result<Verdict> {
    on_gpu(compare)
}

/// One parameter: in float32 after each optimizer, and in float64.
struct Parameter {
    name: String,
    fused: Tensor,
    plain: Tensor,
    exact: Tensor,
}

impl Parameter {
    /// Normal values, `offset` elements behind the start of their memory.
    fn new(index: usize, elements: i64, offset: i64, generator: &Generator) -> Result<Self> {
        let fused = normal(elements, offset, generator)?;
        let (plain, exact) = (fused.f_detach_copy()?, fused.f_to_kind(Kind::Double)?);
        Ok(Self { name: format!("parameter {index} ({elements} elements, offset {offset})"), fused, plain, exact })
    }

    fn error(&self, values: &Tensor) -> Result<f64> {
        let error = values.f_to_kind(Kind::Double)?.f_sub(&self.exact)?.f_abs()?.f_max()?.f_double_value(&[])?;
        ensure!(error.is_finite(), "{} holds a NaN or an infinity", self.name);
        Ok(error)
    }
}

fn normal(elements: i64, offset: i64, generator: &Generator) -> Result<Tensor> {
    Ok(generator.randn(&[elements + offset], Kind::Float)?.f_narrow(0, offset, elements)?)
}

fn compare(device: Device) -> Result<Verdict> {
    let lengths = [1, 2, 3, 5, 1023, 1024, 1600, 4095, 4096, 4097, 8193, (1 << 20) + 5];
    let mut shapes: Vec<(i64, i64)> = lengths.iter().flat_map(|&n| [(n, 0), (n, 1)]).collect();
    // More tensors than fit one launch.
    shapes.resize(800, (1600, 0));
    let generator = Generator::new(device, SEED)?;
    let parameters = (0..).zip(&shapes).map(|(i, &(n, offset))| Parameter::new(i, n, offset, &generator));
    let parameters = parameters.collect::<Result<Vec<_>>>()?;

    let mut fused = FusedAdamW::new(OPTIONS, device)?;
    let [mut plain, mut exact] = [AdamW::new(OPTIONS)?, AdamW::new(OPTIONS)?];
    for step in 0..6 {
        let lr = OPTIONS.lr / (step + 1) as f64;
        fused.set_lr(lr);
        plain.set_lr(lr);
        exact.set_lr(lr);
        // Each parameter skips every seventh step, so that their step counts differ.
        let given: Vec<usize> = (0..shapes.len()).filter(|i| (i + step) % 7 != 0).collect();
        let grads = given.iter().map(|&i| normal(shapes[i].0, shapes[i].1, &generator)).collect::<Result<Vec<_>>>()?;
        let items = || given.iter().map(|&i| &parameters[i]).zip(&grads);
        fused.update(&items().map(|(p, grad)| (p.name.as_str(), &p.fused, grad)).collect::<Vec<_>>())?;
        for (p, grad) in items() {
            plain.update(&p.name, &p.plain, grad)?;
            exact.update(&p.name, &p.exact, &grad.f_to_kind(Kind::Double)?)?;
        }
    }
    let (mut worst, mut largest, mut largest_plain) = ("", 0.0, 0.0f64);
    for p in &parameters {
        let error = p.error(&p.fused)?;
        if error > largest {
            (worst, largest) = (&p.name, error);
        }
        largest_plain = largest_plain.max(p.error(&p.plain)?);
    }
    let allowed = 2.0 * largest_plain;
    ensure!(largest <= allowed, "{worst} is off by {largest:.1e}, {allowed:.1e} allowed");
    Verdict::passed(format!("largest absolute error {largest:.1e}, of the plain one {largest_plain:.1e}"))
}

/// A captured step must increase its step count at each replay, and give the same bits as eager steps.
pub fn counts_replays() -> Result<Verdict> {
    on_gpu(replay)
}

fn on_gpu(check: fn(Device) -> Result<Verdict>) -> Result<Verdict> {
    torch::cuda_device(0).map_or_else(|error| Verdict::skipped(format!("{error:#}")), check)
}

fn replay(device: Device) -> Result<Verdict> {
    const EAGER: usize = 2;
    let generator = Generator::new(device, SEED)?;
    let eager_param = normal(100_003, 0, &generator)?;
    let captured_param = eager_param.f_detach_copy()?;
    let grads = (0..6).map(|_| normal(100_003, 0, &generator)).collect::<Result<Vec<_>>>()?;
    let mut eager = FusedAdamW::new(OPTIONS, device)?;
    grads.iter().try_for_each(|grad| eager.update(&[("p", &eager_param, grad)]))?;

    let mut captured = FusedAdamW::new(OPTIONS, device)?;
    // Where the captured step reads its gradient.
    let mut grad = grads[0].f_zeros_like()?;
    on_side_stream(device, || {
        grads[..EAGER].iter().try_for_each(|grad| captured.update(&[("p", &captured_param, grad)]))
    })?;
    let graph = Captured::capture(device, || captured.update(&[("p", &captured_param, &grad)]))?;
    for next in &grads[EAGER..] {
        grad.f_copy_(next)?;
        graph.replay()?;
    }
    let apart = captured_param.f_sub(&eager_param)?.f_abs()?.f_max()?.f_double_value(&[])?;
    ensure!(
        apart == 0.0,
        "after {} replays the parameter is {apart:.1e} from where eager steps leave it",
        grads.len() - EAGER
    );
    ensure!(graph.num_nodes() == 2, "a captured step has {} nodes, expected two kernels", graph.num_nodes());
    Verdict::passed(format!("{} replays, bit for bit", grads.len() - EAGER))
}
