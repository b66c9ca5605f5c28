//! The columns of the grid: those entries of the table of attention implementations that are timed.

use tch::{Device, Kind};

use crate::attention::IMPLEMENTATIONS;
use crate::attention::implementations::{Group, Implementation, Run, Timed, Units};
use crate::bench::dtype::Dtype;
use crate::subject::attention::FlashFunction;

/// In the order of the tables.
pub fn columns() -> Vec<Implementation> {
    IMPLEMENTATIONS.iter().filter(|implementation| implementation.timed != Timed::Nowhere).copied().collect()
}

/// A subject's two functions, in the order of the tables.
pub const THEIRS: [(Implementation, FlashFunction); 2] = [
    (of_subject("subject_pytorch", "theirs, PyTorch"), FlashFunction::PyTorch),
    (of_subject("subject_triton", "theirs, Triton"), FlashFunction::Triton),
];

const fn of_subject(name: &'static str, label: &'static str) -> Implementation {
    let (group, float32) = (Group::Subject, Units::Tensor);
    Implementation { name, label, group, float32, kernels: &[], run: Run::InSubject, timed: Timed::Everywhere }
}

/// Whether the column has cells for such inputs; the error says why not.
pub fn takes_part(column: &Implementation, kind: Kind, device: Device, head_dim: i64) -> Result<(), String> {
    if column.timed == Timed::OnCpu && device != Device::Cpu {
        return Err("a loop of tensor operations, timed on the CPU only; on a GPU the kernels stand for it".into());
    }
    column.supports(kind, device, head_dim)?;
    match (column.timed, kind) {
        (Timed::InSixteenBits, Kind::Float) => Err("in float32 they are what the column \"ours\" runs".into()),
        _ => Ok(()),
    }
}

/// The roof that a column's speed is held to: that of tensor cores where it may use them for float32.
pub fn precision(column: &Implementation, dtype: Dtype) -> &'static str {
    match (dtype, column.float32) {
        (Dtype::Float32, Units::Tensor) => "tf32",
        _ => dtype.name(),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::attention::FLASH_KERNELS;
    use crate::attention::implementations::Group;

    #[test]
    fn every_kernel_file_is_watched() {
        let used: BTreeSet<_> = columns().iter().flat_map(|column| column.kernels).collect();
        assert_eq!(used, FLASH_KERNELS.iter().collect::<BTreeSet<_>>());
    }

    #[test]
    fn every_cell_has_a_column_of_each_group_on_its_device() {
        // Without a GPU our kernels refuse, so that the GPU's side is left to the check that runs there.
        for kind in [Kind::BFloat16, Kind::Float] {
            for d in [16, 32, 64, 128] {
                for group in [Group::Plain, Group::Ours, Group::Pytorch] {
                    let found =
                        columns().iter().any(|e| e.group == group && takes_part(e, kind, Device::Cpu, d).is_ok());
                    assert!(found, "{group:?} {kind:?} {d}");
                }
                for group in [Group::Plain, Group::Pytorch] {
                    let gpu = Device::Cuda(0);
                    assert!(columns().iter().any(|e| e.group == group && takes_part(e, kind, gpu, d).is_ok()));
                }
            }
        }
    }
}
