// Rotary embedding, and writing keys and values to the cache.
#pragma once

#include <cstdint>
#include <cstring>

#include "thread_pool.h"
#include "rows.h"
#include "vectors.h"

namespace {

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

// Rows of concatenated queries, keys and values: normalises queries and keys if weights are given,
// rotates them in place, and writes keys and values to their cache slots.
template <class T>
void rotate_and_keep(T* qkv, int64_t rows, int64_t num_heads, int64_t kv_heads, int64_t dim,
                     const T* cos, const T* sin, int64_t rotary, const T* q_norm, const T* k_norm,
                     float eps, const int64_t* slots, T* keys, T* values) {
  const int64_t stride = (num_heads + 2 * kv_heads) * dim;
  for_each_row(rows, stride, [&](int64_t r) {
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
  });
}

}  // namespace
