// FlashAttention-2's forward pass (handout, Algorithm 1) with Hopper's tensor memory accelerator (TMA) and wgmma. Inputs are
// 16-bit, sums float32. o has the inputs' type; lse is float32, a natural logarithm.
//
// A block has FLASH_GROUPS consumer warpgroups of 64 queries each (one if there are few scores) and one producer
// warpgroup, which only copies. The block takes one tile of queries after another, the longest first. It keeps the tile's
// Q and streams K and V in blocks of FLASH_KEYS rows through FLASH_STAGES buffers, from the diagonal (or the last key) down
// to the first key. A warpgroup keeps its 64 rows of S, P and O in registers. It multiplies the next S while it computes the
// softmax of the S before.
//
// Whole tiles can leave multiprocessors idle. FLASH_SPLIT then splits a tile's keys into parts of several blocks. Each part
// is a tile of its own; the host lists the parts, the longest first. A part's o and lse go to memory in float32, and
// `flash_forward_combine` adds the parts of a row in their order.
//
// Heads of q may be in groups that share a head of k and v (FLASH_GROUPED).
//
// Rows may have fewer than FLASH_D elements, in multiples of 8. The tensor maps describe the rows as they are: TMA fills the
// missing elements with zeros when it reads and skips them when it writes. Parts keep FLASH_D columns until they are added.
//
// Notebook. Times are medians on an H200, inputs bfloat16 and causal, unless stated. "16 x 16384" is 16 heads of 16384 queries.
//   1. First version. The emulator found it right for every d, type and mask.
//      Measured, 16 x 16384: d 64 1.10 ms (cuDNN 1.23, FlashAttention-3 1.07); d 128 2.13 ms (1.75, 1.70).
//      Measured, one head of 65536, which has as many operations: 1.13 ms and 1.64 ms.
//   2. Split the keys of a tile. One head of 8192, d 64, has 43 tiles, the longest of 64 steps.
//      Predicted: parts of 11 steps take 11 steps and the addition, not 64. Measured: 32.1 us.
//      Measured, cold, one head, d 64, us: 128 9.3, 256 11.3, 512 14.1 (whole tiles); 1024 13.8, 2048 16.4, 4096 19.3 (parts).
//   3. Take the next tile from a counter. Cause of 2.13 ms at d 128 with 16 heads against 1.64 ms with one: each block's tiles
//      were fixed at the start, dealt in turns from alternating ends. That balances one sorted list, not four sections of
//      four heads. Computed, with one step more a tile: the last block ends at 1.297 times the average, at d 64 at 1.05.
//      With 1.62 us a step of one head, 1.297 gives 2.13 ms. With a counter: 1.002 and 1.006.
//      Predicted: d 128 1.65 ms, d 64 1.05 ms, and 2 us to clear the counter.
//      Measured: d 128 1.69 ms (cuDNN in the same run 1.77), d 64 0.99 ms (1.23).
//      But one head of 32768 at d 128, two tiles a block, rose from 0.41 to 0.59 ms: a block took its next tile when it
//      began one, so all second tiles were taken before any block was done. Now it takes the next tile when it starts
//      the last copy of the present one. Predicted: 0.42 ms. Measured: 0.41 ms; 16 heads 1.64 ms (1.73).
//      The tile's number travels with Q under Q's barriers and needs no barrier of its own. The compiler treats the
//      counter's value as different in each thread: at d 128 the producer thread, which has 24 registers, spilled 100 bytes
//      until the value went through a shuffle (`alone`).
//   4. Choose the parts so that the last block and the addition end earliest; before, each multiprocessor got an equal share.
//      The times of entry 2 fit 6 us, plus 1.6 us a step, plus one step a tile, two steps for the launch that adds, and one
//      step for each 48 parts. Predicted: 512 in parts of one step 13 us; 2048 in parts of two steps 16 us with half the sums
//      in memory; one head of 65536, d 64, 342 tiles on 132 blocks in parts of 171 steps, 1.05 ms.
//      Measured: 13.3 us, 16.9 us, 0.98 ms. The backward pass uses the same rule with longer steps and twice the sums.
//   5. Begin the launch that adds parts while the first launch ends (programmatic dependent launch), and read four parts at
//      a time. Predicted: 512, 1024 and 2048 get 2 us shorter. Measured, us: before 12.2, 13.0, 15.1; with the dependent
//      launch alone 11.5, 12.0, 14.3; with both, on another machine, 12.4, 12.8, 15.1. Reading four parts has no visible gain.
//   6. racecheck reported a race on the number of the next tile, for blocks that compute several tiles: every lane read it,
//      but only lane 0 arrived at the barrier that frees Q. The other lanes did not use the value. Now only lane 0 reads it.
//   7. Small tiles. A step with three warpgroups takes 1.5 us, so one head of 256, d 64, took 9.6 us (PyTorch's best back
//      end 8.9), and 16 heads of 1024 (96 tiles of up to eight steps) 20.5 us (17.7). Now one warpgroup computes a tile with
//      few scores, and two blocks share a multiprocessor. Predicted: 7.8 and 15 us.
//      Measured as CUDA graphs, cold, us, before and after: one head of 128 7.7 and 6.5, 256 9.6 and 7.4, 512 11.3 and 9.4,
//      1024 11.7 and 10.9, 2048 14.4 and 12.0, 4096 19.0 and 17.5, 8192 30.8 and 29.2, 16384 77.0 and 78.0; 16 heads of 1024
//      20.5 and 16.2, of 4096 85.9 and 86.0, of 8192 270 and 289. d 16 and 32 gain as much, and one head of 16384 loses
//      10 percent there. d 128, with blocks of 64 keys, gains 7 to 14 percent up to 1024 and loses 3 to 15 beyond.
//      `TileSize::fastest` in src/attention/flash/hopper/tile_config.rs chooses.
//      Also tried: tiles of two warpgroups (between the two); 64 keys in four buffers (faster nowhere that matters); four
//      buffers at d 16 and 32, and parts chosen as if adding them took three or five steps (no difference).
//   8. Compute part of 2^x by polynomial. The hardware computes 2^x for 16 elements a clock: a block of 128 keys and 64 rows
//      takes 512 clocks, as many as its products at d 64. Tried: a polynomial of degree 4 for one, three or four of eight
//      elements. Predicted, with two: 0.93 ms for 16 x 16384, d 64. Measured, least, ms, with none, one, three and four:
//      0.976, 1.029, 1.137, 1.236; d 128 with none, one and four: 1.610, 1.658, 1.861. Every added instruction costs time,
//      so 2^x is not what limits the warpgroups.
//   9. What limits the forward pass (2026-11-23, the L2 cache flushed and 0.5 ms of rest before each call, medians, ms,
//      16 x 16384, wrong results): d 64 1.00, without 2^x 0.80, without the largest score 0.95, without rescaling 0.97;
//      d 128 1.66, 1.46, 1.57, 1.62, and 1.62 without the turns that the warpgroups took at the tensor cores. ncu, d 128: the
//      tensor cores are busy for 76 percent of the time, at 1.68 GHz, since the power limit lowers the clock. Of 612
//      instructions of a step, 190 computed descriptors.
//  10. Now a descriptor is one addition; the score that is subtracted from a row changes only when another exceeds it by more than
//      a factor of 256, so that most steps neither exchange the largest score nor rescale the outputs; and the turns are gone.
//      Predicted: 5 percent less at d 64, 8 at d 128. Measured side by side, before and after: d 64 0.996 and 0.952, d 128 1.656
//      and 1.539; one head of 65536 1.105 and 1.005, 1.658 and 1.501; without rest d 64 1.065 and 1.039, d 128 1.977 and 1.825;
//      d 32 0.927 and 0.897, d 16 0.765 and 0.780. ncu, d 128: the tensor cores are busy for 84 percent of the time, at 1.67 GHz.
//      Also tried: Q's fragments in registers, d 128 1.52 against 1.51; two warpgroups at d 64 1.11 against 0.96; turns passed
//      on earlier within a step: no difference.
//  11. Groups of query heads that share a head of K and V. Only the copying thread knows of them: one division a tile. All other
//      programs have the same instructions as before. A section of heads holds more query heads, since they share K and V.
//      Predicted: the time of as many heads of their own, less where K and V leave the L2 cache. Measured (2026-11-26, one
//      machine, with rest, 16 x 16384) with 16, 4 and 1 heads of K and V: d 64 1.107, 1.125 and 1.159 ms (cuDNN 1.417, 1.447,
//      1.488); d 128 1.743, 1.692 and 1.685 (2.048, 2.001, 2.021).
//  12. Tiles of 80 and 96 columns; before, these rows took the tiles of 128. Panels are of 16 and 32 columns (swizzles of 32 and
//      64 bytes), so that whole panels fill a row and one instruction multiplies all of V's columns. At d 80 three warpgroups
//      with 128 keys spill 80 bytes and serialise wgmma (C7512); so both d have two warpgroups. Three warpgroups with 96 keys
//      compile without a spill at both. Predicted, 16 x 16384, from 1.54 ms at d 128: 1.20 ms at d 80, 1.28 at d 96. A
//      risk is the copy engine, which reads rows of 32 bytes at d 80. Measured as in entry 11, where d 128 took 1.743 ms:
//      d 80 1.479 (cuDNN 1.979), d 96 1.495 (2.034). So they take 0.85 and 0.86 of d 128, not 0.78 and 0.83.
//  13. Pairs of multiprocessors that share K and V (clusters, multicast), d 128. Two tiles of 128 queries stream the same
//      blocks of 64 KiB, and 132 multiprocessors read 5.9 TB/s from the L2 cache (computed). Probe with wrong results, every
//      second block not copied, medians of three turns (2026-11-26): with rest 1.567 and 1.513 ms, without 1.735 and 1.653;
//      d 64 0.987 and 0.986, 1.037 and 1.015. So sharing could save 3 to 5 percent at d 128. Predicted: 2 to 4.
//      Tried: each multiprocessor copies one panel of K and V into both, a buffer is free when the warps of both have read it,
//      and the first sends the number of the next pair to the second (st.async). Right, and bitwise the same in each run.
//      Measured as the probe: with rest 1.545 and 1.974 ms, without 1.725 and 2.023; 32 x 4096 without rest 0.246 and 0.289; a
//      call takes 1.15 and 1.38 J. With two buffers each step waits twice for the slower of two multiprocessors, which costs
//      more than the copies that are saved, and there is no room for a third buffer. In a cluster's second block addresses in
//      shared memory exceed the 18 bits of a descriptor.
//
// Set by src/attention/flash/hopper: FLASH_D (16, 32, 64, 80, 96, 128), FLASH_HALF (1: float16, 0: bfloat16), FLASH_CAUSAL,
// FLASH_GROUPS, FLASH_KEYS, FLASH_STAGES, FLASH_SPLIT, FLASH_GROUPED (whether heads of q share one of k and v).
#if !defined(FLASH_D) || !defined(FLASH_HALF) || !defined(FLASH_CAUSAL) || !defined(FLASH_GROUPS) ||                   \
    !defined(FLASH_KEYS) || !defined(FLASH_STAGES) || !defined(FLASH_SPLIT) || !defined(FLASH_GROUPED)
