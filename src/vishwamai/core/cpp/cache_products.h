// The two products of attention with keys and values that lie in a cache: every row has its own address and is read
// once.
//
// A few query rows meet a block of 64 keys at a time: scores = Q K^T, and out += P V. What takes the time is reading
// the cache, so the arithmetic must be cheap and the next rows on their way while these are computed (Ahead). With AMX,
// bfloat16 rows are loaded as tiles, as they lie (cache_tiles.h). Everything else is multiplied and added in vectors.
#pragma once

#include "engine.h"
#include "parallel.h"
#include "rows.h"

namespace vishwamai::VISHWAMAI_ISA {

constexpr int kBlock = 64;  // keys at a time: their scores stay in the first cache level

template <class S> constexpr int64_t bytes_of(int64_t numbers) { return numbers * static_cast<int64_t>(sizeof(S)) / kNumbers<S>; }

// The rows of one head of a block; `settle` says which of them lie evenly apart, 16 at a time.
template <class S>
struct BlockRows {
  const S* at[kBlock];
  int64_t step[kBlock / 16];  // elements from a row to the next, or 0 where 16 rows do not lie so

  void settle(int n) {
    for (int g = 0; g < kBlock / 16; ++g) {
      step[g] = 0;
      if (16 * g + 16 > n) continue;
      const S* const* row = at + 16 * g;
      const int64_t apart = row[1] - row[0];
      bool even = true;
      for (int j = 2; j < 16; ++j) even &= row[j] - row[j - 1] == apart;
      if (even) step[g] = apart;
    }
  }
};

// The rows of keys and values to be read next, which the products ask for a few lines at a time while they work on
// these: a line of keys and one of values in turns.
class Ahead {
 public:
  Ahead() = default;
  // Of n rows, from the offsets on (units of S).
  template <class S>
  Ahead(const BlockRows<S>& keys, int64_t key_offset, int64_t dim, const BlockRows<S>& values, int64_t value_offset, int64_t value_dim, int n)
      : rows_{reinterpret_cast<const char* const*>(keys.at), reinterpret_cast<const char* const*>(values.at)},
        offset_{key_offset * kSize<S>, value_offset * kSize<S>},
        bytes_{bytes_of<S>(dim), bytes_of<S>(value_dim)},
        count_(n) {}

  // Asks for the next `lines` cache lines, rounded to whole rows over the calls.
  VISHWAMAI_INLINE void fetch(int lines) {
    if (row_ >= count_) return;
    for (owed_ += lines; owed_ > 0 && row_ < count_; ++row_) {
      const char *key = rows_[0][row_] + offset_[0], *value = rows_[1][row_] + offset_[1];
      const int64_t both = least(bytes_[0], bytes_[1]), most = greatest(bytes_[0], bytes_[1]);
      int64_t at = 0;
      for (; at < both; at += 64, owed_ -= 2) {
        __builtin_prefetch(key + at, 0, 2);
        __builtin_prefetch(value + at, 0, 2);
      }
      for (const char* longer = bytes_[0] > bytes_[1] ? key : value; at < most; at += 64, --owed_) __builtin_prefetch(longer + at, 0, 2);
    }
  }

