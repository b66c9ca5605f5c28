// FlashAttention-2's backward pass (handout, Algorithm 2 with Eq. 13 to 19) with Hopper's tensor memory accelerator (TMA) and
// wgmma. q, k, v, o and do are 16-bit; dk and dv have their type; dq is summed in float32 and rounded at the end.
//
// Three kernels:
// - `flash_backward_prepare` computes D = rowsum(dO * O) and lse to base 2, and clears the sums of dq.
// - `flash_backward` has one block for each FLASH_KEYS keys. The block keeps K and V in shared memory, streams Q and dO by
//   FLASH_QUERIES rows, and keeps dK and dV in registers. One producer warpgroup copies; two consumer warpgroups compute 64
//   keys (rows) each of the transposed scores S^T = K Q^T and dP^T = V dO^T. So P^T and dS^T are left operands straight from
//   registers in dV += P^T dO and dK += dS^T Q. Only dS goes through shared memory, for dQ = dS K. The parts of dQ are added
//   in float32 in global memory, in the order that the registers have.
// - `flash_backward_finish` scales dq, rounds it and writes it in the order of its rows.
//
// If there are fewer blocks of keys than multiprocessors, FLASH_SPLIT splits the queries of each block into parts. Each part
// has a thread block of its own; the host lists the parts. A part's dk and dv go to memory in float32, and
// `flash_backward_combine` adds the parts in their order.
//
// Each kernel may begin while the one before it ends (programmatic dependent launch). It first does what needs no results
// of that kernel, then waits for it.
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
//
// Set by src/attention/flash/hopper: FLASH_D (16, 32, 64, 128), FLASH_HALF (1: float16, 0: bfloat16), FLASH_CAUSAL,
// FLASH_QUERIES (64 or 128), FLASH_SPLIT.
#if !defined(FLASH_D) || !defined(FLASH_HALF) || !defined(FLASH_CAUSAL) || !defined(FLASH_QUERIES) ||                   \
    !defined(FLASH_SPLIT)
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
  // (parts, batch, heads, n_keys, FLASH_D) each, unscaled.
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

constexpr int columns = d < 64 ? d : 64;
constexpr int panels = d / columns;
constexpr int row_bytes = 2 * columns;
using Layout = Swizzle<row_bytes>;
using Wide = Swizzle<128>;

constexpr u32 kv_panel = keys * row_bytes;
constexpr u32 kv_bytes = panels * kv_panel;
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
constexpr u32 stats_at = ds_at + 2 * ds_bytes;
constexpr u32 barriers_at = stats_at + stages * 2 * row_stats;

// A warpgroup's part of dQ: of 128 queries, 64 of them; of 64 queries, half of the columns.
constexpr int dq_columns = queries == 128 ? d : d / 2;
static_assert(queries == 128 || (queries == 64 && d == 128), "64 queries are for rows of 128 elements");
constexpr int dq_sums_a_thread = dq_columns / 2;
static_assert(2 * 128 * dq_sums_a_thread == queries * d, "the two warpgroups make the block's dQ");

constexpr u32 both_barrier = 1;
// Named barriers, one a stage each: consumer warps arrive, the copying warp waits.
constexpr u32 q_free_barrier = 2;
constexpr u32 do_free_barrier = 4;

struct Barriers {
  u32 base;

  DEVICE u32 k_full() const { return base; }
  DEVICE u32 v_full() const { return base + 8; }
  DEVICE u32 q_full(int stage) const { return base + 16 + 8 * stage; }
  DEVICE u32 do_full(int stage) const { return base + 16 + 8 * (stages + stage); }
};

// The keys of a block, and the queries that attend to some of them.
struct Work {
  int key;
  int head;
  int batch;
  // The first block of queries, and the one after the last.
  int first;
  int blocks;
  int part = 0;
  // Where the statistics and the sums of dq of the block's head begin.
  long long rows;

  DEVICE Work(const Problem &problem, const Parts &parts)
      : key(static_cast<int>(blockIdx.x) * keys), head(static_cast<int>(blockIdx.y)),
        batch(static_cast<int>(blockIdx.z)), blocks((problem.n_queries + queries - 1) / queries),
        rows((static_cast<long long>(batch) * problem.heads + head) * blocks * queries) {
#if FLASH_SPLIT
    key = static_cast<int>(parts.items[blockIdx.x] >> 16) * keys;
    part = static_cast<int>(parts.items[blockIdx.x] & 0xFFFF);
    first = first_seen(key) + part * parts.blocks;
    blocks = min(blocks, first + parts.blocks);
#else
    first = first_seen(key);
#endif
  }

  // The first block with a query that attends to a key from `key` on.
  DEVICE static int first_seen(int key) { return FLASH_CAUSAL ? key / queries : 0; }
};

