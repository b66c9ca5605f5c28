// What the textbook kernels share: tiles in shared memory, and how 128 threads divide a product of two tiles. Plain
// float32 arithmetic throughout.
//
// The threads are 16 groups of 8 lanes. Of a (rows, columns) matrix, thread (group, lane) keeps rows group, group + 16,
// ... and of each the columns lane, lane + 8, ..., in registers: a Part. So a row belongs to eight neighbouring lanes
// of one warp, which make its maximum and its sum by three shuffles each.
//
// TEXTBOOK_D is the length d of a row, TEXTBOOK_TYPE the elements' type: float, __nv_bfloat16 or __half.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

// Under EMULATED a host compiler builds the kernel for the processor.
#ifdef EMULATED
#include "emulator/block.h"
#define DEVICE inline
#else
#define DEVICE __device__ __forceinline__
#endif

namespace {

using element = TEXTBOOK_TYPE;

constexpr int d = TEXTBOOK_D;
static_assert(d == 16 || d == 32 || d == 64 || d == 128, "rows are of 16, 32, 64 or 128 elements");

constexpr int groups = 16;
constexpr int lanes = 8;
constexpr int threads = groups * lanes;

constexpr float infinity = __builtin_bit_cast(float, 0x7F800000);

DEVICE int group() { return static_cast<int>(threadIdx.x) / lanes; }
DEVICE int lane() { return static_cast<int>(threadIdx.x) % lanes; }

// ---- tiles in shared memory -----------------------------------------------------------------------------------------

// Four floats more a row: the same column of eight rows, which a warp reads at once, lies in different banks.
template <int Rows, int Columns> struct alignas(16) Tile {
  float at[Rows][Columns + 4];
};

// Rows first, first + 1, ... of a (n, d) matrix; those that are not there become zeros. All threads of the block.
template <int Rows> DEVICE void load(Tile<Rows, d> &tile, const element *matrix, int first, int n) {
  for (int i = static_cast<int>(threadIdx.x); i < Rows * d; i += threads) {
    const int row = i / d, column = i % d;
    tile.at[row][column] = first + row < n ? static_cast<float>(matrix[(first + row) * d + column]) : 0.0f;
  }
}

// ---- a thread's part of a matrix ------------------------------------------------------------------------------------

template <int Rows, int Columns> struct Part {
  static_assert(Rows % groups == 0 && Columns % lanes == 0, "every thread has as many elements");
  static constexpr int rows = Rows / groups;
  static constexpr int columns = Columns / lanes;

  float at[rows][columns];

  // Of the matrix, where the thread's r-th row and c-th column lie.
  DEVICE static int row(int r) { return group() + groups * r; }
  DEVICE static int column(int c) { return lane() + lanes * c; }

  DEVICE void clear() {
#pragma unroll
    for (int r = 0; r < rows; ++r) {
#pragma unroll
      for (int c = 0; c < columns; ++c) at[r][c] = 0.0f;
    }
  }

  // Where other lanes of the rows' warps read it, once they have come to the same __syncwarp.
  DEVICE void store(Tile<Rows, Columns> &tile) const {
#pragma unroll
    for (int r = 0; r < rows; ++r) {
#pragma unroll
      for (int c = 0; c < columns; ++c) tile.at[row(r)][column(c)] = at[r][c];
    }
  }

  // To rows first, first + 1, ... of a (n, Columns) matrix, times `scale`, rounded to its type.
  DEVICE void write(element *matrix, int first, int n, float scale) const {
#pragma unroll
    for (int r = 0; r < rows; ++r) {
      if (first + row(r) >= n) continue;
#pragma unroll
      for (int c = 0; c < columns; ++c) {
        matrix[(first + row(r)) * Columns + column(c)] = static_cast<element>(at[r][c] * scale);
      }
    }
  }
};

// A B^T of two tiles whose rows are d long.
template <int Rows, int Columns>
DEVICE Part<Rows, Columns> times_transposed(const Tile<Rows, d> &a, const Tile<Columns, d> &b) {
  using Result = Part<Rows, Columns>;
  Result sum;
  sum.clear();
#pragma unroll 8
  for (int x = 0; x < d; ++x) {
#pragma unroll
    for (int r = 0; r < Result::rows; ++r) {
#pragma unroll
      for (int c = 0; c < Result::columns; ++c) {
        sum.at[r][c] += a.at[Result::row(r)][x] * b.at[Result::column(c)][x];
      }
    }
  }
  return sum;
}

// sum += A B; the thread reads its own rows of A alone.
template <int Rows, int Inner>
DEVICE void add_product(Part<Rows, d> &sum, const Tile<Rows, Inner> &a, const Tile<Inner, d> &b) {
  using Sum = Part<Rows, d>;
#pragma unroll 8
  for (int x = 0; x < Inner; ++x) {
#pragma unroll
    for (int r = 0; r < Sum::rows; ++r) {
#pragma unroll
      for (int c = 0; c < Sum::columns; ++c) sum.at[r][c] += a.at[Sum::row(r)][x] * b.at[x][Sum::column(c)];
    }
  }
}

// ---- over the eight lanes of a row ----------------------------------------------------------------------------------

DEVICE float row_max(float value) {
#pragma unroll
  for (int step = 1; step < lanes; step *= 2) value = fmaxf(value, __shfl_xor_sync(0xFFFFFFFF, value, step));
  return value;
}

DEVICE float row_sum(float value) {
#pragma unroll
  for (int step = 1; step < lanes; step *= 2) value += __shfl_xor_sync(0xFFFFFFFF, value, step);
  return value;
}

} // namespace
