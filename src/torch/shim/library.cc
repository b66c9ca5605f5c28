// Facts about the libtorch that is loaded, and the switches that change its numbers.
#include "library.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
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
rust::String parallel_info() { return at::get_parallel_info(); }
rust::String build_config() { return at::show_config(); }
int64_t cuda_runtime_version() { return at::detail::getCUDAHooks().versionCUDART(); }
int64_t cudnn_version() { return at::detail::getCUDAHooks().versionRuntimeCuDNN(); }

int32_t num_threads() { return at::get_num_threads(); }
void set_num_threads(int32_t count) { at::set_num_threads(count); }

bool allow_tf32_matmul() { return at::globalContext().allowTF32CuBLAS(); }
bool allow_tf32_cudnn() { return at::globalContext().allowTF32CuDNN(); }

void set_allow_tf32(bool matmul, bool cudnn) {
  at::globalContext().setAllowTF32CuBLAS(matmul);
  at::globalContext().setAllowTF32CuDNN(cudnn);
}

} // namespace cs336
