// CPU kernels of a step: attention through block tables, RMSNorm, rotary embedding, SiLU gate.
//
// Plain C++ with GCC's vector extensions (Clang has them too) and OpenMP; no torch, no intrinsics,
// so that it builds in seconds with whatever compiler is there and fits the processor it is built
// on. workers/model/native/library.py builds it and declares every function below; torch code of
// the same meaning stands in workers/model/fused.py and attention/packed.py.
//
// Sums and exponentials are in float32, whatever the tensors hold.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace {

constexpr int W = 16;         // floats in a vector
constexpr int KEYS = 64;      // keys in a tile, a multiple of W
constexpr int MAX_ROWS = 64;  // query rows (queries times heads of a group) in a tile
constexpr int MAX_DIM = 256;  // of a head
constexpr int LINE = 64;      // bytes of a cache line

typedef float vec __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t uvec __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint16_t hvec __attribute__((vector_size(32), aligned(2), may_alias));

struct bf16 {
  uint16_t bits;
};

inline vec splat(float x) { return x - vec{}; }
inline vec load(const float* p) { return *reinterpret_cast<const vec*>(p); }
inline vec load(const bf16* p) {
  const hvec half = *reinterpret_cast<const hvec*>(p);
  return reinterpret_cast<vec>(__builtin_convertvector(half, uvec) << 16);
}
inline void store(float* p, vec x) { *reinterpret_cast<vec*>(p) = x; }
inline void store(bf16* p, vec x) {
  uvec bits = reinterpret_cast<uvec>(x);
  const uvec rounded = bits + 0x7fff + ((bits >> 16) & 1);  // to the nearest, ties to even
  bits = x == x ? rounded : uvec{} + 0x7fc00000;            // NaN stays NaN
  *reinterpret_cast<hvec*>(p) = __builtin_convertvector(bits >> 16, hvec);
}
inline float sum(vec x) {
  float parts[W], total = 0;
  store(parts, x);
  for (int i = 0; i < 8; i++) parts[i] += parts[i + 8];
  for (int i = 0; i < 4; i++) parts[i] += parts[i + 4];
  for (int i = 0; i < 4; i++) total += parts[i];
  return total;
}

// Lanes in groups of G: of a and b in turn, the even groups (lows) or the odd ones (highs).
#define LOWS(a, b, G) __builtin_shufflevector(a, b, L(0, G), L(1, G), L(2, G), L(3, G), L(4, G), \
    L(5, G), L(6, G), L(7, G), L(8, G), L(9, G), L(10, G), L(11, G), L(12, G), L(13, G), L(14, G), \
    L(15, G))
#define HIGHS(a, b, G) __builtin_shufflevector(a, b, L(0, G) + G, L(1, G) + G, L(2, G) + G,       \
    L(3, G) + G, L(4, G) + G, L(5, G) + G, L(6, G) + G, L(7, G) + G, L(8, G) + G, L(9, G) + G,    \
    L(10, G) + G, L(11, G) + G, L(12, G) + G, L(13, G) + G, L(14, G) + G, L(15, G) + G)
// Where lane i comes from: group i / G of the output is group i / G, made even, of a or of b.
#define L(i, G) ((i) / (2 * G) * (2 * G) + (i) % G + ((i) / G % 2) * W)

// The sum of each of 16 vectors, as one vector: four levels, each adding neighbours' halves.
inline vec sums(vec* x) {
  for (int i = 0; i < 8; i++) x[i] = LOWS(x[i], x[i + 8], 8) + HIGHS(x[i], x[i + 8], 8);
  for (int i = 0; i < 4; i++) x[i] = LOWS(x[i], x[i + 4], 4) + HIGHS(x[i], x[i + 4], 4);
  for (int i = 0; i < 2; i++) x[i] = LOWS(x[i], x[i + 2], 2) + HIGHS(x[i], x[i + 2], 2);
  return LOWS(x[0], x[1], 1) + HIGHS(x[0], x[1], 1);
}

