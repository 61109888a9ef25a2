// Arguments of paged attention; shapes and their meaning are those of spec.py.  A null pointer is an absent operand.
#pragma once

#include <cstdint>

#include "vishwamai/core/cpp/isa.h"
#include "vishwamai/core/cpp/parallel.h"
#include "vishwamai/core/cpp/storage.h"

namespace vishwamai {

enum class PageType : int { f32, bf16, f16, f64, s8, f8e4m3, f8e5m2, s4 };

struct PagedArgs {
  Storage storage;  // of query and out; f64 with pages of f64 only
  PageType page_type;
  int64_t batch, tokens, heads, dim, kv_heads, value_dim;
  int64_t pages, page_size, sequences, entries;  // entries: of a sequence's row of the page table
  double scale, softcap;                         // softcap 0: none
  int64_t window;                                // keys before a query's own; negative: all
  const void* query;                             // [batch, tokens, heads, dim]
  // A key of token t of page p and head h begins at keys + batch * stride + (p * page_size + t) * token + h * head.
  struct Pool {
    const void* data;
    int64_t stride, token, head;  // elements; pairs of s4, whose rows have an even number
  } keys, values;
  // Strides over the batch, 0 where it shares.
  const int32_t *kv_lens, *table, *starts, *count;
  int64_t kv_lens_stride, table_stride, starts_stride, count_stride;
  const void* sinks;  // float (double for f64) [batch or 1, heads]
  // [batch or 1, kv_heads], or [batch or 1, pages, page_size, kv_heads]: a scale of every token and head.
  const float *key_scale, *value_scale;
  int64_t sinks_stride, key_scale_stride, value_scale_stride;
  bool token_scales;
  const void* slopes;   // float (double for f64) [batch or 1, heads]
  const uint8_t* tree;  // bool [batch or 1, tokens, tree_columns]
  int64_t slopes_stride, tree_stride, tree_columns;
  void* out;  // [batch, tokens, heads, value_dim]
  void* lse;  // float (double for f64) [batch, tokens, heads]
};

VISHWAMAI_DECLARE(void, paged_attention, const PagedArgs&, const Threads&)

}  // namespace vishwamai
