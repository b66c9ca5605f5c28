// Facts about the libtorch that is loaded, and the switches that change its numbers.
#pragma once

#include "error.h"

#include <cstdint>

namespace cs336 {

// Loads a shared library with its symbols visible to all; throws with the loader's message.
void load_library(rust::Str name);

// libtorch's packed version: one byte each of major, minor, patch, from the top.
uint64_t abi_version() noexcept;
rust::String cpu_capability();
rust::String parallel_info();
rust::String build_config();
int64_t cuda_runtime_version();
int64_t cudnn_version();

int32_t num_threads();
void set_num_threads(int32_t count);

bool allow_tf32_matmul();
bool allow_tf32_cudnn();
void set_allow_tf32(bool matmul, bool cudnn);

} // namespace cs336