#error "flash_forward.cu takes its shape from src/attention/hopper"
#endif

#include "lib/element.cuh"
#include "lib/wgmma.cuh"

namespace {

constexpr int d = FLASH_D;
constexpr int groups = FLASH_GROUPS;
constexpr int rows = 64 * groups;
constexpr int keys = FLASH_KEYS;
constexpr int stages = FLASH_STAGES;
constexpr int threads = 128 * (groups + 1);

// Panels of 64, 32 or 16 columns, 128, 64 or 32 bytes a row, that fill d.
constexpr int columns = d % 64 == 0 ? 64 : d % 32 == 0 ? 32 : 16;
constexpr int panels = d / columns;
constexpr int row_bytes = 2 * columns;
using Layout = Swizzle<row_bytes>;

constexpr u32 q_panel = rows * row_bytes;
constexpr u32 kv_panel = keys * row_bytes;
constexpr u32 o_panel = 64 * row_bytes;
constexpr u32 kv_bytes = panels * kv_panel;

// Offsets in shared memory, which starts at a multiple of 1024: Q, O, K and V of each stage, barriers, the tile's number.
constexpr u32 o_at = panels * q_panel;
constexpr u32 k_at = o_at + groups * panels * o_panel;
constexpr u32 v_at = k_at + stages * kv_bytes;
constexpr u32 barriers_at = v_at + stages * kv_bytes;
constexpr u32 number_at = barriers_at + 8 * (2 + 4 * stages);

// Registers of a thread; a block has 65,536 in all.
constexpr int copier_registers = groups == 3 ? 32 : 24;
constexpr int worker_registers = groups == 3 ? 160 : groups == 2 ? 240 : 224;
// With one consumer warpgroup, two blocks share a multiprocessor.
constexpr int resident = groups == 1 ? 2 : 1;
static_assert(128 * (copier_registers + groups * worker_registers) <= 65536 / resident, "they have 65,536 in all");

static_assert(d % 16 == 0 && d <= 128, "tiles have rows of 16, 32, 64, 80, 96 or 128 elements");
static_assert(stages == 2 || stages == 4, "divisions by the number of buffers must be cheap");
static_assert(keys == 64 || keys == 96 || keys == 128, "one instruction makes the scores of 64, 96 or 128 keys");

constexpr float infinity = __builtin_bit_cast(float, 0x7F800000);

// A named barrier for the threads of each warpgroup.
[[maybe_unused]] constexpr u32 group_barrier = 1;
// So many powers of two may a score exceed the one that is subtracted from its row.
constexpr float most_excess = 8.0f;

} // namespace

