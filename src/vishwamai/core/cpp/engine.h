// Small matrix products on packed operands, the step that every product of the library is made of.
//
// An engine computes C[32, kCols] (+)= A[32, k] B[k, kCols] from a packed panel of A (32 rows) and one of B (kCols
// columns).  Packing converts the numbers, pads with zeros and lays them out in the order of use; it takes any strides,
// so transposed operands cost no copy of their own.  The engines:
//   FmaEngine<float>, FmaEngine<double>   vector multiply-add; bfloat16 operands are widened while packing
//   PairEngine                            int8 as pairs of int16 into int32 (vpmaddwd and its like)
//   DotEngine, DotInt8Engine              dot products of AVX-512, in engine_dot.h
//   AmxEngine<parts>, AmxInt8Engine       tiles of AMX, in engine_amx.h
//   ArmDotEngine, ArmMatrixEngine         dot and matrix products of Arm, in engine_arm.h
// HalfEngine and Int8Engine name the one of this instruction set for bfloat16 and int8.
#pragma once

#include "isa.h"
#include "simd.h"

namespace vishwamai::VISHWAMAI_ISA {

constexpr int kPanelRows = 32;

template <class To, class From>
VISHWAMAI_INLINE To convert(From x) {
  if constexpr (std::is_same_v<From, bf16>) return static_cast<To>(bit_cast<float>(static_cast<uint32_t>(x.bits) << 16));
  else return static_cast<To>(x);
}

#if defined(VISHWAMAI_AVX512)
constexpr int kTransposed = 16;  // sides of what `transpose` takes
// Transposes a 16 x 16 matrix of 32-bit elements.
VISHWAMAI_INLINE void transpose16(__m512i r[16]) {
  __m512i t[16];
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 4; ++i) {
    r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88);
    t[4 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88);
    t[8 + i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xdd);
    t[12 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xdd);
  }
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[4 + i], 0x88);
    r[8 + i] = _mm512_shuffle_i32x4(t[i], t[4 + i], 0xdd);
    r[4 + i] = _mm512_shuffle_i32x4(t[8 + i], t[12 + i], 0x88);
    r[12 + i] = _mm512_shuffle_i32x4(t[8 + i], t[12 + i], 0xdd);
  }
}
VISHWAMAI_INLINE void transpose(f32v r[16]) {
  __m512i bits[16];
  for (int i = 0; i < 16; ++i) bits[i] = bit_cast<__m512i>(r[i]);
  transpose16(bits);
  for (int i = 0; i < 16; ++i) r[i] = bit_cast<f32v>(bits[i]);
}
#elif defined(__AVX2__)
constexpr int kTransposed = 8;
VISHWAMAI_INLINE void transpose(f32v r[8]) {
  __m256 t[8];
  for (int i = 0; i < 4; ++i) {
    t[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 2; ++i) {
    r[4 * i] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0x44);
    r[4 * i + 1] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0xee);
    r[4 * i + 2] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0x44);
    r[4 * i + 3] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm256_permute2f128_ps(r[i], r[4 + i], 0x20);
    t[4 + i] = _mm256_permute2f128_ps(r[i], r[4 + i], 0x31);
  }
  for (int i = 0; i < 8; ++i) r[i] = t[i];
}
#else
constexpr int kTransposed = 0;  // the compiler's vectors have no transposition
VISHWAMAI_INLINE void transpose(f32v*) {}
#endif

// out[j * ldo + i] = in[i * ldi + j] for i < rows, j < columns, converted to T.
template <class T, class S>
inline void transpose_into(const S* in, int64_t ldi, int rows, int columns, T* out, int64_t ldo) {
  int j = 0;
  if constexpr (std::is_same_v<T, float> && kTransposed > 0) {
    constexpr int N = greatest(1, kTransposed);
    for (; j + N <= columns; j += N) {
      for (int i = 0; i < rows; i += N) {
        f32v block[N];
        const int count = least(N, rows - i);
        for (int r = 0; r < N; ++r) block[r] = r < count ? load(in + (i + r) * ldi + j) : f32v{};
        transpose(block);
        for (int c = 0; c < N; ++c) store(out + (j + c) * ldo + i, block[c], count);
      }
    }
  }
  for (; j < columns; ++j)
    for (int i = 0; i < rows; ++i) out[j * ldo + i] = convert<T>(in[i * ldi + j]);
}

