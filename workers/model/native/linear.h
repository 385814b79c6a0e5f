// Matrix products with weights laid out in panels: x (rows, in) times panels -> out (rows, out).
//
// A panel holds PANEL columns: for each input their weights side by side (for a pair of inputs where
// the weights or x are bfloat16 numbers). A few rows at a time are multiplied with a panel, which
// stays in the second cache meanwhile, while the next one is fetched into it. With AVX-512, 7 to 10
// rows are multiplied together with one half of a panel and then the other, so that the panel is
// read once. With more rows, weights of a byte are widened while the first rows are multiplied, and
// kept for the others. The order of an output's sum does not depend on the rows beside it. Rows may
// be normalised first; and columns may be gates and what they gate, half a panel each, of which one
// output is made.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "thread_pool.h"
#include "rows.h"
#include "vectors.h"
#include "widen.h"

namespace {

constexpr int MOST_ROWS = 6;  // multiplied together: their sums and a line fill the registers
#ifdef __AVX512F__
constexpr int MOST_HALF_ROWS = 10;  // the same with half a panel
#else
constexpr int MOST_HALF_ROWS = MOST_ROWS;
#endif
constexpr int FETCH = 64;  // bytes of a cache line

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
  T* normed;  // (rows, in): room for the result of that norm
  int64_t x_stride, rows, in, outs;
  float eps;
  bool is_gated;
  int64_t width() const { return is_gated ? PANEL / 2 : PANEL; }  // outputs of a panel
};

// The rows in the product's input format.
template <class T>
struct Input {
  const Factor<T>* x;
  int64_t stride;
};

// What to prefetch meanwhile, in cache lines.
struct Coming {
  const char* lines;
  int64_t num_lines;
  Coming part(int64_t number, int64_t num_parts) const {
    const int64_t begin = num_lines * number / num_parts;
    return {lines + begin * FETCH, num_lines * (number + 1) / num_parts - begin};
  }
};

// R rows times N * W columns of a panel of T or of bytes; adds the sums of row i to sums[i][first…].
// KEEPS: writes the widened panel to `wide`.
template <class T, int R, int N, bool KEEPS, class P>
void multiply(Input<T> rows, const P* panel, int64_t in, Coming coming, T* wide,
              vec (*sums)[PANEL / W], int first) {
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
    weights.template add_products<R>(rows.x + k * INPUTS, rows.stride, acc);
  }
  for (int i = 0; i < R; i++)
    for (int j = 0; j < N; j++) sums[i][first + j] = acc[i][j];
}

// R rows times a whole panel, N vectors of columns at a time.
template <class T, int R, int N, bool KEEPS, class P>
void multiply_parts(Input<T> rows, const P* panel, int64_t in, Coming coming, T* wide,
                    vec (*sums)[PANEL / W]) {
  constexpr int PARTS = PANEL / W / N;
  for (int part = 0; part < PARTS; part++) {
    const int64_t begin = int64_t(part) * N * W * Line<T, N>::INPUTS;
    multiply<T, R, N, KEEPS>(rows, panel + begin, in, coming.part(part, PARTS),
                             KEEPS ? wide + begin : wide, sums, part * N);
  }
}

template <class T, bool KEEPS, class P>
void multiply_rows(int num_rows, Input<T> rows, const P* panel, int64_t in, Coming coming, T* wide,
                   vec (*sums)[PANEL / W]) {
  constexpr int N = COLUMNS;
  switch (num_rows) {
    case 1: return multiply_parts<T, 1, N, KEEPS>(rows, panel, in, coming, wide, sums);
    case 2: return multiply_parts<T, 2, N, KEEPS>(rows, panel, in, coming, wide, sums);
    case 3: return multiply_parts<T, 3, N, KEEPS>(rows, panel, in, coming, wide, sums);
    case 4: return multiply_parts<T, 4, N, KEEPS>(rows, panel, in, coming, wide, sums);
    case 5: return multiply_parts<T, 5, N, KEEPS>(rows, panel, in, coming, wide, sums);
    default: return multiply_parts<T, 6, N, KEEPS>(rows, panel, in, coming, wide, sums);
  }
}

// More rows than MOST_ROWS, half a panel at a time.
template <class T, class P>
void multiply_halves(int num_rows, Input<T> rows, const P* panel, int64_t in, Coming coming,
                     vec (*sums)[PANEL / W]) {
  constexpr int N = PANEL / W / 2;
  T* wide = nullptr;
  switch (num_rows) {
    case 7: return multiply_parts<T, 7, N, false>(rows, panel, in, coming, wide, sums);
    case 8: return multiply_parts<T, 8, N, false>(rows, panel, in, coming, wide, sums);
    case 9: return multiply_parts<T, 9, N, false>(rows, panel, in, coming, wide, sums);
    default: return multiply_parts<T, 10, N, false>(rows, panel, in, coming, wide, sums);
  }
}

