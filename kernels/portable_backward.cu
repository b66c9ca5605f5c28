// FlashAttention-2's backward pass (handout, Algorithm 2 with Eq. 13 to 19) with the mma instructions of compute capability
// 8.0. q, k, v, o and do are bfloat16, float16 or float32; dq, dk and dv have their type.
//
// `portable_backward_prepare` computes D = rowsum(dO * O), and lse in the base that `portable_backward` uses.
// `portable_backward` makes two passes side by side. The pass over keys has a block for each tile of keys: it keeps K and V,
// streams Q and dO by PORTABLE_KEYS_STREAM rows, and computes dV and dK. The pass over queries has a block for each tile of
// queries: it keeps Q and dO, streams K and V by PORTABLE_QUERIES_STREAM rows, and computes dQ. Both compute S and dP again.
//
// If there are too few tiles to keep the GPU busy, several thread blocks share each tile, each with a part of its columns.
// They write unscaled sums in float32, and `portable_backward_combine` adds a tile's parts in their order.
//
// The two passes are one program with exchanged roles. A row (of keys, or of queries) belongs to one warp. With left operands
// K and V, S^T = K Q^T and dP^T = V dO^T, and P^T and dS^T are left operands in registers for dV += P^T dO and dK += dS^T Q.
// With Q and dO, S = Q K^T, dP = dO V^T and dQ += dS K. So only the inputs go through shared memory, no warp waits for
// another's results, no sum of dq is cleared, added to and read again, and every result is bitwise reproducible. The cost is
// seven products instead of five.
//
// With PORTABLE_FUSED, for float32, d = 64 and 128, and many scores, there is only the pass over keys, of five products. The
// warps of a block write dS to shared memory; then each multiplies it by its own columns of K, and adds the product to a sum of
// dQ in global memory. A counter for each block of queries gives the tiles of keys their turns, from the first tile to the last,
// so that results are bitwise reproducible here too. A tile waits only for tiles of blocks that began before its own, so it
// cannot wait forever. `portable_backward_combine` scales the sums.
//
// Notebook
//   1. First version: one kernel for each pass, no parts. Measured on an H200, float32, one head, causal, cold, us; beside
//      it PyTorch's memory-efficient kernels and plain operations:
//        d = 128, n = 128: 83, 62, 102; 1024: 475, 305, 110; 4096: 1838, 1144, 634; 16384: 8516, 5055, 9129;
//        65536: 79686, 71102, 142199;
//        d = 64, n = 1024: 174, 235, 117; 4096: 641, 894, 473; 16384: 3258, 4107, 6539; 65536: 33737, 40223, 104432.
//      So a block alone on its multiprocessor takes 1 us for each product of 64 by 16 by 128, two blocks take 1.4. Up to
//      n = 8192 the longest tile decides the time. Not tried: a pass over keys that adds its parts of dq to global memory (at
//      best 5/7 of the time).
//   2. Left operands are read from shared memory in every step. 16-bit types with d = 16 or 32 have enough registers to
//      keep them. Not tried.
//   3. float32 in the emulator. Against float64, mean errors are 0.6 to 1.2 times those of plain float32 operations for
//      d = 64 and 128, and up to 1.6 times for d = 16 and 32; largest errors up to 1.7 and 3.6 times. The rest comes from lse,
//      which is rounded to float32 and read again, and from rows with few keys. There dP - D is nearly zero: plain operations
//      compute exactly zero, while dP and D here are rounded differently.
//   4. Parts, and both passes in one launch, so that short blocks of one pass fill idle multiprocessors of the other.
//      Predicted by assigning blocks in order, with 1 us a product and 3 us a part: d = 128, n = 1024 40 us, 4096 300, 8192
//      1100. A part is half of a resident block's share; a third is 4 percent better for n = 8192 and worse below 2048 in the
//      same prediction, a whole share 18 percent worse for 8192. Measured with entry 5: 61, 393 and 1426 us; before 475, 1838
//      and 3636.
//   5. Two groups of steps a turn. float32, d = 128: S and dP took 152 instructions for 12 matrix instructions, half of them
//      for addresses, in two chains of six in which each waits for the one before. Now 164 instructions for 24, in four
//      chains: about 2500 instructions for a step of keys, before 3600. Predicted: 0.7 of the time. Measured: n = 16384
//      5642 us, before 8516; but 65536, which has no parts, 74903, before 79686, or 0.94 of the time. So the number of
//      instructions is not the limit there.
//   6. Tried, float32, d = 128: S and dP in one loop, 160 instructions for 24, also in four chains. The pass over keys,
//      whose sums take 128 registers, then spills one to three.
//   7. Choose the parts by cost. A part is now a half, a third, a quarter or a sixth of a resident block's share, whichever
//      ends first in a greedy assignment with the costs of entry 4; tiles stay whole only if that is best. With halves only,
//      n = 16384 and d = 128 left the tiles of queries whole, each 0.88 of a share, and the last block ended at 1.38 times the
//      average; with quarters at 1.08. Predicted, us: 5642 become 4900; 8192 at d = 128 from 1426 to 1300. Measured: 5037
//      and 1311.
//   8. Groups of query heads that share a head of K and V: a tile of keys meets the blocks of one head of queries after those of
//      another, and a part may begin in any of them. A division a step tells which. Predicted: as many heads of their own,
//      and 2 percent. Measured: not yet measured.
//   9. PORTABLE_FUSED. By its instructions, d = 128: five products take 480 matrix instructions and 3240 in all for a warp's 16
//      keys and 16 queries, seven 672 and 4470. In a simulation of two warps of a scheduler that issue them as ptxas has placed
//      them, a matrix instruction takes 12.4 cycles, of seven products 11.5. Turns cost two waits for the L2 cache a step, of
//      two different warps, about 2 percent; at the start each tile follows the one before it by a step, of 65536 at most 3
//      percent. Predicted, float32, one head, causal, us: d = 128, n = 65536 59000, before 74903; 16384 4000, before 5037; d =
//      64, n = 65536 26000, before 33174. Measured on an H100, in turns, before and after: d = 128, n = 65536 74259 and 55719
//      (without turns 51800; tiles of 128 keys by eight warps 55468; PyTorch's memory-efficient kernel 72859), 16384 5123 and
//      4095; d = 64 32973 and 27374, 2272 and 2311. So turns cost 7 to 13 percent, and 45 at d = 64, n = 16384.
//  10. Tried for entry 9, with ptxas's placement as the measure. The loop as in the two passes: 18.9 cycles of waits within a
//      warp for each matrix instruction, now 14.5, because it has 32 columns in the works at a time instead of 16, and fewer
//      registers with addresses (see `add_dq`). Small and large products in chains of their own: one instruction more for each
//      four. dS read again from shared memory for dK, to free eight registers: 17.8. Tiles of 128 keys, steps of 32 queries:
//      spills.
//
// Set by src/attention/flash/portable: PORTABLE_D (16, 32, 64, 128), PORTABLE_TYPE (lib/fragment.cuh), PORTABLE_CAUSAL,
// PORTABLE_WARPS, PORTABLE_KEYS_TILES and PORTABLE_QUERIES_TILES (of 16 rows, a warp), PORTABLE_KEYS_STREAM and
// PORTABLE_QUERIES_STREAM, PORTABLE_STAGES, PORTABLE_BLOCKS (a multiprocessor), PORTABLE_GROUPED (whether heads of q share one
// of k and v), PORTABLE_FUSED (whether the pass over keys also makes dQ; float32).
#if !defined(PORTABLE_D) || !defined(PORTABLE_TYPE) || !defined(PORTABLE_CAUSAL) || !defined(PORTABLE_WARPS) ||       \
    !defined(PORTABLE_KEYS_TILES) || !defined(PORTABLE_QUERIES_TILES) || !defined(PORTABLE_KEYS_STREAM) ||            \
    !defined(PORTABLE_QUERIES_STREAM) || !defined(PORTABLE_STAGES) || !defined(PORTABLE_BLOCKS) ||                    \
    !defined(PORTABLE_GROUPED) || !defined(PORTABLE_FUSED)
