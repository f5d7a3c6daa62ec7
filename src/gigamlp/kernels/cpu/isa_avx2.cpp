// The kernels for instruction set "avx2"; CMakeLists.txt has the flags.
#include "vector_avx2.h"
#include "forward.h"

namespace gigamlp {
extern const Isa kAvx2;
const Isa kAvx2 = {"avx2", V::L, V::kDenseSpan, 4 * V::kDenseSpan, V::kSkips, V::kExactBits, scratch_bytes, run, measure};
}  // namespace gigamlp