// One warp copies; its first lane starts the copies: K and V once, Q, dO and their statistics once a block of queries.
DEVICE void copy(u32 base, const Barriers &bar, const Work &work, const Problem &problem, const TensorMap &q,
                 const TensorMap &k, const TensorMap &v, const TensorMap &d_o) {
  const bool starts = threadIdx.x == 0;
  if (starts) {
    barrier_expect(bar.k_full(), kv_bytes);
#pragma unroll
    for (int panel = 0; panel < panels; ++panel) {
      copy_in(base + k_at + panel * kv_panel, &k, bar.k_full(), panel * columns, work.key, work.head, work.batch);
    }
    barrier_expect(bar.v_full(), kv_bytes);
#pragma unroll
    for (int panel = 0; panel < panels; ++panel) {
      copy_in(base + v_at + panel * kv_panel, &v, bar.v_full(), panel * columns, work.key, work.head, work.batch);
    }
  }
  for (int block = work.first; block < work.blocks; ++block) {
    const u32 count = block - work.first;
    const int stage = count % stages;
    const u32 stats = base + stats_at + stage * 2 * row_stats;
    if (count >= stages) named_sync(q_free_barrier + stage, 256 + 32);
    if (starts) {
      barrier_expect(bar.q_full(stage), q_bytes + row_stats);
#pragma unroll
      for (int panel = 0; panel < panels; ++panel) {
        copy_in(base + q_at + stage * q_bytes + panel * q_panel, &q, bar.q_full(stage), panel * columns,
                block * queries, work.head, work.batch);
      }
      // The first use of results of `flash_backward_prepare`: the statistics, and the zeros that dQ is added to.
      if (count == 0) await_last_kernel();
      copy_in_row<row_stats>(stats, problem.lse_log2 + work.rows + block * queries, bar.q_full(stage));
    }
    if (count >= stages) named_sync(do_free_barrier + stage, 256 + 32);
    if (starts) {
      barrier_expect(bar.do_full(stage), q_bytes + row_stats);
      copy_in_row<row_stats>(stats + row_stats, problem.delta + work.rows + block * queries, bar.do_full(stage));
#pragma unroll
      for (int panel = 0; panel < panels; ++panel) {
        copy_in(base + do_at + stage * q_bytes + panel * q_panel, &d_o, bar.do_full(stage), panel * columns,
                block * queries, work.head, work.batch);
      }
    }
  }
  if (work.first >= work.blocks && starts) await_last_kernel();
}

// One warpgroup's 64 keys.
struct Worker {
  u32 base;
  const Barriers &bar;
  const Problem &problem;
  const Work &work;
  int group;
  int warp;
  int lane;

  float dk[d / 2];
  float dv[d / 2];

  // Starts sums = A B^T with this warpgroup's rows of K or V on the left and Q or dO on the right (Eq. 13 and 16).
  DEVICE void start_scores(float (&sums)[queries / 2], u32 left, u32 right) {
#pragma unroll
    for (int step = 0; step < d / 16; ++step) {
      const u32 panel = 16 * step / columns, within = 32 * step - panel * row_bytes;
      Wgmma<queries>::template shared<0, 0>(
          sums, descriptor<row_bytes>(base + left + 64 * row_bytes * group + panel * kv_panel + within, 16),
          descriptor<row_bytes>(base + right + panel * q_panel + within, 16), step != 0);
    }
    wgmma_commit();
  }

  // Starts sums += A B with P^T or dS^T on the left, from registers, and dO or Q on the right (Eq. 15 and 19).
  DEVICE void start_gradient(float (&sums)[d / 2], const u32 (&left)[queries / 4], u32 right) {
#pragma unroll
    for (int step = 0; step < queries / 16; ++step) {
      const u64 operand = descriptor<row_bytes>(base + right + 2 * step * Layout::group_bytes, q_panel);
      Wgmma<d>::template registers<1>(sums, left[4 * step], left[4 * step + 1], left[4 * step + 2], left[4 * step + 3],
                                      operand, 1);
    }
    wgmma_commit();
  }

  // Starts this warpgroup's part of dQ = dS K (Eq. 18).
  DEVICE void start_dq(float (&sums)[dq_sums_a_thread], u32 ds) {
    const u32 left = base + ds + (queries == 128 ? group * ds_panel : 0);
    const u32 right = base + k_at + (queries == 128 ? 0 : group * kv_panel);
#pragma unroll
    for (int step = 0; step < keys / 16; ++step) {
      Wgmma<dq_columns>::template shared<1, 1>(
          sums, descriptor<128>(left + 2 * step * Wide::group_bytes, ds_panel),
          descriptor<row_bytes>(right + 2 * step * Layout::group_bytes, kv_panel), step != 0);
    }
    wgmma_commit();
  }