#error "portable_backward.cu takes its shape from src/attention/portable"
#endif

#include "lib/fragment.cuh"
#include "lib/order.cuh"
#include "lib/turns.cuh"

// How the columns of a pass's tiles are shared by thread blocks.
struct Split {
  // Parts of the longest tile.
  int count;
  // Blocks of columns of each part.
  int blocks;
};

struct Problem {
  int n_queries;
  int n_keys;
  int heads;
  int batch;
  // The factor of a score, to base e and to base 2: 1 / sqrt(d), and log2(e) times that.
  float scale;
  float scale_log2;
  // Heads that are computed at the same time, few enough that their inputs stay in the L2 cache.
  int heads_at_a_time;
  // n_queries rounded up to a multiple of 128.
  int padded_queries;
  // Of tiles of keys; of tiles of queries.
  Split keys;
  Split queries;
  Tensor q;
  Tensor k;
  Tensor v;
  Tensor o;
  Tensor d_o;
  // (batch, heads, n_queries)
  const float *lse;
  // (batch, heads, padded_queries): lse to base 2 (float32: to base e) and D, with the missing rows.
  float *shift;
  float *delta;
  // (batch, heads, n, d)
  element *dq;
  element *dk;
  element *dv;
  // The same of each part, unscaled, of a pass that has more than one: (parts, batch, heads, n, d).
  float *dq_parts;
  float *dk_parts;
  float *dv_parts;
  // PORTABLE_FUSED: dq's unscaled sums (batch, heads, padded_queries, d), in the order that `dq_at` gives.
  float *dq_sums;
  // PORTABLE_FUSED: how many blocks have begun; then of each block of queries, how many tiles of keys have been added.
  int *turns;
  // Heads of q that share a head of k and v: 1 without PORTABLE_GROUPED.
  int group_size;
  int unused;
};

