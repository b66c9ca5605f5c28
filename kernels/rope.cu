// Rotary positions on packed queries, keys and values, both ways.
//
// A pair (a, b) = (x[2i], x[2i+1]) of a head at position t turns by the angle w = t theta^(-2i / d_head):
//   a' = a cos w - b sin w,  b' = a sin w + b cos w              (1) RoFormer, Eq. 15
// and its gradient turns back, by -w. The tables of cosines and sines are float32, formed in float64
// (src/model/rope.rs).
//
// A row of `qkv` is a token: queries of all heads, then keys, then values, each `width` = heads * d_head numbers. A block takes
// one token, a thread eight numbers (four pairs) at a time. The forward pass turns queries and keys in place. The backward pass
// reads the gradients that attention gives, (batch, heads, seq, d_head), and writes them as rows of `qkv`: the transposition
// costs no pass of its own.
//
// The bound is memory: for bfloat16 and xl's 2,048 tokens 26 MB forward and 39 MB backward, 6 and 9 us at 4.2 TB/s.
//
// Notebook. xl's step on one H200, 2026-11-24, by Kineto inside the captured step (bfloat16, 2,048 tokens).
// Predicted 6 us forward and 9 us backward; measured 6.5 to 7.1 and 12.5 to 13.0 us. The backward pass reads pieces of 128 bytes.
//
// Set by src/model/fused/kernels.rs: STEP_BFLOAT16 (lib/eight.cuh). d_head is a multiple of 8.
#if !defined(STEP_BFLOAT16)
#error "rope.cu takes its types from src/model/fused/kernels.rs"
#endif

#include "lib/eight.cuh"

// (1) for four pairs whose first number is number `i` of the head; `direction` is 1, or -1 to turn back.
DEVICE Eight turned(const Eight &x, const float *cosines, const float *sines, float direction) {
  const float4 c4 = *reinterpret_cast<const float4 *>(cosines), s4 = *reinterpret_cast<const float4 *>(sines);
  const float c[4] = {c4.x, c4.y, c4.z, c4.w}, s[4] = {s4.x, s4.y, s4.z, s4.w};
  Eight out;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float a = x.at[2 * i], b = x.at[2 * i + 1], sine = direction * s[i];
    out.at[2 * i] = a * c[i] - b * sine;
    out.at[2 * i + 1] = a * sine + b * c[i];
  }
  return out;
}

// qkv: (tokens, 3 width); cosines, sines: (at least seq, d_head / 2).
extern "C" __global__ void rope_forward(element *qkv, const float *cosines, const float *sines, int seq, int width,
                                        int d_head) {
  allow_next_kernel();
  await_last_kernel();
  element *row = qkv + static_cast<long long>(blockIdx.x) * 3 * width;
  const int angles = blockIdx.x % seq * (d_head / 2);
  for (int column = 8 * threadIdx.x; column < 2 * width; column += 8 * blockDim.x) {
    const int angle = angles + column % d_head / 2;
    store_eight(row + column, turned(load_eight(row + column), cosines + angle, sines + angle, 1.0f));
  }
}

// dq, dk, dv: (batch, width / d_head, seq, d_head); dqkv: (batch * seq, 3 width).
extern "C" __global__ void rope_backward(const element *dq, const element *dk, const element *dv, element *dqkv,
                                         const float *cosines, const float *sines, int seq, int width, int d_head) {
  allow_next_kernel();
  await_last_kernel();
  const long long heads = width / d_head, batch = blockIdx.x / seq, position = blockIdx.x % seq;
  element *row = dqkv + static_cast<long long>(blockIdx.x) * 3 * width;
  for (int column = 8 * threadIdx.x; column < 3 * width; column += 8 * blockDim.x) {
    const int part = column / width, within = column - part * width, head = within / d_head, i = within % d_head;
    const element *from = part == 0 ? dq : part == 1 ? dk : dv;
    Eight x = load_eight(from + ((batch * heads + head) * seq + position) * d_head + i);
    const long long angle = position * (d_head / 2) + i / 2;
    if (part < 2) x = turned(x, cosines + angle, sines + angle, -1.0f);
    store_eight(row + column, x);
  }
}
