// A linear layer's forward product y = x W^T on Hopper, in bfloat16 with float32 sums, and with PRODUCT_GATED SwiGLU in its
// epilogue: x (rows, inner), W (columns, inner), y (rows, columns).
//
// With PRODUCT_GATED, W holds the gates' weights and then those of the other projection, 2 `columns` rows; y (rows, 2 columns) has
// the same order. With g and u the two projections, rounded to bfloat16,
//   a = g u / (1 + exp(-g))                                     (1) (Shazeer 2020, Eq. 6)
// is written too, in every bit as swiglu.cu computes it.
//
// A block has two warpgroups that compute and one that copies. A tile is 128 rows by PRODUCT_COLUMNS columns of W's rows (with
// gates half of them gates, half the projections beside them), and a warpgroup keeps all of it in registers: while one warpgroup
// writes its tile, the other computes the next. They share PRODUCT_STAGES buffers of 64 columns of x and W, which the copier
// fills in the order of the tiles.
//
// The blocks of a cluster have tiles below one another, and each copies its share of W's rows into both. The tiles are dealt to
// the clusters in turns, the rows of a section of x first, so that x and the few columns under way stay in the L2 cache.
//
// A barrier tells a phase only from the one before it. So a warpgroup waits for its turn, before it waits for a buffer:
// otherwise it would see a phase that is two rounds old as its own.
//
// The bound: 2 rows columns inner operations at 989 TFLOP/s, twice as many with gates. xl's gates at 2,048 tokens: 85 us.
//
// Notebook. One H100 (2026-11-27); medians of 8 turns of 15 calls beside cuBLAS's default (torch.mm), in us. (rows, columns, inner)
//   1. First version, 128 x 192, clusters of two. Predicted 125 us for (2048, 2 x 6400, 1600), cuBLAS's time without SwiGLU, since
//      the epilogue runs beside the other warpgroup's products. Measured 194 (cuBLAS 128). Probes with wrong results, (2048,
//      1600, 6400), cuBLAS 67: without copies in clusters of one 92 and of two 114; with copies 102 and 176. So it was the
//      clusters. `mbarrier.arrive.release.cluster` compiles to MEMBAR.ALL.GPU, for which the warp waits in each step.
//   2. Arrivals without `release.cluster`. Measured: (2048, 2 x 6400, 1600) 126.0 with SwiGLU (cuBLAS 125.5 without),
//      (4096, 2 x 6400, 1600) 259.7 (263.9). Sums equal cuBLAS's in every bit.
//   3. 128 x 200 for 1,600 columns: eight tiles fill a row, and 16 rows of tiles 97 % of 132 multiprocessors (cuBLAS's 128 x 256
//      76 to 85 %). Measured, ours and cuBLAS: (2048, 1600, 6400) 58.7 and 65.5, (4096, 1600, 6400) 115.3 and 127.3, (2048,
//      1600, 1600) 20.6 and 21.1, (4096, 1600, 1600) 35.8 and 37.4. With 128 x 192: 100.7, 155.6, 29.4 and 42.3.
//   4. In xl's captured step, batch 4, the faster of both for each product, in turns with a step that has cuBLASLt's alone,
//      medians of 30 steps. Alone, the gates with SwiGLU are 13 us a layer faster at 2,048 tokens and 35 at 4,096, w2 3 and 17.
//      Predicted -0.8 and -2.5 ms. Measured 67.7 and 67.0 ms, 117.7 and 116.2; 2.7B at 2,048 tokens 100.5 and 99.6, small 5.5 and
//      5.5. At 4,096 tokens the step runs at the power limit, so that what is saved lowers the clock elsewhere.
//   5. Tried and left out: SwiGLU's backward pass in the epilogue of w2's data gradient, (rows, 6400, 1600) with W read across.
//      2,048 and 4,096 rows: 108 and 198 (cuBLAS's product alone 67 and 117, the kernel behind it 38 and 77 on an H200). Probes
//      with wrong results at 4,096 rows: without reading gates and projections 163, without writing 149, without both 133, without
//      the logistic function too 123. So its 262 MB, 78 us of an H100's memory, are not hidden: the products' own copies wait
//      behind them. More panels in flight (200 to 224) or copies into the L2 cache ahead (223) made it slower.
//      The rotation in the epilogue of (rows, 4800, 1600): 84 and 153 (cuBLAS without it 49 and 94): each thread reads angles from
//      memory, and it spills. Data gradients that are 1,600 wide, W read across in panels of 64 columns, (2048, 1600, 12800): 194
//      with 192 columns, 167 with 160 (cuBLAS 126); with 160 columns at 4,096 rows as fast as cuBLAS. The residual stream in the
//      epilogue of o and w2 would read and write as many bytes as now: 14 a number.
//   6. The whole steps of entry 4 on one H200, medians of 30 or 31 steps, twice each in turns, over cuBLASLt's alone: at 2,048 tokens
//      small 0.991, medium 0.998, large 1.006, XL 0.995, 2.7B 0.988; at 4,096 0.993, 0.993, 0.995, 0.990 and 0.992. What differs
//      by less than a hundredth is noise between the two turns of one.
//   7. Tried and left out: data gradients that are 1,600 wide, W read across (tiles of 160 columns, panels of 32), the tiles of the
//      last round split along their sums: each part but the last leaves its sums in memory, the last one's copier brings them.
//      Predicted 107 us for (2048, 1600, 12800) and 214 at 4,096 rows. On an H200, ours and the library's best algorithm of eight:
//      118.5 and 124.1, 234 and 268; (2048, 1600, 4800) 52.4 and 51.8, (4096, 1600, 4800) 98.1 and 109. Against torch.mm, with which
//      entries 1 to 5 compare, 125.2 and 143.9, 243.8 and 302.4: the library's first choice, and not what a step runs. Whole steps of
//      xl, batch 4, on other H200s than the records: 60.1 ms at 2,048 tokens as without it (these products take 5.69 ms and took
//      5.80), 106.1 at 4,096 (107.5), which is 0.86 of torch.compile's best (0.87). So it pays at 4,096 rows alone, by a hundredth.
//   8. What lies between two products, in the whole steps of entry 4. Norms, rotations, SwiGLU and these products begin while the
//      kernel before them ends; SwiGLU's backward pass does not compute again what the forward pass wrote; one fill clears the
//      counters of all kernels (src/cuda/counters.rs). Predicted on an H200, XL at 2,048 tokens: -0.6, -0.3 and -0.7 ms of 60.
//      Measured on an H100, in turns with the step without them, medians of 40 steps: 66.88 and 65.64 ms, 66.54 and 65.57;
//      small 5.54 and 5.40, 5.56 and 5.31; XL at 4,096 tokens 117.8 and 115.6. The first two of the three alone 67.11 and 66.23.
//      On one H200, beside torch.compile's best: XL 58.6 ms at 2,048 tokens (60.1 in the record before), 105.7 at 4,096 (107.5), 2.7B
//      90.2 (90.8), small 4.77 (4.79).
//
// Set by src/model/fused/own_products.rs: PRODUCT_COLUMNS, PRODUCT_GATED, PRODUCT_CLUSTER (blocks of a cluster: 1 or 2),
// PRODUCT_STAGES.
#if !defined(PRODUCT_COLUMNS) || !defined(PRODUCT_GATED) || !defined(PRODUCT_CLUSTER) || !defined(PRODUCT_STAGES)
#error "product.cu takes its shape from src/model/fused/own_products.rs"
#endif

