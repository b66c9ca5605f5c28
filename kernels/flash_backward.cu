// FlashAttention-2's backward pass (handout, Algorithm 2 with Eq. 13 to 19) with Hopper's tensor memory accelerator (TMA) and
// wgmma. q, k, v, o and do are 16-bit; dk and dv have their type; dq is summed in float32 and rounded at the end.
//
// Three kernels:
// - `flash_backward_prepare` computes D = rowsum(dO * O) and lse to base 2, and clears the sums of dq.
// - `flash_backward` has one block for each FLASH_KEYS keys. The block keeps K and V in shared memory, streams Q and dO by
//   FLASH_QUERIES rows, and keeps dK and dV in registers. One producer warpgroup copies; two consumer warpgroups compute 64
//   keys (rows) each of the transposed scores S^T = K Q^T and dP^T = V dO^T. So P^T and dS^T are left operands straight from
//   registers in dV += P^T dO and dK += dS^T Q. dS goes through shared memory, for dQ = dS K. The parts of dQ go through
//   shared memory too, in the order that the registers have, and TMA adds them in float32 in global memory.
//   The consumer warpgroups take turns at the tensor cores: in its turn a warpgroup multiplies dV, dK and dQ of one block of
//   queries and the scores of the next, while the other computes P and dS.
// - `flash_backward_finish` scales dq, rounds it and writes it in the order of its rows.
//
// If there are fewer blocks of keys than multiprocessors, FLASH_SPLIT splits the queries of each block into parts. Each part
// has a thread block of its own; the host lists the parts. A part's dk and dv go to memory in float32, and
// `flash_backward_combine` adds the parts in their order.
//
// Each kernel may begin while the one before it ends (programmatic dependent launch). It first does what needs no results
// of that kernel, then waits for it.
//
// Heads of q may be in groups that share a head of k and v (FLASH_GROUPED). A block of keys then streams the queries of every
// head of its group.
//
// The parts of dq are added in any order, so the last bits of dq vary between runs. dk and dv are bitwise reproducible.
//
// Rows may have fewer than FLASH_D elements, in multiples of 8. The tensor maps describe the rows as they are: TMA fills the
// missing elements with zeros when it reads and skips them when it writes. Sums of dq and parts have FLASH_D columns.
//
// Notebook. Times are medians on an H200, inputs bfloat16 and causal, unless stated. "16 x 16384" is 16 heads of 16384 queries.
//   1. First version. The emulator found it right for every d, type and mask.
//      Measured on two machines, 16 x 16384: d 64 2.55 and 2.67 ms (cuDNN in the same runs 3.01 and 3.11; FlashAttention-3
//      at another time 2.60); d 128 4.53 and 4.86 ms (5.00 and 5.32; 4.77).
//   2. Split the queries of a block. One head of 8192, d 64, has 64 blocks of keys, the longest of 64 steps.
//      Predicted: 16 steps and the addition, not 64. Measured: 66 us (cuDNN 202).
//   3. Tried: start the next block's scores after dK, so that they are multiplied while dQ is added. No wgmma may be in
//      flight across the end of the loop (ptxas, C7514), so P and dS crossed it, in registers. One loop tested each block for
//      the mask, because with two loops ptxas kept dK and dV twice. Predicted: 5 percent less at d 64.
//      Measured side by side: slower, by 3 percent at d 64 with 16 heads, 7 with one head of 32768, 6 to 12 at d 16; at d 128,
//      where only the single loop remained of the change, by 3. The branches in the loop cost more than the overlap gained:
//      the other warpgroup already fills that time.
//   4. Overlap the launches of short shapes. As CUDA graphs, d 64, cold, one head: 128 19.2 us, 512 22.6, 1024 23.9 (cuDNN's
//      graph in the same run 16.7, 17.6, 20.3). Now a kernel begins while the one before it ends, and copies K, V and the
//      first Q before D exists. Predicted: 2 us less for each launch but the first. Measured: 15.8, 18.3, 19.2 (PyTorch's
//      best back end 17.2, 25.2, 35.6); 16 x 16384 2.61 ms before and 2.55 after.
//   5. racecheck reported a race between the copy of a row of statistics and its readers two blocks before: a reader met
//      the other warps at a barrier, then one lane of its warp arrived at the mbarrier that the copy waited for. The tool
//      does not follow such a chain. Now every consumer warp arrives at a named barrier and the copying warp waits there:
//      no polling, and no race reported. Also tried: each thread arrives at the mbarrier itself (at both of a stage,
//      registers spill). Measured in turns, us, before / each thread / named: one head of 8192, d 64, 62.5 / 62.3 / 61.2;
//      one head of 65536 2445 / 2577 / 2443; 16 x 16384 d 64 2545 / 2652 / 2552, d 128 4859 / 4673 / 4868 (scatter 8 percent).
//   6. From here on the least time of a turn is compared: within a turn the power limit lowers the clock step by step, and
//      2.46 ms become 2.67. Tried: one mbarrier for K and V together; for each stage one mbarrier and one named barrier for Q
//      and dO together, so that dO's buffer is freed only after dK is multiplied. Predicted: no visible difference.
//      Measured over three turns, before and after: 16 x 16384, d 64 2.465, 2.459, 2.466 and 2.510, 2.499, 2.494 ms; one head
//      of 8192 equal. The cause is not known: the copying warp waits for Q's buffer first, so dO's buffer is filled no
//      earlier in either form. Not tried: copy dO first.
//   7. Tried to hide the softmax, each change alone on one machine, 16 x 16384, d 64, least of three turns:
//        no change                                                                                         2.472 ms
//        2^x of every eighth element, or every fourth, by a polynomial of degree 4 (predicted: 2.35)        2.527, 2.545
//        the next block's scores started after dK, complete before the loop ends (predicted: 2.3)           2.687
//        dK before the warpgroups meet at the barrier, dQ after it                                          2.654
//        dQ through shared memory, added by TMA (cp.reduce.async.bulk)                                      2.702
//        wrong results: no barrier between the warpgroups, which shows the possible gain (one turn)         2.407
//      On another machine, without an unchanged run in the same turn: half of dV started before dP is there 2.561; every
//      fourth element by the polynomial 2.548. At d 128 the power limit hides differences below 8 percent: two turns of one
//      kernel gave 4.471 and 4.831. At d 64 no change pays: one warpgroup uses the time that the other leaves idle.
//   8. What limits the backward pass (2026-11-23, one machine a row, the L2 cache flushed and 0.5 ms of rest before each call,
//      medians, ms, 16 x 16384). Wrong results, one part left out at a time:
//                                                   d 64      d 128
//        no change                                  2.54      4.91
//        dQ's sums stay in registers, no reductions 2.37      4.45   (with dQ's stores to shared memory)
//        neither dQ's product nor its reductions    2.07      3.79
//        no 2^x                                     2.27      4.58
//        no barrier between the warpgroups          2.47      4.75
//        no statistics read                         2.55      4.60
//      ncu, d 64: the tensor cores are busy for 61 percent of the time at 1.78 GHz. Both warpgroups stand at the same place of
//      a step, since each step ends with a barrier for both: the softmax of both is computed while no product is. A third of
//      the instructions computed descriptors, and reductions from registers kept the registers for 5 percent of a step.
//   9. Now a descriptor is one addition, dQ goes through shared memory and is added by a warp of its own, and the warpgroups take
//      turns at the tensor cores: in a turn, dV, dK and dQ of one block of queries and S and dP of the next. The first
//      warpgroup multiplies dQ one block later, when both have written dS. Predicted: 15 percent less at d 64.
//      Measured side by side, before and after, with rest: 16 x 16384, d 16 1.609 and 1.411, d 32 1.816 and 1.666, d 64 2.655
//      and 2.314, d 128 4.923 and 4.666; one head of 65536, d 64 2.531 and 2.255, d 128 4.706 and 4.484. Without rest, where the
//      power limit lowers the clock, d 64 2.760 and 2.765 in one run, 2.728 and 2.577 in another, d 128 5.005 and 5.041.
//      Also tried, d 64 against this form's 2.34: V's fragments kept in registers 2.58 (they spill); statistics read by four
//      2.43; turns with the reductions from registers 2.48; descriptors alone 2.5; D in the sums before dP is multiplied: no
//      gain. A wgmma may not be under way across the end of a loop if other instructions read its sums (ptxas, C7514), so P and
//      dP cross it, complete.
//      The emulator found two races of the first form that a GPU did not show: a warp overwrote dS while another warp of its
//      warpgroup had yet to multiply it.
//  10. Shared memory limits (2026-11-24, as in entry 8). At d 128 a step multiplies for 2560 clocks. Operands, dS, dQ and the
//      copies move 368 KiB through shared memory, which takes 2944 clocks at 128 bytes a clock (computed). Probes with wrong
//      results, of a form that multiplies dQ first, d 64 and d 128: no change 2.29 and 4.45; no reductions 2.22 and 4.10; nor
//      dQ's stores 2.14 and 3.92; no 2^x 2.19 and 4.17.
//      Now five of the eight left operands of V stay in registers at d 128, which saves 20 KiB a step. For this dQ is
//      multiplied first and leaves the registers while dV and dK are multiplied. Predicted: 5 percent less.
//      Measured side by side on two machines, 16 x 16384, d 128, with rest and without: entry 9 4.45 to 4.51 and 4.67 to 4.76;
//      dQ first 4.40 to 4.46 and 4.65 to 4.69; with four operands of V 4.31 to 4.35 and 4.50 to 4.58; with five 4.27 to 4.34
//      and 4.53. FlashAttention-4 beside them: 4.30 and 4.46 to 4.51. One head of 65536: 4.22 to 4.32 before, 4.14 to 4.16 now
//      (FlashAttention-4 4.22 to 4.25). A call takes 3.46 J; entry 8's form took 3.56 J. All wait for power: 1.7 GHz.
//      At d 64 the old order stays. With rest: 2.20 to 2.26 (FlashAttention-4 2.47 to 2.49). dQ first 2.28 to 2.30, and with
//      two of four operands of V 2.24 to 2.30; dV, dQ, dK in this order with none, two and four operands 2.21, 2.23 and 2.26.
//      Also tried at d 128: reductions from registers 4.40 to 4.52; two, four or eight heads side by side, the longest blocks
//      of all first, 4.31 to 4.40, so the last blocks end together already; all of dQ of every second block by one warpgroup
//      spills 96 bytes; more than five operands spill.
//  11. Groups of query heads that share a head of K and V. A block computes the queries of every head of its group, one head
//      after the other, so dK and dV need no sums in memory and are reproducible; dQ is as before. The number of a block tells
//      its head and its rows by a division, once a step: kept in registers instead, they spilled 8 to 20 bytes at d 128. There
//      four operands of V stay in registers, since with five the program for parts spills. Programs without groups have the
//      same instructions as before. Predicted: 1 percent more than as many heads of their own, and 2 percent at d 128.
//      Measured (2026-11-26, one machine, with rest, 16 x 16384) with 16, 4 and 1 heads of K and V: d 64 2.571, 2.650 and
//      2.929 ms (cuDNN 3.327, 3.427, 3.432); d 128 4.556, 4.676 and 5.349 (5.168, 5.191, 5.181). So 3 percent more with four
//      heads. One head has 128 blocks of keys, of as many different lengths, for 132 multiprocessors.
//  12. Tiles of 80 and 96 columns; before, these rows took the tiles of 128. With 128 queries a block they would take 227 KiB
//      and 48 bytes, and 256 KiB, of shared memory, of which there are 227 KiB. So blocks have 64 queries, and all of V's
//      operands stay in registers. A warpgroup's part of dQ must begin at a panel of K, so K has panels of 16 columns (a
//      swizzle of 32 bytes): at d 96 each warpgroup takes three; at d 80 both multiply the third of five, and the second
//      leaves its sums out. A step multiplies for 1664 and 1920 clocks (d 128: 2560) and moves 232 and 269 KiB through
//      shared memory, which takes 1815 and 2150 clocks (computed).
//      Predicted, 16 x 16384, with rest, from 4.3 ms at d 128: 2.9 ms at d 80, 3.3 at d 96. Measured as in entry 11, where
//      d 128 took 4.556 ms: d 80 3.475 (cuDNN 4.943), d 96 3.696 (4.967). So they take 0.76 and 0.81 of d 128, not 0.67 and 0.77.
//  13. Half the copies of Q and dO, d 128: what two multiprocessors that share them could save. Probe with wrong results, every
//      second block not copied, medians of three turns (2026-11-26): with rest 4.452 and 4.442 ms, without 4.710 and 4.611, 3.26
//      and 3.10 J; d 64 without rest 2.547 and 2.506. So at most 2 percent, and the forward pass loses 28 percent by such
//      sharing (its entry 13). Not built.
//
// Set by src/attention/flash/hopper: FLASH_D (16, 32, 64, 80, 96, 128), FLASH_HALF (1: float16, 0: bfloat16), FLASH_CAUSAL,
// FLASH_QUERIES (64 or 128), FLASH_SPLIT, FLASH_GROUPED (whether heads of q share one of k and v).
#if !defined(FLASH_D) || !defined(FLASH_HALF) || !defined(FLASH_CAUSAL) || !defined(FLASH_QUERIES) ||                   \
    !defined(FLASH_SPLIT) || !defined(FLASH_GROUPED)
