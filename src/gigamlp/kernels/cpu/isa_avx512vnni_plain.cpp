// The kernels for instruction set "avx512vnni_plain"; CMakeLists.txt has the flags.
#include "vector_avx512.h"
#include "forward.h"

namespace gigamlp {
extern const Isa kAvx512VnniPlain;
const Isa kAvx512VnniPlain = {"avx512vnni_plain", V::L, V::kDenseSpan, 4 * V::kDenseSpan, V::kSkips, V::kExactBits, scratch_bytes, run, measure};
}  // namespace gigamlp
