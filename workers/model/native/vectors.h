// A vector of floats as wide as the processor's registers, by GCC's vector extensions (Clang has
// them too): 16 floats with AVX-512, 8 with AVX, 4 elsewhere.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int W = 16;  // floats in a vector
#elif defined(__AVX__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif
// Vectors of one row whose sums stay in registers beside those of five other rows: with AVX there
// are 16 registers, with AVX-512 and on ARM there are 32.
#if defined(__AVX512F__) || !defined(__AVX__)
constexpr int COLUMNS = 4;
#else
constexpr int COLUMNS = 2;
#endif

typedef float vec __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef uint32_t uvec __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef int16_t svec __attribute__((vector_size(2 * W), aligned(2), may_alias));
typedef uint16_t hvec __attribute__((vector_size(2 * W), aligned(2), may_alias));
typedef int8_t bvec __attribute__((vector_size(W), aligned(1), may_alias));

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

// W whole numbers of a byte each, as floats.
inline vec widen(const int8_t* p) {
#if defined(__AVX512F__)  // GCC 12 needs three times the instructions for the conversion below
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return reinterpret_cast<vec>(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)));
#elif defined(__AVX2__)
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  return reinterpret_cast<vec>(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)));
#else
  return __builtin_convertvector(*reinterpret_cast<const bvec*>(p), vec);
#endif
}

// The first and the second of each of W pairs of bfloat16 numbers, as floats.
inline vec firsts(uvec two) { return reinterpret_cast<vec>(two << 16); }
inline vec seconds(uvec two) { return reinterpret_cast<vec>(two & 0xffff0000u); }
// The same of W pairs of bytes.
inline vec firsts(svec two) {
  return __builtin_convertvector(__builtin_convertvector(two, ivec) << 24 >> 24, vec);
}
inline vec seconds(svec two) {
  return __builtin_convertvector(__builtin_convertvector(two, ivec) >> 8, vec);
}
// W pairs of bfloat16 numbers from floats that bfloat16 holds exactly.
inline uvec join(vec first, vec second) {
  return reinterpret_cast<uvec>(first) >> 16 | (reinterpret_cast<uvec>(second) & 0xffff0000u);
}

#ifdef __AVX512BF16__
// Products of bfloat16 numbers in pairs, summed in float32, as processors with AVX-512 BF16 do.
#define HAS_PAIRS
typedef __m512bh pairs;
inline pairs load_pairs(const bf16* p) { return reinterpret_cast<pairs>(_mm512_loadu_si512(p)); }
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
  float parts[W];
  store(parts, x);
  for (int half = W / 2; half; half /= 2)
    for (int i = 0; i < half; i++) parts[i] += parts[i + half];
  return parts[0];
}

// Lane i of LOWS(a, b, G) and of HIGHS(a, b, G): of a and b in turn, in groups of G lanes, the
// groups with even numbers (LOWS) or with odd ones (HIGHS).
#define LANE(i, G) ((i) / (2 * G) * (2 * G) + (i) % G + ((i) / G % 2) * W)
#define LANES_4(i, G, P) LANE(i, G) + P, LANE(i + 1, G) + P, LANE(i + 2, G) + P, LANE(i + 3, G) + P
#if defined(__AVX512F__)
#define LANES(G, P) LANES_4(0, G, P), LANES_4(4, G, P), LANES_4(8, G, P), LANES_4(12, G, P)
#elif defined(__AVX__)
#define LANES(G, P) LANES_4(0, G, P), LANES_4(4, G, P)
#else
#define LANES(G, P) LANES_4(0, G, P)
#endif
#define LOWS(a, b, G) __builtin_shufflevector(a, b, LANES(G, 0))
#define HIGHS(a, b, G) __builtin_shufflevector(a, b, LANES(G, G))

// The sums of W vectors as one vector.
template <int G = W / 2>
inline vec sums(vec* x) {
  for (int i = 0; i < G; i++) x[i] = LOWS(x[i], x[i + G], G) + HIGHS(x[i], x[i + G], G);
  if constexpr (G > 1) sums<G / 2>(x);
  return x[0];
}

// Exchanges the rows and columns of W vectors.
template <int G = W / 2>
inline void transpose(vec* x) {
  for (int first = 0; first < W; first += 2 * G)
    for (int i = first; i < first + G; i++) {
      const vec low = LOWS(x[i], x[i + G], G);
      x[i + G] = HIGHS(x[i], x[i + G], G);
      x[i] = low;
    }
  if constexpr (G > 1) transpose<G / 2>(x);
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
