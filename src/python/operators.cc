// The operators torch.ops.cs336: schemas, autograd, autocast and shapes here, the work in Rust (src/python/mod.rs).
#include <ATen/Context.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <c10/core/InferenceMode.h>
#include <torch/library.h>

#include <dlfcn.h>

#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// src/python/mod.rs. No C++ exception and no Rust panic crosses: a status comes back, and words where it is not kDone.
extern "C" {
int32_t cs336_flash_forward(const variable_list &inputs, bool is_causal, bool is_deterministic, variable_list &outputs,
                            std::string &message);
int32_t cs336_flash_backward(const variable_list &inputs, bool is_causal, bool is_deterministic,
                             variable_list &outputs, std::string &message);
int32_t cs336_fused_adamw(const variable_list &tensors, const double (&options)[5], std::string &message);
int32_t cs336_unserved(int8_t dtype, int32_t cuda_index, int64_t d, std::string &message);
int32_t cs336_use_package(const std::string &folder, std::string &message);
int32_t cs336_write_cubins(std::string &message);
}

namespace {

enum Status : int32_t { kDone = 0, kFailed = 1, kOutOfMemory = 2 };

void require_done(int32_t status, const std::string &message) {
  if (status == kOutOfMemory) {
    C10_THROW_ERROR(OutOfMemoryError, message);
  }
  if (status != kDone) {
    throw std::runtime_error(message);
  }
}

bool is_deterministic() { return at::globalContext().deterministicAlgorithms(); }

using Forward = std::tuple<Tensor, Tensor>(const Tensor &, const Tensor &, const Tensor &, bool);
using Backward = std::tuple<Tensor, Tensor, Tensor>(const Tensor &, const Tensor &, const Tensor &, const Tensor &,
                                                    const Tensor &, const Tensor &, bool);

std::tuple<Tensor, Tensor> forward(const Tensor &q, const Tensor &k, const Tensor &v, bool is_causal) {
  variable_list outputs;
  std::string message;
  require_done(cs336_flash_forward({q, k, v}, is_causal, is_deterministic(), outputs, message), message);
  return {std::move(outputs.at(0)), std::move(outputs.at(1))};
}

std::tuple<Tensor, Tensor, Tensor> backward(const Tensor &q, const Tensor &k, const Tensor &v, const Tensor &o,
                                            const Tensor &lse, const Tensor &d_o, bool is_causal) {
  variable_list outputs;
  std::string message;
  const int32_t status =
      cs336_flash_backward({q, k, v, o, lse, d_o}, is_causal, is_deterministic(), outputs, message);
  require_done(status, message);
  return {std::move(outputs.at(0)), std::move(outputs.at(1)), std::move(outputs.at(2))};
}

// `o` and `lse` without values, for tracing: contiguous, as the kernels write them. One input on meta leads here.
std::tuple<Tensor, Tensor> forward_meta(const Tensor &q, const Tensor &k, const Tensor &v, bool) {
  const bool is_traced = q.device() == k.device() && q.device() == v.device();
  TORCH_CHECK(is_traced, "q is on ", q.device(), ", k on ", k.device(), " and v on ", v.device(),
              "; attention needs them on one device");
  TORCH_CHECK_VALUE(q.dim() >= 2, "q has shape ", q.sym_sizes(), "; attention needs (..., n_queries, d)");
  const auto sizes = q.sym_sizes();
  const auto wide = q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  return {at::empty_symint(sizes, q.options()), at::empty_symint(sizes.slice(0, sizes.size() - 1), q.options().dtype(wide))};
}

std::tuple<Tensor, Tensor, Tensor> backward_meta(const Tensor &q, const Tensor &k, const Tensor &v, const Tensor &,
                                                 const Tensor &, const Tensor &, bool) {
  const auto like = [](const Tensor &t) { return at::empty_symint(t.sym_sizes(), t.options()); };
  return {like(q), like(k), like(v)};
}

template <typename Schema> const c10::TypedOperatorHandle<Schema> &handle(const char *name) {
  static const auto found = c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Schema>();
  return found;
}

auto call_forward(const Tensor &q, const Tensor &k, const Tensor &v, bool is_causal) {
  return handle<Forward>("cs336::flash_attention").call(q, k, v, is_causal);
}

struct FlashAttention : torch::autograd::Function<FlashAttention> {
  static variable_list forward(AutogradContext *context, const Tensor &q, const Tensor &k, const Tensor &v,
                               bool is_causal) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    auto [o, lse] = call_forward(q, k, v, is_causal);
    context->saved_data["is_causal"] = is_causal;
    context->set_materialize_grads(false);
    context->save_for_backward({q, k, v, o, lse});
    context->mark_non_differentiable({lse});
    return {o, lse};
  }

  static variable_list backward(AutogradContext *context, const variable_list &gradients) {
    const Tensor &d_o = gradients[0];
    if (!d_o.defined()) {
      return variable_list(4);
    }
    const auto saved = context->get_saved_variables();
    auto [dq, dk, dv] =
        handle<Backward>("cs336::flash_attention_backward")
            .call(saved[0], saved[1], saved[2], saved[3], saved[4], d_o, context->saved_data["is_causal"].toBool());
    return {dq, dk, dv, Tensor()};
  }
};

