// Matrix products with weights laid out in panels: x (rows, in) times panels -> out (rows, out).
//
// A panel holds PANEL columns: for each input their weights side by side (in pairs of inputs where
// the processor multiplies bfloat16 numbers in pairs). While the rows are multiplied with one panel,
// a few at a time, it stays in the second cache and the next is fetched into it. Seven to ten rows
// are multiplied all at once, with one half of it and then the other, so that it is read once. With
// more, weights of a byte are made wide while the first rows are multiplied, and kept so for the
// others. The sum of an output has the same order whatever rows stand beside it. Rows may be
// normalised before; and columns may be gates and what they let through, half a panel each, of
// which one output is made.
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

// At a time: their sums and a line of the panel fill the registers.
constexpr int MOST_ROWS = 6;
constexpr int MOST_HALF_ROWS = 10;  // the same, of half a panel and what makes bytes wide
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

// R rows of x times N * W columns of a panel of T or of bytes, from `panel` on; sums[i][first] is
// the first of row i. KEEPS: writes the panel, made wide, to `wide`.
template <class T, int R, int N, bool KEEPS, class P>
void multiply(const T* x, int64_t x_stride, const P* panel, int64_t in, Coming coming, T* wide,
              vec (*sums)[PANEL / W], int first = 0) {
  constexpr int INPUTS = Line<T, N>::INPUTS;
  constexpr int FETCHES = (INPUTS * N * W * sizeof(P) + FETCH - 1) / FETCH;
  vec acc[R][N] = {};
  for (int64_t k = 0; k < in / INPUTS; k++) {
    for (int line = 0; line < FETCHES; line++)
      if (FETCHES * k + line < coming.num_lines)
        __builtin_prefetch(coming.lines + (FETCHES * k + line) * FETCH, 0, 2);
    Line<T, N> weights;
    weights.read(panel + k * INPUTS * PANEL);
    if constexpr (KEEPS) weights.write(wide + k * INPUTS * PANEL);
    for (int i = 0; i < R; i++)
      for (int j = 0; j < N; j++)
        acc[i][j] = weights.add_products(acc[i][j], x + i * x_stride + k * INPUTS, j);
  }
  for (int i = 0; i < R; i++)
    for (int j = 0; j < N; j++) sums[i][first + j] = acc[i][j];
}

template <class T, bool KEEPS, class P>
void multiply(int rows, const T* x, int64_t x_stride, const P* panel, int64_t in, Coming coming,
              T* wide, vec (*sums)[PANEL / W]) {
  constexpr int N = PANEL / W;
  switch (rows) {
    case 1: return multiply<T, 1, N, KEEPS>(x, x_stride, panel, in, coming, wide, sums);
    case 2: return multiply<T, 2, N, KEEPS>(x, x_stride, panel, in, coming, wide, sums);
    case 3: return multiply<T, 3, N, KEEPS>(x, x_stride, panel, in, coming, wide, sums);
    case 4: return multiply<T, 4, N, KEEPS>(x, x_stride, panel, in, coming, wide, sums);
    case 5: return multiply<T, 5, N, KEEPS>(x, x_stride, panel, in, coming, wide, sums);
    default: return multiply<T, 6, N, KEEPS>(x, x_stride, panel, in, coming, wide, sums);
  }
}

// More rows than MOST_ROWS times half a panel.
template <class T, class P>
void multiply_half(int rows, const T* x, int64_t stride, const P* panel, int64_t in,
                   Coming coming, vec (*sums)[PANEL / W], int first) {
  constexpr int N = PANEL / W / 2;
  T* room = nullptr;
  switch (rows) {
    case 7: return multiply<T, 7, N, false>(x, stride, panel, in, coming, room, sums, first);
    case 8: return multiply<T, 8, N, false>(x, stride, panel, in, coming, room, sums, first);
    case 9: return multiply<T, 9, N, false>(x, stride, panel, in, coming, room, sums, first);
    default: return multiply<T, 10, N, false>(x, stride, panel, in, coming, room, sums, first);
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

// All rows, MOST_HALF_ROWS at most, times one panel: the one half, and the other.
template <class T, class P>
void multiply_halves(const Product<T>& p, int64_t number, const P* panel, Coming coming) {
  vec sums[MOST_HALF_ROWS][PANEL / W];
  const int64_t lines = coming.num_lines / 2;
  for (int half = 0; half < 2; half++) {
    const int column = half * PANEL / 2;
    multiply_half(int(p.rows), p.x, p.x_stride, panel + column * Line<T, 1>::INPUTS, p.in,
                  Coming{coming.lines + half * lines * FETCH, lines}, sums, column / W);
  }
  for (int64_t row = 0; row < p.rows; row++) finish(p, row, number, sums[row]);
}

// All rows times one panel, of T or of bytes; `wide`: room for a panel of T.
template <class T, class P>
void multiply_panel(const Product<T>& p, int64_t number, bool is_last, T* wide) {
  const P* panel = static_cast<const P*>(p.weights.panels) + number * PANEL * p.in;
  const char* next = reinterpret_cast<const char*>(panel + PANEL * p.in);
  const int64_t lines = is_last ? 0 : PANEL * p.in * int64_t(sizeof(P)) / FETCH;
  if (p.rows > MOST_ROWS && p.rows <= MOST_HALF_ROWS)
    return multiply_halves(p, number, panel, Coming{next, lines});
  const int64_t num_blocks = (p.rows + MOST_ROWS - 1) / MOST_ROWS;
  const int64_t share = (lines + num_blocks - 1) / num_blocks;
  int64_t row = 0;
  for (int64_t block = 0; block < num_blocks; block++) {
    const int64_t end = p.rows * (block + 1) / num_blocks, fetched = block * share;
    const Coming coming{next + fetched * FETCH,
                        std::max<int64_t>(0, std::min(share, lines - fetched))};
    const int rows = int(end - row);
    const T* x = p.x + row * p.x_stride;
    vec sums[MOST_ROWS][PANEL / W];
    if (std::is_same_v<P, T> || num_blocks == 1) {
      multiply<T, false>(rows, x, p.x_stride, panel, p.in, coming, wide, sums);
    } else if (block == 0) {
      multiply<T, true>(rows, x, p.x_stride, panel, p.in, coming, wide, sums);
    } else {
      const T* kept = wide;
      multiply<T, false>(rows, x, p.x_stride, kept, p.in, coming, wide, sums);
    }
    for (int i = 0; row < end; row++, i++) finish(p, row, number, sums[i]);
  }
}

// Room for `size` elements that begins with a line of the cache; this thread's, until the next call.
template <class T>
T* room(int64_t size) {
  thread_local std::vector<char> kept;
  const size_t num_bytes = size * sizeof(T) + FETCH;
  if (kept.size() < num_bytes) kept.resize(num_bytes);
  const uintptr_t begin = reinterpret_cast<uintptr_t>(kept.data());
  return reinterpret_cast<T*>((begin + FETCH - 1) / FETCH * FETCH);
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
      T* wide = p.weights.scales && p.rows > MOST_HALF_ROWS ? room<T>(PANEL * p.in) : nullptr;
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
