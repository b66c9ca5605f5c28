// The 16-bit type that a kernel is compiled for, by FLASH_HALF: float16 (1) or bfloat16 (0).
#pragma once

#include "lib/hopper.cuh"

#if FLASH_HALF
#include <cuda_fp16.h>
#define WGMMA_TYPE "f16"
typedef __half element;
#else
#include <cuda_bf16.h>
#define WGMMA_TYPE "bf16"
typedef __nv_bfloat16 element;
#endif

// Two numbers rounded to nearest, the first in the low half.
DEVICE u32 pack(float low, float high) {
#if FLASH_HALF
  const __half2 pair = __floats2half2_rn(low, high);
#else
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
#endif
  return reinterpret_cast<const u32 &>(pair);
}
