//! Tensor maps, with which TMA copies boxes of a tensor to and from shared memory.

use anyhow::{Context as _, Result, ensure};
use cudarc::driver::sys::{self, CUtensorMapDataType_enum as DataType, CUtensorMapSwizzle_enum as Swizzle};
use tch::{Device, Kind, Tensor};

use super::emulator;
use super::params::FieldType;
use crate::torch;

/// An encoded tensor map (`CUtensorMap`), which a kernel takes by value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C, align(128))]
pub struct TensorMap([u64; 16]);

impl FieldType for TensorMap {
    const C_TYPE: &'static str = "TensorMap";
}

impl TensorMap {
    /// Of a (batch, heads, rows, columns) tensor of 16-bit elements, for boxes of `box_rows` rows and `box_columns`
    /// columns, swizzled over the bytes of a box's row where they are 32, 64 or 128.
    ///
    /// [`Self::fits`] must accept the tensor. Errors: the driver's.
    pub fn of(tensor: &Tensor, box_rows: u32, box_columns: u32) -> Result<Self> {
        let (sizes, strides) = layout(tensor).map_err(anyhow::Error::msg)?;
        ensure!((1..=256).contains(&box_rows), "a box has {box_rows} rows, not 1 to 256");
        let row = 2 * box_columns;
        ensure!(row.is_multiple_of(16) && row <= 512, "a box's row has {row} bytes, no multiple of 16 up to 512");
        if tensor.device() == Device::Cpu {
            return Ok(Self(emulator::tensor_map(tensor, box_rows, box_columns)?));
        }
        torch::cuda_device(0)?;
        let kind = match tensor.kind() {
            Kind::Half => DataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
            _ => DataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        };
        let swizzle = match row {
            128 => Swizzle::CU_TENSOR_MAP_SWIZZLE_128B,
            64 => Swizzle::CU_TENSOR_MAP_SWIZZLE_64B,
            32 => Swizzle::CU_TENSOR_MAP_SWIZZLE_32B,
            _ => Swizzle::CU_TENSOR_MAP_SWIZZLE_NONE,
        };
        // The stride of a dimension of one element is not used; it may be anything.
        let step = |i: usize| if sizes[i] == 1 { 16 } else { 2 * strides[i] };
        let (strides, boxes, ones) = ([step(2), step(1), step(0)], [box_columns, box_rows, 1, 1], [1u32; 4]);
        let sizes = [sizes[3], sizes[2], sizes[1], sizes[0]];
        let mut map = sys::CUtensorMap { opaque: [0; 16] };
        // SAFETY: every array has as many elements as the rank says (one fewer for the strides) and outlives the call,
        // which writes the map and reads no device memory.
        let result = unsafe {
            sys::cuTensorMapEncodeTiled(
                &mut map,
                kind,
                4,
                tensor.data_ptr(),
                sizes.as_ptr(),
                strides.as_ptr(),
                boxes.as_ptr(),
                ones.as_ptr(),
                sys::CUtensorMapInterleave_enum::CU_TENSOR_MAP_INTERLEAVE_NONE,
                swizzle,
                sys::CUtensorMapL2promotion_enum::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                sys::CUtensorMapFloatOOBfill_enum::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        };
        result.result().with_context(|| format!("encoding a map of sizes {sizes:?} and strides {strides:?}"))?;
        Ok(Self(map.opaque))
    }

    /// Whether TMA can read `tensor` in its layout; the error says why not.
    pub fn fits(tensor: &Tensor) -> Result<(), String> {
        layout(tensor).map(drop)
    }
}

/// Sizes and strides, in elements, of a tensor whose layout TMA can read; the error says why it cannot.
fn layout(tensor: &Tensor) -> Result<([u64; 4], [u64; 4]), String> {
    let (sizes, strides) = (tensor.size(), tensor.stride());
    if sizes.len() != 4 || !matches!(tensor.kind(), Kind::Half | Kind::BFloat16) {
        return Err(format!(
            "a map is of four dimensions of float16 or bfloat16, not {sizes:?} of {:?}",
            tensor.kind()
        ));
    }
    if strides[3] != 1 && sizes[3] > 1 {
        return Err(format!("rows must be contiguous, their stride is {}", strides[3]));
    }
    if !(tensor.data_ptr() as usize).is_multiple_of(16) {
        return Err("the first element does not lie at a multiple of 16 bytes".into());
    }
    if let Some(i) = (0..3).find(|&i| sizes[i] > 1 && (strides[i] <= 0 || 2 * strides[i] % 16 != 0)) {
        return Err(format!("the stride of dimension {i} is {}, no positive multiple of 8 elements", strides[i]));
    }
    // Neither is negative; a stride that is never taken may be zero.
    Ok(([0, 1, 2, 3].map(|i| sizes[i] as u64), [0, 1, 2, 3].map(|i| strides[i] as u64)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn zeros(sizes: &[i64], kind: Kind) -> Tensor {
        Tensor::zeros(sizes, (kind, Device::Cpu))
    }

    #[test]
    fn a_tensor_that_tma_cannot_read_is_refused_with_the_reason() {
        let tensor = zeros(&[2, 3, 5, 16], Kind::BFloat16);
        assert_eq!(TensorMap::fits(&tensor), Ok(()));
        assert_eq!(TensorMap::fits(&tensor.transpose(1, 2)), Ok(()));
        let error = TensorMap::of(&tensor, 8, 12).unwrap_err().to_string();
        assert!(error.contains("24 bytes, no multiple of 16"), "{error}");
        let message = |tensor: &Tensor| TensorMap::fits(tensor).unwrap_err();
        assert!(message(&zeros(&[5, 16], Kind::Half)).contains("four dimensions"));
        assert!(message(&tensor.to_kind(Kind::Float)).contains("Float"));
        assert!(message(&tensor.transpose(2, 3)).contains("rows must be contiguous"));
        assert!(message(&zeros(&[1, 1, 5, 12], Kind::Half)).contains("stride of dimension 2 is 12"));
        assert!(message(&zeros(&[1, 1, 1, 16], Kind::Half).expand([1, 1, 5, 16], false)).contains("dimension 2 is 0"));
        assert!(message(&tensor.narrow(3, 1, 8)).contains("multiple of 16 bytes"));
        // The stride of one row is not used.
        assert_eq!(TensorMap::fits(&zeros(&[1, 1, 1, 12], Kind::Half)), Ok(()));
    }
}
