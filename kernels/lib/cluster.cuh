// Clusters of blocks whose multiprocessors reach each other's shared memory: copies into several blocks, arrivals at another
// block's barriers. Source: PTX ISA 9.0, barrier.cluster, mapa, and multicast of cp.async.bulk.tensor.
#pragma once

#include "lib/wgmma.cuh"

#ifdef EMULATED
#include "emulator/cluster.h"
#else
// On a kernel: its grid is of clusters of `blocks` blocks along x.
#define CLUSTERS_OF(blocks) __cluster_dims__(blocks, 1, 1)

DEVICE u32 rank_in_cluster() {
  u32 rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// All threads of the cluster's blocks wait for one another.
DEVICE void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// One arrival at the barrier that lies at the same place in block `rank`. Without `release.cluster`, which makes the thread wait
// until all of its writes to memory are seen: what it tells is that it has read, not written.
DEVICE void barrier_arrive_at(u32 barrier, u32 rank) {
  asm volatile("{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
               "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}\n" ::"r"(barrier),
               "r"(rank)
               : "memory");
}

// As copy_in, to the same place of every block whose bit is set in `blocks`; each block's own barrier counts its bytes.
DEVICE void copy_in_to_all(u32 to, const TensorMap *map, u32 barrier, int column, int row, int head, u32 blocks) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
               "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(to),
               "l"(reinterpret_cast<u64>(map)), "r"(barrier), "r"(column), "r"(row), "r"(head), "r"(0),
               "h"(static_cast<unsigned short>(blocks))
               : "memory");
}

#define SUMS_96                                                                                                        \
  SUMS_64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, " \
          "%85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define SUMS_100 SUMS_96 ", %96, %97, %98, %99"
#define BIND_96(i) BIND_64(i), BIND_32(i + 64)
#define BIND_100(i) BIND_96(i), "+f"(sums[i + 96]), "+f"(sums[i + 97]), "+f"(sums[i + 98]), "+f"(sums[i + 99])
DEFINE_WGMMA(192, SUMS_96, BIND_96, "%96", "%97", "%98", "%99", "%100", "%101", "%102")
DEFINE_WGMMA(200, SUMS_100, BIND_100, "%100", "%101", "%102", "%103", "%104", "%105", "%106")
#endif // EMULATED