#error "flash_backward.cu takes its shape from src/attention/hopper"
#endif

#include "lib/element.cuh"
#include "lib/wgmma.cuh"

struct Problem {
  int n_queries;
  int n_keys;
  int heads;
  int batch;
  // Elements of a row: a multiple of 8, FLASH_D or fewer.
  int d;
  // The factor of a score, to base e and to base 2: 1 / sqrt(d), and log2(e) times that.
  float scale;
  float scale_log2;
  // Heads of q that share a head of k and v: 1 without FLASH_GROUPED.
  int group_size;
  // (batch, heads, blocks of queries, FLASH_QUERIES): lse to base 2 and D, padded to whole blocks.
  float *lse_log2;
  float *delta;
  // (batch, heads, blocks of queries, FLASH_QUERIES * FLASH_D): a block's sums, in the order of the registers.
  float *dq_sums;
};

#if FLASH_SPLIT
constexpr int most_items = 1020;

// The parts of every head's blocks of keys.
struct Parts {
  // The number of `items`, and the blocks of queries in a part.
  int count;
  int blocks;
  // (parts, batch, heads of k, n_keys, FLASH_D) each, unscaled.
  float *dk;
  float *dv;
  // The index of the block of keys times 65,536, plus the part's index.
  u32 items[most_items];
};
#else
struct Parts {};
#endif

