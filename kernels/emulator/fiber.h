// A fiber: its own stack, and where it stands on it. On x86-64 a change of fibers is some twenty instructions; elsewhere
// it is the C library's, which asks the system to exchange signal masks, a hundred times as long.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#if defined(__x86_64__)

// System V ABI: a called function keeps rbx, rbp and r12 to r15, and the stack pointer that it is called with is 8 more
// than a multiple of 16.
asm(R"(
.pushsection .text
.local emulator_switch
emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.popsection
)");
// Leaves the running fiber, whose stack pointer goes to `from`, for the one whose stack pointer is `to`.
extern "C" void emulator_switch(void **from, void *to) __asm__("emulator_switch");

namespace emulator {

struct Fiber {
  void *at = nullptr;
  std::unique_ptr<char[]> stack;

  // The next change to it begins `body`, which must not return.
  void start(void (*body)(), std::size_t bytes) {
    if (!stack) stack.reset(new char[bytes]);
    const std::uintptr_t end = (reinterpret_cast<std::uintptr_t>(stack.get()) + bytes) / 16 * 16;
    void **top = reinterpret_cast<void **>(end) - 8;
    for (int i = 0; i < 8; ++i) top[i] = nullptr;
    top[6] = reinterpret_cast<void *>(body);
    at = top;
  }

  static void change(Fiber &from, Fiber &to) { emulator_switch(&from.at, to.at); }
};

} // namespace emulator

#else

#include <ucontext.h>

namespace emulator {

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;

  void start(void (*body)(), std::size_t bytes) {
    if (!stack) stack.reset(new char[bytes]);
    getcontext(&context);
    context.uc_stack.ss_sp = stack.get();
    context.uc_stack.ss_size = bytes;
    context.uc_link = nullptr;
    makecontext(&context, body, 0);
  }

  static void change(Fiber &from, Fiber &to) { swapcontext(&from.context, &to.context); }
};

} // namespace emulator

#endif
