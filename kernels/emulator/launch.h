// Runs the blocks of a grid one after the other; the last header of an emulated program.
#pragma once

#include "emulator/block.h"

namespace emulator {

struct Entry {
  const char *name;
  std::vector<std::size_t> parameters;
  // From the addresses of the arguments to what every thread runs.
  std::function<std::function<void()>(void **)> bind;
};

template <typename... Parameters> Entry entry(const char *name, void (*kernel)(Parameters...)) {
  using Values = std::tuple<std::remove_cv_t<Parameters>...>;
  auto bind = [kernel](void **arguments) -> std::function<void()> {
    auto values = std::make_shared<Values>();
    std::size_t at = 0;
    std::apply([&](auto &...value) { (std::memcpy(static_cast<void *>(&value), arguments[at++], sizeof value), ...); },
               *values);
    return [kernel, values] { std::apply(kernel, *values); };
  };
  return {name, {sizeof(Parameters)...}, bind};
}

inline std::function<void()> body;
constexpr std::size_t stack_bytes = 256 * 1024;

inline void run_thread() {
  body();
  block.current->done = true;
  Fiber::change(block.current->fiber, block.home);
}

inline void resume(Thread &thread) {
  block.current = &thread;
  threadIdx = thread.index;
  Fiber::change(block.home, thread.fiber);
  block.current = nullptr;
}

inline void start_threads() {
  const u32 count = blockDim.x * blockDim.y * blockDim.z;
  block.threads.resize(count);
  block.exchanges.assign((count + 31) / 32, {});
  block.named.fill({});
  block.pending.clear();
  // What nobody wrote is no number.
  std::memset(memory, 0xFF, sizeof memory);
  for (u32 number = 0; number < count; ++number) {
    Thread &thread = block.threads[number];
    thread.number = static_cast<int>(number);
    thread.index = {number % blockDim.x, number / blockDim.x % blockDim.y, number / blockDim.x / blockDim.y};
    thread.done = false;
    thread.ready = nullptr;
    thread.fiber.start(run_thread, stack_bytes);
  }
}

// Where the threads stand, those that stand alike together.
inline std::string standing() {
  std::string text;
  for (std::size_t i = 0; i < block.threads.size();) {
    auto state = [](const Thread &thread) {
      return thread.done ? std::string("has ended") : "waits for " + thread.waits_for;
    };
    std::size_t end = i;
    while (end < block.threads.size() && state(block.threads[end]) == state(block.threads[i])) ++end;
    text += (text.empty() ? "" : "; ") + std::string("thread ") + std::to_string(i);
    if (end - i > 1) text += " to " + std::to_string(end - 1);
    text += " " + state(block.threads[i]);
    i = end;
  }
  return text;
}

inline void arrive(std::size_t index) {
  Pending pending = std::move(block.pending[index]);
  block.pending.erase(block.pending.begin() + static_cast<std::ptrdiff_t>(index));
  pending.run();
}

inline void run_block() {
  start_threads();
  for (auto &hook : block.at_start) hook();
  std::vector<std::size_t> order(block.threads.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::size_t left = order.size();
  // Some blocks have copies that come late, or only when nothing else can happen; and warps that lag behind the others:
  // of so many turns they take one.
  const u32 copies_one_in = std::array{4u, 32u, 0u}[block.random() % 3];
  std::vector<u32> lag((order.size() + 31) / 32);
  for (u32 &turns : lag) turns = std::array{1u, 1u, 8u}[block.random() % 3];
  std::vector<bool> skipped(lag.size());
  while (left > 0) {
    std::shuffle(order.begin(), order.end(), block.random);
    bool moved = false;
    for (std::size_t warp = 0; warp < lag.size(); ++warp) {
      skipped[warp] = block.random() % lag[warp] != 0;
    }
    for (std::size_t i : order) {
      Thread &thread = block.threads[i];
      if (thread.done || (thread.ready && !thread.ready())) continue;
      if (skipped[i / 32]) {
        moved = true;
        continue;
      }
      moved = true;
      thread.ready = nullptr;
      resume(thread);
      if (!block.fault.empty()) return;
      left -= thread.done;
    }
    for (std::size_t i = block.pending.size(); i-- > 0;) {
      if (copies_one_in != 0 && block.random() % copies_one_in == 0) moved = true, arrive(i);
    }
    if (!moved && !block.pending.empty()) moved = true, arrive(block.random() % block.pending.size());
    if (!block.fault.empty()) return;
    if (!moved) {
      block.fault = "no thread of block (" + std::to_string(blockIdx.x) + ", " + std::to_string(blockIdx.y) + ", " +
                    std::to_string(blockIdx.z) + ") can go on: " + standing();
      return;
    }
  }
  if (!block.pending.empty()) fail("%zu copies are under way though every thread has ended", block.pending.size());
  for (auto &hook : block.at_end) hook();
}

// 0, or 1 with what went wrong in `message`.
inline int launch(const Entry &kernel, const u32 *grid, const u32 *threads, u32 shared_bytes, void **arguments, u64 seed,
                  char *message, std::size_t capacity) {
  gridDim = dim3(grid[0], grid[1], grid[2]);
  blockDim = dim3(threads[0], threads[1], threads[2]);
  block.shared_bytes = shared_bytes;
  block.fault.clear();
  block.random.seed(seed);
  if (shared_bytes > sizeof memory) {
    block.fault = "a block cannot have " + std::to_string(shared_bytes) + " bytes of shared memory";
  }
  body = kernel.bind(arguments);
  try {
    for (blockIdx.z = 0; blockIdx.z < gridDim.z && block.fault.empty(); ++blockIdx.z) {
      for (blockIdx.y = 0; blockIdx.y < gridDim.y && block.fault.empty(); ++blockIdx.y) {
        for (blockIdx.x = 0; blockIdx.x < gridDim.x && block.fault.empty(); ++blockIdx.x) run_block();
      }
    }
  } catch (int) {
    // `fail` outside of a thread.
  }
  block.current = nullptr;
  std::snprintf(message, capacity, "%s", block.fault.c_str());
  return block.fault.empty() ? 0 : 1;
}

} // namespace emulator

// Everything else is hidden: libraries loaded side by side must not share a block.
#define EMULATOR_EXPORT extern "C" __attribute__((visibility("default")))

// What the host finds in the library; `emulator_entries` ends the program's own text.
#define EMULATED_ENTRIES(...)                                                                                          \
  static const std::vector<emulator::Entry> emulator_entries = {__VA_ARGS__};                                          \
  EMULATOR_EXPORT const char *emulated_name(unsigned kernel) {                                                         \
    return kernel < emulator_entries.size() ? emulator_entries[kernel].name : nullptr;                                 \
  }                                                                                                                    \
  EMULATOR_EXPORT std::size_t emulated_parameter(unsigned kernel, unsigned index) {                                    \
    const auto &sizes = emulator_entries[kernel].parameters;                                                           \
    return index < sizes.size() ? sizes[index] : 0;                                                                    \
  }                                                                                                                    \
  EMULATOR_EXPORT int emulate(unsigned kernel, const unsigned *grid, const unsigned *threads, unsigned shared_bytes,   \
                         void **arguments, unsigned long long seed, char *message, std::size_t capacity) {             \
    return emulator::launch(emulator_entries[kernel], grid, threads, shared_bytes, arguments, seed, message, capacity);\
  }
