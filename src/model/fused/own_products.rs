//! Forward products by `kernels/product.cu`: Hopper's, in bfloat16, with SwiGLU in the epilogue or without.

use anyhow::{Context as _, Result};
use tch::{Device, Kind, Tensor};

use self::params::{Gated, Plain, Problem};
use crate::cuda::{self, Arch, Kernel, LaunchConfig, Program, TensorMap, multiprocessors};

/// The two kernels, loaded on one device.
pub struct OwnProducts {
    device: Device,
    plain: Kernel<Plain>,
    gated: Kernel<Gated>,
}

/// How `kernels/product.cu` is compiled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Shape {
    is_gated: bool,
    /// Blocks of a cluster. The emulator runs blocks one after the other, so there it is one.
    cluster: u32,
}

/// Threads of a block.
pub const THREADS: u32 = 384;
/// Rows of a tile.
const ROWS: u32 = 128;
/// Columns of a tile's operands, of which a row is 128 bytes.
const DEPTH: u32 = 64;
/// Bytes of x that a section of tiles reads, which with W's are to stay in an L2 cache of 50 MB.
const SECTION_BYTES: u64 = 16 << 20;

impl Shape {
    fn on(device: Device, is_gated: bool) -> Self {
        Self { is_gated, cluster: if device == Device::Cpu { 1 } else { 2 } }
    }

    /// W's rows in a tile.
    fn columns(self) -> u32 {
        if self.is_gated { 192 } else { 200 }
    }

    /// Columns of the result in a tile.
    fn outputs(self) -> u32 {
        if self.is_gated { self.columns() / 2 } else { self.columns() }
    }

    fn stages(self) -> u32 {
        if self.is_gated { 5 } else { 4 }
    }

    /// W's rows in a box.
    fn box_rows(self) -> u32 {
        if self.is_gated { self.outputs() } else { 40 }
    }

    /// Columns of a panel of results.
    fn panel(self) -> u32 {
        if self.is_gated { 32 } else { 40 }
    }

    fn program(self) -> Program {
        let defines = [
            ("PRODUCT_COLUMNS", self.columns()),
            ("PRODUCT_GATED", self.is_gated.into()),
            ("PRODUCT_CLUSTER", self.cluster),
            ("PRODUCT_STAGES", self.stages()),
        ];
        Program::new("product.cu", defines)
    }

    /// Dynamic shared memory: the kernel's tiles begin at a multiple of 1024, then buffers, results and barriers.
    fn shared_bytes(self) -> u32 {
        let row = 2 * DEPTH;
        let panels = if self.is_gated { 3 } else { self.columns() / self.panel() };
        let staging = 2 * panels * 64 * 2 * self.panel();
        1024 + self.stages() * row * (ROWS + self.columns()) + staging + 8 * (2 * self.stages() + 2)
    }
}

/// The programs that a GPU runs.
pub fn programs() -> [Program; 2] {
    [false, true].map(|is_gated| Shape::on(Device::Cuda(0), is_gated).program())
}

impl OwnProducts {
    /// None on a GPU that is not Hopper's.
    pub fn on(device: Device) -> Result<Option<Self>> {
        if device.is_cuda() && cuda::compute_capability(device)? != Arch::HOPPER {
            return Ok(None);
        }
        let [plain, gated] = [false, true].map(|is_gated| Shape::on(device, is_gated));
        let load = |shape: Shape| cuda::load(device, &shape.program()).context("preparing our products");
        Ok(Some(Self {
            device,
            plain: load(plain)?.kernel()?.allow_shared(plain.shared_bytes())?,
            gated: load(gated)?.kernel()?.allow_shared(gated.shared_bytes())?,
        }))
    }

    /// Whether [`Self::forward`] and [`Self::gated`] take such matrices: contiguous bfloat16 with rows in multiples of eight.
    pub fn takes(x: &Tensor, weight: &Tensor, out: &Tensor) -> bool {
        [x, weight, out].into_iter().all(|t| {
            let fits = t.is_contiguous() && t.size().get(1).is_some_and(|columns| columns % 8 == 0);
            t.kind() == Kind::BFloat16 && fits && (t.data_ptr() as usize).is_multiple_of(16)
        })
    }

