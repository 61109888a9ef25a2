// Arguments of the cross entropy of a linear layer, for one group; see spec.py. T is the accumulation type: float, or
// double for double operands. A null pointer is an absent operand or result.
#pragma once

#include <cstdint>

#include "vishwamai/core/cpp/isa.h"
#include "vishwamai/core/cpp/parallel.h"
#include "vishwamai/core/cpp/storage.h"

namespace vishwamai {

struct LossArgs {
  Storage storage;  // of x, weight and their gradients: f32, bf16 or f64
  int parts;        // float32 products: 3 = float32's accuracy, 2 = about 16 bits
  int64_t tokens, vocab, features;
  double softcap;                // 0: none
  const void *x, *weight;        // [tokens, features], [vocab, features]
  const void* bias;              // T [vocab]
  const int32_t* labels;         // [tokens]; outside 0 ... vocab-1: no logit
  void *logsumexp, *label_logit, *logit_sum;  // T [tokens]; logsumexp is read by the backward pass
  const void *dlogsumexp, *dlabel_logit, *dlogit_sum;  // T [tokens]
  void *dx, *dweight;            // like x and weight
  void* dbias;                   // like bias
  // Of loss_total alone, whose gradients are T and whose logsumexp and cotangents above are unused.
  const void* shares;  // T [tokens]: what a token's loss is multiplied by; one of 0 is not computed
  double smoothing, z_loss;
  void* loss;          // T: sum of shares * losses
};

VISHWAMAI_DECLARE(void, loss_forward, const LossArgs&, const Threads&)
VISHWAMAI_DECLARE(void, loss_backward, const LossArgs&, const Threads&)
VISHWAMAI_DECLARE(void, loss_total, const LossArgs&, const Threads&)

}  // namespace vishwamai
