// A pair of CUDA events around a stretch of a stream's work, through libtorch's device-generic events.
#include "clock.h"

#include <c10/core/impl/VirtualGuardImpl.h>

namespace cs336 {

namespace {

constexpr auto kTimed = c10::EventFlag::BACKEND_DEFAULT; // PYTORCH_DEFAULT would make events that keep no time

} // namespace

EventPair::EventPair(int8_t device)
    : device_(c10::kCUDA, device), start_(c10::kCUDA, kTimed), end_(c10::kCUDA, kTimed) {}

void EventPair::record_start() { start_.record(current_stream()); }
void EventPair::record_end() { end_.record(current_stream()); }

double EventPair::elapsed_seconds() const {
  end_.synchronize();
  return start_.elapsedTime(end_) / 1e3; // from milliseconds
}

c10::Stream EventPair::current_stream() const {
  return c10::impl::VirtualGuardImpl(c10::kCUDA).getStream(device_);
}

std::unique_ptr<EventPair> new_event_pair(int8_t device) { return std::make_unique<EventPair>(device); }

} // namespace cs336
