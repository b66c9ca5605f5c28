//! Matrix products by cuBLASLt, each shape with the algorithm that was the fastest when all that fit were tried.
//!
//! cuBLAS picks an algorithm by a model of the GPU. Where the model is wrong a product takes a tenth or more longer than it
//! need: trying takes milliseconds a shape, once a GPU and version of cuBLASLt. What was chosen is kept beside the compiled kernels.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, Once, PoisonError};

use anyhow::{Context as _, Result, bail, ensure};
use cudarc::cublaslt::{result, sys};
use cudarc::driver::CudaContext;
use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Tensor};

use self::descriptors::{Descriptors, Shape};
use self::kept::{Kept, Key};
use super::counters::{COUNTER_BYTES, take_clear};
use super::device::{context_of, keeping_current};
use super::jit::Compiler;
use super::stream::least_seconds;
use super::trusted_folder::TrustedFolder;
use crate::torch;

mod descriptors;
mod kept;

/// What NVIDIA recommends on Hopper.
const WORKSPACE_BYTES: usize = 32 << 20;
/// Algorithms that cuBLASLt is asked for; it lists eight for a bfloat16 product on an H200. Tile, cluster and order set by hand, 4,224
/// combinations that its check accepts, gained at most 3 % over these for the products of XL (2026-11-24, 2,048 tokens). What a
/// few calls choose is right under the power limit too: chosen by tenths of a second of calls, XL's products take 0.4 % less
/// (2026-11-27, an H100, 4,096 tokens).
///
/// `kernels/product.cu` is faster for some forward products; its notebook says which.
const MOST_ALGORITHMS: usize = 64;
/// Timed calls of each algorithm in the first round, and of the best few in the last one.
const CALLS: [usize; 2] = [4, 12];
/// Algorithms that reach the last round.
const FINALISTS: usize = 6;

/// Products of matrices on one GPU.
pub struct MatrixProducts {
    device: Device,
    context: Arc<CudaContext>,
    handle: Handle,
    workspace: Tensor,
    allow_tf32: bool,
    /// Of choices; none where the folder is not trusted, so that this process times for itself.
    cache: Option<TrustedFolder>,
    plans: Mutex<BTreeMap<Shape, Arc<Plan>>>,
}

/// The algorithm that a shape's product runs, for records.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Choice {
    /// Rows and columns of the result, and the length of its sums.
    pub m: i64,
    pub n: i64,
    pub k: i64,
    /// Whether the first operand is stored by columns, then the second.
    pub transposed: [bool; 2],
    /// Algorithms that ran.
    pub tried: usize,
    /// Seconds of a call: of the algorithm that cuBLASLt would have taken, and of the fastest.
    pub first_s: f64,
    pub best_s: f64,
    /// cuBLASLt's numbers of the fastest: algorithm, tile, stages, splits of the sums, cluster.
    pub algorithm: [u32; 5],
    /// Whether these times are of an earlier process, whose choice was read from the cache.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub from_cache: bool,
}

struct Plan {
    descriptors: Descriptors,
    algorithm: Algorithm,
    choice: Choice,
}

struct Algorithm {
    cublaslt: sys::cublasLtMatmulAlgo_t,
    workspace_bytes: usize,
}

struct Handle(sys::cublasLtHandle_t);

// SAFETY: cuBLASLt's handles and descriptors may be used from any thread; descriptors are not changed after they are made.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}
// SAFETY: as above.
unsafe impl Send for Plan {}
// SAFETY: as above.
unsafe impl Sync for Plan {}

