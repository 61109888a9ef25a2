// Arguments of the softmax kernels: [rows, features], all arrays of one storage type.
#pragma once

#include <cstdint>

#include "vishwamai/core/cpp/isa.h"
#include "vishwamai/core/cpp/parallel.h"
#include "vishwamai/core/cpp/storage.h"

namespace vishwamai {

struct SoftmaxArgs {
  Storage storage;
  bool log;
  int64_t rows, features;
  const void* x;   // backward: x for the logarithm, y for the softmax itself
  const void* dy;  // backward only
  void* out;       // y, or dx
};

VISHWAMAI_DECLARE(void, softmax_forward, const SoftmaxArgs&, const Threads&)
VISHWAMAI_DECLARE(void, softmax_backward, const SoftmaxArgs&, const Threads&)

}  // namespace vishwamai