#define FLASH_HALF 0
#include "lib/cluster.cuh"

namespace {

constexpr int columns = PRODUCT_COLUMNS;
constexpr int rows = 128;
constexpr int depth = 64;
constexpr int stages = PRODUCT_STAGES;
constexpr int cluster = PRODUCT_CLUSTER;
constexpr int threads = 384;

// W's rows in a tile come in boxes: with gates one of gates and one of the projections beside them.
constexpr int outputs = PRODUCT_GATED ? columns / 2 : columns;
constexpr int box = PRODUCT_GATED ? outputs : 40;
constexpr int boxes = columns / box;
static_assert(boxes * box == columns && box % 8 == 0, "whole boxes of whole groups of eight rows make a tile");

// Bytes of a row of a buffer.
constexpr int row_bytes = 2 * depth;
constexpr u32 x_bytes = rows * row_bytes;
constexpr u32 stage_bytes = x_bytes + columns * row_bytes;

// Results leave in panels of 64 rows. Rows of 80 bytes lie in different banks as they are, those of 64 bytes are exchanged.
constexpr int panel = PRODUCT_GATED ? 32 : 40;
constexpr u32 panel_row = 2 * panel;
constexpr u32 panel_bytes = 64 * panel_row;
constexpr int panels = outputs / panel;
constexpr u32 staging_bytes = (PRODUCT_GATED ? 3 : panels) * panel_bytes;
static_assert(panels * panel == outputs, "whole panels make a tile");

// Offsets in shared memory, which starts at a multiple of 1024: the buffers, each warpgroup's results, barriers.
constexpr u32 staging_at = stages * stage_bytes;
constexpr u32 barriers_at = staging_at + 2 * staging_bytes;

// Registers of a thread; a block has 65,536 in all.
constexpr int copier_registers = 40;
constexpr int worker_registers = 232;

} // namespace

struct Problem {
  int rows;
  // Of y; with gates half of them.
  int columns;
  int inner;
  // Rows of x that stay in the L2 cache, in tiles of a cluster.
  int section;
};

