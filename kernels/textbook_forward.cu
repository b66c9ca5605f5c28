// FlashAttention-2's forward pass exactly as the handout writes it (Algorithm 1), to be read beside it: one thread block
// for each tile of queries, a single loop over the tiles of keys, plain float32 arithmetic.
//
//   for i = 1, ..., T_q                                    the launch: grid (T_q, batch), 128 threads a block
//     load Q_i; O_i = 0, l_i = 0, m_i = -inf               Q_i in shared memory; O_i, l_i, m_i in registers
//     for j = 1, ..., T_k
//       load K_j, V_j                                      shared memory
//       S     = Q_i K_j^T / sqrt(d)                        (1) registers
//       m_new = max(m_i, rowmax(S))                        (2)
//       P     = exp(S - m_new)                             (3) shared memory, rounded to V's type
//       l_i   = exp(m_i - m_new) l_i + rowsum(P)           (4)
//       O_i   = diag(exp(m_i - m_new)) O_i + P V_j         (5)
//       m_i   = m_new
//     O_i = diag(l_i)^-1 O_i                               (6)
//     L_i = m_i + log(l_i)                                 (7) the logsumexp of Eq. 12
//     write O_i (in the inputs' type), L_i (float32)
//
// The last tile of queries or keys may have fewer rows than a full tile. Its missing rows are read as zeros and not written.
// Scores of missing keys, like those of masked keys, are -inf. Every query sees key 0, which is in the first tile, so m_i is
// finite after the first tile.
//
// How the threads divide a tile: lib/textbook.cuh. Registers and shared memory as compiled: snapshots/kernels. This
// kernel is written to be understood; flash_forward.cu is the fast one.
//
// Set by src/attention/flash/textbook.rs: TEXTBOOK_D (16, 32, 64, 128), TEXTBOOK_TYPE (float, __nv_bfloat16, __half),
// TEXTBOOK_CAUSAL, TEXTBOOK_QUERIES (B_q), TEXTBOOK_KEYS (B_k), TEXTBOOK_SHARED (bytes of shared memory of a block).
#if !defined(TEXTBOOK_D) || !defined(TEXTBOOK_TYPE) || !defined(TEXTBOOK_CAUSAL) || !defined(TEXTBOOK_QUERIES) ||      \
    !defined(TEXTBOOK_KEYS) || !defined(TEXTBOOK_SHARED)
#error "textbook_forward.cu takes its shape from src/attention/flash/textbook.rs"
#endif

#include "lib/textbook.cuh"

namespace {

constexpr int B_q = TEXTBOOK_QUERIES;
constexpr int B_k = TEXTBOOK_KEYS;

struct Shared {
  Tile<B_q, d> Q;
  Tile<B_k, d> K, V;
  Tile<B_q, B_k> P;
};

static_assert(sizeof(Shared) <= TEXTBOOK_SHARED, "the launch gives it");

} // namespace

// q and o: (batch, n_queries, d); k and v: (batch, n_keys, d); lse: (batch, n_queries). scale = 1 / sqrt(d).
extern "C" __global__ void __launch_bounds__(threads)
    textbook_forward(const element *q, const element *k, const element *v, element *o, float *lse, int n_queries,
                     int n_keys, float scale) {
  extern __shared__ unsigned char memory[];
  Shared &tile = *reinterpret_cast<Shared *>(memory);
  const long long batch = blockIdx.y;
  q += batch * n_queries * d;
  k += batch * n_keys * d;
  v += batch * n_keys * d;
  o += batch * n_queries * d;
  lse += batch * n_queries;
  const int first_query = static_cast<int>(blockIdx.x) * B_q;

  load(tile.Q, q, first_query, n_queries);
  Part<B_q, d> O;
  O.clear();
  constexpr int rows = Part<B_q, d>::rows;
  float l[rows], m[rows];
#pragma unroll
  for (int r = 0; r < rows; ++r) l[r] = 0.0f, m[r] = -infinity;

  // The causal mask excludes every key after the tile's last query, so the loop stops early.
  const int keys_seen = TEXTBOOK_CAUSAL ? min(n_keys, first_query + B_q) : n_keys;
  for (int first_key = 0; first_key < keys_seen; first_key += B_k) {
    // All threads have read the previous tiles.
    __syncthreads();
    load(tile.K, k, first_key, n_keys);
    load(tile.V, v, first_key, n_keys);
    __syncthreads();

    Part<B_q, B_k> S = times_transposed(tile.Q, tile.K);
#pragma unroll
    for (int r = 0; r < rows; ++r) {
      const int query = first_query + S.row(r);
      float largest = -infinity;
#pragma unroll
      for (int c = 0; c < S.columns; ++c) {
        const int key = first_key + S.column(c);
        const bool is_hidden = key >= n_keys || (TEXTBOOK_CAUSAL && key > query);
        S.at[r][c] = is_hidden ? -infinity : S.at[r][c] * scale; // (1)
        largest = fmaxf(largest, S.at[r][c]);
      }
      const float m_new = fmaxf(m[r], row_max(largest)); // (2)
      float sum = 0.0f;
#pragma unroll
      for (int c = 0; c < S.columns; ++c) {
        const float P = expf(S.at[r][c] - m_new); // (3)
        sum += P;
        // As the handout asks: P.to(V.dtype) before the product.
        S.at[r][c] = static_cast<float>(static_cast<element>(P));
      }
      const float factor = expf(m[r] - m_new);
      l[r] = factor * l[r] + row_sum(sum); // (4)
#pragma unroll
      for (int c = 0; c < O.columns; ++c) O.at[r][c] *= factor;
      m[r] = m_new;
    }
    S.store(tile.P);
    __syncwarp();
    add_product(O, tile.P, tile.V); // (5)
  }

#pragma unroll
  for (int r = 0; r < rows; ++r) {
#pragma unroll
    for (int c = 0; c < O.columns; ++c) O.at[r][c] /= l[r]; // (6)
    const int query = first_query + O.row(r);
    if (lane() == 0 && query < n_queries) lse[query] = m[r] + logf(l[r]); // (7)
  }
  O.write(o, first_query, n_queries, 1.0f);
}