struct Problem {
  int n_queries;
  int n_keys;
  int heads;
  int batch;
  // Elements of a row: a multiple of 8, at most FLASH_D.
  int d;
  // The factor of a score, to base 2: log2(e) / sqrt(d).
  float scale_log2;
  // Heads that are computed at the same time, few enough that their K and V stay in the L2 cache.
  int heads_at_a_time;
  // Heads of q that share a head of k and v: 1 without FLASH_GROUPED.
  int group_size;
  // (batch, heads, n_queries)
  float *lse;
  // The tile counter: tiles taken after each block's first, 0 at the start; null if there are none.
  u32 *taken;
};

#if FLASH_SPLIT
constexpr int most_items = 1020;

// The parts of every head's tiles.
struct Parts {
  // The number of `items`, and the blocks of keys in a part.
  int count;
  int blocks;
  // (parts, batch, heads, n_queries, FLASH_D) and (parts, batch, heads, n_queries)
  float *o;
  float *lse;
  // The tile's index times 65,536, plus the part's index.
  u32 items[most_items];
};

// Where o is written: (batch, heads, n_queries, d), with its strides in elements.
struct Output {
  element *base;
  long long strides[3];
};
#else
struct Parts {};
#endif

namespace {

// The number of blocks of keys that some query of the tile attends to; `row` is the tile's first query.
DEVICE int blocks_seen(const Problem &problem, int row) {
  const int seen = FLASH_CAUSAL ? min(problem.n_keys, row + rows) : problem.n_keys;
  return (seen + keys - 1) / keys;
}

// One tile of queries, or a part of it.
struct Tile {
  int row;
  int head;
  int batch;
  // The first block of keys, and the one after the last.
  int first;
  int blocks;
  int part;
};

// The order of the tiles: heads in sections, within a section the longest tiles first. A block's first tile has the block's
// index. When the block has copied a tile, it takes the next one from the counter.
//
// Parts are ordered over all heads, the longest first. They are dealt to the blocks in turns, every second turn from the
// other end. That balances them as well as a counter does.
struct Schedule {
  const Problem &problem;
  const Parts &parts;
  int tiles;
  // The number of tiles or parts. An index from here on means that none is left.
  int all;