namespace {

// A cluster's tiles in the order of turns.
struct Schedule {
  int height;
  int width;
  int section;
  int steps;
  int first;
  int clusters;

  DEVICE explicit Schedule(const Problem &problem)
      : height((problem.rows + cluster * rows - 1) / (cluster * rows)), width((problem.columns + outputs - 1) / outputs),
        section(problem.section), steps((problem.inner + depth - 1) / depth), first(blockIdx.x / cluster),
        clusters(gridDim.x / cluster) {}

  DEVICE bool has(int turn) const { return first + turn * clusters < height * width; }

  // The tile's first row and column in block `rank`.
  DEVICE int2 tile(int turn, u32 rank) const {
    const int index = first + turn * clusters, part = index / (section * width), within = index - part * section * width;
    const int tall = min(section, height - part * section), column = within / tall;
    return {((part * section + within - column * tall) * cluster + static_cast<int>(rank)) * rows, column * outputs};
  }
};

// Barriers: a buffer is full or free; it is a warpgroup's turn at the buffers.
struct Barriers {
  u32 base;
  DEVICE u32 full(int stage) const { return base + 8 * stage; }
  DEVICE u32 free(int stage) const { return base + 8 * (stages + stage); }
  DEVICE u32 turn(int group) const { return base + 8 * (2 * stages + group); }
};

// A place in the ring of buffers, and the parity of its phase.
struct Place {
  int stage;
  u32 parity;

  DEVICE void next() {
    if (++stage == stages) stage = 0, parity ^= 1;
  }
};

DEVICE void copy(u32 base, const Barriers &bar, const Schedule &schedule, const TensorMap &x, const TensorMap &w, u32 rank) {
  constexpr u32 all = (1u << cluster) - 1;
  Place at = {0, 1};
  for (int turn = 0; schedule.has(turn); ++turn) {
    const int2 tile = schedule.tile(turn, rank);
    for (int step = 0; step < schedule.steps; ++step, at.next()) {
      const u32 to = base + at.stage * stage_bytes;
      barrier_wait(bar.free(at.stage), at.parity);
      barrier_expect(bar.full(at.stage), stage_bytes);
      copy_in(to, &x, bar.full(at.stage), step * depth, tile.x, 0, 0);
#pragma unroll
      for (int i = 0; i < boxes; ++i) {
        if (i % cluster != static_cast<int>(rank)) continue;
        const int row = tile.y + (PRODUCT_GATED ? 0 : i * box), half = PRODUCT_GATED ? i : 0;
        copy_in_to_all(to + x_bytes + i * box * row_bytes, &w, bar.full(at.stage), step * depth, row, half, all);
      }
    }
  }
}

// One warpgroup, which computes every second tile.
struct Worker {
  u32 base;
  const Barriers &bar;
  int group;
  int lane;
  int warp;
  // Of the tile's upper and lower 64 rows.
  float sums[2][columns / 2];

  // In every block that copied into the buffer.
  DEVICE void release(int stage) {
    if (lane < cluster) barrier_arrive_at(bar.free(stage), lane);
  }

  DEVICE void multiply(int turn, int steps) {
    Place at = {turn * steps % stages, static_cast<u32>(turn * steps / stages % 2)};
    int before = 0;
    barrier_wait(bar.turn(group), (turn / 2 + (group == 0)) % 2);
    hold(sums[0]);
    hold(sums[1]);
    for (int step = 0; step < steps; ++step, at.next()) {
      barrier_wait(bar.full(at.stage), at.parity);
      if (step == steps - 1 && lane == 0) barrier_arrive(bar.turn(1 - group));
      // In a cluster, addresses have the block's rank above the 18 bits that a descriptor takes.
      const u32 x = same_in_warp(units(base & 0x3FFFF) + at.stage * units(stage_bytes)), w = x + units(x_bytes);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < depth / 16; ++k) {
        const u64 right = descriptor<row_bytes>(w + units(32 * k), 16);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const u64 left = descriptor<row_bytes>(x + units(64 * row_bytes * half + 32 * k), 16);
          Wgmma<columns>::template shared<0, 0>(sums[half], left, right, step + k != 0);
        }
      }
      wgmma_commit();
      wgmma_wait<1>();
      if (step != 0) release(before);
      before = at.stage;
    }
    wgmma_wait<0>();
    hold(sums[0]);
    hold(sums[1]);
    release(before);
  }

  DEVICE u32 staged(int i) const { return base + staging_at + group * staging_bytes + i * panel_bytes; }
  DEVICE bool is_first() const { return warp == 0 && lane == 0; }
  DEVICE void sync() const { named_sync(1 + group, 128); }

  // What has been staged before has been read.
  DEVICE void begin() const {
    if (is_first()) copies_out_wait_read();
    sync();
  }

  // The panel in buffer `i` gets pair `pair` of eight columns `j` in the thread's row `r`.
  DEVICE void stage(int i, int r, int j, u32 pair) const {
    const u32 offset = (16 * warp + lane / 4 + 8 * r) * panel_row + 16 * j;
    u32 place = offset;
    if constexpr (PRODUCT_GATED) place = Swizzle<64>::place(offset);
    store_word(staged(i) + place + 4 * (lane % 4), static_cast<int>(pair));
  }

  DEVICE void leave(int i, const TensorMap &to, int column, int row, int half) const {
    copy_out(&to, staged(i), column, row, half, 0);
  }

