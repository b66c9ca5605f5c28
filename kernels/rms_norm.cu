// RMSNorm with the residual addition before it, and the backward pass of both with the gain's gradient.
//
// With x the row of the residual stream (float32), a the output of the sublayer before (the type of the products), g the
// gain and r = 1 / sqrt(mean(x^2) + eps) (Zhang and Sennrich 2019, Eq. 4):
//   x <- x + a                                                  (1)
//   y  = g x r                                                  (2) rounded to the type of the products
//   dg = sum over rows of dy x r                                (3)
//   dx = dx + r (dy g - x r mean(dy g x r))                     (4) the first term is the residual path's
//
// The bound is memory. A row of d numbers, for bfloat16 products, reads and writes
//   forward   4 + 2 + 4 + 2 = 12 d bytes, backward   4 + 2 + 4 + 4 + 2 = 16 d bytes,
// so that xl's 2,048 rows of 1,600 take 9.4 us and 12.5 us at the 4.2 TB/s of a large copy; much of it stays in the L2 cache.
//
// How the work is divided:
// - Forward: a block for each row, eight numbers a thread, one sum over the block.
// - Backward: twice as many blocks as multiprocessors, each over every gridDim-th row. A thread keeps its columns of dg in
//   registers and reads its part of the next row before it waits for the sum of this one. Each block writes its dg as a
//   row of `partial`, which rms_norm_gain_gradients adds up in the order of blocks: no atomics, the same bits at every run.
//
// Notebook. xl's step on one H200, 2026-11-24, by Kineto inside the captured step (bfloat16, 2,048 tokens).
// Predicted 9.4 us forward and 12.5 us backward; measured 10.5 to 11.2 and 15.2 to 16.1 us. The gains' sums take 48 us a step.
//
// Set by src/model/fused/kernels.rs: STEP_BFLOAT16 (lib/eight.cuh), NORM_THREADS, NORM_ITEMS (pieces of eight numbers that a
// thread has of a row). d is a multiple of 8 and at most 8 NORM_THREADS NORM_ITEMS.
#if !defined(STEP_BFLOAT16) || !defined(NORM_THREADS) || !defined(NORM_ITEMS)
#error "rms_norm.cu takes its shape from src/model/fused/kernels.rs"
#endif

#include "lib/eight.cuh"

// The column of this thread's piece `item`.
DEVICE int column_of(int item) { return 8 * (threadIdx.x + item * NORM_THREADS); }

// (1) and (2) for the row of this block; without `added` there is no (1) and `sum` is not written. h, added, sum, y:
// (rows, d); inverse_rms: (rows).
extern "C" __global__ void __launch_bounds__(NORM_THREADS)
    residual_rms_norm(const float *h, const element *added, float *sum, const float *gain, element *y, float *inverse_rms,
                      int d, float eps) {
  allow_next_kernel();
  await_last_kernel();
  extern __shared__ unsigned char memory[];
  const long long row = static_cast<long long>(blockIdx.x) * d;
  Eight x[NORM_ITEMS];
  float squares = 0.0f;
#pragma unroll
  for (int item = 0; item < NORM_ITEMS; ++item) {
    const int column = column_of(item);
    if (column >= d) continue;
    x[item] = load_eight(h + row + column);
    if (added != nullptr) {
      const Eight a = load_eight(added + row + column);
#pragma unroll
      for (int i = 0; i < 8; ++i) x[item].at[i] += a.at[i];
      store_eight(sum + row + column, x[item]);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) squares += x[item].at[i] * x[item].at[i];
  }
  const float r = rsqrtf(block_sum(squares, reinterpret_cast<float *>(memory)) / d + eps);
  if (threadIdx.x == 0) inverse_rms[blockIdx.x] = r;
#pragma unroll
  for (int item = 0; item < NORM_ITEMS; ++item) {
    const int column = column_of(item);
    if (column >= d) continue;
    Eight out = load_eight(gain + column);
#pragma unroll
    for (int i = 0; i < 8; ++i) out.at[i] *= x[item].at[i] * r;
    store_eight(y + row + column, out);
  }
}

