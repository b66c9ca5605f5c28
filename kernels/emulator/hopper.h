// The instructions of lib/hopper.cuh and lib/wgmma.cuh, on the processor. Source: PTX ISA 9.0.
#pragma once

#include <map>

#include "emulator/base.h"

namespace emulator {

// ---- what the copy engine and the tensor cores read of shared memory -----------------------------------------------

// The thread whose write to a granule of 16 bytes no fence has ordered before such reads yet, plus one; and the granules
// that each thread wrote since its last fence.
inline std::vector<int> unfenced;
inline std::vector<std::vector<u32>> writes;

inline void written(u32 address, u32 bytes) {
  shared(address, bytes);
  for (u32 at = address / 16; at <= (address + bytes - 1) / 16; ++at) {
    unfenced[at] = thread() + 1;
    writes[thread()].push_back(at);
  }
}

inline void fence() {
  for (u32 at : writes[thread()]) {
    if (unfenced[at] == thread() + 1) unfenced[at] = 0;
  }
  writes[thread()].clear();
}

inline const unsigned char *read_by_engine(u32 address, u32 bytes, const char *who) {
  if (const int writer = unfenced[address / 16]) {
    fail("%s reads %u of shared memory, which thread %d wrote without a fence behind it", who, address, writer - 1);
  }
  return shared(address, bytes);
}

// ---- barriers in shared memory -------------------------------------------------------------------------------------

struct Mbarrier {
  u32 arrivals = 0;
  // Of the phase under way.
  std::int64_t missing = 0, bytes = 0;
  u32 phase = 0;

