// Operations on one row or vector, shared by several kernels.
#pragma once

#include <cmath>
#include <cstdint>

#include "vectors.h"

namespace {

template <class T>
void norm_row(const T* x, const T* weight, T* out, int64_t dim, float eps) {
  vec squares = {};
  for (int64_t d = 0; d < dim; d += W) squares += load(x + d) * load(x + d);
  const float factor = 1.0f / std::sqrt(sum(squares) / dim + eps);
  for (int64_t d = 0; d < dim; d += W) store(out + d, load(x + d) * factor * load(weight + d));
}

inline vec silu(vec x) { return x / (1.0f + exp(-x)); }

}  // namespace
