// Arguments of the attention kernels; shapes, masks and their meaning are those of spec.py. T is the accumulation type:
// float, or double for double operands. A null pointer is an absent operand or result.
#pragma once

#include <cstdint>

#include "vishwamai/core/cpp/isa.h"
#include "vishwamai/core/cpp/parallel.h"
#include "vishwamai/core/cpp/storage.h"

namespace vishwamai {

// A static mask in blocks (block_mask.py): codes 0 = empty, 1 = whole, n + 2 = as pattern n shows.
struct BlockMaskArgs {
  const int32_t* codes;    // [heads or 1, q_blocks, kv_blocks], or null
  const int8_t* patterns;  // [count, block_q, block_kv], 1 = attend
  int64_t heads, q_blocks, kv_blocks, block_q, block_kv;
};

struct AttentionArgs {
  Storage storage;  // of query, key, value, out and their gradients
  int parts;        // float32 products: 3 = six bfloat16 products (or float32's own), 2 = three; 1 for other types
  int64_t batch, q_heads, kv_heads, q_len, kv_len, qk_dim, v_dim;
  double scale;
  double softcap;     // 0: none
  int64_t low, high;  // a query at place p sees keys p + low ... p + high, both well inside int64
  const int32_t* positions;  // [batch or 1, q_len]: the places of the queries; null: query i is at place i
  int64_t positions_stride;  // over the batch
  const void *query, *key, *value;
  const void* bias;  // T, strides in elements over (batch, head, query, key), 0 where shared
  int64_t bias_strides[4];
  const uint8_t* mask;
  int64_t mask_strides[4];
  const int32_t *q_segments, *kv_segments;
  int64_t q_segments_stride, kv_segments_stride;  // over the batch
  bool bias_last;  // the bias is added after the soft-cap
  const void* slopes;  // T [batch or 1, q_heads]: ALiBi's, after the soft-cap, of the distance from key p + origin
  int64_t slopes_stride, origin;
  const void* sinks;                              // T [batch or 1, q_heads]
  int64_t sinks_stride;
  const uint32_t* dropout_seed;  // [batch, q_heads, 2]
  uint32_t dropout_threshold;    // of 2^24
  double keep_scale;             // 1 / (1 - rate)
  BlockMaskArgs blocks;

  void* out;        // [batch, q_heads, q_len, v_dim]; read by the backward pass
  void* logsumexp;  // T [batch, q_heads, q_len]; read by the backward pass

  const void* dout;        // like out
  const void* dlogsumexp;  // T, like logsumexp
  void *dquery, *dkey, *dvalue;
  void* dbias;  // T [the bias's own shape]
  int64_t dbias_shape[4];
};

VISHWAMAI_DECLARE(void, attention_forward, const AttentionArgs&, const Threads&)
VISHWAMAI_DECLARE(void, attention_decode, const AttentionArgs&, const Threads&)
VISHWAMAI_DECLARE(void, attention_backward, const AttentionArgs&, const Threads&)
VISHWAMAI_DECLARE(void, attention_bias_gradient, const AttentionArgs&, const Threads&)

}  // namespace vishwamai
