// Products with a weight of 8-bit floats (quantized.h): bytes [k][32] of a panel. They are widened, which is exact, and
// scales come after the sum of a block. Few rows take each number from memory into a multiply-add; for many, a stretch
// is brought into a panel of the engine that multiplies the rows as they are stored.
#pragma once

#include "engine.h"
#include "narrow.h"
#include "quantized.h"

namespace vishwamai::VISHWAMAI_ISA {

#if defined(VISHWAMAI_AVX512)
constexpr int kFloatRows = 8;  // 16 sums, 2 vectors of the weight, what widens them
#elif defined(__AVX2__)
constexpr int kFloatRows = 4;
#else
constexpr int kFloatRows = 2;
#endif
constexpr int64_t kFloatsAhead = 2048;  // bytes of a panel that are asked for beforehand

// A row of a panel, 2^-8 times its numbers (kLoadUnit), as two vectors of it at a time.
VISHWAMAI_INLINE void load_two(const f8e4m3* p, f32v& low, f32v& high) {
#if defined(VISHWAMAI_AVX512)
  const __m512i x = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  const __m512i half = _mm512_and_si512(_mm512_slli_epi16(x, 7), _mm512_set1_epi16(static_cast<int16_t>(0xbfff)));
  const __m512i all = _mm512_set1_epi16(0x3f80);
  const __mmask32 nan = _mm512_cmpeq_epi16_mask(_mm512_and_si512(half, all), all);
  const __m512i both = _mm512_mask_mov_epi16(half, nan, _mm512_set1_epi16(0x7e00));
  low = _mm512_cvtph_ps(_mm512_castsi512_si256(both));
  high = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(both, 1));
#else
  low = load(p), high = load(p + lanes<float>);
#endif
}

// c[count rows, 32] += x times blocks [first, last) of a panel, whose bytes and scales begin there. x has `row` numbers
// to a row; rows that are not there repeat the last one and are not stored.
template <int R>
__attribute__((noinline)) void multiply_floats(const float* x, int64_t row, int count, const f8e4m3* bytes, const float* scales, int64_t scale_step, int64_t first,
                                               int64_t last, int64_t block, int64_t end, float* c) {
  constexpr int W = lanes<float>;
  const float* a[R];
  for (int r = 0; r < R; ++r) a[r] = x + least(r, count - 1) * row;
  for (int64_t col = 0; col < kQuantizedColumns; col += 2 * W) {
    const f8e4m3* w = bytes + col;
    const float* scale = scales + col;
    for (int64_t b = first; b < last; ++b, scale += scale_step) {
      f32v low[R], high[R];
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) low[r] = high[r] = f32v{};
      for (int64_t k = b * block, stop = least(k + block, end); k < stop; ++k, w += kQuantizedColumns) {
        f32v one, two;
        __builtin_prefetch(w + kFloatsAhead, 0, 2);
        load_two(w, one, two);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) low[r] += one * a[r][k], high[r] += two * a[r][k];
      }
      const f32v of_low = load(scale) * kLoadUnit<f8e4m3>, of_high = load(scale + W) * kLoadUnit<f8e4m3>;
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        if (r >= count) break;
        float* const to = c + r * kQuantizedColumns + col;
        store(to, load(to) + low[r] * of_low);
        store(to + W, load(to + W) + high[r] * of_high);
      }
    }
  }
}

// The same for any number of rows, in equal parts.
template <int R = kFloatRows>
void multiply_float_rows(const float* x, int64_t row, int rows, const f8e4m3* bytes, const float* scales, int64_t scale_step, int64_t first, int64_t last, int64_t block,
                         int64_t end, float* c) {
  for (int r = 0, parts = ceil_div(rows, R); parts > 0; --parts) {
    const int count = ceil_div(rows - r, parts);
    const float* const from = x + r * row;
    float* const to = c + r * kQuantizedColumns;
    if (count == 1) multiply_floats<1>(from, row, count, bytes, scales, scale_step, first, last, block, end, to);
    else if (count <= R / 2) multiply_floats<(R > 1 ? R / 2 : 1)>(from, row, count, bytes, scales, scale_step, first, last, block, end, to);
    else multiply_floats<R>(from, row, count, bytes, scales, scale_step, first, last, block, end, to);
    r += count;
  }
}

// c[rows, 32] += A times `k` rows of a panel that share a scale for each column; A is packed by the engine, for all of
// k, and begins at column `from` of it. `floats` has room for [k][32], `panel` for b_elements of as much.
template <class E>
void multiply_float_panels(const typename E::Element* a, int64_t a_panel, int64_t a_stride, int64_t from, int64_t rows, const f8e4m3* bytes, const float* scale, int64_t k,
                           float* floats, typename E::Element* panel, float* c) {
  constexpr int W = lanes<float>;
  for (int64_t i = 0; i < k; ++i) {
    for (int64_t j = 0; j < kQuantizedColumns; j += 2 * W) {
      f32v one, two;
      load_two(bytes + i * kQuantizedColumns + j, one, two);
      store(floats + i * kQuantizedColumns + j, one), store(floats + i * kQuantizedColumns + j + W, two);
    }
  }
  alignas(64) float part[kPanelRows * E::kCols];
  for (int64_t j = 0; j < kQuantizedColumns; j += E::kCols) {
    E::pack_b(floats + j, kQuantizedColumns, 1, k, round_up<int64_t>(k, E::kStep), E::kCols, panel);
    for (int64_t r = 0; r < rows; r += kPanelRows) {
      const int count = static_cast<int>(least<int64_t>(kPanelRows, rows - r));
      E::product(a + r / kPanelRows * a_panel + E::a_offset(from), a_stride, panel, k, count, part, E::kCols, false);
      for (int i = 0; i < count; ++i) {
        for (int64_t n = 0; n < E::kCols; n += W) {
          float* const to = c + (r + i) * kQuantizedColumns + j + n;
          store(to, load(to) + load(part + i * E::kCols + n) * (load(scale + j + n) * kLoadUnit<f8e4m3>));
        }
      }
    }
  }
}

}  // namespace vishwamai::VISHWAMAI_ISA
