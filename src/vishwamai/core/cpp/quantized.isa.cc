// Products with a quantized weight (quantized.h): bytes times bytes into int32, scaled and added up as float32 block by
// block. With few rows they are bound by reading the weight, and several panels of it are read by turns, which brings
// more from memory than one long line.
#include "quantized.h"

#include "engine.h"
#include "quantized_floats.h"
#include "rows.h"

namespace vishwamai::VISHWAMAI_ISA {
namespace {

constexpr int64_t kColumns = kQuantizedColumns;
constexpr int W = lanes<int32_t>;

// Four neighbours of x, in the type and order that `dot` wants.
#if defined(__AVX512VNNI__)
using Element = int8_t;
constexpr int kPlace[4] = {0, 1, 2, 3};
VISHWAMAI_INLINE i32v dot(i32v sum, i32v weights, const Element* x) {
  int32_t four;
  memcpy(&four, x, sizeof(four));
  return (i32v)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, _mm512_set1_epi32(four));
}
#elif defined(VISHWAMAI_NEON_DOT)
using Element = int8_t;
constexpr int kPlace[4] = {0, 1, 2, 3};
VISHWAMAI_INLINE i32v dot(i32v sum, i32v weights, const Element* x) {
  const int8x16_t four = ArmDotEngine<int8_t>::broadcast(x);
#if defined(VISHWAMAI_NEON_BF16)
  return (i32v)vusdotq_s32((int32x4_t)sum, (uint8x16_t)weights, four);
#else
  return (i32v)vdotq_s32((int32x4_t)sum, (int8x16_t)weights, four);
#endif
}
#else
using Element = int16_t;
constexpr int kPlace[4] = {0, 2, 1, 3};
VISHWAMAI_INLINE i32v dot(i32v sum, i32v weights, const Element* x) {
  const i32v even = weights & 0x00ff00ff, odd = (i32v)((u32v)weights >> 8) & 0x00ff00ff;
  sum = PairEngine::multiply_add(sum, even, PairEngine::broadcast(x));
  return PairEngine::multiply_add(sum, odd, PairEngine::broadcast(x + 2));
}
#endif

// SDOT wants its factors signed: 128 is taken off bytes, and 128 times the sum of the row is where sums begin.
#if defined(VISHWAMAI_NEON_DOT) && !defined(VISHWAMAI_NEON_BF16)
constexpr bool kSignedBytes = true;
#else
constexpr bool kSignedBytes = false;
#endif

#if defined(VISHWAMAI_NEON_BF16)
// dots[2 P, J vectors of columns] += two rows of x and two columns at a time, for `groups` pairs of fours of k (USMMLA).
// `x(r)` is where row r begins, `load` gives the bytes of both fours of vector t.
template <int R, int J, class X, class Load>
VISHWAMAI_INLINE void add_matrix_products(i32v (&dots)[R][J], int64_t groups, X&& x, Load&& load) {
  int32x4_t tiles[R / 2][J][2];  // columns 0 and 1 or 2 and 3 of a vector, times two rows
#pragma GCC unroll 8
  for (int p = 0; p < R / 2; ++p)
#pragma GCC unroll 4
    for (int t = 0; t < J; ++t) {
      tiles[p][t][0] = vzip1q_s32((int32x4_t)dots[2 * p][t], (int32x4_t)dots[2 * p + 1][t]);
      tiles[p][t][1] = vzip2q_s32((int32x4_t)dots[2 * p][t], (int32x4_t)dots[2 * p + 1][t]);
    }
  for (int64_t g = 0; g < groups; ++g) {
    uint8x16_t columns[J][2];
#pragma GCC unroll 4
    for (int t = 0; t < J; ++t) {
      i32v first, second;
      load(g, t, first, second);
      columns[t][0] = (uint8x16_t)vzip1q_s32((int32x4_t)first, (int32x4_t)second);
      columns[t][1] = (uint8x16_t)vzip2q_s32((int32x4_t)first, (int32x4_t)second);
    }
#pragma GCC unroll 8
    for (int p = 0; p < R / 2; ++p) {
      const int8x16_t rows = vcombine_s8(vld1_s8(x(2 * p) + 8 * g), vld1_s8(x(2 * p + 1) + 8 * g));
#pragma GCC unroll 4
      for (int t = 0; t < J; ++t) {
        tiles[p][t][0] = vusmmlaq_s32(tiles[p][t][0], columns[t][0], rows);
        tiles[p][t][1] = vusmmlaq_s32(tiles[p][t][1], columns[t][1], rows);
      }
    }
  }
#pragma GCC unroll 8
  for (int p = 0; p < R / 2; ++p)
#pragma GCC unroll 4
    for (int t = 0; t < J; ++t) {
      dots[2 * p][t] = (i32v)vuzp1q_s32(tiles[p][t][0], tiles[p][t][1]);
      dots[2 * p + 1][t] = (i32v)vuzp2q_s32(tiles[p][t][0], tiles[p][t][1]);
    }
}
#endif

constexpr int64_t kAhead = 4096;  // bytes of a panel that are asked for beforehand
#if defined(VISHWAMAI_AVX512)
constexpr int kMostRows = 6, kVectors = 2;  // 12 sums of int32, 12 of float32
#elif defined(__AVX2__)
constexpr int kMostRows = 2, kVectors = 2;
#elif defined(VISHWAMAI_NEON_DOT)
constexpr int kMostRows = 4, kVectors = 2;  // 8 sums of int32, 8 of float32, 4 vectors of the weight
#else
constexpr int kMostRows = 1, kVectors = 4;
#endif

// Twice the value of e2m1, + kTwiceOffset: a byte without sign, as `dot` wants it.
constexpr int kTwiceOffset = 12;
alignas(16) constexpr uint8_t kTwice[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
VISHWAMAI_INLINE i32v twice(i32v codes) {  // of 4-bit codes, one to a byte
#if defined(VISHWAMAI_AVX512)
  const __m128i table = _mm_load_si128(reinterpret_cast<const __m128i*>(kTwice));
  return (i32v)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), (__m512i)codes);
#elif defined(__AVX2__)
  const __m128i table = _mm_load_si128(reinterpret_cast<const __m128i*>(kTwice));
  return (i32v)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), (__m256i)codes);
