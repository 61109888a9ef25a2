// Panels made of tiles, 16 rows of 64 bytes, as AMX and the dot products of AVX-512 read them.  Included by engine.h.
//
// A tile of A is 16 rows of 32 (int8: 64) of k; a tile of B has the neighbours along k that one lane takes, two (four),
// side by side: row i holds k = 2i and 2i + 1 of 16 columns. A panel is a chunk for every 32 (64) of k: the tiles of
// its lower and of its upper 16 rows or columns.
#pragma once

namespace vishwamai::VISHWAMAI_ISA {

constexpr int kTileBytes = 1024;

template <int kParts>
struct TilePanels {
  using Element = uint16_t;
  using Acc = float;
  static constexpr int kCols = 32;
  static constexpr int kStep = 32;
  static constexpr int kTile = 512;                      // elements of a tile: 16 rows of 32
  static constexpr int kChunk = 2 * kParts * kTile;      // a panel's elements for 32 of k: [half][part][16][32]

  static constexpr int64_t a_stride(int64_t) { return 0; }  // the layout needs none
  static constexpr int64_t a_elements(int64_t k) { return ceil_div<int64_t>(k, 32) * kChunk; }
  static constexpr int64_t a_offset(int64_t k) { return k / 32 * kChunk; }
  static constexpr int64_t b_elements(int64_t k) { return ceil_div<int64_t>(k, 32) * kChunk; }

