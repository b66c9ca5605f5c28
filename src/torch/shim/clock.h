// A pair of CUDA events around a stretch of a stream's work, through libtorch's device-generic events.
#pragma once

#include "error.h"

#include <c10/core/Event.h>

#include <cstdint>
#include <memory>

namespace cs336 {

// Both events are recorded on the stream that is current on the calling thread at that moment.
class EventPair {
public:
  // `device` is the index of a CUDA device.
  explicit EventPair(int8_t device);
  void record_start();
  void record_end();
  // Waits for the end event; throws unless both were recorded.
  double elapsed_seconds() const;

private:
  c10::Stream current_stream() const;

  c10::Device device_;
  c10::Event start_;
  c10::Event end_;
};

std::unique_ptr<EventPair> new_event_pair(int8_t device);

} // namespace cs336
