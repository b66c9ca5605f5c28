// Counts the bytes of CPU tensors that one thread's work allocates.
#pragma once

#include <cstdint>
#include <memory>

namespace cs336 {

class MeterObserver;

// While it lives, libtorch reports this thread's CPU allocations (and those of the backward passes it starts) here.
class CpuMeter {
public:
  CpuMeter();
  ~CpuMeter();
  int64_t in_use() const noexcept;
  int64_t peak() const noexcept;
  void reset_peak() const noexcept;

private:
  struct Installed;
  std::shared_ptr<MeterObserver> observer_;
  std::unique_ptr<Installed> installed_;
};

std::unique_ptr<CpuMeter> new_cpu_meter();

} // namespace cs336
