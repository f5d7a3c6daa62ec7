// The kernels for instruction set "portable"; CMakeLists.txt has the flags.
#include "vector_portable.h"
#include "forward.h"

namespace gigamlp {
extern const Isa kPortable;
const Isa kPortable = {"portable", V::L, V::kDenseSpan, 4 * V::kDenseSpan, V::kSkips, V::kExactBits, scratch_bytes, run, measure};
}  // namespace gigamlp
