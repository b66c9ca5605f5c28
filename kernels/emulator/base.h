// The instructions of lib/base.cuh, on the processor.
#pragma once

#include "emulator/block.h"

DEVICE u32 shared_address(const void *pointer) { return static_cast<u32>(__cvta_generic_to_shared(pointer)); }

DEVICE float2 load_pair(u32 address) {
  float2 pair;
  std::memcpy(&pair, emulator::shared(address, 8), 8);
  return pair;
}

DEVICE float exp2_fast(float x) {
  const float y = std::exp2(x);
  return std::fpclassify(y) == FP_SUBNORMAL ? 0.0f : y;
}

// Here the next kernel may have begun before this one: allowing it promises nothing of what it sees.
DEVICE void allow_next_kernel() {}
DEVICE void await_last_kernel() {
  emulator::block.has_awaited = true;
  emulator::wait("the kernel before this one", [] { return emulator::block.last_is_done; });
}