// Rows and columns of 16 vectors exchanged.
inline void transpose(vec* x) {
  vec y[W];
  for (int i = 0; i < 8; i++) y[i] = LOWS(x[i], x[i + 8], 8), y[i + 8] = HIGHS(x[i], x[i + 8], 8);
  for (int j = 0; j < W; j += 8)
    for (int i = j; i < j + 4; i++)
      x[i] = LOWS(y[i], y[i + 4], 4), x[i + 4] = HIGHS(y[i], y[i + 4], 4);
  for (int j = 0; j < W; j += 4)
    for (int i = j; i < j + 2; i++)
      y[i] = LOWS(x[i], x[i + 2], 2), y[i + 2] = HIGHS(x[i], x[i + 2], 2);
  for (int i = 0; i < W; i += 2) x[i] = LOWS(y[i], y[i + 1], 1), x[i + 1] = HIGHS(y[i], y[i + 1], 1);
}

inline vec max(vec a, vec b) { return a > b ? a : b; }

inline float largest(vec x) {
  float parts[W];
  store(parts, x);
  return *std::max_element(parts, parts + W);
}

// e^x within 2 units in the last place; 0 below -87, e^88 above 88, NaN for NaN. Range reduction by ln 2 in two
// parts and the polynomial of Cephes' expf.
inline vec exp(vec x) {
  const vec floor = splat(-87.0f), ceiling = splat(88.0f);
  const vec bounded = max(x, floor), y = bounded > ceiling ? ceiling : bounded;
  const vec shifted = y * 1.44269504088896341f + 12582912.0f;  // rounds to an integer
  const vec n = shifted - 12582912.0f;
  const vec r = y - n * 0.693359375f + n * 2.12194440e-4f;
  vec p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const ivec power = (__builtin_convertvector(n, ivec) + 127) << 23;
  const vec found = x < floor ? vec{} : p * reinterpret_cast<vec>(power);
  return x == x ? found : x;  // NaN shows
}

struct Flags {
  float scale, softcap;   // softcap 0: none
  int64_t window;         // 0: none
  const float* sinks;     // (num_heads,) or null
};

// One tile of queries of one sequence, and some KV heads with all their query heads.
template <class T>
struct Tile {
  const T* query;         // first query, first head
  int64_t query_stride;   // from token to token
  T* out;
  int64_t out_stride;
  const T* keys;          // of the first KV head: slot s begins at keys + s * key_stride
  const T* values;
  int64_t key_stride, value_stride;
  const int64_t* slots;   // of the sequence's positions
  int64_t position;       // of the first query
  int num_queries, group, kv_heads, k_dim, v_dim, first_head;
};

// Asks for a vector of the cache, so that it is near when its turn comes: one head's keys of one
// token are too short a piece for the processor to foresee the next.
template <class T>
inline void fetch(const T* x, int dim) {
  for (int d = 0; d < dim; d += LINE / sizeof(T)) __builtin_prefetch(x + d, 0, 2);
}

// Scores of R rows against up to KEYS keys laid out by dimension: scores (R, KEYS).
template <int R>
void scores_by_dim(const float* query, const float* keys, int k_dim, float* scores) {
  vec acc[R][KEYS / W] = {};
  for (int d = 0; d < k_dim; d++) {
    for (int j = 0; j < KEYS / W; j++) {
      const vec key = load(keys + d * KEYS + j * W);
      for (int i = 0; i < R; i++) acc[i][j] += query[i * k_dim + d] * key;
    }
  }
  for (int i = 0; i < R; i++)
    for (int j = 0; j < KEYS / W; j++) store(scores + i * KEYS + j * W, acc[i][j]);
}

// The same for R rows (few) and 16 keys as they lie in the cache: products of each key, then one
// tree that adds up all 16 at once. `coming`: keys of which the next call will be.
template <class T, int R>
void scores_by_key(const float* query, const T* const* keys, const T* const* coming, int k_dim,
                   float* scores) {
  vec acc[R][W];
  for (int key = 0; key < W; key++) {
    fetch(coming[key], k_dim);
    for (int i = 0; i < R; i++) acc[i][key] = vec{};
    for (int d = 0; d < k_dim; d += W) {
      const vec part = load(keys[key] + d);
      for (int i = 0; i < R; i++) acc[i][key] += load(query + i * k_dim + d) * part;
    }
  }
  for (int i = 0; i < R; i++) store(scores + i * KEYS, sums(acc[i]));
}