  void settle() {
    if (missing != 0 || bytes != 0) return;
    missing = arrivals;
    ++phase;
  }
};

inline std::map<u32, Mbarrier> mbarriers;

inline Mbarrier &mbarrier(u32 address) {
  const auto found = mbarriers.find(address);
  if (found == mbarriers.end()) fail("no barrier was initialised at %u", address);
  return found->second;
}

inline void complete_bytes(u32 address, u32 bytes) {
  Mbarrier &barrier = mbarrier(address);
  barrier.bytes -= bytes;
  barrier.settle();
}

inline void arrive(u32 address, u32 expected_bytes) {
  Mbarrier &barrier = mbarrier(address);
  barrier.bytes += expected_bytes;
  if (barrier.missing == 0) fail("more than %u arrivals at the barrier at %u in one phase", barrier.arrivals, address);
  --barrier.missing;
  barrier.settle();
}

// ---- bulk copies ---------------------------------------------------------------------------------------------------

// What src/cuda/tensor_map.rs writes for a tensor on the processor.
struct Map {
  static constexpr u64 mark = 0x70616D20726F7474;
  u64 magic;
  unsigned char *base;
  // Columns, rows, heads, batches; bytes from one row, head and batch to the next.
  u64 sizes[4];
  u64 strides[3];
  u64 box_columns, box_rows;
  u64 element_bytes;
  // 32, 64 or 128; 0: pieces lie as they are.
  u64 swizzle;
};
static_assert(sizeof(Map) <= 128);

inline u32 swizzled(u32 address, u64 bytes) {
  return bytes == 0 ? address : address ^ ((address >> 3) & (static_cast<u32>(bytes) - 16));
}

inline Map read_map(const void *pointer) {
  Map map;
  std::memcpy(&map, pointer, sizeof map);
  if (map.magic != Map::mark) fail("a tensor map was not encoded for this emulator");
  return map;
}

// Calls `piece(global, shared)` for every element of a box; `global` is null out of bounds.
template <typename Piece> void walk(const Map &map, u32 address, std::array<int, 4> at, Piece piece) {
  const u64 row_bytes = map.box_columns * map.element_bytes;
  for (u64 row = 0; row < map.box_rows; ++row) {
    for (u64 column = 0; column < map.box_columns; ++column) {
      const std::array<std::int64_t, 4> index = {at[0] + static_cast<std::int64_t>(column),
                                                 at[1] + static_cast<std::int64_t>(row), at[2], at[3]};
      bool inside = true;
      for (int i = 0; i < 4; ++i) inside &= index[i] >= 0 && index[i] < static_cast<std::int64_t>(map.sizes[i]);
      unsigned char *global = nullptr;
      if (inside) {
        global = map.base + index[0] * static_cast<std::int64_t>(map.element_bytes);
        for (int i = 0; i < 3; ++i) global += index[i + 1] * static_cast<std::int64_t>(map.strides[i]);
      }
      piece(global, swizzled(address + static_cast<u32>(row * row_bytes + column * map.element_bytes), map.swizzle));
    }
  }
}

inline void check_box(const Map &map, u32 address) {
  // A box whose rows are exchanged begins where the pattern does.
  const u32 alignment = map.swizzle == 0 ? 128 : 8 * static_cast<u32>(map.swizzle);
  if (address % alignment != 0) fail("a box at %u of shared memory, which is no multiple of %u", address, alignment);
  if (map.swizzle != 0 && map.box_columns * map.element_bytes != map.swizzle) fail("a box's row is not its swizzle");
}

// Copies out that a thread has started and not yet committed, and those that it has.
inline std::vector<std::vector<std::function<void()>>> uncommitted;

inline int copies_out_pending(int thread) {
  return static_cast<int>(std::count_if(block.pending.begin(), block.pending.end(),
                                        [thread](const Pending &pending) { return pending.thread == thread; }));
}

// ---- matrix instructions -------------------------------------------------------------------------------------------

// One lane's part of one instruction.
struct WgmmaPart {
  float *sums;
  u64 a, b;
  u32 left[4];
  int add;
};

struct Wgmma {
  int columns;
  bool left_in_registers, a_across, b_across;
  float (*widen)(std::uint16_t);
  WgmmaPart parts[32];
};

// One warp's: rows 16 w to 16 w + 15 of its warpgroup's.
struct Warp {
  u64 issued = 0;
  // Committed groups, the oldest first, and the group that is being made.
  std::deque<std::vector<Wgmma>> groups;
  std::vector<Wgmma> open;
};
inline std::vector<Warp> warps;

// Of the operand whose descriptor is given: the address of element (i, k), i counting rows of A or columns of B.
inline u32 operand_address(u64 descriptor, bool across, u32 i, u32 k) {
  const u32 start = (descriptor & 0x3FFF) << 4;
  const u32 leading = (descriptor >> 16 & 0x3FFF) << 4, stride = (descriptor >> 32 & 0x3FFF) << 4;
  const u32 mode = static_cast<u32>(descriptor >> 62);
  if (mode == 0) fail("an operand without a swizzle is not emulated");
  const u32 row_bytes = mode == 1 ? 128 : mode == 2 ? 64 : 32, in_row = row_bytes / 2;
  const u32 offset = across ? i / in_row * leading + i % in_row * 2 + k / 8 * stride + k % 8 * row_bytes
                            : i / 8 * stride + i % 8 * row_bytes + 2 * k;
  return swizzled(start + offset, row_bytes);
}

inline float operand(const Wgmma &wgmma, u64 descriptor, bool across, u32 i, u32 k) {
  std::uint16_t bits;
  // A descriptor holds the low 18 bits of an address, and shared memory has no more.
  std::memcpy(&bits, read_by_engine(operand_address(descriptor, across, i, k), 2, "wgmma"), 2);
  return wgmma.widen(bits);
}

inline void run(const Wgmma &wgmma, int warp_in_group) {
  float a[16][16], b[16][256];
  const WgmmaPart &first = wgmma.parts[0];
  for (u32 row = 0; row < 16; ++row) {
    for (u32 k = 0; k < 16; ++k) {
      if (wgmma.left_in_registers) {
        const u32 pair = wgmma.parts[4 * (row % 8) + k % 8 / 2].left[row / 8 + 2 * (k / 8)];
        a[row][k] = wgmma.widen(static_cast<std::uint16_t>(pair >> 16 * (k % 2)));
      } else {
        a[row][k] = operand(wgmma, first.a, wgmma.a_across, 16 * warp_in_group + row, k);
      }
    }
  }
  for (int column = 0; column < wgmma.columns; ++column) {
    for (u32 k = 0; k < 16; ++k) b[k][column] = operand(wgmma, first.b, wgmma.b_across, column, k);
  }
  for (u32 row = 0; row < 16; ++row) {
    float sums[256] = {};
    for (u32 k = 0; k < 16; ++k) {
      for (int column = 0; column < wgmma.columns; ++column) sums[column] += a[row][k] * b[k][column];
    }
    for (int column = 0; column < wgmma.columns; ++column) {
      const WgmmaPart &part = wgmma.parts[4 * (row % 8) + column % 8 / 2];
      float &sum = part.sums[4 * (column / 8) + 2 * (row / 8) + column % 2];
      sum = (part.add ? sum : 0.0f) + sums[column];
    }
  }
}

// The instruction may read its operands and write its sums at once, or as late as the wait for it.
inline void issue(const Wgmma &kind, const WgmmaPart &part) {
  const auto parts = gather("wgmma", part);
  Wgmma wgmma = kind;
  std::copy(parts.begin(), parts.end(), wgmma.parts);
  for (const WgmmaPart &other : parts) {
    const bool same = other.add == part.add && other.b == part.b && (kind.left_in_registers || other.a == part.a);
    if (!same) fail("the lanes of a warp give wgmma different descriptors");
  }
  Warp &own = warps[warp()];
  // The last lane to get here enters it, once for all.
  if (lane() == 31) {
    const bool at_once = coin(block.random() + own.issued++);
    if (at_once && own.groups.empty() && own.open.empty()) {
      run(wgmma, warp() % 4);
    } else {
      own.open.push_back(wgmma);
    }
  }
  gather("wgmma", 0);
}

inline void commit() {
  gather("wgmma.commit_group", 0);
  Warp &own = warps[warp()];
  if (lane() == 31) {
    own.groups.push_back(std::move(own.open));
    own.open.clear();
  }
  gather("wgmma.commit_group", 0);
}

inline void wait_groups(std::size_t left) {
  gather("wgmma.wait_group", left);
  Warp &own = warps[warp()];
  if (lane() == 31) {
    if (left == 0 && !own.open.empty()) fail("it waits for wgmma that were not committed");
    while (own.groups.size() > left) {
      for (const Wgmma &wgmma : own.groups.front()) run(wgmma, warp() % 4);
      own.groups.pop_front();
    }
  }
  gather("wgmma.wait_group", left);
}

inline const bool hopper_hooks = [] {
  belongs_to_block(unfenced, writes, mbarriers, uncommitted, warps);
  block.at_start.push_back([] {
    unfenced.assign((shared_base + sizeof memory) / 16 + 1, 0);
    writes.assign(block.threads.size(), {});
    mbarriers.clear();
    uncommitted.assign(block.threads.size(), {});
    warps.assign(block.threads.size() / 32 + 1, {});
  });
  block.at_end.push_back([] {
    for (const auto &copies : uncommitted) {
      if (!copies.empty()) fail("a copy out was never committed");
    }
    for (const Warp &warp : warps) {
      if (!warp.groups.empty() || !warp.open.empty()) fail("a wgmma was never waited for");
    }
  });
  return true;
}();

} // namespace emulator

