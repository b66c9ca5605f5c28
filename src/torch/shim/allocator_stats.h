// Counts the bytes of CPU tensors that one thread's work allocates.
#pragma once

#include <cstdint>
#include <memory>

namespace cs336 {

class AllocationObserver;

// While it lives, libtorch reports this thread's CPU allocations (and those of the backward passes it starts) here.
class CpuAllocations {
public:
  CpuAllocations();
  ~CpuAllocations();
  int64_t in_use() const noexcept;
  int64_t peak() const noexcept;
  void reset_peak() const noexcept;

private:
  struct Installed;
  std::shared_ptr<AllocationObserver> observer_;
  std::unique_ptr<Installed> installed_;
};

std::unique_ptr<CpuAllocations> new_cpu_allocations();

} // namespace cs336