  // 32 numbers (x: 0-15, y: 16-31) as kParts vectors of 32 bfloat16.
  static VISHWAMAI_INLINE void split(f32v x, f32v y, __m512i part[kParts]) {
    for (int p = 0; p < kParts; ++p) {
      part[p] = (__m512i)_mm512_cvtne2ps_pbh(y, x);
      if (p + 1 < kParts) {
        x -= widen(_mm512_castsi512_si256(part[p]));
        y -= widen(_mm512_extracti64x4_epi64(part[p], 1));
      }
    }
  }
  static VISHWAMAI_INLINE f32v widen(__m256i half) {
    return bit_cast<f32v>(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
  }
  template <class S>
  static VISHWAMAI_INLINE void load_split(const S* p, int count, __m512i part[kParts]) {
    if constexpr (std::is_same_v<S, bf16>) {
      static_assert(kParts == 1);
      part[0] = count >= 32 ? _mm512_loadu_si512(p)
                            : _mm512_maskz_loadu_epi16(count <= 0 ? 0 : (__mmask32)((1u << count) - 1), p);
    } else {
      split(load(p, count), load(p + 16, count - 16), part);
    }
  }
  // Two rows of 16 numbers as 16 pairs (dwords), lower row in the lower half.
  template <class S>
  static VISHWAMAI_INLINE void load_pairs(const S* low, const S* high, int count_low, int count_high, __m512i part[kParts]) {
    if constexpr (std::is_same_v<S, bf16>) {
      const __m512i a = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first(count_low), low));
      const __m512i b = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first(count_high), high));
      part[0] = _mm512_or_si512(a, _mm512_slli_epi32(b, 16));
    } else {
      __m512i both[kParts];
      split(load(low, count_low), load(high, count_high), both);
      for (int p = 0; p < kParts; ++p) {
        const __m512i a = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(both[p]));
        const __m512i b = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(both[p], 1));
        part[p] = _mm512_or_si512(a, _mm512_slli_epi32(b, 16));
      }
    }
  }
  // A tile (per part) from 16 strips of 32 numbers that lie `stride` apart; as they are, or transposed as pairs.
  template <class S, bool kTranspose>
  static VISHWAMAI_INLINE void tile_from_strips(const S* in, int64_t stride, int strips, int count, Element* out) {
    __m512i rows[kParts][16];
    for (int r = 0; r < 16; ++r) {
      __m512i part[kParts];
      if (r < strips) load_split(in + r * stride, count, part);
      for (int p = 0; p < kParts; ++p) {
        const __m512i v = r < strips ? part[p] : _mm512_setzero_si512();
        if constexpr (kTranspose) rows[p][r] = v;
        else _mm512_store_si512(out + p * kTile + r * 32, v);
      }
    }
    if constexpr (kTranspose) {
      for (int p = 0; p < kParts; ++p) {
        transpose16(rows[p]);
        for (int r = 0; r < 16; ++r) _mm512_store_si512(out + p * kTile + r * 32, rows[p][r]);
      }
    }
  }
  // A tile (per part) from up to 32 lines of 16 numbers each, paired: B's own order, or transposed A's.
  template <class S, bool kTranspose>
  static VISHWAMAI_INLINE void tile_from_lines(const S* in, int64_t stride, int lines, int count, Element* out) {
    __m512i rows[kParts][16];
    for (int r = 0; r < 16; ++r) {
      __m512i part[kParts];
      const bool some = 2 * r < lines;
      if (some) {
        const S* low = in + 2 * r * stride;
        load_pairs(low, 2 * r + 1 < lines ? low + stride : low, count, 2 * r + 1 < lines ? count : 0, part);
      }
      for (int p = 0; p < kParts; ++p) {
        const __m512i v = some ? part[p] : _mm512_setzero_si512();
        if constexpr (kTranspose) rows[p][r] = v;
        else _mm512_store_si512(out + p * kTile + r * 32, v);
      }
    }
    if constexpr (kTranspose) {
      for (int p = 0; p < kParts; ++p) {
        transpose16(rows[p]);
        for (int r = 0; r < 16; ++r) _mm512_store_si512(out + p * kTile + r * 32, rows[p][r]);
      }
    }
  }

  template <class S>
  static void pack_a(const S* in, int64_t row_stride, int64_t k_stride, int rows, int64_t k, Element* out) {
    for (int64_t i = 0; i < k; i += 32, out += kChunk) {
      const int depth = static_cast<int>(least<int64_t>(32, k - i));
      for (int half = 0; half < 2; ++half) {
        const int count = greatest(0, least(16, rows - 16 * half));
        Element* tile = out + half * kParts * kTile;
        if (count == 0) memset(tile, 0, kParts * kTileBytes);
        else if (k_stride == 1) tile_from_strips<S, false>(in + 16 * half * row_stride + i, row_stride, count, depth, tile);
        else if (row_stride == 1) tile_from_lines<S, true>(in + 16 * half + i * k_stride, k_stride, depth, count, tile);
        else {
          S copy[16 * 32];
          for (int r = 0; r < count; ++r)
            for (int c = 0; c < depth; ++c) copy[r * 32 + c] = in[(16 * half + r) * row_stride + (i + c) * k_stride];
          tile_from_strips<S, false>(copy, 32, count, depth, tile);
        }
      }
    }
  }
  template <class S>
  static void pack_b(const S* in, int64_t k_stride, int64_t col_stride, int64_t k, int64_t padded, int cols, Element* out) {
    for (int64_t i = 0; i < padded; i += 32, out += kChunk) {
      const int depth = static_cast<int>(greatest<int64_t>(0, least<int64_t>(32, k - i)));
      for (int half = 0; half < 2; ++half) {
        const int count = greatest(0, least(16, cols - 16 * half));
        Element* tile = out + half * kParts * kTile;
        if (count == 0 || depth == 0) memset(tile, 0, kParts * kTileBytes);
        else if (col_stride == 1) tile_from_lines<S, false>(in + i * k_stride + 16 * half, k_stride, depth, count, tile);
        else if (k_stride == 1) tile_from_strips<S, true>(in + i + 16 * half * col_stride, col_stride, count, depth, tile);
        else {
          S copy[16 * 32];
          for (int c = 0; c < count; ++c)
            for (int r = 0; r < depth; ++r) copy[c * 32 + r] = in[(i + r) * k_stride + (16 * half + c) * col_stride];
          tile_from_strips<S, true>(copy, 32, count, depth, tile);
        }
      }
    }
  }

  // Whole panels of B from 32 rows, each read through all of them: memory is visited in its own order.
  template <class S>
  static void pack_b_rows(const S* in, int64_t k_stride, int64_t panels, Element* out, int64_t panel_stride) {
    for (int r = 0; r < 16; ++r) {
      const S *low = in + 2 * r * k_stride, *high = low + k_stride;
      Element* to = out + r * 32;
      for (int64_t j = 0; j < panels; ++j, low += 32, high += 32, to += panel_stride) {
        if constexpr (std::is_same_v<S, bf16>) {
          const __m512i a = _mm512_loadu_si512(low), b = _mm512_loadu_si512(high);
          // Number i of the lower row (0-31) and of the upper one (32-63) in turns.
          const __m512i first_half = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8,  //
                                                      39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
          _mm512_store_si512(to, _mm512_permutex2var_epi16(a, first_half, b));
          _mm512_store_si512(to + kTile, _mm512_permutex2var_epi16(a, _mm512_add_epi16(first_half, _mm512_set1_epi16(16)), b));
        } else {
          for (int half = 0; half < 2; ++half) {
            __m512i part[kParts];
            load_pairs(low + 16 * half, high + 16 * half, 16, 16, part);
            for (int p = 0; p < kParts; ++p) _mm512_store_si512(to + (half * kParts + p) * kTile, part[p]);
          }
        }
      }
    }
  }

  static VISHWAMAI_INLINE void put(Element* panel, int64_t, int row, int64_t col, f32v x, f32v y) {
    Element* out = panel + (col / 32) * kChunk + (row / 16) * kParts * kTile + (row % 16) * 32;
    if constexpr (kParts == 1) {
      _mm512_store_si512(out, (__m512i)_mm512_cvtne2ps_pbh(y, x));
    } else {
      // The leading parts are cut off, not rounded: cheaper, exact together with what is left, and no overflow to
      // infinity.
      const __m512i mask = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
      const __m512i upper_halves = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33,  //
                                                    31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
#pragma GCC unroll 3
      for (int p = 0; p < kParts; ++p, out += kTile) {
        __m512i a = bit_cast<__m512i>(x), b = bit_cast<__m512i>(y);
        if (p + 1 == kParts) {
          a = _mm512_add_epi32(a, _mm512_set1_epi32(0x8000));
          b = _mm512_add_epi32(b, _mm512_set1_epi32(0x8000));
        }
        _mm512_store_si512(out, _mm512_permutex2var_epi16(a, upper_halves, b));
        if (p + 1 < kParts) {
          x -= bit_cast<f32v>(_mm512_and_si512(a, mask));
          y -= bit_cast<f32v>(_mm512_and_si512(b, mask));
        }
      }
    }
  }
};