namespace {

constexpr int d = PORTABLE_D;
constexpr int stages = PORTABLE_STAGES;
constexpr int threads = 32 * PORTABLE_WARPS;
constexpr bool is_float = element_bytes == 4;
constexpr int padding = 128;
constexpr bool is_fused = PORTABLE_FUSED;

static_assert(d == 16 || d == 32 || d == 64 || d == 128, "rows are of 16, 32, 64 or 128 elements");

using Layout = Rows<d>;

constexpr int score_group = is_float && d == 128 ? 2 : 1;
// A second copy of the loop's body, without masks, needs two registers more than these have.
constexpr bool always_masks = is_float && d == 128;
constexpr float log2e = 1.44269504088896340736f;
constexpr float infinity = __builtin_bit_cast(float, 0x7F800000);

// P = exp(S - lse) (Eq. 14). float32 subtracts to base e, so that neither operand is rounded before.
DEVICE float probability(const Problem &problem, float score, float shift) {
  return is_float ? exp2_fast(fmaf(score, problem.scale, -shift) * log2e)
                  : exp2_fast(fmaf(score, problem.scale_log2, -shift));
}

// One pass: with `Keys` its rows are keys and its columns queries, without it the reverse.
template <bool Keys, int Tiles, int Stream> struct Pass {
  static constexpr int warp_rows = 16 * Tiles;
  static constexpr int rows = PORTABLE_WARPS * warp_rows;
  static constexpr int sum_group = is_float ? 2 : 1;
  // Of 16 columns, multiplied at the same time: four chains of instructions instead of two.
  static constexpr int pairs = is_fused ? 2 : 1;
  static_assert(padding % rows == 0 && padding % Stream == 0 && Stream % 16 == 0 && 2 * Stream / 4 <= threads);

  // Offsets in shared memory: the two kept inputs, then for each stage the two streamed inputs and, for queries, shift and D.
  static constexpr u32 held_bytes = rows * Layout::bytes;
  static constexpr u32 streamed_bytes = Stream * Layout::bytes;
  static constexpr u32 stats_bytes = Keys ? 4 * Stream : 0;
  static constexpr u32 stage_bytes = 2 * streamed_bytes + 2 * stats_bytes;

  const Problem &problem;
  u32 base;
  int lane;
  int n_rows;
  int n_columns;
  // The first row of the tile and of the warp.
  int tile_row;
  int first_row;
  int head;
  int batch;
  // The index of this part's results among all parts of all heads.
  int place;
  // The tile's place in the order of tiles.
  int rank;
  // Blocks of columns, from `begin` to before `end`. Of a group their numbers go on from head to head.
  int begin;
  int end;
  // The first block that is met, and the number of blocks of each head.
  [[maybe_unused]] int first;
  [[maybe_unused]] int of_head;
  // Where the head's shift and D begin.
  long long stats;

  float s[Tiles][Stream / 8][4];
  float dp[Tiles][Stream / 8][4];
  // dK or dQ, unscaled; dV.
  float first_sums[Tiles][d / 8][4];
  float second_sums[Keys ? Tiles : 1][d / 8][4];
  // The thread's rows, if they are queries.
  float shift[Tiles][2];
  float delta[Tiles][2];

  DEVICE static const Split &split_of(const Problem &problem) { return Keys ? problem.keys : problem.queries; }
  DEVICE static int rows_of(const Problem &problem) { return Keys ? problem.n_keys : problem.n_queries; }
  // Heads of the tiles. Of a group, a tile of keys meets the blocks of one head of queries after those of another.
  DEVICE static int heads_of(const Problem &problem) {
    return PORTABLE_GROUPED && Keys ? problem.heads / problem.group_size : problem.heads;
  }
  DEVICE static int met_heads(const Problem &problem) { return PORTABLE_GROUPED && Keys ? problem.group_size : 1; }

  // Thread blocks of all heads' tiles.
  DEVICE static int items(const Problem &problem) {
    return (rows_of(problem) + rows - 1) / rows * heads_of(problem) * problem.batch * split_of(problem).count;
  }

  // Blocks of columns that some row of the tile from `tile_row` on uses: from `first` to before `end`. If there are none, `end`
  // may be less than `first`.
  struct Met {
    int first;
    int end;

    DEVICE Met(const Problem &problem, int tile_row) {
      const int columns = Keys ? problem.n_queries : problem.n_keys;
      const int end_row = min(tile_row + rows, rows_of(problem));
      const int seen = PORTABLE_CAUSAL && !Keys ? min(columns, end_row) : columns;
      first = PORTABLE_CAUSAL && Keys ? tile_row / Stream : 0;
      end = (seen + Stream - 1) / Stream;
    }
  };

  // The work of thread block `index` of this pass.
  DEVICE explicit Pass(const Problem &problem, u32 base, int index)
      : problem(problem), base(base), lane(static_cast<int>(threadIdx.x) % 32), n_rows(rows_of(problem)),
        n_columns(Keys ? problem.n_queries : problem.n_keys) {
    const int tiles = (n_rows + rows - 1) / rows;
    const int heads_at_a_time =
        PORTABLE_GROUPED ? max(problem.heads_at_a_time / met_heads(problem), 1) : problem.heads_at_a_time;
    const Order order(index, tiles, heads_of(problem), problem.batch, heads_at_a_time, split_of(problem).count);
    head = order.head;
    batch = order.batch;
    rank = order.rank;
    place = (order.split * problem.batch + batch) * heads_of(problem) + head;
    // The longest tiles first: early keys, late queries.
    tile_row = (PORTABLE_CAUSAL && !Keys ? tiles - 1 - order.rank : order.rank) * rows;
    const Met met(problem, tile_row);
    first = met.first;
    of_head = met.end - met.first;
    if constexpr (is_fused) {
      // Parts begin at the last block, so that those of all tiles begin at the same blocks.
      end = met.end * met_heads(problem) - order.split * split_of(problem).blocks;
      begin = max(met.first * met_heads(problem), end - split_of(problem).blocks);
    } else {
      begin = met.first + order.split * split_of(problem).blocks;
      end = min(PORTABLE_GROUPED ? met.first + of_head * met_heads(problem) : met.end, begin + split_of(problem).blocks);
    }
    // Through a shuffle, so that the compiler knows the value is uniform in a warp.
    first_row = tile_row + __shfl_sync(0xFFFFFFFF, static_cast<int>(threadIdx.x) / 32, 0) * warp_rows;
    stats = stats_of(head);
  }

  DEVICE long long stats_of(int head) const {
    return (static_cast<long long>(batch) * problem.heads + head) * problem.padded_queries;
  }

  // The lane for addresses in shared memory: with PORTABLE_FUSED the one that `add_dq` renews.
  DEVICE u32 address_lane() const { return is_fused ? lane : threadIdx.x % 32; }

  // S or dP: this warp's rows of the input kept at `at`, times the rows streamed to `to`.
  DEVICE void scores(float (&sums)[Tiles][Stream / 8][4], u32 at, u32 to) {
    const u32 own = base + at + (first_row - tile_row) * Layout::bytes;
    // The transposed scores must have the same bits as the forward pass's, because lse was computed from those.
    multiply_along<d, score_group, false, Keys>(
        sums, to, [&](Left &a, int m, int step) { Layout::left(a, own, 16 * m, step, address_lane()); }, address_lane());
  }

  // Calls `body(m, n, i, row, column, statistic)` for every element of S or dP: its three indices in registers, its row and
  // column in the whole matrix, and its query's statistic, from shared memory at `at` (columns) or from `own` (rows).
  template <typename Body> DEVICE void each(u32 at, const float (&own)[Tiles][2], int block, Body body) {
    const int first_column = block * Stream + 2 * (lane % 4);
#pragma unroll
    for (int n = 0; n < Stream / 8; ++n) {
      float2 pair;
      if constexpr (Keys) pair = load_pair(at + 8 * (lane % 4) + 32 * n);
#pragma unroll
      for (int m = 0; m < Tiles; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float statistic = Keys ? (i % 2 ? pair.y : pair.x) : own[m][i / 2];
          body(m, n, i, first_row + 16 * m + lane / 4 + 8 * (i / 2), first_column + 8 * n + i % 2, statistic);
        }
      }
    }
  }

