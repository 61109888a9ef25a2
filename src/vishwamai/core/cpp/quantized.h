// Products with a quantized weight in panels of 32 columns, whose order is the same on every instruction set:
//
//   int8:  [panel][k / 4][column][4 neighbours along k], a byte each: the value + 128
//   int4:  [panel][k / 8][column][4 bytes]: the value + 8 of neighbour i in the low half of byte i, of i + 4 in the high
//   mxfp4: as int4, with the bits of e2m1 in place of the value + 8
//   uint4: as int4, with the value, 0 to 15, in place of the value + 8
//   fp8:   [panel][k][column], the bits of e4m3
//
// k is padded to a multiple of 8, columns to one of 32, both with the value 0. Scales are float32, [panel][block of
// k][column], or [panel][column] where a column has one. Those of uint4 are words of 32 bits: a float32 scale whose lowest
// byte is the zero point in sixteenths, so a number is scale * (value - zero).
#pragma once

#include <cstdint>

#include "activation.h"
#include "isa.h"
#include "parallel.h"
#include "storage.h"

namespace vishwamai {

constexpr int64_t kQuantizedColumns = 32;

// How a number of the weight is stored, as `packed_qtensor.KINDS` numbers it.
enum class Packing : int { int8, int4, mxfp4, fp8, uint4 };

struct QuantizedWeight {
  const uint8_t* values;  // null where there is none
  const float* scales;
  int64_t values_group, scales_group;  // elements from group to group
};

// out = activation(x @ weight + bias), or activation(x @ weight) * (x @ up); rows in groups with a weight each.
struct QuantizedArgs {
  Storage storage, result;  // of x and of out: f32 or bf16
  Packing packing;          // of the weight
  bool exact;               // x is not rounded, as always with fp8; else to int8, with a scale for each row and block of k
  bool column_scales;       // one scale of the weight for a column; else one for a block of it
  int64_t m, n, k, block;   // numbers along k in a block, a multiple of 8
  int64_t groups;
  const int32_t* sizes;     // [groups]: rows of each; null: one group of m rows. Rows after the last become 0.
  const void* x;            // [m, k]
  QuantizedWeight weight, up;
  const float* bias;        // [n] or null
  Activation activation;
  void* out;                // [m, n]

  int bits() const { return packing == Packing::int8 || packing == Packing::fp8 ? 8 : 4; }
  int64_t padded_k() const { return (k + 7) / 8 * 8; }
  int64_t blocks() const { return (k + block - 1) / block; }
  int64_t panels() const { return (n + kQuantizedColumns - 1) / kQuantizedColumns; }
  int64_t panel_bytes() const { return padded_k() * kQuantizedColumns * bits() / 8; }
  int64_t panel_scales() const { return (column_scales ? 1 : blocks()) * kQuantizedColumns; }
};

VISHWAMAI_DECLARE(void, quantized_product, const QuantizedArgs&, const Threads&)

}  // namespace vishwamai