namespace {

constexpr int d = FLASH_D;
constexpr int queries = FLASH_QUERIES;
constexpr int keys = 128;
constexpr int stages = 2;
constexpr int threads = 384;
constexpr int copier_registers = 24;
constexpr int worker_registers = 240;
// So many blocks of 16 columns of V stay in registers as left operands: as many as fit without a spill. Fewer reads of shared
// memory pay where they limit, at d 128.
constexpr int v_steps = d == 128 ? (FLASH_GROUPED ? 4 : 5) : d > 64 ? d / 16 : 0;
// dQ is multiplied before dV and dK, so that its sums leave the registers early. Where V takes none, it comes after them.
constexpr bool dq_first = v_steps > 0;

// Panels of 64, 32 or 16 columns, 128, 64 or 32 bytes a row, that fill d.
constexpr int columns = d % 64 == 0 ? 64 : d % 32 == 0 ? 32 : 16;
constexpr int panels = d / columns;
constexpr int row_bytes = 2 * columns;
using Layout = Swizzle<row_bytes>;
// K's panels: of 64 queries, a warpgroup's part of dQ begins at one.
constexpr int k_columns = d % 64 == 0 || queries == 128 ? columns : 16;
constexpr int k_panels = d / k_columns;
constexpr int k_row_bytes = 2 * k_columns;
using KLayout = Swizzle<k_row_bytes>;
using Wide = Swizzle<128>;

constexpr u32 k_panel = keys * k_row_bytes;
constexpr u32 v_panel = keys * row_bytes;
constexpr u32 kv_bytes = panels * v_panel;
constexpr u32 q_panel = queries * row_bytes;
constexpr u32 q_bytes = panels * q_panel;
constexpr u32 row_stats = 4 * queries;
// dS: rows are keys, panels of 64 queries.
constexpr u32 ds_panel = keys * 128;
constexpr u32 ds_bytes = queries / 64 * ds_panel;

// Offsets in shared memory, which starts at a multiple of 1024.
constexpr u32 k_at = 0;
constexpr u32 v_at = k_at + kv_bytes;
constexpr u32 q_at = v_at + kv_bytes;
constexpr u32 do_at = q_at + stages * q_bytes;
constexpr u32 ds_at = do_at + stages * q_bytes;
constexpr u32 dq_at = ds_at + 2 * ds_bytes;
constexpr u32 stats_at = dq_at + 4 * queries * d;
constexpr u32 barriers_at = stats_at + stages * 2 * row_stats;

// A warpgroup's part of dQ: of 128 queries, 64 of them; of 64 queries, half of the columns, in whole panels of 16. At d 80 the
// second warpgroup multiplies a panel that is the first one's too, and leaves out its sums.
constexpr int dq_columns = queries == 128 ? d : (d / 2 + 15) / 16 * 16;
static_assert(queries == 128 || (queries == 64 && d > 64), "64 queries are for rows of more than 64 elements");
constexpr int dq_sums_a_thread = dq_columns / 2;
// The sums that the second warpgroup leaves out, and the column at which it begins.
constexpr int dq_left_out = queries == 128 ? 0 : (2 * dq_columns - d) / 2;
constexpr int dq_second_column = queries == 128 ? 0 : d - dq_columns;
static_assert(128 * (2 * dq_sums_a_thread - dq_left_out) == queries * d, "the two warpgroups make the block's dQ");
// Where the second warpgroup's sums would begin with those that it leaves out, which lie where the first one's last are.
constexpr u32 dq_second_at = 4 * 128 * (dq_sums_a_thread - dq_left_out);
constexpr u32 dq_bytes = 4 * 128 * dq_sums_a_thread;
constexpr u32 dq_left_out_bytes = 4 * 128 * dq_left_out;

constexpr float infinity = __builtin_bit_cast(float, 0x7F800000);

constexpr u32 both_barrier = 1;
// Named barriers, one a stage each: consumer warps arrive, the copying warp waits.
constexpr u32 q_free_barrier = 2;
constexpr u32 do_free_barrier = 4;
// Named barriers, one a warpgroup each: its turn; its dQ is in shared memory, and may be overwritten.
constexpr u32 turn_barrier = 6;
constexpr u32 dq_full_barrier = 8;
constexpr u32 dq_free_barrier = 10;
// The threads of the first warpgroup.
constexpr u32 first_barrier = 12;

struct Barriers {
  u32 base;