template <class T>
void scores_by_key(const float* query, int rows, const T* const* keys, const T* const* coming,
                   int k_dim, float* scores) {
  switch (rows) {
    case 1: return scores_by_key<T, 1>(query, keys, coming, k_dim, scores);
    case 2: return scores_by_key<T, 2>(query, keys, coming, k_dim, scores);
    case 3: return scores_by_key<T, 3>(query, keys, coming, k_dim, scores);
    default: return scores_by_key<T, 4>(query, keys, coming, k_dim, scores);
  }
}

// out (R, N * 16 of v_dim) += weights (R, KEYS) times the values of num_keys keys. `coming`: values
// of which a later call will be, or null.
template <class T, int R, int N>
void add_values(const float* weights, const T* const* values, const T* const* coming, int num_keys,
                int v_dim, float* out, int first) {
  vec acc[R][N];
  for (int i = 0; i < R; i++)
    for (int j = 0; j < N; j++) acc[i][j] = load(out + i * v_dim + first + j * W);
  for (int key = 0; key < num_keys; key++) {
    if (coming) fetch(coming[key] + first, N * W);
    for (int j = 0; j < N; j++) {
      const vec value = load(values[key] + first + j * W);
      for (int i = 0; i < R; i++) acc[i][j] += weights[i * KEYS + key] * value;
    }
  }
  for (int i = 0; i < R; i++)
    for (int j = 0; j < N; j++) store(out + i * v_dim + first + j * W, acc[i][j]);
}

template <class T, int R>
void add_values(const float* weights, const T* const* values, const T* const* coming, int num_keys,
                int v_dim, float* out) {
  int first = 0;
  for (; first + 4 * W <= v_dim; first += 4 * W)
    add_values<T, R, 4>(weights, values, coming, num_keys, v_dim, out, first);
  for (; first < v_dim; first += W)
    add_values<T, R, 1>(weights, values, coming, num_keys, v_dim, out, first);
}

template <class T>
void add_values(int rows, const float* weights, const T* const* values, const T* const* coming,
                int num_keys, int v_dim, float* out) {
  switch (rows) {
    case 1: return add_values<T, 1>(weights, values, coming, num_keys, v_dim, out);
    case 2: return add_values<T, 2>(weights, values, coming, num_keys, v_dim, out);
    case 3: return add_values<T, 3>(weights, values, coming, num_keys, v_dim, out);
    default: return add_values<T, 4>(weights, values, coming, num_keys, v_dim, out);
  }
}

// What is known of one KV head's rows (queries times heads of the group, filled up to a multiple of
// 4) over the keys seen so far: the online softmax of Milakov & Gimelshein 2018.
struct Rows {
  float *query, *out;       // (rows, k_dim), scaled; (rows, v_dim)
  float *highest, *total;   // (rows,): the highest score, the sum of e^(score - highest)
};

// Keys of one KV head and their values, at most KEYS; beyond the last it is there again.
template <class T>
struct Keys {
  const T *keys[KEYS], *values[KEYS];

  Keys(const Tile<T>& tile, int head, int64_t begin, int64_t end) {
    for (int key = 0; key < KEYS; key++) {
      const int64_t slot = tile.slots[std::min(begin + key, end - 1)];
      keys[key] = tile.keys + slot * tile.key_stride + head * tile.k_dim;
      values[key] = tile.values + slot * tile.value_stride + head * tile.v_dim;
    }
  }
};

// Scores (rows, KEYS) of all rows against `num_keys` keys.
template <class T>
void score(const Tile<T>& tile, const float* query, int rows, const T* const* keys,
           const T* const* coming, int num_keys, float* scores) {
  alignas(64) float by_dim[MAX_DIM * KEYS];
  if (rows <= 4) {
    for (int key = 0; key < num_keys; key += W)
      scores_by_key(query, rows, keys + key, coming + key, tile.k_dim, scores + key);
    return;
  }
  for (int key = 0; key < KEYS; key++) fetch(coming[key], tile.k_dim);
  for (int key = 0; key < KEYS; key += W)
    for (int d = 0; d < tile.k_dim; d += W) {
      vec block[W];
      for (int i = 0; i < W; i++) block[i] = load(keys[key + i] + d);
      transpose(block);
      for (int i = 0; i < W; i++) store(by_dim + (d + i) * KEYS + key, block[i]);
    }
  for (int r = 0; r < rows; r += 4)
    scores_by_dim<4>(query + r * tile.k_dim, by_dim, tile.k_dim, scores + r * KEYS);
}

