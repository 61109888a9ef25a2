// Engines on Arm's products of neighbours along k. Included by engine.h where the instruction set has them.
//
//   ArmDotEngine<int8_t>       SDOT: in each lane four int8 of A times four of B
//   ArmMatrixEngine<int8_t>    SMMLA: [2 rows, 8 of k] times [8 of k, 2 columns], added to [2, 2] of int32
//   ArmMatrixEngine<uint16_t>  BFMMLA: the same with 4 of k of bfloat16 (their bits), added to float32
//
// Both int8 engines are exact (modulo 2^32, as int32 sums are).
#pragma once

namespace vishwamai::VISHWAMAI_ISA {

// Panels whose unit is `kNeighbours` along k of one row or column:
//   A: [row / kTogether][k / kNeighbours][row % kTogether][kNeighbours]
//   B: [k / kNeighbours][column][kNeighbours]
// k is padded with zeros to whole units, rows of A and columns of B to whole panels.
template <class ElementType, int kNeighbours, int kTogether>
struct NeighbourPanels {
  using Element = ElementType;
  using Acc = std::conditional_t<sizeof(Element) == 1, int32_t, float>;
  static constexpr int kCols = 8;
  static constexpr int kStep = kNeighbours;
  static constexpr int64_t kUnit = kTogether * kNeighbours;  // elements of A for a step of its rows
  struct Scope {};

  // From `kTogether` rows to the next: an odd number of cache lines.
  static constexpr int64_t a_stride(int64_t k) {
    constexpr int64_t line = 64 / sizeof(Element);
    return round_up<int64_t>(kTogether * round_up<int64_t>(k, kNeighbours), line) | line;
  }
  static constexpr int64_t a_elements(int64_t k) { return kPanelRows / kTogether * a_stride(k); }
  static constexpr int64_t a_offset(int64_t k) { return kTogether * k; }
  static constexpr int64_t b_elements(int64_t k) { return round_up<int64_t>(k, kNeighbours) * kCols; }

  template <class S>
  static void pack_a(const S* in, int64_t row_stride, int64_t k_stride, int rows, int64_t k, Element* out) {
    const int64_t ld = a_stride(k);
    for (int row = 0; row < kPanelRows; row += 8) {
      Element* to[8];
      for (int r = 0; r < 8; ++r) to[r] = out + (row + r) / kTogether * ld + (row + r) % kTogether * kNeighbours;
      const int count = greatest(0, least(8, rows - row));
      for (int64_t i = 0; i < k; i += kNeighbours) {
        alignas(16) Element units[8 * kNeighbours];
        unit_of_eight(in + row * row_stride + i * k_stride, k_stride, row_stride, static_cast<int>(least<int64_t>(kNeighbours, k - i)), count, units);
        for (int r = 0; r < 8; ++r) memcpy(to[r] + i * kTogether, units + r * kNeighbours, sizeof(Element) * kNeighbours);
      }
    }
  }
  template <class S>
  static void pack_b(const S* in, int64_t k_stride, int64_t col_stride, int64_t k, int64_t padded, int cols, Element* out) {
    for (int64_t i = 0; i < padded; i += kNeighbours, out += kCols * kNeighbours) {
      unit_of_eight(in + i * k_stride, k_stride, col_stride, static_cast<int>(greatest<int64_t>(0, least<int64_t>(kNeighbours, k - i))), cols, out);
    }
  }

  // Writes two vectors of row `row` of an A panel, at columns `col` onwards (col a multiple of kCols).
  static VISHWAMAI_INLINE void put(Element* panel, int64_t stride, int row, int64_t col, f32v x, f32v y) {
    static_assert(kNeighbours == lanes<float>);
    Element* const to = panel + row / kTogether * stride + row % kTogether * kNeighbours + col * kTogether;
    store(reinterpret_cast<bf16*>(to), x);
    store(reinterpret_cast<bf16*>(to + kUnit), y);
  }

 private:
  using Eight = std::conditional_t<sizeof(Element) == 1, uint8x8_t, uint16x8_t>;

  static VISHWAMAI_INLINE Element element(int8_t x) { return x; }
  static VISHWAMAI_INLINE Element element(bf16 x) { return x.bits; }
  static VISHWAMAI_INLINE Element element(float x) { return to_bf16(splat(x))[0]; }
  static VISHWAMAI_INLINE Eight eight(const int8_t* p) { return vld1_u8(reinterpret_cast<const uint8_t*>(p)); }
  static VISHWAMAI_INLINE Eight eight(const bf16* p) { return vld1q_u16(reinterpret_cast<const uint16_t*>(p)); }
  static VISHWAMAI_INLINE Eight eight(const float* p) { return vcombine_u16((uint16x4_t)to_bf16(load(p)), (uint16x4_t)to_bf16(load(p + 4))); }