  // Calls `then` when dP has been replaced by dS.
  template <bool Masked, typename Then> DEVICE void step(u32 to, int block, Then then) {
    scores(s, 0, to);
    // Replaces S by P. A missing query has a shift of infinity. A missing key is masked like the keys after each query.
    // Of a missing key, dK and dV are not stored; but its dS would be added to dQ.
    each(to + 2 * streamed_bytes, shift, block, [&](int m, int n, int i, int row, int column, float own_shift) {
      const bool hidden = (PORTABLE_CAUSAL && (Keys ? column < row : column > row)) || (!Keys && column >= n_columns) ||
                          (is_fused && row >= n_rows);
      s[m][n][i] = Masked && hidden ? 0.0f : probability(problem, s[m][n][i], own_shift);
    });
    // Eq. 15.
    if constexpr (Keys) multiply_across<d, sum_group, pairs>(second_sums, s, to + streamed_bytes, address_lane());
    scores(dp, held_bytes, to + streamed_bytes);
    // Replaces dP by dS = P * (dP - D) (Eq. 17).
    each(to + 2 * streamed_bytes + stats_bytes, delta, block, [&](int m, int n, int i, int, int, float own_delta) {
      dp[m][n][i] = s[m][n][i] * (dp[m][n][i] - own_delta);
    });
    then();
    // Eq. 19 or Eq. 18.
    multiply_across<d, sum_group, pairs>(first_sums, dp, to, address_lane());
  }