// Turns a row of scores at positions `begin ..` into weights, and shrinks what was summed before.
template <class T>
void weigh(const Tile<T>& tile, const Flags& flags, int r, int64_t begin, int num_keys, float* row,
           const Rows& rows) {
  const int64_t position = tile.position + r / tile.group;
  const int seen = int(std::min<int64_t>(num_keys, position + 1 - begin));
  const int64_t oldest = flags.window ? position + 1 - flags.window : 0;
  const int hidden = int(std::max<int64_t>(0, std::min<int64_t>(KEYS, oldest - begin)));
  if (flags.softcap != 0)
    for (int key = hidden; key < seen; key++)
      row[key] = std::tanh(row[key] / flags.softcap) * flags.softcap;
  constexpr float never = -std::numeric_limits<float>::infinity();
  for (int key = 0; key < hidden; key++) row[key] = never;
  for (int key = std::max(seen, 0); key < KEYS; key++) row[key] = never;
  vec most = load(row);
  for (int j = 1; j < KEYS / W; j++) most = max(most, load(row + j * W));
  const float highest = std::max(rows.highest[r], largest(most));
  if (highest == never) {  // this row sees nothing here
    std::memset(row, 0, KEYS * sizeof(float));
    return;
  }
  vec added = {};
  for (int j = 0; j < KEYS / W; j++) {
    const vec weight = exp(load(row + j * W) - highest);
    store(row + j * W, weight);
    added += weight;
  }
  if (highest != rows.highest[r]) {
    const float shrink = std::exp(rows.highest[r] - highest);
    float* out = rows.out + r * tile.v_dim;
    for (int d = 0; d < tile.v_dim; d += W) store(out + d, load(out + d) * shrink);
    rows.total[r] *= shrink;
    rows.highest[r] = highest;
  }
  rows.total[r] += sum(added);
}

template <class T>
void begin_rows(const Tile<T>& tile, const Flags& flags, int head, int padded, const Rows& rows) {
  for (int r = 0; r < padded; r++) {
    const bool is_real = r < tile.num_queries * tile.group;
    const int query_head = head * tile.group + r % tile.group;
    const T* from = tile.query + (r / tile.group) * tile.query_stride + query_head * tile.k_dim;
    float *query = rows.query + r * tile.k_dim, *out = rows.out + r * tile.v_dim;
    for (int d = 0; d < tile.k_dim; d += W)
      store(query + d, is_real ? load(from + d) * flags.scale : vec{});
    std::memset(out, 0, tile.v_dim * sizeof(float));
    const bool has_sink = flags.sinks && is_real;
    rows.highest[r] = has_sink ? flags.sinks[tile.first_head + query_head]
                               : -std::numeric_limits<float>::infinity();
    rows.total[r] = has_sink;
  }
}

template <class T>
void end_rows(const Tile<T>& tile, int head, const Rows& rows) {
  for (int r = 0; r < tile.num_queries * tile.group; r++) {
    const int query_head = head * tile.group + r % tile.group;
    T* to = tile.out + (r / tile.group) * tile.out_stride + query_head * tile.v_dim;
    const float* out = rows.out + r * tile.v_dim;
    for (int d = 0; d < tile.v_dim; d += W) store(to + d, load(out + d) / rows.total[r]);
  }
}

