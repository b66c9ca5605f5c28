//! Tensors in safetensors files: those that anybody may have written, and ours.

use std::borrow::Cow;
use std::path::Path;

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, View};
use tch::{Kind, Tensor};

use crate::error::without_frames;
use crate::printable::shown_path;

/// Of `at::DimVector` in PyTorch's TensorIterator, which refuses more.
const MAX_DIMS: usize = 64;

/// The element types that files and PyTorch have in common.
const KINDS: [(Dtype, Kind); 10] = [
    (Dtype::F64, Kind::Double),
    (Dtype::F32, Kind::Float),
    (Dtype::F16, Kind::Half),
    (Dtype::BF16, Kind::BFloat16),
    (Dtype::I64, Kind::Int64),
    (Dtype::I32, Kind::Int),
    (Dtype::I16, Kind::Int16),
    (Dtype::I8, Kind::Int8),
    (Dtype::U8, Kind::Uint8),
    (Dtype::BOOL, Kind::Bool),
];

/// The tensor of a view, on the CPU.
///
/// Errors: PyTorch has no such tensor, or no memory for it.
pub fn tensor(view: &TensorView) -> Result<Tensor> {
    let Some((_, kind)) = KINDS.into_iter().find(|(dtype, _)| *dtype == view.dtype()) else {
        bail!("its dtype {:?} is not supported", view.dtype());
    };
    let (shape, dims) = (view.shape(), view.shape().len());
    ensure!(dims <= MAX_DIMS, "it has {dims} dimensions, and PyTorch computes with at most {MAX_DIMS}");
    // As libtorch counts the elements between two of a dimension: an empty one counts as one.
    let elements = shape.iter().try_fold(1_i64, |n, &size| n.checked_mul(i64::try_from(size.max(1)).ok()?));
    ensure!(elements.is_some(), "it has shape {shape:?}, which is more than a tensor can have");
    let size: Vec<i64> = shape.iter().map(|&n| n as i64).collect();
    Tensor::f_from_data_size(view.data(), &size, kind).map_err(|error| anyhow!(without_frames(&error.to_string())))
}

/// Writes tensors of any device and layout into the file at `path`, each under its name. A file there is replaced whole.
///
/// Errors: a tensor is sparse or has an element type that files lack; the file cannot be written.
pub fn write(tensors: &[(impl AsRef<str>, impl AsRef<Tensor>)], path: &Path) -> Result<()> {
    let writing = || format!("failed to write {}", shown_path(path));
    let saved = tensors.iter().map(|(name, tensor)| Ok((name.as_ref(), Saved::of(tensor.as_ref())?)));
    let saved: Vec<_> = saved.collect::<Result<_>>().with_context(writing)?;
    safetensors::serialize_to_file(saved, None, path).with_context(writing)
}

/// A tensor whose bytes are copied when their turn comes, so that no second copy of a model is in memory.
struct Saved {
    tensor: Tensor,
    dtype: Dtype,
    shape: Vec<usize>,
}

impl Saved {
    fn of(tensor: &Tensor) -> Result<Self> {
        let kind = tensor.kind();
        let Some((dtype, _)) = KINDS.into_iter().find(|(_, known)| *known == kind) else {
            bail!("no safetensors file holds tensors of {kind:?}");
        };
        ensure!(!tensor.is_sparse(), "no safetensors file holds sparse tensors");
        let shape = tensor.size().into_iter().map(|size| size as usize).collect();
        Ok(Self { tensor: tensor.shallow_clone(), dtype, shape })
    }
}

impl View for Saved {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        let mut bytes = vec![0; self.data_len()];
        self.tensor.copy_data_u8(&mut bytes, self.tensor.numel());
        bytes.into()
    }

    fn data_len(&self) -> usize {
        self.tensor.numel() * self.tensor.kind().elt_size_in_bytes()
    }
}

#[cfg(test)]
mod tests {
    use tch::Device;

    use super::*;

    #[test]
    fn tensors_of_every_element_type_and_layout_are_read_as_they_were_written() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tensors");
        let first = Tensor::arange(6, (Kind::Double, Device::Cpu)).reshape([2, 3]);
        let tensors = KINDS.map(|(_, kind)| (format!("{kind:?}"), first.to_kind(kind).transpose(0, 1)));
        write(&tensors, &path).unwrap();
        let read = Tensor::read_safetensors(&path).unwrap();
        assert_eq!(read.len(), KINDS.len());
        for (name, tensor) in &tensors {
            let (_, found) = read.iter().find(|(known, _)| known == name).unwrap();
            assert_eq!((found.kind(), found.size()), (tensor.kind(), vec![3, 2]), "{name}");
            assert!(found.equal(tensor), "{name}");
        }
    }

    #[test]
    fn what_cannot_be_written_is_said_with_the_file_and_the_reason() {
        let folder = tempfile::tempdir().unwrap();
        let tensor = Tensor::zeros([1], (Kind::Float, Device::Cpu));
        let said = |tensor: &Tensor, name: &str| {
            format!("{:#}", write(&[("x", tensor)], &folder.path().join(name)).unwrap_err())
        };
        let missing = said(&tensor, "no/where");
        assert!(
            missing.starts_with("failed to write ") && missing.contains("no/where: I/O error: No such"),
            "{missing}"
        );
        let complex = said(&tensor.to_kind(Kind::ComplexFloat), "x");
        assert!(complex.ends_with("no safetensors file holds tensors of ComplexFloat"), "{complex}");
    }
}