// ---- barriers ------------------------------------------------------------------------------------------------------

DEVICE void barrier_init(u32 barrier, u32 arrivals) {
  emulator::shared(barrier, 8);
  emulator::mbarriers[barrier] = {arrivals, arrivals, 0, 0};
}
DEVICE void fence_barrier_init() {}
DEVICE void barrier_expect(u32 barrier, u32 bytes) { emulator::arrive(barrier, bytes); }
DEVICE void barrier_arrive(u32 barrier) { emulator::arrive(barrier, 0); }
DEVICE void barrier_wait(u32 barrier, u32 parity) {
  emulator::Mbarrier &one = emulator::mbarrier(barrier);
  emulator::wait("the barrier at " + std::to_string(barrier) + ", phase of parity " + std::to_string(parity),
                 [&one, parity] { return one.phase % 2 != parity; });
}
DEVICE void named_sync(u32 number, u32 threads) { emulator::named_sync(number, threads); }
DEVICE void named_arrive(u32 number, u32 threads) { emulator::named_arrive(number, threads); }

// ---- bulk copies ---------------------------------------------------------------------------------------------------

DEVICE void prefetch_map(const TensorMap *) {}

DEVICE void copy_in(u32 to, const TensorMap *map, u32 barrier, int column, int row, int head, int batch) {
  const emulator::Map read = emulator::read_map(map);
  emulator::check_box(read, to);
  const auto run = [=] {
    emulator::walk(read, to, {column, row, head, batch}, [&](const unsigned char *global, u32 at) {
      unsigned char *place = emulator::shared(at, static_cast<u32>(read.element_bytes));
      if (global) {
        std::memcpy(place, global, read.element_bytes);
      } else {
        std::memset(place, 0, read.element_bytes);
      }
    });
    emulator::complete_bytes(barrier, static_cast<u32>(read.box_columns * read.box_rows * read.element_bytes));
  };
  emulator::block.pending.push_back({-1, run});
}