  // [8][kNeighbours]: `depth` of k of `count` lines (rows of A, columns of B), which lie `line` apart; zero beyond.
  template <class S>
  static VISHWAMAI_INLINE void unit_of_eight(const S* in, int64_t k_stride, int64_t line, int depth, int count, Element* out) {
    if (line == 1 && depth == kNeighbours && count == 8) {
      Eight along[kNeighbours];
#pragma GCC unroll 8
      for (int i = 0; i < kNeighbours; ++i) along[i] = eight(in + i * k_stride);
      return interleave(along, out);
    }
    if constexpr (sizeof(S) == sizeof(Element)) {
      if (k_stride == 1 && depth == kNeighbours) {
        for (int c = 0; c < count; ++c) memcpy(out + c * kNeighbours, in + c * line, sizeof(Element) * kNeighbours);
        memset(out + count * kNeighbours, 0, sizeof(Element) * kNeighbours * static_cast<size_t>(8 - count));
        return;
      }
    }
    memset(out, 0, sizeof(Element) * 8 * kNeighbours);
    for (int c = 0; c < count; ++c)
      for (int i = 0; i < depth; ++i) out[c * kNeighbours + i] = element(in[c * line + i * k_stride]);
  }

  // Element j of each vector becomes neighbours: number j * kNeighbours and those after it.
  static VISHWAMAI_INLINE void interleave(const uint16x8_t* x, uint16_t* out) {
    const uint32x4_t low01 = vreinterpretq_u32_u16(vzip1q_u16(x[0], x[1])), high01 = vreinterpretq_u32_u16(vzip2q_u16(x[0], x[1]));
    const uint32x4_t low23 = vreinterpretq_u32_u16(vzip1q_u16(x[2], x[3])), high23 = vreinterpretq_u32_u16(vzip2q_u16(x[2], x[3]));
    const uint32x4_t all[4] = {vzip1q_u32(low01, low23), vzip2q_u32(low01, low23), vzip1q_u32(high01, high23), vzip2q_u32(high01, high23)};
    memcpy(out, all, sizeof(all));
  }
  static VISHWAMAI_INLINE void interleave(const uint8x8_t* x, int8_t* out) {
    const auto pairs = [](uint8x8_t a, uint8x8_t b) { return vreinterpretq_u16_u8(vcombine_u8(vzip1_u8(a, b), vzip2_u8(a, b))); };
    const uint16x8_t p01 = pairs(x[0], x[1]), p23 = pairs(x[2], x[3]);
    const uint32x4_t low = vreinterpretq_u32_u16(vzip1q_u16(p01, p23)), high = vreinterpretq_u32_u16(vzip2q_u16(p01, p23));
    if constexpr (kNeighbours == 4) {
      const uint32x4_t all[2] = {low, high};
      memcpy(out, all, sizeof(all));
    } else {
      const uint16x8_t p45 = pairs(x[4], x[5]), p67 = pairs(x[6], x[7]);
      const uint32x4_t low4 = vreinterpretq_u32_u16(vzip1q_u16(p45, p67)), high4 = vreinterpretq_u32_u16(vzip2q_u16(p45, p67));
      const uint32x4_t all[4] = {vzip1q_u32(low, low4), vzip2q_u32(low, low4), vzip1q_u32(high, high4), vzip2q_u32(high, high4)};
      memcpy(out, all, sizeof(all));
    }
  }
};

template <class ElementType>
struct ArmDotEngine : NeighbourPanels<ElementType, 4, 1>, InRegisters<ArmDotEngine<ElementType>> {
  using Panels = NeighbourPanels<ElementType, 4, 1>;
  static constexpr int kMicroRows = 8;
  static constexpr int64_t kHalf = 16;  // from the first 4 columns to the others
  static constexpr int64_t row_stride(int64_t lda) { return lda; }
  static constexpr int64_t steps(int64_t k) { return ceil_div<int64_t>(k, 4); }
  static constexpr int64_t a_at(int64_t i) { return 4 * i; }
  static constexpr int64_t b_at(int64_t i) { return 4 * Panels::kCols * i; }
  static VISHWAMAI_INLINE int8x16_t columns(const int8_t* p) { return vld1q_s8(p); }
  static VISHWAMAI_INLINE int8x16_t broadcast(const int8_t* p) {
    int32_t four;
    memcpy(&four, p, sizeof(four));
    return vreinterpretq_s8_s32(vdupq_n_s32(four));
  }
  static VISHWAMAI_INLINE i32v multiply_add(i32v sum, int8x16_t a, int8x16_t b) { return (i32v)vdotq_s32((int32x4_t)sum, a, b); }
};

#if defined(VISHWAMAI_NEON_BF16)
// bfloat16: the instruction takes denormal numbers as zero, and sums of two products and their sums are rounded to odd.
template <class ElementType>
struct ArmMatrixEngine : NeighbourPanels<ElementType, 8 / sizeof(ElementType), 2> {
  using Panels = NeighbourPanels<ElementType, 8 / sizeof(ElementType), 2>;
  using typename Panels::Acc;
  using typename Panels::Element;

