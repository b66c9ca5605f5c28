// Autograd nodes and hooks whose work is done by Rust callbacks.
#pragma once

#include "error.h"
#include "tensor.h"

namespace cs336 {

struct Callback; // Rust types of bridge.rs
struct HookList;

// Runs the callback's forward as one node of the graph; gives its outputs, attached to that node.
std::unique_ptr<std::vector<at::Tensor>> apply_function(rust::Box<Callback> callback,
                                                        const std::vector<at::Tensor> &inputs);

// What the node that made `output` saved for its backward.
std::unique_ptr<std::vector<at::Tensor>> saved_by(const at::Tensor &output);

// The Rust hooks that fire when `parameter`'s gradient is ready; installs an empty list where there is none.
const HookList &hooks_of(const at::Tensor &parameter);

// `gradient` may be undefined for a scalar `output`.
void run_backward(const at::Tensor &output, const at::Tensor &gradient, bool retain_graph);

// Makes `parameter.grad` undefined, which frees it.
void release_grad(const at::Tensor &parameter);

// Makes `gradient`, of `parameter`'s shape, dtype and device, the tensor that the next backward accumulates into.
void set_grad(const at::Tensor &parameter, const at::Tensor &gradient);

// Copies each tensor of `from` into its counterpart of `to`, in few launches.
void copy_all(const std::vector<at::Tensor> &to, const std::vector<at::Tensor> &from);

// Tells autograd that `tensor`'s values were changed in place by something other than an operator.
void bump_version(const at::Tensor &tensor);

} // namespace cs336
