// Arguments of the block-sparse product; the sparse matrix S [rows, columns] is made of `blocks` blocks, see spec.py.
#pragma once

#include <cstdint>

#include "vishwamai/core/cpp/isa.h"
#include "vishwamai/core/cpp/parallel.h"
#include "vishwamai/core/cpp/storage.h"

namespace vishwamai {

struct SparseArgs {
  Storage storage;  // of left, right and values: f32, bf16 or f64
  Storage result;   // of what is written: the same, or the type of the sums
  int parts;        // float32 products: 3 = float32's accuracy, 2 = about 16 bits
  bool transpose;   // out = dense @ S^T
  int64_t groups, m, rows, columns, blocks, block_rows, block_columns;
  const void* dense;       // [groups, m, rows], or [groups, m, columns] if transposed
  const void* values;      // [groups or 1, blocks, block_rows, block_columns]
  int64_t values_group;    // elements from group to group; 0: shared
  const int32_t* indices;  // [groups or 1, blocks, 2]: block row, block column
  int64_t indices_group;
  void* out;                  // [groups, m, columns], or [groups, m, rows] if transposed
  const void *left, *right;   // [groups, m, rows], [groups, m, columns]
  void* dvalues;              // [groups, blocks, block_rows, block_columns]: left's block of columns^T @ right's
};

VISHWAMAI_DECLARE(void, sparse_product, const SparseArgs&, const Threads&)
VISHWAMAI_DECLARE(void, sparse_values_gradient, const SparseArgs&, const Threads&)

}  // namespace vishwamai
