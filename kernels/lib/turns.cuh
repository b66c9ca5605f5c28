// Sums in global memory to which thread blocks add one after the other, in a fixed order, so that every run gives the same
// bits. A counter says whose turn it is.
//
// No block may wait for one that has not begun. So the order of turns is that of numbers which blocks draw when they begin.
#pragma once

#include "lib/base.cuh"

#ifdef EMULATED
#include "emulator/turns.h"
#else

// One thread, before a barrier of its block: until it is `turn`. Then the block sees what the blocks before it wrote.
DEVICE void await_turn(const int *counter, int turn) {
  int now;
  do {
    asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
  } while (now != turn);
}

// One thread, after a barrier of its block: everything that the block has written is there for the block of `next`.
DEVICE void pass_turn(int *counter, int next) {
  asm volatile("st.release.gpu.global.b32 [%0], %1;" ::"l"(counter), "r"(next) : "memory");
}

// Adds four numbers of each lane, in no order with other additions. From compute capability 9.0 on that is one instruction;
// before, four, each of which takes whole sectors of 32 bytes if a warp's floats lie as `Fragment` says.
DEVICE void add_four(float *to, u32 step, const float (&own)[4]) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(own[0]), "f"(own[1]), "f"(own[2]), "f"(own[3])
               : "memory");
#else
#pragma unroll
  for (u32 i = 0; i < 4; ++i) asm volatile("red.global.add.f32 [%0], %1;" ::"l"(to + i * step), "f"(own[i]) : "memory");
#endif
}
#endif // EMULATED

// A warp's sums of 16 rows and 8 columns as 128 floats: the four of a lane side by side, or, before compute capability 9.0,
// the same of every lane.
struct Fragment {
#if defined(EMULATED) || __CUDA_ARCH__ >= 900
  static constexpr u32 lane_step = 4, step = 1;
#else
  static constexpr u32 lane_step = 1, step = 32;
#endif

  DEVICE static void add(float *to, u32 lane, const float (&own)[4]) { add_four(to + lane_step * lane, step, own); }

  DEVICE static void store(float *to, u32 lane, const float (&own)[4]) {
#pragma unroll
    for (u32 i = 0; i < 4; ++i) to[lane_step * lane + step * i] = own[i];
  }

  DEVICE static void load(float (&own)[4], const float *from, u32 lane) {
#pragma unroll
    for (u32 i = 0; i < 4; ++i) own[i] = from[lane_step * lane + step * i];
  }
};