#elif defined(__aarch64__)
  return (i32v)vqtbl1q_u8(vld1q_u8(kTwice), (uint8x16_t)codes);
#else
  uint8_t bytes[sizeof(codes)];
  memcpy(bytes, &codes, sizeof(codes));
  for (uint8_t& byte : bytes) byte = kTwice[byte];
  memcpy(&codes, bytes, sizeof(codes));
  return codes;
#endif
}

// Rows of x as bytes: x[r, k] ~ values[r, k] * scales[r, block of k].
struct Rows {
  const Element* values;  // [rows][padded k]
  const float* scales;    // [rows][blocks]
  const int32_t* sums;    // [rows][blocks]: of the values
  int64_t row, blocks;    // elements from row to row
};

// A stretch of a panel: blocks [first, last), and their bytes and scales.
struct Stretch {
  const uint8_t* bytes;
  const float* scales;
  int64_t first, last, groups, end;  // groups of 4 of k in a block, and where the last one of all ends
  int64_t scale_step;
  int offset;  // what was added to the values
};

// The parts of a scale of uint4: words that `load` reads as float32.
VISHWAMAI_INLINE f32v scale_of(f32v word) { return bit_cast<f32v>(bit_cast<u32v>(word) & 0xffffff00u); }
VISHWAMAI_INLINE f32v zero_of(f32v word) { return __builtin_convertvector(bit_cast<i32v>(word) & 0xff, f32v) * splat(1.0f / 16); }