  // The head and the block within it of the block with this number.
  struct Column {
    int head;
    int block;
  };
  DEVICE Column column_of(int number) const {
    if (is_fused && PORTABLE_GROUPED) {
      return {head * problem.group_size + number % problem.group_size, number / problem.group_size};
    }
    if (!PORTABLE_GROUPED) return {head, number};
    if (!Keys) return {head / problem.group_size, number};
    const int heads = (number - first) / of_head;
    return {head * problem.group_size + heads, number - heads * of_head};
  }

  DEVICE void copy(u32 to, int number) {
    const Column column = column_of(number);
    const int block = column.block;
    const Tensor &first = Keys ? problem.q : problem.k, &second = Keys ? problem.d_o : problem.v;
    Layout::template copy<Stream, threads>(to, first.head(batch, column.head), first.strides[2], block * Stream, n_columns);
    Layout::template copy<Stream, threads>(to + streamed_bytes, second.head(batch, column.head), second.strides[2],
                                           block * Stream, n_columns);
    if constexpr (Keys) {
      constexpr u32 pieces = Stream / 4;
      const u32 piece = threadIdx.x % pieces;
      if (threadIdx.x < 2 * pieces) {
        const bool is_shift = threadIdx.x < pieces;
        const long long rows = PORTABLE_GROUPED ? stats_of(column.head) : stats;
        const float *from = (is_shift ? problem.shift : problem.delta) + rows + block * Stream + 4 * piece;
        copy_async(to + 2 * streamed_bytes + (is_shift ? 0 : stats_bytes) + 16 * piece, from, true);
      }
    }
  }

  // Where a block's streamed inputs are.
  DEVICE u32 stage_of(int number) const { return base + 2 * held_bytes + number % stages * stage_bytes; }

  // Whether there is anything to compute. If so, it loads the tile.
  DEVICE bool begins() {
    // A tile with fewer parts than the longest has nothing to store. A whole tile without columns stores zeros.
    if (split_of(problem).count > 1 && begin >= end) {
      await_last_kernel();
      return false;
    }
    const Tensor &left = Keys ? problem.k : problem.q, &right = Keys ? problem.v : problem.d_o;
    Layout::template copy<rows, threads>(base, left.head(batch, head), left.strides[2], tile_row, n_rows);
    Layout::template copy<rows, threads>(base + held_bytes, right.head(batch, head), right.strides[2], tile_row,
                                         n_rows);
    // The first use of results of `portable_backward_prepare`.
    await_last_kernel();
    return true;
  }

  // Whether there is anything to store.
  DEVICE bool run() {
    if (!begins()) return false;
#pragma unroll
    for (int block = begin; block < begin + stages - 1; ++block) {
      if (block < end) copy(stage_of(block), block);
      copies_commit();
    }
    clear(first_sums);
    clear(second_sums);
    if constexpr (!Keys) {
#pragma unroll
      for (int m = 0; m < Tiles; ++m) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int row = first_row + 16 * m + lane / 4 + 8 * r;
          shift[m][r] = problem.shift[stats + row];
          delta[m][r] = problem.delta[stats + row];
        }
      }
    }
    for (int number = begin; number < end; ++number) {
      const int block = column_of(number).block, column = block * Stream, later = number + stages - 1;
      copies_wait<stages - 2>();
      __syncthreads();
      if (later < end) copy(stage_of(later), later);
      copies_commit();
      // Whether no row of the warp uses a column of the block, and whether every row uses all.
      const int end_row = first_row + warp_rows, end_column = column + Stream;
      const bool none = PORTABLE_CAUSAL && (Keys ? end_column <= first_row : column >= end_row);
      if (none) continue;
      const bool below = !PORTABLE_CAUSAL || (Keys ? column >= end_row - 1 : end_column - 1 <= first_row);
      const bool all = below && (Keys || end_column <= n_columns);
      if (all && !always_masks) {
        step<false>(stage_of(number), block, [] {});
      } else {
        step<true>(stage_of(number), block, [] {});
      }
    }
    copies_wait<0>();
    return true;
  }

  // Writes the result, or this part of it to `parts`.
  template <int M> DEVICE void store(element *to, float *parts, const float (&sums)[M][d / 8][4], float scale) {
    const bool whole = split_of(problem).count == 1;
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = first_row + 16 * m + lane / 4 + 8 * r;
        if (row >= n_rows) continue;
        const long long at = (static_cast<long long>(place) * n_rows + row) * d + 2 * (lane % 4);
#pragma unroll
        for (int n = 0; n < d / 8; ++n) {
          const float first = sums[m][n][2 * r], second = sums[m][n][2 * r + 1];
          if (whole) {
            store_two(to + at + 8 * n, first * scale, second * scale);
          } else {
            *reinterpret_cast<float2 *>(parts + at + 8 * n) = float2{first, second};
          }
        }
      }
    }
  }
};