  DEVICE u32 k_full() const { return base; }
  DEVICE u32 v_full() const { return base + 8; }
  DEVICE u32 q_full(int stage) const { return base + 16 + 8 * stage; }
  DEVICE u32 do_full(int stage) const { return base + 16 + 8 * (stages + stage); }
};

// Heads of k and v.
[[maybe_unused]] DEVICE int kv_heads(const Problem &problem) {
  return FLASH_GROUPED ? problem.heads / problem.group_size : problem.heads;
}

// The keys of a block, and the queries that attend to some of them: blocks of queries of one head, or of each head of a
// group, one head after the other.
struct Work {
  int key;
  // Of k and v.
  int head;
  int batch;
  // The first block of queries, and the one after the head's last.
  int first;
  int blocks;
  int part = 0;
  // The head of q that `first` is of.
  int q_head;
  // Where the statistics and the sums of dq of `q_head` begin.
  long long rows;
  // Of a group: the number of blocks of queries.
  [[maybe_unused]] int count;

  // Of the thread block whose blockIdx.x is `index`.
  DEVICE Work(const Problem &problem, const Parts &parts, u32 index)
      : key(static_cast<int>(index) * keys), head(static_cast<int>(blockIdx.y)),
        batch(static_cast<int>(blockIdx.z)), blocks((problem.n_queries + queries - 1) / queries),
        q_head(FLASH_GROUPED ? head * problem.group_size : head),
        rows((static_cast<long long>(batch) * problem.heads + q_head) * blocks * queries) {
#if FLASH_SPLIT
    key = static_cast<int>(parts.items[index] >> 16) * keys;
    part = static_cast<int>(parts.items[index] & 0xFFFF);
#endif
    first = first_seen(key);
#if FLASH_GROUPED
    const int of_head = max(blocks - first, 0);
    count = of_head * problem.group_size;
#if FLASH_SPLIT
    const int skipped = part * parts.blocks, heads_skipped = skipped / of_head;
    first += skipped - heads_skipped * of_head;
    q_head += heads_skipped;
    rows += static_cast<long long>(heads_skipped) * blocks * queries;
    count = min(count - skipped, parts.blocks);
#endif
#elif FLASH_SPLIT
    first += part * parts.blocks;
    blocks = min(blocks, first + parts.blocks);
#endif
  }

  // The first block with a query that attends to a key from `key` on.
  DEVICE static int first_seen(int key) { return FLASH_CAUSAL ? key / queries : 0; }

  // Within its head, the block with number `count`.
  DEVICE int block(u32 count) const {
    const int number = first + static_cast<int>(count);
    if (!FLASH_GROUPED) return number;
    const int seen = first_seen(key);
    return seen + (number - seen) % (blocks - seen);
  }

  DEVICE bool is_empty() const { return FLASH_GROUPED ? count <= 0 : first >= blocks; }

  // Whether the block after `block` is the first of another head.
  DEVICE bool ends_head(int block) const { return block + 1 == blocks; }
};

// One warp copies; its first lane starts the copies: K and V once, Q, dO and their statistics once a block of queries.
DEVICE void copy(u32 base, const Barriers &bar, const Work &work, const Problem &problem, const TensorMap &q,
                 const TensorMap &k, const TensorMap &v, const TensorMap &d_o) {
  const bool starts = threadIdx.x == 0;
  if (starts) {
    barrier_expect(bar.k_full(), kv_bytes);
#pragma unroll
    for (int panel = 0; panel < k_panels; ++panel) {
      copy_in(base + k_at + panel * k_panel, &k, bar.k_full(), panel * k_columns, work.key, work.head, work.batch);
    }
    barrier_expect(bar.v_full(), kv_bytes);
#pragma unroll
    for (int panel = 0; panel < panels; ++panel) {
      copy_in(base + v_at + panel * v_panel, &v, bar.v_full(), panel * columns, work.key, work.head, work.batch);
    }
  }
  int q_head = work.q_head;
  // Of a group: the number of the block, and its first row, counted from the first of `work.q_head`.
  [[maybe_unused]] int turn = 0, row = work.first * queries;
  for (int block = work.first; FLASH_GROUPED ? turn < work.count : block < work.blocks; ++block) {
    const u32 count = FLASH_GROUPED ? turn : block - work.first;
    const int stage = count % stages;
    const u32 stats = base + stats_at + stage * 2 * row_stats;
    if (count >= stages) named_sync(q_free_barrier + stage, 256 + 32);
    if (starts) {
      barrier_expect(bar.q_full(stage), q_bytes + row_stats);
#pragma unroll
      for (int panel = 0; panel < panels; ++panel) {
        copy_in(base + q_at + stage * q_bytes + panel * q_panel, &q, bar.q_full(stage), panel * columns,
                block * queries, q_head, work.batch);
      }
      // The first use of results of `flash_backward_prepare`: the statistics, and the zeros that dQ is added to.
      if (count == 0) await_last_kernel();
      copy_in_row<row_stats>(stats, problem.lse_log2 + work.rows + (FLASH_GROUPED ? row : block * queries),
                             bar.q_full(stage));
    }
    if (count >= stages) named_sync(do_free_barrier + stage, 256 + 32);
    if (starts) {
      barrier_expect(bar.do_full(stage), q_bytes + row_stats);
      copy_in_row<row_stats>(stats + row_stats, problem.delta + work.rows + (FLASH_GROUPED ? row : block * queries),
                             bar.do_full(stage));
#pragma unroll
      for (int panel = 0; panel < panels; ++panel) {
        copy_in(base + do_at + stage * q_bytes + panel * q_panel, &d_o, bar.do_full(stage), panel * columns,
                block * queries, q_head, work.batch);
      }
    }
    if constexpr (FLASH_GROUPED) {
      ++turn;
      row += queries;
      if (!work.ends_head(block)) continue;
      block = Work::first_seen(work.key) - 1;
      row += (block + 1) * queries;
      ++q_head;
    }
  }
  if (work.is_empty() && starts) await_last_kernel();
}

// One warp adds the parts of dQ that warpgroup `group` leaves in shared memory.
DEVICE void add_dq(u32 base, int group, const Work &work, const Problem &problem) {
  constexpr u32 second = dq_second_at + dq_left_out_bytes;
  const u32 from = base + dq_at + group * second;
  float *to = problem.dq_sums + (work.rows + static_cast<long long>(work.first) * queries) * d + group * (second / 4);
  [[maybe_unused]] int turn = 0;
  for (int block = work.first; FLASH_GROUPED ? turn < work.count : block < work.blocks; ++block, to += queries * d) {
    named_arrive(dq_free_barrier + group, 128 + 32);
    named_sync(dq_full_barrier + group, 128 + 32);
    if (threadIdx.x % 32 == 0) {
      if (dq_left_out == 0 || group == 0) {
        add_out<dq_bytes>(to, from);
      } else {
        add_out<dq_bytes - dq_left_out_bytes>(to, from);
      }
      copies_out_commit();
      copies_out_wait_read();
    }
    __syncwarp();
    if constexpr (FLASH_GROUPED) {
      ++turn;
      if (!work.ends_head(block)) continue;
      block = Work::first_seen(work.key) - 1;
      to += (block + 1) * (queries * d);
    }
  }
}

// One warpgroup's 64 keys.
struct Worker {
  u32 base;
  const Barriers &bar;
  const Problem &problem;
  const Parts &parts;
  int group;
  int warp;
  int lane;
  // The number of the last block of queries, from 0.
  u32 last;

