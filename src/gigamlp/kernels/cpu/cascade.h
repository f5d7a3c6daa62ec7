// Networks over the same rows, one after the other: a row whose margin is below a threshold goes on to the next one.
#pragma once
#include "model.h"

namespace gigamlp {

struct CascadeJob {
  const uint8_t* x;
  int64_t stride;   // bytes from row to row
  int64_t* ids;
  float* margin;    // of the network that answered; null if nobody asks
};

class Cascade {
 public:
  // Throws std::invalid_argument if the networks do not take the same rows, or one but the last gives no margin.
  // `thresholds` has one number for each network but the last.
  Cascade(std::vector<const Model*> stages, const float* thresholds);

  // `went_on` [stages - 1] becomes the number of rows that went on from each. All but the first network read copies of
  // the rows that reach them, a few hundred at a time, which are still in cache.
  void run(const CascadeJob& job, int64_t rows, int threads, int64_t* went_on) const;

 private:
  std::vector<const Model*> stages_;
  std::vector<float> thresholds_;
};

}  // namespace gigamlp
