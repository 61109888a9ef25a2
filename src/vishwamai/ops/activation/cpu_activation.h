// Arguments of the activation kernels: x [groups, rows, features]; without a dropout one row of everything.
#pragma once

#include <cstdint>

#include "vishwamai/core/cpp/isa.h"
#include "vishwamai/core/cpp/parallel.h"
#include "vishwamai/core/cpp/storage.h"

namespace vishwamai {

enum class ActivationKind : int { gelu, gelu_tanh, silu, relu2 };

struct ActivationArgs {
  Storage storage;
  ActivationKind kind;
  int64_t groups, rows, features;
  const void* x;
  const void* dy;  // null: the forward pass
  void* out;       // y, or dx
  // Dropout; seed null: none.  Strides over the groups, 0 where they share.
  const uint32_t *row_numbers, *column_numbers, *seed;
  int64_t row_stride, column_stride, seed_stride;
  uint32_t threshold;  // of 2^24
  double keep_scale;   // 1 / (1 - rate)
};

VISHWAMAI_DECLARE(void, activation_run, const ActivationArgs&, const Threads&)

}  // namespace vishwamai
