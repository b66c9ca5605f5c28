// Records an allocator's steps, each with the ranges and the operators that were running.
#include "cs336/src/torch/memory_history/recorder.rs.h"

#include <ATen/Context.h>
#include <ATen/record_function.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <string>
#include <vector>

namespace cs336 {

namespace {

// The operators that run on this thread, outermost first; an autograd node counts as one.
thread_local std::vector<std::string> running;

std::unique_ptr<at::ObserverContext> operator_starts(const at::RecordFunction &function) {
  running.emplace_back(function.name());
  return nullptr;
}

void operator_ends(const at::RecordFunction &, at::ObserverContext *) {
  if (!running.empty()) {
    running.pop_back();
  }
}

rust::String running_operators() {
  std::string joined;
  for (const auto &name : running) {
    joined.append(joined.empty() ? "" : "/").append(name);
  }
  return rust::String::lossy(joined);
}

int64_t now_us() {
  using namespace std::chrono;
  return duration_cast<microseconds>(system_clock::now().time_since_epoch()).count();
}

} // namespace

OperatorNames::OperatorNames()
    : handle_(at::addThreadLocalCallback(
          at::RecordFunctionCallback(operator_starts, operator_ends)
              .scopes({at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION}))) {}
OperatorNames::~OperatorNames() {
  at::removeCallback(handle_);
  running.clear();
}

std::unique_ptr<OperatorNames> name_operators() { return std::make_unique<OperatorNames>(); }

class LogObserver final : public c10::MemoryReportingInfoBase {
public:
  void reportMemoryUsage(void *address, int64_t size, size_t allocated, size_t reserved, c10::Device device) override {
    if (device.is_cpu()) {
      const auto action = static_cast<uint8_t>(size < 0 ? Action::FREE_COMPLETED : Action::ALLOC);
      RawEvent event{action,
                     reinterpret_cast<uintptr_t>(address),
                     static_cast<uint64_t>(size < 0 ? -size : size),
                     now_us(),
                     current_range(),
                     running_operators()};
      const std::lock_guard<std::mutex> lock(mutex);
      events.push_back(std::move(event));
    }
    if (before != nullptr) {
      before->reportMemoryUsage(address, size, allocated, reserved, device);
    }
  }
  bool memoryProfilingEnabled() const override { return true; }

  using Action = c10::CachingDeviceAllocator::TraceEntry::Action;
  // The previous observer, which outlives this one.
  c10::MemoryReportingInfoBase *before = dynamic_cast<c10::MemoryReportingInfoBase *>(
      c10::ThreadLocalDebugInfo::get(c10::DebugInfoKind::PROFILER_STATE));
  std::mutex mutex;
  rust::Vec<RawEvent> events;
};

struct CpuLog::Installed {
  explicit Installed(std::shared_ptr<LogObserver> observer)
      : guard(c10::DebugInfoKind::PROFILER_STATE, std::move(observer)) {}
  c10::DebugInfoGuard guard;
};

CpuLog::CpuLog() : observer_(std::make_shared<LogObserver>()), installed_(std::make_unique<Installed>(observer_)) {}
CpuLog::~CpuLog() = default;

rust::Vec<RawEvent> CpuLog::take() const {
  const std::lock_guard<std::mutex> lock(observer_->mutex);
  return std::move(observer_->events);
}

std::unique_ptr<CpuLog> log_cpu_allocations() { return std::make_unique<CpuLog>(); }

namespace {

using c10::cuda::CUDACachingAllocator::CUDAAllocator;

CUDAAllocator &cuda_allocator() {
  // The allocator has no devices before CUDA is initialised.
  at::globalContext().lazyInitDevice(at::kCUDA);
  auto *allocator = dynamic_cast<CUDAAllocator *>(c10::GetAllocator(at::kCUDA));
  if (allocator == nullptr) {
    throw std::runtime_error("the CUDA allocator in use keeps no history");
  }
  return *allocator;
}

// The context that the allocator stores with each step.
struct Source final : c10::GatheredContext {
  rust::String range = current_range();
  rust::String operators = running_operators();
};

std::atomic<bool> paced{false};

// The allocator calls it before it takes its lock.
std::shared_ptr<c10::GatheredContext> gather() {
  if (paced.load(std::memory_order_relaxed)) {
    try {
      const c10::impl::VirtualGuardImpl guard(at::kCUDA);
      guard.synchronizeDevice(guard.getDevice().index());
    } catch (const std::exception &) {
      // A kernel failed. CUDA reports it again at the next call; this call may be a free, which must not throw.
    }
  }
  return std::make_shared<Source>();
}

const Source *source_of(const std::shared_ptr<c10::GatheredContext> &context) {
  return dynamic_cast<const Source *>(context.get());
}

RawEvent event_of(const c10::CachingDeviceAllocator::TraceEntry &entry) {
  const auto *source = source_of(entry.context_);
  return {static_cast<uint8_t>(entry.action_),
          entry.addr_,
          entry.size_,
          static_cast<int64_t>(entry.time_.t_),
          source == nullptr ? rust::String() : source->range,
          source == nullptr ? rust::String() : source->operators};
}

RawSegment segment_of(const c10::CachingDeviceAllocator::SegmentInfo &info) {
  RawSegment segment{info.address, info.total_size, info.is_large, {}};
  for (const auto &block : info.blocks) {
    const auto *source = source_of(block.context_when_allocated);
    segment.blocks.push_back({block.size,
                              block.requested_size,
                              block.allocated,
                              block.active,
                              source == nullptr ? rust::String() : source->range,
                              source == nullptr ? rust::String() : source->operators});
  }
  return segment;
}

} // namespace

void start_cuda_history(size_t max_entries, bool is_paced) {
  paced.store(is_paced);
  cuda_allocator().recordHistory(
      true, gather, max_entries, c10::CachingDeviceAllocator::RecordContext::ALL, true, {});
}

RawSnapshot cuda_snapshot(int8_t device) {
  const auto snapshot = cuda_allocator().snapshot();
  RawSnapshot raw;
  for (const auto &entry : snapshot.device_traces.at(static_cast<size_t>(device))) {
    raw.events.push_back(event_of(entry));
  }
  for (const auto &segment : snapshot.segments) {
    if (segment.device == device) {
      raw.segments.push_back(segment_of(segment));
    }
  }
  return raw;
}

void stop_cuda_history() {
  paced.store(false);
  cuda_allocator().recordHistory(false, nullptr, 1, c10::CachingDeviceAllocator::RecordContext::NEVER, true, {});
}

} // namespace cs336