  DEVICE Schedule(const Problem &problem, const Parts &parts)
      : problem(problem), parts(parts), tiles((problem.n_queries + rows - 1) / rows) {
#if FLASH_SPLIT
    all = parts.count * problem.heads * problem.batch;
#else
    all = tiles * problem.heads * problem.batch;
#endif
  }

  // The tile's index for the block's turn `turn` (from 1). One thread calls it once a turn.
  DEVICE int take(u32 turn) const {
    const int width = static_cast<int>(gridDim.x);
#if FLASH_SPLIT
    const int block = static_cast<int>(blockIdx.x);
    return static_cast<int>(turn) * width + (turn % 2 == 0 ? block : width - 1 - block);
#else
    return problem.taken ? width + static_cast<int>(atomicAdd(problem.taken, 1u)) : all;
#endif
  }

  DEVICE Tile tile(int index) const {
    Tile tile;
#if FLASH_SPLIT
    const int heads = problem.heads * problem.batch, item = index / heads, head = index - item * heads;
    const u32 packed = parts.items[item];
    tile.row = static_cast<int>(packed >> 16) * rows;
    tile.part = static_cast<int>(packed & 0xFFFF);
    tile.first = tile.part * parts.blocks;
    tile.blocks = min(blocks_seen(problem, tile.row), tile.first + parts.blocks);
#else
    const int section_tiles = tiles * problem.heads_at_a_time;
    const int section = index / section_tiles, within = index - section * section_tiles;
    const int first = section * problem.heads_at_a_time;
    const int here = min(problem.heads_at_a_time, problem.heads * problem.batch - first);
    const int rank = within / here;
    const int head = first + within - rank * here;
    tile.row = (FLASH_CAUSAL ? tiles - 1 - rank : rank) * rows;
    tile.first = tile.part = 0;
    tile.blocks = blocks_seen(problem, tile.row);
#endif
    tile.batch = head / problem.heads;
    tile.head = head - tile.batch * problem.heads;
    return tile;
  }
};

// The buffers are used in turns. `count` numbers all blocks of keys that this thread block computes: the buffer of one, and the
// parity of its barriers' phase.
DEVICE int stage_of(u32 count) { return count % stages; }
DEVICE u32 parity_of(u32 count) { return count / stages % 2; }

struct Barriers {
  u32 base;

