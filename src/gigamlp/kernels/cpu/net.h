// What every instruction set's code shares: a network as numbers and offsets, and the table of functions that runs it.
// Plain structs only: this header is compiled with different machine flags, and the linker may keep any one copy.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace gigamlp {

enum Input : int64_t { kUint8 = 0, kInt8 = 1, kFloat32 = 2, kFloat16 = 3 };
enum Output : int64_t { kClass = 0, kMargin = 1, kLogits = 2, kProba = 3 };
enum Head : int64_t { kSoftmax = 0, kSigmoid = 1, kMultilabel = 2, kRegression = 3 };
enum Zeros : int64_t { kDense = 0, kAuto = 1, kSkip = 2 };
enum Activation : int64_t { kIdentity = 0, kRelu = 1, kTanh = 2, kLogistic = 3, kGelu = 4, kGeluTanh = 5, kSilu = 6 };

// The order of these fields is that of pack.py. Offsets are bytes into the blob, multiples of 64; -1 means absent.
struct Layer {
  int64_t is_float;      // 0: bytes times int8 codes, summed in int32; 1: float32
  int64_t in;            // bytes or floats of a row that it reads
  int64_t out;           // outputs
  int64_t pad;           // outputs rounded up to whole units
  int64_t chunk;         // units (vectors) that a dense tile computes at a time
  int64_t skip_chunk;    // the same for the zero-skipping form; 0: there is none
  int64_t skip_span;     // 4-byte groups to a vector in the zero-skipping form
  int64_t bytes;         // 1: writes the next layer's bytes; 0: writes floats
  int64_t activation;    // Activation
  int64_t half;          // 1: floats are rounded to float16 after the activation
  int64_t weights;       // [chunk][group][unit][vector]
  int64_t skip_weights;  // the same for the zero-skipping form
  int64_t init;          // int32 [pad + slack], added to the sums; -1: nothing is
  int64_t scale;         // float [pad + slack]
  int64_t bias;          // float [pad + slack]
  int64_t inverse;       // float [pad + slack]: byte = rint(activation(z) * inverse + zero); -1: z is in steps already
  int64_t zero;          // float [pad + slack]
};
constexpr int64_t kLayerFields = 17;
constexpr int64_t kSlack = 64;  // elements after `pad` that may be read (arrays) or written (rows of scratch)

// What a form of the first layer costs, in units of the dense one: fixed + slope * (share of non-zero groups).
struct Way {
  double fixed, slope;
};

// How 64 bytes of a gathered row come about: bytes `from` + i of the row where bit i of `low` is set, and `from` + 64 + i
// where that of `high` is (no others may be read), then byte j is number `index[j]` of these 128.
struct Piece {
  int64_t from;
  uint64_t low, high;
  uint64_t out;  // bit j: there is a byte j; else it is 0
  uint8_t index[64];
};

struct Net {
  const Layer* layers;
  int64_t depth;
  const uint8_t* blob;
  int64_t input;      // Input
  int64_t features;   // values of a row
  const int64_t* windows;  // [count][2]: the features that are read
  int64_t window_count;
  const Piece* pieces;     // of a row of bytes; null where a piece would have to bring together what lies too far apart
  int64_t read;       // features that are read
  int64_t head, output;
  int64_t zeros;      // Zeros
  Way ways[2];        // the zero-skipping form: a list for each row, one for a few rows together
  double block_us;    // what a block takes in the dense form
  int64_t block;      // rows of a block
};

struct Job {
  const uint8_t* x;
  int64_t stride;     // bytes from row to row
  void* out;          // int64 ids, or floats [rows][width]
  float* margin;
};

struct Isa {
  const char* name;
  int64_t lanes;       // int32 lanes of a vector
  int64_t dense_span;  // 4-byte groups to a vector in the dense form
  int64_t step;        // inputs that weights are padded to a multiple of, in the dense form
  int64_t skips;       // 1: there is a zero-skipping form
  int64_t exact_bits;  // bits that codes may have: 8, or 7 where pairs of products are summed in int16
  int64_t (*scratch_bytes)(const Net& net);
  // rows [begin, end) of a job; scratch lies at a multiple of 64
  void (*run)(const Net& net, const Job& job, int64_t begin, int64_t end, uint8_t* scratch);
  // fills `block_us` and `ways` with what a few hundred microseconds of trying give
  void (*measure)(Net& net, uint8_t* rows, uint8_t* out, float* margin, uint8_t* scratch);
};

struct Choice {
  const Isa* isa;
  const char* missing;  // what this machine lacks; null if it can run
};

// all that were compiled, the fastest first; see cpu.cpp
int isa_count();
Choice isa_at(int index);
double now_us();

}  // namespace gigamlp
