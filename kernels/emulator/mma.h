// The instructions of lib/mma.cuh, on the processor. Source: PTX ISA 9.0; for how sums are rounded, Fasi, Higham,
// Mikaitis and Pranesh, "Numerical behavior of NVIDIA tensor cores" (2021).
#pragma once

#include "emulator/base.h"

namespace emulator {

// ---- matrix instructions -------------------------------------------------------------------------------------------

// c + sum of a[i] b[i] as a tensor core rounds it: products are exact, all terms are cut off below the last place (and one
// bit more) of the largest, and their sum is cut off to a float.
template <int N> float tensor_sum(float c, const float *a, const float *b) {
  constexpr int guard = 1;
  double terms[N + 1];
  int top = 0;
  bool finite = true;
  for (int i = 0; i <= N; ++i) {
    terms[i] = i < N ? static_cast<double>(a[i]) * b[i] : c;
    const int exponent = static_cast<int>(std::bit_cast<u64>(terms[i]) >> 52 & 0x7FF);
    finite &= exponent != 0x7FF;
    top = std::max(top, exponent);
  }
  if (!finite) {
    double sum = 0.0;
    for (double term : terms) sum += term;
    return static_cast<float>(sum);
  }
  if (top == 0) return 0.0f;
  // So that the last place of the largest term, and the bits kept below it, are integers.
  const int shift = 23 + guard - (top - 1023);
  const double up = std::bit_cast<double>(static_cast<u64>(1023 + shift) << 52);
  std::int64_t sum = 0;
  for (double term : terms) sum += static_cast<std::int64_t>(term * up);
  std::uint64_t size = static_cast<std::uint64_t>(sum < 0 ? -sum : sum);
  const int extra = std::max(0, static_cast<int>(std::bit_width(size)) - 24);
  size = size >> extra << extra;
  const double down = std::bit_cast<double>(static_cast<u64>(1023 - shift) << 52);
  return static_cast<float>(static_cast<double>(size) * down * (sum < 0 ? -1.0 : 1.0));
}

struct MmaPart {
  u32 a[4], b[2];
};

// `Elements` of a word, which `widen(word, index)` gives; the sum is made of `Step` products at a time.
template <int Elements, int Step, typename Widen>
void mma(const char *what, float (&sums)[4], const u32 (&a)[4], const u32 (&b)[2], Widen widen) {
  MmaPart part;
  std::copy(a, a + 4, part.a);
  std::copy(b, b + 2, part.b);
  const auto parts = gather(what, part);
  constexpr int depth = 8 * Elements;
  const int g = lane() / 4, t = lane() % 4;
  for (int i = 0; i < 4; ++i) {
    const int row = i / 2, column = 2 * t + i % 2;
    float left[depth], right[depth];
    for (int word = 0; word < 8; ++word) {
      for (int e = 0; e < Elements; ++e) {
        left[word * Elements + e] = widen(parts[4 * g + word % 4].a[row + 2 * (word / 4)], e);
        right[word * Elements + e] = widen(parts[4 * column + word % 4].b[word / 4], e);
      }
    }
    for (int k = 0; k < depth; k += Step) sums[i] = tensor_sum<Step>(sums[i], left + k, right + k);
  }
}

// ---- asynchronous copies -------------------------------------------------------------------------------------------

// Of each thread: the groups that it committed, and of each group, the last one open, the copies under way.
inline std::vector<std::vector<int>> copy_groups;

inline const bool mma_hooks = [] {
  belongs_to_block(copy_groups);
  block.at_start.push_back([] { copy_groups.assign(block.threads.size(), {0}); });
  block.at_end.push_back([] {
    for (const auto &groups : copy_groups) {
      for (int copies : groups) {
        if (copies != 0) fail("an asynchronous copy was never waited for");
      }
    }
  });
  return true;
}();

} // namespace emulator

DEVICE void mma_bf16(float (&sums)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  emulator::mma<2, 8>("mma", sums, a, b,
                      [](u32 word, int e) { return std::bit_cast<float>(e ? word & 0xFFFF0000 : word << 16); });
}

DEVICE void mma_f16(float (&sums)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  emulator::mma<2, 8>("mma", sums, a, b, [](u32 word, int e) {
    return static_cast<float>(std::bit_cast<__half>(static_cast<std::uint16_t>(word >> 16 * e)));
  });
}

DEVICE void mma_tf32(float (&sums)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  emulator::mma<1, 4>("mma", sums, a, b, [](u32 word, int) { return std::bit_cast<float>(word & 0xFFFFE000); });
}

DEVICE void load_matrices(u32 (&words)[4], u32 address) {
  const auto addresses = emulator::gather("ldmatrix", address);
  const int lane = emulator::lane();
  for (int matrix = 0; matrix < 4; ++matrix) {
    std::memcpy(&words[matrix], emulator::shared(addresses[8 * matrix + lane / 4], 16) + 4 * (lane % 4), 4);
  }
}

DEVICE void load_matrices_transposed(u32 (&words)[4], u32 address) {
  const auto addresses = emulator::gather("ldmatrix.trans", address);
  const int lane = emulator::lane();
  for (int matrix = 0; matrix < 4; ++matrix) {
    words[matrix] = 0;
    for (int e = 0; e < 2; ++e) {
      std::uint16_t element;
      std::memcpy(&element, emulator::shared(addresses[8 * matrix + 2 * (lane % 4) + e], 16) + 2 * (lane / 4), 2);
      words[matrix] |= static_cast<u32>(element) << 16 * e;
    }
  }
}

DEVICE float load_float(u32 address) {
  float value;
  std::memcpy(&value, emulator::shared(address, 4), 4);
  return value;
}

DEVICE void copy_async(u32 to, const void *from, bool there) {
  if (reinterpret_cast<u64>(from) % 16 != 0) emulator::fail("an asynchronous copy from %p is not aligned", from);
  emulator::shared(to, 16);
  const int self = emulator::thread();
  const std::size_t group = emulator::copy_groups[self].size() - 1;
  ++emulator::copy_groups[self][group];
  emulator::block.pending.push_back({self, [=] {
                                       if (there) {
                                         std::memcpy(emulator::shared(to, 16), from, 16);
                                       } else {
                                         std::memset(emulator::shared(to, 16), 0, 16);
                                       }
                                       --emulator::copy_groups[self][group];
                                     }});
}

DEVICE void copies_commit() { emulator::copy_groups[emulator::thread()].push_back(0); }

template <int Left> DEVICE void copies_wait() {
  const int self = emulator::thread();
  const std::size_t committed = emulator::copy_groups[self].size() - 1;
  const std::size_t waited = committed > Left ? committed - Left : 0;
  emulator::wait("its asynchronous copies", [self, waited] {
    const auto &groups = emulator::copy_groups[self];
    return std::all_of(groups.begin(), groups.begin() + static_cast<std::ptrdiff_t>(waited), [](int n) { return n == 0; });
  });
}
