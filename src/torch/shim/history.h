// Records an allocator's steps, each with the ranges and the operators that were running.
#pragma once

#include "error.h"

#include <cstdint>
#include <memory>

namespace cs336 {

struct RawEvent; // plain structs of memory_history/recorder.rs
struct RawSnapshot;

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

class LogObserver;

// While it lives, libtorch reports this thread's CPU allocations here; each report goes on to the previous observer.
class CpuLog {
public:
  CpuLog();
  ~CpuLog();
  rust::Vec<RawEvent> take() const;

private:
  struct Installed;
  std::shared_ptr<LogObserver> observer_;
  std::unique_ptr<Installed> installed_;
};

std::unique_ptr<CpuLog> log_cpu_allocations();

// The caching allocators of all CUDA devices keep their last `max_entries` steps each. With `paced`, every step waits for
// its device first, so that the times are the device's; kernels must not be captured meanwhile.
void start_cuda_history(size_t max_entries, bool paced);
// What the allocator of one device did since the start, and what it holds.
RawSnapshot cuda_snapshot(int8_t device);
void stop_cuda_history();

} // namespace cs336
