// Autograd nodes and hooks whose work is done by Rust callbacks.
#include "autograd.h"

#include "cs336/src/torch/bridge.rs.h"

#include <ATen/ops/_foreach_copy.h>
#include <c10/core/AutogradState.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

namespace cs336 {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

namespace {

// Lets libtorch's context own the Rust callback: it is freed with the node.
struct CallbackHolder final : torch::CustomClassHolder {
  explicit CallbackHolder(rust::Box<Callback> callback) : callback(std::move(callback)) {}
  rust::Box<Callback> callback;
};

constexpr const char *kCallback = "callback";

void run_forward(const Callback &callback, const variable_list &inputs, variable_list &outputs, variable_list &saved) {
  // A node computes in its inputs' kinds, as its backward will; autocast would round the forward only.
  const c10::impl::ExcludeDispatchKeyGuard without_autocast(c10::autocast_dispatch_keyset);
  check(callback.forward(inputs, outputs, saved));
}

struct RustFunction : torch::autograd::Function<RustFunction> {
  static variable_list forward(AutogradContext *context, const c10::intrusive_ptr<CallbackHolder> &holder,
                               at::TensorList inputs) {
    variable_list outputs, saved;
    run_forward(*holder->callback, inputs.vec(), outputs, saved);
    context->saved_data[kCallback] = c10::IValue::make_capsule(holder);
    context->set_materialize_grads(false);
    context->save_for_backward(std::move(saved));
    return outputs;
  }

  static variable_list backward(AutogradContext *context, const variable_list &grad_outputs) {
    auto holder = c10::static_intrusive_pointer_cast<CallbackHolder>(context->saved_data.at(kCallback).toCapsule());
    // The first element is the gradient of forward's first argument, the holder, which is not a tensor.
    variable_list grad_inputs(1);
    check(holder->callback->backward(context->get_saved_variables(), grad_outputs, grad_inputs));
    return grad_inputs;
  }
};

struct RustHooks final : torch::autograd::PostAccumulateGradHook {
  explicit RustHooks(rust::Box<HookList> list) : list(std::move(list)) {}
  void operator()(const at::Tensor &parameter) override { check(list->run(parameter)); }
  rust::Box<HookList> list;
};

} // namespace

std::unique_ptr<std::vector<at::Tensor>> apply_function(rust::Box<Callback> callback,
                                                        const std::vector<at::Tensor> &inputs) {
  // Otherwise libtorch would make a node, save tensors into it and drop it.
  if (!at::GradMode::is_enabled() || !torch::autograd::any_variable_requires_grad(inputs)) {
    const at::NoGradGuard no_graph;
    auto outputs = std::make_unique<variable_list>();
    variable_list saved;
    run_forward(*callback, inputs, *outputs, saved);
    return outputs;
  }
  auto holder = c10::make_intrusive<CallbackHolder>(std::move(callback));
  return std::make_unique<variable_list>(RustFunction::apply(holder, at::TensorList(inputs)));
}

std::unique_ptr<std::vector<at::Tensor>> saved_by(const at::Tensor &output) {
  auto *node = dynamic_cast<torch::autograd::CppNode<RustFunction> *>(output.grad_fn().get());
  if (node == nullptr) {
    throw std::invalid_argument("the tensor is no output of a function applied with torch::autograd::apply");
  }
  return std::make_unique<variable_list>(node->ctx_.get_saved_variables());
}

const HookList &hooks_of(const at::Tensor &parameter) {
  if (!parameter.requires_grad() || !parameter.is_leaf()) {
    throw std::invalid_argument("a hook needs a leaf tensor that requires a gradient");
  }
  auto &slot = torch::autograd::impl::post_acc_grad_hooks(parameter);
  if (slot == nullptr) {
    torch::autograd::impl::set_post_acc_grad_hooks(parameter, std::make_unique<RustHooks>(new_hook_list()));
  }
  auto *hooks = dynamic_cast<RustHooks *>(slot.get());
  if (hooks == nullptr) {
    throw std::invalid_argument("the tensor already carries a post-accumulate hook that is not ours");
  }
  return *hooks->list;
}

namespace {

// A process drives one device, so an engine thread of its own would only add a wake-up to every backward pass.
class OnThisThread {
public:
  OnThisThread() : before_(state().get_multithreading_enabled()) { state().set_multithreading_enabled(false); }
  ~OnThisThread() { state().set_multithreading_enabled(before_); }
  OnThisThread(const OnThisThread &) = delete;
  OnThisThread &operator=(const OnThisThread &) = delete;

private:
  static c10::AutogradState &state() { return c10::AutogradState::get_tls_state(); }
  const bool before_;
};

} // namespace

void run_backward(const at::Tensor &output, const at::Tensor &gradient, bool retain_graph) {
  const OnThisThread on_this_thread;
  variable_list gradients;
  if (gradient.defined()) {
    gradients.push_back(gradient);
  }
  torch::autograd::backward({output}, gradients, retain_graph);
}

void release_grad(const at::Tensor &parameter) { parameter.mutable_grad().reset(); }

void set_grad(const at::Tensor &parameter, const at::Tensor &gradient) {
  TORCH_CHECK(gradient.sizes() == parameter.sizes(), "a gradient of shape ", gradient.sizes(),
              " for a parameter of shape ", parameter.sizes());
  TORCH_CHECK(gradient.scalar_type() == parameter.scalar_type() && gradient.device() == parameter.device(), "a gradient of ",
              gradient.options(), " for a parameter of ", parameter.options());
  parameter.mutable_grad() = gradient;
}

void copy_all(const std::vector<at::Tensor> &to, const std::vector<at::Tensor> &from) {
  const at::NoGradGuard no_grad;
  at::_foreach_copy_(to, from);
}

void bump_version(const at::Tensor &tensor) { tensor.unsafeGetTensorImpl()->bump_version(); }

} // namespace cs336
