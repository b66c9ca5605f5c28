// Operands of a warp's matrix instructions for the type that a kernel is compiled for, by PORTABLE_TYPE: bfloat16 (0),
// float16 (1) or float32 (2); sums are in float32.
//
// float32 is multiplied nearly to its own accuracy in three products of tf32: x = big + small, where big is x rounded
// to tf32 and small, the rest, loses its last bit in a quarter of all cases; a b = a.small b.big + a.big b.small +
// a.big b.big, less what is below 2^-22 of it. Tensor cores cut sums off instead of rounding them. So a few steps are
// summed by themselves, the small products first, and ordinary additions gather the results.
#pragma once

#include "lib/mma.cuh"

#if PORTABLE_TYPE == 0
#include <cuda_bf16.h>
typedef __nv_bfloat16 element;
#elif PORTABLE_TYPE == 1
#include <cuda_fp16.h>
typedef __half element;
#elif PORTABLE_TYPE == 2
typedef float element;
#else
#error "PORTABLE_TYPE is 0, 1 or 2"
#endif

constexpr int element_bytes = sizeof(element);
// What one instruction takes of the summed dimension: 32 bytes of a row.
constexpr int depth = 32 / element_bytes;

#if PORTABLE_TYPE == 2
struct Left {
  u32 big[4], small[4];
};

struct Right {
  u32 big[2], small[2];
};

// By two integer operations; for cvt.rna.tf32.f32 the compiler makes four, with a way out for infinities. Here `small`
// of an infinity is no number, as it is of what is none, and so are the products.
DEVICE void split(float x, u32 &big, u32 &small) {
  big = (__float_as_uint(x) + 0x1000) & 0xFFFFE000;
  small = __float_as_uint(x - __uint_as_float(big));
}

// Words of the operand as load_matrices gives them.
DEVICE void make(Left &left, const u32 (&words)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) split(__uint_as_float(words[i]), left.big[i], left.small[i]);
}

DEVICE void make(Right &right, u32 first, u32 second) {
  split(__uint_as_float(first), right.big[0], right.small[0]);
  split(__uint_as_float(second), right.big[1], right.small[1]);
}

// Step `step` of the summed dimension out of sums: its place t is their column 2t, its place t + 4 the one after.
template <int N> DEVICE void make(Left &left, const float (&sums)[N][4], int step) {
  const float (&own)[4] = sums[step];
  split(own[0], left.big[0], left.small[0]);
  split(own[2], left.big[1], left.small[1]);
  split(own[1], left.big[2], left.small[2]);
  split(own[3], left.big[3], left.small[3]);
}

// N tiles of sums of eight columns += the products of some steps. `Exchanged` gives of B^T A^T, in every bit, what A B gives:
// the small products in the other order.
template <bool Exchanged, int Steps, int N>
DEVICE void multiply(float (*sums)[4], const Left (&a)[Steps], const Right (&b)[Steps][N]) {
  float fresh[N][4] = {};
#pragma unroll
  for (int step = 0; step < Steps; ++step) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
      mma_tf32(fresh[n], Exchanged ? a[step].big : a[step].small, Exchanged ? b[step][n].small : b[step][n].big);
    }
#pragma unroll
    for (int n = 0; n < N; ++n) {
      mma_tf32(fresh[n], Exchanged ? a[step].small : a[step].big, Exchanged ? b[step][n].big : b[step][n].small);
    }
  }
#pragma unroll
  for (int step = 0; step < Steps; ++step) {
#pragma unroll
    for (int n = 0; n < N; ++n) mma_tf32(fresh[n], a[step].big, b[step][n].big);
  }
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[n][i] += fresh[n][i];
  }
}
#else
struct Left {
  u32 words[4];
};

struct Right {
  u32 words[2];
};

// Two numbers rounded to nearest, the first in the low half.
DEVICE u32 pack(float low, float high) {
#if PORTABLE_TYPE == 1
  const __half2 pair = __floats2half2_rn(low, high);
#else
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
#endif
  return reinterpret_cast<const u32 &>(pair);
}