// All keys that a tile sees, some at a time; of those all heads, which lie side by side.
template <class T>
void attend_tile(const Tile<T>& tile, const Flags& flags) {
  alignas(64) float query[MAX_ROWS * MAX_DIM], out[MAX_ROWS * MAX_DIM], scores[MAX_ROWS * KEYS];
  float highest[MAX_ROWS], total[MAX_ROWS];
  const int num_rows = tile.num_queries * tile.group, padded = (num_rows + 3) / 4 * 4;
  const auto rows_of = [&](int head) {
    const int first = head * padded;
    return Rows{query + first * tile.k_dim, out + first * tile.v_dim, highest + first,
                total + first};
  };
  for (int head = 0; head < tile.kv_heads; head++)
    begin_rows(tile, flags, head, padded, rows_of(head));
  const int64_t end = tile.position + tile.num_queries;
  const int64_t first = flags.window ? std::max<int64_t>(0, tile.position + 1 - flags.window) : 0;
  for (int64_t begin = first; begin < end; begin += KEYS) {
    const int num_keys = int(std::min<int64_t>(KEYS, end - begin));
    for (int head = 0; head < tile.kv_heads; head++) {
      const Keys<T> now(tile, head, begin, end);
      const Keys<T> coming(tile, head, std::min(begin + KEYS, end - 1), end);
      const Rows rows = rows_of(head);
      score(tile, rows.query, num_rows <= 4 ? num_rows : padded, now.keys, coming.keys, num_keys,
            scores);
      for (int r = 0; r < num_rows; r++)
        weigh(tile, flags, r, begin, num_keys, scores + r * KEYS, rows);
      for (int r = 0; r < num_rows; r += 4)
        add_values(num_rows - r, scores + r * KEYS, now.values, r ? nullptr : coming.values,
                   num_keys, tile.v_dim, rows.out + r * tile.v_dim);
    }
  }
  for (int head = 0; head < tile.kv_heads; head++) end_rows(tile, head, rows_of(head));
}

// How many KV heads a tile takes: as many as fit, where there are tiles enough for all threads.
inline int64_t heads_at_once(const int64_t* tiles, int64_t num_tiles, int64_t kv_heads, int group,
                             int num_threads) {
  if (num_tiles < 4 * num_threads) return 1;
  int64_t most = 1;
  for (int64_t i = 0; i < num_tiles; i++) most = std::max(most, tiles[4 * i + 1]);
  int64_t found = std::min<int64_t>(kv_heads, MAX_ROWS / ((most * group + 3) / 4 * 4));
  while (kv_heads % found) found--;
  return found;
}

template <class T>
void attend(const int64_t* tiles, int64_t num_tiles, const int64_t* slots, const T* query,
            int64_t query_stride, const T* keys, const T* values, T* out, int64_t num_heads,
            int64_t kv_heads, int64_t k_dim, int64_t v_dim, const Flags& flags, int num_threads) {
  const int group = int(num_heads / kv_heads);
  const int64_t at_once = heads_at_once(tiles, num_tiles, kv_heads, group, num_threads);
#pragma omp parallel for collapse(2) schedule(dynamic, 1) num_threads(num_threads)
  for (int64_t i = 0; i < num_tiles; i++) {
    for (int64_t head = 0; head < kv_heads; head += at_once) {
      const int64_t* part = tiles + 4 * i;  // first row, queries, position, begin in slots
      Tile<T> tile;
      tile.query = query + part[0] * query_stride + head * group * k_dim;
      tile.query_stride = query_stride;
      tile.out = out + part[0] * num_heads * v_dim + head * group * v_dim;
      tile.out_stride = num_heads * v_dim;
      tile.keys = keys + head * k_dim;
      tile.values = values + head * v_dim;
      tile.key_stride = kv_heads * k_dim;
      tile.value_stride = kv_heads * v_dim;
      tile.slots = slots + part[3];
      tile.position = part[2];
      tile.num_queries = int(part[1]);
      tile.group = group;
      tile.kv_heads = int(at_once);
      tile.k_dim = int(k_dim);
      tile.v_dim = int(v_dim);
      tile.first_head = int(head * group);
      attend_tile(tile, flags);
    }
  }
}

template <class T>
void norm_row(const T* x, const T* weight, T* out, int64_t dim, float eps) {
  vec squares = {};
  for (int64_t d = 0; d < dim; d += W) squares += load(x + d) * load(x + d);
  const float factor = 1.0f / std::sqrt(sum(squares) / dim + eps);
  for (int64_t d = 0; d < dim; d += W) store(out + d, load(x + d) * factor * load(weight + d));
}

template <class T>
void rms_norm(const T* x, const T* weight, T* out, int64_t rows, int64_t dim, float eps,
              int num_threads) {
#pragma omp parallel for num_threads(num_threads)
  for (int64_t r = 0; r < rows; r++) norm_row(x + r * dim, weight, out + r * dim, dim, eps);
}

