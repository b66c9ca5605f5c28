// Reports one thread's allocations of CPU tensors to Rust.
#include "cs336/src/torch/allocator_stats.rs.h"

#include <c10/core/Allocator.h>

namespace cs336 {

namespace {

constexpr auto kSlot = c10::DebugInfoKind::PROFILER_STATE;

// Receives libtorch's memory reports (c10/core/Allocator.h).
class Observer final : public c10::MemoryReportingInfoBase {
public:
  explicit Observer(rust::Box<AllocationCallback> callback) : callback_(std::move(callback)) {}
  void reportMemoryUsage(void *address, int64_t size, size_t allocated, size_t reserved, c10::Device device) override {
    if (device.is_cpu()) {
      callback_->report(reinterpret_cast<uintptr_t>(address), size);
    }
    if (before_ != nullptr) {
      before_->reportMemoryUsage(address, size, allocated, reserved, device);
    }
  }
  bool memoryProfilingEnabled() const override { return true; }

private:
  const rust::Box<AllocationCallback> callback_;
  // The previous observer, which outlives this one.
  c10::MemoryReportingInfoBase *const before_ =
      dynamic_cast<c10::MemoryReportingInfoBase *>(c10::ThreadLocalDebugInfo::get(kSlot));
};

} // namespace

std::unique_ptr<c10::DebugInfoGuard> observe_cpu(rust::Box<AllocationCallback> callback) {
  return std::make_unique<c10::DebugInfoGuard>(kSlot, std::make_shared<Observer>(std::move(callback)));
}

} // namespace cs336
