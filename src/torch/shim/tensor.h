// Lists of tensors, built element by element from Rust, and the addresses that kernels outside libtorch take.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace cs336 {

std::unique_ptr<std::vector<at::Tensor>> new_tensors();
void push(std::vector<at::Tensor> &list, const at::Tensor &tensor);

struct Float32Pair; // shared with bridge.rs

// Both tensors' addresses if both are dense float32 of one shape on the CUDA device `cuda_index` (-1: on the CPU).
Float32Pair float32_pair(const at::Tensor &parameter, const at::Tensor &gradient, int32_t cuda_index);

} // namespace cs336
