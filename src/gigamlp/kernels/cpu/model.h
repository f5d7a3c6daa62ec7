// A network that Python packed, checked and copied to aligned memory; what runs it, on one thread or several.
#pragma once
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "net.h"

namespace gigamlp {

// Memory at a multiple of 64, freed with its owner.
class Aligned {
 public:
  Aligned() = default;
  explicit Aligned(size_t size);
  uint8_t* get() const { return at_; }
  size_t size() const { return size_; }

 private:
  std::unique_ptr<uint8_t[]> whole_;
  uint8_t* at_ = nullptr;
  size_t size_ = 0;
};

class Model {
 public:
  // Throws std::invalid_argument if the numbers do not hold together: no offset leads outside the blob.
  Model(const std::string& isa, const int64_t* header, size_t count, const uint8_t* blob, size_t size);
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;

  const Net& net() const { return net_; }
  const Isa& isa() const { return *isa_; }
  int64_t item() const;          // bytes of a feature
  int64_t width() const;         // floats of an answer; 0 for class ids
  void set_ways(const Way& apiece, const Way& together) { net_.ways[0] = apiece, net_.ways[1] = together; }
  void measure();
  // rows below which one thread does all: waking another takes longer than half the work
  int64_t parallel_rows() const;
  void run(const Job& job, int64_t rows, int threads) const;
  void run_one(const Job& job) const;

 private:
  void check() const;
  void plan_pieces();
  void check_layer(const Layer& layer, int64_t in, bool last) const;
  void check_range(int64_t offset, int64_t bytes, const char* what) const;

  const Isa* isa_ = nullptr;
  std::vector<Layer> layers_;
  std::vector<int64_t> windows_;
  std::vector<Piece> pieces_;
  Aligned blob_;
  Net net_{};
};

}  // namespace gigamlp
