// The cross-entropy of each token and its gradient by the logits, in place.
//
// For a row x of logits with the target c, m = max x and l = sum exp(x - m):
//   loss  = m + log l - x[c]                                     (1)
//   dx[j] = (exp(x[j] - m) / l - [j = c]) * scale                (2) scale = 1 / tokens, for the mean over tokens
//
// A block takes one row and reads it twice: once for m and l, each thread with a running maximum that rescales its sum
// (Milakov and Gimelshein 2018, Algorithm 3), once for (2), from the caches. A row is 20 kB in bfloat16 for 10,000 logits. The
// bound is memory: 41 MB read and as many written for 2,048 tokens, 20 us at 4.2 TB/s.
//
// A target outside the vocabulary gives a loss that is not a number.
//
// Notebook. xl's step on one H200, 2026-11-24, by Kineto inside the captured step (bfloat16, 2,048 tokens).
// Predicted 20 us; measured 33 to 36 us, once a step.
//
// Set by src/model/fused/kernels.rs: STEP_BFLOAT16 (lib/eight.cuh), ENTROPY_WIDE: whether the vocabulary is a multiple of 8,
// so that every row can be read in pieces of eight numbers.
#if !defined(STEP_BFLOAT16) || !defined(ENTROPY_WIDE)
#error "cross_entropy.cu takes its types from src/model/fused/kernels.rs"
#endif

#include "lib/eight.cuh"

// The running maximum of a thread's logits, and the sum of exp(x - maximum).
struct Running {
  float maximum, sum;
};

// Also for two that saw nothing, whose maximum is -infinity.
DEVICE Running merged(const Running &a, const Running &b) {
  const float maximum = fmaxf(a.maximum, b.maximum);
  const auto scaled = [maximum](const Running &r) { return r.sum == 0.0f ? 0.0f : r.sum * __expf(r.maximum - maximum); };
  return {maximum, scaled(a) + scaled(b)};
}

DEVICE Running shuffled(const Running &mine, int bits) {
  return {__shfl_xor_sync(0xFFFFFFFFu, mine.maximum, bits), __shfl_xor_sync(0xFFFFFFFFu, mine.sum, bits)};
}

// logits: (tokens, vocabulary), which (2) replaces; targets: (tokens); losses: (tokens).
extern "C" __global__ void cross_entropy(element *logits, const long long *targets, float *losses, int vocabulary,
                                         float scale) {
  extern __shared__ unsigned char memory[];
  Running *warps = reinterpret_cast<Running *>(memory);
  element *row = logits + static_cast<long long>(blockIdx.x) * vocabulary;
  const long long target = targets[blockIdx.x];
  constexpr int step = ENTROPY_WIDE ? 8 : 1;
  const float target_logit = target >= 0 && target < vocabulary ? number(row[target]) : __uint_as_float(0x7FC00000u);

  Running mine = {__uint_as_float(0xFF800000u), 0.0f};
  for (int column = step * threadIdx.x; column < vocabulary; column += step * blockDim.x) {
#if ENTROPY_WIDE
    const Eight x = load_eight(row + column);
#else
    const float x[1] = {number(row[column])};
    const auto &at = x;
#endif
#if ENTROPY_WIDE
    const auto &at = x.at;
#endif
    float maximum = mine.maximum;
#pragma unroll
    for (int i = 0; i < step; ++i) maximum = fmaxf(maximum, at[i]);
    float sum = mine.sum == 0.0f ? 0.0f : mine.sum * __expf(mine.maximum - maximum);
#pragma unroll
    for (int i = 0; i < step; ++i) sum += __expf(at[i] - maximum);
    mine = {maximum, sum};
  }
#pragma unroll
  for (int bits = 16; bits > 0; bits /= 2) mine = merged(mine, shuffled(mine, bits));
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = mine;
  // All threads have read the target's logit before any writes it.
  __syncthreads();
  Running all = warps[0];
  for (u32 warp = 1; warp < blockDim.x / 32; ++warp) all = merged(all, warps[warp]);
  if (threadIdx.x == 0) losses[blockIdx.x] = all.maximum + __logf(all.sum) - target_logit;

  const float factor = scale / all.sum;
  for (int column = step * threadIdx.x; column < vocabulary; column += step * blockDim.x) {
#if ENTROPY_WIDE
    Eight x = load_eight(row + column);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      x.at[i] = factor * __expf(x.at[i] - all.maximum) - (column + i == target ? scale : 0.0f);
    }
    store_eight(row + column, x);
#else
    put(row + column, factor * __expf(number(row[column]) - all.maximum) - (column == target ? scale : 0.0f));
#endif
  }
}
