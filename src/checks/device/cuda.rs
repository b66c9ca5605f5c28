//! GPU checks of CUDA: streams that wait for each other, and readings of clock, power and temperature.

use anyhow::{Context as _, Result, ensure};
use tch::{Kind, Tensor};

use crate::bench::nvml::{limits, reading};
use crate::cuda::{Event, Stream};
use crate::harness::device::DeviceCheck;
use crate::harness::problem::Verdict;
use crate::torch::cuda_device;

pub const CHECKS: &[DeviceCheck] = &[
    DeviceCheck::new(
        "events_order_two_streams_and_time_them",
        "An event makes one stream wait for another's work, and two events give the device time between them.",
        events_order_two_streams_and_time_them,
    ),
    DeviceCheck::new(
        "a_gpu_tells_its_clock_power_and_temperature",
        "NVIDIA's management library gives the first GPU's clock, power, temperature and limits.",
        a_gpu_tells_its_clock_power_and_temperature,
    ),
];

fn events_order_two_streams_and_time_them() -> Result<Verdict> {
    let device = cuda_device(0)?;
    let (stream, before, after) = (Stream::new(device)?, Event::new(device, true)?, Event::new(device, true)?);
    let matrix = Tensor::f_ones([4096, 4096], (Kind::Float, device))?;
    before.record_current()?;
    let product = matrix.f_matmul(&matrix)?;
    let done = Event::new(device, false)?;
    done.record_current()?;
    stream.wait_for(&done)?;
    after.record_on(&stream)?;
    after.wait()?;
    ensure!(after.has_passed()? && done.has_passed()?, "an event that was waited for has not passed");
    let seconds = after.seconds_since(&before)?;
    ensure!(seconds > 1e-4, "{seconds} s: a product of 137 GFLOP takes longer than that");
    ensure!(product.f_double_value(&[0, 0])? == 4096.0, "the product is wrong");
    Verdict::passed(format!("{:.2} ms", 1e3 * seconds))
}

fn a_gpu_tells_its_clock_power_and_temperature() -> Result<Verdict> {
    cuda_device(0)?;
    let reading = reading().context("the management library gives no reading")?;
    ensure!(reading.sm_clock_hz > 1e8 && reading.power_w > 1.0 && reading.temperature_c > 0.0, "{reading:?}");
    let limits = limits();
    let ends_with = |name: &str, unit: &str| limits.get(name).is_some_and(|limit| limit.ends_with(unit));
    ensure!(ends_with("power_limit", " W") && ends_with("max_sm_clock", " MHz"), "{limits:?}");
    Verdict::passed(format!("SM clock {:.0} MHz, {:.0} W", reading.sm_clock_hz / 1e6, reading.power_w))
}