  DEVICE u32 q_full() const { return base; }
  DEVICE u32 q_free() const { return base + 8; }
  DEVICE u32 k_full(int stage) const { return base + 16 + 8 * stage; }
  DEVICE u32 k_free(int stage) const { return base + 16 + 8 * (stages + stage); }
  DEVICE u32 v_full(int stage) const { return base + 16 + 8 * (2 * stages + stage); }
  DEVICE u32 v_free(int stage) const { return base + 16 + 8 * (3 * stages + stage); }
};

// One thread takes the tiles and copies: Q once a tile, K and V once a block of keys.
//
// A tile's index is stored with its Q, and the same two barriers guard both. The index after the last tile comes without Q.
DEVICE void copy(u32 base, const Barriers &bar, const Schedule &schedule, const TensorMap &q, const TensorMap &k,
                 const TensorMap &v) {
  u32 count = 0;
  int index = static_cast<int>(blockIdx.x);
  for (u32 turn = 0;; ++turn) {
    barrier_wait(bar.q_free(), turn % 2 ^ 1);
    index = alone(index);
    store_word(base + number_at, index);
    if (index >= schedule.all) break;
    barrier_expect(bar.q_full(), panels * q_panel);
    const Tile tile = schedule.tile(index);
    const int kv_head = FLASH_GROUPED ? tile.head / schedule.problem.group_size : tile.head;
#pragma unroll
    for (int panel = 0; panel < panels; ++panel) {
      copy_in(base + panel * q_panel, &q, bar.q_full(), panel * columns, tile.row, tile.head, tile.batch);
    }
    for (int block = tile.blocks - 1; block >= tile.first; --block, ++count) {
      const int stage = stage_of(count);
      const u32 free = parity_of(count) ^ 1;
      barrier_wait(bar.k_free(stage), free);
      barrier_expect(bar.k_full(stage), kv_bytes);
#pragma unroll
      for (int panel = 0; panel < panels; ++panel) {
        copy_in(base + k_at + stage * kv_bytes + panel * kv_panel, &k, bar.k_full(stage), panel * columns, block * keys,
                kv_head, tile.batch);
      }
      barrier_wait(bar.v_free(stage), free);
      barrier_expect(bar.v_full(stage), kv_bytes);
#pragma unroll
      for (int panel = 0; panel < panels; ++panel) {
        copy_in(base + v_at + stage * kv_bytes + panel * kv_panel, &v, bar.v_full(stage), panel * columns, block * keys,
                kv_head, tile.batch);
      }
    }
    // Not earlier: another block may be free for this tile sooner. The buffers are full now, so the counter's latency is
    // hidden.
    index = schedule.take(turn + 1);
  }
  barrier_arrive(bar.q_full());
}

// One warpgroup's 64 queries of one tile.
struct Worker {
  u32 base;
  const Barriers &bar;
  const Problem &problem;
  int group;
  int lane;
  int warp;

  float s[keys / 2];
  u32 p[keys / 4];
  float o[d / 2];
  // For each of the thread's two rows: the score that is subtracted, and this thread's share of the sum.
  float subtracted[2];
  float sum[2];

  // Starts S = Q K^T (Eq. 4, unscaled).
  DEVICE void start_scores(int stage) {
    const u32 q = same_in_warp(units(base) + units(64 * row_bytes) * group);
    const u32 k = same_in_warp(units(base + k_at) + stage * units(kv_bytes));
#pragma unroll
    for (int step = 0; step < d / 16; ++step) {
      const u32 panel = 16 * step / columns, within = 32 * step - panel * row_bytes;
      Wgmma<keys>::template shared<0, 0>(s, descriptor<row_bytes>(q + units(panel * q_panel + within), 16),
                                         descriptor<row_bytes>(k + units(panel * kv_panel + within), 16), step != 0);
    }
    wgmma_commit();
  }

