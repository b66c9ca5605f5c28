// Hopper's matrix instruction for a warpgroup: (64, n) += (64, 16) (16, n), 16-bit operands, float32 sums.
//
// The sums: warp w of the group has rows 16w to 16w + 15; its lane l has of each eight columns j, in four registers
// 4j .. 4j + 3, row l / 4 at columns 8j + 2 (l % 4) and the next, then row l / 4 + 8 at the same two. Left operands in
// registers have the layout of mma.m16n8k16, so that the sums of 16 columns, packed in pairs, are one.
//
// An operand in shared memory is "along" (transposed = 0) where its rows run along the summed dimension, "across"
// (transposed = 1) where the summed dimension counts its rows.
//
// The operands' type is that of element.cuh. Source: PTX ISA 9.0, wgmma.
#pragma once

#include "lib/element.cuh"

#ifdef EMULATED
#include "emulator/wgmma.h"
#else
DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Until at most so many of the committed groups are under way.
template <int Left> DEVICE void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Left) : "memory"); }

// Keeps the compiler from moving what it does with these registers across this point.
template <int N> DEVICE void hold(float (&values)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(values[i])::"memory");
}

template <int N> DEVICE void hold(u32 (&values)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+r"(values[i])::"memory");
}

#define SUMS_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define SUMS_16 SUMS_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define SUMS_24 SUMS_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define SUMS_32                                                                                                        \
  SUMS_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define SUMS_40 SUMS_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define SUMS_48 SUMS_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define SUMS_64                                                                                                        \
  SUMS_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, "    \
          "%52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

#define BIND_8(i)                                                                                                      \
  "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3]), "+f"(sums[i + 4]), "+f"(sums[i + 5]),        \
      "+f"(sums[i + 6]), "+f"(sums[i + 7])
#define BIND_16(i) BIND_8(i), BIND_8(i + 8)
#define BIND_24(i) BIND_16(i), BIND_8(i + 16)
#define BIND_32(i) BIND_16(i), BIND_16(i + 16)
#define BIND_40(i) BIND_32(i), BIND_8(i + 32)
#define BIND_48(i) BIND_32(i), BIND_16(i + 32)
#define BIND_64(i) BIND_32(i), BIND_32(i + 32)

template <int N> struct Wgmma;

// For n columns, n / 2 sums a thread; P0 to P6 are the operands that follow the sums.
#define DEFINE_WGMMA(N, SUMS, BIND, P0, P1, P2, P3, P4, P5, P6)                                                        \
  template <> struct Wgmma<N> {                                                                                        \
    /* Both operands in shared memory; what was summed before counts if `add` is not 0. */                             \
    template <int TransposedA, int TransposedB>                                                                        \
    DEVICE static void shared(float (&sums)[N / 2], u64 a, u64 b, int add) {                                           \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " P2 ", 0;\n"                                                     \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." WGMMA_TYPE "." WGMMA_TYPE " {" SUMS "}, " P0      \
                   ", " P1 ", p, 1, 1, " P3 ", " P4 ";\n}\n"                                                           \
                   : BIND(0)                                                                                           \
                   : "l"(a), "l"(b), "r"(add), "n"(TransposedA), "n"(TransposedB));                                    \
    }                                                                                                                  \
                                                                                                                       \
    /* The left operand in registers. */                                                                               \
    template <int TransposedB>                                                                                         \
    DEVICE static void registers(float (&sums)[N / 2], u32 a0, u32 a1, u32 a2, u32 a3, u64 b, int add) {               \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " P5 ", 0;\n"                                                     \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." WGMMA_TYPE "." WGMMA_TYPE " {" SUMS "}, {" P0     \
                   ", " P1 ", " P2 ", " P3 "}, " P4 ", p, 1, 1, " P6 ";\n}\n"                                          \
                   : BIND(0)                                                                                           \
                   : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(add), "n"(TransposedB));                          \
    }                                                                                                                  \
  };

DEFINE_WGMMA(16, SUMS_8, BIND_8, "%8", "%9", "%10", "%11", "%12", "%13", "%14")
DEFINE_WGMMA(32, SUMS_16, BIND_16, "%16", "%17", "%18", "%19", "%20", "%21", "%22")
DEFINE_WGMMA(48, SUMS_24, BIND_24, "%24", "%25", "%26", "%27", "%28", "%29", "%30")
DEFINE_WGMMA(64, SUMS_32, BIND_32, "%32", "%33", "%34", "%35", "%36", "%37", "%38")
DEFINE_WGMMA(80, SUMS_40, BIND_40, "%40", "%41", "%42", "%43", "%44", "%45", "%46")
DEFINE_WGMMA(96, SUMS_48, BIND_48, "%48", "%49", "%50", "%51", "%52", "%53", "%54")
DEFINE_WGMMA(128, SUMS_64, BIND_64, "%64", "%65", "%66", "%67", "%68", "%69", "%70")
#endif // EMULATED
