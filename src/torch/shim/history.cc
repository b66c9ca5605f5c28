// The steps of CUDA's caching allocators, and the ranges and operators that run at each.
#include "cs336/src/torch/memory_history/recorder.rs.h"

#include <ATen/Context.h>
#include <ATen/record_function.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/cuda/CUDACachingAllocator.h>

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

rust::String running_operators() noexcept {
  std::string joined;
  for (const auto &name : running) {
    joined.append(joined.empty() ? "" : "/").append(name);
  }
  return rust::String::lossy(joined);
}

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
struct Gathered final : c10::GatheredContext {
  Source source{current_range(), running_operators()};
};

// The allocator calls it before it takes its lock.
std::shared_ptr<c10::GatheredContext> gather() {
  try {
    const c10::impl::VirtualGuardImpl guard(at::kCUDA);
    guard.synchronizeDevice(guard.getDevice().index());
  } catch (const std::exception &) {
    // A kernel failed. CUDA reports it again at the next call; this call may be a free, which must not throw.
  }
  return std::make_shared<Gathered>();
}

Source source_of(const std::shared_ptr<c10::GatheredContext> &context) {
  const auto *gathered = dynamic_cast<const Gathered *>(context.get());
  return gathered == nullptr ? Source{} : gathered->source;
}

Segment segment_of(const c10::CachingDeviceAllocator::SegmentInfo &info) {
  Segment segment{info.address, info.total_size, info.is_large, {}};
  for (const auto &block : info.blocks) {
    segment.blocks.push_back(
        {block.size, block.requested_size, block.allocated, block.active, source_of(block.context_when_allocated)});
  }
  return segment;
}

} // namespace

void start_cuda_history(size_t max_entries) {
  cuda_allocator().recordHistory(
      true, gather, max_entries, c10::CachingDeviceAllocator::RecordContext::ALL, true, {});
}

Snapshot cuda_snapshot(int8_t device) {
  const auto allocator = cuda_allocator().snapshot();
  Snapshot snapshot;
  for (const auto &entry : allocator.device_traces.at(static_cast<size_t>(device))) {
    const auto time_us = static_cast<int64_t>(entry.time_.t_);
    snapshot.events.push_back({entry.action_, entry.addr_, entry.size_, time_us, source_of(entry.context_)});
  }
  for (const auto &segment : allocator.segments) {
    if (segment.device == device) {
      snapshot.segments.push_back(segment_of(segment));
    }
  }
  return snapshot;
}

void stop_cuda_history() {
  cuda_allocator().recordHistory(false, nullptr, 1, c10::CachingDeviceAllocator::RecordContext::NEVER, true, {});
}

} // namespace cs336
