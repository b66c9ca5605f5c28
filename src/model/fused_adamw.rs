//! AdamW for a whole model in a few launches of `kernels/adamw.cu`; float32 on CUDA, and fit for a CUDA graph.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, bail, ensure};
use tch::{Device, Kind, Tensor};

use super::optim::{AdamW, AdamWOptions, Optimizer};
use crate::cuda::{self, Kernel, LaunchConfig, Program};
use crate::error::Fault;
use crate::torch::autograd::changed_in_place;
use crate::torch::data_ptr::{Float32Pair, float32_pair};

mod caller_state;
mod table;

pub use caller_state::{CallersItem, step};
pub use table::Columns;
use table::{Advance, Entry, Factors, Table, Update};

/// The kernel's launch shape; the notebook in `kernels/adamw.cu` has the reasons.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Threads of a block.
    pub threads: u32,
    /// Blocks that a multiprocessor is to hold at once, which bounds the registers.
    pub blocks: u32,
    /// 16-byte loads that a thread has in flight from each of its four arrays.
    pub vectors: u32,
    /// Elements that a block updates.
    pub chunk: u32,
    /// Whether loads and stores are streaming (`__ldcs`, `__stcs`), so that caches evict them first.
    pub streaming: bool,
}

pub const SHAPE: Shape = Shape { threads: 512, blocks: 2, vectors: 2, chunk: 4096, streaming: true };

/// `kernels/adamw.cu` in `shape`.
pub fn program(shape: Shape) -> Program {
    let defines = [
        ("ADAMW_THREADS", shape.threads),
        ("ADAMW_BLOCKS", shape.blocks),
        ("ADAMW_VECTORS", shape.vectors),
        ("ADAMW_CHUNK", shape.chunk),
        ("ADAMW_TENSORS", table::TENSORS as u32),
        ("ADAMW_TABLE_WORDS", table::WORDS as u32),
        ("ADAMW_STREAMING", u32::from(shape.streaming)),
    ];
    Program::new("adamw.cu", defines)
}

/// The AdamW that suits `device`: [`FusedAdamW`] on CUDA, [`AdamW`] elsewhere.
pub fn adamw_for(device: Device, options: AdamWOptions) -> Result<Box<dyn Optimizer>> {
    Ok(match device {
        Device::Cuda(_) => Box::new(FusedAdamW::new(options, device)?),
        _ => Box::new(AdamW::new(options)?),
    })
}

/// [`AdamW`]'s update of every element, as one kernel over up to 600 tensors a launch.
///
/// A step reads and writes 28 bytes a parameter and allocates nothing once each parameter has been seen. It copies
/// nothing from the host and waits for nothing, so that it can be captured in a CUDA graph after one eager step. Each
/// replay then counts a step further, on the gradients at the addresses of the capture, with the learning rate of
/// the capture: [`FusedAdamW::set_lr`] changes later calls of `step`, not what was captured. The graph must not outlive
/// the optimizer, whose state it changes.
#[derive(Debug)]
pub struct FusedAdamW {
    options: AdamWOptions,
    device: Device,
    kernels: Kernels,
    state: BTreeMap<String, State>,
    /// Step counters, in tensors whose addresses do not change; the last tensor has room for `free` more.
    slabs: Vec<Tensor>,
    free: i64,
    /// The last step's launches, which the next step usually repeats.
    prepared: Prepared,
}

#[derive(Debug)]
struct Kernels {
    shape: Shape,
    advance: Kernel<Advance>,
    update: Kernel<Update>,
}

/// What a step launches, and for which tensors.
#[derive(Debug, Default)]
struct Prepared {
    names: Vec<String>,
    pairs: Vec<Float32Pair>,
    tables: Vec<Table>,
}

#[derive(Debug)]
struct State {
    m: Tensor,
    v: Tensor,
    /// The address of the kernel's `Progress`, two words of a slab.
    progress: u64,
}

/// Counters in one allocation.
const SLAB: i64 = 1024;
/// Words of a counter.
const COUNTER_WORDS: i64 = 2;
/// Threads of a block of the kernel that counts the steps.
const ADVANCE_THREADS: u32 = 128;

/// Bytes of the counters of this number of parameters, in addition to the moments.
pub fn counter_bytes(tensors: u64) -> u64 {
    8 * (COUNTER_WORDS * SLAB) as u64 * tensors.div_ceil(SLAB as u64)
}

impl FusedAdamW {
    /// Compiles the kernel, or takes it from the cache, and loads it.
    ///
    /// Errors: [`crate::error::Fault::NotAvailable`] unless `device` is a GPU that is there; options that
    /// [`AdamWOptions::validate`] refuses; a kernel that does not compile.
    pub fn new(options: AdamWOptions, device: Device) -> Result<Self> {
        options.validate()?;
        if !device.is_cuda() {
            return Err(Fault::NotAvailable { needs: "a CUDA GPU".into(), has: format!("{device:?}") }.into());
        }
        Self::with_shape(options, device, SHAPE)
    }

