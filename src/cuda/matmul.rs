//! Matrix products by cuBLASLt, each shape with the algorithm that was the fastest when all that fit were tried.
//!
//! cuBLAS picks an algorithm by a model of the GPU. Where the model is wrong a product takes a tenth or more longer than it
//! need: trying takes milliseconds a shape, once a process.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context as _, Result, bail, ensure};
use cudarc::cublaslt::{result, sys};
use cudarc::driver::CudaContext;
use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Tensor};

use super::device::{context_of, keeping_current};
use super::stream::Event;
use crate::torch;

/// What NVIDIA recommends on Hopper.
const WORKSPACE_BYTES: usize = 32 << 20;
/// Algorithms that cuBLASLt is asked for.
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
    plans: Mutex<BTreeMap<Shape, Arc<Plan>>>,
}

/// How one product is stored: what decides which algorithms there are and how fast each is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Shape {
    m: i64,
    n: i64,
    k: i64,
    a: Layout,
    b: Layout,
    out_row: i64,
    is_bfloat16: bool,
}

/// A matrix in memory: rows one after the other, or columns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Layout {
    is_transposed: bool,
    /// Elements from one row (or column) to the next.
    stride: i64,
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
}

struct Plan {
    descriptors: Descriptors,
    algorithm: sys::cublasLtMatmulAlgo_t,
    choice: Choice,
}

/// cuBLASLt's description of a product, which it reads by columns: it computes the transposed result, so that the second
/// operand comes first.
struct Descriptors {
    product: sys::cublasLtMatmulDesc_t,
    first: sys::cublasLtMatrixLayout_t,
    second: sys::cublasLtMatrixLayout_t,
    out: sys::cublasLtMatrixLayout_t,
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
        Ok(Self { device, context, handle, workspace, allow_tf32, plans: Mutex::default() })
    }

    /// `out` (m, n) = `a` (m, k) times `b` (k, n): matrices of one kind, float32 or bfloat16, whose rows or columns are
    /// contiguous (of `out` the rows). Launched on the stream that libtorch's operators of this thread use.
    ///
    /// The first product of a shape tries all algorithms, and waits for them: it cannot be captured. Sums are float32; float32
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
        self.run(&plan.descriptors, &plan.algorithm, [a, b, out])
    }

    /// What was chosen, by shape.
    pub fn choices(&self) -> Vec<Choice> {
        self.plans().values().map(|plan| plan.choice.clone()).collect()
    }

    fn plans(&self) -> std::sync::MutexGuard<'_, BTreeMap<Shape, Arc<Plan>>> {
        self.plans.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tries every algorithm a few times, then the best few more often.
    fn plan(&self, shape: Shape, operands: [&Tensor; 3]) -> Result<Plan> {
        let descriptors = Descriptors::of(&shape, self.allow_tf32)?;
        let found = self.algorithms(&descriptors)?;
        let mut timed = Vec::new();
        for (i, algorithm) in found.iter().enumerate() {
            // cuBLASLt lists some that it then refuses to run.
            if let Ok(seconds) = self.seconds_of(&descriptors, algorithm, operands, CALLS[0]) {
                timed.push((i, seconds));
            }
        }
        timed.sort_by(|a, b| a.1.total_cmp(&b.1));
        let tried = timed.len();
        let first = timed.iter().find(|(i, _)| *i == 0).copied();
        timed.truncate(FINALISTS);
        timed.extend(first.filter(|first| !timed.contains(first)));
        for (i, seconds) in &mut timed {
            *seconds = self.seconds_of(&descriptors, &found[*i], operands, CALLS[1])?;
        }
        let Some(&(best, best_s)) = timed.iter().min_by(|a, b| a.1.total_cmp(&b.1)) else {
            bail!("cuBLASLt runs none of {} algorithms", found.len())
        };
        let first_s = timed.iter().find(|(i, _)| *i == 0).map_or(best_s, |(_, seconds)| *seconds);
        let Shape { m, n, k, a, b, .. } = shape;
        let transposed = [a.is_transposed, b.is_transposed];
        let choice = Choice { m, n, k, transposed, tried, first_s, best_s, algorithm: numbers_of(&found[best])? };
        Ok(Plan { descriptors, algorithm: found[best], choice })
    }

    /// The least mean time of a call over three runs of `calls`.
    fn seconds_of(
        &self,
        descriptors: &Descriptors,
        algorithm: &sys::cublasLtMatmulAlgo_t,
        operands: [&Tensor; 3],
        calls: usize,
    ) -> Result<f64> {
        let [start, end] = [Event::new(self.device, true)?, Event::new(self.device, true)?];
        self.run(descriptors, algorithm, operands)?;
        let mut least = f64::INFINITY;
        for _ in 0..3 {
            start.record_current()?;
            (0..calls).try_for_each(|_| self.run(descriptors, algorithm, operands))?;
            end.record_current()?;
            end.wait()?;
            least = least.min(end.seconds_since(&start)? / calls as f64);
        }
        Ok(least)
    }

    fn run(
        &self,
        descriptors: &Descriptors,
        algorithm: &sys::cublasLtMatmulAlgo_t,
        [a, b, out]: [&Tensor; 3],
    ) -> Result<()> {
        let stream = torch::stream::current_stream(self.device)? as sys::cudaStream_t;
        let [one, zero] = [1.0f32, 0.0];
        let [one, zero] = [&one, &zero].map(|number| std::ptr::from_ref(number).cast::<c_void>());
        let Descriptors { product, first, second, out: result } = *descriptors;
        let pointer = |t: &Tensor| t.data_ptr();
        let multiply = || {
            self.context.bind_to_thread()?;
            // SAFETY: the descriptors were made for these tensors' shapes, strides and kinds (`Shape::of`), which live on this
            // device; the algorithm is one that cuBLASLt listed for them with this much workspace; alpha and beta outlive the
            // call. Work of one stream follows work of the same stream, so the workspace has one user at a time.
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
                    algorithm,
                    self.workspace.data_ptr(),
                    WORKSPACE_BYTES,
                    stream,
                )
            })
        };
        keeping_current(multiply)?.context("multiplying by cuBLASLt")
    }

    /// The algorithms that cuBLASLt has for a product, the one it holds for the best first.
    fn algorithms(&self, descriptors: &Descriptors) -> Result<Vec<sys::cublasLtMatmulAlgo_t>> {
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
        Ok(found.into_iter().map(|one| one.algo).collect())
    }
}

