// The gradient of the embedding: row v is the sum of the gradients of all tokens v, in their order.
//
// A warp takes one row of the vocabulary. It looks through all tokens, 32 at a time, and adds the gradient of each match to its
// row. Each lane adds to its own columns, so there are no atomics and every run gives the same bits. A row without a match is
// set to zero.
//
// The bound is memory: the rows written (64 MB for 10,000 of 1,600 numbers, 15 us at 4.2 TB/s), the gradients read once, and
// for every warp the tokens, 8 bytes each, from the L2 cache: 164 MB for 2,048 tokens.
// Notebook. xl's step on one H200, 2026-11-24, by Kineto inside the captured step (bfloat16, 2,048 tokens).
// Predicted 15 us for the rows alone; measured 66 to 69 us, once a step: each warp looks through all tokens.
#include "lib/base.cuh"

// d_h: (tokens, d) float32; gradient: (vocabulary, d) float32; d is a multiple of 4. A block of whole warps.
extern "C" __global__ void embedding_gradient(const long long *tokens, const float *d_h, float *gradient, int count,
                                              int vocabulary, int d) {
  const int lane = threadIdx.x % 32;
  const long long row = static_cast<long long>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
  if (row >= vocabulary) return;
  float *to = gradient + row * d;
  bool is_first = true;
  for (int start = 0; start < count; start += 32) {
    const bool matches = start + lane < count && tokens[start + lane] == row;
    for (u32 left = __ballot_sync(0xFFFFFFFFu, matches); left != 0; left &= left - 1) {
      const float *from = d_h + static_cast<long long>(start + __ffs(left) - 1) * d;
      for (int column = 4 * lane; column < d; column += 128) {
        float4 sum = *reinterpret_cast<const float4 *>(from + column);
        if (!is_first) {
          const float4 before = *reinterpret_cast<const float4 *>(to + column);
          sum = {before.x + sum.x, before.y + sum.y, before.z + sum.z, before.w + sum.w};
        }
        *reinterpret_cast<float4 *>(to + column) = sum;
      }
      is_first = false;
    }
  }
  if (!is_first) return;
  for (int column = 4 * lane; column < d; column += 128) {
    *reinterpret_cast<float4 *>(to + column) = {0.0f, 0.0f, 0.0f, 0.0f};
  }
}