using Keys = Pass<true, PORTABLE_KEYS_TILES, PORTABLE_KEYS_STREAM>;

#if PORTABLE_FUSED
// The pass over keys that also makes dQ. All warps of a block write dS of a block of queries to shared memory; then each
// multiplies it by its own columns of K, and adds the product to sums in global memory.
struct FusedKeys : Keys {
  static constexpr int stream = PORTABLE_KEYS_STREAM, tiles = PORTABLE_KEYS_TILES;
  static_assert(is_float && d % (16 * PORTABLE_WARPS) == 0, "dS is float32, and a warp has pairs of tiles of 8 columns of K");

  // dS of two blocks, after the stages, with a row for each query. A row is longer by 16 bytes, so that the same piece of eight
  // rows lies in eight different groups of banks.
  static constexpr u32 ds_stride = 4 * rows + 16;
  static constexpr u32 ds_at = 2 * held_bytes + stages * stage_bytes;
  static constexpr u32 ds_bytes = stream * ds_stride;
  // A warp's part of a block's dQ: tiles of 16 queries, and tiles of 8 columns.
  static constexpr int dq_rows = stream / 16, dq_columns = d / 8 / PORTABLE_WARPS;
  static constexpr int dq_fragments = dq_rows * dq_columns;

  unsigned char *memory;

  DEVICE FusedKeys(const Problem &problem, unsigned char *memory, int index)
      : Keys(problem, shared_address(memory), index), memory(memory) {}

  // The number of this block in the order in which blocks begin. It lies where nothing is written before the next barrier.
  DEVICE static int begun_before(const Problem &problem, unsigned char *memory) {
    int *const number = reinterpret_cast<int *>(memory + ds_at);
    if (threadIdx.x == 0) *number = atomicAdd(problem.turns, 1);
    __syncthreads();
    // Through a shuffle, so that what follows from it is in registers that a warp shares.
    return __shfl_sync(0xFFFFFFFF, *number, 0);
  }