    /// As [`FusedAdamW::new`], with another launch shape; on the CPU, for tests, in the emulator.
    pub fn with_shape(options: AdamWOptions, device: Device, shape: Shape) -> Result<Self> {
        options.validate()?;
        Ok(Self {
            options,
            device,
            kernels: Kernels::load(device, shape)?,
            state: BTreeMap::new(),
            slabs: Vec::new(),
            free: 0,
            prepared: Prepared::default(),
        })
    }

    /// For the steps from here on; a captured step keeps the rate that it was captured with.
    pub fn set_lr(&mut self, lr: f64) {
        self.options.lr = lr;
    }

    /// Updates parameters, each given as its name, itself and its gradient (same shape), all in one go.
    ///
    /// Errors: what is not contiguous float32 on this optimizer's device, by name; memory that two parameters share.
    pub fn update(&mut self, items: &[(&str, &Tensor, &Tensor)]) -> Result<()> {
        let mut pairs = Vec::with_capacity(items.len());
        for (name, param, grad) in items {
            pairs.push(self.pair(param, grad).with_context(|| format!("updating {name}"))?);
        }
        let Prepared { names, pairs: last, .. } = &self.prepared;
        if *last != pairs || names.iter().ne(items.iter().map(|(name, ..)| name)) {
            self.prepared = self.prepare(items, pairs)?;
        }
        self.prepared.tables.iter().try_for_each(|table| self.kernels.launch(&self.options, table))?;
        items.iter().try_for_each(|(_, param, _)| changed_in_place(param))
    }

    fn pair(&self, param: &Tensor, grad: &Tensor) -> Result<Float32Pair> {
        if let Some(pair) = float32_pair(param, grad, self.device)? {
            return Ok(pair);
        }
        require_fit("it", param, self.device)?;
        require_fit("its gradient", grad, self.device)?;
        bail!("gradient {:?}, parameter {:?}", grad.size(), param.size())
    }

    fn prepare(&mut self, items: &[(&str, &Tensor, &Tensor)], pairs: Vec<Float32Pair>) -> Result<Prepared> {
        let mut entries = Vec::with_capacity(items.len());
        for ((name, param, _), pair) in items.iter().zip(&pairs) {
            entries.push(self.entry(name, param, *pair).with_context(|| format!("updating {name}"))?);
        }
        table::require_apart(&entries, |i| items[i].0)?;
        let names = items.iter().map(|(name, ..)| name.to_string()).collect();
        Ok(Prepared { names, pairs, tables: table::tables(&entries, self.kernels.shape.chunk)? })
    }

    fn entry(&mut self, name: &str, param: &Tensor, pair: Float32Pair) -> Result<Entry> {
        if !self.state.contains_key(name) {
            let state = self.new_state(param)?;
            self.state.insert(name.to_string(), state);
        }
        let State { m, v, progress } = &self.state[name];
        ensure!(m.size() == param.size(), "it had shape {:?} in earlier steps", m.size());
        let [m, v] = [m, v].map(|tensor| tensor.data_ptr() as u64);
        let Float32Pair { parameter: p, gradient: g, elements, .. } = pair;
        Ok(Entry { p, g, m, v, progress: *progress, elements })
    }

    fn new_state(&mut self, param: &Tensor) -> Result<State> {
        let _no_grad = tch::no_grad_guard();
        if self.free == 0 {
            self.slabs.push(Tensor::f_zeros([SLAB, COUNTER_WORDS], (Kind::Int64, self.device))?);
            self.free = SLAB;
        }
        let slab = self.slabs.last().context("there is a slab")?;
        let progress = slab.data_ptr() as u64 + 8 * (COUNTER_WORDS * (SLAB - self.free)) as u64;
        self.free -= 1;
        Ok(State { m: param.f_zeros_like()?, v: param.f_zeros_like()?, progress })
    }
}

impl Kernels {
    fn load(device: Device, shape: Shape) -> Result<Self> {
        let module = cuda::load(device, &program(shape)).context("preparing the fused AdamW")?;
        Ok(Self { shape, advance: module.kernel()?, update: module.kernel()? })
    }

    fn launch(&self, options: &AdamWOptions, table: &Table) -> Result<()> {
        let AdamWOptions { lr, beta1, beta2, eps, weight_decay } = *options;
        let advance = Advance { table: *table.columns, lr, beta1, beta2 };
        let blocks = table.tensors.div_ceil(ADVANCE_THREADS);
        self.advance.launch(LaunchConfig::line(blocks, ADVANCE_THREADS), &advance)?;
        if table.chunks == 0 {
            return Ok(());
        }
        let factors = Factors {
            decay: (1.0 - lr * weight_decay) as f32,
            blend1: (1.0 - beta1) as f32,
            beta2: beta2 as f32,
            blend2: (1.0 - beta2) as f32,
            eps: eps as f32,
            unused: 0.0,
        };
        let update = Update { table: *table.columns, factors };
        self.update.launch(LaunchConfig::line(table.chunks, self.shape.threads), &update)
    }
}