// Products whose sums stay in vector registers, a few rows of A by all columns of a panel of B at a time. An engine E
// says where step i of the product lies (a_at, b_at; kHalf on, the other half of the columns), how far apart rows of A
// are (row_stride), what is loaded there (broadcast, columns) and how a step is added (multiply_add); and, where the sums
// of a row do not start at zero, where its starts(a, lda) are.
template <class E>
struct InRegisters {
  template <int R, class Element, class T>
  static VISHWAMAI_INLINE void micro(const Element* a, int64_t lda, const Element* b, int64_t steps, T* c, int64_t ldc, bool accumulate, const T* starts) {
    V<T> sum[R][2];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      sum[r][0] = sum[r][1] = V<T>{};
      if constexpr (kStarts<Element>) sum[r][0] = sum[r][1] = splat(starts[r]);
    }
    for (int64_t i = 0; i < steps; ++i) {
      const auto b0 = E::columns(b + E::b_at(i)), b1 = E::columns(b + E::b_at(i) + E::kHalf);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const auto x = E::broadcast(a + r * lda + E::a_at(i));
        sum[r][0] = E::multiply_add(sum[r][0], x, b0);
        sum[r][1] = E::multiply_add(sum[r][1], x, b1);
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      // What was there is added to the sum of these terms: added to it one by one, they would lose their last digits.
      store(c + r * ldc, accumulate ? load(c + r * ldc) + sum[r][0] : sum[r][0]);
      store(c + r * ldc + lanes<T>, accumulate ? load(c + r * ldc + lanes<T>) + sum[r][1] : sum[r][1]);
    }
  }

  // micro<count>, for a count of 1 to R.
  template <int R, class Element, class T>
  static VISHWAMAI_INLINE void micro_rows(int count, const Element* a, int64_t lda, const Element* b, int64_t steps, T* c, int64_t ldc, bool accumulate,
                                          const T* starts) {
    if constexpr (R > 0) {
      if (count == R) return micro<R>(a, lda, b, steps, c, ldc, accumulate, starts);
      micro_rows<R - 1>(count, a, lda, b, steps, c, ldc, accumulate, starts);
    }
  }

  // C[rows, kCols] (+)= A B for the first `rows` rows of the panel.  kPassing is a hint for engines that have its use.
  template <bool kPassing = false, class Element, class T>
  static VISHWAMAI_INLINE void product(const Element* a, int64_t lda, const Element* b, int64_t k, int rows, T* c, int64_t ldc, bool accumulate) {
    if constexpr (kStarts<Element>) multiply(a, lda, b, k, rows, c, ldc, accumulate, E::starts(a, lda));
    else multiply(a, lda, b, k, rows, c, ldc, accumulate);
  }
  template <class Element, class T>
  static void multiply(const Element* a, int64_t lda, const Element* b, int64_t k, int rows, T* c, int64_t ldc, bool accumulate) {
    all_rows(a, lda, b, k, rows, c, ldc, accumulate, static_cast<const T*>(nullptr));
  }
  template <class Element, class T>
  static void multiply(const Element* a, int64_t lda, const Element* b, int64_t k, int rows, T* c, int64_t ldc, bool accumulate, const T* starts) {
    all_rows(a, lda, b, k, rows, c, ldc, accumulate, starts);
  }

 private:
  template <class Element>
  static constexpr bool kStarts = requires(const Element* a) { E::starts(a, 0); };

  template <class Element, class T>
  static VISHWAMAI_INLINE void all_rows(const Element* a, int64_t lda, const Element* b, int64_t k, int rows, T* c, int64_t ldc, bool accumulate, const T* starts) {
    const int64_t steps = E::steps(k), stride = E::row_stride(lda);
    // In equal parts: one row alone would wait for each of its sums, and take as long as four.
    for (int r = 0, parts = ceil_div(rows, E::kMicroRows); parts > 0; --parts) {
      const int count = ceil_div(rows - r, parts);
      micro_rows<E::kMicroRows>(count, a + r * stride, stride, b, steps, c + r * ldc, ldc, accumulate, kStarts<Element> ? starts + r : nullptr);
      r += count;
    }
  }
};

template <class T>
struct FmaEngine : InRegisters<FmaEngine<T>> {
  using Element = T;
  using Acc = T;
  static constexpr int kCols = 2 * lanes<T>;
  static constexpr int kStep = 1;  // k is padded to a multiple of this
#if defined(VISHWAMAI_AVX512)
  static constexpr int kMicroRows = 14;  // 28 sums, 2 vectors of B, 2 to spare
#elif defined(__AVX2__)
  static constexpr int kMicroRows = 6;
#elif defined(__aarch64__)
  static constexpr int kMicroRows = 8;
#else
  static constexpr int kMicroRows = 4;
#endif
  struct Scope {};  // what a thread must hold while it multiplies

  // A panel: row major, the rows `a_stride` apart (an odd number of cache lines, so that the rows do not share a set).
  static constexpr int64_t a_stride(int64_t k) { return round_up<int64_t>(k, 64 / sizeof(T)) | (64 / sizeof(T)); }
  static constexpr int64_t a_elements(int64_t k) { return kPanelRows * a_stride(k); }
  static constexpr int64_t a_offset(int64_t k) { return k; }  // of column k in a panel, k a multiple of 32
  // B panel: [k][kCols]; b_elements(k) is also the offset of row k in a panel.
  static constexpr int64_t b_elements(int64_t k) { return k * kCols; }

