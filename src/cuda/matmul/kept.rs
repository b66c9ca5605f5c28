//! Chosen algorithms on disk, beside the compiled kernels, so that the next process need not time them again.

use std::io::Read as _;

use anyhow::Result;
use serde::{Deserialize, Serialize};

use super::Choice;
use super::descriptors::Shape;
use crate::cuda::jit::digest;
use crate::cuda::trusted_folder::TrustedFolder;

/// All that a choice depends on. An entry of another key is never read, so that nothing here need be cleaned up.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Key {
    /// The GPU's name.
    pub device: String,
    /// As the library tells it.
    pub cublaslt: usize,
    /// Sizes, strides, orders and types.
    pub shape: String,
    pub allow_tf32: bool,
    /// What the product does to its result beside storing it.
    pub epilogue: String,
    pub workspace_bytes: usize,
}

/// A choice, and cuBLASLt's own words for its algorithm. In a file its JSON follows a line with the digest of that JSON.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Kept {
    pub algorithm: [u64; 8],
    pub choice: Choice,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    key: Key,
    kept: Kept,
}

impl Key {
    pub fn of(shape: &Shape, allow_tf32: bool, device: &str, cublaslt: usize, workspace_bytes: usize) -> Self {
        // A format that changes with the code only means that choices are timed again.
        let shape = format!("{shape:?}");
        Self { device: device.into(), cublaslt, shape, allow_tf32, epilogue: "none".into(), workspace_bytes }
    }

    fn file_name(&self) -> Result<String> {
        Ok(format!("cublaslt-{}.json", digest([&serde_json::to_vec(self)?[..]].into_iter())))
    }
}

impl Kept {
    /// `None` if there is no intact entry of this key: then it is timed again.
    pub fn read(cache: &TrustedFolder, key: &Key) -> Option<Self> {
        let mut text = String::new();
        cache.file(&key.file_name().ok()?).ok()?.read_to_string(&mut text).ok()?;
        let (sum, json) = text.split_once('\n')?;
        let entry: Entry = serde_json::from_str(json).ok()?;
        (sum == sum_of(json) && entry.key == *key).then_some(entry.kept)
    }

    pub fn write(&self, cache: &TrustedFolder, key: &Key) -> Result<()> {
        let json = serde_json::to_string(&Entry { key: key.clone(), kept: self.clone() })?;
        cache.write(&key.file_name()?, &[sum_of(&json).as_bytes(), b"\n", json.as_bytes()]).map(drop)
    }
}

fn sum_of(json: &str) -> String {
    digest([json.as_bytes()].into_iter())
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;
    use std::path::Path;

    use tch::{Device, Kind, Tensor};

    use super::*;

    fn shape(m: i64) -> Shape {
        let zeros = |size: [i64; 2]| Tensor::zeros(size, (Kind::Float, Device::Cpu));
        Shape::of(&zeros([m, 4]), &zeros([4, 5]), &zeros([m, 5])).unwrap()
    }

    fn key(m: i64, allow_tf32: bool, device: &str, cublaslt: usize) -> Key {
        Key::of(&shape(m), allow_tf32, device, cublaslt, 1 << 20)
    }

    fn kept() -> Kept {
        let choice = Choice {
            m: 3,
            n: 5,
            k: 4,
            transposed: [false, true],
            tried: 8,
            first_s: 1.861_600_071_191_787_7e-5,
            best_s: 1.7259e-5,
            algorithm: [66, 29, 35, 1, 5],
            from_cache: false,
        };
        // Larger than what a double holds.
        Kept { algorithm: [u64::MAX, 1, 2, 3, 4, 5, 6, (1 << 53) + 1], choice }
    }

    fn only_file(folder: &Path) -> std::path::PathBuf {
        let mut files: Vec<_> = fs::read_dir(folder).unwrap().map(|file| file.unwrap().path()).collect();
        assert_eq!(files.len(), 1, "{files:?}");
        files.remove(0)
    }

    #[test]
    fn a_choice_is_read_as_it_was_written_and_under_no_other_key() {
        let folder = tempfile::tempdir().unwrap();
        let cache = TrustedFolder::open(&folder.path().join("kernels")).unwrap();
        let of = |m, tf32, device, cublaslt| Kept::read(&cache, &key(m, tf32, device, cublaslt));
        assert_eq!(of(3, false, "NVIDIA H200", 130_100), None);
        kept().write(&cache, &key(3, false, "NVIDIA H200", 130_100)).unwrap();
        assert_eq!(of(3, false, "NVIDIA H200", 130_100), Some(kept()));
        assert_eq!(of(2, false, "NVIDIA H200", 130_100), None);
        assert_eq!(of(3, true, "NVIDIA H200", 130_100), None);
        assert_eq!(of(3, false, "NVIDIA H100", 130_100), None);
        assert_eq!(of(3, false, "NVIDIA H200", 130_200), None);
    }

    #[test]
    fn a_damaged_choice_is_not_read_and_is_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("kernels");
        let cache = TrustedFolder::open(&path).unwrap();
        let (key, kept) = (key(3, false, "NVIDIA H200", 130_100), kept());
        kept.write(&cache, &key).unwrap();
        let file = only_file(&path);
        let whole = fs::read_to_string(&file).unwrap();
        let damages = [whole[..whole.len() / 2].to_string(), whole.replace("18446744073709551615", "7"), String::new()];
        for damaged in damages {
            assert_ne!(damaged, whole);
            fs::write(&file, &damaged).unwrap();
            assert_eq!(Kept::read(&cache, &key), None, "{damaged}");
        }
        kept.write(&cache, &key).unwrap();
        assert_eq!(Kept::read(&cache, &key), Some(kept));
        // As others could write it, it may be theirs.
        fs::set_permissions(only_file(&path), fs::Permissions::from_mode(0o666)).unwrap();
        assert_eq!(Kept::read(&cache, &key), None);
    }
}
