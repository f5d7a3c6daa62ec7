// The zero-skipping form of the first layer: which groups of the rows hold anything, and whether that pays.
#pragma once
#include "tiles.h"

namespace {

struct Lists {
  uint8_t* numbers;  // [rows / R][part][kListBytes]
  int32_t* counts;   // [rows / R][part]
};

// ---- the layer ------------------------------------------------------------------------------------------------------

template <int S, int N, int R>
void skip_chunk(const uint8_t* x, int64_t stride, int64_t rows, int64_t in, const Ahead& ahead, const Lists& lists,
                const uint8_t* w, const Finish& f) {
  const int64_t parts = segments<S>(in);
  for (int64_t r = 0; r < rows; r += R) {
    Finish here = f;
    if (f.bytes) here.bytes += r * f.stride;
    else here.floats += r * f.stride;
    const int64_t list = r / R * parts;
    skip_tile<S, N, R>(x + r * stride, stride, rows - r < R ? rows - r : R, in, lists.numbers + list * kListBytes,
                       lists.counts + list, Ahead::at(ahead, r), w, here);
  }
}

template <int S, int R>
void skip_layer(const Layer& l, const uint8_t* blob, const uint8_t* x, int64_t stride, int64_t rows, const Ahead& ahead,
                const Lists& lists, const Finish& f) {
  constexpr int64_t kOutputs = V::L / S;
  const int64_t units = (l.pad + kOutputs - 1) / kOutputs, groups = (l.in + 4 * S - 1) / (4 * S);
  for (int64_t first = 0; first < units; first += l.skip_chunk) {
    const uint8_t* w = blob + l.skip_weights + first * groups * 4 * V::L;
    const Finish here = Finish::at(f, first * kOutputs);
    const Ahead next = first ? Ahead{} : ahead;
    switch (units - first < l.skip_chunk ? units - first : l.skip_chunk) {
      case 1: skip_chunk<S, 1, R>(x, stride, rows, l.in, next, lists, w, here); break;
      case 2: skip_chunk<S, 2, R>(x, stride, rows, l.in, next, lists, w, here); break;
      case 3: skip_chunk<S, 3, R>(x, stride, rows, l.in, next, lists, w, here); break;
      case 4: skip_chunk<S, 4, R>(x, stride, rows, l.in, next, lists, w, here); break;
      case 5: skip_chunk<S, 5, R>(x, stride, rows, l.in, next, lists, w, here); break;
      default: skip_chunk<S, 8, R>(x, stride, rows, l.in, next, lists, w, here); break;
    }
  }
}

// ---- lists ----------------------------------------------------------------------------------------------------------

// lists for R rows at a time; returns how many groups are on them
template <int S, int R>
__attribute__((noinline)) int64_t make_lists(const uint8_t* x, int64_t stride, int64_t rows, int64_t in,
                                             const Lists& lists) {
  const int64_t groups = in / (4 * S), parts = segments<S>(in);
  int64_t total = 0, list = 0;
  for (int64_t r = 0; r < rows; r += R) {
    const uint8_t* from[R];
    for (int64_t q = 0; q < R; q++) from[q] = x + (r + q < rows ? r + q : rows - 1) * stride;
    for (int64_t part = 0; part < parts; part++, list++) {
      const int64_t left = groups - part * kSegment;
      const int n = V::list<S, R>(from, (int)(left < kSegment ? left : kSegment), lists.numbers + list * kListBytes);
      lists.counts[list] = n;
      total += n;
      for (int64_t q = 0; q < R; q++) from[q] += kSegment * 4 * S;
    }
  }
  return total;
}

// the time of a form in that of the dense one, where `share` of the groups on its lists are not zero
FI double cost(const Way& way, double share) {
  // measured at 1/4 and 3/4; where that line starts below 0 (many groups leave the first cache), few cost their part
  if (way.fixed < 0 && share < 0.25) return (4 * way.fixed + way.slope) * share;
  return way.fixed + way.slope * share;
}

// Runs the first layer in a zero-skipping form if that is the quickest way for these rows. A few rows tell: lists that
// come to nothing would cost a dense block a tenth of its time.
template <int S>
bool skipped(const Net& net, const Layer& l, const uint8_t* x, int64_t stride, int64_t rows, const Ahead& ahead,
             const Lists& lists, const Finish& f) {
  constexpr int R = V::kTogether;
  constexpr int64_t kLooks = 2;
  if (l.skip_span != S || l.skip_chunk == 0) return false;
  bool together = R > 1 && rows >= R, made = false;
  if (together || net.zeros == kAuto) {
    const int64_t looks = rows < kLooks * R ? 1 : kLooks, apart = rows / looks * stride, some = rows < R ? rows : R;
    const double groups = (double)(l.in / (4 * S) * looks);
    double apiece = 2.0, jointly = 2.0, least = 0.0;
    if (together && groups > 0) {
      int64_t found = 0;
      for (int64_t i = 0; i < looks; i++) found += make_lists<S, R>(x + i * apart, stride, R, l.in, lists);
      jointly = cost(net.ways[1], (double)found / groups);
      least = cost(net.ways[0], (double)found / groups / R);  // what rows share, one of them has: it takes no less
    }
    if (groups > 0 && least < 1.0 && least < jointly) {
      int64_t found = 0;
      for (int64_t i = 0; i < looks; i++) found += make_lists<S, 1>(x + i * apart, stride, some, l.in, lists);
      made = some == rows;
      apiece = cost(net.ways[0], (double)found / (groups * (double)some));
    }
    if (net.zeros == kAuto && apiece > 1.0 && jointly > 1.0) return false;
    together = together && jointly < apiece;
  }
  if (together) {
    make_lists<S, R>(x, stride, rows, l.in, lists);
    skip_layer<S, R>(l, net.blob, x, stride, rows, ahead, lists, f);
  } else {
    if (!made) make_lists<S, 1>(x, stride, rows, l.in, lists);
    skip_layer<S, 1>(l, net.blob, x, stride, rows, ahead, lists, f);
  }
  return true;
}

}  // namespace
