// The products in registers that engine.h declares.
#include "engine.h"

namespace vishwamai::VISHWAMAI_ISA {

VISHWAMAI_IN_REGISTERS(, FmaEngine<float>)
#if !defined(VISHWAMAI_BASE)
VISHWAMAI_IN_REGISTERS(, FmaEngine<double>)
#endif
#if defined(VISHWAMAI_DOT)
VISHWAMAI_IN_REGISTERS(, DotEngine)
#elif defined(VISHWAMAI_NEON_BF16)
template struct ArmMatrixEngine<uint16_t>;
#endif

}  // namespace vishwamai::VISHWAMAI_ISA