  float dk[d / 2];
  float dv[d / 2];
  // Left operands of V's first columns.
  u32 v[dq_first ? 4 * v_steps : 1];

  // Reads the left operands of V that stay in registers.
  DEVICE void load_v() {
    const u32 at_row = 64 * group + 16 * warp + lane % 8 + 8 * (lane / 8 % 2), half = lane / 16;
#pragma unroll
    for (int step = 0; step < v_steps; ++step) {
      const u32 panel = 16 * step / columns, within = 32 * step - panel * row_bytes + 16 * half;
      load_matrices(base + v_at + panel * v_panel + Layout::place(at_row * row_bytes + within), v[4 * step],
                    v[4 * step + 1], v[4 * step + 2], v[4 * step + 3]);
    }
  }

  // Starts S^T = K Q^T (Eq. 13) or dP^T = V dO^T (Eq. 16) with this warpgroup's rows of K or V. The left operands of the first
  // `Steps` blocks of columns are those in `v`. The other ones lie in panels of `Columns`. `right` is in units of 16 bytes, as
  // below.
  template <int Steps, int Columns> DEVICE void start_scores(float (&sums)[queries / 2], u32 left, u32 right) {
    constexpr u32 left_row = 2 * Columns, left_panel = keys * left_row;
    left = units(base) + units(left) + units(64 * left_row) * group;
#pragma unroll
    for (int step = 0; step < d / 16; ++step) {
      const u32 panel = 16 * step / columns, within = 32 * step - panel * row_bytes;
      const u64 operand = descriptor<row_bytes>(right + units(panel * q_panel + within), 16);
      if (step < Steps) {
        Wgmma<queries>::template registers<0>(sums, v[4 * step], v[4 * step + 1], v[4 * step + 2], v[4 * step + 3],
                                              operand, step != 0);
      } else {
        const u32 other = 16 * step / Columns, offset = other * left_panel + 32 * step - other * left_row;
        Wgmma<queries>::template shared<0, 0>(sums, descriptor<left_row>(left + units(offset), 16), operand, step != 0);
      }
    }
    wgmma_commit();
  }

  // Starts sums += A B with P^T or dS^T on the left, from registers, and dO or Q on the right (Eq. 15 and 19).
  DEVICE void start_gradient(float (&sums)[d / 2], const u32 (&left)[queries / 4], u32 right) {
#pragma unroll
    for (int step = 0; step < queries / 16; ++step) {
      const u64 operand = descriptor<row_bytes>(right + units(2 * step * Layout::group_bytes), q_panel);
      Wgmma<d>::template registers<1>(sums, left[4 * step], left[4 * step + 1], left[4 * step + 2], left[4 * step + 3],
                                      operand, 1);
    }
    wgmma_commit();
  }

  // Starts this warpgroup's part of dQ = dS K (Eq. 18).
  DEVICE void start_dq(float (&sums)[dq_sums_a_thread], u32 ds) {
    const u32 left = ds + (queries == 128 ? units(ds_panel) * group : 0);
    const u32 right = units(base) + units(k_at) + units(dq_second_column / k_columns * k_panel) * group;
#pragma unroll
    for (int step = 0; step < keys / 16; ++step) {
      Wgmma<dq_columns>::template shared<1, 1>(
          sums, descriptor<128>(left + units(2 * step * Wide::group_bytes), ds_panel),
          descriptor<k_row_bytes>(right + units(2 * step * KLayout::group_bytes), k_panel), step != 0);
    }
    wgmma_commit();
  }

  // Computed when it is used, so that it takes no registers meanwhile.
  DEVICE Work work() const {
    u32 index[] = {blockIdx.x};
    hold(index);
    return Work(problem, parts, index[0]);
  }

  // Only if the buffer is filled again: the copying warp does not wait for the last blocks.
  DEVICE void release(u32 barrier, u32 count) {
    // Computed for a group, whose `last` would spill at d 128.
    const u32 end = FLASH_GROUPED ? work().count - 1 : last;
    if (count + stages <= end) named_arrive(barrier, 256 + 32);
  }

  // Where a stage's Q or dO begins, or a block's dS.
  DEVICE u32 stage_units(u32 at, int stage) const { return units(base) + units(at) + units(q_bytes) * stage; }
  DEVICE u32 ds_units(u32 count) const { return units(base) + units(ds_at) + units(ds_bytes) * (count % 2); }

  DEVICE void take_turn() { named_sync(turn_barrier + group, 256); }
  DEVICE void pass_turn() { named_arrive(turn_barrier + 1 - group, 256); }

  // Of a group, whose every head begins with such blocks. It keeps nothing in registers.
  DEVICE bool is_masked(u32 count) const {
    u32 held[] = {count};
    hold(held);
    const Work own = work();
    if (own.key + keys > problem.n_keys) return true;
    return FLASH_CAUSAL && own.block(held[0]) < (own.key + 64 * group + 63 + queries - 1) / queries;
  }