template <u32 Bytes> DEVICE void copy_in_row(u32 to, const float *from, u32 barrier) {
  if (Bytes % 16 != 0 || to % 16 != 0 || reinterpret_cast<u64>(from) % 16 != 0) {
    emulator::fail("a bulk copy of %u bytes from %p to %u is not aligned to 16 bytes", Bytes, from, to);
  }
  emulator::block.pending.push_back({-1, [=] {
                                       std::memcpy(emulator::shared(to, Bytes), from, Bytes);
                                       emulator::complete_bytes(barrier, Bytes);
                                     }});
}

DEVICE void copy_out(const TensorMap *map, u32 from, int column, int row, int head, int batch) {
  const emulator::Map read = emulator::read_map(map);
  emulator::check_box(read, from);
  emulator::uncommitted[emulator::thread()].push_back([=] {
    emulator::walk(read, from, {column, row, head, batch}, [&](unsigned char *global, u32 at) {
      const unsigned char *place = emulator::read_by_engine(at, static_cast<u32>(read.element_bytes), "a copy out");
      if (global) std::memcpy(global, place, read.element_bytes);
    });
  });
}

template <u32 Bytes> DEVICE void add_out(float *to, u32 from) {
  if (Bytes % 16 != 0 || from % 16 != 0 || reinterpret_cast<u64>(to) % 16 != 0) {
    emulator::fail("a bulk reduction of %u bytes from %u to %p is not aligned to 16 bytes", Bytes, from, to);
  }
  emulator::uncommitted[emulator::thread()].push_back([=] {
    for (u32 i = 0; i < Bytes / 4; ++i) {
      float value;
      std::memcpy(&value, emulator::read_by_engine(from + 4 * i, 4, "a reduction"), 4);
      to[i] += value;
    }
  });
}

DEVICE void copies_out_commit() {
  auto &copies = emulator::uncommitted[emulator::thread()];
  for (auto &copy : copies) emulator::block.pending.push_back({emulator::thread(), std::move(copy)});
  copies.clear();
}

DEVICE void copies_out_wait_read() {
  const int self = emulator::thread();
  emulator::wait("its copies out", [self] { return emulator::copies_out_pending(self) == 0; });
}

DEVICE void fence_to_async() { emulator::fence(); }

template <int Registers> DEVICE void fewer_registers() {
  static_assert(Registers % 8 == 0 && Registers >= 24 && Registers <= 256);
}
template <int Registers> DEVICE void more_registers() {
  static_assert(Registers % 8 == 0 && Registers >= 24 && Registers <= 256);
}

DEVICE int alone(int value) {
  if (emulator::lane() != 0) emulator::fail("it is not lane 0");
  return value;
}

// ---- single accesses -----------------------------------------------------------------------------------------------

DEVICE u32 same_in_warp(u32 value) {
  const auto values = emulator::gather("same_in_warp", value);
  for (u32 other : values) {
    if (other != value) emulator::fail("the lanes of a warp differ in a value that they should share");
  }
  return value;
}

DEVICE int load_word(u32 address) {
  int word;
  std::memcpy(&word, emulator::shared(address, 4), 4);
  return word;
}

DEVICE void store_word(u32 address, int word) {
  emulator::written(address, 4);
  std::memcpy(emulator::shared(address, 4), &word, 4);
}

DEVICE void store_matrices(u32 address, u32 a, u32 b, u32 c, u32 d) {
  struct Part {
    u32 address, of[4];
  };
  const auto parts = emulator::gather("stmatrix", Part{address, {a, b, c, d}});
  // Each lane writes the row whose address it gave.
  const u32 matrix = emulator::lane() / 8, row = emulator::lane() % 8;
  emulator::written(address, 16);
  for (u32 pair = 0; pair < 4; ++pair) {
    std::memcpy(emulator::shared(address + 4 * pair, 4), &parts[4 * row + pair].of[matrix], 4);
  }
}

DEVICE void load_matrices(u32 address, u32 &a, u32 &b, u32 &c, u32 &d) {
  if (address % 16 != 0) emulator::fail("a row of a matrix at %u is not aligned", address);
  const auto rows = emulator::gather("ldmatrix", address);
  u32 *const to[4] = {&a, &b, &c, &d};
  for (u32 matrix = 0; matrix < 4; ++matrix) {
    const u32 row = rows[8 * matrix + emulator::lane() / 4];
    std::memcpy(to[matrix], emulator::shared(row + 4 * (emulator::lane() % 4), 4), 4);
  }
}

DEVICE void store_four(u32 address, float a, float b, float c, float d) {
  const float four[4] = {a, b, c, d};
  if (address % 16 != 0) emulator::fail("a vector store at %u is not aligned", address);
  emulator::written(address, 16);
  std::memcpy(emulator::shared(address, 16), four, 16);
}
