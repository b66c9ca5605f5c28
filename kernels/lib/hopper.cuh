// What Hopper adds to CUDA C++, one PTX instruction a function: barriers in shared memory, bulk tensor copies, fences,
// and the descriptors by which matrix instructions read shared memory.
// Source: PTX ISA 9.0, sections on mbarrier, cp.async.bulk.tensor, wgmma and setmaxnreg.
#pragma once

#include "lib/base.cuh"

// Only its address is used; the host encodes it. 128 bytes, aligned as the copy engine wants them.
struct alignas(128) TensorMap {
  u64 words[16];
};

// Under EMULATED a host compiler builds the kernel for the processor, where these functions do what the instructions do.
#ifdef EMULATED
#include "emulator/hopper.h"
#else
// ---- barriers in shared memory -------------------------------------------------------------------------------------

DEVICE void barrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to the copy engine; a block barrier must follow.
DEVICE void fence_barrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// One arrival, and so many bytes that copies will bring before the phase ends.
DEVICE void barrier_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

DEVICE void barrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Waits for the end of the phase with this parity; a fresh barrier counts as if a phase of parity 1 had just ended.
DEVICE void barrier_wait(u32 barrier, u32 parity) {
  asm volatile("{\n"
               ".reg .pred done;\n"
               "again:\n"
               "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
               "@!done bra again;\n"
               "}\n" ::"r"(barrier),
               "r"(parity)
               : "memory");
}

// A barrier of `threads` threads by number (1 to 15; 0 is __syncthreads').
DEVICE void named_sync(u32 number, u32 threads) {
  asm volatile("barrier.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

DEVICE void named_arrive(u32 number, u32 threads) {
  asm volatile("barrier.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// ---- bulk tensor copies --------------------------------------------------------------------------------------------

DEVICE void prefetch_map(const TensorMap *map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(reinterpret_cast<u64>(map)) : "memory");
}

// One box of a (batch, head, row, column) tensor; out of bounds reads as zeros, and all of the box's bytes are counted.
DEVICE void copy_in(u32 to, const TensorMap *map, u32 barrier, int column, int row, int head, int batch) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
               "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(to),
               "l"(reinterpret_cast<u64>(map)), "r"(barrier), "r"(column), "r"(row), "r"(head), "r"(batch)
               : "memory");
}

// Bytes that lie one after the other; both ends at multiples of 16.
template <u32 Bytes> DEVICE void copy_in_row(u32 to, const float *from, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "n"(Bytes), "r"(barrier)
               : "memory");
}

// The other way; what lies out of bounds is not written.
DEVICE void copy_out(const TensorMap *map, u32 from, int column, int row, int head, int batch) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(
                   reinterpret_cast<u64>(map)),
               "r"(from), "r"(column), "r"(row), "r"(head), "r"(batch)
               : "memory");
}

DEVICE void copies_out_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Until what this thread's copies read in shared memory may be overwritten.
DEVICE void copies_out_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

// Starts adding floats that lie one after the other in shared memory to those in global memory, each in one go; both ends at
// multiples of 16 bytes. It commits and is waited for as a copy out.
template <u32 Bytes> DEVICE void add_out(float *to, u32 from) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to), "r"(from),
               "n"(Bytes)
               : "memory");
}

// Orders this thread's ordinary writes to shared memory before what the copy engine and the tensor cores read there.
DEVICE void fence_to_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- registers -----------------------------------------------------------------------------------------------------

template <int Registers> DEVICE void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
}

template <int Registers> DEVICE void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
}

// What lane 0 has, where it runs without its warp. By a shuffle, so that the compiler puts what follows from the value
// into registers that the warp shares, and not into some of the few that this thread has.
DEVICE int alone(int value) { return __shfl_sync(1, value, 0); }

// The value that every lane of the warp has. By a shuffle, so that the compiler puts what follows from the value into
// registers that the warp shares.
DEVICE u32 same_in_warp(u32 value) { return __shfl_sync(0xFFFFFFFF, value, 0); }

// ---- single accesses -----------------------------------------------------------------------------------------------

// A number in shared memory.
DEVICE int load_word(u32 address) {
  int word;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
  return word;
}

DEVICE void store_word(u32 address, int word) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(word) : "memory");
}

// Eight-by-eight matrices of 16-bit elements from a warp's fragments; lane i gives the address of row i % 8 of
// matrix i / 8.
DEVICE void store_matrices(u32 address, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b), "r"(c),
               "r"(d)
               : "memory");
}

// The other way.
DEVICE void load_matrices(u32 address, u32 &a, u32 &b, u32 &c, u32 &d) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a), "=r"(b), "=r"(c), "=r"(d)
               : "r"(address)
               : "memory");
}

// Four floats to 16 aligned bytes of shared memory.
DEVICE void store_four(u32 address, float a, float b, float c, float d) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}

#endif // EMULATED

// ---- layouts in shared memory --------------------------------------------------------------------------------------

// A tile of 16-bit elements is panels of up to 64 columns; a panel's rows are `bytes` long (128, 64 or 32) and lie one
// after the other, their 16-byte pieces exchanged among eight rows as the copy engine does it.
template <int RowBytes> struct Swizzle {
  static_assert(RowBytes == 128 || RowBytes == 64 || RowBytes == 32, "a swizzle is of 128, 64 or 32 bytes");
  // Bits 62 and 63 of a descriptor.
  static constexpr u64 mode = RowBytes == 128 ? 1 : RowBytes == 64 ? 2 : 3;
  // Between one group of eight rows and the next.
  static constexpr u32 group_bytes = 8 * RowBytes;

  // Where the byte at `offset` of a panel without exchange lies; panels start at multiples of 1024 bytes.
  DEVICE static u32 place(u32 offset) { return offset ^ ((offset >> 3) & (RowBytes - 16)); }
};

// A distance in shared memory in units of 16 bytes, in which descriptors count.
DEVICE constexpr u32 units(u32 bytes) { return bytes / 16; }

// The descriptor of a matrix operand at 16 * `address_units`: `leading` bytes to the next panel (of operands whose rows are
// the summed dimension), `stride` bytes to the next group of eight rows. It is a sum, so that the operands of a product
// differ by constants, and each descriptor takes one addition.
template <int RowBytes> DEVICE u64 descriptor(u32 address_units, u32 leading) {
  constexpr u64 stride = Swizzle<RowBytes>::group_bytes;
  constexpr u64 high = Swizzle<RowBytes>::mode << 62 | stride / 16 << 32;
  return high | (address_units + (units(leading) << 16));
}
