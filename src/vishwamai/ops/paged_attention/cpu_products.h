// The two products of attention on keys and values that lie scattered: every row has its own address.
#pragma once

#include "vishwamai/core/cpp/engine.h"
#include "vishwamai/core/cpp/rows.h"

namespace vishwamai::VISHWAMAI_ISA {

constexpr int kBlock = 64;  // keys at a time: their scores stay in the first cache level
#if defined(VISHWAMAI_AVX512) || defined(__aarch64__)
constexpr int kSums = 16;  // of the vector registers, what sums may take
constexpr int kMostRows = 8;
#else
constexpr int kSums = 8;
constexpr int kMostRows = 4;
#endif

// What the next block of keys will read, so that it is on its way while this one is computed: token by token, all heads of
// one after another.  A miss at a time is too slow, and the processor fetches ahead by itself only what is read in order.
struct Ahead {
  const char* const* keys;  // addresses of the tokens' rows
  const char* const* values;
  int64_t count, heads;
  int64_t key_stride, key_bytes, value_stride, value_bytes;  // between heads, and of one
  int64_t at = 0;

  // One head's key or value of the next token that has not been asked for: both products call this, once a key, so that
  // memory is never idle.
  VISHWAMAI_INLINE void fetch() {
    const int64_t pair = at / 2, token = pair / heads, head = pair % heads;
    if (token >= count) return;
    const bool value = at++ % 2;
    const char* p = value ? values[token] + head * value_stride : keys[token] + head * key_stride;
    for (const char* end = p + (value ? value_bytes : key_bytes); p < end; p += 64) __builtin_prefetch(p, 0, 2);
  }
};

// products[g * kBlock + j] = query row g . key j, for kRows rows and n keys; query rows are padded to whole vectors.
template <class S, int kRows, class T = compute_t<S>>
VISHWAMAI_INLINE void score_rows(const S* const* keys, int64_t offset, int64_t dim, int n, const T* query, int64_t query_stride,
                                 T* products, bool fetching, Ahead& ahead) {
  constexpr int W = lanes<T>;
  const int64_t whole = dim / W * W;
  const int rest = static_cast<int>(dim - whole);
  alignas(64) T partial[kRows][W][W];
  for (int j0 = 0; j0 < n; j0 += W) {
    const int count = least(W, n - j0);
    for (int j = 0; j < count; ++j) {
      const S* key = keys[j0 + j] + offset;
      if (fetching) ahead.fetch();
      V<T> sum[kRows] = {};
      for (int64_t d = 0; d < whole; d += W) {
        const V<T> x = load(key + d);
#pragma GCC unroll 8
        for (int g = 0; g < kRows; ++g) sum[g] += x * load(query + g * query_stride + d);
      }
      if (rest) {
        const V<T> x = load(key + whole, rest);
#pragma GCC unroll 8
        for (int g = 0; g < kRows; ++g) sum[g] += x * load(query + g * query_stride + whole);
      }
#pragma GCC unroll 8
      for (int g = 0; g < kRows; ++g) store(partial[g][j], sum[g]);
    }
    for (int g = 0; g < kRows; ++g) {
#ifdef VISHWAMAI_AVX512
      if constexpr (std::is_same_v<T, float>) {
        __m512i rows[16];
        for (int j = 0; j < 16; ++j) rows[j] = j < count ? bit_cast<__m512i>(load(partial[g][j])) : _mm512_setzero_si512();
        transpose16(rows);
        f32v x = {}, y = {};
        for (int j = 0; j < 16; j += 2) {
          x += bit_cast<f32v>(rows[j]);
          y += bit_cast<f32v>(rows[j + 1]);
        }
        store(products + g * kBlock + j0, x + y);
        continue;
      }
#endif
      for (int j = 0; j < count; ++j) products[g * kBlock + j0 + j] = sum_lanes<T>(load(partial[g][j]));
    }
  }
}

// out[g] += sum over j of p[g * kBlock + j] * value j, for kChunks vectors of the values' columns from `offset` on.
template <class S, int kRows, int kChunks, class C, class T = compute_t<S>>
VISHWAMAI_INLINE void add_columns(const S* const* values, int64_t offset, int n, const T* p, T* out, int64_t out_stride, C count,
                                  bool fetching, Ahead& ahead) {
  constexpr int W = lanes<T>;
  V<T> sum[kRows][kChunks] = {};  // of this block alone: added to a long sum one by one, terms would lose their last digits
  for (int j = 0; j < n; ++j) {
    const S* value = values[j] + offset;
    if (fetching) ahead.fetch();
#pragma GCC unroll 16
    for (int c = 0; c < kChunks; ++c) {
      const V<T> x = get(value + c * W, count);
#pragma GCC unroll 8
      for (int g = 0; g < kRows; ++g) sum[g][c] += x * p[g * kBlock + j];
    }
  }
#pragma GCC unroll 8
  for (int g = 0; g < kRows; ++g)
#pragma GCC unroll 16
    for (int c = 0; c < kChunks; ++c) store(out + g * out_stride + c * W, load(out + g * out_stride + c * W) + sum[g][c]);
}

// The same for all columns: rows of the output are padded to whole vectors.
template <class S, int kRows, class T = compute_t<S>>
VISHWAMAI_INLINE void add_values(const S* const* values, int64_t offset, int64_t dim, int n, const T* p, T* out, int64_t out_stride,
                                 bool fetching, Ahead& ahead) {
  constexpr int W = lanes<T>, kChunks = kSums / kRows;
  constexpr std::integral_constant<int, W> whole;
  int64_t d = 0;
  for (; d + kChunks * W <= dim; d += kChunks * W) add_columns<S, kRows, kChunks>(values, offset + d, n, p, out + d, out_stride, whole, fetching && d == 0, ahead);
  for (; d + W <= dim; d += W) add_columns<S, kRows, 1>(values, offset + d, n, p, out + d, out_stride, whole, fetching && d == 0, ahead);
  if (d < dim) add_columns<S, kRows, 1>(values, offset + d, n, p, out + d, out_stride, static_cast<int>(dim - d), fetching && d == 0, ahead);
}

// Calls f(row, integral constant R) for groups of R = kMostRows, 4, 2 or 1 rows that make up `rows`.
template <class F>
VISHWAMAI_INLINE void by_rows(int64_t rows, F&& f) {
  int64_t r = 0;
  if constexpr (kMostRows > 4) {
    for (; r + kMostRows <= rows; r += kMostRows) f(r, std::integral_constant<int, kMostRows>());
  }
  for (; r + 4 <= rows; r += 4) f(r, std::integral_constant<int, 4>());
  for (; r + 2 <= rows; r += 2) f(r, std::integral_constant<int, 2>());
  for (; r < rows; ++r) f(r, std::integral_constant<int, 1>());
}

}  // namespace vishwamai::VISHWAMAI_ISA