// int8: 64 of k to a tile row, four to a lane. kOffset is added to each number of B, modulo 256.
template <int kOffset>
struct Int8TilePanels {
  using Element = int8_t;
  using Acc = int32_t;
  static constexpr int kCols = 32;
  static constexpr int kStep = 64;
  static constexpr int kChunk = 2 * kTileBytes;

  static constexpr int64_t a_stride(int64_t) { return 0; }
  static constexpr int64_t a_elements(int64_t k) { return ceil_div<int64_t>(k, 64) * kChunk; }
  static constexpr int64_t b_elements(int64_t k) { return ceil_div<int64_t>(k, 64) * kChunk; }

  static_assert(kOffset == 0 || kOffset == -128);
  static VISHWAMAI_INLINE __m512i offset(__m512i x) { return kOffset == 0 ? x : _mm512_xor_si512(x, _mm512_set1_epi8(kOffset)); }

  // Up to 16 strips of 64 bytes along k.
  template <bool kTranspose>
  static VISHWAMAI_INLINE void tile_from_strips(const int8_t* in, int64_t stride, int strips, int count, int8_t* out) {
    const __mmask64 mask = count >= 64 ? ~0ull : (1ull << count) - 1;
    __m512i rows[16];
    for (int r = 0; r < 16; ++r) rows[r] = r < strips ? _mm512_maskz_loadu_epi8(mask, in + r * stride) : _mm512_setzero_si512();
    if constexpr (kTranspose) transpose16(rows);
    for (int r = 0; r < 16; ++r) _mm512_store_si512(out + r * 64, kTranspose ? offset(rows[r]) : rows[r]);
  }
  // Up to 64 lines of 16 bytes across: four lines interleave into a row of the tile.
  template <bool kTranspose>
  static VISHWAMAI_INLINE void tile_from_lines(const int8_t* in, int64_t stride, int lines, int count, int8_t* out) {
    __m512i rows[16];
    for (int r = 0; r < 16; ++r) {
      __m128i v[4];
      for (int j = 0; j < 4; ++j) {
        v[j] = 4 * r + j < lines ? _mm_maskz_loadu_epi8(first(count), in + (4 * r + j) * stride) : _mm_setzero_si128();
      }
      const __m128i a = _mm_unpacklo_epi8(v[0], v[1]), b = _mm_unpackhi_epi8(v[0], v[1]);
      const __m128i c = _mm_unpacklo_epi8(v[2], v[3]), d = _mm_unpackhi_epi8(v[2], v[3]);
      const __m256i low = _mm256_set_m128i(_mm_unpackhi_epi16(a, c), _mm_unpacklo_epi16(a, c));
      const __m256i high = _mm256_set_m128i(_mm_unpackhi_epi16(b, d), _mm_unpacklo_epi16(b, d));
      rows[r] = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
    }
    if constexpr (kTranspose) transpose16(rows);
    for (int r = 0; r < 16; ++r) _mm512_store_si512(out + r * 64, kTranspose ? rows[r] : offset(rows[r]));
  }