  // This warp's rows of dS as columns. Of eight keys, the even ones come before the odd ones: the order in which
  // `Rows::across` gives K's rows.
  DEVICE void store_ds(float *to) {
    constexpr u32 stride = ds_stride / 4;
    const u32 key = lane / 4, own = first_row - tile_row + key / 2 + 4 * (key % 2) + 2 * (lane % 4) * stride;
#pragma unroll
    for (int m = 0; m < tiles; ++m) {
#pragma unroll
      for (int n = 0; n < stream / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) to[own + 16 * m + 8 * (i / 2) + (8 * n + i % 2) * stride] = dp[m][n][i];
      }
    }
  }

  // Eq. 18 of one block of queries, this warp's columns.
  DEVICE void add_dq(u32 ds, int number) {
    // Hides from the compiler that it is still the same lane. Else it computes addresses before the loop over blocks and keeps
    // them in registers, which the chains of instructions need.
    asm volatile("" : "+r"(lane));
    float sums[dq_rows][dq_columns][4];
    clear(sums);
    const int warp = (first_row - tile_row) / warp_rows;
    const u32 own = ds + lane % 16 * ds_stride + 16 * (lane / 16);
#pragma unroll 4
    for (int step = 0; step < rows / depth; step += sum_group) {
      Left a[dq_rows][sum_group];
#pragma unroll
      for (int m = 0; m < dq_rows; ++m) {
#pragma unroll
        for (int g = 0; g < sum_group; ++g) {
          u32 words[4];
          load_matrices(words, own + 16 * m * ds_stride + 32 * (step + g));
          make(a[m][g], words);
        }
      }
      Right b[sum_group][dq_columns];
#pragma unroll
      for (int g = 0; g < sum_group; ++g) {
#pragma unroll
        for (int n = 0; n < dq_columns; n += 2) {
          Layout::across(&b[g][n], base, step + g, (warp * dq_columns + n) / 2, lane);
        }
      }
#pragma unroll
      for (int m = 0; m < dq_rows; ++m) multiply<false>(sums[m], a[m], b);
    }
    float *const to = problem.dq_sums + row_of(number) * d + warp * dq_fragments * 128;
#pragma unroll
    for (int m = 0; m < dq_rows; ++m) {
#pragma unroll
      for (int n = 0; n < dq_columns; ++n) {
        float *const at = to + (m * dq_columns + n) * 128;
        // The first tile of keys finds no sums.
        if (rank == 0) {
          Fragment::store(at, lane, sums[m][n]);
        } else {
          Fragment::add(at, lane, sums[m][n]);
        }
      }
    }
  }

  // A block's first query among the padded queries of all heads.
  DEVICE long long row_of(int number) const {
    const Column column = column_of(number);
    return (PORTABLE_GROUPED ? stats_of(column.head) : stats) + column.block * stream;
  }

  DEVICE int *turn_of(int number) const { return problem.turns + 1 + row_of(number) / stream; }

  // The last block comes first; of a group, that of every head before the block before it. So all tiles of keys, which see the
  // same last block, meet the blocks in the same order, and follow each other closely. A block's dQ is multiplied in the next
  // step, when all warps have written their dS: a step has one barrier. The turn is passed on in the step after that, when all
  // warps have added.
  DEVICE bool run() {
    if (!begins()) return false;
#pragma unroll
    for (int number = end - 1; number > end - stages; --number) {
      if (number >= begin) copy(stage_of(number), number);
      copies_commit();
    }
    clear(first_sums);
    clear(second_sums);
    for (int number = end - 1; number >= begin - 2; --number) {
      const int added = number + 1, passed = number + 2, later = number - (stages - 1);
      const bool adds = added >= begin && added < end;
      copies_wait<stages - 2>();
      if (adds && threadIdx.x == 0) await_turn(turn_of(added), rank);
      __syncthreads();
      if (passed < end && threadIdx.x == 32) pass_turn(turn_of(passed), rank + 1);
      if (later >= begin) copy(stage_of(later), later);
      copies_commit();
      if (adds) add_dq(base + ds_at + added % 2 * ds_bytes, added);
      if (number < begin) continue;
      // A warp whose keys see no query of the block takes part, because its dS must be zero.
      const int block = column_of(number).block, end_row = first_row + warp_rows;
      const bool all = (!PORTABLE_CAUSAL || block * stream >= end_row - 1) && end_row <= n_rows;
      const auto then = [&] { store_ds(reinterpret_cast<float *>(memory + ds_at + number % 2 * ds_bytes)); };
      if (all && !always_masks) {
        step<false>(stage_of(number), block, then);
      } else {
        step<true>(stage_of(number), block, then);
      }
    }
    copies_wait<0>();
    return true;
  }
};

// dQ of its sums. A thread has a lane's four numbers of a fragment.
DEVICE void finish_dq(const Problem &problem) {
  constexpr int columns = FusedKeys::dq_columns, fragments = FusedKeys::dq_fragments, stream = FusedKeys::stream;
  const long long fragment = static_cast<long long>(blockIdx.x) * 8 + threadIdx.x / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32, within = static_cast<int>(fragment % fragments);
  const int warp = static_cast<int>(fragment / fragments % PORTABLE_WARPS);
  const long long first = fragment / (fragments * PORTABLE_WARPS) * stream, head = first / problem.padded_queries;
  if (head >= static_cast<long long>(problem.batch) * problem.heads) return;
  const int row = static_cast<int>(first % problem.padded_queries) + within / columns * 16 + lane / 4;
  const int column = (warp * columns + within % columns) * 8 + 2 * (lane % 4);
  float own[4];
  Fragment::load(own, problem.dq_sums + fragment * 128, lane);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (row + 8 * r >= problem.n_queries) continue;
    element *const to = problem.dq + (head * problem.n_queries + row + 8 * r) * d + column;
    store_two(to, own[2 * r] * problem.scale, own[2 * r + 1] * problem.scale);
  }
}
#else
using Queries = Pass<false, PORTABLE_QUERIES_TILES, PORTABLE_QUERIES_STREAM>;
#endif

// Adds the parts of one result in their order. A thread has four columns of a row.
template <typename Pass> DEVICE void combine(const Problem &problem, const float *parts, element *to, float scale) {
  constexpr int lanes = d / 4;
  const Split &split = Pass::split_of(problem);
  const int n = Pass::rows_of(problem);
  const long long all = static_cast<long long>(problem.batch) * Pass::heads_of(problem) * n;
  const long long row = static_cast<long long>(blockIdx.x) * (256 / lanes) + threadIdx.x / lanes;
  if (split.count == 1 || row >= all) return;
  const long long at = row * d + threadIdx.x % lanes * 4;
  const typename Pass::Met met(problem, static_cast<int>(row % n) / Pass::rows * Pass::rows);
  // Parts from this one on wrote nothing.
  const int count = ((met.end - met.first) * Pass::met_heads(problem) + split.blocks - 1) / split.blocks;
  float sums[4] = {};
#pragma unroll 4
  for (int part = 0; part < count; ++part) {
    const float4 own = *reinterpret_cast<const float4 *>(parts + part * all * d + at);
    sums[0] += own.x, sums[1] += own.y, sums[2] += own.z, sums[3] += own.w;
  }
  store_two(to + at, sums[0] * scale, sums[1] * scale);
  store_two(to + at + 2, sums[2] * scale, sums[3] * scale);
}

} // namespace

