// Attention through block tables: reads each sequence's keys in place.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "thread_pool.h"
#include "vectors.h"

namespace {

constexpr int KEYS = 64;      // keys in a tile, a multiple of COLUMNS * W
constexpr int MAX_ROWS = 64;  // query rows (queries times heads of a group) in a tile
constexpr int MAX_DIM = 256;  // of a head
constexpr int LINE = 64;      // bytes of a cache line

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

// Prefetches a vector of the cache: one head's keys of one token are too short for the hardware
// prefetcher.
template <class T>
inline void fetch(const T* x, int dim) {
  for (int d = 0; d < dim; d += LINE / sizeof(T)) __builtin_prefetch(x + d, 0, 2);
}

// Scores of R rows against up to KEYS keys transposed by dimension: scores (R, KEYS).
template <int R>
void scores_by_dim(const float* query, const float* keys, int k_dim, float* scores) {
  for (int first = 0; first < KEYS; first += COLUMNS * W) {
    vec acc[R][COLUMNS] = {};
    for (int d = 0; d < k_dim; d++) {
      for (int j = 0; j < COLUMNS; j++) {
        const vec key = load(keys + d * KEYS + first + j * W);
        for (int i = 0; i < R; i++) acc[i][j] += query[i * k_dim + d] * key;
      }
    }
    for (int i = 0; i < R; i++)
      for (int j = 0; j < COLUMNS; j++) store(scores + i * KEYS + first + j * W, acc[i][j]);
  }
}

// The same for few rows R and W keys in the cache's layout: the products of each key, then one tree
// that sums all W at once. `coming`: the next call's keys, to prefetch.
template <class T, int R>
void scores_by_key(const float* query, const T* const* keys, const T* const* coming, int k_dim,
                   float* scores) {
  vec acc[R][W];
#ifdef HAS_PAIRS
  if constexpr (std::is_same_v<T, bf16>) {
    if (k_dim % (2 * W) == 0) {
      pairs rows[R][MAX_DIM / (2 * W)];
      for (int i = 0; i < R; i++)
        for (int d = 0; d < k_dim; d += 2 * W)
          rows[i][d / (2 * W)] = round_pairs(query + i * k_dim + d);  // bfloat16 before: exact
      for (int key = 0; key < W; key++) {
        fetch(coming[key], k_dim);
        for (int i = 0; i < R; i++) acc[i][key] = vec{};
        for (int d = 0; d < k_dim; d += 2 * W) {
          const pairs part = load_pairs(keys[key] + d);
          for (int i = 0; i < R; i++)
            acc[i][key] = add_products(acc[i][key], rows[i][d / (2 * W)], part);
        }
      }
      for (int i = 0; i < R; i++) store(scores + i * KEYS, sums(acc[i]));
      return;
    }
  }
#endif
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
// of a later call to prefetch, or null.
template <class T, int R, int N>
void add_values(const float* weights, const T* const* values, const T* const* coming, int num_keys,
                int v_dim, float* out, int first) {
  vec acc[R][N];
  for (int i = 0; i < R; i++)
    for (int j = 0; j < N; j++) acc[i][j] = load(out + i * v_dim + first + j * W);
  int key = 0;
#ifdef HAS_PAIRS
  if constexpr (std::is_same_v<T, bf16> && N % 2 == 0) {
    alignas(64) uint32_t two[R][KEYS / 2];  // weights of neighbours; 0 beyond the last key
    for (int i = 0; i < R; i++)
      for (int k = 0; k < KEYS; k += 2 * W) {
        const pairs rounded = round_pairs(weights + i * KEYS + k);
        std::memcpy(&two[i][k / 2], &rounded, sizeof rounded);
      }
    for (; key < num_keys; key += 2) {
      if (coming) fetch(coming[key] + first, N * W), fetch(coming[key + 1] + first, N * W);
      for (int j = 0; j < N; j += 2) {
        pairs part[2];
        interleave(load_pairs(values[key] + first + j * W),
                   load_pairs(values[key + 1] + first + j * W), &part[0], &part[1]);
        for (int i = 0; i < R; i++)
          for (int k = 0; k < 2; k++)
            acc[i][j + k] = add_products(acc[i][j + k], repeat(&two[i][key / 2]), part[k]);
      }
    }
  }
#endif
  for (; key < num_keys; key++) {
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
  for (; first + COLUMNS * W <= v_dim; first += COLUMNS * W)
    add_values<T, R, COLUMNS>(weights, values, coming, num_keys, v_dim, out, first);
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

// Online softmax (Milakov & Gimelshein 2018) of one KV head's rows (queries times heads of the
// group, padded to a multiple of 4) over the keys seen so far.
struct Rows {
  float *query, *out;       // (rows, k_dim); (rows, v_dim)
  float *highest, *total;   // (rows,): the highest score, the sum of e^(score - highest)
};

// At most KEYS keys and values of one KV head; the last one is repeated as padding.
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

// Converts a row of scores at positions `begin ..` to weights and rescales the earlier sums.
template <class T>
void weigh(const Tile<T>& tile, const Flags& flags, int r, int64_t begin, int num_keys, float* row,
           const Rows& rows) {
  const int64_t position = tile.position + r / tile.group;
  const int seen = int(std::min<int64_t>(num_keys, position + 1 - begin));
  const int64_t oldest = flags.window ? position + 1 - flags.window : 0;
  const int hidden = int(std::max<int64_t>(0, std::min<int64_t>(KEYS, oldest - begin)));
  for (int j = 0; j < KEYS; j += W) store(row + j, load(row + j) * flags.scale);
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
      store(query + d, is_real ? load(from + d) : vec{});
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

// Loops over all keys of a tile, some at a time, with all their heads, which are contiguous.
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

// KV heads per tile: as many as fit while there are enough tiles for all threads.
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
            int64_t kv_heads, int64_t k_dim, int64_t v_dim, const Flags& flags) {
  const int group = int(num_heads / kv_heads);
  const int64_t at_once = heads_at_once(tiles, num_tiles, kv_heads, group, thread_pool().size());
  const int64_t num_parts = kv_heads / at_once;  // of a tile
  for_each(num_tiles * num_parts, 1, [&](int64_t number) {
    const int64_t head = number % num_parts * at_once;
    // first row, queries, position, begin in slots
    const int64_t* part = tiles + 4 * (number / num_parts);
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
  });
}

}  // namespace
