// A block of rows through all layers, in scratch that stays in cache, and the answers out of the last one.
#pragma once
#include "activations.h"
#include "lists.h"
#ifdef GIGAMLP_AMX
#include "amx.h"
#endif

namespace gigamlp {
double now_us();  // in cpu.cpp, compiled without special instructions
}

namespace {

constexpr int kMostUnits = 5;

FI int64_t up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
FI int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
FI int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

// ---- scratch --------------------------------------------------------------------------------------------------------

struct Scratch {
  int64_t row;    // bytes from row to row of the gathered input
  int64_t line;   // bytes from row to row of `first` and `second`
  int64_t gathered, numbers, counts, first, second, size;
};

FI Scratch layout(const Net& net) {
  Scratch s;
  int64_t widest = 0;
  for (int64_t i = 0; i < net.depth; i++) widest = most(widest, net.layers[i].pad);
  const bool floats = net.layers[0].is_float;
  s.row = up(net.read * (floats ? 4 : 1), 64);
  s.line = up((widest + 16) * 4, 64);
  s.gathered = 0;
  const int64_t parts = floats || net.zeros == kDense ? 0 : net.block * segments<1>(net.read);
  s.numbers = s.gathered + net.block * s.row;
  s.counts = s.numbers + parts * kListBytes;
  s.first = s.counts + up(4 * parts, 64);
  s.second = s.first + net.block * s.line;
  s.size = s.second + net.block * s.line + 256;
  return s;
}

// ---- rows in --------------------------------------------------------------------------------------------------------

FI bool reads_in_place(const Net& net) {
#ifdef GIGAMLP_AMX
  if (!net.layers[0].is_float) return false;  // tiles read 16 rows and 64 bytes, whether they are there or not
#endif
  return net.window_count == 1 && (net.input == kUint8 || net.input == kFloat32) &&
         (net.input == kFloat32) == (net.layers[0].is_float != 0);
}

__attribute__((noinline)) void gather(const Net& net, const uint8_t* x, int64_t stride, int64_t rows, uint8_t* out,
                                      int64_t out_stride) {
  if constexpr (V::kPieces) {
    if (net.pieces && net.window_count > 1 && !net.layers[0].is_float) {
      const uint8_t flip = net.input == kInt8 ? 0x80 : 0;
      for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < out_stride; i += 64) V::piece(out + r * out_stride + i, x + r * stride, net.pieces[i / 64], flip);
      return;
    }
  }
  for (int64_t r = 0; r < rows; r++) {
    const uint8_t* row = x + r * stride;
    uint8_t* bytes = out + r * out_stride;
    float* floats = (float*)bytes;
    for (int64_t w = 0; w < net.window_count; w++) {
      const int64_t from = net.windows[2 * w], n = net.windows[2 * w + 1] - from;
      if (!net.layers[0].is_float) {
        const uint8_t flip = net.input == kInt8 ? 0x80 : 0;  // x + 128, which `init` takes back
        V::copy(bytes, row + from, n, flip);  // what it writes beyond is the next run's, row's or list's, written later
        bytes += n;
        continue;
      }
      switch (net.input) {
        case kUint8:
          for (int64_t i = 0; i < n; i++) floats[i] = row[from + i];
          break;
        case kInt8:
          for (int64_t i = 0; i < n; i++) floats[i] = (int8_t)row[from + i];
          break;
        case kFloat32:
          memcpy(floats, row + 4 * from, (size_t)(4 * n));
          break;
        default: {
          uint16_t last[16] = {0};
          int64_t i = 0;
          for (; i + V::L <= n; i += V::L) V::storef(floats + i, V::from_half((const uint16_t*)row + from + i));
          float wide[16];
          memcpy(last, row + 2 * (from + i), (size_t)(2 * (n - i)));
          V::storef(wide, V::from_half(last));
          memcpy(floats + i, wide, (size_t)(4 * (n - i)));
        }
      }
      floats += n;
    }
    if (!net.layers[0].is_float) memset(bytes, 0, (size_t)(out + r * out_stride + out_stride - bytes));
  }
}

// ---- layers ---------------------------------------------------------------------------------------------------------