  // Starts O += P V (Eq. 6).
  DEVICE void start_outputs(int stage) {
    const u32 v = same_in_warp(units(base + v_at) + stage * units(kv_bytes));
#pragma unroll
    for (int step = 0; step < keys / 16; ++step) {
      const u64 operand = descriptor<row_bytes>(v + units(2 * step * Layout::group_bytes), kv_panel);
      Wgmma<d>::template registers<1>(o, p[4 * step], p[4 * step + 1], p[4 * step + 2], p[4 * step + 3], operand, 1);
    }
    wgmma_commit();
  }

  DEVICE void release(u32 barrier) {
    if (lane == 0) barrier_arrive(barrier);
  }

  // Masks the keys after each query, and missing keys.
  DEVICE void mask(int row, int block) {
    const int first = block * keys + 2 * (lane % 4);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int last = FLASH_CAUSAL ? min(problem.n_keys - 1, row + 8 * r) : problem.n_keys - 1;
      // The column, counted from the first that this thread has.
      const int seen = last - first;
#pragma unroll
      for (int i = 0; i < keys / 2; i += 4) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if (2 * i + e > seen) s[i + 2 * r + e] = -infinity;
        }
      }
    }
  }

  // Replaces scores by P = exp(S - subtracted) and adds to `sum`. Returns whether `factor` rescales earlier results: the score
  // that is subtracted rises to the row's largest only when some row of the warp has one that exceeds it by more than
  // `most_excess`. Until then P is larger than 1, by less than its type and the sums can hold.
  DEVICE bool soften(float (&factor)[2]) {
    const float scale = problem.scale_log2;
    float top[2] = {-infinity, -infinity};
#pragma unroll
    for (int i = 0; i < keys / 2; i += 4) {
#pragma unroll
      for (int r = 0; r < 2; ++r) top[r] = fmaxf(top[r], fmaxf(s[i + 2 * r], s[i + 2 * r + 1]));
    }
    // Also if both are minus infinity, whose difference is not a number.
    const float most = most_excess / scale;
    const bool exceeds = !(top[0] - subtracted[0] <= most && top[1] - subtracted[1] <= most);
    const bool rescaled = __any_sync(0xFFFFFFFF, exceeds);
    if (rescaled) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float largest = fmaxf(top[r], subtracted[r]);
        largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFF, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFF, largest, 2));
        factor[r] = exp2_fast((subtracted[r] - finite(largest)) * scale);
        subtracted[r] = largest;
        sum[r] *= factor[r];
      }
    }
    float total[2][2] = {};
