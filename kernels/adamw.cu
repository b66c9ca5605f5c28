// AdamW over all parameters of a model at once: float32, with the semantics of torch.optim.AdamW.
//
// The equations (Loshchilov and Hutter 2019, Algorithm 2, in the order of torch/optim/adamw.py; t counts the steps of
// one tensor from 1):
//   p <- p (1 - lr weight_decay)                                      (1) decoupled decay, before the step
//   m <- m + (1 - beta1) (g - m)                                      (2)
//   v <- beta2 v + (1 - beta2) g g                                    (3)
//   p <- p - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)   (4) eps is added to the corrected root
//
// The bound. An element reads p, g, m, v and writes p, m, v: 7 x 4 = 28 bytes, for about 12 operations. So the time is at
// least
//   28 bytes x P / copy bandwidth,
// 13.0 ms for the 2.00e9 parameters of xl at the 4.3 TB/s that a large copy reaches on an H200. A launch for each tensor (xl
// has 435), the start of blocks and the last wave must all be hidden.
//
// How the work is divided:
// - One launch takes up to ADAMW_TENSORS tensors. Their table is a kernel parameter, passed by value: parameters may be
//   32,764 bytes since CUDA 12.1. So a step copies nothing from the host, and a CUDA graph keeps its own copy.
// - Tensors are divided into chunks of ADAMW_CHUNK elements, numbered through all tensors of the launch. Block b takes chunk
//   b and finds its tensor by a binary search in `first_chunk`, which stays in the constant cache. Blocks in the order of
//   memory let the hardware balance the load, and keep the seven streams of all resident blocks close together in DRAM.
// - A thread has 4 x ADAMW_VECTORS loads of 16 bytes in flight before it needs the first. By Little's law 4.8 TB/s over 132
//   multiprocessors at 0.7 us needs 25 KB in flight on each; 6 blocks of 256 threads have 96 KB for each vector.
// - A tensor whose four arrays do not all start on a multiple of 16 bytes, and the last elements of one whose length is no
//   multiple of four, are read element by element: 4 bytes a thread, still coalesced.
//
// The device counts the steps, one counter a tensor: `adamw_advance` runs before each update and also computes the bias
// corrections in double. So a captured step counts on at each replay, and a parameter without a gradient is in no table and
// keeps its count. lr, the betas, eps and the decay are parameters of the launch: a captured step keeps those of its capture.
//
// Rounding: one IEEE root and one IEEE division for each element, as in PyTorch. The two corrections are factors (rounded
// once from double), not divisions. Products and sums contract to fused multiply-adds.
//
// Resources as compiled: snapshots/kernels/adamw.snap. Against PyTorch's own steps: torch_compile in the report.
//
// Notebook. Tried by the check in src/problems/benchmarking_script/fused_adamw/variants.rs on one H200, 2026-11-21, as a
// share of a copy's 4.23 TB/s; small has 1.29e8 parameters, xl 2.00e9. Predicted for xl: 13.2 ms.
//   threads blocks vectors chunk streaming   small   xl
//       256      5       2  4096       yes   86.6 %  95.0 %   the first version
//       256      5       2  4096        no   87.4 %  95.1 %   cache hints make no difference
//       256      6       1  4096       yes   88.1 %  95.4 %
//       256      2       4  4096       yes   87.7 %  95.3 %
//       256      5       2  2048       yes   87.8 %  95.8 %
//       256      5       2 16384       yes   86.1 %  93.7 %   large chunks lengthen the last wave
//       256      5       2 65536       yes   84.7 %  93.2 %
//       128     10       2  4096       yes   87.6 %  95.5 %
//       512      2       2  4096       yes   89.0 %  96.3 %   kept: 13.7 ms for xl
// For small, the launch of two kernels and the last wave remain, about 0.1 ms.

#if !defined(ADAMW_THREADS) || !defined(ADAMW_BLOCKS) || !defined(ADAMW_VECTORS) || !defined(ADAMW_CHUNK) || \
    !defined(ADAMW_TENSORS) || !defined(ADAMW_TABLE_WORDS) || !defined(ADAMW_STREAMING)
#error "adamw.cu takes its shape from src/model/fused_adamw.rs"
#endif

static_assert(ADAMW_CHUNK % (4 * ADAMW_THREADS * ADAMW_VECTORS) == 0, "a full chunk leaves no thread without work");

// How far one tensor has come; 16 bytes, written by adamw_advance alone.
struct Progress {
  unsigned long long steps;
  float step_size;     // lr / (1 - beta1^t)
  float inverse_root;  // 1 / sqrt(1 - beta2^t)
};
static_assert(sizeof(Progress) == 16, "src/model/fused_adamw.rs makes two 8-byte words of it");

// The tensors of one launch, as src/model/fused_adamw/table.rs writes them.
struct Table {
  float *p[ADAMW_TENSORS];
  const float *g[ADAMW_TENSORS];
  float *m[ADAMW_TENSORS];
  float *v[ADAMW_TENSORS];
  Progress *progress[ADAMW_TENSORS];
  long long elements[ADAMW_TENSORS];
  unsigned first_chunk[ADAMW_TENSORS];  // of each tensor; ascending
  unsigned long long count;
};

