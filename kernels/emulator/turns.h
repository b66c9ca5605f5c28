// The instructions of lib/turns.cuh, on the processor. Blocks run one after the other, in the order of their turns.
#pragma once

#include "emulator/base.h"

DEVICE void await_turn(const int *counter, int turn) {
  emulator::wait("its block's turn", [counter, turn] { return *counter == turn; });
}

DEVICE void pass_turn(int *counter, int next) { *counter = next; }

DEVICE void add_four(float *to, u32 step, const float (&own)[4]) {
  for (u32 i = 0; i < 4; ++i) to[i * step] += own[i];
}