std::tuple<Tensor, Tensor> forward_autograd(const Tensor &q, const Tensor &k, const Tensor &v, bool is_causal) {
  for (const Tensor &t : {q, k, v}) {
    TORCH_CHECK_NOT_IMPLEMENTED(!t._fw_grad(/*level=*/0).defined(),
                                "attention has no forward-mode derivative: differentiate backward");
  }
  if (!at::GradMode::is_enabled() || !(q.requires_grad() || k.requires_grad() || v.requires_grad())) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return call_forward(q, k, v, is_causal);
  }
  auto outputs = FlashAttention::apply(q, k, v, is_causal);
  return {std::move(outputs[0]), std::move(outputs[1])};
}

// As PyTorch's scaled_dot_product_attention: in autocast's type.
template <c10::DeviceType device>
std::tuple<Tensor, Tensor> forward_autocast(const Tensor &q, const Tensor &k, const Tensor &v, bool is_causal) {
  const c10::impl::ExcludeDispatchKeyGuard without_autocast(c10::autocast_dispatch_keyset);
  const auto dtype = at::autocast::get_autocast_dtype(device);
  const auto cast = [dtype](const Tensor &t) { return at::autocast::cached_cast(dtype, t, device); };
  return call_forward(cast(q), cast(k), cast(v), is_causal);
}

// One list for each argument; empty lists have nothing to do.
void fused_adamw(at::TensorList parameters, at::TensorList gradients, at::TensorList exp_avgs,
                 at::TensorList exp_avg_sqs, at::TensorList steps, double lr, double beta1, double beta2, double eps,
                 double weight_decay) {
  const size_t count = parameters.size();
  variable_list tensors;
  tensors.reserve(5 * count);
  for (const auto &list : {parameters, gradients, exp_avgs, exp_avg_sqs, steps}) {
    TORCH_CHECK_VALUE(list.size() == count, "fused_adamw_ got lists of ", count, " and ", list.size(),
                      " tensors; each parameter needs one of each");
    tensors.insert(tensors.end(), list.begin(), list.end());
  }
  for (const auto &list : {parameters, exp_avgs, exp_avg_sqs, steps}) {
    for (const Tensor &written : list) {
      TORCH_CHECK(!written.is_inference() || c10::InferenceMode::is_enabled(),
                  "fused_adamw_ cannot change a tensor outside inference mode that was made within");
      at::assert_no_internal_overlap(written);
    }
  }
  const double options[] = {lr, beta1, beta2, eps, weight_decay};
  std::string message;
  require_done(cs336_fused_adamw(tensors, options, message), message);
}

void fused_adamw_meta(at::TensorList, at::TensorList, at::TensorList, at::TensorList, at::TensorList, double, double,
                      double, double, double) {}

// Why our kernels do not take such inputs; empty if they do.
std::string unserved(at::ScalarType dtype, at::Device device, int64_t d) {
  std::string message;
  cs336_unserved(static_cast<int8_t>(dtype), device.is_cuda() ? std::max<int32_t>(device.index(), 0) : -1, d, message);
  return message;
}

// Compiles the kernels of the wheel into cubins/ beside this library, which only `make wheel` does.
void write_cubins() {
  std::string message;
  require_done(cs336_write_cubins(message), message);
}

// The folder of this library, which holds kernels/ and cubins/.
std::string own_folder() {
  Dl_info found;
  TORCH_CHECK(dladdr(reinterpret_cast<void *>(&own_folder), &found) != 0, "the loader does not know libcs336.so");
  const std::string path = found.dli_fname;
  return path.substr(0, path.rfind('/'));
}

} // namespace

TORCH_LIBRARY(cs336, library) {
  std::string message;
  require_done(cs336_use_package(own_folder(), message), message);
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag};
  library.def("flash_attention(Tensor q, Tensor k, Tensor v, bool is_causal=False) -> (Tensor o, Tensor lse)", tags);
  library.def("flash_attention_backward(Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor d_o, "
              "bool is_causal=False) -> (Tensor dq, Tensor dk, Tensor dv)",
              tags);
  library.def("fused_adamw_(Tensor(a!)[] parameters, Tensor[] gradients, Tensor(b!)[] exp_avgs, "
              "Tensor(c!)[] exp_avg_sqs, Tensor(d!)[] steps, *, float lr, float beta1, float beta2, float eps, "
              "float weight_decay) -> ()",
              tags);
  library.def("unserved(ScalarType dtype, Device device, int d) -> str", &unserved);
  library.def("write_cubins() -> ()", &write_cubins);
}

TORCH_LIBRARY_IMPL(cs336, CPU, library) {
  library.impl("flash_attention", &forward);
  library.impl("flash_attention_backward", &backward);
  library.impl("fused_adamw_", &fused_adamw);
}

TORCH_LIBRARY_IMPL(cs336, CUDA, library) {
  library.impl("flash_attention", &forward);
  library.impl("flash_attention_backward", &backward);
  library.impl("fused_adamw_", &fused_adamw);
}

TORCH_LIBRARY_IMPL(cs336, Meta, library) {
  library.impl("flash_attention", &forward_meta);
  library.impl("flash_attention_backward", &backward_meta);
  library.impl("fused_adamw_", &fused_adamw_meta);
}

TORCH_LIBRARY_IMPL(cs336, Autograd, library) {
  library.impl("flash_attention", &forward_autograd);
  // Its derivative is an error, not a missing gradient.
  library.impl("flash_attention_backward", torch::autograd::autogradNotImplementedFallback());
}

TORCH_LIBRARY_IMPL(cs336, AutocastCPU, library) { library.impl("flash_attention", &forward_autocast<at::kCPU>); }
TORCH_LIBRARY_IMPL(cs336, AutocastCUDA, library) { library.impl("flash_attention", &forward_autocast<at::kCUDA>); }
