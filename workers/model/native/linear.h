// Matrix products with weights laid out in panels: x (rows, in) times panels -> out (rows, out).
//
// A panel holds PANEL columns: for each input their weights side by side (in pairs of inputs where
// the processor multiplies bfloat16 numbers in pairs). While the rows are multiplied with one panel,
// a few at a time, it stays in the second cache and the next is fetched into it. The sum of an output
// has the same order whatever rows stand beside it. Rows may be normalised before; and columns may be
// gates and what they let through, half a panel each, of which one output is made.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "rows.h"
#include "vectors.h"

namespace {

constexpr int PANEL = 64;     // columns
constexpr int MOST_ROWS = 6;  // at a time: their sums and a line of the panel fill the registers
constexpr int FETCH = 64;     // bytes of a cache line

template <class T>
struct Product {
  const T *x, *panels;
  const T* to;    // is added, laid out as out; or null
  const T* norm;  // weights of an RMSNorm of x (in,), or null
  T* out;
  T* normed;  // (rows, in): room for what it makes of x
  int64_t x_stride, rows, in, outs;
  float eps;
  bool is_gated;
  int64_t width() const { return is_gated ? PANEL / 2 : PANEL; }  // outputs of a panel
};

// R rows of x times a panel; meanwhile `num_lines` cache lines from `coming` on are fetched.
template <class T, int R>
void multiply(const T* x, int64_t x_stride, const T* panel, int64_t in, const char* coming,
              int64_t num_lines, vec (*sums)[PANEL / W]) {
  vec acc[R][PANEL / W] = {};
  const int64_t steps = std::is_same_v<T, bf16> ? in / 2 : in;
  for (int64_t k = 0; k < steps; k++) {
    for (int line = 0; line < 4; line++)
      if (4 * k + line < num_lines) __builtin_prefetch(coming + (4 * k + line) * FETCH, 0, 2);
    if constexpr (std::is_same_v<T, bf16>) {
#ifdef HAS_PAIRS
      pairs weights[PANEL / W];
      for (int j = 0; j < PANEL / W; j++)
        weights[j] = load_pairs(panel + 2 * (k * PANEL + j * W));
      for (int i = 0; i < R; i++) {
        const pairs two = repeat(reinterpret_cast<const uint32_t*>(x + i * x_stride) + k);
        for (int j = 0; j < PANEL / W; j++) acc[i][j] = add_products(acc[i][j], two, weights[j]);
      }
#endif
    } else {
      vec weights[PANEL / W];
      for (int j = 0; j < PANEL / W; j++) weights[j] = load(panel + k * PANEL + j * W);
      for (int i = 0; i < R; i++)
        for (int j = 0; j < PANEL / W; j++) acc[i][j] += x[i * x_stride + k] * weights[j];
    }
  }
  for (int i = 0; i < R; i++)
    for (int j = 0; j < PANEL / W; j++) sums[i][j] = acc[i][j];
}

template <class T>
void multiply(int rows, const T* x, int64_t x_stride, const T* panel, int64_t in,
              const char* coming, int64_t num_lines, vec (*sums)[PANEL / W]) {
  switch (rows) {
    case 1: return multiply<T, 1>(x, x_stride, panel, in, coming, num_lines, sums);
    case 2: return multiply<T, 2>(x, x_stride, panel, in, coming, num_lines, sums);
    case 3: return multiply<T, 3>(x, x_stride, panel, in, coming, num_lines, sums);
    case 4: return multiply<T, 4>(x, x_stride, panel, in, coming, num_lines, sums);
    case 5: return multiply<T, 5>(x, x_stride, panel, in, coming, num_lines, sums);
    default: return multiply<T, 6>(x, x_stride, panel, in, coming, num_lines, sums);
  }
}

// All rows times one panel.
template <class T>
void multiply_panel(const Product<T>& p, int64_t number, bool is_last) {
  const T* panel = p.panels + number * PANEL * p.in;
  const int64_t num_blocks = (p.rows + MOST_ROWS - 1) / MOST_ROWS;
  const int64_t lines = is_last ? 0 : PANEL * p.in * int64_t(sizeof(T)) / FETCH;
  const int64_t share = (lines + num_blocks - 1) / num_blocks;
  const char* coming = reinterpret_cast<const char*>(panel + PANEL * p.in);
  const int64_t first = number * p.width();
  const int vectors = int(std::min(p.width(), p.outs - first)) / W;
  int64_t row = 0;
  for (int64_t block = 0; block < num_blocks; block++) {
    const int64_t end = p.rows * (block + 1) / num_blocks;
    const int64_t fetched = block * share, now = std::max<int64_t>(0, std::min(share, lines - fetched));
    vec sums[MOST_ROWS][PANEL / W];
    multiply(int(end - row), p.x + row * p.x_stride, p.x_stride, panel, p.in,
             coming + fetched * FETCH, now, sums);
    for (int i = 0; row < end; row++, i++)
      for (int j = 0; j < vectors; j++) {
        const int64_t at = row * p.outs + first + j * W;
        const vec found = p.is_gated ? silu(sums[i][j]) * sums[i][j + PANEL / W / 2] : sums[i][j];
        store(p.out + at, p.to ? found + load(p.to + at) : found);
      }
  }
}

template <class T>
void linear(Product<T> p, int num_threads) {
  if (p.rows == 0) return;
  const int64_t num_panels = (p.outs + p.width() - 1) / p.width();
  const T* x = p.x;
  const int64_t stride = p.x_stride;
  if (p.norm) p.x = p.normed, p.x_stride = p.in;
#pragma omp parallel num_threads(num_threads)
  {
    if (p.norm) {
#pragma omp for
      for (int64_t row = 0; row < p.rows; row++)
        norm_row(x + row * stride, p.norm, p.normed + row * p.in, p.in, p.eps);
    }
#pragma omp for schedule(static, 1)
    for (int64_t part = 0; part < num_threads; part++) {
      const int64_t end = num_panels * (part + 1) / num_threads;
      for (int64_t number = num_panels * part / num_threads; number < end; number++)
        multiply_panel(p, number, number + 1 == end);
    }
  }
}

}  // namespace