impl MatrixProducts {
    /// Errors: [`crate::error::Fault::NotAvailable`] without the GPU; a missing cuBLASLt; those of memory.
    pub fn new(device: Device) -> Result<Self> {
        let context = context_of(device)?;
        // SAFETY: this only asks the dynamic loader for cuBLASLt, whose initialisers have no conditions.
        ensure!(unsafe { sys::is_culib_present() }, "the dynamic loader does not find libcublasLt");
        let make = || {
            context.bind_to_thread()?;
            Ok(result::create_handle())
        };
        let handle = Handle(keeping_current(make)?.context("making a handle of cuBLASLt")?);
        let workspace = Tensor::f_empty([WORKSPACE_BYTES as i64], (Kind::Uint8, device))?;
        let allow_tf32 = torch::allow_tf32()?;
        let cache = Compiler::of_this_tree()?.open_cache().ok();
        Ok(Self { device, context, handle, workspace, allow_tf32, cache, plans: Mutex::default() })
    }

    /// `out` (m, n) = `a` (m, k) times `b` (k, n): matrices of one kind, float32 or bfloat16, whose rows or columns are
    /// contiguous (of `out` the rows). Launched on the stream that libtorch's operators of this thread use.
    ///
    /// The first product of a shape reads its algorithm from the cache or tries all, and waits for them: it cannot be captured. Sums are float32; float32
    /// operands are rounded to TF32 only where libtorch was allowed to when this was made.
    pub fn multiply(&self, a: &Tensor, b: &Tensor, out: &Tensor) -> Result<()> {
        let shape = Shape::of(a, b, out)?;
        let known = self.plans().get(&shape).cloned();
        let plan = match known {
            Some(plan) => plan,
            None => {
                let context = || format!("choosing an algorithm for the product of {:?} and {:?}", a.size(), b.size());
                let plan = Arc::new(self.plan(shape, [a, b, out]).with_context(context)?);
                self.plans().insert(shape, plan.clone());
                plan
            }
        };
        let is_counter = (1..=COUNTER_BYTES).contains(&plan.algorithm.workspace_bytes);
        let counter = if is_counter { take_clear(self.device)? } else { None };
        let workspace = counter.as_ref().unwrap_or(&self.workspace);
        self.run(&plan.descriptors, &plan.algorithm, [a, b, out], workspace)
    }

    /// What was chosen, by shape.
    pub fn choices(&self) -> Vec<Choice> {
        self.plans().values().map(|plan| plan.choice.clone()).collect()
    }

    fn plans(&self) -> std::sync::MutexGuard<'_, BTreeMap<Shape, Arc<Plan>>> {
        self.plans.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The choice of the cache, or else a new one, which is kept there.
    fn plan(&self, shape: Shape, operands: [&Tensor; 3]) -> Result<Plan> {
        let descriptors = Descriptors::of(&shape, self.allow_tf32)?;
        // SAFETY: the library is loaded (`Self::new`), and this only asks it for a number.
        let version = unsafe { sys::cublasLtGetVersion() };
        let key = Key::of(&shape, self.allow_tf32, &self.context.name()?, version, WORKSPACE_BYTES);
        if let Some(Kept { algorithm, choice }) = self.cache.as_ref().and_then(|cache| Kept::read(cache, &key)) {
            let algorithm = sys::cublasLtMatmulAlgo_t { data: algorithm };
            if let Some(algorithm) = self.accepted(&descriptors, algorithm)? {
                return Ok(Plan { descriptors, algorithm, choice: Choice { from_cache: true, ..choice } });
            }
        }
        let (algorithm, choice) = self.choose(&shape, &descriptors, operands)?;
        let kept = Kept { algorithm: algorithm.cublaslt.data, choice: choice.clone() };
        if let Some(Err(error)) = self.cache.as_ref().map(|cache| kept.write(cache, &key)) {
            static TOLD: Once = Once::new();
            TOLD.call_once(|| eprintln!("cs336: chosen algorithms of products are not kept: {error:#}"));
        }
        Ok(Plan { descriptors, algorithm, choice })
    }