#pragma unroll
    for (int i = 0; i < keys / 2; i += 4) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float shift = finite(subtracted[r]) * scale;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float &score = s[i + 2 * r + e];
          score = exp2_fast(fmaf(score, scale, -shift));
          total[r][e] += score;
        }
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) sum[r] += total[r][0] + total[r][1];
    return rescaled;
  }

  // A row without a score so far has no score to subtract.
  DEVICE static float finite(float score) { return score == -infinity ? 0.0f : score; }

  DEVICE void pack_probabilities() {
#pragma unroll
    for (int i = 0; i < keys / 4; ++i) p[i] = pack(s[2 * i], s[2 * i + 1]);
  }

  // Scores and softmax of block `count` of keys, and the outputs of the block before.
  template <bool Masked> DEVICE void step(int row, int block, u32 count) {
    const int now = stage_of(count), before = stage_of(count - 1);
    barrier_wait(bar.k_full(now), parity_of(count));
    barrier_wait(bar.v_full(before), parity_of(count - 1));
    hold(s);
    hold(o);
    hold(p);
    wgmma_fence();
    start_scores(now);
    start_outputs(before);
    wgmma_wait<1>();
    hold(s);
    release(bar.k_free(now));
    if (Masked) mask(row, block);
    float factor[2];
    const bool rescaled = soften(factor);
    wgmma_wait<0>();
    hold(o);
    hold(p);
    release(bar.v_free(before));
    pack_probabilities();
    if (!rescaled) return;
#pragma unroll
    for (int i = 0; i < d / 2; ++i) o[i] *= factor[i / 2 % 2];
  }

  DEVICE void run(const Tile &tile, u32 q_parity, u32 &count) {
    // The first of the thread's two rows; the second is eight rows later.
    const int row = tile.row + 64 * group + 16 * warp + lane / 4;
    // From this block down, every query of the warpgroup attends to all keys of a block.
    const int whole = FLASH_CAUSAL ? min(problem.n_keys, tile.row + 64 * group + 1) / keys : problem.n_keys / keys;
    const int masked = FLASH_SPLIT ? max(whole, tile.first) : whole;
#pragma unroll
    for (int i = 0; i < d / 2; ++i) o[i] = 0.0f;
#pragma unroll
    for (int r = 0; r < 2; ++r) subtracted[r] = -infinity, sum[r] = 0.0f;

    int block = tile.blocks - 1;
    barrier_wait(bar.q_full(), q_parity);
    barrier_wait(bar.k_full(stage_of(count)), parity_of(count));
    hold(s);
    wgmma_fence();
    start_scores(stage_of(count));
    wgmma_wait<0>();
    hold(s);
    release(bar.k_free(stage_of(count)));
    if (block >= whole) mask(row, block);
    float factor[2];
    soften(factor);
    pack_probabilities();
    ++count;
    for (--block; block >= masked; --block, ++count) step<true>(row, block, count);
    for (; block >= tile.first; --block, ++count) step<false>(row, block, count);
    release(bar.q_free());
    const int last = stage_of(count - 1);
    barrier_wait(bar.v_full(last), parity_of(count - 1));
    hold(o);
    hold(p);
    wgmma_fence();
    start_outputs(last);
    wgmma_wait<0>();
    hold(o);
    release(bar.v_free(last));
  }

  // Writes O and lse of the tile. The previous tile's O has left shared memory before.
  DEVICE void finish(const Tile &tile, const Parts &parts, const TensorMap &map) {
    const int row = tile.row + 64 * group + 16 * warp + lane / 4;
    long long head = static_cast<long long>(tile.batch) * problem.heads + tile.head;
#if FLASH_SPLIT
    head += static_cast<long long>(tile.part) * problem.batch * problem.heads;
    float *lse = parts.lse + head * problem.n_queries;
#else
    float *lse = problem.lse + head * problem.n_queries;
#endif
    float inverse[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float total = sum[r];
      total += __shfl_xor_sync(0xFFFFFFFF, total, 1);
      total += __shfl_xor_sync(0xFFFFFFFF, total, 2);
      inverse[r] = total == 0.0f ? 0.0f : 1.0f / total;
      constexpr float ln2 = 0.69314718055994530942f;
      if (lane % 4 == 0 && row + 8 * r < problem.n_queries) {
        lse[row + 8 * r] = ln2 * (subtracted[r] * problem.scale_log2 + log2f(total));
      }
    }
#if FLASH_SPLIT
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (row + 8 * r >= problem.n_queries) continue;
      float *to = parts.o + (head * problem.n_queries + row + 8 * r) * d + 2 * (lane % 4);
#pragma unroll
      for (int i = 0; i < d / 2; i += 4) {
        *reinterpret_cast<float2 *>(to + 2 * i) = float2{o[i + 2 * r] * inverse[r], o[i + 2 * r + 1] * inverse[r]};
      }
    }
#else
    const u32 place = base + o_at + group * panels * o_panel;
    const bool first = warp == 0 && lane == 0;
    if (first) copies_out_wait_read();
    named_sync(group_barrier + group, 128);
    // stmatrix's 8 x 8 matrices within 16 columns: the lane's row, and whether it has the first eight columns.
    const u32 at_row = 16 * warp + lane % 8 + 8 * (lane / 8 % 2), half = lane / 16;
#pragma unroll
    for (int chunk = 0; chunk < d / 16; ++chunk) {
      const u32 panel = 16 * chunk / columns, within = 32 * chunk - panel * row_bytes + 16 * half;
      u32 pairs[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float scale = inverse[i % 2];
        pairs[i] = pack(o[8 * chunk + 2 * i] * scale, o[8 * chunk + 2 * i + 1] * scale);
      }
      store_matrices(place + panel * o_panel + Layout::place(at_row * row_bytes + within), pairs[0], pairs[1], pairs[2],
                     pairs[3]);
    }
    fence_to_async();
    named_sync(group_barrier + group, 128);
    if (first) {
#pragma unroll
      for (int panel = 0; panel < panels; ++panel) {
        copy_out(&map, place + panel * o_panel, panel * columns, tile.row + 64 * group, tile.head, tile.batch);
      }
      copies_out_commit();
    }
#endif
  }
};

} // namespace

