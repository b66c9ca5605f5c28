// Lists of tensors, built element by element from Rust.
#include "tensor.h"

namespace cs336 {

std::unique_ptr<std::vector<at::Tensor>> new_tensors() { return std::make_unique<std::vector<at::Tensor>>(); }

void push(std::vector<at::Tensor> &list, const at::Tensor &tensor) { list.push_back(tensor); }

void push_undefined(std::vector<at::Tensor> &list) { list.emplace_back(); }

bool is_defined(const at::Tensor &tensor) noexcept { return tensor.defined(); }

} // namespace cs336