  // Masks the queries before each key, and missing keys. For these, exp(0 - lse) could be infinite, and infinity times the
  // row of zeros is not a number.
  DEVICE void mask(float (&s)[queries / 2], u32 count) {
    const Work own = work();
    const int key = own.key + 64 * group + 16 * warp + lane / 4;
    const int query = own.block(count) * queries + 2 * (lane % 4);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      // Queries from this column on attend to the key.
      const bool there = key + 8 * r < problem.n_keys;
      const int seen = !there ? queries : FLASH_CAUSAL ? key + 8 * r - query : 0;
#pragma unroll
      for (int i = 0; i < queries / 2; i += 4) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if (2 * i + e < seen) s[i + 2 * r + e] = -infinity;
        }
      }
    }
  }

  // Waits for the block's scores and makes P^T = exp(S^T - lse) (Eq. 14) of them, then waits for dP^T. A missing query has an
  // lse of infinity.
  DEVICE void finish_scores(float (&s)[queries / 2], float (&dp)[queries / 2], u32 count, int masked) {
    const u32 lse = base + stats_at + count % stages * 2 * row_stats;
    wgmma_wait<1>();
    hold(s);
    if (FLASH_GROUPED ? is_masked(count) : static_cast<int>(count) < masked) mask(s, count);
#pragma unroll
    for (int i = 0; i < queries / 2; i += 4) {
      const float2 shift = load_pair(lse + 4 * (2 * i + 2 * (lane % 4)));
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        s[i + 2 * r] = exp2_fast(fmaf(s[i + 2 * r], problem.scale_log2, -shift.x));
        s[i + 2 * r + 1] = exp2_fast(fmaf(s[i + 2 * r + 1], problem.scale_log2, -shift.y));
      }
    }
    wgmma_wait<0>();
    hold(dp);
  }

  // From P^T and dP^T of a block, in `s` and `dp`, to those of the next one. No wgmma is under way at either end: ptxas
  // serialises all of them if one crosses the end of a loop whose sums other instructions read.
  //
  // The second warpgroup's turn follows the first one's. So in its turn the first multiplies dQ of the block before, of which
  // both have written dS, and the second dQ of this block.
  template <bool Last>
  DEVICE void step(float (&s)[queries / 2], float (&dp)[queries / 2], u32 count, int masked) {
    const int stage = count % stages, next = (count + 1) % stages;
    const u32 next_parity = (count + 1) / stages % 2;
    const u32 delta = base + stats_at + stage * 2 * row_stats + row_stats;
    // dS^T = P^T * (dP^T - D) (Eq. 17).
    u32 p[queries / 4], ds_pairs[queries / 4];
#pragma unroll
    for (int i = 0; i < queries / 2; i += 4) {
      const float2 shift = load_pair(delta + 4 * (2 * i + 2 * (lane % 4)));
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int at = i + 2 * r;
        p[at / 2] = pack(s[at], s[at + 1]);
        ds_pairs[at / 2] = pack(s[at] * (dp[at] - shift.x), s[at + 1] * (dp[at + 1] - shift.y));
      }
    }
    store_ds(ds_pairs, 16 * ds_units(count));
    fence_to_async();
    float dq[dq_sums_a_thread];
    take_turn();
    hold(dv);
    hold(p);
    hold(dk);
    hold(ds_pairs);
    hold(dq);
    wgmma_fence();
    // The first warpgroup's dQ of the block before the first: the sums are not used, but dS is read.
    if (dq_first) start_dq(dq, ds_units(count + 1 + group));
    start_gradient(dv, p, stage_units(do_at, stage));
    start_gradient(dk, ds_pairs, stage_units(q_at, stage));
    if (dq_first) {
      wgmma_wait<2>();
      leave_dq(dq, count);
    } else {
      start_dq(dq, ds_units(count + 1 + group));
    }
    wgmma_wait<dq_first ? 1 : 2>();
    hold(dv);
    hold(p);
    release(do_free_barrier + stage, count);
    if (!Last) {
      barrier_wait(bar.q_full(next), next_parity);
      hold(s);
      wgmma_fence();
      start_scores<0, k_columns>(s, k_at, stage_units(q_at, next));
    }
    wgmma_wait<Last ? 0 : 1>();
    hold(dk);
    hold(ds_pairs);
    release(q_free_barrier + stage, count);
    if (!dq_first) leave_dq(dq, count);
    if (!Last) {
      barrier_wait(bar.do_full(next), next_parity);
      hold(dp);
      hold(v);
      wgmma_fence();
      start_scores<v_steps, columns>(dp, v_at, stage_units(do_at, next));
    }
    pass_turn();
    if (!Last) finish_scores(s, dp, count + 1, masked);
  }

  // Writes dS^T, rows of keys, to shared memory in the layout of dQ's left operand.
  DEVICE void store_ds(const u32 (&pairs)[queries / 4], u32 to) {
    const u32 at_row = 64 * group + 16 * warp + lane % 8 + 8 * (lane / 8 % 2), half = lane / 16;
#pragma unroll
    for (int chunk = 0; chunk < queries / 16; ++chunk) {
      const u32 panel = chunk / 4, within = 32 * (chunk % 4) + 16 * half;
      store_matrices(to + panel * ds_panel + Wide::place(at_row * 128 + within), pairs[4 * chunk], pairs[4 * chunk + 1],
                     pairs[4 * chunk + 2], pairs[4 * chunk + 3]);
    }
  }

  // Stores the sums of dQ of a step, which are complete. The first warpgroup's first step has none, but its warps meet.
  DEVICE void leave_dq(float (&dq)[dq_sums_a_thread], u32 count) {
    hold(dq);
    if (count + group > 0) {
      store_dq(dq);
    } else {
      named_sync(first_barrier, 128);
    }
  }

  // Leaves this warpgroup's part of dQ in shared memory, once the part before it is added. After the barrier all warps of the
  // warpgroup have multiplied dQ, so that dS may be overwritten.
  DEVICE void store_dq(const float (&dq)[dq_sums_a_thread]) {
    const u32 to = base + dq_at + group * dq_second_at + 16 * (32 * warp + lane);
    named_sync(dq_free_barrier + group, 128 + 32);
#pragma unroll
    for (int i = 0; i < dq_sums_a_thread; i += 4) {
      if (i < dq_left_out && group == 1) continue;
      store_four(to + 128 * 4 * i, dq[i], dq[i + 1], dq[i + 2], dq[i + 3]);
    }
    fence_to_async();
    named_arrive(dq_full_barrier + group, 128 + 32);
  }

  DEVICE void run() {
#pragma unroll
    for (int i = 0; i < d / 2; ++i) dk[i] = dv[i] = 0.0f;
    barrier_wait(bar.k_full(), 0);
    barrier_wait(bar.v_full(), 0);
    load_v();
    const Work own = work();
    if (own.is_empty()) return;
    last = FLASH_GROUPED ? own.count - 1 : own.blocks - own.first - 1;
    // Blocks before the one with this number are masked.
    int masked = FLASH_CAUSAL ? (own.key + 64 * group + 63 + queries - 1) / queries - own.first : 0;
    if (own.key + keys > problem.n_keys) masked = own.blocks;
    float s[queries / 2], dp[queries / 2];
    barrier_wait(bar.q_full(0), 0);
    barrier_wait(bar.do_full(0), 0);
    // The first warpgroup's first turn.
    if (group == 1) pass_turn();
    take_turn();
    hold(s);
    hold(dp);
    hold(v);
    wgmma_fence();
    start_scores<0, k_columns>(s, k_at, stage_units(q_at, 0));
    start_scores<v_steps, columns>(dp, v_at, stage_units(do_at, 0));
    pass_turn();
    finish_scores(s, dp, 0, masked);
    for (u32 count = 0; count < last; ++count) step<false>(s, dp, count, masked);
    step<true>(s, dp, last, masked);
    if (group == 0) finish_dq();
  }

  // The first warpgroup's dQ of the last block.
  DEVICE void finish_dq() {
    float dq[dq_sums_a_thread];
    take_turn();
    hold(dq);
    wgmma_fence();
    start_dq(dq, ds_units(last));
    wgmma_wait<0>();
    hold(dq);
    store_dq(dq);
  }

