// FlashAttention-2's forward pass (handout, Algorithm 1) with the mma instructions of compute capability 8.0. Inputs are
// bfloat16, float16 or float32; o has their type; lse is float32, a natural logarithm.
//
// A block has one tile of PORTABLE_WARPS * PORTABLE_TILES * 16 queries. It streams K and V by PORTABLE_KEYS rows through
// PORTABLE_STAGES buffers, from the diagonal (or the last key) down to the first key. Each warp has PORTABLE_TILES times 16
// queries and keeps their S, P and O in registers, where P becomes a left operand. There is one barrier for each block of
// keys: after it the buffer of the block before is free and is filled again.
//
// If a launch has fewer tiles than the GPU can hold blocks, `splits` blocks share a tile, each with `split_blocks` blocks of
// keys. They write o and lse of their keys in float32, and `portable_combine` weighs them with exp(lse - largest).
//
// Blocks take the longest tiles first, in groups of heads whose K and V stay in the L2 cache.
//
// Every result is bitwise reproducible.
//
// Notebook
//   1. First version, not yet measured. Expected limits, in cycles of one multiprocessor of compute capability 8.0. 16-bit,
//      d = 64: matrix instructions (two cycles each; one of 16 by 8 by 16 reads 256 bytes of K or V for two tiles, so shared
//      memory is busy half of that time) and exponentials (16 a cycle) equally. float32: matrix instructions, three of TF32
//      for one product; splitting K and V into big and small costs three more instructions for each element and warp. At
//      d = 64 a warp has 192 matrix instructions for a block of keys (eight cycles each of a quarter of the
//      multiprocessor) and about 750 others (one cycle each).
//   2. o is written straight from registers, 16 bytes (16-bit types) or 32 bytes (float32) of a row at a time. Not tried:
//      whole rows through shared memory.
//   3. float32 in the emulator, whose tensor cores truncate sums. Against float64, mean errors of o are 0.6 to 1.2 times
//      those of plain float32 operations for d = 32, 64 and 128, and up to 1.3 times for d = 16, which has few roundings
//      beside the bit that an operand's split loses. Largest errors: up to 1.3 and 1.8 times.
//   4. cvt.rna.tf32.f32 takes four instructions (sm_80 and sm_90a); the split as written takes two and a subtraction.
//   5. float32, d = 16: a row is half of a line of 32 banks, so `across`, which reads V, meets every bank twice.
//   6. Smaller parts. On an H200, one head, causal, cold, d = 128, float32, us: n = 128 18.2, 256 30.2, 512 34.4, 1024 35.4,
//      which is 3 us for a block of 32 keys; a part had at least eight. Now it has at least two, and the launch that adds
//      parts begins while this one ends and reads four parts at a time. Predicted: about 16, 16, 17 and 18.
//      Measured: 15.8, 16.3, 17.3 and 24.0.
//
// Set by src/attention/flash/portable: PORTABLE_D (16, 32, 64, 128), PORTABLE_TYPE (lib/fragment.cuh), PORTABLE_CAUSAL,
// PORTABLE_WARPS, PORTABLE_TILES, PORTABLE_KEYS, PORTABLE_STAGES, PORTABLE_BLOCKS (a multiprocessor),
// PORTABLE_GROUPED (whether heads of q share one of k and v).
#if !defined(PORTABLE_D) || !defined(PORTABLE_TYPE) || !defined(PORTABLE_CAUSAL) || !defined(PORTABLE_WARPS) ||       \
    !defined(PORTABLE_TILES) || !defined(PORTABLE_KEYS) || !defined(PORTABLE_STAGES) || !defined(PORTABLE_BLOCKS) || \
    !defined(PORTABLE_GROUPED)
#error "portable_forward.cu takes its shape from src/attention/portable"
#endif

#include "lib/fragment.cuh"
#include "lib/order.cuh"

