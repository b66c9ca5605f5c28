//! Writes tensors to a safetensors file one at a time, so that no second copy of a model is ever in memory.

use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::path::Path;

use anyhow::{Context as _, Result, bail};
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use tch::{Device, Kind, Tensor};

/// Writes `tensors`, of any device and layout, under their names and in their order.
///
/// The format is that of huggingface's safetensors: 8 bytes of length, a header of JSON padded to 8 bytes, raw values.
/// Holds one tensor's values in host memory. Errors: another dtype than float64, float32, bfloat16 or int64; a
/// duplicate name; and those of the file, which is left incomplete.
pub fn write_safetensors(path: &Path, tensors: &[(String, Tensor)]) -> Result<()> {
    let header = header(tensors)?;
    let file = File::create(path).with_context(|| format!("failed to create {}", path.display()))?;
    let mut file = BufWriter::new(file);
    let write = |file: &mut BufWriter<File>, bytes: &[u8]| {
        file.write_all(bytes).with_context(|| format!("failed to write {}", path.display()))
    };
    write(&mut file, &(header.len() as u64).to_le_bytes())?;
    write(&mut file, &header)?;
    let mut bytes = Vec::new();
    for (name, tensor) in tensors {
        let here = tensor.f_detach()?.f_to_device(Device::Cpu)?.f_contiguous()?;
        bytes.resize(size_in_bytes(&here), 0);
        here.f_copy_data_u8(&mut bytes, here.numel()).with_context(|| format!("copying {name}"))?;
        write(&mut file, &bytes)?;
    }
    file.flush().with_context(|| format!("failed to write {}", path.display()))
}

fn header(tensors: &[(String, Tensor)]) -> Result<Vec<u8>> {
    let mut infos: Vec<(String, TensorInfo)> = Vec::with_capacity(tensors.len());
    let mut end = 0;
    for (name, tensor) in tensors {
        if infos.iter().any(|(other, _)| other == name) {
            bail!("two tensors are called {name}");
        }
        let start = end;
        end += size_in_bytes(tensor);
        let dtype = match tensor.f_kind()? {
            Kind::Double => Dtype::F64,
            Kind::Float => Dtype::F32,
            Kind::BFloat16 => Dtype::BF16,
            Kind::Int64 => Dtype::I64,
            other => bail!("{name} is {other:?}: only float64, float32, bfloat16 and int64 can be written"),
        };
        let shape = tensor.size().into_iter().map(usize::try_from).collect::<Result<_, _>>()?;
        infos.push((name.clone(), TensorInfo { dtype, shape, data_offsets: (start, end) }));
    }
    let mut header = serde_json::to_vec(&Metadata::new(None, infos)?)?;
    header.resize(header.len().next_multiple_of(8), b' ');
    Ok(header)
}

fn size_in_bytes(tensor: &Tensor) -> usize {
    tensor.numel() * tensor.kind().elt_size_in_bytes()
}

#[cfg(test)]
mod tests {
    use safetensors::SafeTensors;

    use super::*;

    #[test]
    fn the_safetensors_library_reads_the_written_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.safetensors");
        let matrix = Tensor::from_slice(&[1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0]).view([2, 3]).set_requires_grad(true);
        let tensors = [
            ("transposed".to_string(), matrix.transpose(0, 1)),
            ("scalar".to_string(), Tensor::from(7.5f64)),
            ("tokens".to_string(), Tensor::from_slice(&[1i64, -2])),
            ("narrow".to_string(), Tensor::from_slice(&[1.5f32]).to_kind(Kind::BFloat16)),
        ];
        write_safetensors(&path, &tensors).unwrap();
        let bytes = std::fs::read(&path).unwrap();
        let read = SafeTensors::deserialize(&bytes).unwrap();
        assert_eq!(read.len(), 4);
        let transposed = read.tensor("transposed").unwrap();
        assert_eq!((transposed.dtype(), transposed.shape()), (Dtype::F32, &[3, 2][..]));
        let expected: Vec<u8> = [1.0f32, 4.0, 2.0, 5.0, 3.0, 6.0].iter().flat_map(|x| x.to_le_bytes()).collect();
        assert_eq!(transposed.data(), expected);
        assert_eq!(read.tensor("scalar").unwrap().data(), 7.5f64.to_le_bytes());
        assert_eq!(read.tensor("scalar").unwrap().shape(), [0usize; 0]);
        assert_eq!(read.tensor("tokens").unwrap().data()[8..], (-2i64).to_le_bytes());
        assert_eq!(read.tensor("narrow").unwrap().data(), [0xc0, 0x3f]);
    }

    #[test]
    fn duplicate_names_and_other_dtypes_are_refused_by_name() {
        let path = tempfile::tempdir().unwrap().path().join("x");
        let t = |name: &str, kind| (name.to_string(), Tensor::ones([2], (kind, Device::Cpu)));
        let refused = |tensors: &[(String, Tensor)]| write_safetensors(&path, tensors).unwrap_err().to_string();
        assert!(refused(&[t("a", Kind::Float), t("a", Kind::Float)]).contains("two tensors are called a"));
        assert!(refused(&[t("a", Kind::Bool)]).contains("a is Bool"));
    }
}
