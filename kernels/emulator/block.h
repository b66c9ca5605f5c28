// One block of threads on the processor: every thread is a fiber, and gives way only where it waits.
//
// The order in which threads run and in which asynchronous copies arrive is drawn from a seed, so that a missing wait
// shows for some seed and a run can be repeated. A launch fails, and says where each thread stands, when no thread can go
// on, or when one does what the hardware leaves undefined and this emulator can see.
//
// Kernels that the host lets overlap do so as far as a GPU may let them: launch.h says how.
//
// It runs what a kernel says, in the terms of the PTX ISA. It tells nothing of speed, and races through plain accesses to
// memory show only in the results.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "emulator/fiber.h"

// The types of CUDA's own headers (float4, __nv_bfloat16, ...), which serve host compilers too.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <vector_types.h>

#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __grid_constant__
#define __grid_constant__
// By this the host finds the kernels that a program has under its macros.
#undef __global__
#define __global__ __attribute__((annotate("kernel")))

// Dynamic shared memory, as kernels declare it: extern __shared__ unsigned char memory[].
alignas(1024) inline unsigned char memory[228 * 1024];

inline uint3 threadIdx, blockIdx;
inline dim3 blockDim, gridDim;

namespace emulator {

using u32 = std::uint32_t;
using u64 = std::uint64_t;

// Shared memory does not begin at a rounder address than the 16 bytes that CUDA promises.
constexpr u32 shared_base = 1024 + 16;

struct Thread {
  Fiber fiber;
  uint3 index;
  int number;
  bool done = false;
  // What it waits for, and how that is called.
  std::function<bool()> ready;
  std::string waits_for;
};

// What the 32 lanes of a warp hand to one another in one instruction.
struct Exchange {
  std::vector<unsigned char> bytes[2];
  const char *what[2] = {};
  int arrived = 0;
  u64 generation = 0;
};

// A barrier by number; 0 is __syncthreads'.
struct NamedBarrier {
  u32 threads = 0, arrived = 0;
  u64 generation = 0;
};

// Something that happens at any later time: a copy.
struct Pending {
  int thread;
  std::function<void()> run;
};

// Brings a block back that was put by.
using Return = std::function<void()>;

struct Block {
  Fiber home;
  std::deque<Thread> threads;
  std::vector<Exchange> exchanges;
  std::array<NamedBarrier, 16> named;
  std::vector<Pending> pending;
  Thread *current = nullptr;
  u32 shared_bytes = 0;
  // Whether the kernel before this one is done; whether a thread has waited for that.
  bool last_is_done = true, has_awaited = false;
  std::string fault;
  std::mt19937_64 random;
  // Called between a block's threads' start and its end by the parts of the emulator that keep state.
  std::vector<std::function<void()>> at_start, at_end;
  // Called to put the block by while another one runs.
  std::vector<std::function<Return()>> at_put_by;
};

inline Block block;

// To be called once: what belongs to the block and is put by with it. References to elements stay good.
template <typename... States> void belongs_to_block(States &...states) {
  const auto put_by = []<typename State>(State &state) -> Return {
    auto kept = std::make_shared<State>(std::exchange(state, {}));
    return [&state, kept] { state = std::move(*kept); };
  };
  (block.at_put_by.push_back([&states, put_by] { return put_by(states); }), ...);
}

// Ends the launch with a message that names the thread.
[[noreturn]] inline void fail(const char *format, ...) {
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  if (block.fault.empty()) {
    const std::string who = block.current ? "thread " + std::to_string(block.current->number) : std::string("the end");
    block.fault = who + " of block (" + std::to_string(blockIdx.x) + ", " + std::to_string(blockIdx.y) + ", " +
                  std::to_string(blockIdx.z) + "): " + text;
  }
  if (block.current) {
    block.current->ready = [] { return false; };
    Fiber::change(block.current->fiber, block.home);
  }
  throw 0;
}

// Gives way until `ready`.
template <typename Ready> void wait(std::string what, Ready ready) {
  if (ready()) return;
  Thread &self = *block.current;
  self.waits_for = std::move(what);
  self.ready = ready;
  Fiber::change(self.fiber, block.home);
}

inline int thread() { return block.current->number; }
inline int lane() { return thread() % 32; }
inline int warp() { return thread() / 32; }
inline bool coin(u64 word) {
  word = (word ^ word >> 33) * 0xFF51AFD7ED558CCDull;
  return (word ^ word >> 33) & 1;
}

// What all lanes of the calling warp give to the same instruction, by lane.
template <typename T> std::array<T, 32> gather(const char *what, const T &mine) {
  static_assert(std::is_trivially_copyable_v<T>);
  Exchange &exchange = block.exchanges[warp()];
  const u64 generation = exchange.generation;
  auto &bytes = exchange.bytes[generation % 2];
  if (exchange.arrived == 0) {
    bytes.resize(32 * sizeof(T));
    exchange.what[generation % 2] = what;
  } else if (std::strcmp(exchange.what[generation % 2], what) != 0) {
    fail("it calls %s where another lane of its warp calls %s", what, exchange.what[generation % 2]);
  }
  std::memcpy(bytes.data() + lane() * sizeof(T), &mine, sizeof(T));
  if (++exchange.arrived == 32) {
    exchange.arrived = 0;
    ++exchange.generation;
  } else {
    wait(what, [&exchange, generation] { return exchange.generation != generation; });
  }
  std::array<T, 32> all;
  std::memcpy(all.data(), exchange.bytes[generation % 2].data(), sizeof all);
  return all;
}

inline void named_arrive(u32 number, u32 threads) {
  if (number >= block.named.size() || threads % 32 != 0) fail("barrier %u of %u threads", number, threads);
  NamedBarrier &barrier = block.named[number];
  if (barrier.arrived != 0 && barrier.threads != threads) {
    fail("it comes to barrier %u as one of %u threads, others as one of %u", number, threads, barrier.threads);
  }
  barrier.threads = threads;
  if (++barrier.arrived == threads) {
    barrier.arrived = 0;
    ++barrier.generation;
  }
}

inline void named_sync(u32 number, u32 threads) {
  NamedBarrier &barrier = block.named[number % 16];
  const u64 generation = barrier.generation;
  named_arrive(number, threads);
  wait("barrier " + std::to_string(number) + " of " + std::to_string(threads) + " threads",
       [&barrier, generation] { return barrier.generation != generation; });
}

// `bytes` of dynamic shared memory at an address of the shared window.
inline unsigned char *shared(u32 address, u32 bytes) {
  if (address < shared_base || address - shared_base + bytes > block.shared_bytes) {
    fail("it reaches for %u bytes at %u of shared memory, which has %u from %u on", bytes, address, block.shared_bytes,
         shared_base);
  }
  if (address % std::min(bytes, 16u) != 0) fail("%u bytes at %u of shared memory are not aligned", bytes, address);
  return memory + (address - shared_base);
}

} // namespace emulator

