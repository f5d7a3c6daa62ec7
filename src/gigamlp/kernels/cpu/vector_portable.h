// Portable C++: 8 lanes in plain loops. The reference for every other set, and what runs where there is none.
#pragma once
#include <stdint.h>
#include <string.h>
#define FI static inline __attribute__((always_inline))
#include "net.h"
#define GIGAMLP_PLAIN_LOOPS  // written out this takes half a minute to compile

namespace {

struct V {
  static constexpr int L = 8;
  struct I {
    int32_t v[L];
  };
  struct F {
    float v[L];
  };
  struct X {
    int32_t v[4];
  };
  using W = const uint8_t*;
  static constexpr int kDenseSpan = 1;
  static constexpr bool kSkips = true;
  static constexpr bool kPieces = false;
  FI void piece(uint8_t*, const uint8_t*, const gigamlp::Piece&, uint8_t) {}
  static constexpr int kTogether = 1;  // rows that may share a list
  static constexpr int kExactBits = 8;
  static constexpr int rows(int) { return 2; }
  static constexpr int float_rows(int) { return 2; }

  template <int S>
  FI X broadcast(const uint8_t* p) {
    static_assert(S == 1, "one group to a vector");
    return {{p[0], p[1], p[2], p[3]}};
  }
  FI void copy(uint8_t* to, const uint8_t* from, int64_t n, uint8_t flip) {
    if (flip == 0) memcpy(to, from, (size_t)n);
    else for (int64_t i = 0; i < n; i++) to[i] = from[i] ^ flip;
  }
  FI W weight(const uint8_t* p) { return p; }
  FI W kept(W w) { return w; }
  FI I zero() { return I{}; }
  FI I dot(I a, X x, W w) {
    for (int l = 0; l < L; l++)
      for (int k = 0; k < 4; k++) a.v[l] += x.v[k] * (int8_t)w[4 * l + k];
    return a;
  }
  FI I add(I a, I b) {
    for (int l = 0; l < L; l++) a.v[l] = (int32_t)((uint32_t)a.v[l] + (uint32_t)b.v[l]);
    return a;
  }
  FI I fold(I a, I) { return a; }  // for two groups to a vector only
  FI I load(const int32_t* p) {
    I a;
    memcpy(a.v, p, sizeof a.v);
    return a;
  }

  FI F to_float(I a) {
    F f;
    for (int l = 0; l < L; l++) f.v[l] = (float)a.v[l];
    return f;
  }
  FI F loadf(const float* p) {
    F f;
    memcpy(f.v, p, sizeof f.v);
    return f;
  }
  FI void storef(float* p, F a) { memcpy(p, a.v, sizeof a.v); }
  FI F setf(float a) {
    F f;
    for (int l = 0; l < L; l++) f.v[l] = a;
    return f;
  }
  FI F zerof() { return setf(0.0f); }
  FI F addf(F a, F b) {
    for (int l = 0; l < L; l++) a.v[l] += b.v[l];
    return a;
  }
  FI F mulf(F a, F b) {
    for (int l = 0; l < L; l++) a.v[l] *= b.v[l];
    return a;
  }
  FI F fma(F a, F b, F c) {
    for (int l = 0; l < L; l++) c.v[l] += a.v[l] * b.v[l];
    return c;
  }
  FI F maxf(F a, F b) {
    for (int l = 0; l < L; l++) a.v[l] = a.v[l] > b.v[l] ? a.v[l] : b.v[l];
    return a;
  }
  // to float16 and back: nearest even, subnormals kept, infinity from 65,520 on
  FI float round_half(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    const uint32_t sign = bits & 0x80000000u, a = bits & 0x7fffffffu;
    float y;
    memcpy(&y, &a, 4);
    if (a >= 0x477ff000u) {
      y = a > 0x7f800000u ? y : __builtin_inff();
    } else if (a < 0x38800000u) {  // below 2**-14 the steps are 2**-24: adding 0.5 leaves just these
      y = (y + 0.5f) - 0.5f;
    } else {
      const uint32_t rounded = (a + 0xfffu + ((a >> 13) & 1u)) & ~0x1fffu;
      memcpy(&y, &rounded, 4);
    }
    memcpy(&bits, &y, 4);
    bits |= sign;
    memcpy(&y, &bits, 4);
    return y;
  }
  FI F half(F a) {
    for (int l = 0; l < L; l++) a.v[l] = round_half(a.v[l]);
    return a;
  }
  FI F from_half(const uint16_t* p) {
    F f;
    for (int l = 0; l < L; l++) {
      const uint32_t sign = (uint32_t)(p[l] >> 15) << 31, exponent = p[l] >> 10 & 31u, digits = p[l] & 1023u;
      const uint32_t bits = sign | (exponent == 31 ? 255u : exponent + 112u) << 23 | digits << 13;
      float y;
      memcpy(&y, &bits, 4);
      if (exponent == 0) y = (sign ? -1.0f : 1.0f) * (float)digits * 5.9604644775390625e-8f;  // 2**-24
      f.v[l] = y;
    }
    return f;
  }
  FI void store_bytes(uint8_t* p, F a) {
    for (int l = 0; l < L; l++) {
      const float bounded = a.v[l] > 0 ? (a.v[l] < 255.0f ? a.v[l] : 255.0f) : 0.0f;
      p[l] = (uint8_t)((bounded + 12582912.0f) - 12582912.0f);  // 1.5 * 2**23: adding it rounds to nearest even
    }
  }
  FI float top(F a) {
    float m = a.v[0];
    for (int l = 1; l < L; l++) m = a.v[l] > m ? a.v[l] : m;
    return m;
  }
  FI uint32_t equal(F a, float b) {
    uint32_t mask = 0;
    for (int l = 0; l < L; l++) mask |= (uint32_t)(a.v[l] == b) << l;
    return mask;
  }
  template <int S, int R>
  FI int list(const uint8_t* const* rows, int groups, uint8_t* out) {
    static_assert(S == 1 && R == 1, "one group to a vector, one row to a list");
    const uint8_t* x = rows[0];
    int count = 0;
    for (int g = 0; g < groups; g++) {
      uint32_t v;
      memcpy(&v, x + 4 * g, 4);
      out[count] = (uint8_t)g;
      count += v != 0;
    }
    return count;
  }
};

}  // namespace
