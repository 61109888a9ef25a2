// The products in registers that engine.h declares.
#include "engine.h"

namespace vishwamai::VISHWAMAI_ISA {

VISHWAMAI_IN_REGISTERS(, FmaEngine<float>)
VISHWAMAI_IN_REGISTERS(, FmaEngine<double>)
#if defined(VISHWAMAI_DOT)
VISHWAMAI_IN_REGISTERS(, DotEngine)
#endif

}  // namespace vishwamai::VISHWAMAI_ISA