template <int S, int N>
void dense_chunk(const uint8_t* x, int64_t stride, int64_t rows, int64_t in, const Ahead& ahead,
                 const uint8_t* w, const Finish& f) {
  constexpr int R = V::rows(N);
  for (int64_t r = 0; r < rows; r += R) {
    Finish here = f;
    if (f.bytes) here.bytes += r * f.stride;
    else here.floats += r * f.stride;
    if (rows - r == 1) dense_row<S, N>(x + r * stride, in, w, here);
    else dense_tile<S, N, R>(x + r * stride, stride, least(R, rows - r), in, Ahead::at(ahead, r), w, here);
  }
}

void dense_layer(const Layer& l, const uint8_t* blob, const uint8_t* x, int64_t stride, int64_t rows, int64_t in,
                 const Ahead& ahead, const Finish& f) {
#ifdef GIGAMLP_AMX
  (void)in;
  (void)ahead;
  amx_layer(l, blob, x, stride, rows, f);
#else
  constexpr int S = V::kDenseSpan;
  constexpr int64_t kOutputs = V::L / S;
  const int64_t units = l.pad / kOutputs, groups = (l.in + 4 * S - 1) / (4 * S);
  for (int64_t first = 0; first < units; first += l.chunk) {
    const uint8_t* w = blob + l.weights + first * groups * 4 * V::L;
    const Finish here = Finish::at(f, first * kOutputs);
    const Ahead next = first ? Ahead{} : ahead;
    switch (least(l.chunk, units - first)) {
      case 1: dense_chunk<S, 1>(x, stride, rows, in, next, w, here); break;
      case 2: dense_chunk<S, 2>(x, stride, rows, in, next, w, here); break;
      case 3: dense_chunk<S, 3>(x, stride, rows, in, next, w, here); break;
      case 4: dense_chunk<S, 4>(x, stride, rows, in, next, w, here); break;
      default: dense_chunk<S, kMostUnits>(x, stride, rows, in, next, w, here); break;
    }
  }
#endif
}

template <int N>
void float_chunk(const float* x, int64_t stride, int64_t rows, int64_t in, const float* w, const Finish& f) {
  constexpr int R = V::float_rows(N);
  for (int64_t r = 0; r < rows; r += R) {
    Finish here = f;
    here.floats += r * f.stride;
    if (rows - r == 1) float_tile<N, 1>(x + r * stride, stride, 1, in, w, here);
    else float_tile<N, R>(x + r * stride, stride, least(R, rows - r), in, w, here);
  }
}

void float_layer(const Layer& l, const uint8_t* blob, const float* x, int64_t stride, int64_t rows, const Finish& f) {
  const int64_t units = l.pad / V::L;
  for (int64_t first = 0; first < units; first += l.chunk) {
    const float* w = (const float*)(blob + l.weights) + first * l.in * V::L;
    const Finish here = Finish::at(f, first * V::L);
    switch (least(l.chunk, units - first)) {
      case 1: float_chunk<1>(x, stride, rows, l.in, w, here); break;
      case 2: float_chunk<2>(x, stride, rows, l.in, w, here); break;
      default: float_chunk<3>(x, stride, rows, l.in, w, here); break;
    }
  }
}

// ---- answers out ----------------------------------------------------------------------------------------------------

FI float highest(const float* z, int64_t pad) {
  V::F m = V::loadf(z);
  for (int64_t i = V::L; i < pad; i += V::L) m = V::maxf(m, V::loadf(z + i));
  return V::top(m);
}

FI int64_t first_equal(const float* z, int64_t pad, float value) {
  for (int64_t i = 0; i < pad; i += V::L) {
    const uint32_t found = V::equal(V::loadf(z + i), value);
    if (found) return i + __builtin_ctz(found);
  }
  return 0;
}

