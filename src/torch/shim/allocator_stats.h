// Reports one thread's allocations of CPU tensors to Rust.
#pragma once

#include <c10/util/ThreadLocalDebugInfo.h>
#include <rust/cxx.h>

#include <memory>

namespace cs336 {

struct AllocationCallback; // the Rust type of allocator_stats.rs

// While the result lives, `callback` gets this thread's CPU allocations (and those of the backward passes that it starts);
// each report goes on to the previous observer.
std::unique_ptr<c10::DebugInfoGuard> observe_cpu(rust::Box<AllocationCallback> callback);

} // namespace cs336
