// Matrix products with weights laid out in panels: x (rows, in) times panels -> out (rows, out).
//
// A panel holds PANEL columns: for each input their weights side by side (in pairs of inputs where
// the processor multiplies bfloat16 numbers in pairs). While the rows are multiplied with one panel,
// a few at a time, it stays in the second cache and the next is fetched into it. Weights of a byte
// are made wide while the first rows are multiplied, and kept so for the others. The sum of an output
// has the same order whatever rows stand beside it. Rows may be normalised before; and columns may be
// gates and what they let through, half a panel each, of which one output is made.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "rows.h"
#include "vectors.h"
#include "widen.h"

namespace {

constexpr int MOST_ROWS = 6;  // at a time: their sums and a line of the panel fill the registers
constexpr int FETCH = 64;     // bytes of a cache line

// Panels of the type of what they are multiplied with; or, with a scale for each output, of bytes.
struct Weights {
  const void* panels;
  const float* scales;
};

template <class T>
struct Product {
  const T* x;
  Weights weights;
  const T* to;    // is added, laid out as out; or null
  const T* norm;  // weights of an RMSNorm of x (in,), or null
  T* out;
  T* normed;  // (rows, in): room for what it makes of x
  int64_t x_stride, rows, in, outs;
  float eps;
  bool is_gated;
  int64_t width() const { return is_gated ? PANEL / 2 : PANEL; }  // outputs of a panel
};

// What is fetched meanwhile, in lines of the cache.
struct Coming {
  const char* lines;
  int64_t num_lines;
};

// R rows of x times a panel of T or of bytes. KEEPS: writes the panel, made wide, to `wide`.
template <class T, int R, bool KEEPS, class P>
void multiply(const T* x, int64_t x_stride, const P* panel, int64_t in, Coming coming, T* wide,
              vec (*sums)[PANEL / W]) {
  constexpr int INPUTS = Line<T>::INPUTS, FETCHES = INPUTS * PANEL * sizeof(P) / FETCH;
  vec acc[R][PANEL / W] = {};
  for (int64_t k = 0; k < in / INPUTS; k++) {
    for (int line = 0; line < FETCHES; line++)
      if (FETCHES * k + line < coming.num_lines)
        __builtin_prefetch(coming.lines + (FETCHES * k + line) * FETCH, 0, 2);
    Line<T> weights;
    weights.read(panel + k * INPUTS * PANEL);
    if constexpr (KEEPS) weights.write(wide + k * INPUTS * PANEL);
    for (int i = 0; i < R; i++)
      for (int j = 0; j < PANEL / W; j++)
        acc[i][j] = weights.add_products(acc[i][j], x + i * x_stride + k * INPUTS, j);
  }
  for (int i = 0; i < R; i++)
    for (int j = 0; j < PANEL / W; j++) sums[i][j] = acc[i][j];
}

template <class T, bool KEEPS, class P>
void multiply(int rows, const T* x, int64_t x_stride, const P* panel, int64_t in, Coming coming,
              T* wide, vec (*sums)[PANEL / W]) {
  switch (rows) {
    case 1: return multiply<T, 1, KEEPS>(x, x_stride, panel, in, coming, wide, sums);
    case 2: return multiply<T, 2, KEEPS>(x, x_stride, panel, in, coming, wide, sums);
    case 3: return multiply<T, 3, KEEPS>(x, x_stride, panel, in, coming, wide, sums);
    case 4: return multiply<T, 4, KEEPS>(x, x_stride, panel, in, coming, wide, sums);
    case 5: return multiply<T, 5, KEEPS>(x, x_stride, panel, in, coming, wide, sums);
    default: return multiply<T, 6, KEEPS>(x, x_stride, panel, in, coming, wide, sums);
  }
}

// Writes what came of one row and one panel.
template <class T>
void finish(const Product<T>& p, int64_t row, int64_t number, vec* sums) {
  if (p.weights.scales)
    for (int j = 0; j < PANEL / W; j++) sums[j] *= load(p.weights.scales + number * PANEL + j * W);
  const int64_t first = number * p.width();
  const int vectors = int(std::min(p.width(), p.outs - first)) / W;
  for (int j = 0; j < vectors; j++) {
    const int64_t at = row * p.outs + first + j * W;
    const vec found = p.is_gated ? silu(sums[j]) * sums[j + PANEL / W / 2] : sums[j];
    store(p.out + at, p.to ? found + load(p.to + at) : found);
  }
}

// All rows times one panel, of T or of bytes; `wide`: room for a panel of T.
template <class T, class P>
void multiply_panel(const Product<T>& p, int64_t number, bool is_last, T* wide) {
  const P* panel = static_cast<const P*>(p.weights.panels) + number * PANEL * p.in;
  const int64_t num_blocks = (p.rows + MOST_ROWS - 1) / MOST_ROWS;
  const int64_t lines = is_last ? 0 : PANEL * p.in * int64_t(sizeof(P)) / FETCH;
  const int64_t share = (lines + num_blocks - 1) / num_blocks;
  const char* next = reinterpret_cast<const char*>(panel + PANEL * p.in);
  int64_t row = 0;
  for (int64_t block = 0; block < num_blocks; block++) {
    const int64_t end = p.rows * (block + 1) / num_blocks;
    const int64_t fetched = block * share;
    const Coming coming{next + fetched * FETCH, std::max<int64_t>(0, std::min(share, lines - fetched))};
    const int rows = int(end - row);
    const T* x = p.x + row * p.x_stride;
    vec sums[MOST_ROWS][PANEL / W];
    if constexpr (std::is_same_v<P, T>) {
      multiply<T, false>(rows, x, p.x_stride, panel, p.in, coming, wide, sums);
    } else if (num_blocks == 1) {
      multiply<T, false>(rows, x, p.x_stride, panel, p.in, coming, wide, sums);
    } else if (block == 0) {
      multiply<T, true>(rows, x, p.x_stride, panel, p.in, coming, wide, sums);
    } else {
      multiply<T, false>(rows, x, p.x_stride, static_cast<const T*>(wide), p.in, coming, wide, sums);
    }
    for (int i = 0; row < end; row++, i++) finish(p, row, number, sums[i]);
  }
}

// Room for `size` elements that begins with a line of the cache; this thread's, until the next call.
template <class T>
T* room(int64_t size) {
  thread_local std::vector<char> kept;
  if (int64_t(kept.size()) < size * int64_t(sizeof(T)) + FETCH) kept.resize(size * sizeof(T) + FETCH);
  return reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(kept.data()) + FETCH - 1) / FETCH * FETCH);
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
      T* wide = p.weights.scales && p.rows > MOST_ROWS ? room<T>(PANEL * p.in) : nullptr;
      for (int64_t number = num_panels * part / num_threads; number < end; number++) {
        if (p.weights.scales)
          multiply_panel<T, int8_t>(p, number, number + 1 == end, wide);
        else
          multiply_panel<T, T>(p, number, number + 1 == end, wide);
      }
    }
  }
}

}  // namespace
