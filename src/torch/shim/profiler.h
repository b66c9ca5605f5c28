// libtorch's profiler: Kineto traces, ranges for any of its collectors, and NVTX ranges for external profilers.
#pragma once

#include "error.h"

#include <ATen/record_function.h>

#include <memory>
#include <string>

namespace cs336 {

// While it lives, a named range of this thread is open for the active profilers; without one it costs a few loads.
class UserScope {
public:
  explicit UserScope(std::string name);

private:
  // The record keeps a view of it.
  const std::string name_;
  at::RecordFunction record_;
};
std::unique_ptr<UserScope> open_user_scope(rust::Str name) noexcept;

// Kineto's collection on this thread and in the backward passes that it starts, of operators and, with `is_cuda`, of
// CUDA calls, kernels and copies. Throws if a profiler is on already.
void start_kineto(bool is_cuda);
// Marks this thread's user scopes for NVIDIA's tools. Throws without libtorch's CUDA half.
void start_nvtx();
// Ends either, and writes what Kineto collected to `path` as a Chrome trace; an empty `path` throws it away.
void stop_profiler(rust::Str path);

} // namespace cs336