  // Only if the buffer is filled again: the copying warp does not wait for the last blocks.
  DEVICE void release(u32 barrier, int block) {
    if (block + stages < work.blocks) named_arrive(barrier, 256 + 32);
  }

  // P^T = exp(S^T - lse) (Eq. 14) in place. A missing query has an lse of infinity.
  template <bool Masked> DEVICE void soften(float (&s)[queries / 2], u32 lse, int block) {
    const int key = work.key + 64 * group + 16 * warp + lane / 4;
    const int query = block * queries + 2 * (lane % 4);
#pragma unroll
    for (int i = 0; i < queries / 2; i += 4) {
      const float2 shift = load_pair(lse + 4 * (2 * i + 2 * (lane % 4)));
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        // Queries from this column on attend to the key. For a missing key, exp(0 - lse) may be infinite, and infinity
        // times its row of zeros is NaN.
        const bool there = key + 8 * r < problem.n_keys;
        const int seen = !there ? queries : FLASH_CAUSAL ? key + 8 * r - query : 0;
        s[i + 2 * r] = Masked && 2 * i < seen ? 0.0f : exp2_fast(fmaf(s[i + 2 * r], problem.scale_log2, -shift.x));
        s[i + 2 * r + 1] =
            Masked && 2 * i + 1 < seen ? 0.0f : exp2_fast(fmaf(s[i + 2 * r + 1], problem.scale_log2, -shift.y));
      }
    }
  }

  template <bool Masked> DEVICE void step(int block) {
    const u32 count = block - work.first, parity = count / stages % 2;
    const int stage = count % stages;
    const u32 q = q_at + stage * q_bytes, d_o = do_at + stage * q_bytes, ds = ds_at + count % 2 * ds_bytes;
    const u32 lse = base + stats_at + stage * 2 * row_stats, delta = lse + row_stats;
    float s[queries / 2], dp[queries / 2];
    barrier_wait(bar.q_full(stage), parity);
    barrier_wait(bar.do_full(stage), parity);
    hold(s);
    hold(dp);
    wgmma_fence();
    start_scores(s, k_at, q);
    start_scores(dp, v_at, d_o);
    wgmma_wait<1>();
    hold(s);
    soften<Masked>(s, lse, block);
    u32 p[queries / 4];
#pragma unroll
    for (int i = 0; i < queries / 4; ++i) p[i] = pack(s[2 * i], s[2 * i + 1]);
    wgmma_wait<0>();
    hold(dp);
    // dS^T = P^T * (dP^T - D) (Eq. 17).
    u32 ds_pairs[queries / 4];
#pragma unroll
    for (int i = 0; i < queries / 2; i += 4) {
      const float2 shift = load_pair(delta + 4 * (2 * i + 2 * (lane % 4)));
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int at = i + 2 * r;
        ds_pairs[at / 2] = pack(s[at] * (dp[at] - shift.x), s[at + 1] * (dp[at + 1] - shift.y));
      }
    }
    store_ds(ds_pairs, base + ds);
    fence_to_async();
    hold(dv);
    hold(p);
    wgmma_fence();
    start_gradient(dv, p, d_o);
    // Both warpgroups have written their rows of dS, and have multiplied those of the step before last.
    named_sync(both_barrier, 256);
    float dq[dq_sums_a_thread];
    hold(dq);
    hold(dk);
    hold(ds_pairs);
    wgmma_fence();
    start_dq(dq, ds);
    start_gradient(dk, ds_pairs, q);
    wgmma_wait<2>();
    hold(dv);
    hold(p);
    release(do_free_barrier + stage, block);
    wgmma_wait<1>();
    hold(dq);
    add_dq(dq, block);
    wgmma_wait<0>();
    hold(dk);
    hold(ds_pairs);
    release(q_free_barrier + stage, block);
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

  DEVICE void add_dq(const float (&dq)[dq_sums_a_thread], int block) {
    const int thread = 32 * warp + lane;
    float *sums = problem.dq_sums + (work.rows + static_cast<long long>(block) * queries) * d +
                  group * (128 * dq_sums_a_thread) + 4 * thread;
#pragma unroll
    for (int i = 0; i < dq_sums_a_thread; i += 4) {
      add_to_global(sums + 128 * i, dq[i], dq[i + 1], dq[i + 2], dq[i + 3]);
    }
  }

  DEVICE void run() {
#pragma unroll
    for (int i = 0; i < d / 2; ++i) dk[i] = dv[i] = 0.0f;
    barrier_wait(bar.k_full(), 0);
    barrier_wait(bar.v_full(), 0);
    int block = work.first;
    // Up to this block, some query does not attend to this warpgroup's last key.
    int whole = FLASH_CAUSAL ? (work.key + 64 * group + 63 + queries - 1) / queries : 0;
    if (work.key + keys > problem.n_keys) whole = work.blocks;
    for (; block < min(whole, work.blocks); ++block) step<true>(block);
    for (; block < work.blocks; ++block) step<false>(block);
  }

  // Writes 64 rows of one gradient through shared memory at offset `at`.
  DEVICE void store(const float (&sums)[d / 2], float scale, u32 at, const TensorMap &map) {
    const u32 at_row = 64 * group + 16 * warp + lane % 8 + 8 * (lane / 8 % 2), half = lane / 16;
#pragma unroll
    for (int chunk = 0; chunk < d / 16; ++chunk) {
      const u32 panel = 16 * chunk / columns, within = 32 * chunk - panel * row_bytes + 16 * half;
      u32 pairs[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) pairs[i] = pack(sums[8 * chunk + 2 * i] * scale, sums[8 * chunk + 2 * i + 1] * scale);
      store_matrices(base + at + panel * kv_panel + Layout::place(at_row * row_bytes + within), pairs[0], pairs[1],
                     pairs[2], pairs[3]);
    }
    fence_to_async();
    named_sync(both_barrier, 256);
    if (warp == 0 && lane == 0) {
#pragma unroll
      for (int panel = 0; panel < panels; ++panel) {
        copy_out(&map, base + at + panel * kv_panel + 64 * row_bytes * group, panel * columns, work.key + 64 * group,
                 work.head, work.batch);
      }
      copies_out_commit();
    }
  }