#if FLASH_SPLIT
  // Writes this warpgroup's 64 rows of one gradient's part.
  DEVICE void store_part(const float (&sums)[d / 2], float *to) {
    const Work done = work();
    const int key = done.key + 64 * group + 16 * warp + lane / 4;
    const long long heads = static_cast<long long>(kv_heads(problem)) * problem.batch;
    const long long head = done.part * heads + static_cast<long long>(done.batch) * kv_heads(problem) + done.head;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (key + 8 * r >= problem.n_keys) continue;
      float *row = to + (head * problem.n_keys + key + 8 * r) * d + 2 * (lane % 4);
#pragma unroll
      for (int i = 0; i < d / 2; i += 4) {
        *reinterpret_cast<float2 *>(row + 2 * i) = float2{sums[i + 2 * r], sums[i + 2 * r + 1]};
      }
    }
  }
#else
  // Writes 64 rows of one gradient through shared memory at offset `at`, in panels of `Columns`.
  template <int Columns> DEVICE void store(const float (&sums)[d / 2], float scale, u32 at, const TensorMap &map) {
    constexpr u32 row = 2 * Columns, panel_bytes = keys * row;
    const Work done = work();
    const u32 at_row = 64 * group + 16 * warp + lane % 8 + 8 * (lane / 8 % 2), half = lane / 16;
#pragma unroll
    for (int chunk = 0; chunk < d / 16; ++chunk) {
      const u32 panel = 16 * chunk / Columns, within = 32 * chunk - panel * row + 16 * half;
      u32 pairs[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) pairs[i] = pack(sums[8 * chunk + 2 * i] * scale, sums[8 * chunk + 2 * i + 1] * scale);
      store_matrices(base + at + panel * panel_bytes + Swizzle<row>::place(at_row * row + within), pairs[0], pairs[1],
                     pairs[2], pairs[3]);
    }
    fence_to_async();
    named_sync(both_barrier, 256);
    if (warp == 0 && lane == 0) {
#pragma unroll
      for (int panel = 0; panel < d / Columns; ++panel) {
        copy_out(&map, base + at + panel * panel_bytes + 64 * row * group, panel * Columns, done.key + 64 * group,
                 done.head, done.batch);
      }
      copies_out_commit();
    }
  }

  DEVICE void finish(const TensorMap &dk_map, const TensorMap &dv_map) {
    // Both warpgroups multiply by K: it may be overwritten after both are done.
    named_sync(both_barrier, 256);
    store<columns>(dv, 1.0f, v_at, dv_map);
    store<k_columns>(dk, problem.scale, k_at, dk_map);
    if (warp == 0 && lane == 0) copies_out_wait_read();
  }
#endif
};

} // namespace

// The inputs of the statistics. Strides are in elements; rows are contiguous.
struct Outputs {
  const element *o;
  const element *d_o;
  // (batch, heads, n_queries)
  const float *lse;
  long long o_strides[3];
  long long do_strides[3];
};

// A block of 256 threads for each block of queries: D and lse to base 2 of its rows, and zeros for its sums of dq.
extern "C" __global__ void __launch_bounds__(256)
    flash_backward_prepare(const __grid_constant__ Problem problem, const __grid_constant__ Outputs outputs) {
  allow_next_kernel();
  // A thread reads 16 bytes of a row at a time.
  constexpr int width = 8, lanes = d > 64 ? 16 : d / width, rows = 256 / lanes;
  const int head = static_cast<int>(blockIdx.y), batch = static_cast<int>(blockIdx.z);
  const long long head_index = static_cast<long long>(batch) * problem.heads + head;
  const int first = static_cast<int>(blockIdx.x) * queries;
  const long long padded = (head_index * gridDim.x + blockIdx.x) * queries;
  const int lane = static_cast<int>(threadIdx.x) % lanes;
#pragma unroll
  for (int at = static_cast<int>(threadIdx.x) / lanes; at < queries; at += rows) {
    const int row = first + at;
    const bool there = row < problem.n_queries;
    float product = 0.0f;
    if (there && width * lane < problem.d) {
      const auto place = [&](const element *base, const long long (&strides)[3]) {
        return reinterpret_cast<const uint4 *>(base + batch * strides[0] + head * strides[1] + row * strides[2]) + lane;
      };
      const uint4 o = *place(outputs.o, outputs.o_strides), d_o = *place(outputs.d_o, outputs.do_strides);
      const element *a = reinterpret_cast<const element *>(&o), *b = reinterpret_cast<const element *>(&d_o);
#pragma unroll
      for (int i = 0; i < width; ++i) product = fmaf(static_cast<float>(a[i]), static_cast<float>(b[i]), product);
    }
#pragma unroll
    for (int step = 1; step < lanes; step *= 2) product += __shfl_xor_sync(0xFFFFFFFF, product, step);
    if (lane == 0) {
      constexpr float log2e = 1.44269504088896340736f;
      const float lse = there ? outputs.lse[head_index * problem.n_queries + row] : infinity;
      // A row without keys has an lse of minus infinity and no probabilities.
      problem.lse_log2[padded + at] = lse == -infinity ? infinity : lse * log2e;
      problem.delta[padded + at] = product;
    }
  }
  float4 *sums = reinterpret_cast<float4 *>(problem.dq_sums + padded * d);
  for (int i = static_cast<int>(threadIdx.x); i < queries * d / 4; i += 256) sums[i] = float4{0.0f, 0.0f, 0.0f, 0.0f};
}