// One head: the first `rotary` dimensions turn as two halves, by cos and sin (rotary,).
template <class T>
void rotate_head(T* x, const T* cos, const T* sin, int64_t rotary) {
  const int64_t half = rotary / 2;
  for (int64_t d = 0; d < half; d += W) {
    const vec a = load(x + d), b = load(x + half + d);
    store(x + d, a * load(cos + d) - b * load(sin + d));
    store(x + half + d, b * load(cos + half + d) + a * load(sin + half + d));
  }
}

// Rows of queries, keys and values side by side: queries and keys are normalised where weights are
// given and turned in place, keys and values go to their slots of the cache.
template <class T>
void rotate_and_keep(T* qkv, int64_t rows, int64_t num_heads, int64_t kv_heads, int64_t dim,
                     const T* cos, const T* sin, int64_t rotary, const T* q_norm, const T* k_norm,
                     float eps, const int64_t* slots, T* keys, T* values, int num_threads) {
  const int64_t stride = (num_heads + 2 * kv_heads) * dim;
#pragma omp parallel for num_threads(num_threads)
  for (int64_t r = 0; r < rows; r++) {
    T* row = qkv + r * stride;
    for (int64_t head = 0; head < num_heads + kv_heads; head++) {
      T* x = row + head * dim;
      const T* norm = head < num_heads ? q_norm : k_norm;
      if (norm) norm_row(x, norm, x, dim, eps);
      rotate_head(x, cos + r * rotary, sin + r * rotary, rotary);
    }
    const int64_t width = kv_heads * dim;
    std::memcpy(keys + slots[r] * width, row + num_heads * dim, width * sizeof(T));
    std::memcpy(values + slots[r] * width, row + num_heads * dim + width, width * sizeof(T));
  }
}

// gate_up (rows, 2 * dim) -> silu(gate) * up (rows, dim).
template <class T>
void silu_gate(const T* gate_up, T* out, int64_t rows, int64_t dim, int num_threads) {
#pragma omp parallel for num_threads(num_threads)
  for (int64_t r = 0; r < rows; r++) {
    const T *gate = gate_up + 2 * r * dim, *up = gate + dim;
    for (int64_t d = 0; d < dim; d += W) {
      const vec x = load(gate + d);
      store(out + r * dim + d, x / (1.0f + exp(-x)) * load(up + d));
    }
  }
}

}  // namespace

#define EXPORT(T, name)                                                                          \
  extern "C" void attend_##name(                                                                 \
      const int64_t* tiles, int64_t num_tiles, const int64_t* slots, const T* query,             \
      int64_t query_stride, const T* keys, const T* values, T* out, int64_t num_heads,           \
      int64_t kv_heads, int64_t k_dim, int64_t v_dim, float scale, float softcap,                \
      int64_t window, const float* sinks, int num_threads) {                                     \
    attend<T>(tiles, num_tiles, slots, query, query_stride, keys, values, out, num_heads,        \
              kv_heads, k_dim, v_dim, Flags{scale, softcap, window, sinks}, num_threads);        \
  }                                                                                              \
  extern "C" void rms_norm_##name(const T* x, const T* weight, T* out, int64_t rows,             \
                                  int64_t dim, float eps, int num_threads) {                     \
    rms_norm<T>(x, weight, out, rows, dim, eps, num_threads);                                    \
  }                                                                                              \
  extern "C" void rotate_and_keep_##name(                                                        \
      T* qkv, int64_t rows, int64_t num_heads, int64_t kv_heads, int64_t dim, const T* cos,      \
      const T* sin, int64_t rotary, const T* q_norm, const T* k_norm, float eps,                 \
      const int64_t* slots, T* keys, T* values, int num_threads) {                               \
    rotate_and_keep<T>(qkv, rows, num_heads, kv_heads, dim, cos, sin, rotary, q_norm, k_norm,    \
                       eps, slots, keys, values, num_threads);                                   \
  }                                                                                              \
  extern "C" void silu_gate_##name(const T* gate_up, T* out, int64_t rows, int64_t dim,          \
                                   int num_threads) {                                            \
    silu_gate<T>(gate_up, out, rows, dim, num_threads);                                          \
  }

EXPORT(float, float32)
EXPORT(bf16, bfloat16)