    /// `y` (rows, columns) = `x` (rows, inner) times the transpose of `weight` (columns, inner).
    pub fn forward(&self, x: &Tensor, weight: &Tensor, y: &Tensor) -> Result<()> {
        let shape = Shape::on(self.device, false);
        let ((rows, inner), (columns, _)) = (x.size2()?, weight.size2()?);
        let params = Plain {
            x: matrix(x, ROWS, DEPTH)?,
            w: matrix(weight, shape.box_rows(), DEPTH)?,
            y: matrix(y, 64, shape.panel())?,
            problem: self.problem(shape, [rows, columns, inner])?,
        };
        self.plain.launch_early(self.config(shape, &params.problem)?, &params).context("launching our product")
    }

    /// `gate_up` (rows, 2 columns) = `x` (rows, inner) times the transpose of `weight` (2 columns, inner), gates first, and
    /// `activated` (rows, columns), their SwiGLU.
    pub fn gated(&self, x: &Tensor, weight: &Tensor, gate_up: &Tensor, activated: &Tensor) -> Result<()> {
        let shape = Shape::on(self.device, true);
        let ((rows, inner), (_, columns)) = (x.size2()?, activated.size2()?);
        let halves = |t: Tensor, rows, columns| TensorMap::of(&t, rows, columns);
        let params = Gated {
            x: matrix(x, ROWS, DEPTH)?,
            w: halves(weight.f_view([1, 2, columns, inner])?, shape.box_rows(), DEPTH)?,
            y: halves(gate_up.f_view([1, rows, 2, columns])?.f_transpose(1, 2)?, 64, shape.panel())?,
            activated: matrix(activated, 64, shape.panel())?,
            problem: self.problem(shape, [rows, columns, inner])?,
        };
        self.gated
            .launch_early(self.config(shape, &params.problem)?, &params)
            .context("launching our product with SwiGLU")
    }

    fn problem(&self, shape: Shape, [rows, columns, inner]: [i64; 3]) -> Result<Problem> {
        let height = u64::try_from(rows)?.div_ceil(u64::from(shape.cluster * ROWS));
        let tile_bytes = 2 * u64::from(shape.cluster * ROWS) * u64::try_from(inner)?;
        let section = i32::try_from((SECTION_BYTES / tile_bytes).clamp(1, height))?;
        Ok(Problem { rows: rows.try_into()?, columns: columns.try_into()?, inner: inner.try_into()?, section })
    }

    /// Every multiprocessor has a block, if there are tiles for it.
    fn config(&self, shape: Shape, problem: &Problem) -> Result<LaunchConfig> {
        let tiles = |size: i32, of: u32| Ok::<_, anyhow::Error>(u64::from(u32::try_from(size)?.div_ceil(of)));
        let all = tiles(problem.rows, shape.cluster * ROWS)? * tiles(problem.columns, shape.outputs())?;
        let clusters = all.min(u64::from(multiprocessors(self.device)? / shape.cluster));
        let blocks = u32::try_from(clusters)? * shape.cluster;
        Ok(LaunchConfig { shared_bytes: shape.shared_bytes(), ..LaunchConfig::line(blocks, THREADS) })
    }
}

fn matrix(t: &Tensor, box_rows: u32, box_columns: u32) -> Result<TensorMap> {
    let (rows, columns) = t.size2()?;
    TensorMap::of(&t.f_view([1, 1, rows, columns])?, box_rows, box_columns)
}

/// The kernels' parameters, as `kernels/product.cu` declares them.
mod params {
    use crate::cuda::{TensorMap, kernel_params};

    kernel_params! {
        struct Problem as "Problem" { rows, columns, inner, section: i32 }
        struct Plain as "product" { x, w, y: TensorMap, problem: Problem }
        /// With PRODUCT_GATED.
        struct Gated as "product" { x, w, y, activated: TensorMap, problem: Problem }
    }
}

#[cfg(test)]
mod tests;
