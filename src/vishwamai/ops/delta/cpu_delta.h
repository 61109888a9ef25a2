// The recurrences with a matrix state, token by token: see README.md.
#pragma once

#include <cstdint>

#include "vishwamai/core/cpp/isa.h"
#include "vishwamai/core/cpp/parallel.h"
#include "vishwamai/core/cpp/storage.h"

namespace vishwamai {

// Tokens that one state passes: those from `first` on, `count` of them, of row `row` of the operands. Its states
// `[heads, key_dim, value_dim]` before and after them may be the same memory, and else do not overlap with those of
// other sequences.
struct DeltaSequence {
  int64_t row, first, count;
  const void* before;  // null: zeros
  void* after;         // null: nobody reads it
};

// `value` and `y` are [rows, heads, tokens, value_dim], `query` and `key` [rows, key_heads, tokens, key_dim] in
// `storage`; `decay` is [rows, heads, tokens, channels], `beta` [rows, heads, tokens], in the type of sums: double for
// f64, else float. States are in it, too.
struct DeltaArgs {
  Storage storage;
  bool correction;
  int64_t heads, key_heads, tokens, key_dim, value_dim, channels;  // 1 or key_dim
  double scale;
  const void *value, *query, *key;
  const void *decay, *beta, *skip;  // each optional
  int64_t skip_stride;              // of a row
  const int32_t* segments;          // optional, [rows, tokens] or [tokens]: the state begins anew where they change
  int64_t segments_stride;          // of a row
  const DeltaSequence* sequences;
  int64_t count;  // sequences
  void* y;
};

VISHWAMAI_DECLARE(void, delta_run, const DeltaArgs&, const Threads&)

}  // namespace vishwamai
