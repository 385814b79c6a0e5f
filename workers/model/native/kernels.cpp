// CPU kernels of a step: attention through block tables, RMSNorm, rotary embedding, SiLU gate, and
// the token with the largest logit (argmax).
//
// Plain C++ with GCC's vector extensions (Clang has them too) and threads of our own, without torch. It builds in
// seconds with the compiler at hand, for the processor at hand; a few intrinsics serve AVX2, AVX-512
// and AVX-512 BF16. workers/model/native/library.py builds it and declares every function below; torch
// code of the same meaning is in the modules that are exchanged and in attention/packed.py.
//
// Sums and exponentials are in float32, whatever the tensors hold.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "attention.h"
#include "thread_pool.h"
#include "layers.h"
#include "linear.h"
#include "rows.h"
#include "turn.h"
#include "vectors.h"

namespace {

template <class T>
void rms_norm(const T* x, const T* weight, T* out, int64_t rows, int64_t dim, float eps) {
  for_each_row(rows, dim,
               [&](int64_t r) { norm_row(x + r * dim, weight, out + r * dim, dim, eps); });
}

// gate_up (rows, 2 * dim) -> silu(gate) * up (rows, dim).
template <class T>
void silu_gate(const T* gate_up, T* out, int64_t rows, int64_t dim) {
  for_each_row(rows, dim, [&](int64_t r) {
    const T *gate = gate_up + 2 * r * dim, *up = gate + dim;
    for (int64_t d = 0; d < dim; d += W) {
      store(out + r * dim + d, silu(load(gate + d)) * load(up + d));
    }
  });
}

// Index of a row's first highest score; -1 if that is not finite or the row has NaN.
template <class T>
int64_t argmax_of_row(const T* row, int64_t dim) {
  constexpr float most = std::numeric_limits<float>::max();
  vec best = splat(-std::numeric_limits<float>::infinity());
  ivec at = {}, now, is_odd = {};
  for (int i = 0; i < W; i++) now[i] = i;
  int64_t d = 0;
  for (; d + W <= dim; d += W, now += W) {
    const vec x = load(row + d);
    const ivec is_more = x > best;
    best = is_more ? x : best;
    at = is_more ? now : at;
    is_odd |= ~(x <= most);
  }
  float highest = largest(best);
  int64_t found = dim;
  bool is_finite = true;
  for (int i = 0; i < W; i++) {
    if (best[i] == highest) found = std::min<int64_t>(found, at[i]);
    is_finite &= !is_odd[i];
  }
  for (; d < dim; d++) {
    const float x = to_float(row[d]);
    is_finite &= x <= most;
    if (x > highest) highest = x, found = d;
  }
  return is_finite && highest >= -most ? found : -1;
}

template <class T>
void argmax(const T* scores, int64_t* out, int64_t rows, int64_t dim) {
  for_each_row(rows, dim, [&](int64_t r) { out[r] = argmax_of_row(scores + r * dim, dim); });
}

}  // namespace

#define EXPORT(T, name)                                                                          \
  extern "C" void attend_##name(                                                                 \
      const int64_t* tiles, int64_t num_tiles, const int64_t* slots, const T* query,             \
      int64_t query_stride, const T* keys, const T* values, T* out, int64_t num_heads,           \
      int64_t kv_heads, int64_t k_dim, int64_t v_dim, float scale, float softcap,                \
      int64_t window, const float* sinks) {                                                      \
    attend<T>(tiles, num_tiles, slots, query, query_stride, keys, values, out, num_heads,        \
              kv_heads, k_dim, v_dim, Flags{scale, softcap, window, sinks});                     \
  }                                                                                              \
  extern "C" void rms_norm_##name(const T* x, const T* weight, T* out, int64_t rows,             \
                                  int64_t dim, float eps) {                                      \
    rms_norm<T>(x, weight, out, rows, dim, eps);                                                 \
  }                                                                                              \
  extern "C" void rotate_and_keep_##name(                                                        \
      T* qkv, int64_t rows, int64_t num_heads, int64_t kv_heads, int64_t dim, const T* cos,      \
      const T* sin, int64_t rotary, const T* q_norm, const T* k_norm, float eps,                 \
      const int64_t* slots, T* keys, T* values) {                                                \
    rotate_and_keep<T>(qkv, rows, num_heads, kv_heads, dim, cos, sin, rotary, q_norm, k_norm,    \
                       eps, slots, keys, values);                                                \
  }                                                                                              \
  extern "C" void silu_gate_##name(const T* gate_up, T* out, int64_t rows, int64_t dim) {        \
    silu_gate<T>(gate_up, out, rows, dim);                                                       \
  }                                                                                              \
  extern "C" void argmax_##name(const T* scores, int64_t* out, int64_t rows, int64_t dim) {   \
    argmax<T>(scores, out, rows, dim);                                                        \
  }

// Sets the most threads of any call, the caller's included.
extern "C" void set_num_threads(int num_threads) { thread_pool().resize(num_threads); }

// Whether the product of bfloat16 numbers and bytes looks bytes up: see widen.h and kernels.py.
extern "C" int looks_up_bytes() {
#ifdef LOOKS_UP_BYTES
  return 1;
#else
  return 0;
#endif
}

#define EXPORT_LINEAR(T, name)                                                                   \
  extern "C" void linear_##name(const T* x, int64_t x_stride, const void* panels,                \
                                const float* scales, const T* to, T* out, int64_t rows,          \
                                int64_t in, int64_t outs, int is_gated, const T* norm,           \
                                float eps, T* normed) {                                          \
    linear(Product<T>{x, {panels, scales}, to, norm, out, normed, x_stride, rows, in, outs, eps, \
                      bool(is_gated)});                                                          \
  }

#define EXPORT_LAYERS(T, name)                                                                   \
  extern "C" void run_layers_##name(const Layer<T>* layers, int64_t num_layers,                  \
                                    const Sizes* sizes, const Step<T>* step) {                   \
    run_layers<T>(layers, num_layers, *sizes, *step);                                            \
  }

EXPORT_LAYERS(float, float32)
EXPORT_LAYERS(bf16, bfloat16)
EXPORT_LINEAR(float, float32)
EXPORT_LINEAR(bf16, bfloat16)
EXPORT(float, float32)
EXPORT(bf16, bfloat16)
