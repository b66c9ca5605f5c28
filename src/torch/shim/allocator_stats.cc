// Counts the bytes of CPU tensors that one thread's work allocates.
#include "allocator_stats.h"

#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <algorithm>
#include <mutex>

namespace cs336 {

// Receives libtorch's memory reports (c10/core/Allocator.h).
class AllocationObserver final : public c10::MemoryReportingInfoBase {
public:
  void reportMemoryUsage(void *, int64_t size, size_t, size_t, c10::Device device) override {
    if (!device.is_cpu()) {
      return;
    }
    const std::lock_guard<std::mutex> lock(mutex);
    in_use += size;
    peak = std::max(peak, in_use);
  }
  bool memoryProfilingEnabled() const override { return true; }

  std::mutex mutex;
  int64_t in_use = 0;
  int64_t peak = 0;
};

struct CpuAllocations::Installed {
  explicit Installed(std::shared_ptr<AllocationObserver> observer)
      : guard(c10::DebugInfoKind::PROFILER_STATE, std::move(observer)) {}
  c10::DebugInfoGuard guard;
};

CpuAllocations::CpuAllocations() : observer_(std::make_shared<AllocationObserver>()), installed_(std::make_unique<Installed>(observer_)) {}
CpuAllocations::~CpuAllocations() = default;

int64_t CpuAllocations::in_use() const noexcept {
  const std::lock_guard<std::mutex> lock(observer_->mutex);
  return observer_->in_use;
}

int64_t CpuAllocations::peak() const noexcept {
  const std::lock_guard<std::mutex> lock(observer_->mutex);
  return observer_->peak;
}

void CpuAllocations::reset_peak() const noexcept {
  const std::lock_guard<std::mutex> lock(observer_->mutex);
  observer_->peak = observer_->in_use;
}

std::unique_ptr<CpuAllocations> new_cpu_allocations() { return std::make_unique<CpuAllocations>(); }

} // namespace cs336