// Writes the outputs of one row and one panel.
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

// All rows times one panel, of T or of bytes. `next`: the panel to prefetch, or -1; `wide`: room for
// a panel of T.
template <class T, class P>
void multiply_panel(const Product<T>& p, Input<T> rows, int64_t number, int64_t next, T* wide) {
  const P* panels = static_cast<const P*>(p.weights.panels);
  const P* panel = panels + number * PANEL * p.in;
  const Coming coming{reinterpret_cast<const char*>(panels + next * PANEL * p.in),
                      next < 0 ? 0 : PANEL * p.in * int64_t(sizeof(P)) / FETCH};
  vec sums[MOST_HALF_ROWS][PANEL / W];
  if constexpr (MOST_HALF_ROWS > MOST_ROWS) {
    if (p.rows > MOST_ROWS && p.rows <= MOST_HALF_ROWS) {
      multiply_halves(int(p.rows), rows, panel, p.in, coming, sums);
      for (int64_t row = 0; row < p.rows; row++) finish(p, row, number, sums[row]);
      return;
    }
  }
  const int64_t num_blocks = (p.rows + MOST_ROWS - 1) / MOST_ROWS;
  int64_t row = 0;
  for (int64_t block = 0; block < num_blocks; block++) {
    const int64_t end = p.rows * (block + 1) / num_blocks;
    const int num_rows = int(end - row);
    const Input<T> from{rows.x + row * rows.stride, rows.stride};
    const Coming part = coming.part(block, num_blocks);
    if (std::is_same_v<P, T> || num_blocks == 1) {
      multiply_rows<T, false>(num_rows, from, panel, p.in, part, wide, sums);
    } else if (block == 0) {
      multiply_rows<T, true>(num_rows, from, panel, p.in, part, wide, sums);
    } else {
      const T* kept = wide;
      multiply_rows<T, false>(num_rows, from, kept, p.in, part, wide, sums);
    }
    for (int i = 0; row < end; row++, i++) finish(p, row, number, sums[i]);
  }
}

// Room for `size` elements that begins with a cache line; this thread's, until the next call.
template <class T>
T* room(int64_t size) {
  thread_local std::vector<char> kept;
  const size_t num_bytes = size * sizeof(T) + FETCH;
  if (kept.size() < num_bytes) kept.resize(num_bytes);
  const uintptr_t begin = reinterpret_cast<uintptr_t>(kept.data());
  return reinterpret_cast<T*>((begin + FETCH - 1) / FETCH * FETCH);
}

template <class T, class P>
void multiply_panels(const Product<T>& p, Input<T> rows, Pieces& pieces) {
  T* wide = p.weights.scales && p.rows > MOST_HALF_ROWS ? room<T>(PANEL * p.in) : nullptr;
  for (int64_t number = pieces.take(), next; number >= 0; number = next) {
    next = pieces.take();
    multiply_panel<T, P>(p, rows, number, next, wide);
  }
}

template <class T>
void linear(const Product<T>& p) {
  if (p.rows == 0) return;
  constexpr bool WIDENS = !std::is_same_v<Factor<T>, T>;
  Factor<T>* factors = WIDENS ? room<Factor<T>>(p.rows * p.in) : nullptr;
  Input<T> rows;
  if constexpr (WIDENS)
    rows = {factors, p.in};
  else
    rows = p.norm ? Input<T>{p.normed, p.in} : Input<T>{p.x, p.x_stride};
  if (p.norm || WIDENS)
    for_each_row(p.rows, p.in, [&](int64_t row) {
      const T* from = p.x + row * p.x_stride;
      if (p.norm) {
        norm_row(from, p.norm, p.normed + row * p.in, p.in, p.eps);
        from = p.normed + row * p.in;
      }
      if constexpr (WIDENS)
        for (int64_t k = 0; k < p.in; k += W) store(factors + row * p.in + k, load(from + k));
    });
  thread_pool().share((p.outs + p.width() - 1) / p.width(), [&](Pieces& pieces) {
    if (p.weights.scales)
      multiply_panels<T, int8_t>(p, rows, pieces);
    else
      multiply_panels<T, T>(p, rows, pieces);
  });
}

}  // namespace
