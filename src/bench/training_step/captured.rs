//! Replays of a whole training step (forward, backward, AdamW) that was captured as one CUDA graph.

use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use tch::{Device, Tensor};

use super::eager::{StepBench, samples};
use super::{Capture, Params, Row, total_work};
use crate::bench::model_bench::Batch;
use crate::bench::tolerance;
use crate::cuda::Choice;
use crate::harness::samples::Samples;
use crate::model::Transformer;
use crate::model::fused::OwnChoice;
use crate::torch::clock::Lap;
use crate::torch::graph::{Captured, on_side_stream};
use crate::torch::stream::synchronize;

/// Times replays of a whole step.
pub fn measure(params: &Params, device: Device) -> Result<Row> {
    let (mut step, warmup) = CapturedStep::warmed_up(params, device)?;
    let loss_error = step.prove()?;
    let laps = (0..params.steps).map(|_| step.timed_replay()).collect::<Result<Vec<_>>>()?;
    let (total, total_device) = samples(laps.into_iter().map(Some), total_work(params))?;
    let (products, own_products) = step.choices();
    Ok(Row {
        parameters: params.config().num_parameters(),
        first_in_process: false,
        warmup: samples(warmup.into_iter().map(Some), total_work(params))?.0,
        forward: None,
        forward_device: None,
        backward: None,
        backward_device: None,
        optimizer: None,
        optimizer_device: None,
        total: total.context("no step was timed")?,
        total_device,
        capture: Some(Capture {
            nodes: step.num_nodes(),
            time: Samples::seconds_unbounded(vec![step.capture_seconds()])?,
            loss_error,
            products,
            own_products,
        }),
    })
}

/// A captured training step. A replay trains on the tokens that its batch tensors hold.
pub struct CapturedStep {
    // Declared first, so that it is dropped before the tensors that its kernels use.
    graph: Captured<Tensor>,
    batch: Batch,
    bench: StepBench,
    capture_seconds: f64,
}

impl CapturedStep {
    /// Warm-up steps of a new model on the side stream, and their laps; then the captured step.
    pub fn warmed_up(params: &Params, device: Device) -> Result<(Self, Vec<Lap>)> {
        let (bench, laps) = on_side_stream(device, || {
            let mut bench = StepBench::new(params, device)?;
            let laps = bench.whole_steps(params.warmup).context("in a warm-up step")?;
            Ok((bench, laps))
        })?;
        Ok((Self::new(bench)?, laps))
    }

    /// Captures the step of a bench that has already run on the side stream. The capture itself does not train.
    pub fn new(mut bench: StepBench) -> Result<Self> {
        let batch = bench.model.draw()?;
        let start = Instant::now();
        let graph = Captured::capture(bench.model.device, || bench.train(&batch))?;
        Ok(Self { graph, batch, bench, capture_seconds: start.elapsed().as_secs_f64() })
    }

    pub fn num_nodes(&self) -> u64 {
        self.graph.num_nodes()
    }

    pub fn capture_seconds(&self) -> f64 {
        self.capture_seconds
    }

    /// As [`StepBench::product_choices`].
    pub fn choices(&self) -> (Vec<Choice>, Vec<OwnChoice>) {
        self.bench.product_choices()
    }

    pub fn model(&self) -> &Transformer {
        &self.bench.model.model
    }

    /// Runs one step on `batch` and waits for it. Returns the loss before the step.
    pub fn replay_on(&self, batch: &Batch) -> Result<f64> {
        self.batch.load(batch)?;
        self.graph.replay()?;
        synchronize(self.bench.model.device)?;
        Ok(self.graph.output().f_double_value(&[])?)
    }

    /// One step on the tokens of the last one; it returns before the device has finished.
    pub fn replay(&self) -> Result<()> {
        self.graph.replay()
    }

    /// Times one step on fresh random tokens. Drawing them is not timed.
    pub fn timed_replay(&self) -> Result<Lap> {
        self.batch.load(&self.bench.model.draw()?)?;
        Ok(self.bench.stopwatch.lap(|| self.graph.replay())?.1)
    }

    /// [`prove_replays`] on one batch.
    pub fn prove(&mut self) -> Result<f64> {
        let batch = self.bench.model.draw()?;
        let eager = || Ok(self.bench.forward(&batch, true)?.f_double_value(&[])?);
        let tolerance = tolerance::replayed_loss(self.bench.params.dtype);
        prove_replays(eager, || self.replay_on(&batch), true, tolerance)
            .context("comparing the captured step with an eager one")
    }
}

/// Compares two replays on one batch with eager forward passes in the same state, all by their losses. The first differs if
/// the graph computes something else, the second, where it `trains`, if it trains other parameters than the model's.
///
/// Returns the largest relative difference.
pub fn prove_replays(
    eager: impl Fn() -> Result<f64>,
    replay: impl Fn() -> Result<f64>,
    trains: bool,
    tolerance: f64,
) -> Result<f64> {
    let mut largest = 0.0f64;
    let mut losses = Vec::new();
    for _ in 0..2 {
        let (eager, replayed) = (eager()?, replay()?);
        let error = (replayed / eager - 1.0).abs();
        // Written so that a loss that is not a number fails.
        ensure!(error <= tolerance, "the loss is {replayed} in a replay and {eager} in an eager forward pass");
        largest = largest.max(error);
        losses.push(replayed);
    }
    let trained = losses[0] != losses[1];
    ensure!(trained || !trains, "a replayed step left the loss on its batch at {}: nothing was trained", losses[0]);
    Ok(largest)
}

#[cfg(test)]
mod tests {
    use super::super::{Execution, StepPass, measure_on};
    use super::*;
    use crate::attention::ImplementationName;
    use crate::error::{Fault, fault_of};
    use crate::model::{Precision, SizeName};

    #[test]
    fn a_step_is_not_captured_on_the_cpu() {
        let params = Params {
            size: SizeName::Tiny,
            context_length: 8,
            batch_size: 1,
            vocab_size: 50,
            pass: StepPass::TrainingStep,
            dtype: Precision::Float32,
            attention: ImplementationName::Naive,
            execution: Execution::Captured,
            allow_tf32: false,
            warmup: 1,
            steps: 1,
        };
        let fused = Params { execution: Execution::Fused, ..params.clone() };
        let tf32 = Params { execution: Execution::Eager, allow_tf32: true, ..params.clone() };
        for params in [params, fused, tf32] {
            let error = measure_on(&params, Device::Cpu, false).unwrap_err();
            assert!(matches!(fault_of(&error), Some(Fault::NotAvailable { .. })), "{error:#}");
        }
    }
}
