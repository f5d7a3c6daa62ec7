// AVX-512 VNNI: 16 lanes. The dense form puts two 4-byte groups into a vector: one 8-byte broadcast feeds it, and the
// width of a layer is rounded up to 8 outputs only. Needs nothing from the standard library (see net.h).
#pragma once
#include <immintrin.h>
#include <stdint.h>
#include <string.h>
#define FI static inline __attribute__((always_inline))
#include "net.h"

namespace {

using gigamlp::Piece;

struct V {
  using I = __m512i;
  using X = __m512i;
  using W = __m512i;
  using F = __m512;
  static constexpr int L = 16;
#ifdef GIGAMLP_AMX
  static constexpr int kDenseSpan = 1;  // what a tile of weights looks like; see amx.h
#else
  static constexpr int kDenseSpan = 2;
#endif
  static constexpr bool kSkips = true;
  static constexpr int kTogether = 3;  // rows that may share a list: a core does two products, but hardly two loads
  static constexpr int kExactBits = 8;
  // rows of a tile for N vectors: N * R sums, R broadcasts and a weight fit into 32 registers; all divide 30
  static constexpr int rows(int n) { return n <= 2 ? 10 : n <= 4 ? 6 : 5; }
  static constexpr int float_rows(int n) { return n <= 2 ? 12 : 8; }

  template <int S>
  FI X broadcast(const uint8_t* p) {
    if (S == 1) {
      int32_t v;
      memcpy(&v, p, 4);
      return _mm512_set1_epi32(v);
    }
    int64_t v;
    memcpy(&v, p, 8);
    return _mm512_set1_epi64(v);
  }
  // n bytes, each xor `flip`; none but these are read, but up to 63 more may be written
  FI void copy(uint8_t* to, const uint8_t* from, int64_t n, uint8_t flip) {
    const __m256i half = _mm256_set1_epi8((char)flip);
    for (; n > 32; n -= 32, to += 32, from += 32)
      _mm256_storeu_si256((__m256i*)to, _mm256_xor_si256(_mm256_loadu_si256((const __m256i*)from), half));
    const __mmask32 some = (__mmask32)((1ull << n) - 1);  // what is masked out cannot fault
    _mm256_storeu_si256((__m256i*)to, _mm256_xor_si256(_mm256_maskz_loadu_epi8(some, from), half));
  }
#ifdef __AVX512VBMI__
  static constexpr bool kPieces = true;
  FI void piece(uint8_t* to, const uint8_t* row, const Piece& p, uint8_t flip) {
    const I low = _mm512_maskz_loadu_epi8(p.low, row + p.from);  // what is masked out cannot fault
    const I high = _mm512_maskz_loadu_epi8(p.high, row + p.from + 64);
    const I bytes = _mm512_maskz_permutex2var_epi8(p.out, low, _mm512_loadu_si512(p.index), high);
    _mm512_store_si512(to, _mm512_xor_si512(bytes, _mm512_maskz_set1_epi8(p.out, (char)flip)));
  }
#else
  static constexpr bool kPieces = false;
  FI void piece(uint8_t*, const uint8_t*, const Piece&, uint8_t) {}
#endif
  FI W weight(const uint8_t* p) { return _mm512_load_si512(p); }
  // what several rows multiply: gcc would load it again for each, and a core has fewer loads than products to give
  FI W kept(W w) {
    asm("" : "+v"(w));
    return w;
  }
  FI I zero() { return _mm512_setzero_si512(); }
  FI I dot(I a, X x, W w) { return _mm512_dpbusd_epi32(a, x, w); }
  FI I add(I a, I b) { return _mm512_add_epi32(a, b); }
  FI I load(const int32_t* p) { return _mm512_loadu_si512(p); }
  // lanes (2j, 2j + 1) of a, then of b, added
  FI I fold(I a, I b) {
    const I even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const I odd = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
    return _mm512_add_epi32(_mm512_permutex2var_epi32(a, even, b), _mm512_permutex2var_epi32(a, odd, b));
  }