 private:
  template <class S> static constexpr int64_t kSize = sizeof(S);
  const char* const* rows_[2] = {};
  int64_t offset_[2] = {}, bytes_[2] = {};
  int count_ = 0, row_ = 0, owed_ = 0;
};

#if defined(VISHWAMAI_AVX512) || defined(__aarch64__)
constexpr int kSums = 16;  // of the vector registers, what sums may take
constexpr int kMostRows = 8;
#else
constexpr int kSums = 8;
constexpr int kMostRows = 4;
#endif

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

// sums[j] = the sum of the vector from[j], for `count` vectors; with AVX-512 a whole vector of sums is written.
template <class T>
void sum_rows(const T (*from)[lanes<T>], int count, T* sums) {
#ifdef VISHWAMAI_AVX512
  if constexpr (std::is_same_v<T, float>) {
    __m512i rows[16];
    for (int j = 0; j < 16; ++j) rows[j] = j < count ? bit_cast<__m512i>(load(from[j])) : _mm512_setzero_si512();
    transpose16(rows);
    f32v x = {}, y = {};
    for (int j = 0; j < 16; j += 2) {
      x += bit_cast<f32v>(rows[j]);
      y += bit_cast<f32v>(rows[j + 1]);
    }
    return store(sums, x + y);
  }
#endif
  for (int j = 0; j < count; ++j) sums[j] = sum_lanes<T>(load(from[j]));
}

template <class S>
struct VectorProducts {
  static constexpr bool kTiles = false;
  using T = compute_t<S>;
  using Query = T;  // rows padded to whole vectors
  struct Scope {};  // what a thread must hold while it multiplies
  static constexpr int W = lanes<T>;

  const int64_t dim, value_dim, rows;
  const int64_t q_stride = round_up<int64_t>(dim, W);

  VectorProducts(int64_t dim, int64_t value_dim, int64_t rows, bool) : dim(dim), value_dim(value_dim), rows(rows) {}
  int64_t query_elements() const { return rows * q_stride; }
  size_t scratch_bytes() const { return 0; }
  void take(Scratch&) {}

  template <class Q>
  void load_query(const Q* q, int64_t row, Query* query) const {
    for (int64_t d = 0; d < dim; d += W) store(query + row * q_stride + d, load(q + d, static_cast<int>(least<int64_t>(W, dim - d))));
  }
  void finish_query(Query*) const {}

  // products[r * kBlock + j] = query row r . key j, for n keys.
  __attribute__((noinline)) void scores(const BlockRows<S>& keys, int64_t offset, int n, const Query* query, T* products, Ahead& ahead) const {
    const int lines = static_cast<int>(ceil_div<int64_t>(bytes_of<S>(dim), 64));
    by_rows(rows, [&](int64_t r, auto count) {
      score_rows<count>(keys, offset, n, query + r * q_stride, products + r * kBlock, r == 0 ? lines : 0, ahead);
    });
  }
  // out[r * out_stride + d] += sum over j of p[r * kBlock + j] * value j; rows of `out` are padded to whole vectors.
  __attribute__((noinline)) void add(const BlockRows<S>& values, int64_t offset, int n, const T* p, T* out, int64_t out_stride, Ahead& ahead) const {
    const int lines = static_cast<int>(ceil_div<int64_t>(bytes_of<S>(value_dim), 64));
    by_rows(rows, [&](int64_t r, auto count) {
      add_values<count>(values, offset, n, p + r * kBlock, out + r * out_stride, out_stride, r == 0 ? lines : 0, ahead);
    });
  }

 private:
  template <int kRows>
  VISHWAMAI_INLINE void score_rows(const BlockRows<S>& keys, int64_t offset, int n, const T* query, T* products, int lines, Ahead& ahead) const {
    const int64_t whole = dim / W * W;
    const int rest = static_cast<int>(dim - whole);
    alignas(64) T partial[kRows][W][W];
    for (int j0 = 0; j0 < n; j0 += W) {
      const int count = least(W, n - j0);
      for (int j = 0; j < count; ++j) {
        const S* key = keys.at[j0 + j] + offset;
        ahead.fetch(lines);
        V<T> sum[kRows] = {};
        for (int64_t d = 0; d < whole; d += W) {
          const V<T> x = load(at(key, d));
#pragma GCC unroll 8
          for (int g = 0; g < kRows; ++g) sum[g] += x * load(query + g * q_stride + d);
        }
        if (rest) {
          const V<T> x = load(at(key, whole), rest);
#pragma GCC unroll 8
          for (int g = 0; g < kRows; ++g) sum[g] += x * load(query + g * q_stride + whole);
        }
#pragma GCC unroll 8
        for (int g = 0; g < kRows; ++g) store(partial[g][j], sum[g]);
      }
      for (int g = 0; g < kRows; ++g) sum_rows(partial[g], count, products + g * kBlock + j0);
    }
  }

