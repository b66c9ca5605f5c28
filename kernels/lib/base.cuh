// What every kernel here begins with: short names, and single PTX instructions that all of our targets have.
#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;

// Under EMULATED a host compiler builds the kernel for the processor, where these functions do what the instructions do.
#ifdef EMULATED
#define DEVICE inline
#include "emulator/base.h"
#else
#define DEVICE __device__ __forceinline__

DEVICE u32 shared_address(const void *pointer) { return static_cast<u32>(__cvta_generic_to_shared(pointer)); }

DEVICE float2 load_pair(u32 address) {
  float2 pair;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(pair.x), "=f"(pair.y) : "r"(address));
  return pair;
}

// 2^x in one instruction; results below the normal range are zero.
DEVICE float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
#endif // EMULATED
