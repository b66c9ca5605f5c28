//! What NVLink can carry at most.

use anyhow::Result;

use crate::collective::Backend;
use crate::harness::floor;
use crate::harness::record::Machine;

/// One GPU's NVLink in one direction, in bytes per second: 18 links of 25 GB/s (data sheets of the H100 SXM and the H200).
pub const NVLINK: f64 = 450e9;
const GPUS_WITH_NVLINK: [&str; 2] = ["NVIDIA H100 80GB HBM3", "NVIDIA H200"];

/// Whether ranks of `backend` on `machine` communicate over [`NVLINK`].
pub fn is_over_nvlink(backend: Backend, machine: &Machine) -> bool {
    backend == Backend::Nccl
        && !machine.gpus.is_empty()
        && machine.gpus.iter().all(|gpu| GPUS_WITH_NVLINK.contains(&gpu.name.as_str()))
}

/// Errors: a time of `bytes` in which NVLink does not carry them once. Each rank sends its tensor at least once in an all-reduce,
/// also where the switch adds.
pub fn require_carried(bytes: u64, seconds: f64) -> Result<()> {
    let speed = format!("{:.0} GB/s of NVLink", NVLINK / 1e9);
    floor::above(seconds, (bytes as f64, "B"), (NVLINK, &speed), "NVIDIA's data sheet")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::answer::made_up::machine;

    #[test]
    fn nvlink_carries_a_tensor_once_in_its_time_and_a_tenth_less() {
        require_carried(450_000_000, 0.92e-3).unwrap();
        let said = require_carried(450_000_000, 0.9e-3).unwrap_err().to_string();
        assert!(said.contains("4.500e8 B at 450 GB/s of NVLink"), "{said}");
        let on = |gpu| is_over_nvlink(Backend::Nccl, &machine(Some(gpu)));
        assert_eq!((on("NVIDIA H200"), on("NVIDIA H200 NVL")), (true, false));
        assert!(!is_over_nvlink(Backend::Gloo, &machine(Some("NVIDIA H200"))));
        assert!(!is_over_nvlink(Backend::Nccl, &machine(None)));
    }
}