  static void pack_a(const int8_t* in, int64_t row_stride, int64_t k_stride, int rows, int64_t k, int8_t* out) {
    for (int64_t i = 0; i < k; i += 64, out += kChunk) {
      const int depth = static_cast<int>(least<int64_t>(64, k - i));
      for (int half = 0; half < 2; ++half) {
        const int count = greatest(0, least(16, rows - 16 * half));
        int8_t* tile = out + half * kTileBytes;
        if (count == 0) memset(tile, 0, kTileBytes);
        else if (k_stride == 1) tile_from_strips<false>(in + 16 * half * row_stride + i, row_stride, count, depth, tile);
        else tile_from_lines<true>(in + 16 * half + i * k_stride, k_stride, depth, count, tile);
      }
    }
  }
  static void pack_b(const int8_t* in, int64_t k_stride, int64_t col_stride, int64_t k, int64_t padded, int cols, int8_t* out) {
    for (int64_t i = 0; i < padded; i += 64, out += kChunk) {
      const int depth = static_cast<int>(greatest<int64_t>(0, least<int64_t>(64, k - i)));
      for (int half = 0; half < 2; ++half) {
        const int count = greatest(0, least(16, cols - 16 * half));
        int8_t* tile = out + half * kTileBytes;
        if (count == 0 || depth == 0) memset(tile, kOffset, kTileBytes);
        else if (col_stride == 1) tile_from_lines<false>(in + i * k_stride + 16 * half, k_stride, depth, count, tile);
        else tile_from_strips<true>(in + i + 16 * half * col_stride, col_stride, count, depth, tile);
      }
    }
  }

  // Whole panels of B from 64 rows, each read through all of them: memory is visited in its own order.
  static void pack_b_rows(const int8_t* in, int64_t k_stride, int64_t panels, int8_t* out, int64_t panel_stride) {
    const auto pairs = [](const int8_t* low, const int8_t* high) __attribute__((always_inline)) {  // of 32 columns
      const __m512i a = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)low)), b = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)high));
      return _mm512_or_si512(a, _mm512_slli_epi16(b, 8));
    };
    const __m512i left = _mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0), right = _mm512_add_epi64(left, _mm512_set1_epi64(4));
    for (int r = 0; r < 16; ++r) {
      const int8_t* from = in + 4 * r * k_stride;
      int8_t* to = out + r * 64;
      for (int64_t j = 0; j < panels; ++j, from += 32, to += panel_stride) {
        const __m512i x = pairs(from, from + k_stride), y = pairs(from + 2 * k_stride, from + 3 * k_stride);
        // of every 8 columns, the first and the last 4
        const __m512i low = _mm512_unpacklo_epi16(x, y), high = _mm512_unpackhi_epi16(x, y);
        _mm512_store_si512(to, offset(_mm512_permutex2var_epi64(low, left, high)));
        _mm512_store_si512(to + kTileBytes, offset(_mm512_permutex2var_epi64(low, right, high)));
      }
    }
  }
};

}  // namespace vishwamai::VISHWAMAI_ISA
