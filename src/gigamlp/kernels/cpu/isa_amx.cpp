// The kernels for instruction set "amx" (with AVX-512 for all but the dense form); CMakeLists.txt has the flags.
#define GIGAMLP_AMX
#include "vector_avx512.h"
#ifdef GIGAMLP_EMULATE_AMX
#include "amx_emulated.h"  // of the tests
#endif
#include "forward.h"

namespace gigamlp {
extern const Isa kAmx;
const Isa kAmx = {"amx", V::L, V::kDenseSpan, 64, V::kSkips, V::kExactBits, scratch_bytes, run, measure};
}  // namespace gigamlp
