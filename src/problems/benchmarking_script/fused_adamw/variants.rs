//! The variants of the kernel's notebook: each way of dividing the work, compared with a copy on the same machine.

use anyhow::{Context as _, Result, ensure};
use tch::{Device, Kind, Tensor};

use super::OPTIONS;
use crate::bench::machine::copy_bandwidth;
use crate::bench::timing::lap;
use crate::error::Fault;
use crate::harness::device::DeviceCheck;
use crate::harness::problem::Verdict;
use crate::harness::stats::{self, median};
use crate::model::fused_adamw::{SHAPE, Shape};
use crate::model::sizes::VOCAB_SIZE;
use crate::model::{Config, FusedAdamW, SizeName};
use crate::torch::random::SEED;
use crate::torch::{Generator, cuda_device, memory};

pub const CHECKS: &[DeviceCheck] = &[DeviceCheck::new(
    "every_variant_of_the_fused_adamw_gives_the_same_bits",
    "Each way of dividing the kernel's work gives the same parameters, for the smallest and a large model.",
    every_variant_gives_the_same_bits,
)
.with_kernels(&["adamw.cu"])];

/// The first variant of the search.
const FIRST: Shape = Shape { threads: 256, blocks: 5, vectors: 2, chunk: 4096, streaming: true };

/// Variants that change one setting each, and the final choice.
const VARIANTS: [Shape; 11] = [
    FIRST,
    Shape { streaming: false, ..FIRST },
    Shape { vectors: 1, blocks: 6, ..FIRST },
    Shape { vectors: 1, blocks: 6, streaming: false, ..FIRST },
    Shape { vectors: 4, blocks: 2, ..FIRST },
    Shape { blocks: 4, ..FIRST },
    Shape { chunk: 2048, ..FIRST },
    Shape { chunk: 16_384, ..FIRST },
    Shape { chunk: 65_536, ..FIRST },
    Shape { threads: 128, blocks: 10, ..FIRST },
    SHAPE,
];

/// Sixteen steps on copies of `parameters`: the result, and the median seconds of a step with the device synchronised after it.
fn steps(shape: Shape, parameters: &[(String, Tensor, Tensor)], device: Device) -> Result<(Vec<Tensor>, f64)> {
    let updated: Vec<Tensor> = parameters.iter().map(|(_, param, _)| param.copy()).collect();
    let items: Vec<_> =
        parameters.iter().zip(&updated).map(|((name, _, grad), param)| (name.as_str(), param, grad)).collect();
    let mut adamw = FusedAdamW::with_shape(OPTIONS, device, shape)?;
    let seconds = (0..16).map(|_| Ok(lap(device, || adamw.update(&items))?.1)).collect::<Result<Vec<_>>>()?;
    Ok((updated, median(&seconds[3..])))
}

/// XL: parameters, gradients, a variant's parameters and state, and the first variant's parameters.
const NEEDED_BYTES: u64 = 64_000_000_000;

fn every_variant_gives_the_same_bits() -> Result<Verdict> {
    let device = cuda_device(0)?;
    let has = memory::info(device)?.total_bytes;
    if has < NEEDED_BYTES {
        let (needs, has) = ("a GPU of 64 GB".into(), format!("one of {} GB", has / 1_000_000_000));
        return Err(Fault::NotAvailable { needs, has }.into());
    }
    let copy = copy_bandwidth(device)?;
    let bandwidth = copy.work.context("a copy has its bytes")?.bytes / median(&copy.samples);
    let mut notes = vec![format!("a copy moves {:.2} TB/s", bandwidth / 1e12)];
    for size in [SizeName::Small, SizeName::Xl] {
        let config = Config::of_size(size.size(), VOCAB_SIZE, 128);
        let generator = Generator::new(device, SEED)?;
        let normal = |shape: &[i64]| generator.randn(shape, Kind::Float);
        let parameters = config.parameter_shapes().map(|(name, shape)| Ok((name, normal(&shape)?, normal(&shape)?)));
        let parameters = parameters.collect::<Result<Vec<_>>>()?;
        let (expected, _) = steps(FIRST, &parameters, device)?;
        // A step moves 28 bytes for each parameter.
        let bytes = 28.0 * config.num_parameters() as f64;
        let mut shares = Vec::new();
        for shape in VARIANTS {
            let (updated, seconds) =
                steps(shape, &parameters, device).with_context(|| format!("{size:?}, {shape:?}"))?;
            for ((name, ..), (ours, first)) in parameters.iter().zip(updated.iter().zip(&expected)) {
                ensure!(ours.equal(first), "{size:?}, {shape:?}: {name} differs from the first variant's");
            }
            shares.push(100.0 * bytes / seconds / bandwidth);
        }
        let kept = shares.last().context("there are variants")?;
        let (least, most) = (stats::min(&shares), stats::max(&shares));
        notes.push(format!("{size:?}: {least:.0} to {most:.0} % of that, kept {kept:.0} %"));
    }
    Verdict::passed(notes.join("; "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::{Arch, Compiler};
    use crate::model::fused_adamw::program;

    #[test]
    fn every_variant_compiles() {
        let cache = tempfile::tempdir().unwrap();
        let compiler = Compiler { cache: cache.path().to_path_buf(), ..Compiler::of_this_tree().unwrap() };
        for shape in VARIANTS {
            compiler.build(&program(shape), Arch::HOPPER).unwrap_or_else(|error| panic!("{shape:?}: {error:#}"));
        }
    }
}
