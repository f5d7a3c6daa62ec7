// AVX2: 8 lanes, with the dot product in one of three ways. Needs nothing from the standard library (see net.h).
//   GIGAMLP_AVXVNNI: vpdpbusd on 256 bits.
//   GIGAMLP_WIDE: bytes are widened to int16 first, exact for all codes.
//   else: vpmaddubsw, which saturates at 32,767; 255 * (64 + 64) stays below it, so codes must lie in -64..64 (`w7`).
#pragma once
#include <immintrin.h>
#include <stdint.h>
#include <string.h>
#define FI static inline __attribute__((always_inline))
#include "net.h"

namespace {

// for each mask of 8 groups the numbers of those that are set, packed
struct Table {
  uint64_t of[256];
  constexpr Table() : of() {
    for (int mask = 0; mask < 256; mask++) {
      int n = 0;
      for (int bit = 0; bit < 8; bit++)
        if (mask >> bit & 1) of[mask] |= (uint64_t)bit << (8 * n++);
    }
  }
};
constexpr Table kPacked{};

struct V {
  using I = __m256i;
  using F = __m256;
  static constexpr int L = 8;
  static constexpr int kDenseSpan = 1;
  static constexpr bool kSkips = true;
  static constexpr bool kPieces = false;
  FI void piece(uint8_t*, const uint8_t*, const gigamlp::Piece&, uint8_t) {}
  static constexpr int kTogether = 1;  // rows that may share a list
#if defined(GIGAMLP_WIDE) || defined(GIGAMLP_AVXVNNI)
  static constexpr int kExactBits = 8;
#else
  static constexpr int kExactBits = 7;
#endif
  // sums, broadcasts and a weight fit into 16 registers
#ifdef GIGAMLP_AVXVNNI
  static constexpr int rows(int n) { return n == 1 ? 10 : n == 2 ? 5 : n == 3 ? 3 : 2; }
#else
  static constexpr int rows(int n) { return n == 1 ? 5 : n <= 3 ? 3 : 2; }
#endif
  static constexpr int float_rows(int n) { return n == 1 ? 12 : n == 2 ? 6 : 3; }

  template <int S>
  FI __m256i spread(const uint8_t* p) {
    static_assert(S == 1, "one group to a vector");
    int32_t v;
    memcpy(&v, p, 4);
    return _mm256_set1_epi32(v);
  }
#ifdef GIGAMLP_WIDE
  struct Pair {
    __m256i even, odd;  // int16: bytes 0 and 2 of each group, 1 and 3
  };
  using X = Pair;
  using W = Pair;
  template <int S>
  FI X broadcast(const uint8_t* p) {
    const __m256i v = spread<S>(p);
    return {_mm256_and_si256(v, _mm256_set1_epi16(0xff)), _mm256_srli_epi16(v, 8)};
  }
  FI W weight(const uint8_t* p) {
    const __m256i v = _mm256_load_si256((const __m256i*)p);
    return {_mm256_srai_epi16(_mm256_slli_epi16(v, 8), 8), _mm256_srai_epi16(v, 8)};
  }
  FI I dot(I a, X x, W w) {
    return _mm256_add_epi32(
        a, _mm256_add_epi32(_mm256_madd_epi16(x.even, w.even), _mm256_madd_epi16(x.odd, w.odd)));
  }
#else
  using X = __m256i;
  using W = __m256i;
  template <int S>
  FI X broadcast(const uint8_t* p) { return spread<S>(p); }
  FI W weight(const uint8_t* p) { return _mm256_load_si256((const __m256i*)p); }
  FI I dot(I a, X x, W w) {
#ifdef GIGAMLP_AVXVNNI
    return _mm256_dpbusd_avx_epi32(a, x, w);
#else
    return _mm256_add_epi32(a, _mm256_madd_epi16(_mm256_maddubs_epi16(x, w), _mm256_set1_epi16(1)));
#endif
  }
#endif
  FI W kept(W w) { return w; }
  FI I zero() { return _mm256_setzero_si256(); }
  FI I add(I a, I b) { return _mm256_add_epi32(a, b); }
  FI I fold(I a, I) { return a; }  // for two groups to a vector only
  FI void copy(uint8_t* to, const uint8_t* from, int64_t n, uint8_t flip) {
    if (flip == 0) memcpy(to, from, (size_t)n);
    else for (int64_t i = 0; i < n; i++) to[i] = from[i] ^ flip;
  }
  FI I load(const int32_t* p) { return _mm256_loadu_si256((const __m256i*)p); }

  FI F to_float(I a) { return _mm256_cvtepi32_ps(a); }
  FI F loadf(const float* p) { return _mm256_loadu_ps(p); }
  FI void storef(float* p, F a) { _mm256_storeu_ps(p, a); }
  FI F setf(float a) { return _mm256_set1_ps(a); }
  FI F zerof() { return _mm256_setzero_ps(); }
  FI F addf(F a, F b) { return _mm256_add_ps(a, b); }
  FI F mulf(F a, F b) { return _mm256_mul_ps(a, b); }
  FI F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  FI F maxf(F a, F b) { return _mm256_max_ps(a, b); }
  FI F half(F a) { return _mm256_cvtph_ps(_mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT)); }
  FI F from_half(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
  // rint, then 0..255; the float is bounded first, as what leaves int32 would become negative
  FI void store_bytes(uint8_t* p, F a) {
    const F bounded = _mm256_min_ps(_mm256_max_ps(a, _mm256_setzero_ps()), _mm256_set1_ps(255.0f));
    const I i = _mm256_cvtps_epi32(bounded);
    const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(i), _mm256_extracti128_si256(i, 1));
    _mm_storel_epi64((__m128i*)p, _mm_packus_epi16(words, words));
  }
  FI float top(F a) {
    __m128 c = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    c = _mm_max_ps(c, _mm_permute_ps(c, 0x4e));
    return _mm_cvtss_f32(_mm_max_ss(c, _mm_movehdup_ps(c)));
  }
  FI uint32_t equal(F a, float b) {
    return (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps(a, _mm256_set1_ps(b), _CMP_EQ_OQ));
  }

  // indices of the 4-byte groups that hold anything, at most 256; writes up to 8 bytes too many
  template <int S, int R>
  FI int list(const uint8_t* const* rows, int groups, uint8_t* out) {
    static_assert(S == 1 && R == 1, "one group to a vector, one row to a list");
    const uint8_t* x = rows[0];
    int count = 0, g = 0;
    for (; g + 8 <= groups; g += 8) {
      const I v = _mm256_loadu_si256((const __m256i*)(x + 4 * g));
      const I empty = _mm256_cmpeq_epi32(v, _mm256_setzero_si256());
      const uint32_t mask = 0xff & ~(uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(empty));
      const uint64_t packed = kPacked.of[mask] + 0x0101010101010101ull * (uint64_t)g;
      memcpy(out + count, &packed, 8);
      count += __builtin_popcount(mask);
    }
    for (; g < groups; g++) {
      uint32_t v;
      memcpy(&v, x + 4 * g, 4);
      out[count] = (uint8_t)g;
      count += v != 0;
    }
    return count;
  }
};

}  // namespace