// ---- what CUDA C++ has by itself -----------------------------------------------------------------------------------

using std::max;
using std::memcpy;
using std::min;

inline void __syncthreads() { emulator::named_sync(0, blockDim.x * blockDim.y * blockDim.z); }
inline void __syncwarp(unsigned = 0xFFFFFFFF) { emulator::gather("__syncwarp", 0); }
inline unsigned long long __cvta_generic_to_shared(const void *pointer) {
  const auto offset = static_cast<const unsigned char *>(pointer) - memory;
  if (offset < 0 || offset >= emulator::block.shared_bytes) emulator::fail("a pointer is not to shared memory");
  return emulator::shared_base + offset;
}
template <typename T> T __shfl_sync(unsigned, T value, int from) {
  return emulator::gather("__shfl_sync", value)[from & 31];
}
inline bool __any_sync(unsigned, bool holds) {
  const auto all = emulator::gather("__any_sync", holds);
  return std::any_of(all.begin(), all.end(), [](bool one) { return one; });
}
inline unsigned __ballot_sync(unsigned, bool holds) {
  const auto all = emulator::gather("__ballot_sync", holds);
  unsigned lanes = 0;
  for (int lane = 0; lane < 32; ++lane) lanes |= static_cast<unsigned>(all[lane]) << lane;
  return lanes;
}

template <typename T> T __shfl_xor_sync(unsigned, T value, int bits) {
  return emulator::gather("__shfl_xor_sync", value)[(emulator::lane() ^ bits) & 31];
}
template <typename T> T __shfl_down_sync(unsigned, T value, int by) {
  const auto all = emulator::gather("__shfl_down_sync", value);
  return emulator::lane() + by < 32 ? all[emulator::lane() + by] : value;
}
template <typename T> T atomicAdd(T *to, T value) {
  const T before = *to;
  *to = before + value;
  return before;
}
template <typename T> T __ldg(const T *from) { return *from; }
template <typename T> T __ldcs(const T *from) { return *from; }
template <typename T> void __stcs(T *to, T value) { *to = value; }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline int __ffs(unsigned bits) { return std::countr_zero(bits) % 32 + (bits != 0); }
