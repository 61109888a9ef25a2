// Arguments of the rotary embedding: query, key (or null) and their results, tables [batch or 1, positions, pairs].
#pragma once

#include <cstdint>

#include "vishwamai/core/cpp/isa.h"
#include "vishwamai/core/cpp/parallel.h"
#include "vishwamai/core/cpp/storage.h"

namespace vishwamai {

struct RopeArgs {
  Storage storage;
  bool interleaved;   // pairs are neighbours; else feature i turns with feature i + pairs
  bool heads_inside;  // [batch, positions, heads, dim]; else [batch, heads, positions, dim]
  bool back;          // turn by the opposite angle
  int64_t batch, positions, pairs, dim;
  const void *cos, *sin;  // float; double for double arrays
  int64_t table_stride;   // over the batch, 0 where it shares
  struct {
    int64_t heads;
    const void* x;  // null: there is none
    void* out;
  } arrays[2];
};

VISHWAMAI_DECLARE(void, rope_run, const RopeArgs&, const Threads&)

}  // namespace vishwamai
