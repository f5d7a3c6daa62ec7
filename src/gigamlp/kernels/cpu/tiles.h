// The two inner loops, for any vector type V: sums of a tile of rows and outputs, dense or over a list of groups.
#pragma once
#include "net.h"

namespace {

using namespace gigamlp;

// EACH(i, N, statements): the statements for i = 0 .. N - 1, written out. The numbers are constants from the start, so
// that arrays of sums become registers; loops that are unrolled later leave them in memory (gcc 12: a fifth of the
// speed).
template <int I>
struct Index {
  constexpr operator int() const { return I; }
};

template <int I, int N, class Body>
FI void each(const Body& body) {
  if constexpr (I < N) {
    body(Index<I>{});
    each<I + 1, N>(body);
  }
}

#ifdef GIGAMLP_PLAIN_LOOPS
#define EACH(i, n, ...) \
  for (int i = 0; i < (n); i++) { __VA_ARGS__ }
#else
#define EACH(i, n, ...) each<0, (n)>([&](auto i) __attribute__((always_inline)) { __VA_ARGS__ });
#endif

// What becomes of a tile's sums: all pointers at the tile's first output.
struct Finish {
  const int32_t* init;  // or null: nothing is added to the sums
  const float* scale;
  const float* bias;
  uint8_t* bytes;  // or null: floats are written
  float* floats;
  int64_t stride;  // elements from row to row of what is written
  bool relu, half;

  FI Finish at(const Finish& f, int64_t output) {
    return {f.init ? f.init + output : nullptr, f.scale ? f.scale + output : nullptr, f.bias + output,
            f.bytes ? f.bytes + output : nullptr, f.floats ? f.floats + output : nullptr, f.stride, f.relu, f.half};
  }
};

// two roundings, product then sum: never a fused multiply-add (docs/quantisation.md)
template <bool kInit>
FI V::F rescale(V::I sums, const Finish& f, int at) {
  if constexpr (kInit) sums = V::add(sums, V::load(f.init + at));
  return V::addf(V::mulf(V::to_float(sums), V::loadf(f.scale + at)), V::loadf(f.bias + at));
}

FI void put_float(V::F z, const Finish& f, float* out) {
  if (f.relu) z = V::maxf(z, V::zerof());
  if (f.half) z = V::half(z);
  V::storef(out, z);
}

template <int S, int N, bool kInit>
FI V::F rescaled(const V::I* a, const Finish& f, int j) {
  V::I sums = a[j];
  if constexpr (S == 2) sums = V::fold(a[2 * j], 2 * j + 1 < N ? a[2 * j + 1] : V::zero());
  return rescale<kInit>(sums, f, j * V::L);
}

template <int S, int N, bool kInit>
FI void put_all(const V::I* a, const Finish& f, int64_t row) {
  constexpr int kVectors = (N + S - 1) / S;
  if (f.bytes) {
    uint8_t* out = f.bytes + row * f.stride;
    EACH(j, kVectors, V::store_bytes(out + j * V::L, rescaled<S, N, kInit>(a, f, j));)
  } else {
    float* out = f.floats + row * f.stride;
    EACH(j, kVectors, put_float(rescaled<S, N, kInit>(a, f, j), f, out + j * V::L);)
  }
}

template <int S, int N>
FI void put_sums(const V::I* a, const Finish& f, int64_t row) {
  if (f.init) put_all<S, N, true>(a, f, row);
  else put_all<S, N, false>(a, f, row);
}

// The bytes that the next block will read: fetched little by little, as all at once would wait for memory.
struct Ahead {
  const uint8_t* x;  // or null
  int64_t stride, bytes;