impl Shape {
    /// Errors: matrices that do not fit each other, or that cuBLASLt cannot read.
    fn of(a: &Tensor, b: &Tensor, out: &Tensor) -> Result<Self> {
        let ((m, k), (b_k, n), out_size) = (a.size2()?, b.size2()?, out.size2()?);
        let kind = a.kind();
        ensure!(
            k == b_k && out_size == (m, n),
            "the product of {:?} and {:?} is not {:?}",
            a.size(),
            b.size(),
            out.size()
        );
        ensure!(
            matches!(kind, Kind::Float | Kind::BFloat16) && [b, out].iter().all(|t| t.kind() == kind),
            "a product takes float32 or bfloat16 throughout, not {kind:?}, {:?} and {:?}",
            b.kind(),
            out.kind()
        );
        let (a, b, out) = (Layout::of(a)?, Layout::of(b)?, Layout::of(out)?);
        ensure!(!out.is_transposed, "the result of a product is written by rows, and here its columns are contiguous");
        Ok(Self { m, n, k, a, b, out_row: out.stride, is_bfloat16: kind == Kind::BFloat16 })
    }
}

impl Layout {
    fn of(t: &Tensor) -> Result<Self> {
        let [rows, columns] = t.size()[..] else { bail!("{:?} is no matrix", t.size()) };
        match t.stride()[..] {
            [row, 1] if row >= columns => Ok(Self { is_transposed: false, stride: row }),
            [1, column] if column >= rows => Ok(Self { is_transposed: true, stride: column }),
            _ => bail!("neither rows nor columns of {:?} with strides {:?} are contiguous", t.size(), t.stride()),
        }
    }
}

