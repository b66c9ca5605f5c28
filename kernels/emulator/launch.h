// Runs grids block by block; the last header of an emulated program.
#pragma once

#include <map>

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

// How the threads of a block take turns. Some blocks have copies that come late, or only when nothing else can happen;
// and warps that lag behind the others: of so many turns they take one.
struct Turns {
  std::vector<std::size_t> order;
  std::size_t left = 0;
  u32 copies_one_in = 0;
  std::vector<u32> lag;
};
inline Turns turns;

inline const bool block_hooks = [] {
  belongs_to_block(block.threads, block.exchanges, block.named, block.pending, block.has_awaited, turns);
  return true;
}();

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

inline void start_block() {
  start_threads();
  block.has_awaited = false;
  for (auto &hook : block.at_start) hook();
  turns.order.resize(block.threads.size());
  for (std::size_t i = 0; i < turns.order.size(); ++i) turns.order[i] = i;
  turns.left = turns.order.size();
  turns.copies_one_in = std::array{4u, 32u, 0u}[block.random() % 3];
  turns.lag.resize((turns.order.size() + 31) / 32);
  for (u32 &one_in : turns.lag) one_in = std::array{1u, 1u, 8u}[block.random() % 3];
}

// Runs the threads until every one has ended, or none can go on before the kernel before theirs is done.
inline void run_threads() {
  auto &[order, left, copies_one_in, lag] = turns;
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
      if (!block.fault.empty()) throw 0;
      left -= thread.done;
    }
    for (std::size_t i = block.pending.size(); i-- > 0;) {
      if (copies_one_in != 0 && block.random() % copies_one_in == 0) moved = true, arrive(i);
    }
    if (!moved && !block.pending.empty()) moved = true, arrive(block.random() % block.pending.size());
    if (moved) continue;
    if (!block.last_is_done && block.has_awaited) return;
    block.fault = "no thread of block (" + std::to_string(blockIdx.x) + ", " + std::to_string(blockIdx.y) + ", " +
                  std::to_string(blockIdx.z) + ") can go on: " + standing();
    throw 0;
  }
}

inline void end_block(bool is_early) {
  if (!block.pending.empty()) fail("%zu copies are under way though every thread has ended", block.pending.size());
  if (is_early && !block.has_awaited) fail("no thread called await_last_kernel, though the kernel is launched early");
  for (auto &hook : block.at_end) hook();
}

// ---- grids ---------------------------------------------------------------------------------------------------------

// A launch, as src/cuda/emulator.rs lays it out.
struct Launch {
  u32 kernel;
  u32 grid[3], threads[3];
  u32 shared_bytes;
  // Whether it may begin while the one before it runs.
  u32 is_early;
  void **arguments;
};

struct Grid {
  const Launch &launch;
  std::function<void()> body;
  // Blocks that have begun, by number.
  std::map<u64, Return> begun;
};

// About so many blocks of a kernel begin early. All are put by at once, each with its threads' stacks.
constexpr u64 early_blocks = 8;

inline Return put_by() {
  std::vector<Return> parts;
  for (auto &part : block.at_put_by) parts.push_back(part());
  const std::vector<unsigned char> shared(memory, memory + block.shared_bytes);
  return [parts, shared] {
    for (const Return &part : parts) part();
    std::copy(shared.begin(), shared.end(), memory);
  };
}

// Calls `visit` for every block of the grid with its number, one after the other.
template <typename Visit> void each_block(const Grid &grid, Visit visit) {
  const Launch &launch = grid.launch;
  gridDim = dim3(launch.grid[0], launch.grid[1], launch.grid[2]);
  blockDim = dim3(launch.threads[0], launch.threads[1], launch.threads[2]);
  block.shared_bytes = launch.shared_bytes;
  body = grid.body;
  u64 number = 0;
  for (blockIdx.z = 0; blockIdx.z < gridDim.z; ++blockIdx.z) {
    for (blockIdx.y = 0; blockIdx.y < gridDim.y; ++blockIdx.y) {
      for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) visit(number++);
    }
  }
}

// Some blocks go as far as they come without the kernel before theirs, and so do the copies that they start.
inline void begin(Grid &grid) {
  block.last_is_done = false;
  const u64 blocks = u64{grid.launch.grid[0]} * grid.launch.grid[1] * grid.launch.grid[2];
  each_block(grid, [&](u64 number) {
    if (block.random() % blocks >= early_blocks) return;
    start_block();
    run_threads();
    // It did not wait: this ends with an error.
    if (turns.left == 0) end_block(true);
    grid.begun.emplace(number, put_by());
  });
}

inline void finish(Grid &grid) {
  block.last_is_done = true;
  each_block(grid, [&](u64 number) {
    if (const auto begun = grid.begun.extract(number)) {
      begun.mapped()();
    } else {
      start_block();
    }
    run_threads();
    end_block(grid.launch.is_early);
  });
}

// Runs kernels of one stream. Those that may begin early do so before anything else is done, the last one first: where one
// reads or overwrites what is not its own yet, before it has waited, the results are wrong. A GPU may overlap less, but
// promises nothing of what is seen without a wait (PTX ISA 9.0, griddepcontrol).
//
// 0, or the number of the launch, from 1 on, that went wrong, with how in `message`.
inline u32 run(const std::vector<Entry> &kernels, const Launch *launches, u32 count, u64 seed, char *message,
               std::size_t capacity) {
  block.fault.clear();
  std::deque<Grid> grids;
  u32 at = 0;
  try {
    for (at = 0; at < count; ++at) {
      const Launch &launch = launches[at];
      if (launch.shared_bytes > sizeof memory) {
        block.fault = "a block cannot have " + std::to_string(launch.shared_bytes) + " bytes of shared memory";
        throw 0;
      }
      grids.push_back({launch, kernels[launch.kernel].bind(launch.arguments), {}});
    }
    for (at = count; at-- > 0;) {
      block.random.seed(~seed);
      if (launches[at].is_early) begin(grids[at]);
    }
    for (at = 0; at < count; ++at) {
      block.random.seed(seed);
      finish(grids[at]);
    }
  } catch (int) {
    // What it is stands in `block.fault`.
  }
  block.current = nullptr;
  std::snprintf(message, capacity, "%s", block.fault.c_str());
  return block.fault.empty() ? 0 : at + 1;
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
  EMULATOR_EXPORT unsigned emulate(const emulator::Launch *launches, unsigned count, unsigned long long seed,           \
                                   char *message, std::size_t capacity) {                                              \
    return emulator::run(emulator_entries, launches, count, seed, message, capacity);                                  \
  }
