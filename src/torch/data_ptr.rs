//! The addresses of a parameter and its gradient for a kernel outside libtorch, in one call.

use anyhow::Result;
use tch::{Device, Tensor};

pub use super::bridge::ffi::Float32Pair;
use super::bridge::{borrow, check, ffi};

/// The pair's addresses; `None` unless both are contiguous float32 tensors of one shape on `device`.
///
/// An optimizer calls this for hundreds of tensors a step. Separate calls for device, dtype, strides and shape would
/// each cross the boundary, and some would allocate.
pub fn float32_pair(parameter: &Tensor, gradient: &Tensor, device: Device) -> Result<Option<Float32Pair>> {
    let cuda_index = match device {
        Device::Cpu => -1,
        Device::Cuda(index) => i32::try_from(index)?,
        _ => return Ok(None),
    };
    let pair = check(ffi::float32_pair(borrow(parameter), borrow(gradient), cuda_index))?;
    Ok(pair.fits.then_some(pair))
}

#[cfg(test)]
mod tests {
    use tch::Kind;

    use super::*;

    #[test]
    fn only_contiguous_float32_pairs_of_one_shape_have_pointers() {
        let zeros = |shape: &[i64], kind| Tensor::zeros(shape, (kind, Device::Cpu));
        let (p, g) = (zeros(&[4, 6], Kind::Float), zeros(&[4, 6], Kind::Float));
        let pair = float32_pair(&p, &g, Device::Cpu).unwrap().unwrap();
        assert_eq!((pair.parameter, pair.gradient), (p.data_ptr() as u64, g.data_ptr() as u64));
        assert_eq!(pair.elements, 24);
        for other in [
            zeros(&[6, 4], Kind::Float),
            zeros(&[6, 4], Kind::Float).tr(),
            zeros(&[4, 6], Kind::BFloat16),
            zeros(&[4, 6], Kind::Double),
        ] {
            assert_eq!(float32_pair(&p, &other, Device::Cpu).unwrap(), None, "{other:?}");
            assert_eq!(float32_pair(&other, &g, Device::Cpu).unwrap(), None, "{other:?}");
        }
        assert_eq!(float32_pair(&p, &g, Device::Cuda(0)).unwrap(), None);
        // A gradient that is not there.
        assert_eq!(float32_pair(&p, &p.grad(), Device::Cpu).unwrap(), None);
    }
}
