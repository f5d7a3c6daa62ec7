// The kernels for instruction set "avx512vnni"; CMakeLists.txt has the flags.
#include "vector_avx512.h"
#include "forward.h"

namespace gigamlp {
extern const Isa kAvx512Vnni;
const Isa kAvx512Vnni = {"avx512vnni", V::L, V::kDenseSpan, 4 * V::kDenseSpan, V::kSkips, V::kExactBits, scratch_bytes, run, measure};
}  // namespace gigamlp