// z [rows][stride] with padding of -inf up to a multiple of the lanes; it is overwritten
__attribute__((noinline)) void answer(const Net& net, const Job& job, int64_t begin, int64_t rows, float* z,
                                      int64_t stride) {
  const Layer& l = net.layers[net.depth - 1];
  if (net.output == kClass && net.head == kSoftmax && l.pad == V::L) {  // what is asked for most, without branches
    int64_t* ids = (int64_t*)job.out + begin;
    for (int64_t r = 0; r < rows; r++, z += stride) {
      const V::F y = V::loadf(z);
      ids[r] = __builtin_ctz(V::equal(y, V::top(y)) | 1u << (V::L - 1));
    }
    return;
  }
  const int64_t pad = up(l.pad, V::L), width = net.head == kSigmoid && net.output == kProba ? 2 : l.out;
  int64_t* ids = (int64_t*)job.out + begin;
  float* out = (float*)job.out + begin * width;
  for (int64_t r = 0; r < rows; r++, z += stride, out += width) {
    for (int64_t i = l.pad; i < pad; i++) z[i] = -__builtin_inff();
    if (net.output == kLogits) {
      memcpy(out, z, (size_t)(4 * l.out));
    } else if (net.output == kProba) {
      if (net.head == kSigmoid) {
        out[1] = logistic(z[0]);
        out[0] = 1.0f - out[1];
      } else if (net.head == kMultilabel) {
        for (int64_t i = 0; i < l.out; i++) out[i] = logistic(z[i]);
      } else {
        softmax(z, highest(z, pad), l.out, out);
      }
    } else if (net.head == kSigmoid) {
      ids[r] = z[0] > 0;
      if (net.output == kMargin) job.margin[begin + r] = magnitude(z[0]);
    } else {
      const float top = highest(z, pad);
      ids[r] = first_equal(z, pad, top);
      if (net.output == kMargin) {
        z[ids[r]] = -__builtin_inff();
        job.margin[begin + r] = top - highest(z, pad);
      }
    }
  }
}

// ---- a block --------------------------------------------------------------------------------------------------------

FI void finish_rows(const Layer& l, const uint8_t* blob, float* z, int64_t stride, int64_t rows, uint8_t* bytes,
                    int64_t bytes_stride) {
  const float* inverse = l.bytes ? (const float*)(blob + l.inverse) : nullptr;
  const float* zero = l.bytes ? (const float*)(blob + l.zero) : nullptr;
  for (int64_t r = 0; r < rows; r++, z += stride) {
    activate(l.activation, z, l.out);
    for (int64_t i = 0; i < l.pad; i += V::L) {
      const V::F y = V::loadf(z + i);
      if (l.bytes)
        V::store_bytes(bytes + r * bytes_stride + i,
                       V::addf(V::mulf(y, V::loadf(inverse + i)), V::loadf(zero + i)));
      else if (l.half)
        V::storef(z + i, V::half(y));
    }
  }
}

void forward(const Net& net, const Job& job, int64_t begin, int64_t end, uint8_t* scratch,
             const Scratch& s) {
  const uint8_t* x = job.x + begin * job.stride;
  const int64_t rows = least(net.block, end - begin);
  int64_t stride = job.stride, in = net.read;
  const int64_t item = net.input == kFloat32 ? 4 : net.input == kFloat16 ? 2 : 1;
  const int64_t left = net.windows[0], right = net.windows[2 * net.window_count - 1];
  const Ahead ahead = {begin + rows < end ? x + rows * stride + left * item : nullptr, stride, (right - left) * item};
  if (reads_in_place(net)) {
    x += net.windows[0] * (net.input == kFloat32 ? 4 : 1);
  } else {
    gather(net, x, stride, rows, scratch + s.gathered, s.row);
    x = scratch + s.gathered;
    stride = s.row;
    if (!net.layers[0].is_float) in = up(in, 4 * V::kDenseSpan);  // the rest of such a row is zeros
  }
  const Lists lists = {scratch + s.numbers, (int32_t*)(scratch + s.counts)};
  uint8_t* now = scratch + s.first;
  uint8_t* other = scratch + s.second;
  for (int64_t i = 0; i < net.depth; i++) {
    const Layer& l = net.layers[i];
    const bool simple = l.activation == kIdentity || l.activation == kRelu, bytes = l.bytes && simple;
    const Finish f = {l.init < 0 ? nullptr : (const int32_t*)(net.blob + l.init),
                      l.is_float ? nullptr : (const float*)(net.blob + l.scale),
                      (const float*)(net.blob + l.bias),
                      bytes ? other : nullptr,
                      bytes ? nullptr : (float*)other,
                      bytes ? s.line : s.line / 4,
                      l.activation == kRelu,
                      l.half && simple};
    if (l.is_float) {
      float_layer(l, net.blob, (const float*)x, stride / 4, rows, f);
    } else {
      const bool first = i == 0 && net.zeros != kDense;
      if (!(first && (skipped<1>(net, l, x, stride, rows, ahead, lists, f) ||
                      skipped<V::kDenseSpan>(net, l, x, stride, rows, ahead, lists, f))))
        dense_layer(l, net.blob, x, stride, rows, in, i ? Ahead{} : ahead, f);
    }
    if (!simple) {
      finish_rows(l, net.blob, (float*)other, s.line / 4, rows, now, s.line);
      if (l.bytes) {  // bytes are in `now` already
        uint8_t* swap = now;
        now = other;
        other = swap;
      }
    }
    x = other;
    stride = s.line;
    in = up(l.out, 4 * V::kDenseSpan);
    uint8_t* swap = now;
    now = other;
    other = swap;
  }
  answer(net, job, begin, rows, (float*)x, s.line / 4);
}

