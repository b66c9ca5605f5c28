//! Reads the tensors that a subject has left in a file, which may hold anything.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use rustix::fs::OFlags;
use safetensors::SafeTensors;
use tch::Tensor;

use crate::torch::safetensors::tensor;
use crate::units::MIB;

/// The most bytes of results for each byte of inputs, and beside that: a function may save its scores, which are n² for n inputs.
const BYTES_FOR_EACH: u64 = 16;
const BYTES_BESIDE: u64 = 256 << 20;

/// The tensors of `file`, which must not be a link: it could lead to a file that only we may read. It is removed. `given_bytes`
/// is the size of the inputs that they were computed from.
pub fn read(file: &Path, given_bytes: u64) -> Result<BTreeMap<String, Tensor>> {
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let open = File::options().read(true).custom_flags(flags.bits() as i32).open(file)?;
    ensure!(open.metadata()?.is_file(), "it is not a regular file");
    // A later job that writes nothing must not seem to have left this one's.
    std::fs::remove_file(file)?;
    let most = BYTES_BESIDE + BYTES_FOR_EACH * given_bytes;
    let mut bytes = Vec::new();
    let length = open.metadata()?.len();
    // A subject may lengthen it meanwhile.
    if length <= most {
        open.take(most + 1).read_to_end(&mut bytes)?;
    }
    let length = length.max(bytes.len() as u64);
    let mib = |bytes: u64| (bytes as f64 / MIB).ceil();
    ensure!(length <= most, "the results have {} MiB, may have {} MiB for these inputs", mib(length), mib(most));
    let tensors = SafeTensors::deserialize(&bytes)?.tensors();
    tensors.into_iter().map(|(name, view)| Ok((name.clone(), tensor(&view).with_context(|| name)?))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file of results with this header, and after it `values` bytes that take no disk.
    fn left(header: &str, values: u64) -> (tempfile::TempDir, std::path::PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("results");
        std::fs::write(&path, [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat()).unwrap();
        File::options().write(true).open(&path).unwrap().set_len(8 + header.len() as u64 + values).unwrap();
        (folder, path)
    }

    #[test]
    fn results_are_read_once_and_their_file_is_removed() {
        let (_folder, path) = left(r#"{"o": {"dtype": "F32", "shape": [2, 0, 3], "data_offsets": [0, 0]}}"#, 0);
        assert_eq!(read(&path, 0).unwrap()["o"].size(), [2, 0, 3]);
        assert!(read(&path, 0).is_err());
    }

    #[test]
    fn a_shape_that_no_tensor_has_is_named_without_lines_of_c_plus_plus() {
        let header = r#"{"saved.1": {"dtype": "F32", "shape": [0, 4611686018427387904, 4611686018427387904], "data_offsets": [0, 0]}}"#;
        let (_folder, path) = left(header, 0);
        let said = format!("{:#}", read(&path, 0).unwrap_err());
        let shape = "[0, 4611686018427387904, 4611686018427387904]";
        assert_eq!(said, format!("saved.1: it has shape {shape}, which is more than a tensor can have"));
    }

    #[test]
    fn more_than_the_inputs_can_give_is_refused_before_it_is_read() {
        let size = (4_u64 << 30) - 4096;
        let header = format!(r#"{{"o": {{"dtype": "U8", "shape": [{size}], "data_offsets": [0, {size}]}}}}"#);
        let (_folder, path) = left(&header, size);
        let said = format!("{:#}", read(&path, 1 << 20).unwrap_err());
        assert_eq!(said, "the results have 4096 MiB, may have 272 MiB for these inputs");
    }
}
