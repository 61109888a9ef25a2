// Arguments of the grouped matrix product, whose rows are in consecutive groups with a matrix each.
#pragma once

#include <cstdint>

#include "vishwamai/core/cpp/isa.h"
#include "vishwamai/core/cpp/parallel.h"
#include "vishwamai/core/cpp/storage.h"

namespace vishwamai {

struct GroupedArgs {
  Storage storage;  // of both operands: f32, bf16 or f64
  Storage result;   // of out: f32 or bf16; f64 for f64
  int64_t batch, groups, m, k, n;  // m rows in all
  // grouped_rows: lhs [batch, m, k], rhs [batch or 1, groups, k, n], or [.., n, k] if transposed; out [batch, m, n].
  // grouped_weights: lhs [batch, m, k], rhs [batch, m, n]; out [batch, groups, k, n].
  const void *lhs, *rhs;
  int64_t rhs_batch;  // stride over the batch in elements, 0 where it is shared
  bool transposed;
  const int32_t* sizes;  // [batch or 1, groups]; what reaches beyond m is cut off
  int64_t sizes_batch;
  void* out;
};

VISHWAMAI_DECLARE(void, grouped_rows, const GroupedArgs&, const Threads&)
VISHWAMAI_DECLARE(void, grouped_weights, const GroupedArgs&, const Threads&)

}  // namespace vishwamai