// A block of 256 threads for each 128 queries of a head.
extern "C" __global__ void __launch_bounds__(256) portable_backward_prepare(const __grid_constant__ Problem problem) {
  allow_next_kernel();
  // A thread reads 16 bytes of a row at a time.
  constexpr int width = 16 / element_bytes, lanes = d / width, rows = 256 / lanes;
  const int head = static_cast<int>(blockIdx.y), batch = static_cast<int>(blockIdx.z);
  const long long head_index = static_cast<long long>(batch) * problem.heads + head;
  const int first = static_cast<int>(blockIdx.x) * padding, lane = static_cast<int>(threadIdx.x) % lanes;
  if constexpr (is_fused) {
    constexpr int turns = padding / PORTABLE_KEYS_STREAM;
    const long long block = (head_index * problem.padded_queries + first) / PORTABLE_KEYS_STREAM;
    if (threadIdx.x < turns) problem.turns[1 + block + threadIdx.x] = 0;
    if (block == 0 && threadIdx.x == turns) problem.turns[0] = 0;
  }
#pragma unroll
  for (int at = static_cast<int>(threadIdx.x) / lanes; at < padding; at += rows) {
    const int row = first + at;
    const bool there = row < problem.n_queries;
    float product = 0.0f;
    if (there) {
      const auto place = [&](const Tensor &tensor) {
        return reinterpret_cast<const uint4 *>(tensor.head(batch, head) + row * tensor.strides[2]) + lane;
      };
      const uint4 o = *place(problem.o), d_o = *place(problem.d_o);
      element a[width], b[width];
      memcpy(a, &o, 16);
      memcpy(b, &d_o, 16);
#pragma unroll
      for (int i = 0; i < width; ++i) product = fmaf(static_cast<float>(a[i]), static_cast<float>(b[i]), product);
    }
#pragma unroll
    for (int step = 1; step < lanes; step *= 2) product += __shfl_xor_sync(0xFFFFFFFF, product, step);
    if (lane == 0) {
      const float lse = there ? problem.lse[head_index * problem.n_queries + row] : infinity;
      const long long to = head_index * problem.padded_queries + row;
      problem.shift[to] = is_float ? lse : lse * log2e;
      problem.delta[to] = product;
    }
  }
}

// The tiles of keys, then those of queries, whose shorter blocks fill the remaining time.
extern "C" __global__ void __launch_bounds__(threads, PORTABLE_BLOCKS)
    portable_backward(const __grid_constant__ Problem problem) {
  allow_next_kernel();
  extern __shared__ unsigned char memory[];
#if PORTABLE_FUSED
  // The counters are zero after `portable_backward_prepare`.
  await_last_kernel();
  FusedKeys pass(problem, memory, FusedKeys::begun_before(problem, memory));
  if (!pass.run()) return;
  pass.store(problem.dk, problem.dk_parts, pass.first_sums, problem.scale);
  pass.store(problem.dv, problem.dv_parts, pass.second_sums, 1.0f);
#else
  const u32 base = shared_address(memory);
  const int index = static_cast<int>(blockIdx.x), keys = Keys::items(problem);
  if (index < keys) {
    Keys pass(problem, base, index);
    if (!pass.run()) return;
    pass.store(problem.dk, problem.dk_parts, pass.first_sums, problem.scale);
    pass.store(problem.dv, problem.dv_parts, pass.second_sums, 1.0f);
  } else {
    Queries pass(problem, base, index - keys);
    if (!pass.run()) return;
    pass.store(problem.dq, problem.dq_parts, pass.first_sums, problem.scale);
  }
#endif
}

// 256 threads with four columns each; grid dimension y chooses one of the three results. A pass without parts keeps its
// results.
extern "C" __global__ void __launch_bounds__(256) portable_backward_combine(const __grid_constant__ Problem problem) {
  await_last_kernel();
  if (blockIdx.y == 0) {
#if PORTABLE_FUSED
    finish_dq(problem);
#else
    combine<Queries>(problem, problem.dq_parts, problem.dq, problem.scale);
#endif
  } else if (blockIdx.y == 1) {
    combine<Keys>(problem, problem.dk_parts, problem.dk, problem.scale);
  } else {
    combine<Keys>(problem, problem.dv_parts, problem.dv, 1.0f);
  }
}
