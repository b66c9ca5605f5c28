// Rows in pieces of eight numbers, in float32 or in the type of the products (STEP_BFLOAT16: bfloat16, else float32).
#pragma once

#include "lib/base.cuh"
#include <cuda_bf16.h>

#if STEP_BFLOAT16
typedef __nv_bfloat16 element;
#else
typedef float element;
#endif

struct Eight {
  float at[8];
};

DEVICE Eight load_eight(const float *from) {
  const float4 *halves = reinterpret_cast<const float4 *>(from);
  const float4 a = halves[0], b = halves[1];
  return {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
}

DEVICE Eight load_eight(const __nv_bfloat16 *from) {
  const uint4 pairs = *reinterpret_cast<const uint4 *>(from);
  const u32 words[4] = {pairs.x, pairs.y, pairs.z, pairs.w};
  Eight eight;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    // A bfloat16 is the upper half of a float32.
    eight.at[2 * i] = __uint_as_float(words[i] << 16);
    eight.at[2 * i + 1] = __uint_as_float(words[i] & 0xFFFF0000u);
  }
  return eight;
}

DEVICE void store_eight(float *to, const Eight &x) {
  float4 *halves = reinterpret_cast<float4 *>(to);
  halves[0] = {x.at[0], x.at[1], x.at[2], x.at[3]};
  halves[1] = {x.at[4], x.at[5], x.at[6], x.at[7]};
}

// Rounded to nearest.
DEVICE void store_eight(__nv_bfloat16 *to, const Eight &x) {
  u32 words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(x.at[2 * i], x.at[2 * i + 1]);
    words[i] = reinterpret_cast<const u32 &>(pair);
  }
  *reinterpret_cast<uint4 *>(to) = {words[0], words[1], words[2], words[3]};
}

// One number.
DEVICE float number(float x) { return x; }
DEVICE float number(__nv_bfloat16 x) { return __bfloat162float(x); }
DEVICE void put(float *to, float x) { *to = x; }
DEVICE void put(__nv_bfloat16 *to, float x) { *to = __float2bfloat16_rn(x); }

// The sum of `mine` over the block, in the same order at every run, for all threads. `sums` has a float for each warp,
// which must not be in use; it is free again after the next barrier.
DEVICE float block_sum(float mine, float *sums) {
#pragma unroll
  for (int bits = 16; bits > 0; bits /= 2) mine += __shfl_xor_sync(0xFFFFFFFFu, mine, bits);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = mine;
  __syncthreads();
  float sum = 0.0f;
  for (u32 warp = 0; warp < blockDim.x / 32; ++warp) sum += sums[warp];
  return sum;
}
