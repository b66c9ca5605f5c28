// AdamW over packed parameters: one array of float32 masters, gradients in float32 or in the type of the products, and a copy
// of the masters in that type for the next step's products.
//
// The equations are those of adamw.cu, (1) to (4). All parameters take every step, so one counter serves them all and no table
// of tensors is needed. Gradients are read as the products wrote them: in bfloat16 a widened copy would hold the same values.
//
// The bound is memory. An element reads p, m, v and g and writes p, m, v and its copy: 12 + 2 + 12 + 2 = 28 bytes with
// bfloat16 gradients, so 2.0e9 parameters take 13.3 ms at 4.2 TB/s.
//
// A thread takes four elements, and four more a block's width further: its loads, of 16 bytes from p, m and v, lie beside those
// of its neighbours, and eight are in flight before it needs the first. The shape (512 threads, two blocks a multiprocessor)
// and streaming loads and stores are those that adamw.cu's notebook found best.
//
// Notebook. xl's step on one H200, 2026-11-24, by Kineto inside the captured step (bfloat16, 2,048 tokens).
// Predicted 13.3 ms.
//   14.17 ms   eight elements a thread side by side: half of each 64 bytes that a warp's load touches belongs to the next load
//   13.9 ms    as above
//   no gain    on a second stream of lower priority, each layer as soon as its gradients were there: the step took 61.4 to 61.8 ms
//              with and without. The products fill the multiprocessors and draw the GPU's power limit, so that what ran beside
//              them made them as much slower. small gained 2 percent.
//   L2 cache   the update of each layer between the backward passes of two layers evicts what the next kernels would read:
//              rms_norm_backward takes 17.6 us instead of 15.2. Eight layers at a time take 16.1, and need 3.3 GB less for
//              gradients than all at the end.
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

// Four elements by one streaming load; each is used once a step.
DEVICE float4 load_four(const float *from) { return __ldcs(reinterpret_cast<const float4 *>(from)); }

DEVICE float4 load_four(const __nv_bfloat16 *from) {
  const uint2 pairs = __ldcs(reinterpret_cast<const uint2 *>(from));
  return {__uint_as_float(pairs.x << 16), __uint_as_float(pairs.x & 0xFFFF0000u), __uint_as_float(pairs.y << 16),
          __uint_as_float(pairs.y & 0xFFFF0000u)};
}

DEVICE void store_four(float *to, const float4 &x) { __stcs(reinterpret_cast<float4 *>(to), x); }

DEVICE void store_four(__nv_bfloat16 *to, const float4 &x) {
  const __nv_bfloat162 low = __floats2bfloat162_rn(x.x, x.y), high = __floats2bfloat162_rn(x.z, x.w);
  __stcs(reinterpret_cast<uint2 *>(to), uint2{reinterpret_cast<const u32 &>(low), reinterpret_cast<const u32 &>(high)});
}

// Equations (1) to (4) for one element.
DEVICE void update(float &p, float g, float &m, float &v, const Progress &now, const Factors &f) {
  p *= f.decay;
  m += f.blend1 * (g - m);
  v = f.beta2 * v + f.blend2 * g * g;
  p -= now.step_size * (m / (sqrtf(v) * now.inverse_root + f.eps));
}

// This block's elements of `fours` groups of four.
template <typename Gradient>
DEVICE void update_block(float *p, const Gradient *g, float *m, float *v, element *low, const Progress &now,
                         const Factors &f, long long fours) {
  const long long first = static_cast<long long>(blockIdx.x) * 2 * threads + threadIdx.x;
  float4 p4[2], g4[2], m4[2], v4[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (first + i * threads >= fours) continue;
    const long long at = 4 * (first + i * threads);
    g4[i] = load_four(g + at);
    m4[i] = load_four(m + at);
    v4[i] = load_four(v + at);
    p4[i] = load_four(p + at);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (first + i * threads >= fours) continue;
    const long long at = 4 * (first + i * threads);
    update(p4[i].x, g4[i].x, m4[i].x, v4[i].x, now, f);
    update(p4[i].y, g4[i].y, m4[i].y, v4[i].y, now, f);
    update(p4[i].z, g4[i].z, m4[i].z, v4[i].z, now, f);
    update(p4[i].w, g4[i].w, m4[i].w, v4[i].w, now, f);
    store_four(m + at, m4[i]);
    store_four(v + at, v4[i]);
    store_four(p + at, p4[i]);
    if (low != nullptr) store_four(low + at, p4[i]);
  }
}

// All arrays have 4 `fours` elements. `low` is the copy, or null.
extern "C" __global__ void __launch_bounds__(threads, 2)
    packed_adamw(float *p, const element *g, float *m, float *v, element *low, const void *progress, Factors factors,
                 long long fours) {
  update_block(p, g, m, v, low, *static_cast<const Progress *>(progress), factors, fours);
}

// As above, for parameters whose gradients are float32 and that need no copy.
extern "C" __global__ void __launch_bounds__(threads, 2)
    packed_adamw_float32(float *p, const float *g, float *m, float *v, const void *progress, Factors factors,
                         long long fours) {
  update_block(p, g, m, v, static_cast<element *>(nullptr), *static_cast<const Progress *>(progress), factors, fours);
}
