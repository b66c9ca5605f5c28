//! How a product's matrices lie in memory, and cuBLASLt's descriptions of them.

use anyhow::{Context as _, Result, bail, ensure};
use cudarc::cublaslt::{result, sys};
use tch::{Kind, Tensor};

/// How one product is stored: what decides which algorithms there are and how fast each is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Shape {
    pub m: i64,
    pub n: i64,
    pub k: i64,
    pub a: Layout,
    pub b: Layout,
    out_row: i64,
    is_bfloat16: bool,
}

/// A matrix in memory: rows one after the other, or columns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Layout {
    pub is_transposed: bool,
    /// Elements from one row (or column) to the next.
    stride: i64,
}

/// cuBLASLt's description of a product, which it reads by columns: it computes the transposed result, so that the second
/// operand comes first.
pub struct Descriptors {
    pub product: sys::cublasLtMatmulDesc_t,
    pub first: sys::cublasLtMatrixLayout_t,
    pub second: sys::cublasLtMatrixLayout_t,
    pub out: sys::cublasLtMatrixLayout_t,
}

impl Shape {
    /// Errors: matrices that do not fit each other, or that cuBLASLt cannot read.
    pub fn of(a: &Tensor, b: &Tensor, out: &Tensor) -> Result<Self> {
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
    pub fn of(shape: &Shape, allow_tf32: bool) -> Result<Self> {
        use sys::cublasComputeType_t::{CUBLAS_COMPUTE_32F, CUBLAS_COMPUTE_32F_FAST_TF32};
        use sys::cudaDataType_t::{CUDA_R_16BF, CUDA_R_32F};
        let compute = if allow_tf32 && !shape.is_bfloat16 { CUBLAS_COMPUTE_32F_FAST_TF32 } else { CUBLAS_COMPUTE_32F };
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

#[cfg(test)]
mod tests {
    use tch::Device;

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