#if PRODUCT_GATED
  DEVICE static float low(u32 pair) { return __uint_as_float(pair << 16); }
  DEVICE static float high(u32 pair) { return __uint_as_float(pair & 0xFFFF0000u); }
  // (1)
  DEVICE static float activate(float gate, float up) { return gate * __fdividef(1.0f, 1.0f + __expf(-gate)) * up; }

  DEVICE void finish(int2 tile, const TensorMap &y, const TensorMap &activated) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < panels; ++i) {
        const float *gates = sums[half] + i * panel / 2, *ups = gates + outputs / 2;
        begin();
#pragma unroll
        for (int j = 0; j < panel / 8; ++j) {
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            const int at = 4 * j + 2 * r;
            const u32 gate = pack(gates[at], gates[at + 1]), up = pack(ups[at], ups[at + 1]);
            stage(0, r, j, gate);
            stage(1, r, j, up);
            stage(2, r, j, pack(activate(low(gate), low(up)), activate(high(gate), high(up))));
          }
        }
        fence_to_async();
        sync();
        if (is_first()) {
          const int column = tile.y + i * panel, row = tile.x + 64 * half;
          leave(0, y, column, row, 0);
          leave(1, y, column, row, 1);
          leave(2, activated, column, row, 0);
          copies_out_commit();
        }
      }
    }
  }
#else
  DEVICE void finish(int2 tile, const TensorMap &y) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      begin();
#pragma unroll
      for (int i = 0; i < panels; ++i) {
#pragma unroll
        for (int j = 0; j < panel / 8; ++j) {
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            const int at = i * panel / 2 + 4 * j + 2 * r;
            stage(i, r, j, pack(sums[half][at], sums[half][at + 1]));
          }
        }
      }
      fence_to_async();
      sync();
      if (is_first()) {
#pragma unroll
        for (int i = 0; i < panels; ++i) leave(i, y, tile.y + i * panel, tile.x + 64 * half, 0);
        copies_out_commit();
      }
    }
  }
#endif
};

} // namespace

// x: boxes of 128 rows; w: boxes of `box` rows, with gates (2, columns, inner); y: boxes of 64 rows and `panel` columns, with gates
// (rows, 2, columns) with the 2 as heads, and `activated` (rows, columns). Columns and inner are multiples of 8.
extern "C" __global__ void CLUSTERS_OF(PRODUCT_CLUSTER) __launch_bounds__(threads, 1)
    product(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w, const __grid_constant__ TensorMap y,
#if PRODUCT_GATED
            const __grid_constant__ TensorMap activated,
#endif
            const __grid_constant__ Problem problem) {
  extern __shared__ unsigned char memory[];
  const u32 base = (shared_address(memory) + 1023) / 1024 * 1024;
  const Barriers bar{base + barriers_at};
  allow_next_kernel();
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < stages; ++stage) {
      barrier_init(bar.full(stage), 1);
      // One arrival for each warp that reads it, in every block.
      barrier_init(bar.free(stage), 4 * cluster);
    }
    for (int group = 0; group < 2; ++group) barrier_init(bar.turn(group), 4);
    fence_barrier_init();
  }
  cluster_sync();
  const u32 rank = rank_in_cluster();
  const Schedule schedule(problem);
  if (threadIdx.x < 128) {
    fewer_registers<copier_registers>();
    if (threadIdx.x == 0) {
      // The others read and write only after its copies.
      await_last_kernel();
      copy(base, bar, schedule, x, w, rank);
    }
  } else {
    more_registers<worker_registers>();
    const int warp = static_cast<int>(same_in_warp(threadIdx.x / 32)), group = warp / 4 - 1;
    Worker worker{base, bar, group, static_cast<int>(threadIdx.x) % 32, warp % 4};
    for (int turn = group; schedule.has(turn); turn += 2) {
      const int2 tile = schedule.tile(turn, rank);
      worker.multiply(turn, schedule.steps);
#if PRODUCT_GATED
      worker.finish(tile, y, activated);
#else
      worker.finish(tile, y);
#endif
    }
    if (worker.is_first()) copies_out_wait_read();
  }
  // Until then other blocks copy into this one and arrive at its barriers.
  cluster_sync();
}
