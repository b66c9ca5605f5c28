// Seeded generators of random numbers, and draws from them.
#include "random.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/randperm.h>

namespace cs336 {

namespace {

at::IntArrayRef sizes(rust::Slice<const int64_t> shape) { return {shape.data(), shape.size()}; }

at::TensorOptions options(const at::Generator &generator, int8_t dtype) {
  return at::TensorOptions(generator.device()).dtype(static_cast<at::ScalarType>(dtype));
}

std::unique_ptr<at::Tensor> owned(at::Tensor tensor) { return std::make_unique<at::Tensor>(std::move(tensor)); }

} // namespace

std::unique_ptr<at::Generator> new_generator(bool is_cuda, int8_t device, uint64_t seed) {
  if (!is_cuda) {
    return std::make_unique<at::Generator>(at::detail::createCPUGenerator(seed));
  }
  at::globalContext().lazyInitDevice(at::kCUDA);
  auto generator = at::globalContext().getAcceleratorHooksInterface(at::kCUDA).getNewGenerator(device);
  generator.set_current_seed(seed);
  return std::make_unique<at::Generator>(std::move(generator));
}

std::unique_ptr<at::Tensor> draw_normal(const at::Generator &generator, rust::Slice<const int64_t> shape, int8_t dtype) {
  return owned(at::randn(sizes(shape), generator, options(generator, dtype)));
}

std::unique_ptr<at::Tensor> draw_uniform(const at::Generator &generator, rust::Slice<const int64_t> shape, int8_t dtype,
                                         double low, double high) {
  return owned(at::empty(sizes(shape), options(generator, dtype)).uniform_(low, high, generator));
}

std::unique_ptr<at::Tensor> draw_integers(const at::Generator &generator, rust::Slice<const int64_t> shape,
                                          int8_t dtype, int64_t low, int64_t high) {
  return owned(at::randint(low, high, sizes(shape), generator, options(generator, dtype)));
}

std::unique_ptr<at::Tensor> draw_permutation(const at::Generator &generator, int64_t n) {
  return owned(at::randperm(n, generator, at::TensorOptions(generator.device()).dtype(at::kLong)));
}

} // namespace cs336