namespace {

constexpr int d = PORTABLE_D;
constexpr int tiles_a_warp = PORTABLE_TILES;
constexpr int warp_rows = 16 * tiles_a_warp;
constexpr int rows = PORTABLE_WARPS * warp_rows;
constexpr int keys = PORTABLE_KEYS;
constexpr int stages = PORTABLE_STAGES;
constexpr int threads = 32 * PORTABLE_WARPS;
constexpr bool is_float = element_bytes == 4;

static_assert(d == 16 || d == 32 || d == 64 || d == 128, "rows are of 16, 32, 64 or 128 elements");
static_assert(stages >= 2 && keys % 16 == 0);

using Layout = Rows<d>;

// Shared memory: Q, then K and V of each stage.
constexpr u32 q_bytes = rows * Layout::bytes;
constexpr u32 kv_bytes = keys * Layout::bytes;

// Steps of the summed dimension, and those that are summed before they are added to what there is.
constexpr int score_steps = d / depth;
constexpr int score_group = is_float && d == 128 ? 2 : 1;
constexpr int output_group = is_float ? (keys % 32 == 0 ? 4 : 2) : 1;
// Whether Q's operands stay in registers.
constexpr bool holds_q = !is_float && d * tiles_a_warp <= 128;

constexpr float infinity = __builtin_bit_cast(float, 0x7F800000);

} // namespace

struct Problem {
  int n_queries;
  int n_keys;
  int heads;
  int batch;
  // The factor of a score, to base e and to base 2: 1 / sqrt(d), and log2(e) times that.
  float scale;
  float scale_log2;
  // Heads that are computed at the same time, few enough that their K and V stay in the L2 cache.
  int heads_at_a_time;
  int splits;
  // Blocks of keys of one split.
  int split_blocks;
  // Heads of q that share a head of k and v: 1 without PORTABLE_GROUPED.
  int group_size;
  Tensor q;
  Tensor k;
  Tensor v;
  // (batch, heads, n_queries, d) and (batch, heads, n_queries).
  element *o;
  float *lse;
  // The same of each split, if there is more than one: (splits, batch, heads, n_queries, d) and without d.
  float *split_o;
  float *split_lse;
};

namespace {

// The number of blocks of keys that some query of the tile attends to; `row` is the tile's first query.
DEVICE int blocks_of(const Problem &problem, int row) {
  const int seen = PORTABLE_CAUSAL ? min(problem.n_keys, row + rows) : problem.n_keys;
  return (seen + keys - 1) / keys;
}

// The work of one thread block.
struct Work {
  int row;
  int head;
  int batch;
  int split;
  // Blocks of keys, from `first` to before `end`.
  int first;
  int end;

  DEVICE explicit Work(const Problem &problem) {
    const int tiles = (problem.n_queries + rows - 1) / rows;
    const Order order(static_cast<int>(blockIdx.x), tiles, problem.heads, problem.batch, problem.heads_at_a_time,
                      problem.splits);
    head = order.head;
    batch = order.batch;
    split = order.split;
    row = (PORTABLE_CAUSAL ? tiles - 1 - order.rank : order.rank) * rows;
    first = split * problem.split_blocks;
    end = min(blocks_of(problem, row), first + problem.split_blocks);
  }
};

// One warp's queries.
struct Worker {
  const Problem &problem;
  u32 q;
  // The first query of the tile and of the warp, and the first of the thread's two rows in each tile.
  int first_row;
  int lane;

  Left held[holds_q ? tiles_a_warp : 1][holds_q ? score_steps : 1];
  float s[tiles_a_warp][keys / 8][4];
  float o[tiles_a_warp][d / 8][4];
  float largest[tiles_a_warp][2];
  float sum[tiles_a_warp][2];

  DEVICE void start() {
    clear(o);
#pragma unroll
    for (int m = 0; m < tiles_a_warp; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) largest[m][r] = -infinity, sum[m][r] = 0.0f;
      if constexpr (holds_q) {
#pragma unroll
        for (int step = 0; step < score_steps; ++step) Layout::left(held[m][step], q, 16 * m, step);
      }
    }
  }

  // S = Q K^T (Eq. 4, unscaled).
  DEVICE void scores(u32 k) {
    multiply_along<d, score_group, holds_q, false>(s, k, [&](Left &a, int m, int step) {
      if constexpr (holds_q) {
        a = held[m][step];
      } else {
        Layout::left(a, q, 16 * m, step);
      }
    });
  }