  // kChunks vectors of the values' columns from `offset` on.
  template <int kRows, int kChunks, class C>
  VISHWAMAI_INLINE void add_columns(const BlockRows<S>& values, int64_t offset, int n, const T* p, T* out, int64_t out_stride, C count, int lines,
                                    Ahead& ahead) const {
    // of this block alone: added to a long sum one by one, terms would lose their last digits
    V<T> sum[kRows][kChunks] = {};
    for (int j = 0; j < n; ++j) {
      const S* value = values.at[j] + offset;
      ahead.fetch(lines);
#pragma GCC unroll 16
      for (int c = 0; c < kChunks; ++c) {
        const V<T> x = get(at(value, c * W), count);
#pragma GCC unroll 8
        for (int g = 0; g < kRows; ++g) sum[g][c] += x * p[g * kBlock + j];
      }
    }
#pragma GCC unroll 8
    for (int g = 0; g < kRows; ++g)
#pragma GCC unroll 16
      for (int c = 0; c < kChunks; ++c) store(out + g * out_stride + c * W, load(out + g * out_stride + c * W) + sum[g][c]);
  }
  template <int kRows>
  VISHWAMAI_INLINE void add_values(const BlockRows<S>& values, int64_t offset, int n, const T* p, T* out, int64_t out_stride, int lines,
                                   Ahead& ahead) const {
    constexpr int kChunks = least(64 / W, kSums / kRows);  // no more columns than the least head has
    constexpr std::integral_constant<int, W> whole;
    int64_t d = 0;
    auto columns = [&](auto chunks, auto count) __attribute__((always_inline)) {
      add_columns<kRows, chunks>(values, offset + d / kNumbers<S>, n, p, out + d, out_stride, count, d == 0 ? lines : 0, ahead);
    };
    for (; d + kChunks * W <= value_dim; d += kChunks * W) columns(std::integral_constant<int, kChunks>(), whole);
    for (; d < value_dim; d += W) columns(std::integral_constant<int, 1>(), static_cast<int>(least<int64_t>(W, value_dim - d)));
  }
};

// Compiled once for an instruction set, in cache_products.isa.cc.
#if defined(__AMX_BF16__)
#define VISHWAMAI_VECTOR_PRODUCTS(keyword)
#elif defined(VISHWAMAI_BASE)  // whose the others are
#define VISHWAMAI_VECTOR_PRODUCTS(keyword) keyword template struct VectorProducts<bf16>;
#else
#define VISHWAMAI_NARROW_PRODUCTS(keyword)       \
  keyword template struct VectorProducts<bf16>;   \
  keyword template struct VectorProducts<float>;  \
  keyword template struct VectorProducts<f16>;    \
  keyword template struct VectorProducts<int8_t>; \
  keyword template struct VectorProducts<s4x2>;   \
  keyword template struct VectorProducts<f8e4m3>; \
  keyword template struct VectorProducts<f8e5m2>;
#if defined(VISHWAMAI_AVX512)  // float64 is AVX2's
#define VISHWAMAI_VECTOR_PRODUCTS VISHWAMAI_NARROW_PRODUCTS
#else
#define VISHWAMAI_VECTOR_PRODUCTS(keyword) VISHWAMAI_NARROW_PRODUCTS(keyword) keyword template struct VectorProducts<double>;
#endif
#endif
VISHWAMAI_VECTOR_PRODUCTS(extern)

}  // namespace vishwamai::VISHWAMAI_ISA

#if defined(__AMX_BF16__)
#include "cache_tiles.h"
#endif

namespace vishwamai::VISHWAMAI_ISA {

#if defined(__AMX_BF16__)
template <class S>
using CacheProducts = std::conditional_t<std::is_same_v<S, bf16>, TileProducts, VectorProducts<S>>;
#else
template <class S>
using CacheProducts = VectorProducts<S>;
#endif

}  // namespace vishwamai::VISHWAMAI_ISA