    /// An algorithm, which may have been read from a file, if cuBLASLt runs it for this product.
    fn accepted(&self, descriptors: &Descriptors, algorithm: sys::cublasLtMatmulAlgo_t) -> Result<Option<Algorithm>> {
        let &Descriptors { product, first, second, out } = descriptors;
        // SAFETY: all zero bytes are a value of this struct of numbers.
        let mut found = unsafe { std::mem::zeroed::<sys::cublasLtMatmulHeuristicResult_t>() };
        let check = || {
            self.context.bind_to_thread()?;
            // SAFETY: the handle and the descriptors are alive, and both structs outlive the call, which checks the algorithm's
            // numbers and runs nothing.
            let status = unsafe {
                sys::cublasLtMatmulAlgoCheck(self.handle.0, product, first, second, out, out, &algorithm, &mut found)
            };
            let workspace_bytes = found.workspaceSize;
            let is_accepted =
                status.result().is_ok() && found.state.result().is_ok() && workspace_bytes <= WORKSPACE_BYTES;
            Ok(is_accepted.then_some(Algorithm { cublaslt: algorithm, workspace_bytes }))
        };
        keeping_current(check)
    }

    /// Tries every algorithm a few times, then the best few more often.
    fn choose(&self, shape: &Shape, descriptors: &Descriptors, operands: [&Tensor; 3]) -> Result<(Algorithm, Choice)> {
        let mut found = self.algorithms(descriptors)?;
        let seconds_of = |algorithm, calls| {
            least_seconds(self.device, calls, || self.run(descriptors, algorithm, operands, &self.workspace))
        };
        let mut timed = Vec::new();
        for (i, algorithm) in found.iter().enumerate() {
            // cuBLASLt lists some that it then refuses to run.
            if let Ok(seconds) = seconds_of(algorithm, CALLS[0]) {
                timed.push((i, seconds));
            }
        }
        timed.sort_by(|a, b| a.1.total_cmp(&b.1));
        let tried = timed.len();
        let first = timed.iter().find(|(i, _)| *i == 0).copied();
        timed.truncate(FINALISTS);
        timed.extend(first.filter(|first| !timed.contains(first)));
        for (i, seconds) in &mut timed {
            *seconds = seconds_of(&found[*i], CALLS[1])?;
        }
        let Some(&(best, best_s)) = timed.iter().min_by(|a, b| a.1.total_cmp(&b.1)) else {
            bail!("cuBLASLt runs none of {} algorithms", found.len())
        };
        let first_s = timed.iter().find(|(i, _)| *i == 0).map_or(best_s, |(_, seconds)| *seconds);
        let Shape { m, n, k, a, b, .. } = *shape;
        let (transposed, algorithm) = ([a.is_transposed, b.is_transposed], numbers_of(&found[best].cublaslt)?);
        let choice = Choice { m, n, k, transposed, tried, first_s, best_s, algorithm, from_cache: false };
        Ok((found.swap_remove(best), choice))
    }

    fn run(
        &self,
        descriptors: &Descriptors,
        algorithm: &Algorithm,
        [a, b, out]: [&Tensor; 3],
        workspace: &Tensor,
    ) -> Result<()> {
        let stream = torch::stream::current_stream(self.device)? as sys::cudaStream_t;
        let [one, zero] = [1.0f32, 0.0];
        let [one, zero] = [&one, &zero].map(|number| std::ptr::from_ref(number).cast::<c_void>());
        let Descriptors { product, first, second, out: result } = *descriptors;
        let pointer = |t: &Tensor| t.data_ptr();
        let multiply = || {
            self.context.bind_to_thread()?;
            // SAFETY: the descriptors were made for these tensors' shapes, strides and kinds (`Shape::of`), which live on this
            // device; the algorithm is one that cuBLASLt listed for them, and the workspace has the bytes that it needs; alpha and
            // beta outlive the call. Work of one stream follows work of the same stream, so the workspace has one user at a time.
            Ok(unsafe {
                result::matmul(
                    self.handle.0,
                    product,
                    one,
                    zero,
                    pointer(b),
                    first,
                    pointer(a),
                    second,
                    pointer(out),
                    result,
                    pointer(out),
                    result,
                    &algorithm.cublaslt,
                    workspace.data_ptr(),
                    workspace.numel() * workspace.kind().elt_size_in_bytes(),
                    stream,
                )
            })
        };
        keeping_current(multiply)?.context("multiplying by cuBLASLt")
    }

