// core/dropout.py, bit for bit: which positions a dropout keeps.
#pragma once

#include "simd.h"

namespace vishwamai::VISHWAMAI_ISA {

VISHWAMAI_INLINE uint32_t row_hash(uint32_t seed, int64_t row) {
  uint32_t r = static_cast<uint32_t>(row) * 0x9E3779B1u + seed;
  r = (r ^ (r >> 16)) * 0x85EBCA6Bu;
  return r ^ (r >> 13);
}
VISHWAMAI_INLINE uint32_t column_hash(uint32_t seed, int64_t column) {
  uint32_t c = static_cast<uint32_t>(column) * 0xC2B2AE35u + seed;
  c = (c ^ (c >> 16)) * 0x27D4EB2Fu;
  return c ^ (c >> 15);
}
// keep[i] = scale where the position is kept, else 0; `minor` holds the hashes of the running index.
template <class T>
VISHWAMAI_INLINE void keep_factors(uint32_t major, const uint32_t* minor, int64_t n, uint32_t threshold, T scale, T* keep) {
  for (int64_t i = 0; i < n; ++i) {
    uint32_t z = major + minor[i];
    z = (z ^ (z >> 16)) * 0x7FEB352Du;
    z = (z ^ (z >> 15)) * 0x846CA68Bu;
    z ^= z >> 16;
    keep[i] = (z >> 8) >= threshold ? scale : T(0);
  }
}

}  // namespace vishwamai::VISHWAMAI_ISA