// c[rows, 32] += x[row0 ...] times a stretch of a panel; rows that are not there repeat the last one and are not stored.
// With `kZeros` the scales have zero points, which are subtracted after the sum of a block.
template <int R, Packing kPacking, bool kZeros>
__attribute__((noinline)) void multiply(const Rows& x, int64_t row0, int count, const Stretch& s, float* c) {
  const Element* a[R];
  const float* scales[R];
  const int32_t* sums[R];
  for (int r = 0; r < R; ++r) {
    const int64_t row = row0 + least(r, count - 1);
    a[r] = x.values + row * x.row, scales[r] = x.scales + row * x.blocks, sums[r] = x.sums + row * x.blocks;
  }
  constexpr bool kNibbles = kPacking != Packing::int8, kSigned = kSignedBytes && !kNibbles;
  constexpr int J = kVectors, kGroup = kNibbles ? 8 : 4;
  for (int64_t col = 0; col < kColumns; col += J * W) {
    f32v sum[R][J];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int t = 0; t < J; ++t) sum[r][t] = load(c + least(r, count - 1) * kColumns + col + t * W);
    const uint8_t* w = s.bytes + 4 * col;
    const float* scale = s.scales + col;
    for (int64_t block = s.first; block < s.last; ++block, scale += s.scale_step) {
      i32v dots[R][J];
      [[maybe_unused]] float totals[R];
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        if constexpr (kZeros) totals[r] = static_cast<float>(sums[r][block]) * scales[r][block];
#pragma GCC unroll 4
        for (int t = 0; t < J; ++t) dots[r][t] = splat(((kSigned ? 128 : 0) - (kZeros ? 0 : s.offset)) * sums[r][block]);
      }
      const int64_t end = least((block + 1) * s.groups, s.end);
#if defined(VISHWAMAI_NEON_BF16)
      if constexpr (R > 1) {
        const int64_t begin = block * s.groups, pairs = (end - begin) / 2;
        add_matrix_products(dots, pairs, [&](int r) { return a[r] + 4 * begin; }, [&](int64_t g, int t, i32v& first, i32v& second) {
          const uint8_t* const from = w + g * (kNibbles ? 4 : 8) * kColumns + 4 * t * W;
          __builtin_prefetch(from + kAhead, 0, 2);
          memcpy(&first, from, sizeof(first));
          if constexpr (kNibbles) second = (i32v)((u32v)first >> 4) & 0x0f0f0f0f, first &= 0x0f0f0f0f;
          else memcpy(&second, from + 4 * kColumns, sizeof(second));
          if constexpr (kPacking == Packing::mxfp4) first = twice(first), second = twice(second);
        });
        w += pairs * (kNibbles ? 4 : 8) * kColumns;
      } else
#endif
      for (int64_t g = block * s.groups; g < end; g += kGroup / 4, w += 4 * kColumns) {
        i32v weights[J], high[J];
#pragma GCC unroll 4
        for (int t = 0; t < J; ++t) {
          if (R <= 4) __builtin_prefetch(w + 4 * t * W + kAhead, 0, 2);
          memcpy(&weights[t], w + 4 * t * W, sizeof(weights[t]));
          if constexpr (kNibbles) high[t] = (i32v)((u32v)weights[t] >> 4) & 0x0f0f0f0f, weights[t] &= 0x0f0f0f0f;
          if constexpr (kPacking == Packing::mxfp4) high[t] = twice(high[t]), weights[t] = twice(weights[t]);
          if constexpr (kSigned) weights[t] ^= splat(static_cast<int32_t>(0x80808080u));
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
          for (int t = 0; t < J; ++t) {
            dots[r][t] = dot(dots[r][t], weights[t], a[r] + 4 * g);
            if constexpr (kNibbles) dots[r][t] = dot(dots[r][t], high[t], a[r] + 4 * g + 4);
          }
      }
#pragma GCC unroll 4
      for (int t = 0; t < J; ++t) {
        f32v of_weight = load(scale + t * W);
        [[maybe_unused]] f32v zero = {};
        if constexpr (kZeros) zero = zero_of(of_weight), of_weight = scale_of(of_weight), zero *= of_weight;
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          sum[r][t] += __builtin_convertvector(dots[r][t], f32v) * (of_weight * scales[r][block]);
          if constexpr (kZeros) sum[r][t] -= zero * totals[r];
        }
      }
    }
    for (int r = 0; r < count; ++r)
      for (int t = 0; t < J; ++t) store(c + r * kColumns + col + t * W, sum[r][t]);
  }
}

template <int R, Packing kPacking, bool kZeros = false>
void multiply_rows(const Rows& x, int64_t row0, int count, const Stretch& s, float* c) {
  if constexpr (R > 1) {
    if (count <= (R == 6 ? 4 : R / 2)) return multiply_rows<(R == 6 ? 4 : R / 2), kPacking, kZeros>(x, row0, count, s, c);
  }
  multiply<R, kPacking, kZeros>(x, row0, count, s, c);
}

