// Engines on AMX tiles: 16 rows of 64 bytes.  Included by engine.h where the instruction set has them.
//
// AmxEngine<1> multiplies bfloat16; <2> and <3> multiply float32 split into two or three bfloat16 parts, x = x0 + x1 +
// x2, keeping three products (about 16 bits) or six (float32's accuracy: what is left out is below 2^-24 of |a| |b|).
// See Henry, Tang, Heinecke, ARITH 2019. The split needs finite numbers away from float32's limits; matmul checks that
// and takes the FmaEngine otherwise.
#pragma once

namespace vishwamai::VISHWAMAI_ISA {

// Holds the tile configuration of this thread (all eight tiles 16 x 64 bytes) while products run.
struct AmxScope {
  AmxScope() {
    struct alignas(64) Config {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    };
    static_assert(sizeof(Config) == 64);
    // A constant in memory: GCC 12 tells itself that the instruction reads 8 bytes, and drops what writes the rest of a
    // local one.
    static constexpr Config config{};
    _tile_loadconfig(&config);
  }
  ~AmxScope() { _tile_release(); }
  AmxScope(const AmxScope&) = delete;
  AmxScope& operator=(const AmxScope&) = delete;
};

// A tile of A, its rows `row` bytes apart, into register 4 or 5 (a literal, as the assembler wants it); one that passes
// through is loaded with the hint not to displace what stays.
template <int kInto, bool kPassing>
VISHWAMAI_INLINE void load_a(const void* from, int64_t row = 64) {
  static_assert(kInto == 4 || kInto == 5);
  if constexpr (kInto == 4 && kPassing) _tile_stream_loadd(4, from, row);
  else if constexpr (kInto == 4) _tile_loadd(4, from, row);
  else if constexpr (kPassing) _tile_stream_loadd(5, from, row);
  else _tile_loadd(5, from, row);
}

// Where the tiles of 32 rows of A lie: their rows `row` bytes apart, the lower ones and those of the next 64 bytes of k
// so many elements on. A panel has them one after another; a matrix, as it lies, needs no packing where they are whole.
template <class Element>
struct TilesOfA {
  const Element* data;
  int64_t row, lower, next;
};

// The sums of 32 columns in tiles 0 and 1, beyond 16 rows 2 and 3 too: those of C, or zero.
template <class Acc>
VISHWAMAI_INLINE void begin_sums(const Acc* c, int64_t ldc, bool both, bool accumulate) {
  static_assert(sizeof(Acc) == 4);
  const int64_t row_bytes = ldc * 4;
  if (accumulate) {
    _tile_loadd(0, c, row_bytes);
    _tile_loadd(1, c + 16, row_bytes);
    if (both) {
      _tile_loadd(2, c + 16 * ldc, row_bytes);
      _tile_loadd(3, c + 16 * ldc + 16, row_bytes);
    }
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
}
template <class Acc>
VISHWAMAI_INLINE void end_sums(Acc* c, int64_t ldc, bool both) {
  const int64_t row_bytes = ldc * 4;
  _tile_stored(0, c, row_bytes);
  _tile_stored(1, c + 16, row_bytes);
  if (both) {
    _tile_stored(2, c + 16 * ldc, row_bytes);
    _tile_stored(3, c + 16 * ldc + 16, row_bytes);
  }
}

// C (+)= A B of numbers that are one part: bfloat16 or int8.  `chunks` of 64 bytes of k; beyond 16 rows, 32.
template <bool kPassing, class Element, class Acc>
VISHWAMAI_INLINE void multiply_tiles(TilesOfA<Element> a, const Element* b, int64_t chunks, bool both, Acc* c, int64_t ldc, bool accumulate) {
  constexpr int64_t kTile = kTileBytes / static_cast<int64_t>(sizeof(Element));
#define VISHWAMAI_MULTIPLY(sum, left, right)                                        \
  if constexpr (std::is_same_v<Element, int8_t>) _tile_dpbssd(sum, left, right);   \
  else _tile_dpbf16ps(sum, left, right);
  begin_sums(c, ldc, both, accumulate);
  for (int64_t i = 0; i < chunks; ++i, a.data += a.next, b += 2 * kTile) {
    load_a<4, kPassing>(a.data, a.row);
    _tile_loadd(6, b, 64);
    VISHWAMAI_MULTIPLY(0, 4, 6)
    _tile_loadd(7, b + kTile, 64);
    VISHWAMAI_MULTIPLY(1, 4, 7)
    if (both) {
      load_a<5, kPassing>(a.data + a.lower, a.row);
      VISHWAMAI_MULTIPLY(2, 5, 6)
      VISHWAMAI_MULTIPLY(3, 5, 7)
    }
  }
  end_sums(c, ldc, both);
#undef VISHWAMAI_MULTIPLY
}

template <int kParts>
struct AmxEngine : TilePanels<kParts> {
  using Element = typename TilePanels<kParts>::Element;
  using Scope = AmxScope;
  static constexpr int kTile = TilePanels<kParts>::kTile, kChunk = TilePanels<kParts>::kChunk, kCols = TilePanels<kParts>::kCols;

#define VISHWAMAI_LOAD_A(p)                  \
  load_a<4, kPassing>(a + (p) * kTile);      \
  load_a<5, kPassing>(a + (kParts + (p)) * kTile);
#define VISHWAMAI_LOAD_B(p)                          \
  _tile_loadd(6, b + (p) * kTile, 64);               \
  _tile_loadd(7, b + (kParts + (p)) * kTile, 64);
#define VISHWAMAI_MULTIPLY   \
  _tile_dpbf16ps(0, 4, 6);   \
  _tile_dpbf16ps(1, 4, 7);   \
  _tile_dpbf16ps(2, 5, 6);   \
  _tile_dpbf16ps(3, 5, 7);

  // C += A B where C is the sum of many more terms: added to it one by one, these would lose their last digits. For
  // float32 alone: beside bfloat16's, those digits are nothing.
  template <bool kPassing = false>
  static void add(const Element* a, int64_t lda, const Element* b, int64_t k, int rows, float* c, int64_t ldc)
    requires(kParts == 3)
  {
    alignas(64) float part[kPanelRows * kCols];
    product<kPassing>(a, lda, b, k, rows, part, kCols, false);
    for (int r = 0; r < rows; ++r) {
      store(c + r * ldc, load(c + r * ldc) + load(part + r * kCols));
      store(c + r * ldc + 16, load(c + r * ldc + 16) + load(part + r * kCols + 16));
    }
  }

  // C (+)= A B.  kPassing: A is used once while B is used again and should stay in the first cache level.
  template <bool kPassing = false>
  static void product(const Element* a, int64_t, const Element* b, int64_t k, int rows, float* c, int64_t ldc, bool accumulate) {
    const int64_t chunks = ceil_div<int64_t>(k, 32);
    if constexpr (kParts == 1) return multiply_tiles<kPassing, Element>({a, 64, kTile, kChunk}, b, chunks, rows > 16, c, ldc, accumulate);
    if (rows <= 16) {
      begin_sums(c, ldc, false, accumulate);
      for (int64_t i = 0; i < chunks; ++i, a += kChunk, b += kChunk) {
        for (int pb = kParts - 1; pb >= 0; --pb) {
          VISHWAMAI_LOAD_B(pb)
          for (int pa = kParts - 1 - pb; pa >= 0; --pa) {
            load_a<4, kPassing>(a + pa * kTile);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
          }
        }
      }
      end_sums(c, ldc, false);
      return;
    }
    begin_sums(c, ldc, true, accumulate);
    for (int64_t i = 0; i < chunks; ++i, a += kChunk, b += kChunk) {
      // The small products first; each step loads only the operand that changes.
      if constexpr (kParts == 2) {
        VISHWAMAI_LOAD_A(1) VISHWAMAI_LOAD_B(0) VISHWAMAI_MULTIPLY
        VISHWAMAI_LOAD_A(0) VISHWAMAI_MULTIPLY
        VISHWAMAI_LOAD_B(1) VISHWAMAI_MULTIPLY
      } else {
        VISHWAMAI_LOAD_A(2) VISHWAMAI_LOAD_B(0) VISHWAMAI_MULTIPLY
        VISHWAMAI_LOAD_A(1) VISHWAMAI_MULTIPLY
        VISHWAMAI_LOAD_B(1) VISHWAMAI_MULTIPLY
        VISHWAMAI_LOAD_A(0) VISHWAMAI_MULTIPLY
        VISHWAMAI_LOAD_B(2) VISHWAMAI_MULTIPLY
        VISHWAMAI_LOAD_B(0) VISHWAMAI_MULTIPLY
      }
    }
    end_sums(c, ldc, true);
  }
#undef VISHWAMAI_LOAD_A
#undef VISHWAMAI_LOAD_B
#undef VISHWAMAI_MULTIPLY
};

// int8 x int8 -> int32 on tiles.
struct AmxInt8Engine : Int8TilePanels<0> {
  using Scope = AmxScope;

  template <bool kPassing = false>
  static void product(const int8_t* a, int64_t, const int8_t* b, int64_t k, int rows, int32_t* c, int64_t ldc, bool accumulate) {
    multiply_tiles<kPassing, int8_t>({a, 64, kTileBytes, kChunk}, b, ceil_div<int64_t>(k, 64), rows > 16, c, ldc, accumulate);
  }
};

}  // namespace vishwamai::VISHWAMAI_ISA
