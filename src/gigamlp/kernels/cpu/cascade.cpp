#include "cascade.h"

#include <atomic>
#include <cstring>
#include <stdexcept>

#include "pool.h"

namespace gigamlp {
namespace {

constexpr int64_t kRows = 256;  // rows that a network takes at a time: 784-byte rows of two networks fit a second cache

// Rows on their way to a network, and where they came from.
struct Queue {
  std::vector<uint8_t> rows;
  std::vector<int64_t> at;
  int64_t count = 0;
};

// What one thread keeps, grown to the largest cascade that it has seen.
struct Bench {
  std::vector<Queue> queues;  // queue i holds what goes to network i + 1
  std::vector<int64_t> ids;   // [network][kRows]
  std::vector<float> margins;
};

Bench& bench_of(size_t stages, int64_t row_bytes) {
  thread_local Bench mine;
  if (mine.queues.size() < stages) {
    mine.queues.resize(stages);
    mine.ids.resize(stages * kRows);
    mine.margins.resize(stages * kRows);
  }
  for (Queue& queue : mine.queues) {
    if (queue.rows.size() < (size_t)(kRows * row_bytes)) queue.rows.resize((size_t)(kRows * row_bytes));
    queue.at.resize(kRows);
    queue.count = 0;
  }
  return mine;
}

// A part of a job, on one thread.
class Part {
 public:
  Part(const std::vector<const Model*>& stages, const float* thresholds, const CascadeJob& job, int64_t row_bytes)
      : stages_(stages), thresholds_(thresholds), job_(job), row_bytes_(row_bytes),
        bench_(bench_of(stages.size(), row_bytes)), went_on(stages.size() - 1, 0) {}

  void run(int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row += kRows) {
      const int64_t count = end - row < kRows ? end - row : kRows;
      float* margins = job_.margin ? job_.margin + row : bench_.margins.data();
      const uint8_t* x = job_.x + row * job_.stride;
      stages_[0]->run(Job{x, job_.stride, job_.ids + row, margins}, count, 1);
      for (int64_t i = 0; i < count; i++)
        if (!(margins[i] >= thresholds_[0])) push(0, x + i * job_.stride, row + i);
    }
    for (size_t i = 0; i + 1 < stages_.size(); i++) flush(i);
  }

 private:
  void push(size_t queue, const uint8_t* row, int64_t at) {
    Queue& q = bench_.queues[queue];
    std::memcpy(q.rows.data() + q.count * row_bytes_, row, (size_t)row_bytes_);
    q.at[(size_t)q.count++] = at;
    went_on[queue]++;
    if (q.count == kRows) flush(queue);
  }

  void flush(size_t queue) {
    Queue& q = bench_.queues[queue];
    if (q.count == 0) return;
    const size_t stage = queue + 1;
    const bool last = stage + 1 == stages_.size();
    int64_t* ids = bench_.ids.data() + stage * kRows;
    float* margins = bench_.margins.data() + stage * kRows;
    const bool wanted = job_.margin || !last;
    stages_[stage]->run(Job{q.rows.data(), row_bytes_, ids, wanted ? margins : nullptr}, q.count, 1);
    for (int64_t i = 0; i < q.count; i++) {
      const int64_t at = q.at[(size_t)i];
      job_.ids[at] = ids[i];
      if (job_.margin) job_.margin[at] = margins[i];
      if (!last && !(margins[i] >= thresholds_[stage])) push(stage, q.rows.data() + i * row_bytes_, at);
    }
    q.count = 0;
  }

  const std::vector<const Model*>& stages_;
  const float* thresholds_;
  const CascadeJob& job_;
  const int64_t row_bytes_;
  Bench& bench_;

 public:
  std::vector<int64_t> went_on;
};

}  // namespace

Cascade::Cascade(std::vector<const Model*> stages, const float* thresholds)
    : stages_(std::move(stages)), thresholds_(thresholds, thresholds + stages_.size() - 1) {
  for (size_t i = 0; i < stages_.size(); i++) {
    const Net &net = stages_[i]->net(), &first = stages_[0]->net();
    if (net.features != first.features || net.input != first.input || net.head != first.head)
      throw std::invalid_argument("the networks of a cascade take other rows or have other heads");
    if (net.output > kMargin || (net.output != kMargin && i + 1 < stages_.size()))
      throw std::invalid_argument("every network of a cascade but the last gives a margin, the last at least a class");
  }
}

void Cascade::run(const CascadeJob& job, int64_t rows, int threads, int64_t* went_on) const {
  const Model& first = *stages_[0];
  const int64_t row_bytes = first.net().features * first.item();
  std::vector<std::atomic<int64_t>> sums(stages_.size() - 1);
  for (auto& sum : sums) sum.store(0);
  if (rows < first.parallel_rows()) threads = 1;
  int64_t grain = kRows;
  if (threads > 1) grain *= 1 + rows / kRows / (threads * 16);
  parallel(threads, rows, grain, [&](int64_t begin, int64_t end) {
    Part part(stages_, thresholds_.data(), job, row_bytes);
    part.run(begin, end);
    for (size_t i = 0; i < sums.size(); i++) sums[i] += part.went_on[i];
  });
  for (size_t i = 0; i < sums.size(); i++) went_on[i] = sums[i].load();
}

}  // namespace gigamlp
