// What compute capability 8.0 adds to CUDA C++, one PTX instruction a function: a warp's matrix instructions, their
// loads from shared memory, and asynchronous copies into it.
//
// The matrix instruction D (16, 8) += A (16, k) B (k, 8). Lane l of the warp, with g = l / 4 and t = l % 4, has
//   of D  (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1);
//   of A  words of four bytes: row g word t, row g + 8 word t, row g word t + 4, row g + 8 word t + 4;
//   of B  column g: word t and word t + 4 of the summed dimension.
// A word is two elements of 16 bits (k = 16) or one of tf32 (k = 8).
// Source: PTX ISA 9.0, sections on mma.sync, ldmatrix and cp.async.
#pragma once

#include "lib/base.cuh"

#ifdef EMULATED
#include "emulator/mma.h"
#else

// ---- matrix instructions -------------------------------------------------------------------------------------------

#define DEFINE_MMA(NAME, SHAPE, TYPE)                                                                                  \
  DEVICE void NAME(float (&sums)[4], const u32 (&a)[4], const u32 (&b)[2]) {                                           \
    asm("mma.sync.aligned." SHAPE ".row.col.f32." TYPE "." TYPE ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "  \
        "{%0, %1, %2, %3};"                                                                                            \
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])                                                   \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));                                           \
  }

DEFINE_MMA(mma_bf16, "m16n8k16", "bf16")
DEFINE_MMA(mma_f16, "m16n8k16", "f16")
// Reads the upper 19 bits of a word.
DEFINE_MMA(mma_tf32, "m16n8k8", "tf32")

// ---- loads from shared memory --------------------------------------------------------------------------------------

// Four matrices of eight rows of 16 bytes; lane i gives the address of row i % 8 of matrix i / 8, and gets of each
// matrix word i % 4 of row i / 4.
DEVICE void load_matrices(u32 (&words)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(address));
}

// Four matrices of eight by eight elements of 16 bits, each transposed.
DEVICE void load_matrices_transposed(u32 (&words)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(address));
}

DEVICE float load_float(u32 address) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address));
  return value;
}

// ---- asynchronous copies -------------------------------------------------------------------------------------------

// 16 bytes, past L1; zeros where nothing is `there`, and then `from` is not read.
DEVICE void copy_async(u32 to, const void *from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}

DEVICE void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until at most so many of the groups that this thread committed are under way.
template <int Left> DEVICE void copies_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(Left) : "memory"); }
#endif // EMULATED
