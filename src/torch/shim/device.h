// Autocast, allocators and streams through libtorch's device-generic interfaces: no CUDA header is needed.
#pragma once

#include "error.h"

#include <cstdint>

namespace cs336 {

struct AllocatorStats; // plain structs of bridge.rs
struct AutocastState;
struct MemoryInfo;

// `is_cuda` picks the device type; `dtype` is a c10::ScalarType.
AutocastState enter_autocast(bool is_cuda, int8_t dtype);
// Puts back what `enter_autocast` returned; outside the last autocast, cached casts are dropped.
void leave_autocast(bool is_cuda, AutocastState before);

// `device` is the index of a CUDA device.
// Whether this process has started CUDA's allocator; does not start it.
bool allocator_is_used();
AllocatorStats allocator_stats(int8_t device);
MemoryInfo memory_info(int8_t device);
void reset_peak_stats(int8_t device);
void empty_cache(int8_t device);

uint64_t current_stream_handle(int8_t device);
void synchronize_device(int8_t device);
// Launches a kernel on the current stream that does nothing for so many cycles of the clock, as torch.cuda._sleep does.
void spin(int8_t device, int64_t cycles);

} // namespace cs336
