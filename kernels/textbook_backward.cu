// FlashAttention-2's backward pass as the handout writes it (Eq. 13 to 19 by tiles), to be read beside it. It follows
// the handout's advice to compute the scores twice, once by tiles of keys and once by tiles of queries: one block owns each
// gradient, so nothing is added atomically and every result is bitwise reproducible.
//
//   D = rowsum(O * dO)                                     textbook_backward_rowsums: 8 threads a row
//
//   for j = 1, ..., T_k                                    textbook_backward_keys: grid (T_k, batch)
//     load K_j, V_j; dK_j = dV_j = 0                       shared memory; registers
//     for i = 1, ..., T_q
//       load Q_i, dO_i                                     shared memory
//       S^T   = K_j Q_i^T / sqrt(d)                        (13) registers
//       P^T   = exp(S^T - L_i)                             (14) shared memory
//       dV_j += P^T dO_i                                   (15)
//       dP^T  = V_j dO_i^T                                 (16) registers
//       dS^T  = P^T * (dP^T - D_i)                         (17) in P's place
//       dK_j += dS^T Q_i                                   (19) 1 / sqrt(d) at the end
//     write dK_j, dV_j
//
//   for i = 1, ..., T_q                                    textbook_backward_queries: grid (T_q, batch)
//     load Q_i, dO_i; dQ_i = 0
//     for j = 1, ..., T_k
//       load K_j, V_j
//       S, P, dP and dS again by (13), (14), (16), (17)
//       dQ_i += dS K_j                                     (18) 1 / sqrt(d) at the end
//     write dQ_i
//
// The first pass uses the transposed scores because a thread owns rows of a product: with S^T, the threads that own a row of
// dK_j or dV_j also have the probabilities that it is summed over.
//
// The last tile of queries or keys may have fewer rows than a full tile. Its missing rows are read as zeros and not written.
// Scores without a query or a key, and masked scores, are -inf, and their P is 0. Gradients are summed in float32 and rounded
// once, to the inputs' type.
//
// How the threads divide a tile: lib/textbook.cuh. Registers and shared memory as compiled: snapshots/kernels. These
// kernels are written to be understood; flash_backward.cu is the fast one.
//
// Set by src/attention/flash/textbook.rs: TEXTBOOK_D (16, 32, 64, 128), TEXTBOOK_TYPE (float, __nv_bfloat16, __half),
// TEXTBOOK_CAUSAL, TEXTBOOK_QUERIES (B_q), TEXTBOOK_KEYS (B_k), TEXTBOOK_SHARED (bytes of shared memory of a block).
#if !defined(TEXTBOOK_D) || !defined(TEXTBOOK_TYPE) || !defined(TEXTBOOK_CAUSAL) || !defined(TEXTBOOK_QUERIES) ||      \
    !defined(TEXTBOOK_KEYS) || !defined(TEXTBOOK_SHARED)
#error "textbook_backward.cu takes its shape from src/attention/flash/textbook.rs"
#endif

#include "lib/textbook.cuh"

// q, o, do and dq: (batch, n_queries, d); k, v, dk and dv: (batch, n_keys, d); lse and rowsums (D): (batch, n_queries).
struct Problem {
  const element *q, *k, *v, *o, *d_o;
  const float *lse;
  float *rowsums;
  element *dq, *dk, *dv;
  int n_queries;
  int n_keys;
  // 1 / sqrt(d)
  float scale;
  int unused;

  // The same of one batch alone.
  DEVICE void enter(long long batch) {
    const long long queries = batch * n_queries, keys = batch * n_keys;
    q += queries * d, o += queries * d, d_o += queries * d, dq += queries * d;
    k += keys * d, v += keys * d, dk += keys * d, dv += keys * d;
    lse += queries, rowsums += queries;
  }

  // Whether a score does not count.
  DEVICE bool hides(int query, int key) const {
    return query >= n_queries || key >= n_keys || (TEXTBOOK_CAUSAL && key > query);
  }
};

namespace {

constexpr int B_q = TEXTBOOK_QUERIES;
constexpr int B_k = TEXTBOOK_KEYS;

struct KeysShared {
  Tile<B_k, d> K, V;
  Tile<B_q, d> Q, dO;
  Tile<B_k, B_q> P;
};

struct QueriesShared {
  Tile<B_q, d> Q, dO;
  Tile<B_k, d> K, V;
  Tile<B_q, B_k> dS;
};

static_assert(sizeof(KeysShared) <= TEXTBOOK_SHARED && sizeof(QueriesShared) <= TEXTBOOK_SHARED, "the launch gives it");

} // namespace

// D = rowsum(O * dO); a block computes 16 rows, with eight lanes each.
extern "C" __global__ void __launch_bounds__(threads) textbook_backward_rowsums(Problem problem) {
  problem.enter(blockIdx.y);
  const int query = static_cast<int>(blockIdx.x) * groups + group();
  float sum = 0.0f;
  if (query < problem.n_queries) {
    for (int c = lane(); c < d; c += lanes) {
      sum += static_cast<float>(problem.o[query * d + c]) * static_cast<float>(problem.d_o[query * d + c]);
    }
  }
  sum = row_sum(sum);
  if (lane() == 0 && query < problem.n_queries) problem.rowsums[query] = sum;
}