void run(const Net& net, const Job& job, int64_t begin, int64_t end, uint8_t* scratch) {
  const Scratch s = layout(net);
#ifdef GIGAMLP_AMX
  const Tiles tiles;
#endif
  for (int64_t row = begin; row < end; row += net.block)
    forward(net, job, row, end, scratch, s);
}

int64_t scratch_bytes(const Net& net) { return layout(net).size; }

// ---- where skipping stops paying ------------------------------------------------------------------------------------

// rows [block][read] of which `share` of 256 of the groups hold something, the same ones in all rows: a list of several
// rows has no others
FI void fill(const Net& net, uint8_t* rows, uint32_t share) {
  const int64_t group = 4 * net.layers[0].skip_span;
  uint32_t random = 0;
  for (int64_t i = 0; i < net.block * net.read; i++) {
    if (i % net.read == 0) random = 12345;
    if (i % net.read % group == 0) random = random * 1664525u + 1013904223u;
    rows[i] = (random >> 24) < share ? 1 : 0;
  }
}

// What a block takes in the dense form, and what the zero-skipping forms take, by the share of non-zero groups. `rows`
// holds two blocks, `out` and `margin` what a block's answers take. Rounds visit every form, so that a slow moment hits
// all alike; the first one wakes the vector units up.
void measure(Net& net, uint8_t* rows, uint8_t* out, float* margin, uint8_t* scratch) {
  constexpr int kRounds = 9, kRuns = 4, kForms = 5;
  const int64_t whole[2] = {0, net.read}, size = net.input == kFloat32 ? 4 : net.input == kFloat16 ? 2 : 1;
  const bool skipping = net.zeros != kDense && net.layers[0].skip_chunk;
  Net one = net;
  one.windows = whole;
  one.window_count = 1;
  one.features = net.read;
  const int64_t bytes = net.block * net.read * size;
  if (skipping) {
    fill(net, rows, 64);
    fill(net, rows + bytes, 192);
  }
  double best[kForms] = {1e30, 1e30, 1e30, 1e30, 1e30};  // dense; few and many, a list for each row; the same together
  for (int round = -1; round < kRounds; round++) {
    for (int form = 0; form < (!skipping ? 1 : V::kTogether > 1 ? kForms : 3); form++) {
      one.zeros = form ? kSkip : kDense;
      one.ways[0] = {form < 3 ? 0.0 : 9.0, 0.0};
      one.ways[1] = {form < 3 ? 9.0 : 0.0, 0.0};
      const Job job = {rows + (form % 2 ? 0 : bytes), net.read * size, out, margin};
      const double begin = now_us();
      for (int i = 0; i < kRuns; i++) run(one, job, 0, net.block, scratch);
      const double took = (now_us() - begin) / kRuns;
      if (round >= 0 && took < best[form]) best[form] = took;
    }
  }
  net.block_us = best[0];
  if (!skipping) return;
  for (int i = 0; i < (V::kTogether > 1 ? 2 : 1); i++) {
    const double few = best[1 + 2 * i], many = best[2 + 2 * i];
    const double slope = many > few ? (many - few) * 2 : 0.0;  // from a quarter to three quarters
    net.ways[i] = {(few - slope / 4) / best[0], slope / best[0]};
  }
}

}  // namespace
