//! Readings of NVIDIA's management library (NVML) for the first GPU: its present condition and its limits.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::OnceLock;

use anyhow::{Context as _, Result, anyhow};
use cudarc::driver::result as driver;
use nvml_wrapper::bitmasks::device::ThrottleReasons;
use nvml_wrapper::enum_wrappers::device::{Clock, TemperatureSensor};
use nvml_wrapper::{Device, Nvml};

use crate::harness::conditions::{Reading, Throttle};
use crate::torch;

const REASONS: [(ThrottleReasons, Throttle); 9] = [
    (ThrottleReasons::GPU_IDLE, Throttle::GpuIdle),
    (ThrottleReasons::APPLICATIONS_CLOCKS_SETTING, Throttle::ApplicationsClocksSetting),
    (ThrottleReasons::SW_POWER_CAP, Throttle::SwPowerCap),
    (ThrottleReasons::HW_SLOWDOWN, Throttle::HwSlowdown),
    (ThrottleReasons::SYNC_BOOST, Throttle::SyncBoost),
    (ThrottleReasons::SW_THERMAL_SLOWDOWN, Throttle::SwThermalSlowdown),
    (ThrottleReasons::HW_THERMAL_SLOWDOWN, Throttle::HwThermalSlowdown),
    (ThrottleReasons::HW_POWER_BRAKE_SLOWDOWN, Throttle::HwPowerBrakeSlowdown),
    (ThrottleReasons::DISPLAY_CLOCK_SETTING, Throttle::DisplayClockSetting),
];

/// The GPU's condition; `None` if the library or one of the figures is missing.
pub fn reading() -> Option<Reading> {
    read(device().as_ref().ok()?).ok()
}

/// The power limit and the highest clocks, for a run's settings; empty without the library.
pub fn limits() -> BTreeMap<String, String> {
    let Ok(device) = device() else { return BTreeMap::new() };
    let limits = [
        ("power_limit", device.enforced_power_limit().map(|milliwatts| format!("{} W", milliwatts / 1000))),
        ("max_sm_clock", device.max_clock_info(Clock::SM).map(|mhz| format!("{mhz} MHz"))),
        ("max_memory_clock", device.max_clock_info(Clock::Memory).map(|mhz| format!("{mhz} MHz"))),
    ];
    limits.into_iter().filter_map(|(name, value)| Some((name.to_string(), value.ok()?))).collect()
}

/// What the first GPU has used since its driver was loaded, in joules. The counter moves in steps of some milliseconds.
pub fn energy_j() -> Result<f64> {
    let device = device().as_ref().map_err(|error| anyhow!("{error:#}"))?;
    let millijoules = device.total_energy_consumption().context("the management library has no energy counter here")?;
    Ok(millijoules as f64 / 1e3)
}

/// The first GPU's SM clock now.
pub fn sm_clock_hz() -> Result<f64> {
    let device = device().as_ref().map_err(|error| anyhow!("{error:#}"))?;
    Ok(f64::from(device.clock_info(Clock::SM).context("no SM clock")?) * 1e6)
}

/// The library's version, and whether it gives readings, for `cs336 doctor`.
pub fn describe() -> Result<String> {
    let device = device().as_ref().map_err(|error| anyhow!("{error:#}"))?;
    let Reading { sm_clock_hz, power_w, temperature_c, .. } = read(device)?;
    let version = library()?.sys_nvml_version()?;
    Ok(format!("{version}: SM clock {:.0} MHz, {power_w:.0} W, {temperature_c:.0} °C now", sm_clock_hz / 1e6))
}

fn read(device: &Device) -> Result<Reading> {
    let clock = |clock| device.clock_info(clock).map(|mhz| f64::from(mhz) * 1e6);
    // An old GPU may report a clock but no throttle reasons.
    let reasons = device.current_throttle_reasons().unwrap_or(ThrottleReasons::empty());
    Ok(Reading {
        sm_clock_hz: clock(Clock::SM).context("no SM clock")?,
        memory_clock_hz: clock(Clock::Memory).context("no memory clock")?,
        power_w: f64::from(device.power_usage().context("no power")?) / 1e3,
        temperature_c: f64::from(device.temperature(TemperatureSensor::Gpu).context("no temperature")?),
        throttle: throttle(reasons),
    })
}

fn throttle(reasons: ThrottleReasons) -> BTreeSet<Throttle> {
    REASONS.into_iter().filter(|(flag, _)| reasons.contains(*flag)).map(|(_, reason)| reason).collect()
}

fn library() -> Result<&'static Nvml> {
    static LIBRARY: OnceLock<Result<Nvml, String>> = OnceLock::new();
    let library = LIBRARY.get_or_init(|| Nvml::init().map_err(|error| error.to_string()));
    library.as_ref().map_err(|error| anyhow!("libnvidia-ml.so.1 cannot be used ({error})"))
}

fn device() -> &'static Result<Device<'static>> {
    static DEVICE: OnceLock<Result<Device<'static>>> = OnceLock::new();
    DEVICE.get_or_init(|| {
        // NVML lists all GPUs of the host in bus order. CUDA may see fewer, in another order.
        let uuid = uuid().context("the CUDA driver names no first GPU")?;
        let id = format!("GPU-{uuid}");
        library()?.device_by_uuid(id.as_str()).with_context(|| format!("the management library has no {id}"))
    })
}

/// The UUID of the first CUDA device, from the driver and without creating a context.
fn uuid() -> Result<String> {
    // Without the driver's library cudarc panics instead of returning an error.
    torch::cuda_device(0)?;
    driver::init()?;
    Ok(hyphenated(driver::device::get_uuid(driver::device::get(0)?)?.bytes.map(|byte| byte as u8)))
}

/// Sixteen bytes as `01020304-0506-0708-090a-0b0c0d0e0f10`.
fn hyphenated(bytes: [u8; 16]) -> String {
    let groups = [&bytes[..4], &bytes[4..6], &bytes[6..8], &bytes[8..10], &bytes[10..]];
    groups.map(|group| group.iter().map(|byte| format!("{byte:02x}")).collect::<String>()).join("-")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uuid_is_written_as_nvml_writes_it() {
        let bytes: [u8; 16] = std::array::from_fn(|i| i as u8 + 1);
        assert_eq!(hyphenated(bytes), "01020304-0506-0708-090a-0b0c0d0e0f10");
    }

    #[test]
    fn every_throttle_reason_of_nvml_has_a_name() {
        assert_eq!(throttle(ThrottleReasons::all()).len(), REASONS.len());
        let known = REASONS.iter().fold(ThrottleReasons::empty(), |all, (flag, _)| all | *flag);
        assert_eq!(known, ThrottleReasons::all());
        assert!(throttle(ThrottleReasons::NONE).is_empty());
    }

    #[test]
    fn without_a_gpu_there_is_no_reading_and_describe_says_why() {
        if torch::cuda_device(0).is_err() {
            assert!(reading().is_none() && limits().is_empty());
            for error in [describe().map(drop), energy_j().map(drop), sm_clock_hz().map(drop)] {
                assert!(format!("{:#}", error.unwrap_err()).contains("GPU"));
            }
        }
    }
}