// One block for each tile of keys: dK and dV.
extern "C" __global__ void __launch_bounds__(threads) textbook_backward_keys(Problem problem) {
  extern __shared__ unsigned char memory[];
  KeysShared &tile = *reinterpret_cast<KeysShared *>(memory);
  problem.enter(blockIdx.y);
  const int n_queries = problem.n_queries, n_keys = problem.n_keys;
  const int first_key = static_cast<int>(blockIdx.x) * B_k;

  load(tile.K, problem.k, first_key, n_keys);
  load(tile.V, problem.v, first_key, n_keys);
  Part<B_k, d> dK, dV;
  dK.clear();
  dV.clear();

  // Under the causal mask no query before the tile's first key attends to the tile, so the loop starts late.
  const int start = TEXTBOOK_CAUSAL ? first_key / B_q * B_q : 0;
  for (int first_query = start; first_query < n_queries; first_query += B_q) {
    // All threads have read the previous tiles.
    __syncthreads();
    load(tile.Q, problem.q, first_query, n_queries);
    load(tile.dO, problem.d_o, first_query, n_queries);
    __syncthreads();

    // Transposed: rows are keys, columns are queries.
    Part<B_k, B_q> P = times_transposed(tile.K, tile.Q);
    float L[P.columns], D[P.columns];
#pragma unroll
    for (int c = 0; c < P.columns; ++c) {
      const int query = first_query + P.column(c);
      L[c] = query < n_queries ? problem.lse[query] : 0.0f;
      D[c] = query < n_queries ? problem.rowsums[query] : 0.0f;
    }
#pragma unroll
    for (int r = 0; r < P.rows; ++r) {
#pragma unroll
      for (int c = 0; c < P.columns; ++c) {
        const bool is_hidden = problem.hides(first_query + P.column(c), first_key + P.row(r));
        const float S = is_hidden ? -infinity : P.at[r][c] * problem.scale; // (13)
        P.at[r][c] = expf(S - L[c]);                                        // (14)
      }
    }
    P.store(tile.P);
    __syncwarp();
    add_product(dV, tile.P, tile.dO); // (15)

    const Part<B_k, B_q> dP = times_transposed(tile.V, tile.dO); // (16)
    Part<B_k, B_q> dS;
#pragma unroll
    for (int r = 0; r < P.rows; ++r) {
#pragma unroll
      for (int c = 0; c < P.columns; ++c) dS.at[r][c] = P.at[r][c] * (dP.at[r][c] - D[c]); // (17)
    }
    // All lanes of the warp have read P.
    __syncwarp();
    dS.store(tile.P);
    __syncwarp();
    add_product(dK, tile.P, tile.Q); // (19)
  }

  dK.write(problem.dk, first_key, n_keys, problem.scale);
  dV.write(problem.dv, first_key, n_keys, 1.0f);
}

// One block for each tile of queries: dQ.
extern "C" __global__ void __launch_bounds__(threads) textbook_backward_queries(Problem problem) {
  extern __shared__ unsigned char memory[];
  QueriesShared &tile = *reinterpret_cast<QueriesShared *>(memory);
  problem.enter(blockIdx.y);
  const int n_queries = problem.n_queries, n_keys = problem.n_keys;
  const int first_query = static_cast<int>(blockIdx.x) * B_q;

  load(tile.Q, problem.q, first_query, n_queries);
  load(tile.dO, problem.d_o, first_query, n_queries);
  Part<B_q, d> dQ;
  dQ.clear();
  float L[dQ.rows], D[dQ.rows];
#pragma unroll
  for (int r = 0; r < dQ.rows; ++r) {
    const int query = first_query + dQ.row(r);
    L[r] = query < n_queries ? problem.lse[query] : 0.0f;
    D[r] = query < n_queries ? problem.rowsums[query] : 0.0f;
  }

  // The causal mask excludes every key after the tile's last query, so the loop stops early.
  const int keys_seen = TEXTBOOK_CAUSAL ? min(n_keys, first_query + B_q) : n_keys;
  for (int first_key = 0; first_key < keys_seen; first_key += B_k) {
    __syncthreads();
    load(tile.K, problem.k, first_key, n_keys);
    load(tile.V, problem.v, first_key, n_keys);
    __syncthreads();

    Part<B_q, B_k> dS = times_transposed(tile.Q, tile.K);
    const Part<B_q, B_k> dP = times_transposed(tile.dO, tile.V); // (16)
#pragma unroll
    for (int r = 0; r < dS.rows; ++r) {
#pragma unroll
      for (int c = 0; c < dS.columns; ++c) {
        const bool is_hidden = problem.hides(first_query + dS.row(r), first_key + dS.column(c));
        const float S = is_hidden ? -infinity : dS.at[r][c] * problem.scale; // (13)
        const float P = expf(S - L[r]);                                      // (14)
        dS.at[r][c] = P * (dP.at[r][c] - D[r]);                              // (17)
      }
    }
    dS.store(tile.dS);
    __syncwarp();
    add_product(dQ, tile.dS, tile.K); // (18)
  }

  dQ.write(problem.dq, first_query, n_queries, problem.scale);
}