  FI F to_float(I a) { return _mm512_cvtepi32_ps(a); }
  FI F loadf(const float* p) { return _mm512_loadu_ps(p); }
  FI void storef(float* p, F a) { _mm512_storeu_ps(p, a); }
  FI F setf(float a) { return _mm512_set1_ps(a); }
  FI F zerof() { return _mm512_setzero_ps(); }
  FI F addf(F a, F b) { return _mm512_add_ps(a, b); }
  FI F mulf(F a, F b) { return _mm512_mul_ps(a, b); }
  FI F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  FI F maxf(F a, F b) { return _mm512_max_ps(a, b); }
  FI F half(F a) {
    return _mm512_cvtph_ps(_mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  FI F from_half(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
  // rint, then 0..255: what leaves int32 becomes 2**31, which is unsigned and saturates to 255
  FI void store_bytes(uint8_t* p, F a) {
    const I i = _mm512_cvtps_epi32(_mm512_max_ps(a, _mm512_setzero_ps()));
    _mm_storeu_si128((__m128i*)p, _mm512_cvtusepi32_epi8(i));
  }
  FI float top(F a) {
    __m256 b = _mm256_max_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    __m128 c = _mm_max_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
    c = _mm_max_ps(c, _mm_permute_ps(c, 0x4e));
    return _mm_cvtss_f32(_mm_max_ss(c, _mm_movehdup_ps(c)));
  }
  FI uint32_t equal(F a, float b) { return _mm512_cmp_ps_mask(a, _mm512_set1_ps(b), _CMP_EQ_OQ); }

  // indices of the groups of 4 * S bytes that hold anything in any of R rows, at most 256 groups; writes up to 64 bytes
  // too many
  template <int S, int R>
  FI int list(const uint8_t* const* rows, int groups, uint8_t* out) {
    constexpr int kPer = 64 / (4 * S);  // groups in 64 bytes
    constexpr int kPieces = 4 * S;  // of 64 bytes in 64 groups
    int count = 0, base = 0;
    const uint8_t* x[R];
    for (int r = 0; r < R; r++) x[r] = rows[r];
    for (; base + 64 <= groups; base += 64) {
      uint64_t mask = 0;
#pragma GCC unroll 8
      for (int z = 0; z < kPieces; z++) mask |= holds<S>(any<R>(x, z * 64)) << (z * kPer);
      for (int r = 0; r < R; r++) x[r] += kPieces * 64;
      count += emit(mask, base, out + count);
    }
    uint64_t mask = 0;
    int g = base;
    int at = 0;
    for (; g + kPer <= groups; g += kPer, at += 64) mask |= holds<S>(any<R>(x, at)) << (g - base);
    if (g < groups) {  // masked bytes are never touched
      const __mmask64 in = (1ull << ((groups - g) * 4 * S)) - 1;
      I v = _mm512_maskz_loadu_epi8(in, x[0] + at);
      for (int r = 1; r < R; r++) v = _mm512_or_si512(v, _mm512_maskz_loadu_epi8(in, x[r] + at));
      mask |= holds<S>(v) << (g - base);
    }
    if (base < groups) count += emit(mask, base, out + count);
    return count;
  }
  template <int R>
  FI I any(const uint8_t* const* x, int at) {
    I v = _mm512_loadu_si512(x[0] + at);
    for (int r = 1; r < R; r++) v = _mm512_or_si512(v, _mm512_loadu_si512(x[r] + at));
    return v;
  }
  template <int S>
  FI uint64_t holds(I v) {
    return S == 1 ? (uint64_t)_mm512_test_epi32_mask(v, v) : (uint64_t)_mm512_test_epi64_mask(v, v);
  }
  FI int emit(uint64_t mask, int base, uint8_t* out) {
#ifdef __AVX512VBMI2__
    const I numbers = _mm512_add_epi8(_mm512_load_si512(kNumbers), _mm512_set1_epi8((char)base));
    _mm512_storeu_si512(out, _mm512_maskz_compress_epi8(mask, numbers));
    return __builtin_popcountll(mask);
#else
    int count = 0;
    for (; mask; mask &= mask - 1) out[count++] = (uint8_t)(base + __builtin_ctzll(mask));
    return count;
#endif
  }
  alignas(64) static constexpr uint8_t kNumbers[64] = {
      0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21,
      22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43,
      44, 45, 46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61, 62, 63};
};

}  // namespace