  template <class S>
  static void pack_a(const S* in, int64_t row_stride, int64_t k_stride, int rows, int64_t k, T* out) {
    const int64_t ld = a_stride(k);
    if (k_stride == 1) {
      for (int r = 0; r < rows; ++r) {
        int64_t i = 0;
        for (; i + lanes<T> <= k; i += lanes<T>) store(out + r * ld + i, load(in + r * row_stride + i));
        if (i < k) store(out + r * ld + i, load(in + r * row_stride + i, static_cast<int>(k - i)));
      }
    } else if (row_stride == 1) {
      for (int64_t i = 0; i < k; i += 64) {
        transpose_into(in + i * k_stride, k_stride, static_cast<int>(least<int64_t>(64, k - i)), rows, out + i, ld);
      }
    } else {
      for (int r = 0; r < rows; ++r)
        for (int64_t i = 0; i < k; ++i) out[r * ld + i] = convert<T>(in[r * row_stride + i * k_stride]);
    }
    for (int r = rows; r < kPanelRows; ++r) memset(out + r * ld, 0, sizeof(T) * static_cast<size_t>(k));
  }

  // Rows of B beyond `k`, up to `padded`, and columns beyond `cols` become zero.
  template <class S>
  static void pack_b(const S* in, int64_t k_stride, int64_t col_stride, int64_t k, int64_t padded, int cols, T* out) {
    if (col_stride == 1) {
      for (int64_t i = 0; i < k; ++i) {
        const S* row = in + i * k_stride;
        if (cols >= kCols) {
          store(out + i * kCols, load(row));
          store(out + i * kCols + lanes<T>, load(row + lanes<T>));
        } else {
          store(out + i * kCols, load(row, cols));
          store(out + i * kCols + lanes<T>,
                cols > lanes<T> ? load(row + lanes<T>, cols - lanes<T>) : V<T>{});
        }
      }
    } else {
      if (cols < kCols) memset(out, 0, sizeof(T) * static_cast<size_t>(b_elements(k)));
      if (k_stride == 1) {
        for (int64_t i = 0; i < k; i += 64) {
          transpose_into(in + i, col_stride, cols, static_cast<int>(least<int64_t>(64, k - i)), out + i * kCols, kCols);
        }
      } else {
        for (int64_t i = 0; i < k; ++i)
          for (int c = 0; c < cols; ++c) out[i * kCols + c] = convert<T>(in[i * k_stride + c * col_stride]);
      }
    }
    if (padded > k) memset(out + b_elements(k), 0, sizeof(T) * static_cast<size_t>(b_elements(padded - k)));
  }

  // Writes two vectors of row `row` of an A panel, at columns `col` onwards (col a multiple of kCols).
  static VISHWAMAI_INLINE void put(T* panel, int64_t stride, int row, int64_t col, V<T> x, V<T> y) {
    store(panel + row * stride + col, x);
    store(panel + row * stride + col + lanes<T>, y);
  }

  static constexpr int64_t kHalf = lanes<T>;
  static constexpr int64_t row_stride(int64_t lda) { return lda; }
  static constexpr int64_t steps(int64_t k) { return k; }
  static constexpr int64_t a_at(int64_t i) { return i; }
  static constexpr int64_t b_at(int64_t i) { return i * kCols; }
  static VISHWAMAI_INLINE V<T> columns(const T* p) { return load(p); }
  static VISHWAMAI_INLINE V<T> broadcast(const T* p) { return splat(*p); }
  static VISHWAMAI_INLINE V<T> multiply_add(V<T> sum, V<T> a, V<T> b) { return sum + a * b; }
};

// int8 x int8 -> int32.  Pairs along k are widened to int16, so that one instruction multiplies and adds both exactly.
struct PairEngine : InRegisters<PairEngine> {
  using Element = int16_t;
  using Acc = int32_t;
  static constexpr int kCols = 2 * lanes<int32_t>;
  static constexpr int kStep = 2;
#if defined(VISHWAMAI_AVX512)
  static constexpr int kMicroRows = 8;
#else
  static constexpr int kMicroRows = 4;
#endif
  struct Scope {};

  static constexpr int64_t a_stride(int64_t k) { return round_up<int64_t>(k, 32) | 32; }
  static constexpr int64_t a_elements(int64_t k) { return kPanelRows * a_stride(k); }
  static constexpr int64_t b_elements(int64_t k) { return k * kCols; }  // [k / 2][kCols][2]

