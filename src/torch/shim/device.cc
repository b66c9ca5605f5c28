// Autocast, allocators and streams through libtorch's device-generic interfaces: no CUDA header is needed.
#include "cs336/src/torch/bridge.rs.h"

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <dlfcn.h>

#include <stdexcept>

namespace cs336 {

namespace {

at::DeviceType device_type(bool is_cuda) { return is_cuda ? at::kCUDA : at::kCPU; }

c10::DeviceAllocator &allocator() {
  // The allocator has no devices before CUDA is initialised.
  at::globalContext().lazyInitDevice(at::kCUDA);
  return *c10::getDeviceAllocator(at::kCUDA);
}

Gauge gauge(const c10::CachingAllocator::StatArray &stats) {
  const auto &all = stats[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
  return {static_cast<uint64_t>(all.current), static_cast<uint64_t>(all.peak)};
}

} // namespace

AutocastState enter_autocast(bool is_cuda, int8_t dtype) {
  const auto type = device_type(is_cuda);
  AutocastState before{at::autocast::is_autocast_enabled(type),
                       static_cast<int8_t>(at::autocast::get_autocast_dtype(type))};
  at::autocast::set_autocast_dtype(type, static_cast<at::ScalarType>(dtype));
  at::autocast::set_autocast_enabled(type, true);
  at::autocast::increment_nesting();
  return before;
}

void leave_autocast(bool is_cuda, AutocastState before) {
  const auto type = device_type(is_cuda);
  if (at::autocast::decrement_nesting() == 0) {
    at::autocast::clear_cache();
  }
  at::autocast::set_autocast_enabled(type, before.enabled);
  at::autocast::set_autocast_dtype(type, static_cast<at::ScalarType>(before.dtype));
}

AllocatorStats allocator_stats(int8_t device) {
  const auto stats = allocator().getDeviceStats(device);
  return {gauge(stats.allocated_bytes), gauge(stats.reserved_bytes), gauge(stats.active_bytes),
          gauge(stats.requested_bytes)};
}

bool allocator_is_used() {
  auto *cuda = dynamic_cast<c10::DeviceAllocator *>(c10::GetAllocator(at::kCUDA));
  return cuda != nullptr && cuda->initialized();
}

MemoryInfo memory_info(int8_t device) {
  const auto [free, total] = allocator().getMemoryInfo(device);
  return {free, total};
}

void reset_peak_stats(int8_t device) { allocator().resetPeakStats(device); }

void empty_cache(int8_t) { allocator().emptyCache(); }

uint64_t current_stream_handle(int8_t device) {
  const c10::impl::VirtualGuardImpl guard(at::kCUDA);
  const auto stream = guard.getStream(c10::Device(at::kCUDA, device));
  return reinterpret_cast<uintptr_t>(stream.native_handle());
}

void synchronize_device(int8_t device) {
  const c10::impl::VirtualGuardImpl guard(at::kCUDA);
  guard.synchronizeDevice(device);
}

void spin(int8_t device, int64_t cycles) {
  // at::cuda::sleep (ATen/cuda/Sleep.h) is in libtorch's CUDA half, which is loaded at run time and not linked.
  static auto *sleep = reinterpret_cast<void (*)(int64_t)>(dlsym(RTLD_DEFAULT, "_ZN2at4cuda5sleepEl"));
  if (sleep == nullptr) {
    throw std::runtime_error("at::cuda::sleep is not loaded: is this libtorch's CUDA build?");
  }
  const c10::DeviceGuard guard(c10::Device(at::kCUDA, device));
  sleep(cycles);
}

} // namespace cs336
