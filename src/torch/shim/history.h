// The steps of CUDA's caching allocators, and the ranges and operators that run at each.
#pragma once

#include "error.h"

#include <c10/core/CachingDeviceAllocator.h>

#include <cstdint>
#include <memory>

namespace cs336 {

struct Snapshot; // the plain struct of memory_history/recorder.rs
using Action = c10::CachingDeviceAllocator::TraceEntry::Action;

// While it lives, the names of this thread's operators (and of the backward passes that it starts) are tracked.
class OperatorNames {
public:
  OperatorNames();
  ~OperatorNames();
  OperatorNames(const OperatorNames &) = delete;
  OperatorNames &operator=(const OperatorNames &) = delete;

private:
  uint64_t handle_;
};

std::unique_ptr<OperatorNames> name_operators();

// The names that are tracked now, outermost first, joined by '/'.
rust::String running_operators() noexcept;

// The caching allocators of all CUDA devices keep their last `max_entries` steps each. Every step waits for its device
// first, so that the times are the device's; kernels must not be captured meanwhile.
void start_cuda_history(size_t max_entries);
// What the allocator of one device did since the start, and what it holds.
Snapshot cuda_snapshot(int8_t device);
void stop_cuda_history();

} // namespace cs336
