// Sixteen floats at once, by GCC's vector extensions, which Clang has too.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

namespace {

constexpr int W = 16;  // floats in a vector

typedef float vec __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t uvec __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint16_t hvec __attribute__((vector_size(32), aligned(2), may_alias));

struct bf16 {
  uint16_t bits;
};

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) {
  const uint32_t bits = uint32_t(x.bits) << 16;
  float found;
  std::memcpy(&found, &bits, sizeof found);
  return found;
}
inline vec splat(float x) { return x - vec{}; }
inline vec load(const float* p) { return *reinterpret_cast<const vec*>(p); }
inline vec load(const bf16* p) {
  const hvec half = *reinterpret_cast<const hvec*>(p);
  return reinterpret_cast<vec>(__builtin_convertvector(half, uvec) << 16);
}
inline void store(float* p, vec x) { *reinterpret_cast<vec*>(p) = x; }
inline void store(bf16* p, vec x) {
  uvec bits = reinterpret_cast<uvec>(x);
  const uvec rounded = bits + 0x7fff + ((bits >> 16) & 1);  // to the nearest, ties to even
  bits = x == x ? rounded : uvec{} + 0x7fc00000;            // NaN stays NaN
  *reinterpret_cast<hvec*>(p) = __builtin_convertvector(bits >> 16, hvec);
}

#ifdef __AVX512BF16__
// Products of bfloat16 numbers in pairs, summed in float32, as processors with AVX-512 BF16 do.
#define HAS_PAIRS
typedef __m512bh pairs;
inline pairs load_pairs(const bf16* p) { return reinterpret_cast<pairs>(_mm512_loadu_si512(p)); }
inline vec widen(const int8_t* p) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return reinterpret_cast<vec>(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)));
}
inline void store_pairs(bf16* p, pairs x) {
  _mm512_storeu_si512(p, reinterpret_cast<__m512i>(x));
}
inline pairs round_pairs(const float* p) {
  return _mm512_cvtne2ps_pbh(_mm512_loadu_ps(p + W), _mm512_loadu_ps(p));
}
inline vec add_products(vec sum, pairs a, pairs b) {
  return reinterpret_cast<vec>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(sum), a, b));
}
// Two numbers, side by side, in every place.
inline pairs repeat(const uint32_t* two) {
  return reinterpret_cast<pairs>(_mm512_set1_epi32(int32_t(*two)));
}
// Of two rows of 32 numbers, each number beside the other row's: the first 16, and the last.
inline void interleave(pairs a, pairs b, pairs* first, pairs* last) {
  alignas(64) static const uint16_t begin[32] = {0,  32, 1,  33, 2,  34, 3,  35, 4,  36, 5,
                                                 37, 6,  38, 7,  39, 8,  40, 9,  41, 10, 42,
                                                 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  const __m512i from = _mm512_load_si512(begin), half = _mm512_set1_epi16(W);
  const __m512i x = reinterpret_cast<__m512i>(a), y = reinterpret_cast<__m512i>(b);
  *first = reinterpret_cast<pairs>(_mm512_permutex2var_epi16(x, from, y));
  *last = reinterpret_cast<pairs>(
      _mm512_permutex2var_epi16(x, _mm512_add_epi16(from, half), y));
}
#endif

inline float sum(vec x) {
  float parts[W], total = 0;
  store(parts, x);
  for (int i = 0; i < 8; i++) parts[i] += parts[i + 8];
  for (int i = 0; i < 4; i++) parts[i] += parts[i + 4];
  for (int i = 0; i < 4; i++) total += parts[i];
  return total;
}

// Lanes in groups of G: of a and b in turn, the even groups (lows) or the odd ones (highs).
#define LOWS(a, b, G) __builtin_shufflevector(a, b, L(0, G), L(1, G), L(2, G), L(3, G), L(4, G), \
    L(5, G), L(6, G), L(7, G), L(8, G), L(9, G), L(10, G), L(11, G), L(12, G), L(13, G), L(14, G), \
    L(15, G))
#define HIGHS(a, b, G) __builtin_shufflevector(a, b, L(0, G) + G, L(1, G) + G, L(2, G) + G,       \
    L(3, G) + G, L(4, G) + G, L(5, G) + G, L(6, G) + G, L(7, G) + G, L(8, G) + G, L(9, G) + G,    \
    L(10, G) + G, L(11, G) + G, L(12, G) + G, L(13, G) + G, L(14, G) + G, L(15, G) + G)
// Where lane i comes from: group i / G of the output is group i / G, made even, of a or of b.
#define L(i, G) ((i) / (2 * G) * (2 * G) + (i) % G + ((i) / G % 2) * W)

// The sum of each of 16 vectors, as one vector: four levels, each adding neighbours' halves.
inline vec sums(vec* x) {
  for (int i = 0; i < 8; i++) x[i] = LOWS(x[i], x[i + 8], 8) + HIGHS(x[i], x[i + 8], 8);
  for (int i = 0; i < 4; i++) x[i] = LOWS(x[i], x[i + 4], 4) + HIGHS(x[i], x[i + 4], 4);
  for (int i = 0; i < 2; i++) x[i] = LOWS(x[i], x[i + 2], 2) + HIGHS(x[i], x[i + 2], 2);
  return LOWS(x[0], x[1], 1) + HIGHS(x[0], x[1], 1);
}

// Rows and columns of 16 vectors exchanged.
inline void transpose(vec* x) {
  vec y[W];
  for (int i = 0; i < 8; i++) y[i] = LOWS(x[i], x[i + 8], 8), y[i + 8] = HIGHS(x[i], x[i + 8], 8);
  for (int j = 0; j < W; j += 8)
    for (int i = j; i < j + 4; i++)
      x[i] = LOWS(y[i], y[i + 4], 4), x[i + 4] = HIGHS(y[i], y[i + 4], 4);
  for (int j = 0; j < W; j += 4)
    for (int i = j; i < j + 2; i++)
      y[i] = LOWS(x[i], x[i + 2], 2), y[i + 2] = HIGHS(x[i], x[i + 2], 2);
  for (int i = 0; i < W; i += 2) x[i] = LOWS(y[i], y[i + 1], 1), x[i + 1] = HIGHS(y[i], y[i + 1], 1);
}

inline vec max(vec a, vec b) { return a > b ? a : b; }

inline float largest(vec x) {
  float parts[W];
  store(parts, x);
  return *std::max_element(parts, parts + W);
}

// e^x within 2 units in the last place; 0 below -87, e^88 above 88, NaN for NaN. Range reduction by ln 2 in two
// parts and the polynomial of Cephes' expf.
inline vec exp(vec x) {
  const vec floor = splat(-87.0f), ceiling = splat(88.0f);
  const vec bounded = max(x, floor), y = bounded > ceiling ? ceiling : bounded;
  const vec shifted = y * 1.44269504088896341f + 12582912.0f;  // rounds to an integer
  const vec n = shifted - 12582912.0f;
  const vec r = y - n * 0.693359375f + n * 2.12194440e-4f;
  vec p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const ivec power = (__builtin_convertvector(n, ivec) + 127) << 23;
  const vec found = x < floor ? vec{} : p * reinterpret_cast<vec>(power);
  return x == x ? found : x;  // NaN shows
}

}  // namespace
