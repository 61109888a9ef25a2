// A step of AdamW on one array of parameters: gradient, parameter and both moments are read once, the last three
// written in place. Used by training/adamw.py.
#pragma once

#include <cstdint>

#include "isa.h"
#include "parallel.h"
#include "storage.h"

namespace vishwamai {

struct AdamArgs {
  Storage storage;  // of the first moment: f32 or bf16
  int64_t n;
  const float* gradient;
  float *param, *second;
  void* first;
  float clip;                       // factor of the gradient
  float first_scale, second_scale;  // 1 / (1 - b^steps): take the bias off the moments
  float rate;                       // factor of the update, negative; 0 leaves the parameter as it is
  float keep_first, add_first, keep_second, add_second;  // b and 1 - b of each moment
  float eps, decay;
};

VISHWAMAI_DECLARE(void, adam_run, const AdamArgs&, const Threads&)

}  // namespace vishwamai
