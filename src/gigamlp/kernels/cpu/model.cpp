#include "model.h"

#include <cstring>
#include <stdexcept>

#include "pool.h"

namespace gigamlp {
namespace {

constexpr int64_t kHeader = 10;
constexpr int64_t kVersion = 1;
constexpr int64_t kMost = 1 << 28;  // of any width: products of a few of them stay within int64

void require(bool holds, const std::string& what) {
  if (!holds) throw std::invalid_argument("packed network: " + what);
}

// scratch of the calling thread: grows, and is freed with the thread
uint8_t* scratch_of(int64_t bytes) {
  thread_local Aligned mine;
  if (mine.size() < (size_t)bytes) mine = Aligned((size_t)bytes);
  return mine.get();
}

}  // namespace

Aligned::Aligned(size_t size) : whole_(new uint8_t[size + 64]()), size_(size) {
  at_ = whole_.get() + (64 - (uintptr_t)whole_.get() % 64) % 64;
}

Model::Model(const std::string& isa, const int64_t* header, size_t count, const uint8_t* blob, size_t size) {
  for (int i = 0; i < isa_count(); i++) {
    const Choice choice = isa_at(i);
    if (isa != choice.isa->name) continue;
    if (choice.missing) throw std::invalid_argument(isa + ": " + choice.missing);
    isa_ = choice.isa;
  }
  require(isa_ != nullptr, "unknown instruction set " + isa);
  require(count >= (size_t)kHeader && header[0] == kVersion, "another version's header");
  const int64_t windows = header[7], depth = header[8];
  require(windows >= 1 && windows < kMost && depth >= 1 && depth < kMost, "no windows or layers");
  require((int64_t)count == kHeader + 2 * windows + kLayerFields * depth, "the header has another length");
  windows_.assign(header + kHeader, header + kHeader + 2 * windows);
  layers_.resize((size_t)depth);
  static_assert(sizeof(Layer) == kLayerFields * sizeof(int64_t), "fields are read as they lie");
  std::memcpy(layers_.data(), header + kHeader + 2 * windows, sizeof(Layer) * (size_t)depth);
  blob_ = Aligned(size);
  std::memcpy(blob_.get(), blob, size);
  net_.layers = layers_.data();
  net_.depth = depth;
  net_.blob = blob_.get();
  net_.input = header[1];
  net_.features = header[2];
  net_.head = header[3];
  net_.output = header[4];
  net_.zeros = header[5];
  net_.block = header[6];
  net_.windows = windows_.data();
  net_.window_count = windows;
  net_.ways[0] = {0.1, 1000.0 / (double)(header[9] > 0 ? header[9] : 1)};  // until they are measured
  net_.ways[1] = {0.1, 800.0 / (double)(header[9] > 0 ? header[9] : 1)};
  check();
  plan_pieces();
}

void Model::plan_pieces() {
  net_.pieces = nullptr;
  if (net_.window_count < 2 || layers_[0].is_float) return;
  int64_t at = 0;
  for (size_t w = 0; w + 1 < windows_.size(); w += 2) {
    for (int64_t i = windows_[w]; i < windows_[w + 1]; i++, at++) {
      if (at % 64 == 0) pieces_.push_back(Piece{i, 0, 0, 0, {}});
      Piece& piece = pieces_.back();
      const int64_t far = i - piece.from;
      if (far >= 128) return;
      (far < 64 ? piece.low : piece.high) |= 1ull << (far % 64);
      piece.out |= 1ull << (at % 64);
      piece.index[at % 64] = (uint8_t)far;
    }
  }
  net_.pieces = pieces_.data();
}

void Model::check() const {
  require(net_.input >= kUint8 && net_.input <= kFloat16, "unknown input");
  require(net_.head >= kSoftmax && net_.head <= kRegression, "unknown head");
  require(net_.output >= kClass && net_.output <= kProba, "unknown output");
  require(net_.zeros >= kDense && net_.zeros <= kSkip, "unknown way with zeros");
  require(net_.zeros == kDense || net_.input == kUint8, "zeros can be skipped in uint8 rows only");
  require(net_.block >= 1 && net_.block <= 4096, "a block has 1 to 4,096 rows");
  require(isa_->step < 64 || layers_[0].is_float || net_.block % 32 == 0, "tiles take 32 rows");
  require(net_.features >= 1 && net_.features < kMost, "no features");
  int64_t read = 0, end = 0;
  for (int64_t w = 0; w < net_.window_count; w++) {
    const int64_t from = windows_[2 * w], to = windows_[2 * w + 1];
    require(from >= end && to > from && to <= net_.features, "windows overlap or leave the row");
    read += to - from;
    end = to;
  }
  const_cast<Net&>(net_).read = read;
  require(layers_[0].is_float || net_.input == kUint8 || net_.input == kInt8, "an integer layer reads bytes");
  int64_t in = read;
  for (int64_t i = 0; i < net_.depth; i++) {
    const Layer& l = layers_[(size_t)i];
    if (i) require((l.is_float != 0) == (layers_[(size_t)i - 1].bytes == 0), "a layer reads what the last one wrote");
    check_layer(l, in, i + 1 == net_.depth);
    in = l.out;
  }
  const bool one = net_.head == kSigmoid;
  require(!one || in == 1, "a sigmoid head has one logit");
  require(net_.output > kMargin || net_.head <= kSigmoid, "this head has no class");
  require(net_.output != kMargin || one || in > 1, "one class has no margin");
  require(net_.output != kProba || net_.head != kRegression, "this head has no probabilities");
}

void Model::check_layer(const Layer& l, int64_t in, bool last) const {
  const int64_t lanes = isa_->lanes, unit = l.is_float ? lanes : lanes / isa_->dense_span;
  require(l.in == in && l.out >= 1 && l.out < kMost, "widths do not chain");
  require(l.pad >= l.out && l.pad < l.out + unit && l.pad % unit == 0, "outputs are padded to whole units");
  require(l.chunk >= 1 && l.chunk <= 5, "a chunk has 1 to 5 units");
  require(l.activation >= kIdentity && l.activation <= kSilu, "unknown activation");
  require(!last || l.bytes == 0, "the last layer writes floats");
  const int64_t row = (l.pad + kSlack) * 4;
  check_range(l.bias, row, "bias");
  if (l.is_float) {
    require(!l.bytes && l.chunk <= 3, "a float layer writes floats, in chunks of 1 to 3 vectors");
    check_range(l.weights, l.in * l.pad * 4, "float weights");
    return;
  }
  const int64_t vector = lanes * 4, groups = (l.in + isa_->step - 1) / isa_->step * isa_->step / (4 * isa_->dense_span);
  check_range(l.weights, groups * (l.pad / unit) * vector, "codes");
  if (l.init >= 0) check_range(l.init, row, "init");
  check_range(l.scale, row, "scale");
  if (l.bytes && l.activation > kRelu) {
    check_range(l.inverse, row, "inverse");
    check_range(l.zero, row, "zero");
  }
  if (l.skip_chunk == 0) return;
  require(isa_->skips && (l.skip_span == 1 || l.skip_span == isa_->dense_span), "no such zero-skipping form");
  require((l.skip_chunk >= 1 && l.skip_chunk <= 5) || (l.skip_chunk == 8), "a skip chunk has 1 to 5 or 8 units");
  const int64_t outputs = lanes / l.skip_span, span = 4 * l.skip_span, units = (l.pad + outputs - 1) / outputs;
  require(l.skip_chunk < 8 || units % 8 < 6, "the last skip chunk has 1 to 5 or 8 units");
  check_range(l.skip_weights, (l.in + span - 1) / span * units * vector, "codes of the zero-skipping form");
}

void Model::check_range(int64_t offset, int64_t bytes, const char* what) const {
  const int64_t size = (int64_t)blob_.size();
  require(offset >= 0 && offset % 64 == 0 && bytes <= size && offset <= size - bytes,
          std::string(what) + " lie outside the blob");
}

int64_t Model::item() const { return net_.input == kFloat32 ? 4 : net_.input == kFloat16 ? 2 : 1; }

int64_t Model::width() const {
  if (net_.output <= kMargin) return 0;
  return net_.output == kProba && net_.head == kSigmoid ? 2 : layers_.back().out;
}

void Model::measure() {
  const size_t rows = (size_t)net_.block;
  Aligned x(2 * rows * (size_t)(net_.read * item())), out(rows * (size_t)(width() * 4 + 8)), margin(rows * 4);
  isa_->measure(net_, x.get(), out.get(), (float*)margin.get(), scratch_of(isa_->scratch_bytes(net_)));
}

int64_t Model::parallel_rows() const {
  constexpr double kWakeUs = 60.0;
  if (net_.block_us <= 0) return 2 * net_.block;
  return net_.block * (int64_t)(1 + kWakeUs / net_.block_us);
}

void Model::run(const Job& job, int64_t rows, int threads) const {
  const int64_t bytes = isa_->scratch_bytes(net_);
  if (rows < parallel_rows()) threads = 1;
  int64_t grain = net_.block;
  if (threads > 1) grain *= 1 + rows / net_.block / (threads * 16);
  parallel(threads, rows, grain,
           [&](int64_t begin, int64_t end) { isa_->run(net_, job, begin, end, scratch_of(bytes)); });
}

void Model::run_one(const Job& job) const { isa_->run(net_, job, 0, 1, scratch_of(isa_->scratch_bytes(net_))); }

}  // namespace gigamlp
