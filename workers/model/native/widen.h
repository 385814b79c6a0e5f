// Weights of N times 16 of a panel's outputs for one input (in bfloat16: for two), as the product
// takes them: as they lie, or made wide from a byte each, which is exact.
#pragma once

#include <array>
#include <cstdint>

#include "vectors.h"

namespace {

constexpr int PANEL = 64;  // outputs

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
#ifdef HAS_PAIRS  // GCC 12 makes three times the instructions of a conversion by itself
    for (int j = 0; j < N; j++) at[j] = widen(p + j * W);
#endif
  }
  void write(float* p) const {
    for (int j = 0; j < N; j++) store(p + j * W, at[j]);
  }
  vec add_products(vec sum, const float* x, int j) const { return sum + *x * at[j]; }
};

template <int N>
struct Line<bf16, N> {
  static constexpr int INPUTS = 2;
#ifdef HAS_PAIRS
  pairs at[N];

  void read(const bf16* p) {
    for (int j = 0; j < N; j++) at[j] = load_pairs(p + 2 * j * W);
  }
  void write(bf16* p) const {
    for (int j = 0; j < N; j++) store_pairs(p + 2 * j * W, at[j]);
  }
  vec add_products(vec sum, const bf16* x, int j) const {
    return ::add_products(sum, repeat(reinterpret_cast<const uint32_t*>(x)), at[j]);
  }
#else  // nobody multiplies: see multiplies_well
  void read(const bf16*) {}
  void write(bf16*) const {}
  vec add_products(vec sum, const bf16*, int) const { return sum; }
#endif

#if defined(HAS_PAIRS) && defined(__AVX512VBMI__)
  // A byte holds a sign and a magnitude. The magnitude's bfloat16 is looked up, the low and the
  // high byte apart, and these come together within 16 bytes each: panels.py has weights lie so.
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
  // Of 0 … 127, each as bfloat16, one of the two bytes.
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
#else  // nobody asks: see widens_well
  void read(const int8_t*) {}
#endif
};

}  // namespace
