// The kernels for instruction set "avxvnni"; CMakeLists.txt has the flags.
#define GIGAMLP_AVXVNNI
#include "vector_avx2.h"
#include "forward.h"

namespace gigamlp {
extern const Isa kAvxVnni;
const Isa kAvxVnni = {"avxvnni", V::L, V::kDenseSpan, 4 * V::kDenseSpan, V::kSkips, V::kExactBits, scratch_bytes, run, measure};
}  // namespace gigamlp
