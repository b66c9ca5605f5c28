// Lists of tensors, built element by element from Rust.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

namespace cs336 {

std::unique_ptr<std::vector<at::Tensor>> new_tensors();
void push(std::vector<at::Tensor> &list, const at::Tensor &tensor);
void push_undefined(std::vector<at::Tensor> &list);
bool is_defined(const at::Tensor &tensor) noexcept;

} // namespace cs336