// One row of x rounded to bytes. A block's scale is its largest magnitude / 127, times `unit`, what the weight's bytes
// count; a number that is not finite makes the scale NaN.
template <class S>
void quantize_row(const S* x, int64_t k, int64_t padded, int64_t block, float unit, Element* values, float* scales, int32_t* sums) {
  for (int64_t k0 = 0; k0 < padded; k0 += block, ++scales, ++sums) {
    const int64_t n = least(block, k - k0), end = least(block, padded - k0);
    f32v most = {}, poison = {};
    for (int64_t i = 0; i < n; i += W) {
      const f32v v = load(x + k0 + i, static_cast<int>(least<int64_t>(W, n - i)));
      most = maximum(most, v < 0 ? -v : v);
      poison += v * 0.0f;
    }
    const float largest = max_lanes<float>(most), inverse = largest < 1e-30f ? 0.0f : 127.0f / largest;
    *scales = (largest < 1e-30f ? 0.0f : largest / 127.0f) * unit + sum_lanes<float>(poison);
    i32v total = {};
    for (int64_t i = 0; i < end; i += W) {
      i32v q = {};
      if (i < n) q = __builtin_convertvector(nearest(load(x + k0 + i, static_cast<int>(least<int64_t>(W, n - i))) * inverse), i32v);
      total += q;
      const int64_t count = least<int64_t>(W, end - i);
#if defined(__AVX512VNNI__)
      _mm_mask_storeu_epi8(values + k0 + i, first(static_cast<int>(count)), _mm512_cvtepi32_epi8((__m512i)q));
#else
      for (int64_t j = 0; j < count; ++j) values[k0 + i / 4 * 4 + j / 4 * 4 + kPlace[j % 4]] = static_cast<Element>(q[j]);
#endif
    }
    int32_t lanes_of[W], sum = 0;
    memcpy(lanes_of, &total, sizeof(total));
    for (int32_t each : lanes_of) sum += each;
    *sums = sum;
  }
}

// Bytes [k / 4][32][4] of the values + 8, or of twice the values + 12, from halves of bytes.
template <Packing kPacking>
void unpack(const uint8_t* in, int64_t groups, uint8_t* out) {
  for (int64_t g = 0; g < groups; g += 2, in += 4 * kColumns, out += 8 * kColumns) {
    for (int64_t i = 0; i < kColumns; i += W) {
      i32v both;
      memcpy(&both, in + 4 * i, sizeof(both));
      i32v low = both & 0x0f0f0f0f, high = (i32v)((u32v)both >> 4) & 0x0f0f0f0f;
      if constexpr (kPacking == Packing::mxfp4) low = twice(low), high = twice(high);
      memcpy(out + 4 * i, &low, sizeof(low));
      memcpy(out + 4 * kColumns + 4 * i, &high, sizeof(high));
    }
  }
}

// float32 panels of the FmaEngine, one after another: (bytes - offset) * unit * scale for `k` of a stretch of bytes, or
// (bytes - zero) * scale with `zeros`.
using Float = FmaEngine<float>;
void dequantize(const Stretch& s, const uint8_t* bytes, int64_t k, float unit, bool zeros, float* out) {
  for (int64_t i = 0; i < k; ++i) {
    const float* scale = s.scales + i / (4 * s.groups) * s.scale_step;
    const uint8_t* from = bytes + i / 4 * 4 * kColumns;
    for (int64_t j = 0; j < kColumns; j += W) {
      i32v four;
      memcpy(&four, from + 4 * j, sizeof(four));
      const i32v value = (i32v)((u32v)four >> static_cast<int>(8 * (i % 4))) & 255;
      const f32v word = load(scale + j);
      const f32v number = zeros ? (__builtin_convertvector(value, f32v) - zero_of(word)) * scale_of(word)
                                : __builtin_convertvector(value - s.offset, f32v) * (word * unit);
      store(out + j / Float::kCols * k * Float::kCols + i * Float::kCols + j % Float::kCols, number);
    }
  }
}

template <class R>
void finish(const QuantizedArgs& g, const float* c, const float* up, int64_t row, int64_t col) {
  R* out = static_cast<R*>(g.out) + row * g.n + col;
  const int64_t n = least(kColumns, g.n - col);
  for (int64_t i = 0; i < n; i += W) {
    const int count = static_cast<int>(least<int64_t>(W, n - i));
    f32v x = load(c + i);
    if (g.bias) x += load(g.bias + col + i, count);
    x = activate<float>(g.activation, x);
    if (up) x *= load(up + i);
    store(out + i, x, count);
  }
}