#if FLASH_SPLIT
// Adds the parts of each row of o (batch, heads, n_queries, d). A thread has four of FLASH_D columns; a block has
// whole rows and whole warps, 256 threads at most.
extern "C" __global__ void __launch_bounds__(256)
    flash_forward_combine(const __grid_constant__ Problem problem, const __grid_constant__ Parts parts,
                          const __grid_constant__ Output o) {
  await_last_kernel();
  constexpr int lanes = d / 4, rows_a_block = 256 / lanes / 8 * 8;
  const int row = static_cast<int>(blockIdx.x * rows_a_block + threadIdx.x / lanes), column = threadIdx.x % lanes * 4;
  if (row >= problem.n_queries || column >= problem.d) return;
  const long long heads = static_cast<long long>(problem.heads) * problem.batch;
  const long long at = (static_cast<long long>(blockIdx.z) * problem.heads + blockIdx.y) * problem.n_queries + row;
  const long long from_part_to_part = heads * problem.n_queries;
  const int count = (blocks_seen(problem, row / rows * rows) + parts.blocks - 1) / parts.blocks;
  float largest = -infinity;
#pragma unroll 4
  for (int part = 0; part < count; ++part) largest = fmaxf(largest, parts.lse[part * from_part_to_part + at]);
  float sum = 0.0f, values[4] = {};
#pragma unroll 4
  for (int part = 0; part < count; ++part) {
    const long long place = part * from_part_to_part + at;
    // The weight of a part without a key for this row is zero.
    const float weight = expf(parts.lse[place] - largest);
    const float4 own = *reinterpret_cast<const float4 *>(parts.o + place * d + column);
    sum += weight;
    values[0] = fmaf(weight, own.x, values[0]);
    values[1] = fmaf(weight, own.y, values[1]);
    values[2] = fmaf(weight, own.z, values[2]);
    values[3] = fmaf(weight, own.w, values[3]);
  }
  const float inverse = 1.0f / sum;
  const uint2 packed = {pack(values[0] * inverse, values[1] * inverse), pack(values[2] * inverse, values[3] * inverse)};
  element *to = o.base + blockIdx.z * o.strides[0] + blockIdx.y * o.strides[1] + row * o.strides[2] + column;
  *reinterpret_cast<uint2 *>(to) = packed;
  if (column == 0) problem.lse[at] = largest + logf(sum);
}
#endif

extern "C" __global__ void __launch_bounds__(threads, resident)
    flash_forward(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k,
                  const __grid_constant__ TensorMap v, const __grid_constant__ TensorMap o,
                  const __grid_constant__ Problem problem
#if FLASH_SPLIT
                  ,
                  const __grid_constant__ Parts parts
#endif
    ) {
#if FLASH_SPLIT
  allow_next_kernel();
#else
  constexpr Parts parts;
#endif
  extern __shared__ unsigned char memory[];
  const u32 base = (shared_address(memory) + 1023) / 1024 * 1024;
  const Barriers bar{base + barriers_at};
  if (threadIdx.x == 0) {
    prefetch_map(&q);
    prefetch_map(&k);
    prefetch_map(&v);
    prefetch_map(&o);
    barrier_init(bar.q_full(), 1);
    barrier_init(bar.q_free(), 4 * groups);
    for (int stage = 0; stage < stages; ++stage) {
      barrier_init(bar.k_full(stage), 1);
      barrier_init(bar.v_full(stage), 1);
      // One arrival for each warp.
      barrier_init(bar.k_free(stage), 4 * groups);
      barrier_init(bar.v_free(stage), 4 * groups);
    }
    fence_barrier_init();
  }
  __syncthreads();
  const Schedule schedule(problem, parts);
  if (threadIdx.x < 128) {
    fewer_registers<copier_registers>();
    if (threadIdx.x == 0) copy(base, bar, schedule, q, k, v);
  } else {
    more_registers<worker_registers>();
    // Through a shuffle, so that the compiler knows the value is uniform in a warp.
    const int warp = __shfl_sync(0xFFFFFFFF, static_cast<int>(threadIdx.x) / 32, 0), group = warp / 4 - 1;
    Worker worker{base, bar, problem, group, static_cast<int>(threadIdx.x) % 32, warp % 4};
    u32 count = 0;
    int index = static_cast<int>(blockIdx.x);
    for (u32 turn = 0; index < schedule.all;) {
      const Tile tile = schedule.tile(index);
      worker.run(tile, turn % 2, count);
      worker.finish(tile, parts, o);
      barrier_wait(bar.q_full(), ++turn % 2);
      // Read by the lane that frees Q, since freeing Q also frees the index.
      index = __shfl_sync(0xFFFFFFFF, worker.lane == 0 ? load_word(base + number_at) : 0, 0);
    }
    if (worker.warp == 0 && worker.lane == 0) copies_out_wait_read();
  }
}
