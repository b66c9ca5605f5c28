// Facts about the libtorch that is loaded, and the switch that changes its numbers.
#include "library.h"

#include <ATen/Context.h>
#include <ATen/Version.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <dlfcn.h>

#include <stdexcept>
#include <string>

namespace cs336 {

void load_library(rust::Str name) {
  if (dlopen(std::string(name).c_str(), RTLD_NOW | RTLD_GLOBAL) == nullptr) {
    throw std::runtime_error(dlerror());
  }
}

uint64_t abi_version() noexcept { return aoti_torch_abi_version(); }

rust::String cpu_capability() { return at::get_cpu_capability(); }
int64_t cudnn_version() { return at::detail::getCUDAHooks().versionRuntimeCuDNN(); }

bool allow_tf32() { return at::globalContext().allowTF32CuBLAS(); }
void set_allow_tf32(bool allow) { at::globalContext().setAllowTF32CuBLAS(allow); }

} // namespace cs336
