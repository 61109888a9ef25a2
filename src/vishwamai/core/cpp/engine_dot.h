// Engines on the dot products of AVX-512: in each lane one instruction multiplies and adds two bfloat16 (VDPBF16PS) or
// four int8 (VPDPBUSD) neighbours along k. Included by engine.h where the instruction set has them and no tiles.
#pragma once

namespace vishwamai::VISHWAMAI_ISA {

// Where the rows and steps of tiles lie, for InRegisters.
template <class Panels>
struct InTiles : Panels {
  using Element = typename Panels::Element;
  struct Scope {};
  static constexpr int kMicroRows = 14;  // 28 sums, 2 vectors of B, 2 to spare
  static constexpr int kLane = 4 / sizeof(Element), kRow = 64 / sizeof(Element);
  static constexpr int64_t kHalf = kTileBytes / sizeof(Element);  // from the first 16 columns to the others

  static constexpr int64_t row_stride(int64_t) { return kRow; }
  static constexpr int64_t steps(int64_t k) { return ceil_div<int64_t>(k, kLane); }
  static constexpr int64_t a_at(int64_t i) { return i / 16 * Panels::kChunk + i % 16 * kLane; }
  static constexpr int64_t b_at(int64_t i) { return i / 16 * Panels::kChunk + i % 16 * kRow; }
  static VISHWAMAI_INLINE __m512i columns(const Element* p) { return _mm512_loadu_si512(p); }
  static VISHWAMAI_INLINE __m512i broadcast(const Element* p) {
    int32_t lane;
    memcpy(&lane, p, sizeof(lane));
    return _mm512_set1_epi32(lane);
  }
};

// bfloat16.  The instruction counts denormal numbers as zero, and rounds after each of the two products.
struct DotEngine : InTiles<TilePanels<1>>, InRegisters<DotEngine> {
  static VISHWAMAI_INLINE f32v multiply_add(f32v sum, __m512i a, __m512i b) {
    return (f32v)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
  }
};

// int8 x int8 -> int32. The instruction wants one factor unsigned: B is packed as b + 128, and the sums of a row of A
// start at -128 times the sum of the row, which makes them exact (modulo 2^32, as int32 sums are). Rows of A keep their
// own order, so that A can be multiplied as it lies; a panel of it ends with the starts.
struct DotInt8Engine : InTiles<Int8TilePanels<-128>>, InRegisters<DotInt8Engine> {
  static constexpr int64_t a_stride(int64_t k) { return round_up<int64_t>(k, 64) | 64; }  // an odd number of cache lines
  static constexpr int64_t a_elements(int64_t k) { return kPanelRows * (a_stride(k) + static_cast<int64_t>(sizeof(int32_t))); }
  static constexpr int64_t row_stride(int64_t lda) { return lda; }
  static constexpr int64_t a_at(int64_t i) { return i * kLane; }
  static const int32_t* starts(const int8_t* a, int64_t lda) { return reinterpret_cast<const int32_t*>(a + kPanelRows * lda); }

  static VISHWAMAI_INLINE i32v multiply_add(i32v sum, __m512i a, __m512i b) {
    return (i32v)_mm512_dpbusd_epi32((__m512i)sum, b, a);
  }

  static void pack_a(const int8_t* in, int64_t row_stride, int64_t k_stride, int rows, int64_t k, int8_t* out) {
    const int64_t ld = a_stride(k);
    for (int64_t i = 0; i < k; i += 64) {
      const int depth = static_cast<int>(least<int64_t>(64, k - i));
      for (int row = 0; row < rows; row += 16) {
        const int count = least(16, rows - row);
        alignas(64) int8_t tile[kTileBytes];
        if (k_stride == 1) tile_from_strips<false>(in + row * row_stride + i, row_stride, count, depth, tile);
        else tile_from_lines<true>(in + row + i * k_stride, k_stride, depth, count, tile);
        for (int r = 0; r < count; ++r) _mm512_store_si512(out + (row + r) * ld + i, _mm512_load_si512(tile + r * 64));
      }
    }
    row_starts(out, ld, rows, k, reinterpret_cast<int32_t*>(out + kPanelRows * ld));
  }

  // Where the sums of `rows` rows of A begin, which lie `lda` apart.
  static void row_starts(const int8_t* a, int64_t lda, int64_t rows, int64_t k, int32_t* starts) {
    for (int64_t row = 0; row < rows; row += 16) {
      const int count = static_cast<int>(least<int64_t>(16, rows - row));
      __m512i sums[16];
#pragma GCC unroll 16
      for (int r = 0; r < 16; ++r) {
        const int8_t* const from = a + (row + least(r, count - 1)) * lda;
        const __m512i one = _mm512_set1_epi8(1);
        __m512i sum = _mm512_setzero_si512();
        int64_t i = 0;
        for (; i + 64 <= k; i += 64) sum = _mm512_dpbusd_epi32(sum, one, _mm512_loadu_si512(from + i));
        if (i < k) sum = _mm512_dpbusd_epi32(sum, one, _mm512_maskz_loadu_epi8((1ull << (k - i)) - 1, from + i));
        sums[r] = sum;
      }
      transpose16(sums);
      i32v all{};
      for (int r = 0; r < 16; ++r) all += (i32v)sums[r];
      _mm512_mask_storeu_epi32(starts + row, first(count), (__m512i)(all * -128));
    }
  }
};

}  // namespace vishwamai::VISHWAMAI_ISA
