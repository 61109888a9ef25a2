// Whether float32 operands may be multiplied as bfloat16 parts (engine_amx.h) at no loss.
#pragma once

#include "parallel.h"
#include "simd.h"

namespace vishwamai::VISHWAMAI_ISA {

// The greatest of body(begin, end), the magnitudes in [begin, end) of n numbers; NaN if one of them is.
template <class Body>
inline float greatest_magnitude(int64_t n, const Threads& threads, const Body& body) {
  constexpr int64_t kRun = 1 << 16, kMost = 256;
  const int64_t run = greatest<int64_t>(kRun, round_up<int64_t>(ceil_div(n, kMost), 64)), runs = ceil_div(n, run);
  float most[kMost];
  parallel_for(threads, runs, [&](int64_t t) {
    const u32v top = bit_cast<u32v>(body(t * run, least(n, (t + 1) * run)));
    uint32_t highest = 0;
    for (int i = 0; i < lanes<float>; ++i) highest = greatest(highest, static_cast<uint32_t>(top[i]));
    most[t] = bit_cast<float>(highest);
  });
  uint32_t highest = 0;
  for (int64_t t = 0; t < runs; ++t) highest = greatest(highest, bit_cast<uint32_t>(most[t]));
  return bit_cast<float>(highest);
}

// The greater magnitude lane by lane: magnitudes are ordered like their bits, and a NaN is above them all.
VISHWAMAI_INLINE f32v greater_magnitude(f32v most, f32v x) {
  const u32v a = bit_cast<u32v>(most), b = bit_cast<u32v>(x) & 0x7fffffffu;
  return bit_cast<f32v>(b > a ? b : a);
}

inline float largest(const float* x, int64_t n, const Threads& threads) {
  return greatest_magnitude(n, threads, [x](int64_t begin, int64_t end) {
    f32v top = {};
    for (int64_t i = begin; i < end; i += lanes<float>) {
      top = greater_magnitude(top, load(x + i, static_cast<int>(least<int64_t>(lanes<float>, end - i))));
    }
    return top;
  });
}

inline float greater_or_nan(float a, float b) { return a > b || a != a ? a : b; }

// Of the largest magnitudes of both operands: finite numbers whose products' small parts do not underflow.
inline bool splits_well(float a, float b) {
  if (a == 0 || b == 0) return a < 1e38f && b < 1e38f;
  return a < 1e38f && b < 1e38f && a > 1e-27f && b > 1e-27f && static_cast<double>(a) * b > 1e-24;
}

}  // namespace vishwamai::VISHWAMAI_ISA
