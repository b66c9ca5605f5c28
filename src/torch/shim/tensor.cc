// Lists of tensors, built element by element from Rust, and the addresses that kernels outside libtorch take.
#include "tensor.h"

#include "cs336/src/torch/bridge.rs.h"

namespace cs336 {

std::unique_ptr<std::vector<at::Tensor>> new_tensors() { return std::make_unique<std::vector<at::Tensor>>(); }

void push(std::vector<at::Tensor> &list, const at::Tensor &tensor) { list.push_back(tensor); }

Float32Pair float32_pair(const at::Tensor &parameter, const at::Tensor &gradient, int32_t cuda_index) {
  const auto fits = [&](const at::Tensor &tensor) {
    const bool placed = cuda_index < 0 ? tensor.is_cpu() : tensor.is_cuda() && tensor.get_device() == cuda_index;
    return placed && tensor.scalar_type() == at::kFloat && tensor.layout() == at::kStrided && tensor.is_contiguous();
  };
  if (!parameter.defined() || !gradient.defined() || !fits(parameter) || !fits(gradient) ||
      parameter.sizes() != gradient.sizes()) {
    return Float32Pair{false, 0, 0, 0};
  }
  const auto address = [](const at::Tensor &tensor) { return reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr()); };
  return Float32Pair{true, address(parameter), address(gradient), static_cast<uint64_t>(parameter.numel())};
}

} // namespace cs336