  // Masks the keys after each query, and missing keys.
  DEVICE void mask(int block) {
    const int first = block * keys + 2 * (lane % 4);
#pragma unroll
    for (int m = 0; m < tiles_a_warp; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = first_row + 16 * m + lane / 4 + 8 * r;
        const int seen = (PORTABLE_CAUSAL ? min(problem.n_keys - 1, row) : problem.n_keys - 1) - first;
#pragma unroll
        for (int n = 0; n < keys / 8; ++n) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            if (8 * n + e > seen) s[m][n][2 * r + e] = -infinity;
          }
        }
      }
    }
  }

  // Replaces scores by P = exp(S - largest), adds to `sum`, and rescales O to the new largest score. float32 subtracts before it
  // scales, so that large scores keep their last bits.
  DEVICE void soften() {
    const float scale = problem.scale_log2;
#pragma unroll
    for (int m = 0; m < tiles_a_warp; ++m) {
      float factor[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float top = largest[m][r];
#pragma unroll
        for (int n = 0; n < keys / 8; ++n) top = fmaxf(top, fmaxf(s[m][n][2 * r], s[m][n][2 * r + 1]));
        top = fmaxf(top, __shfl_xor_sync(0xFFFFFFFF, top, 1));
        top = fmaxf(top, __shfl_xor_sync(0xFFFFFFFF, top, 2));
        // A row without a score so far has no largest score to subtract.
        const float shift = top == -infinity ? 0.0f : is_float ? top : top * scale;
        const auto power = [&](float score) {
          return exp2_fast(is_float ? (score - shift) * scale : fmaf(score, scale, -shift));
        };
        factor[r] = power(largest[m][r]);
        largest[m][r] = top;
        float total = 0.0f;
#pragma unroll
        for (int n = 0; n < keys / 8; ++n) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float &score = s[m][n][2 * r + e];
            score = power(score);
            total += score;
          }
        }
        sum[m][r] = fmaf(sum[m][r], factor[r], total);
      }
#pragma unroll
      for (int n = 0; n < d / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) o[m][n][i] *= factor[i / 2];
      }
    }
  }

  template <bool Masked> DEVICE void step(u32 k, u32 v, int block) {
    scores(k);
    if (Masked) mask(block);
    soften();
    // O += P V (Eq. 6).
    multiply_across<d, output_group>(o, s, v);
  }

  DEVICE void finish(const Work &work) {
    const long long heads = static_cast<long long>(problem.batch) * problem.heads;
    const long long head = static_cast<long long>(work.batch) * problem.heads + work.head;
    const bool whole = problem.splits == 1;
    const long long at = (whole ? head : work.split * heads + head) * problem.n_queries;
    float *lse = (whole ? problem.lse : problem.split_lse) + at;
#pragma unroll
    for (int m = 0; m < tiles_a_warp; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = first_row + 16 * m + lane / 4 + 8 * r;
        float total = sum[m][r];
        total += __shfl_xor_sync(0xFFFFFFFF, total, 1);
        total += __shfl_xor_sync(0xFFFFFFFF, total, 2);
        if (row >= problem.n_queries) continue;
        // A row without a key in this split has a sum of zero.
        const float inverse = total == 0.0f ? 0.0f : 1.0f / total;
        if (lane % 4 == 0) lse[row] = fmaf(largest[m][r], problem.scale, logf(total));
        const long long place = (at + row) * d + 2 * (lane % 4);
#pragma unroll
        for (int n = 0; n < d / 8; ++n) {
          const float first = o[m][n][2 * r] * inverse, second = o[m][n][2 * r + 1] * inverse;
          if (whole) {
            store_two(problem.o + place + 8 * n, first, second);
          } else {
            *reinterpret_cast<float2 *>(problem.split_o + place + 8 * n) = float2{first, second};
          }
        }
      }
    }
  }
};

} // namespace