#if FLASH_SPLIT
  // Writes this warpgroup's 64 rows of one gradient's part.
  DEVICE void store_part(const float (&sums)[d / 2], float *to) {
    const int key = work.key + 64 * group + 16 * warp + lane / 4;
    const long long heads = static_cast<long long>(problem.heads) * problem.batch;
    const long long head = work.part * heads + static_cast<long long>(work.batch) * problem.heads + work.head;
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
#endif

  DEVICE void finish(const TensorMap &dk_map, const TensorMap &dv_map) {
    // Both warpgroups multiply by K: it may be overwritten after both are done.
    named_sync(both_barrier, 256);
    store(dv, 1.0f, v_at, dv_map);
    store(dk, problem.scale, k_at, dk_map);
    if (warp == 0 && lane == 0) copies_out_wait_read();
  }
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
  constexpr int width = 8, lanes = d / width, rows = 256 / lanes;
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
      constexpr float log2e = 1.44269504088896340736f, infinity = __builtin_bit_cast(float, 0x7F800000);
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
                      group * (128 * dq_sums_a_thread) + 4 * thread;
  const int row = first + (queries == 128 ? 64 * group : 0) + 16 * warp + lane / 4;
  const int column = (queries == 128 ? 0 : dq_columns * group) + 2 * (lane % 4);
#pragma unroll
  for (int i = 0; i < dq_sums_a_thread; i += 4) {
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
// Adds the parts of each row of dk and dv (batch, heads, n_keys, d). A thread has four of FLASH_D columns; 256 threads a block.
extern "C" __global__ void __launch_bounds__(256)
    flash_backward_combine(const __grid_constant__ Problem problem, const __grid_constant__ Parts parts, element *dk,
                           element *dv) {
  allow_next_kernel();
  await_last_kernel();
  constexpr int lanes = d / 4;
  const int key = static_cast<int>(blockIdx.x * (256 / lanes) + threadIdx.x / lanes), column = threadIdx.x % lanes * 4;
  if (key >= problem.n_keys || column >= problem.d) return;
  const long long heads = static_cast<long long>(problem.heads) * problem.batch;
  const long long at = (static_cast<long long>(blockIdx.z) * problem.heads + blockIdx.y) * problem.n_keys + key;
  const int seen = (problem.n_queries + queries - 1) / queries - Work::first_seen(key / keys * keys);
  const int count = (seen + parts.blocks - 1) / parts.blocks;
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
  const Work work(problem, parts);
  if (threadIdx.x < 128) {
    fewer_registers<copier_registers>();
    if (threadIdx.x < 32) copy(base, bar, work, problem, q, k, v, d_o);
  } else {
    more_registers<worker_registers>();
    // Through a shuffle, so that the compiler knows the value is uniform in a warp.
    const int warp = __shfl_sync(0xFFFFFFFF, static_cast<int>(threadIdx.x) / 32, 0);
    Worker worker{base, bar, problem, work, warp / 4 - 1, warp % 4, static_cast<int>(threadIdx.x) % 32};
    worker.run();
#if FLASH_SPLIT
    worker.store_part(worker.dk, parts.dk);
    worker.store_part(worker.dv, parts.dv);
#else
    worker.finish(dk, dv);
#endif
  }
}