constexpr int64_t kSegmentRows = 256;
struct Segment {
  int64_t group, row, rows;
  int64_t a_panel;  // of the first row, where the rows are packed for an engine
};
// Few rows are bound by memory. Blocks of 8-bit floats that begin between an engine's steps are multiplied as those of
// few rows are.
VISHWAMAI_INLINE bool is_few(const QuantizedArgs& g, int64_t rows) { return rows <= 16 || (g.packing == Packing::fp8 && g.block % 32 != 0); }

// What multiplies many rows, stored as S, by a weight of 8-bit floats.
template <class S> using FloatsEngine = std::conditional_t<std::is_same_v<S, bf16>, HalfEngine, FmaEngine<float>>;

// The rows of x in the forms that products want.
template <class S>
struct Prepared {
  Rows quantized;
  const float* wide;  // [rows][wide_row]
  int64_t wide_row;
  const typename FloatsEngine<S>::Element* panels;  // of FloatsEngine, a_panel elements each
  int64_t a_panel;
};

// Rows of one segment times panels [first, last).
template <class S>
void block(const QuantizedArgs& g, const Prepared<S>& x, const Segment& segment, int64_t first_panel, int64_t last_panel) {
  using E = FloatsEngine<S>;
  const Rows& quantized = x.quantized;
  const float* const wide = x.wide;
  const int64_t wide_row = x.wide_row;
  const int64_t weights = g.up.values ? 2 : 1, groups = g.block / 4, end = g.padded_k() / 4;
  const bool floats_of_8 = g.packing == Packing::fp8, dequantized = g.exact && !floats_of_8, few = is_few(g, segment.rows);
  const bool zeros = g.packing == Packing::uint4;
  const bool unpacked = g.bits() == 4 && (g.exact || segment.rows > 2 * kMostRows), engine = floats_of_8 && !few;
  const float unit = g.packing == Packing::mxfp4 ? 0.5f : 1.0f;
  // k at a time: what is in use of a panel stays in the first cache level
  const int64_t together = least<int64_t>(dequantized ? 128 : few ? 1024 : 512, greatest<int64_t>(g.padded_k(), 8)), at_a_time = greatest<int64_t>(1, together / g.block);
  const int64_t stretch_k = least(at_a_time * g.block, g.padded_k()), set = few ? 4 : 1, c_size = segment.rows * kColumns;
  Scratch scratch(Scratch::size<float>(set * weights * c_size) + Scratch::size<uint8_t>(unpacked ? stretch_k * kColumns : 0) +
                  Scratch::size<float>(dequantized || engine ? stretch_k * kColumns : 0) + Scratch::size<typename E::Element>(engine ? E::b_elements(round_up<int64_t>(stretch_k, 64)) : 0));
  float* const c = scratch.take<float>(set * weights * c_size);
  uint8_t* const bytes = scratch.take<uint8_t>(unpacked ? stretch_k * kColumns : 0);
  float* const floats = scratch.take<float>(dequantized || engine ? stretch_k * kColumns : 0);
  auto* const b_panel = scratch.take<typename E::Element>(engine ? E::b_elements(round_up<int64_t>(stretch_k, 64)) : 0);
  [[maybe_unused]] const typename E::Scope scope;
  for (int64_t p0 = first_panel; p0 < last_panel; p0 += set) {
    const int64_t panels = least(set, last_panel - p0);
    memset(c, 0, sizeof(float) * static_cast<size_t>(panels * weights * c_size));
    for (int64_t b = 0; b < g.blocks(); b += at_a_time) {
      const int64_t k0 = b * g.block, kn = least(stretch_k, g.padded_k() - k0);
      for (int64_t i = 0; i < panels * weights; ++i) {
        const QuantizedWeight& w = i % weights ? g.up : g.weight;
        const int64_t panel = p0 + i / weights;
        const uint8_t* const packed = w.values + segment.group * w.values_group + panel * g.panel_bytes() + k0 * kColumns * g.bits() / 8;
        Stretch s{packed, w.scales + segment.group * w.scales_group + panel * g.panel_scales() + (g.column_scales ? 0 : b * kColumns),
                  b, least(b + at_a_time, g.blocks()), groups, end, g.column_scales ? 0 : kColumns, g.packing == Packing::int8 ? 128 : g.packing == Packing::mxfp4 ? kTwiceOffset : 8};
        float* const to = c + i * c_size;
        if (floats_of_8) {
          const auto* const w8 = reinterpret_cast<const f8e4m3*>(packed);
          if (few) {
            multiply_float_rows(wide + segment.row * wide_row, wide_row, static_cast<int>(segment.rows), w8, s.scales, s.scale_step, s.first, s.last, g.block, g.padded_k(), to);
            continue;
          }
          const int64_t numbers = least(kn, g.k - k0), together_k = g.column_scales ? numbers : g.block;
          for (int64_t k = 0; k < numbers; k += together_k) {
            multiply_float_panels<E>(x.panels + segment.a_panel * x.a_panel, x.a_panel, E::a_stride(g.k), k0 + k, segment.rows, w8 + k * kColumns,
                                     s.scales + k / g.block * s.scale_step, least(together_k, numbers - k), floats, b_panel, to);
          }
          continue;
        }
        if (unpacked) {
          if (g.packing == Packing::mxfp4) unpack<Packing::mxfp4>(packed, kn / 4, bytes);
          else unpack<Packing::int4>(packed, kn / 4, bytes);
          s.bytes = bytes;
        }
        if (g.exact) {
          dequantize(s, s.bytes, kn, unit, zeros, floats);
          for (int64_t r = 0; r < segment.rows; r += kPanelRows)
            for (int64_t j = 0; j < kColumns; j += Float::kCols)
              Float::product(wide + (segment.row + r) * wide_row + k0, wide_row, floats + j * kn, kn, static_cast<int>(least<int64_t>(kPanelRows, segment.rows - r)),
                             to + r * kColumns + j, kColumns, true);
          continue;
        }
        for (int64_t r = 0, parts = ceil_div<int64_t>(segment.rows, kMostRows); parts > 0; --parts) {
          const int count = static_cast<int>(ceil_div(segment.rows - r, parts));
          if (zeros && unpacked) multiply_rows<kMostRows, Packing::int8, true>(quantized, segment.row + r, count, s, to + r * kColumns);
          else if (zeros) multiply_rows<kMostRows, Packing::int4, true>(quantized, segment.row + r, count, s, to + r * kColumns);
          else if (g.bits() == 8 || unpacked) multiply_rows<kMostRows, Packing::int8>(quantized, segment.row + r, count, s, to + r * kColumns);
          else if (g.packing == Packing::int4) multiply_rows<kMostRows, Packing::int4>(quantized, segment.row + r, count, s, to + r * kColumns);
          else multiply_rows<kMostRows, Packing::mxfp4>(quantized, segment.row + r, count, s, to + r * kColumns);
          r += count;
        }
      }
    }
    for (int64_t p = 0; p < panels; ++p) {
      for (int64_t r = 0; r < segment.rows; ++r) {
        const float* const of_row = c + p * weights * c_size + r * kColumns;
        const float* const up = weights == 2 ? of_row + c_size : nullptr;
        if (g.result == Storage::bf16) finish<bf16>(g, of_row, up, segment.row + r, (p0 + p) * kColumns);
        else finish<float>(g, of_row, up, segment.row + r, (p0 + p) * kColumns);
      }
    }
  }
}

