// The weights of N vectors of a panel's outputs for one input, or for a pair of inputs where they
// are bfloat16 numbers or are multiplied with such. They are read as they lie, or widened exactly
// from a byte each.
#pragma once

#include <array>
#include <cstdint>
#include <type_traits>

#include "vectors.h"

namespace {

constexpr int PANEL = 64;  // outputs

#if defined(HAS_PAIRS) && defined(__AVX512VBMI__)
#define LOOKS_UP_BYTES
#endif

// Element type of x in products: bfloat16 if the processor multiplies pairs of it, else float.
#ifdef HAS_PAIRS
template <class T>
using Factor = T;
#else
template <class T>
using Factor = float;
#endif

template <class T, int N>
struct Line;

template <int N>
struct Line<float, N> {
  static constexpr int INPUTS = 1;
  vec at[N];

  void read(const float* p) {
    for (int j = 0; j < N; j++) at[j] = load(p + j * W);
  }
  void read(const int8_t* p) {
    for (int j = 0; j < N; j++) at[j] = widen(p + j * W);
  }
  void write(float* p) const {
    for (int j = 0; j < N; j++) store(p + j * W, at[j]);
  }
  template <int R>
  void add_products(const float* x, int64_t stride, vec (*sums)[N]) const {
    for (int i = 0; i < R; i++)
      for (int j = 0; j < N; j++) sums[i][j] += x[i * stride] * at[j];
  }
};

#ifdef HAS_PAIRS

template <int N>
struct Line<bf16, N> {
  static constexpr int INPUTS = 2;
  pairs at[N];

  void read(const bf16* p) {
    for (int j = 0; j < N; j++) at[j] = load_pairs(p + 2 * j * W);
  }
  void write(bf16* p) const {
    for (int j = 0; j < N; j++) store_pairs(p + 2 * j * W, at[j]);
  }
  template <int R>
  void add_products(const bf16* x, int64_t stride, vec (*sums)[N]) const {
    for (int i = 0; i < R; i++) {
      const pairs two = repeat(reinterpret_cast<const uint32_t*>(x + i * stride));
      for (int j = 0; j < N; j++) sums[i][j] = ::add_products(sums[i][j], two, at[j]);
    }
  }

#ifdef LOOKS_UP_BYTES
  // A byte holds a sign and a magnitude. The low and the high byte of the magnitude's bfloat16 are
  // looked up in two tables and joined within 16 bytes each; kernels.py orders the weights for that.
  void read(const int8_t* p) {
    const __m512i low[2] = {_mm512_load_si512(&LOW[0]), _mm512_load_si512(&LOW[64])};
    const __m512i high[2] = {_mm512_load_si512(&HIGH[0]), _mm512_load_si512(&HIGH[64])};
    const __m512i sign = _mm512_set1_epi8(int8_t(0x80));
    for (int j = 0; j < N; j += 2) {
      const __m512i bytes = _mm512_loadu_si512(p + 2 * j * W);
      const __m512i lows = _mm512_permutex2var_epi8(low[0], bytes, low[1]);
      const __m512i unsigned_highs = _mm512_permutex2var_epi8(high[0], bytes, high[1]);
      const __m512i highs = _mm512_ternarylogic_epi32(unsigned_highs, bytes, sign, 0xf8);  // a|b&c
      at[j] = reinterpret_cast<pairs>(_mm512_unpacklo_epi8(lows, highs));
      at[j + 1] = reinterpret_cast<pairs>(_mm512_unpackhi_epi8(lows, highs));
    }
  }

 private:
  // One of the two bytes of 0 … 127 as bfloat16 numbers.
  static constexpr std::array<uint8_t, 128> bytes_of_magnitudes(int shift) {
    std::array<uint8_t, 128> found{};
    for (int magnitude = 1; magnitude < 128; magnitude++) {
      int exponent = 0;
      while (magnitude >> (exponent + 1)) exponent++;
      const int fraction = (magnitude << (7 - exponent)) & 0x7f;
      found[magnitude] = uint8_t(((127 + exponent) << 7 | fraction) >> shift);
    }
    return found;
  }
  alignas(64) static inline const std::array<uint8_t, 128> LOW = bytes_of_magnitudes(0);
  alignas(64) static inline const std::array<uint8_t, 128> HIGH = bytes_of_magnitudes(8);
#else
  void read(const int8_t* p) {
    for (int j = 0; j < N; j++) {
      const svec two = *reinterpret_cast<const svec*>(p + 2 * j * W);
      at[j] = reinterpret_cast<pairs>(join(firsts(two), seconds(two)));
    }
  }
#endif
};

#else

// Without pair products: the pairs are split into floats during multiplication.
template <int N>
struct Line<bf16, N> {
  static constexpr int INPUTS = 2;
  uvec at[N];

  void read(const bf16* p) {
    for (int j = 0; j < N; j++) at[j] = *reinterpret_cast<const uvec*>(p + 2 * j * W);
  }
  void read(const int8_t* p) {
    for (int j = 0; j < N; j++) {
      const svec two = *reinterpret_cast<const svec*>(p + 2 * j * W);
      at[j] = join(firsts(two), seconds(two));
    }
  }
  void write(bf16* p) const {
    for (int j = 0; j < N; j++) *reinterpret_cast<uvec*>(p + 2 * j * W) = at[j];
  }
  template <int R>
  void add_products(const float* x, int64_t stride, vec (*sums)[N]) const {
    vec half[N];
    for (int j = 0; j < N; j++) half[j] = firsts(at[j]);
    for (int i = 0; i < R; i++)
      for (int j = 0; j < N; j++) sums[i][j] += x[i * stride] * half[j];
    for (int j = 0; j < N; j++) half[j] = seconds(at[j]);
    for (int i = 0; i < R; i++)
      for (int j = 0; j < N; j++) sums[i][j] += x[i * stride + 1] * half[j];
  }
};

#endif

}  // namespace
