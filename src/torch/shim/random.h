// Seeded generators of random numbers, and draws from them.
#pragma once

#include "error.h"

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

namespace cs336 {

// A generator of the CPU, or of the CUDA device of that index.
std::unique_ptr<at::Generator> new_generator(bool is_cuda, int8_t device, uint64_t seed);

// Each gives a new tensor on the generator's device; `dtype` is a c10::ScalarType.
std::unique_ptr<at::Tensor> draw_normal(const at::Generator &generator, rust::Slice<const int64_t> shape, int8_t dtype);
std::unique_ptr<at::Tensor> draw_uniform(const at::Generator &generator, rust::Slice<const int64_t> shape, int8_t dtype,
                                         double low, double high);
std::unique_ptr<at::Tensor> draw_integers(const at::Generator &generator, rust::Slice<const int64_t> shape,
                                          int8_t dtype, int64_t low, int64_t high);
std::unique_ptr<at::Tensor> draw_permutation(const at::Generator &generator, int64_t n);

} // namespace cs336
