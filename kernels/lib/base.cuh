// What every kernel here begins with: short names, and single PTX instructions.
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

// Kernels that overlap (PTX ISA 9.0, griddepcontrol). Before compute capability 9.0 none does.

// From when every block has called it, or ended, the next kernel of the stream may begin, if the host launches it so.
DEVICE void allow_next_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Until the kernel before this one in the stream is done and what it wrote is there. Every block of a kernel that the
// host lets begin early must come here, or the kernel could be done before the one that it follows.
DEVICE void await_last_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
#endif // EMULATED