DEVICE void make(Left &left, const u32 (&words)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) left.words[i] = words[i];
}

DEVICE void make(Right &right, u32 first, u32 second) {
  right.words[0] = first;
  right.words[1] = second;
}

template <int N> DEVICE void make(Left &left, const float (&sums)[N][4], int step) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float (&own)[4] = sums[2 * step + i / 2];
    left.words[i] = pack(own[2 * (i % 2)], own[2 * (i % 2) + 1]);
  }
}

template <bool Exchanged, int Steps, int N>
DEVICE void multiply(float (*sums)[4], const Left (&a)[Steps], const Right (&b)[Steps][N]) {
#pragma unroll
  for (int step = 0; step < Steps; ++step) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
#if PORTABLE_TYPE == 1
      mma_f16(sums[n], a[step].words, b[step][n].words);
#else
      mma_bf16(sums[n], a[step].words, b[step][n].words);
#endif
    }
  }
}
#endif

// Two sums that lie side by side, rounded to the type.
DEVICE void store_two(element *to, float first, float second) {
#if PORTABLE_TYPE == 2
  *reinterpret_cast<float2 *>(to) = float2{first, second};
#else
  *reinterpret_cast<u32 *>(to) = pack(first, second);
#endif
}

// A tensor (batch, head, row, column); strides in elements, columns side by side, rows at multiples of 16 bytes.
struct Tensor {
  const element *base;
  long long strides[3];

  DEVICE const element *head(int batch, int head) const { return base + batch * strides[0] + head * strides[1]; }
};

// Rows of D elements in shared memory, one after the other, their 16-byte pieces exchanged so that the same piece of
// eight rows lies in eight different groups of banks. Every function is given rows in multiples of eight, so that which
// exchange a lane meets is its own constant, and the rest of an address the compiler's.
template <int D> struct Rows {
  static constexpr u32 bytes = D * element_bytes;
  static constexpr u32 pieces = bytes / 16;

  DEVICE static u32 exchange(u32 row) {
    return bytes >= 128 ? 16 * (row % 8) : bytes == 64 ? 16 * (row / 2 % 4) : 16 * (row / 4 % 2);
  }

  // Where byte `byte`, a multiple of 32, of a row is, if `own` is what a lane adds and exchanges in it.
  DEVICE static u32 within(u32 byte, u32 own) { return (byte & ~127u) + ((byte & 127u) ^ own); }

  // Starts the copy of `Count` rows from number `first` on; those from number `n` on become zeros.
  template <int Count, int Threads>
  DEVICE static void copy(u32 to, const element *from, long long stride, int first, int n) {
    static_assert(Threads % pieces == 0, "a thread keeps its piece from row to row");
    constexpr int step = Threads / pieces;
    const u32 row = threadIdx.x / pieces, piece = threadIdx.x % pieces;
    const int left = n - first - static_cast<int>(row);
    const element *source = from + (first + row) * stride + piece * (16 / element_bytes);
#pragma unroll
    for (int i = 0; i < (Count + step - 1) / step; ++i) {
      if (Count % step != 0 && row + i * step >= Count) break;
      const bool there = i * step < left;
      const u32 place = to + (row + i * step) * bytes + (16 * piece ^ exchange(row + i * step));
      copy_async(place, there ? source + i * step * stride : from, there);
    }
  }

  // Sixteen rows from `row` on as a left operand, at one step of the columns.
  DEVICE static void left(Left &a, u32 from, u32 row, u32 step, u32 lane = threadIdx.x % 32) {
    u32 words[4];
    load_matrices(words, from + lane % 16 * bytes + row * bytes + within(32 * step, 16 * (lane / 16) ^ exchange(lane)));
    make(a, words);
  }

  // Sixteen rows as the columns of right operands, at one step of the columns.
  DEVICE static void along(Right (&b)[2], u32 from, u32 row, u32 step, u32 lane = threadIdx.x % 32) {
    u32 words[4];
    load_matrices(words, from + (lane % 8 + 8 * (lane / 16)) * bytes + row * bytes +
                             within(32 * step, 16 * (lane / 8 % 2) ^ exchange(lane)));
    make(b[0], words[0], words[1]);
    make(b[1], words[2], words[3]);
  }

  // Sixteen columns from number 16 `pair` on, at one step of the rows, in the order that Left is made of sums.
  DEVICE static void across(Right *b, u32 from, u32 step, u32 pair, u32 lane = threadIdx.x % 32) {
#if PORTABLE_TYPE == 2
    const u32 row = 2 * (lane % 4), own = from + row * bytes + 4 * (lane / 4 % 4) + 8 * step * bytes;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const u32 byte = 64 * pair + 32 * n, half = 16 * (lane / 16);
      const float first = load_float(own + within(byte, half ^ exchange(row)));
      const float second = load_float(own + bytes + within(byte, half ^ exchange(row + 1)));
      make(b[n], __float_as_uint(first), __float_as_uint(second));
    }
#else
    u32 words[4];
    load_matrices_transposed(words, from + lane % 16 * bytes + 16 * step * bytes +
                                        within(32 * pair, 16 * (lane / 16) ^ exchange(lane)));
    make(b[0], words[0], words[1]);
    make(b[1], words[2], words[3]);
#endif
  }
};