/// Checks that the kernel can read `tensor`.
fn require_fit(what: &str, tensor: &Tensor, device: Device) -> Result<()> {
    let (is, kind) = (tensor.device(), tensor.kind());
    ensure!(
        is == device,
        "{what} is on {is:?} and the optimizer on {device:?}: move the model, or make another optimizer"
    );
    ensure!(kind == Kind::Float, "{what} is {kind:?}, and FusedAdamW is for Float: use AdamW, which takes every kind");
    let strides = tensor.stride();
    ensure!(tensor.is_contiguous(), "{what} is not contiguous (strides {strides:?}): call contiguous(), or use AdamW");
    Ok(())
}

impl Optimizer for FusedAdamW {
    fn step(&mut self, parameters: &[(String, Tensor)]) -> Result<()> {
        let grads = parameters.iter().map(|(_, param)| param.f_grad()).collect::<Result<Vec<_>, _>>()?;
        let pairs = parameters.iter().zip(&grads).filter(|(_, grad)| grad.defined());
        let items: Vec<_> = pairs.map(|((name, param), grad)| (name.as_str(), param, grad)).collect();
        self.update(&items)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::fault_of;
    use crate::torch::Generator;

    #[test]
    fn the_kernels_steps_are_those_of_adamw() {
        let options = AdamWOptions { weight_decay: 0.1, ..AdamWOptions::default() };
        let mut fused = FusedAdamW::with_shape(options, Device::Cpu, SHAPE).unwrap();
        let mut plain = AdamW::new(options).unwrap();
        let generator = Generator::new(Device::Cpu, 11).unwrap();
        let draw = |n: i64| generator.randn(&[n], Kind::Float).unwrap();
        let none = generator.randn(&[], Kind::Float).unwrap();
        // More than a chunk, a whole number of vectors, less than one vector, and a tensor that begins at an unaligned
        // address, and one of no dimensions.
        let ours = [draw(5001), draw(128), draw(3), draw(1025).narrow(0, 1, 1023), none];
        let theirs: Vec<Tensor> = ours.iter().map(Tensor::copy).collect();
        let names = ["a", "b", "c", "d", "e"];
        for _ in 0..3 {
            let gradients: Vec<Tensor> =
                ours.iter().map(|p| generator.randn(&p.size(), Kind::Float).unwrap()).collect();
            let items = |tensors: &[Tensor]| -> Vec<(&str, Tensor, Tensor)> {
                let all = names.iter().zip(tensors).zip(&gradients);
                all.map(|((name, p), g)| (*name, p.shallow_clone(), g.shallow_clone())).collect()
            };
            let (a, b) = (items(&ours), items(&theirs));
            fused.update(&a.iter().map(|(name, p, g)| (*name, p, g)).collect::<Vec<_>>()).unwrap();
            for (name, p, g) in &b {
                plain.update(name, p, g).unwrap();
            }
        }
        for (name, (ours, theirs)) in names.iter().zip(ours.iter().zip(&theirs)) {
            assert!(ours.allclose(theirs, 1e-5, 1e-7, false), "{name} is off by {:?}", (ours - theirs).abs().max());
        }
    }

    #[test]
    fn a_tensor_that_the_kernel_cannot_read_is_named_with_a_remedy() {
        let tensor = |kind| Tensor::zeros([4, 6], (kind, Device::Cpu));
        let message = |tensor: &Tensor, device| require_fit("its gradient", tensor, device).unwrap_err().to_string();
        let elsewhere = message(&tensor(Kind::Float), Device::Cuda(0));
        assert!(elsewhere.contains("its gradient is on Cpu and the optimizer on Cuda(0): move"), "{elsewhere}");
        let narrow = message(&tensor(Kind::BFloat16), Device::Cpu);
        assert!(narrow.contains("is BFloat16") && narrow.contains("use AdamW"), "{narrow}");
        let turned = message(&tensor(Kind::Float).tr(), Device::Cpu);
        assert!(turned.contains("not contiguous (strides [1, 6])"), "{turned}");
        require_fit("it", &tensor(Kind::Float).narrow(0, 1, 2), Device::Cpu).unwrap();
    }

    #[test]
    fn a_missing_gpu_is_a_typed_fault_and_bad_options_are_named_first() {
        let missing = FusedAdamW::new(AdamWOptions::default(), Device::Cpu).unwrap_err();
        assert!(matches!(fault_of(&missing), Some(Fault::NotAvailable { .. })), "{missing:#}");
        let options = AdamWOptions { beta1: 1.0, ..AdamWOptions::default() };
        assert!(FusedAdamW::new(options, Device::Cpu).unwrap_err().to_string().contains("beta1 is 1"));
        adamw_for(Device::Cpu, AdamWOptions::default()).unwrap();
    }

    #[test]
    fn a_full_chunk_leaves_no_thread_without_work() {
        let Shape { threads, vectors, chunk, .. } = SHAPE;
        assert_eq!(chunk % (4 * threads * vectors), 0);
        assert!(program(SHAPE).defines.contains(&("ADAMW_TENSORS", "600".to_string())));
    }
}
