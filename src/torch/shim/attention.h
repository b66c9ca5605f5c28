// libtorch's fused attention operators, each by its own name, recorded for autograd.
#pragma once

#include "error.h"

#include <ATen/core/Tensor.h>

#include <memory>

namespace cs336 {

// q, k and v are (batch, heads, n, d) on one CUDA device; gives o. Throws libtorch's error if the operator refuses
// them.
std::unique_ptr<at::Tensor> flash_attention(const at::Tensor &q, const at::Tensor &k, const at::Tensor &v,
                                            bool is_causal);
std::unique_ptr<at::Tensor> cudnn_attention(const at::Tensor &q, const at::Tensor &k, const at::Tensor &v,
                                            bool is_causal);

} // namespace cs336