  FI Ahead at(const Ahead& a, int64_t row) { return {a.x ? a.x + row * a.stride : nullptr, a.stride, a.bytes}; }
};

// R rows times N vectors of outputs; rows from `count` on repeat the last one and are not written
template <int S, int N, int R>
__attribute__((noinline)) void dense_tile(const uint8_t* x, int64_t stride, int64_t count, int64_t in,
                                          const Ahead& ahead, const uint8_t* w, const Finish& given) {
  const Finish f = given;  // a copy: stores of bytes could change what lies in memory
  constexpr int kGroup = 4 * S, kVector = 4 * V::L;
  const uint8_t* next = ahead.x;
  const int64_t lines = ahead.bytes > in ? 128 : 64, apart = ahead.stride;  // windows: more to fetch than to multiply
  const uint8_t* rows[R];
  EACH(r, R, rows[r] = x + (r < count ? r : count - 1) * stride;)
  V::I a[R][N];
  EACH(r, R, EACH(n, N, a[r][n] = V::zero();))
  const int64_t whole = in / kGroup * kGroup;
  int64_t k = 0;
  for (; k < whole; k += kGroup) {
    if (next && k % 64 == 0) {
      EACH(r, R, __builtin_prefetch(next + r * apart, 0, 3);)
      if (lines > 64) { EACH(r, R, __builtin_prefetch(next + r * apart + 64, 0, 3);) }
      next += lines;
    }
    V::X p[R];
    EACH(r, R, p[r] = V::broadcast<S>(rows[r] + k);)
    EACH(n, N, const V::W v = V::kept(V::weight(w + n * kVector));
      EACH(r, R, a[r][n] = V::dot(a[r][n], p[r], v);))
    w += N * kVector;
  }
  if (k < in) {  // the last bytes of a row: no byte behind them is read
    V::X p[R];
    EACH(r, R, uint8_t last[8] = {0, 0, 0, 0, 0, 0, 0, 0};
      memcpy(last, rows[r] + k, (size_t)(in - k));
      p[r] = V::broadcast<S>(last);)
    EACH(n, N, const V::W v = V::kept(V::weight(w + n * kVector));
      EACH(r, R, a[r][n] = V::dot(a[r][n], p[r], v);))
  }
  EACH(r, R, if (r < count) put_sums<S, N>(a[r], f, r);)
}

// one row, four groups at a time in sums of their own: a single chain of sums would wait for each product
template <int S, int N>
__attribute__((noinline)) void dense_row(const uint8_t* x, int64_t in, const uint8_t* w, const Finish& given) {
  const Finish f = given;  // a copy: stores of bytes could change what lies in memory
  constexpr int kGroup = 4 * S, kVector = 4 * V::L, U = N <= 2 ? 4 : N <= 4 ? 3 : 2;
  V::I a[U][N];
  EACH(u, U, EACH(n, N, a[u][n] = V::zero();))
  int64_t k = 0;
  for (; k + U * kGroup <= in; k += U * kGroup) {
    EACH(u, U, const V::X p = V::broadcast<S>(x + k + u * kGroup);
      EACH(n, N, a[u][n] = V::dot(a[u][n], p, V::weight(w + (u * N + n) * kVector));))
    w += U * N * kVector;
  }
  for (; k < in; k += kGroup) {
    uint8_t last[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    memcpy(last, x + k, (size_t)(in - k < kGroup ? in - k : kGroup));
    const V::X p = V::broadcast<S>(last);
    EACH(n, N, a[0][n] = V::dot(a[0][n], p, V::weight(w + n * kVector));)
    w += N * kVector;
  }
  EACH(u, U, if (u > 0) { EACH(n, N, a[0][n] = V::add(a[0][n], a[u][n]);) })
  put_sums<S, N>(a[0], f, 0);
}

// ---- over the groups that hold anything -----------------------------------------------------------------------------

constexpr int kSegment = 256;                 // groups that one byte can number
constexpr int kListBytes = kSegment + 64;     // a list may write up to 64 bytes too many

alignas(64) constexpr uint8_t kZeros[8 * 4 * V::L] = {0};

template <int S>
FI int64_t segments(int64_t in) { return (in / (4 * S) + kSegment - 1) / kSegment; }

// R rows times N vectors of outputs, over the groups that any of the rows holds anything in; rows from `count` on repeat
// the last one and are not written. Each weight that is loaded serves R rows.
template <int S, int N, int R>
__attribute__((noinline)) void skip_tile(const uint8_t* x, int64_t stride, int64_t count, int64_t in,
                                         const uint8_t* list, const int32_t* counts, const Ahead& ahead,
                                         const uint8_t* w, const Finish& given) {
  const Finish f = given;  // a copy: stores of bytes could change what lies in memory
  // U groups at a time in sums of their own, where a single chain would wait for each product
  constexpr int kGroup = 4 * S, kVector = 4 * V::L, kSums = N * R;
  constexpr int U = kSums >= 9 ? (R > 1 ? 1 : 2) : kSums >= 5 ? (R > 1 ? 2 : 3) : 4;
  const uint8_t* rows[R];
  EACH(r, R, rows[r] = x + (r < count ? r : count - 1) * stride;)
  V::I a[U][R][N];
  EACH(u, U, EACH(r, R, EACH(n, N, a[u][r][n] = V::zero();)))
  const int64_t whole = in / kGroup, parts = segments<S>(in);
  const uint8_t* next = ahead.x;
  const uint8_t* end = next ? next + (R - 1) * ahead.stride + ahead.bytes : nullptr;  // gaps between rows are small
  for (int64_t part = 0; part < parts; part++) {
    const uint8_t* mine = w + part * kSegment * N * kVector;
    const uint8_t* at = list + part * kListBytes;
    const int count = counts[part];
    int j = 0;
    for (; j + U <= count; j += U) {
      if (next < end) {
        __builtin_prefetch(next, 0, 3);
        next += 64;
      }
      EACH(u, U, const size_t g = at[j + u];
        V::X p[R];
        EACH(r, R, p[r] = V::broadcast<S>(rows[r] + g * kGroup);)
        EACH(n, N, const V::W v = R > 1 ? V::kept(V::weight(mine + (g * N + n) * kVector)) : V::weight(mine + (g * N + n) * kVector);
          EACH(r, R, a[u][r][n] = V::dot(a[u][r][n], p[r], v);)))
    }
    if (U > 1 && j < count) {  // up to U - 1 more, the missing ones times zeros: a loop would end where none foresees it
      EACH(u, U, if (u < U - 1) {
        const bool there = j + u < count;
        const size_t g = there ? at[j + u] : 0;
        const uint8_t* from = there ? mine + g * (N * kVector) : kZeros;
        V::X p[R];
        EACH(r, R, p[r] = V::broadcast<S>(rows[r] + g * kGroup);)
        EACH(n, N, const V::W v = V::weight(from + n * kVector);
          EACH(r, R, a[u][r][n] = V::dot(a[u][r][n], p[r], v);))
      })
    }
    EACH(r, R, rows[r] += kSegment * kGroup;)
  }
  if (whole * kGroup < in) {  // the last bytes of a row: no byte behind them is read
    const int64_t k = whole * kGroup - parts * kSegment * kGroup;
    V::X p[R];
    EACH(r, R, uint8_t last[8] = {0, 0, 0, 0, 0, 0, 0, 0};
      memcpy(last, rows[r] + k, (size_t)(in - whole * kGroup));
      p[r] = V::broadcast<S>(last);)
    EACH(n, N, const V::W v = V::weight(w + (whole * N + n) * kVector);
      EACH(r, R, a[0][r][n] = V::dot(a[0][r][n], p[r], v);))
  }
  EACH(u, U, if (u > 0) { EACH(r, R, EACH(n, N, a[0][r][n] = V::add(a[0][r][n], a[u][r][n]);)) })
  EACH(r, R, if (r < count) put_sums<S, N>(a[0][r], f, r);)
}

// ---- float32 --------------------------------------------------------------------------------------------------------

template <int N, int R>
__attribute__((noinline)) void float_tile(const float* x, int64_t stride, int64_t count, int64_t in, const float* w,
                                          const Finish& given) {
  const Finish f = given;
  const float* rows[R];
  EACH(r, R, rows[r] = x + (r < count ? r : count - 1) * stride;)
  V::F a[R][N];
  EACH(r, R, EACH(n, N, a[r][n] = V::loadf(f.bias + n * V::L);))
  for (int64_t k = 0; k < in; k++) {
    V::F v[N];
    EACH(n, N, v[n] = V::loadf(w + n * V::L);)
    EACH(r, R, const V::F p = V::setf(rows[r][k]);
      EACH(n, N, a[r][n] = V::fma(p, v[n], a[r][n]);))
    w += N * V::L;
  }
  EACH(r, R, if (r < count) {
      EACH(n, N, put_float(a[r][n], f, f.floats + r * f.stride + n * V::L);)
    })
}

}  // namespace
