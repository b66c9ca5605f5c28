// Facts about the libtorch that is loaded, and the switch that changes its numbers.
#pragma once

#include "error.h"

#include <cstdint>

namespace cs336 {

// Loads a shared library with its symbols visible to all; throws with the loader's message.
void load_library(rust::Str name);

// libtorch's packed version: one byte each of major, minor, patch, from the top.
uint64_t abi_version() noexcept;
rust::String cpu_capability();
int64_t cudnn_version();

// Whether cuBLAS may round float32 products to TF32.
bool allow_tf32();
void set_allow_tf32(bool allow);

} // namespace cs336
