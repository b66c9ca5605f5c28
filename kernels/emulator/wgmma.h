// Hopper's matrix instruction on the processor; see lib/wgmma.cuh.
#pragma once

#include "emulator/hopper.h"

namespace emulator {

inline float widen(std::uint16_t bits) { return static_cast<float>(std::bit_cast<element>(bits)); }

} // namespace emulator

DEVICE void wgmma_fence() { emulator::gather("wgmma.fence", 0); }
DEVICE void wgmma_commit() { emulator::commit(); }
template <int Left> DEVICE void wgmma_wait() { emulator::wait_groups(Left); }
template <typename T, int N> DEVICE void hold(T (&)[N]) {}

template <int N> struct Wgmma {
  template <int TransposedA, int TransposedB> static void shared(float (&sums)[N / 2], u64 a, u64 b, int add) {
    emulator::issue({N, false, TransposedA != 0, TransposedB != 0, emulator::widen}, {sums, a, b, {}, add});
  }
  template <int TransposedB>
  static void registers(float (&sums)[N / 2], u32 a0, u32 a1, u32 a2, u32 a3, u64 b, int add) {
    emulator::issue({N, true, false, TransposedB != 0, emulator::widen}, {sums, 0, b, {a0, a1, a2, a3}, add});
  }
};