extern "C" __global__ void __launch_bounds__(threads, PORTABLE_BLOCKS)
    portable_forward(const __grid_constant__ Problem problem) {
  allow_next_kernel();
  extern __shared__ unsigned char memory[];
  const u32 base = shared_address(memory);
  const Work work(problem);
  const int count = work.end - work.first;
  if (count <= 0) return;
  const int kv_head = PORTABLE_GROUPED ? work.head / problem.group_size : work.head;
  const element *k = problem.k.head(work.batch, kv_head), *v = problem.v.head(work.batch, kv_head);
  const auto place = [&](int turn) { return base + q_bytes + turn % stages * 2 * kv_bytes; };
  // The block of keys of a turn; the last block comes first.
  const auto copy = [&](int turn) {
    if (turn < count) {
      const int first = (work.end - 1 - turn) * keys;
      Layout::copy<keys, threads>(place(turn), k, problem.k.strides[2], first, problem.n_keys);
      Layout::copy<keys, threads>(place(turn) + kv_bytes, v, problem.v.strides[2], first, problem.n_keys);
    }
    copies_commit();
  };
  Layout::copy<rows, threads>(base, problem.q.head(work.batch, work.head), problem.q.strides[2], work.row,
                              problem.n_queries);
#pragma unroll
  for (int turn = 0; turn < stages - 1; ++turn) copy(turn);

  // Through a shuffle, so that the compiler knows the value is uniform in a warp.
  const int warp = __shfl_sync(0xFFFFFFFF, static_cast<int>(threadIdx.x) / 32, 0);
  const int first_row = work.row + warp * warp_rows;
  Worker worker{problem, base + warp * warp_rows * Layout::bytes, first_row, static_cast<int>(threadIdx.x) % 32};
  copies_wait<stages - 2>();
  __syncthreads();
  worker.start();
  // Every query of the warp attends to all keys of the blocks before this one, and none to blocks from `hidden` on.
  const int whole = (PORTABLE_CAUSAL ? min(problem.n_keys, first_row + 1) : problem.n_keys) / keys;
  const int hidden = PORTABLE_CAUSAL ? (first_row + warp_rows - 1) / keys + 1 : work.end;
  for (int turn = 0; turn < count; ++turn) {
    const int block = work.end - 1 - turn;
    copies_wait<stages - 2>();
    __syncthreads();
    copy(turn + stages - 1);
    const u32 now = place(turn);
    if (block >= hidden) continue;
    if (block >= whole) {
      worker.step<true>(now, now + kv_bytes, block);
    } else {
      worker.step<false>(now, now + kv_bytes, block);
    }
  }
  worker.finish(work);
}

// Combines the splits' O and lse; one warp for each row.
extern "C" __global__ void __launch_bounds__(256) portable_combine(const __grid_constant__ Problem problem) {
  await_last_kernel();
  const long long all = static_cast<long long>(problem.batch) * problem.heads * problem.n_queries;
  const long long at = static_cast<long long>(blockIdx.x) * 8 + threadIdx.x / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (at >= all) return;
  const int row = static_cast<int>(at % problem.n_queries);
  // Later splits have no keys and wrote nothing.
  const int splits = (blocks_of(problem, row / rows * rows) + problem.split_blocks - 1) / problem.split_blocks;
  float top = -infinity;
#pragma unroll 4
  for (int split = 0; split < splits; ++split) top = fmaxf(top, problem.split_lse[split * all + at]);
  constexpr int width = d / 32 > 0 ? d / 32 : 1;
  float o[width] = {}, total = 0.0f;
#pragma unroll 4
  for (int split = 0; split < splits; ++split) {
    const float weight = expf(problem.split_lse[split * all + at] - top);
    total += weight;
#pragma unroll
    for (int i = 0; i < width; ++i) {
      if (lane + 32 * i < d) o[i] = fmaf(weight, problem.split_o[(split * all + at) * d + lane + 32 * i], o[i]);
    }
  }
  if (lane == 0) problem.lse[at] = top + logf(total);
#pragma unroll
  for (int i = 0; i < width; ++i) {
    if (lane + 32 * i < d) problem.o[at * d + lane + 32 * i] = static_cast<element>(o[i] / total);
  }
}
