// The instructions of lib/cluster.cuh on the processor, for clusters of one block: blocks run one after the other.
#pragma once

#include "emulator/wgmma.h"

#define CLUSTERS_OF(blocks)

DEVICE u32 rank_in_cluster() { return 0; }
DEVICE void cluster_sync() { __syncthreads(); }

DEVICE void barrier_arrive_at(u32 barrier, u32 rank) {
  if (rank != 0) emulator::fail("an arrival at block %u: clusters of several blocks are not emulated", rank);
  barrier_arrive(barrier);
}

DEVICE void copy_in_to_all(u32 to, const TensorMap *map, u32 barrier, int column, int row, int head, u32 blocks) {
  if (blocks != 1) emulator::fail("a copy to blocks %#x: clusters of several blocks are not emulated", blocks);
  copy_in(to, map, barrier, column, row, head, 0);
}
