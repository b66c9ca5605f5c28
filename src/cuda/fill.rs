//! Memory filled with zeros without a kernel of libtorch's.

use anyhow::{Context as _, Result, ensure};
use cudarc::driver::{result, sys};
use tch::{Device, Tensor};

use super::launch::{context_of, in_context};
use crate::torch;

/// Fills a dense tensor with zero bytes, in the order of libtorch's operators of this thread, and does not wait for it:
/// a fill of CUDA's own, which a graph's capture records.
pub fn clear(tensor: &Tensor) -> Result<()> {
    ensure!(tensor.is_contiguous(), "strides of {:?} leave gaps", tensor.stride());
    let device = tensor.device();
    let Device::Cuda(index) = device else {
        let _same = tensor.shallow_clone().f_zero_()?;
        return Ok(());
    };
    let (address, bytes) = (tensor.data_ptr() as u64, tensor.numel() * tensor.kind().elt_size_in_bytes());
    let (context, stream) = (context_of(index)?, torch::stream::current_stream(device)?);
    // SAFETY: the tensor's memory is of so many bytes; libtorch gives it to later work of the same stream only.
    let fill = || unsafe { result::memset_d8_async(address, 0, bytes, stream as sys::CUstream) };
    in_context(&context, fill).with_context(|| format!("clearing {bytes} bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_cleared_is_zero_and_has_no_gaps() {
        let tensor = Tensor::ones([3, 4], (tch::Kind::Int, Device::Cpu));
        clear(&tensor.narrow(0, 1, 1)).unwrap();
        assert_eq!(tensor.sum_dim_intlist(1i64, false, tch::Kind::Int), Tensor::from_slice(&[4i32, 0, 4]));
        assert!(clear(&tensor.narrow(1, 1, 2)).is_err());
    }
}