  template <bool kPassing = false>
  static VISHWAMAI_INLINE void product(const Element* a, int64_t lda, const Element* b, int64_t k, int rows, Acc* c, int64_t ldc, bool accumulate) {
    multiply(a, lda, b, k, rows, c, ldc, accumulate);
  }
  // C[rows, kCols] (+)= A B for the first `rows` rows of the panel.
  static void multiply(const Element* a, int64_t lda, const Element* b, int64_t k, int rows, Acc* c, int64_t ldc, bool accumulate) {
    const int64_t steps = ceil_div<int64_t>(k, Panels::kStep);
    for (int row = 0; row < rows; row += 8) {
      const Element* const from = a + row / 2 * lda;
      Acc* const to = c + row * ldc;
      const int count = least(8, rows - row);
      if (count > 4) eight_rows<4>(from, lda, b, steps, count, to, ldc, accumulate);
      else if (count > 2) eight_rows<2>(from, lda, b, steps, count, to, ldc, accumulate);
      else eight_rows<1>(from, lda, b, steps, count, to, ldc, accumulate);
    }
  }

 private:
  using Tile = V<Acc>;  // rows 0 and 1 of columns 0 and 1

  static VISHWAMAI_INLINE i32v multiply_add(i32v sum, const int8_t* a, int8x16_t b) { return (i32v)vmmlaq_s32((int32x4_t)sum, vld1q_s8(a), b); }
  static VISHWAMAI_INLINE f32v multiply_add(f32v sum, const uint16_t* a, uint16x8_t b) {
    return (f32v)vbfmmlaq_f32((float32x4_t)sum, vreinterpretq_bf16_u16(vld1q_u16(a)), vreinterpretq_bf16_u16(b));
  }
  static VISHWAMAI_INLINE int8x16_t columns(const int8_t* p) { return vld1q_s8(p); }
  static VISHWAMAI_INLINE uint16x8_t columns(const uint16_t* p) { return vld1q_u16(p); }

  // P pairs of rows, of which `rows` are stored.
  template <int P>
  static VISHWAMAI_INLINE void eight_rows(const Element* a, int64_t lda, const Element* b, int64_t steps, int rows, Acc* c, int64_t ldc, bool accumulate) {
    Tile sum[P][4] = {};
    for (int64_t i = 0; i < steps; ++i, a += Panels::kUnit, b += Panels::kCols * Panels::kStep) {
      const auto b0 = columns(b), b1 = columns(b + Panels::kUnit), b2 = columns(b + 2 * Panels::kUnit), b3 = columns(b + 3 * Panels::kUnit);
#pragma GCC unroll 4
      for (int p = 0; p < P; ++p) {
        sum[p][0] = multiply_add(sum[p][0], a + p * lda, b0);
        sum[p][1] = multiply_add(sum[p][1], a + p * lda, b1);
        sum[p][2] = multiply_add(sum[p][2], a + p * lda, b2);
        sum[p][3] = multiply_add(sum[p][3], a + p * lda, b3);
      }
    }
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p)
      for (int half = 0; half < 2; ++half) {
        if (2 * p + half >= rows) return;
        for (int t = 0; t < 2; ++t) {
          const Tile left = sum[p][2 * t], right = sum[p][2 * t + 1];
          const Tile row = half == 0 ? Tile{left[0], left[1], right[0], right[1]} : Tile{left[2], left[3], right[2], right[3]};
          Acc* const to = c + (2 * p + half) * ldc + 4 * t;
          store(to, accumulate ? load(to) + row : row);
        }
      }
  }
};
#endif

}  // namespace vishwamai::VISHWAMAI_ISA
