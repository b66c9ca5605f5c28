// AdamW over packed parameters: one array of float32 masters, gradients in float32 or in the type of the products, and a copy
// of the masters in that type for the next step's products.
//
// The equations are those of adamw.cu, (1) to (4). All parameters take every step, so one counter serves them all and no table
// of tensors is needed. Gradients are read as the products wrote them: in bfloat16 a widened copy would hold the same values.
//
// The bound is memory. An element reads p, m, v and g and writes p, m, v and its copy: 12 + 2 + 12 + 2 = 28 bytes with
// bfloat16 gradients, so 2.0e9 parameters take 13.3 ms at 4.2 TB/s.
//
// A thread takes eight elements: seven loads of 16 bytes are in flight before it needs the first. The shape (512 threads, two
// blocks a multiprocessor) is the one that adamw.cu's notebook found best.
//
// Set by src/model/fused/kernels.rs: STEP_BFLOAT16 (lib/eight.cuh).
#if !defined(STEP_BFLOAT16)
#error "packed_adamw.cu takes its types from src/model/fused/kernels.rs"
#endif

#include "lib/eight.cuh"

constexpr int threads = 512;

// How far all parameters have come; 16 bytes, written by packed_adamw_advance alone.
struct Progress {
  unsigned long long steps;
  float step_size;     // lr / (1 - beta1^t)
  float inverse_root;  // 1 / sqrt(1 - beta2^t)
};

// By value, rounded once from double on the host.
struct Factors {
  float decay;   // 1 - lr weight_decay
  float blend1;  // 1 - beta1
  float beta2;
  float blend2;  // 1 - beta2
  float eps;
};

// base^exponent by squaring.
__device__ double power(double base, unsigned long long exponent) {
  double result = 1.0;
  for (; exponent != 0; exponent >>= 1, base *= base) {
    if (exponent & 1) result *= base;
  }
  return result;
}

// One thread counts.
extern "C" __global__ void packed_adamw_advance(void *progress, double lr, double beta1, double beta2) {
  if (threadIdx.x != 0) return;
  Progress &now = *static_cast<Progress *>(progress);
  now.steps += 1;
  now.step_size = static_cast<float>(lr / (1.0 - power(beta1, now.steps)));
  now.inverse_root = static_cast<float>(1.0 / sqrt(1.0 - power(beta2, now.steps)));
}

// (1) to (4) for the eight elements from `start` on.
template <typename Gradient>
__device__ void update_eight(float *p, const Gradient *g, float *m, float *v, element *low, const Progress &now,
                             const Factors &f) {
  const Eight gradient = load_eight(g);
  Eight p8 = load_eight(p), m8 = load_eight(m), v8 = load_eight(v);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float gi = gradient.at[i];
    p8.at[i] *= f.decay;
    m8.at[i] += f.blend1 * (gi - m8.at[i]);
    v8.at[i] = f.beta2 * v8.at[i] + f.blend2 * gi * gi;
    p8.at[i] -= now.step_size * (m8.at[i] / (sqrtf(v8.at[i]) * now.inverse_root + f.eps));
  }
  store_eight(p, p8);
  store_eight(m, m8);
  store_eight(v, v8);
  if (low != nullptr) store_eight(low, p8);
}

// `pieces` pieces of eight elements, one a thread. `low` is the copy, or null.
extern "C" __global__ void __launch_bounds__(threads, 2)
    packed_adamw(float *p, const element *g, float *m, float *v, element *low, const void *progress, Factors factors,
                 long long pieces) {
  const long long piece = static_cast<long long>(blockIdx.x) * threads + threadIdx.x;
  if (piece >= pieces) return;
  const Progress now = *static_cast<const Progress *>(progress);
  const long long at = 8 * piece;
  update_eight(p + at, g + at, m + at, v + at, low == nullptr ? nullptr : low + at, now, factors);
}

// As above, for parameters whose gradients are float32 and that need no copy.
extern "C" __global__ void __launch_bounds__(threads, 2)
    packed_adamw_float32(float *p, const float *g, float *m, float *v, const void *progress, Factors factors,
                         long long pieces) {
  const long long piece = static_cast<long long>(blockIdx.x) * threads + threadIdx.x;
  if (piece >= pieces) return;
  const Progress now = *static_cast<const Progress *>(progress);
  const long long at = 8 * piece;
  update_eight(p + at, g + at, m + at, v + at, static_cast<element *>(nullptr), now, factors);
}
