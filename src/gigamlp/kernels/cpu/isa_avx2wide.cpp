// The kernels for instruction set "avx2wide"; CMakeLists.txt has the flags.
#define GIGAMLP_WIDE  // products of 8-bit codes in int16 pairs of int32: exact where pairs of bytes would saturate
#include "vector_avx2.h"
#include "forward.h"

namespace gigamlp {
extern const Isa kAvx2Wide;
const Isa kAvx2Wide = {"avx2wide", V::L, V::kDenseSpan, 4 * V::kDenseSpan, V::kSkips, V::kExactBits, scratch_bytes, run, measure};
}  // namespace gigamlp