  static void pack_a(const int8_t* in, int64_t row_stride, int64_t k_stride, int rows, int64_t k, int16_t* out) {
    const int64_t ld = a_stride(k), padded = round_up<int64_t>(k, kStep);
    for (int r = 0; r < kPanelRows; ++r) {
      int16_t* row = out + r * ld;
      if (r >= rows) {
        memset(row, 0, sizeof(int16_t) * static_cast<size_t>(padded));
        continue;
      }
      const int8_t* from = in + r * row_stride;
      if (k_stride == 1) for (int64_t i = 0; i < k; ++i) row[i] = from[i];
      else for (int64_t i = 0; i < k; ++i) row[i] = from[i * k_stride];
      if (padded > k) row[k] = 0;
    }
  }
  static void pack_b(const int8_t* in, int64_t k_stride, int64_t col_stride, int64_t k, int64_t padded, int cols, int16_t* out) {
    if (cols < kCols || padded > k || k % 2) memset(out, 0, sizeof(int16_t) * static_cast<size_t>(b_elements(round_up<int64_t>(padded, 2))));
    for (int64_t i = 0; i < k; ++i) {
      int16_t* row = out + (i / 2) * 2 * kCols + i % 2;
      const int8_t* from = in + i * k_stride;
      if (col_stride == 1) for (int c = 0; c < cols; ++c) row[2 * c] = from[c];
      else for (int c = 0; c < cols; ++c) row[2 * c] = from[c * col_stride];
    }
  }

  static constexpr int64_t kHalf = kCols;
  static constexpr int64_t row_stride(int64_t lda) { return lda; }
  static constexpr int64_t steps(int64_t k) { return ceil_div<int64_t>(k, 2); }
  static constexpr int64_t a_at(int64_t i) { return 2 * i; }
  static constexpr int64_t b_at(int64_t i) { return 2 * i * kCols; }
  static VISHWAMAI_INLINE i32v columns(const int16_t* p) {
    i32v pairs;
    memcpy(&pairs, p, sizeof(pairs));
    return pairs;
  }
  static VISHWAMAI_INLINE i32v broadcast(const int16_t* p) {
    int32_t pair;
    memcpy(&pair, p, sizeof(pair));
    return splat(pair);
  }
  static VISHWAMAI_INLINE i32v multiply_add(i32v sum, i32v a, i32v b) {  // a, b: pairs of int16
#if defined(VISHWAMAI_AVX512)
    return sum + (i32v)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
    return sum + (i32v)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__x86_64__)
    return sum + (i32v)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
    const i32v low = ((a << 16) >> 16) * ((b << 16) >> 16);
    return sum + low + (a >> 16) * (b >> 16);
#endif
  }
};

}  // namespace vishwamai::VISHWAMAI_ISA

#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)
#include "engine_tiles.h"
#if defined(__AMX_BF16__)
#include "engine_amx.h"
#else
#define VISHWAMAI_DOT 1
#include "engine_dot.h"
#endif
#elif defined(VISHWAMAI_NEON_DOT)
#include "engine_arm.h"
#endif

namespace vishwamai::VISHWAMAI_ISA {

#if defined(__AMX_BF16__)
using HalfEngine = AmxEngine<1>;
using Int8Engine = AmxInt8Engine;
#elif defined(VISHWAMAI_DOT)
using HalfEngine = DotEngine;
using Int8Engine = DotInt8Engine;
#elif defined(VISHWAMAI_NEON_BF16)
using HalfEngine = ArmMatrixEngine<uint16_t>;
using Int8Engine = ArmMatrixEngine<int8_t>;
#elif defined(VISHWAMAI_NEON_DOT)
using HalfEngine = FmaEngine<float>;
using Int8Engine = ArmDotEngine<int8_t>;
#else
using HalfEngine = FmaEngine<float>;
using Int8Engine = PairEngine;
#endif

// Compiled once for an instruction set, in engine.isa.cc: a copy for every number of rows takes the compiler long.
#define VISHWAMAI_IN_REGISTERS(keyword, Engine) \
  keyword template void InRegisters<Engine>::multiply(const Engine::Element*, int64_t, const Engine::Element*, int64_t, int, Engine::Acc*, int64_t, bool);
VISHWAMAI_IN_REGISTERS(extern, FmaEngine<float>)
#if !defined(VISHWAMAI_BASE)  // whose float64 it is
VISHWAMAI_IN_REGISTERS(extern, FmaEngine<double>)
#endif
#if defined(VISHWAMAI_DOT)
VISHWAMAI_IN_REGISTERS(extern, DotEngine)
#elif defined(VISHWAMAI_NEON_BF16)
extern template struct ArmMatrixEngine<uint16_t>;
#endif

}  // namespace vishwamai::VISHWAMAI_ISA
