// The order in which thread blocks, by number, take the tiles of all heads.
#pragma once

#include "lib/base.cuh"

// Heads come in sections of `heads_at_a_time`; in a section all heads' tiles of one rank come before any of the next,
// and a tile's splits one after the other.
struct Order {
  int rank;
  int head;
  int batch;
  int split;

  DEVICE Order(int index, int tiles, int heads, int batches, int heads_at_a_time, int splits) {
    const int section_items = tiles * heads_at_a_time * splits;
    const int section = index / section_items, within = index - section * section_items;
    const int first = section * heads_at_a_time, here = min(heads_at_a_time, heads * batches - first);
    const int tile = within / splits;
    split = within - tile * splits;
    rank = tile / here;
    const int at = first + tile - rank * here;
    batch = at / heads;
    head = at - batch * heads;
  }
};
