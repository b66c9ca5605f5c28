// SwiGLU's elementwise part on packed rows (gate, up), both ways.
//
// With g the gate, u the other projection and s = 1 / (1 + exp(-g)) (Shazeer 2020, Eq. 6):
//   a  = g s u                                                   (1)
//   du = da g s,  dg = da u s (1 + g (1 - s))                    (2)
// in float32, rounded once to the type of the products.
//
// The bound is memory: for bfloat16 and xl's 2,048 tokens of 6,400 79 MB forward and 131 MB backward, 19 and 31 us at
// 4.2 TB/s.
//
// Notebook. xl's step on one H200, 2026-11-24, by Kineto inside the captured step (bfloat16, 2,048 tokens).
// Predicted 19 us forward and 37 us backward, which then wrote a once more for the weight gradient and so moved 157 MB; measured
// 19.1 to 19.8 and 38.1 to 38.8 us. Both are at the bound: only a product that computes them in its own epilogue would be faster.
// 2026-11-27: a is kept from the forward pass (26 MB a layer), and the gradient takes gate_up's place.
//
// Set by src/model/fused/kernels.rs: STEP_BFLOAT16 (lib/eight.cuh). width is a multiple of 8.
#if !defined(STEP_BFLOAT16)
#error "swiglu.cu takes its types from src/model/fused/kernels.rs"
#endif

#include "lib/eight.cuh"

DEVICE float logistic(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }

// gate_up: (tokens, 2 width), a row's gates before its others; activated: (tokens, width). Grid: (tokens, any).
extern "C" __global__ void swiglu_forward(const element *gate_up, element *activated, int width) {
  allow_next_kernel();
  await_last_kernel();
  const long long token = blockIdx.x;
  const int column = 8 * (blockIdx.y * blockDim.x + threadIdx.x);
  if (column >= width) return;
  const element *row = gate_up + token * 2 * width;
  const Eight gate = load_eight(row + column), up = load_eight(row + width + column);
  Eight a;
#pragma unroll
  for (int i = 0; i < 8; ++i) a.at[i] = gate.at[i] * logistic(gate.at[i]) * up.at[i];
  store_eight(activated + token * width + column, a);
}

// As above; d_activated: (tokens, width). In place of gate_up comes its gradient.
extern "C" __global__ void swiglu_backward(element *gate_up, const element *d_activated, int width) {
  allow_next_kernel();
  await_last_kernel();
  const long long token = blockIdx.x;
  const int column = 8 * (blockIdx.y * blockDim.x + threadIdx.x);
  if (column >= width) return;
  element *row = gate_up + token * 2 * width + column;
  const Eight gate = load_eight(row), up = load_eight(row + width);
  const Eight d_a = load_eight(d_activated + token * width + column);
  Eight d_gate, d_up;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float s = logistic(gate.at[i]), silu = gate.at[i] * s;
    d_up.at[i] = d_a.at[i] * silu;
    d_gate.at[i] = d_a.at[i] * up.at[i] * s * (1.0f + gate.at[i] * (1.0f - s));
  }
  store_eight(row, d_gate);
  store_eight(row + width, d_up);
}