    /// The algorithms that cuBLASLt has for a product, the one it holds for the best first.
    fn algorithms(&self, descriptors: &Descriptors) -> Result<Vec<Algorithm>> {
        let &Descriptors { product, first, second, out } = descriptors;
        let preference = result::create_matmul_pref().context("making a preference of cuBLASLt")?;
        let attribute = sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
        // SAFETY: all zero bytes are a value of this struct of numbers.
        let mut found = vec![unsafe { std::mem::zeroed::<sys::cublasLtMatmulHeuristicResult_t>() }; MOST_ALGORITHMS];
        let mut count = 0;
        let list = || {
            self.context.bind_to_thread()?;
            // SAFETY: the preference is alive until it is destroyed here and its attribute is a size of 8 bytes; the
            // descriptors are alive; `found` has room for as many results as it says.
            Ok(unsafe {
                let limit = std::ptr::from_ref(&WORKSPACE_BYTES).cast();
                let listed = result::set_matmul_pref_attribute(preference, attribute, limit, size_of::<usize>())
                    .and_then(|()| {
                        sys::cublasLtMatmulAlgoGetHeuristic(
                            self.handle.0,
                            product,
                            first,
                            second,
                            out,
                            out,
                            preference,
                            MOST_ALGORITHMS as i32,
                            found.as_mut_ptr(),
                            &mut count,
                        )
                        .result()
                    });
                result::destroy_matmul_pref(preference).and(listed)
            })
        };
        keeping_current(list)?.context("listing cuBLASLt's algorithms")?;
        found.truncate(usize::try_from(count)?);
        found.retain(|one| one.state.result().is_ok() && one.workspaceSize <= WORKSPACE_BYTES);
        ensure!(!found.is_empty(), "cuBLASLt has no algorithm for it");
        let algorithm = |one: sys::cublasLtMatmulHeuristicResult_t| Algorithm {
            cublaslt: one.algo,
            workspace_bytes: one.workspaceSize,
        };
        Ok(found.into_iter().map(algorithm).collect())
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: the handle is alive and not used after this.
        let _ = unsafe { result::destroy_handle(self.0) };
    }
}

/// [`Choice::algorithm`] of an algorithm; 0 where cuBLASLt does not say.
fn numbers_of(algorithm: &sys::cublasLtMatmulAlgo_t) -> Result<[u32; 5]> {
    use sys::cublasLtMatmulAlgoConfigAttributes_t as Attribute;
    let attributes = [
        Attribute::CUBLASLT_ALGO_CONFIG_ID,
        Attribute::CUBLASLT_ALGO_CONFIG_TILE_ID,
        Attribute::CUBLASLT_ALGO_CONFIG_STAGES_ID,
        Attribute::CUBLASLT_ALGO_CONFIG_SPLITK_NUM,
        Attribute::CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID,
    ];
    let number = |attribute| {
        // Of the cluster cuBLASLt gives 16 bits, of the others 32.
        let bytes = if attribute == Attribute::CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID { 2 } else { 4 };
        let (mut number, mut written) = (0u32, 0usize);
        let at = std::ptr::from_mut(&mut number).cast();
        // SAFETY: the algorithm is one that cuBLASLt gave, and there is room for the bytes that are announced.
        let status =
            unsafe { sys::cublasLtMatmulAlgoConfigGetAttribute(algorithm, attribute, at, bytes, &mut written) };
        status.result().map_or(0, |()| number)
    };
    Ok(attributes.map(number))
}