// Sums are of tiles of 16 rows, and of each of tiles of 8 columns.
template <int Tiles, int N> DEVICE void clear(float (&sums)[Tiles][N][4]) {
#pragma unroll
  for (int m = 0; m < Tiles; ++m) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[m][n][i] = 0.0f;
    }
  }
}

// S = A B^T over rows of D elements, `Group` steps at a time; `left(a, m, step)` gives A's operands, out of
// registers if they are `Held`; B lies at `right`.
template <int D, int Group, bool Held, bool Exchanged, int Tiles, int N, typename LeftAt>
DEVICE void multiply_along(float (&s)[Tiles][N][4], u32 right, LeftAt left, u32 lane = threadIdx.x % 32) {
  clear(s);
  // Operands in registers need their numbers at compile time. Else it is unrolled as far as addresses differ in more
  // than a constant; each group's products wait for one another, and only those of other groups can go between them.
  constexpr int unrolled = Held ? D / depth : 4 / Group;
#pragma unroll unrolled
  for (int step = 0; step < D / depth; step += Group) {
    Left a[Tiles][Group];
#pragma unroll
    for (int m = 0; m < Tiles; ++m) {
#pragma unroll
      for (int g = 0; g < Group; ++g) left(a[m][g], m, step + g);
    }
#pragma unroll
    for (int pair = 0; pair < N / 2; ++pair) {
      Right b[Group][2];
#pragma unroll
      for (int g = 0; g < Group; ++g) Rows<D>::along(b[g], right, 16 * pair, step + g, lane);
#pragma unroll
      for (int m = 0; m < Tiles; ++m) multiply<Exchanged>(&s[m][2 * pair], a[m], b);
    }
  }
}

// O += P B, where P are sums over B's rows and B, of D columns, lies at `right`; `Pairs` times 16 columns at a time.
template <int D, int Group, int Pairs = 1, int Tiles, int N>
DEVICE void multiply_across(float (&o)[Tiles][D / 8][4], const float (&p)[Tiles][N][4], u32 right,
                            u32 lane = threadIdx.x % 32) {
#pragma unroll
  for (int step = 0; step < 8 * N / depth; step += Group) {
    Left a[Tiles][Group];
#pragma unroll
    for (int m = 0; m < Tiles; ++m) {
#pragma unroll
      for (int g = 0; g < Group; ++g) make(a[m][g], p[m], step + g);
    }
#pragma unroll
    for (int pair = 0; pair < D / 16; pair += Pairs) {
      Right b[Group][2 * Pairs];
#pragma unroll
      for (int g = 0; g < Group; ++g) {
#pragma unroll
        for (int i = 0; i < Pairs; ++i) Rows<D>::across(&b[g][2 * i], right, step + g, pair + i, lane);
      }
#pragma unroll
      for (int m = 0; m < Tiles; ++m) multiply<false>(&o[m][2 * pair], a[m], b);
    }
  }
}