// What the backward pass reads of a row.
struct Row {
  Eight x[NORM_ITEMS], dy[NORM_ITEMS], dx[NORM_ITEMS];
  float r;
};

// (4) for every gridDim.x-th row, and this block's part of (3). With `first` there is no residual path: dx holds nothing
// before. h, dy, dx, dx_low: (rows, d); `dx_low` is dx in the type of the products, or null; partial: (gridDim.x, d).
extern "C" __global__ void __launch_bounds__(NORM_THREADS)
    rms_norm_backward(const float *h, const float *inverse_rms, const float *gain, const element *dy, float *dx,
                      element *dx_low, float *partial, int rows, int d, int first) {
  allow_next_kernel();
  await_last_kernel();
  extern __shared__ unsigned char memory[];
  float *sums = reinterpret_cast<float *>(memory);
  const auto read = [&](int row) {
    Row now;
    const long long start = static_cast<long long>(row) * d;
    now.r = inverse_rms[row];
#pragma unroll
    for (int item = 0; item < NORM_ITEMS; ++item) {
      const int column = column_of(item);
      now.x[item] = now.dy[item] = now.dx[item] = {};
      if (column >= d) continue;
      now.x[item] = load_eight(h + start + column);
      now.dy[item] = load_eight(dy + start + column);
      if (!first) now.dx[item] = load_eight(dx + start + column);
    }
    return now;
  };
  Eight gains[NORM_ITEMS], gain_gradient[NORM_ITEMS];
#pragma unroll
  for (int item = 0; item < NORM_ITEMS; ++item) {
    gains[item] = gain_gradient[item] = {};
    if (column_of(item) < d) gains[item] = load_eight(gain + column_of(item));
  }
  Row now = {};
  if (blockIdx.x < rows) now = read(blockIdx.x);
  for (int row = blockIdx.x, turn = 0; row < rows; row += gridDim.x, turn ^= 1) {
    float product = 0.0f;
#pragma unroll
    for (int item = 0; item < NORM_ITEMS; ++item) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float normed = now.x[item].at[i] * now.r;
        gain_gradient[item].at[i] += now.dy[item].at[i] * normed;
        product += now.dy[item].at[i] * gains[item].at[i] * normed;
      }
    }
    Row next = {};
    if (row + gridDim.x < rows) next = read(row + gridDim.x);
    // Two sets of sums in turns: a set is written again only after the barrier of the other one.
    const float mean = block_sum(product, sums + 32 * turn) / d;
    const long long start = static_cast<long long>(row) * d;
#pragma unroll
    for (int item = 0; item < NORM_ITEMS; ++item) {
      const int column = column_of(item);
      if (column >= d) continue;
      Eight out = now.dx[item];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float normed = now.x[item].at[i] * now.r;
        out.at[i] += now.r * (now.dy[item].at[i] * gains[item].at[i] - normed * mean);
      }
      store_eight(dx + start + column, out);
      if (dx_low != nullptr) store_eight(dx_low + start + column, out);
    }
    now = next;
  }
#pragma unroll
  for (int item = 0; item < NORM_ITEMS; ++item) {
    if (column_of(item) < d) store_eight(partial + static_cast<long long>(blockIdx.x) * d + column_of(item), gain_gradient[item]);
  }
}

// (3) of all norms: norm blockIdx.y's `blocks` rows of `partial` (norms, blocks, d) added up in their order; gradient:
// (norms, d).
extern "C" __global__ void rms_norm_gain_gradients(const float *partial, float *gradient, int blocks, int d) {
  const int column = blockIdx.x * blockDim.x + threadIdx.x;
  if (column >= d) return;
  const float *from = partial + static_cast<long long>(blockIdx.y) * blocks * d + column;
  float sum = 0.0f;
#pragma unroll 8
  for (int block = 0; block < blocks; ++block) sum += from[static_cast<long long>(block) * d];
  gradient[static_cast<long long>(blockIdx.y) * d + column] = sum;
}