// A block of 256 threads for each block of queries, each with the registers of one thread of `flash_backward`: the
// sums of dq, scaled and rounded, to (batch, heads, n_queries, d).
extern "C" __global__ void __launch_bounds__(256)
    flash_backward_finish(const __grid_constant__ Problem problem, element *dq) {
  await_last_kernel();
  const int group = static_cast<int>(threadIdx.x) / 128, thread = static_cast<int>(threadIdx.x) % 128;
  const int warp = thread / 32, lane = thread % 32;
  const long long head_index = static_cast<long long>(blockIdx.z) * problem.heads + blockIdx.y;
  const int first = static_cast<int>(blockIdx.x) * queries;
  const float *sums = problem.dq_sums + (head_index * gridDim.x + blockIdx.x) * queries * d +
                      group * static_cast<int>(dq_second_at / 4) + 4 * thread;
  const int row = first + (queries == 128 ? 64 * group : 0) + 16 * warp + lane / 4;
  const int column = dq_second_column * group + 2 * (lane % 4);
#pragma unroll
  for (int i = 0; i < dq_sums_a_thread; i += 4) {
    if (i < dq_left_out && group == 1) continue;
    const float4 four = *reinterpret_cast<const float4 *>(sums + 128 * i);
    const float values[2][2] = {{four.x, four.y}, {four.z, four.w}};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (row + 8 * r < problem.n_queries && column + 2 * i < problem.d) {
        element *to = dq + (head_index * problem.n_queries + row + 8 * r) * problem.d + column + 2 * i;
        *reinterpret_cast<u32 *>(to) = pack(values[r][0] * problem.scale, values[r][1] * problem.scale);
      }
    }
  }
}

#if FLASH_SPLIT
// Adds the parts of each row of dk and dv (batch, heads of k, n_keys, d). A thread has four of FLASH_D columns; a block has
// whole rows and whole warps, 256 threads at most.
extern "C" __global__ void __launch_bounds__(256)
    flash_backward_combine(const __grid_constant__ Problem problem, const __grid_constant__ Parts parts, element *dk,
                           element *dv) {
  allow_next_kernel();
  await_last_kernel();
  constexpr int lanes = d / 4, rows_a_block = 256 / lanes / 8 * 8;
  const int key = static_cast<int>(blockIdx.x * rows_a_block + threadIdx.x / lanes), column = threadIdx.x % lanes * 4;
  if (key >= problem.n_keys || column >= problem.d) return;
  const long long heads = static_cast<long long>(kv_heads(problem)) * problem.batch;
  const long long at = (static_cast<long long>(blockIdx.z) * kv_heads(problem) + blockIdx.y) * problem.n_keys + key;
  const int seen = (problem.n_queries + queries - 1) / queries - Work::first_seen(key / keys * keys);
  const int count = ((FLASH_GROUPED ? seen * problem.group_size : seen) + parts.blocks - 1) / parts.blocks;
  const auto sum = [&](const float *from, element *to, float scale) {
    float values[4] = {};
#pragma unroll 2
    for (int part = 0; part < count; ++part) {
      const float4 own = *reinterpret_cast<const float4 *>(from + (part * heads * problem.n_keys + at) * d + column);
      values[0] += own.x, values[1] += own.y, values[2] += own.z, values[3] += own.w;
    }
    const uint2 packed = {pack(values[0] * scale, values[1] * scale), pack(values[2] * scale, values[3] * scale)};
    *reinterpret_cast<uint2 *>(to + at * problem.d + column) = packed;
  };
  sum(parts.dk, dk, problem.scale);
  sum(parts.dv, dv, 1.0f);
}
#endif

extern "C" __global__ void __launch_bounds__(threads, 1)
    flash_backward(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k,
                   const __grid_constant__ TensorMap v, const __grid_constant__ TensorMap d_o,
                   const __grid_constant__ TensorMap dk, const __grid_constant__ TensorMap dv,
                   const __grid_constant__ Problem problem
#if FLASH_SPLIT
                   ,
                   const __grid_constant__ Parts parts
#endif
    ) {
#if !FLASH_SPLIT
  constexpr Parts parts;
#endif
  extern __shared__ unsigned char memory[];
  const u32 base = (shared_address(memory) + 1023) / 1024 * 1024;
  const Barriers bar{base + barriers_at};
  allow_next_kernel();
  if (threadIdx.x == 0) {
    prefetch_map(&q);
    prefetch_map(&k);
    prefetch_map(&v);
    prefetch_map(&d_o);
    barrier_init(bar.k_full(), 1);
    barrier_init(bar.v_full(), 1);
    for (int stage = 0; stage < stages; ++stage) {
      barrier_init(bar.q_full(stage), 1);
      barrier_init(bar.do_full(stage), 1);
    }
    fence_barrier_init();
  }
  __syncthreads();
  const Work work(problem, parts, blockIdx.x);
  if (threadIdx.x < 128) {
    fewer_registers<copier_registers>();
    // Through a shuffle, so that the compiler knows the value is uniform in a warp.
    const int warp = __shfl_sync(0xFFFFFFFF, static_cast<int>(threadIdx.x) / 32, 0);
    if (warp == 0) copy(base, bar, work, problem, q, k, v, d_o);
    if (warp == 1 || warp == 2) add_dq(base, warp - 1, work, problem);
  } else {
    more_registers<worker_registers>();
    const int warp = __shfl_sync(0xFFFFFFFF, static_cast<int>(threadIdx.x) / 32, 0);
    Worker worker{base, bar, problem, parts, warp / 4 - 1, warp % 4, static_cast<int>(threadIdx.x) % 32};
    worker.run();
#if FLASH_SPLIT
    worker.store_part(worker.dk, parts.dk);
    worker.store_part(worker.dv, parts.dv);
#else
    worker.finish(dk, dv);
#endif
  }
}