impl Descriptors {
    fn of(shape: &Shape, allow_tf32: bool) -> Result<Self> {
        use sys::cublasComputeType_t::{CUBLAS_COMPUTE_32F, CUBLAS_COMPUTE_32F_FAST_TF32};
        use sys::cudaDataType_t::{CUDA_R_16BF, CUDA_R_32F};
        let compute =
            if allow_tf32 && !shape.is_bfloat16 { CUBLAS_COMPUTE_32F_FAST_TF32 } else { CUBLAS_COMPUTE_32F };
        let kind = if shape.is_bfloat16 { CUDA_R_16BF } else { CUDA_R_32F };
        let Shape { m, n, k, a, b, out_row, .. } = *shape;
        // Rows one after the other are columns of the transposed matrix.
        let layout = |rows: i64, columns: i64, of: Layout| {
            let (rows, columns) = if of.is_transposed { (rows, columns) } else { (columns, rows) };
            result::create_matrix_layout(kind, rows as u64, columns as u64, of.stride)
        };
        let make = || {
            Ok::<_, result::CublasError>(Self {
                product: result::create_matmul_desc(compute, CUDA_R_32F)?,
                first: layout(k, n, b)?,
                second: layout(m, k, a)?,
                out: layout(m, n, Layout { is_transposed: false, stride: out_row })?,
            })
        };
        let made = make().context("describing a product to cuBLASLt")?;
        let attributes = [
            (sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA, b),
            (sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSB, a),
        ];
        for (attribute, of) in attributes {
            let operation = i32::from(of.is_transposed);
            let at = std::ptr::from_ref(&operation).cast();
            // SAFETY: the description is alive, and the attribute is an `int`: CUBLAS_OP_N (0) or CUBLAS_OP_T (1).
            unsafe { result::set_matmul_desc_attribute(made.product, attribute, at, size_of::<i32>()) }
                .context("describing an operand to cuBLASLt")?;
        }
        Ok(made)
    }
}

impl Drop for Descriptors {
    fn drop(&mut self) {
        // SAFETY: all are alive and not used after this. A failure leaves a few bytes behind.
        unsafe {
            let _ = result::destroy_matmul_desc(self.product);
            for layout in [self.first, self.second, self.out] {
                let _ = result::destroy_matrix_layout(layout);
            }
        }
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
        let status = unsafe { sys::cublasLtMatmulAlgoConfigGetAttribute(algorithm, attribute, at, bytes, &mut written) };
        status.result().map_or(0, |()| number)
    };
    Ok(attributes.map(number))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_or_columns_must_be_contiguous_and_kinds_equal() {
        let zeros = |size: [i64; 2], kind| Tensor::zeros(size, (kind, Device::Cpu));
        let (a, b, out) = (zeros([3, 4], Kind::Float), zeros([4, 5], Kind::Float), zeros([3, 5], Kind::Float));
        let shape = Shape::of(&a, &b, &out).unwrap();
        assert_eq!((shape.m, shape.n, shape.k), (3, 5, 4));
        let row = |stride| Layout { is_transposed: false, stride };
        assert_eq!((shape.a, shape.b, shape.out_row), (row(4), row(5), 5));
        let turned = zeros([5, 4], Kind::Float).tr();
        assert_eq!(Shape::of(&a, &turned, &out).unwrap().b, Layout { is_transposed: true, stride: 4 });
        let part = zeros([3, 12], Kind::Float).narrow(1, 4, 4);
        assert_eq!(Shape::of(&part, &b, &out).unwrap().a, row(12));

        let refused = |a: &Tensor, b: &Tensor, out: &Tensor| Shape::of(a, b, out).unwrap_err().to_string();
        assert!(refused(&a, &a, &out).contains("is not"));
        assert!(refused(&a, &zeros([4, 5], Kind::BFloat16), &out).contains("BFloat16"));
        assert!(refused(&zeros([3, 8], Kind::Float).slice(1, 0, 8, 2), &b, &out).contains("neither rows nor columns"));
        assert!(refused(&a, &b, &zeros([5, 3], Kind::Float).tr()).contains("written by rows"));
    }
}