template <class S>
void run(const QuantizedArgs& g, const Threads& all) {
  Threads threads = all;
  if (g.m * g.n * greatest<int64_t>(1, g.k) < 64 * 64 * 64) threads.count = 1;  // a hand-over costs more than the product
  const int64_t padded = g.padded_k(), blocks = g.blocks();
  const int64_t wide_row = Float::a_stride(padded), most = g.groups + ceil_div(g.m, kSegmentRows);
  const bool floats_of_8 = g.packing == Packing::fp8;
  const float unit = g.packing == Packing::mxfp4 ? 0.5f : 1.0f;
  using E = FloatsEngine<S>;
  const int64_t a_panel = E::a_elements(g.k), a_panels = floats_of_8 ? most + ceil_div<int64_t>(g.m, kPanelRows) : 0;
  Scratch scratch(Scratch::size<Element>(g.exact ? 0 : g.m * padded) + 2 * Scratch::size<float>(g.exact ? 0 : g.m * blocks) +
                  Scratch::size<float>(g.exact ? g.m * wide_row : 0) + Scratch::size<Segment>(most) + Scratch::size<typename E::Element>(a_panels * a_panel));
  Element* const values = scratch.take<Element>(g.exact ? 0 : g.m * padded);
  float* const scales = scratch.take<float>(g.exact ? 0 : g.m * blocks);
  int32_t* const sums = scratch.take<int32_t>(g.exact ? 0 : g.m * blocks);
  float* const wide = scratch.take<float>(g.exact ? g.m * wide_row : 0);
  Segment* const segments = scratch.take<Segment>(most);
  auto* const packed_x = scratch.take<typename E::Element>(a_panels * a_panel);
  int64_t count = 0, row = 0, packed_panels = 0;
  for (int64_t group = 0; group < g.groups; ++group) {
    for (int64_t left = g.sizes ? least<int64_t>(greatest<int64_t>(0, g.sizes[group]), g.m - row) : g.m; left > 0;) {
      const int64_t rows = ceil_div(left, ceil_div(left, kSegmentRows));
      segments[count++] = {group, row, rows, packed_panels};
      row += rows, left -= rows, packed_panels += ceil_div<int64_t>(rows, kPanelRows);
    }
  }
  const int64_t result = g.result == Storage::bf16 ? 2 : 4;
  memset(static_cast<char*>(g.out) + row * g.n * result, 0, static_cast<size_t>((g.m - row) * g.n * result));
  const auto widen = [&](int64_t r) {
    const S* const x = static_cast<const S*>(g.x) + r * g.k;
    for (int64_t j = 0; j < padded; j += W) {
      const int here = static_cast<int>(least<int64_t>(W, g.k - j));
      store(wide + r * wide_row + j, here > 0 ? load(x + j, here) : f32v{}, static_cast<int>(least<int64_t>(W, padded - j)));
    }
  };
  if (floats_of_8) {
    constexpr int64_t kPieces = kSegmentRows / kPanelRows;
    parallel_for(threads, count * kPieces, [&](int64_t i) {
      const Segment& segment = segments[i / kPieces];
      const int64_t first = i % kPieces * kPanelRows, rows = least<int64_t>(kPanelRows, segment.rows - first);
      if (rows <= 0) return;
      if (is_few(g, segment.rows)) {
        for (int64_t r = 0; r < rows; ++r) widen(segment.row + first + r);
        return;
      }
      E::pack_a(static_cast<const S*>(g.x) + (segment.row + first) * g.k, g.k, 1, static_cast<int>(rows), g.k, packed_x + (segment.a_panel + i % kPieces) * a_panel);
    });
  } else {
    parallel_for(threads, ceil_div<int64_t>(row, 8), [&](int64_t i) {
      for (int64_t r = 8 * i; r < least(8 * i + 8, row); ++r) {
        if (g.exact) widen(r);
        else quantize_row(static_cast<const S*>(g.x) + r * g.k, g.k, padded, g.block, unit, values + r * padded, scales + r * blocks, sums + r * blocks);
      }
    });
  }
  // Every thread gets as many panels; a few times over where there is enough of them.
  const int64_t tasks_wanted = ceil_div<int64_t>(4 * threads.count, greatest<int64_t>(1, count));
  const int64_t panels = threads.count == 1 ? g.panels() : round_up<int64_t>(ceil_div(g.panels(), tasks_wanted), 4);
  const int64_t across = ceil_div(g.panels(), greatest<int64_t>(1, panels));
  const Prepared<S> x{{values, scales, sums, padded, blocks}, wide, wide_row, packed_x, a_panel};
  parallel_for(threads, count * across, [&](int64_t i) {
    const int64_t first = i % across * panels;
    block<S>(g, x, segments[i / across], first, least(first + panels, g.panels()));
  }, Share::runs);
}

}  // namespace

void quantized_product(const QuantizedArgs& g, const Threads& threads) {
  if (g.storage == Storage::bf16) run<bf16>(g, threads);
  else run<float>(g, threads);
}

}  // namespace vishwamai::VISHWAMAI_ISA