// By value, rounded once from double on the host.
struct Factors {
  float decay;   // 1 - lr weight_decay
  float blend1;  // 1 - beta1
  float beta2;
  float blend2;  // 1 - beta2
  float eps;
  float unused;
};

static_assert(sizeof(Table) == 8 * ADAMW_TABLE_WORDS, "what the host writes is what is read here");
static_assert(sizeof(Table) + sizeof(Factors) <= 32764, "kernel parameters end there");

// base^exponent by squaring: at most 64 multiplications, each rounded once.
__device__ double power(double base, unsigned long long exponent) {
  double result = 1.0;
  for (; exponent != 0; exponent >>= 1, base *= base) {
    if (exponent & 1) result *= base;
  }
  return result;
}

// One thread for each tensor.
extern "C" __global__ void adamw_advance(const __grid_constant__ Table table, double lr, double beta1, double beta2) {
  const unsigned tensor = blockIdx.x * blockDim.x + threadIdx.x;
  if (tensor >= table.count) return;
  Progress *progress = table.progress[tensor];
  const unsigned long long steps = progress->steps + 1;
  progress->steps = steps;
  progress->step_size = static_cast<float>(lr / (1.0 - power(beta1, steps)));
  progress->inverse_root = static_cast<float>(1.0 / sqrt(1.0 - power(beta2, steps)));
}

// Each byte is used once a step. With ADAMW_STREAMING the caches evict it first.
template <typename T> __device__ T load(const T *from) {
#if ADAMW_STREAMING
  return __ldcs(from);
#else
  return *from;
#endif
}

template <typename T> __device__ void store(T *to, T value) {
#if ADAMW_STREAMING
  __stcs(to, value);
#else
  *to = value;
#endif
}

// Equations (1) to (4) for one element.
__device__ void update(float &p, float g, float &m, float &v, const Factors &f, const Progress &now) {
  p *= f.decay;
  m += f.blend1 * (g - m);
  v = f.beta2 * v + f.blend2 * g * g;
  p -= now.step_size * (m / (sqrtf(v) * now.inverse_root + f.eps));
}

__device__ void update(float4 &p, float4 g, float4 &m, float4 &v, const Factors &f, const Progress &now) {
  update(p.x, g.x, m.x, v.x, f, now);
  update(p.y, g.y, m.y, v.y, f, now);
  update(p.z, g.z, m.z, v.z, f, now);
  update(p.w, g.w, m.w, v.w, f, now);
}

// `length` items of one chunk, float4 or float, by all threads of the block.
template <typename T>
__device__ void update_all(T *__restrict__ p, const T *__restrict__ g, T *__restrict__ m, T *__restrict__ v, int length,
                           const Factors &f, const Progress &now) {
#pragma unroll 1  // further loads of one thread would cost the registers of other threads
  for (int start = threadIdx.x; start < length; start += ADAMW_THREADS * ADAMW_VECTORS) {
    T ps[ADAMW_VECTORS], gs[ADAMW_VECTORS], ms[ADAMW_VECTORS], vs[ADAMW_VECTORS];
#pragma unroll
    for (int i = 0; i < ADAMW_VECTORS; ++i) {
      const int at = start + i * ADAMW_THREADS;
      if (at < length) {
        gs[i] = load(g + at);
        ms[i] = load(m + at);
        vs[i] = load(v + at);
        ps[i] = load(p + at);
      }
    }
#pragma unroll
    for (int i = 0; i < ADAMW_VECTORS; ++i) {
      const int at = start + i * ADAMW_THREADS;
      if (at < length) {
        update(ps[i], gs[i], ms[i], vs[i], f, now);
        store(m + at, ms[i]);
        store(v + at, vs[i]);
        store(p + at, ps[i]);
      }
    }
  }
}

// The tensor that `chunk` belongs to.
__device__ unsigned tensor_of(const Table &table, unsigned chunk) {
  unsigned low = 0, high = static_cast<unsigned>(table.count);
  while (high - low > 1) {
    const unsigned middle = (low + high) / 2;
    if (table.first_chunk[middle] <= chunk) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// One block for each chunk.
extern "C" __global__ void __launch_bounds__(ADAMW_THREADS, ADAMW_BLOCKS)
    adamw_update(const __grid_constant__ Table table, const __grid_constant__ Factors factors) {
  const unsigned tensor = tensor_of(table, blockIdx.x);
  const long long start = static_cast<long long>(blockIdx.x - table.first_chunk[tensor]) * ADAMW_CHUNK;
  const long long left = table.elements[tensor] - start;
  const int length = left < ADAMW_CHUNK ? static_cast<int>(left) : ADAMW_CHUNK;
  float *p = table.p[tensor] + start, *m = table.m[tensor] + start, *v = table.v[tensor] + start;
  const float *g = table.g[tensor] + start;
  const Progress now = *table.progress[tensor];

  const auto address = [](const void *pointer) { return reinterpret_cast<unsigned long long>(pointer); };
  const bool aligned = ((address(p) | address(g) | address(m) | address(v)) & 15) == 0;
  const int vectors = aligned ? length / 4 : 0;
  update_all(reinterpret_cast<float4 *>(p), reinterpret_cast<const float4 *>(g), reinterpret_cast<float4 *>(m),
             reinterpret_cast<float4 *>(v), vectors, factors, now);
  const int done = 4 * vectors;
  update_all(p + done, g + done, m + done, v + done, length - done, factors, now);
}
