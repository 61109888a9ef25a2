// The two products of attention with keys and values that lie in a cache: every row has its own address and is read once.
//
// A few query rows meet a block of 64 keys at a time: scores = Q K^T, and out += P V.  What takes the time is reading the
// cache, so the arithmetic must be cheap and the next rows on their way while these are computed (Ahead).  With AMX, bfloat16
// rows are loaded as tiles, as they lie.  Everything else is multiplied and added in vectors.
#pragma once

#include "engine.h"
#include "rows.h"

namespace vishwamai::VISHWAMAI_ISA {

constexpr int kBlock = 64;  // keys at a time: their scores stay in the first cache level

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

// The rows of keys and values to be read next, which the products ask for a few lines at a time while they work on these:
// a line of keys and one of values in turns.
class Ahead {
 public:
  Ahead() = default;
  // Of n rows, from the offsets on (elements).
  template <class S>
  Ahead(const BlockRows<S>& keys, int64_t key_offset, int64_t dim, const BlockRows<S>& values, int64_t value_offset, int64_t value_dim, int n)
      : rows_{reinterpret_cast<const char* const*>(keys.at), reinterpret_cast<const char* const*>(values.at)},
        offset_{key_offset * kSize<S>, value_offset * kSize<S>},
        bytes_{dim * kSize<S>, value_dim * kSize<S>},
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

// ---- vectors ----------------------------------------------------------------------------------------------------
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
  void scores(const BlockRows<S>& keys, int64_t offset, int n, const Query* query, T* products, Ahead& ahead) const {
    const int lines = static_cast<int>(ceil_div<int64_t>(dim * static_cast<int64_t>(sizeof(S)), 64));
    by_rows(rows, [&](int64_t r, auto count) {
      score_rows<count>(keys, offset, n, query + r * q_stride, products + r * kBlock, r == 0 ? lines : 0, ahead);
    });
  }
  // out[r * out_stride + d] += sum over j of p[r * kBlock + j] * value j; rows of `out` are padded to whole vectors.
  void add(const BlockRows<S>& values, int64_t offset, int n, const T* p, T* out, int64_t out_stride, Ahead& ahead) const {
    const int lines = static_cast<int>(ceil_div<int64_t>(value_dim * static_cast<int64_t>(sizeof(S)), 64));
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
          const V<T> x = load(key + d);
#pragma GCC unroll 8
          for (int g = 0; g < kRows; ++g) sum[g] += x * load(query + g * q_stride + d);
        }
        if (rest) {
          const V<T> x = load(key + whole, rest);
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
    V<T> sum[kRows][kChunks] = {};  // of this block alone: added to a long sum one by one, terms would lose their last digits
    for (int j = 0; j < n; ++j) {
      const S* value = values.at[j] + offset;
      ahead.fetch(lines);
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
  template <int kRows>
  VISHWAMAI_INLINE void add_values(const BlockRows<S>& values, int64_t offset, int n, const T* p, T* out, int64_t out_stride, int lines,
                                   Ahead& ahead) const {
    constexpr int kChunks = least(64 / W, kSums / kRows);  // no more columns than the least head has
    constexpr std::integral_constant<int, W> whole;
    int64_t d = 0;
    auto columns = [&](auto chunks, auto count) __attribute__((always_inline)) {
      add_columns<kRows, chunks>(values, offset + d, n, p, out + d, out_stride, count, d == 0 ? lines : 0, ahead);
    };
    for (; d + kChunks * W <= value_dim; d += kChunks * W) columns(std::integral_constant<int, kChunks>(), whole);
    for (; d + W <= value_dim; d += W) columns(std::integral_constant<int, 1>(), whole);
    if (d < value_dim) columns(std::integral_constant<int, 1>(), static_cast<int>(value_dim - d));
  }
};

// ---- tiles ------------------------------------------------------------------------------------------------------
#if defined(__AMX_BF16__)
// One tile product; register numbers are literals, as the assembler wants them.
#define VISHWAMAI_KEYS(g, into)                                                          \
  _tile_loadd(into, static_cast<const uint16_t*>(tiles[g]) + 32 * i, stride[g]);         \
  _tile_dpbf16ps(g, into, 6);                                                            \
  ahead.fetch(kFetch);
#define VISHWAMAI_VALUES(c, into)                \
  _tile_loadd(into, from + 32 * (c), stride[g]); \
  _tile_dpbf16ps(c, 4, into);                    \
  ahead.fetch(kFetch);

// Scores: C[16 keys, 16 query rows] += A[16 keys, 32 features] B[32 features, 16 query rows].
//
// Output: C[16 rows, 16 pairs of features] += A[16 rows, 16 keys] B[16 keys, 32 features].  A right operand holds pairs (2k, 2k + 1)
// of its rows in a dword, and a row of values holds pairs of features there.  So the features take the place of the second of
// the pair: with p in the lower half of A's dwords and 0 in the upper one, C gets the even features, with p in the upper half
// the odd ones.  Eight query rows in both forms make up the 16 rows of A, and values need no copy in another order.
//
// Queries and probabilities that bfloat16 cannot hold take three parts each, x = x0 + x1 + x2 (engine_amx.h).
class TileProducts {
 public:
  static constexpr bool kTiles = true;
  using S = bf16;
  using T = float;
  using Query = uint16_t;  // tiles of pairs of features, [16 rows][32 features][part]
  using Scope = AmxScope;

  TileProducts(int64_t dim, int64_t value_dim, int64_t rows, bool exact) : dim_(dim), value_dim_(value_dim), rows_(rows), parts_(exact ? 1 : 3) {}
  int64_t query_elements() const { return panels_ * chunks_ * parts_ * kTile; }
  size_t scratch_bytes() const {
    return Scratch::size<uint16_t>(kBlock * 32 * greatest(chunks_, value_chunks_)) + Scratch::size<uint16_t>(kGroups * parts_ * kTile) +
           Scratch::size<float>(kBlock * 16);
  }
  void take(Scratch& scratch) {
    copies_ = scratch.take<uint16_t>(kBlock * 32 * greatest(chunks_, value_chunks_));
    p_tiles_ = scratch.take<uint16_t>(kGroups * parts_ * kTile);
    sums_ = scratch.take<float>(kBlock * 16);
  }

  // The row's features as they stand in a left operand; finish_query turns the panels into right operands.
  template <class Q>
  void load_query(const Q* q, int64_t row, Query* query) const {
    Query* to = query + row / 16 * chunks_ * parts_ * kTile + row % 16 * 32;
    for (int64_t i = 0; i < chunks_; ++i, to += parts_ * kTile) {
      const int count = static_cast<int>(least<int64_t>(32, dim_ - 32 * i));
      __m512i part[3];
      split(load(q + 32 * i, count), load(q + 32 * i + 16, count - 16), part);
      for (int p = 0; p < parts_; ++p) _mm512_store_si512(to + p * kTile, part[p]);
    }
  }
  void finish_query(Query* query) const {
    for (int64_t t = 0; t < panels_ * chunks_ * parts_; ++t) {
      __m512i block[16];
      for (int r = 0; r < 16; ++r) {
        const bool there = t / (chunks_ * parts_) * 16 + r < rows_;
        block[r] = there ? _mm512_load_si512(query + t * kTile + r * 32) : _mm512_setzero_si512();
      }
      transpose16(block);
      for (int r = 0; r < 16; ++r) _mm512_store_si512(query + t * kTile + r * 32, block[r]);
    }
  }

  // products[r * kBlock + j] = query row r . key j, for n keys.
  void scores(const BlockRows<S>& keys, int64_t offset, int n, const Query* query, float* products, Ahead& ahead) const {
    const void* tiles[kGroups];
    int64_t stride[kGroups];
    arrange(keys, offset, n, dim_, tiles, stride);
    const int groups = ceil_div(n, 16);
    for (int64_t panel = 0; panel < panels_; ++panel) {
      const Query* b = query + panel * chunks_ * parts_ * kTile;
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      for (int64_t i = 0; i < chunks_; ++i) {
        for (int part = 0; part < parts_; ++part, b += kTile) {
          _tile_loadd(6, b, 64);
          VISHWAMAI_KEYS(0, 4)
          if (groups > 1) { VISHWAMAI_KEYS(1, 5) }
          if (groups > 2) { VISHWAMAI_KEYS(2, 4) }
          if (groups > 3) { VISHWAMAI_KEYS(3, 5) }
        }
      }
      _tile_stored(0, sums_, 64);
      _tile_stored(1, sums_ + 256, 64);
      _tile_stored(2, sums_ + 512, 64);
      _tile_stored(3, sums_ + 768, 64);
      const int count = static_cast<int>(least<int64_t>(16, rows_ - 16 * panel));
      for (int g = 0; g < groups; ++g) transpose(sums_ + g * 256, count, products + 16 * panel * kBlock + 16 * g);
    }
  }

  // out[r * out_stride + d] += sum over j of p[r * kBlock + j] * value j; rows of `out` are padded to whole vectors.
  void add(const BlockRows<S>& values, int64_t offset, int n, const float* p, float* out, int64_t out_stride, Ahead& ahead) const {
    const void* tiles[kGroups];
    int64_t stride[kGroups];
    arrange(values, offset, n, value_dim_, tiles, stride);
    const int groups = ceil_div(n, 16);
    for (int64_t r0 = 0; r0 < rows_; r0 += 8) {
      const int count = static_cast<int>(least<int64_t>(8, rows_ - r0));
      for (int r = 0; r < count; ++r) {
        for (int g = 0; g < groups; g += 2) {
          const float* row = p + (r0 + r) * kBlock + 16 * g;
          __m512i part[3];
          split(load(row), load(row + 16), part);
          for (int i = 0; i < parts_; ++i) {
            uint16_t* to = p_tiles_ + (g * parts_ + i) * kTile + r * 32;
            put_pairs(_mm512_castsi512_si256(part[i]), to);
            put_pairs(_mm512_extracti64x4_epi64(part[i], 1), to + parts_ * kTile);
          }
        }
      }
      for (int64_t d = 0; d < value_chunks_; d += 4) {
        const int chunks = static_cast<int>(least<int64_t>(4, value_chunks_ - d));
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        const uint16_t* a = p_tiles_;
        for (int g = 0; g < groups; ++g) {
          const uint16_t* from = static_cast<const uint16_t*>(tiles[g]) + 32 * d;
          for (int part = 0; part < parts_; ++part, a += kTile) {
            _tile_loadd(4, a, 64);
            VISHWAMAI_VALUES(0, 5)
            if (chunks > 1) { VISHWAMAI_VALUES(1, 6) }
            if (chunks > 2) { VISHWAMAI_VALUES(2, 5) }
            if (chunks > 3) { VISHWAMAI_VALUES(3, 6) }
          }
        }
        _tile_stored(0, sums_, 64);
        _tile_stored(1, sums_ + 256, 64);
        _tile_stored(2, sums_ + 512, 64);
        _tile_stored(3, sums_ + 768, 64);
        for (int i = 0; i < chunks; ++i)
          for (int r = 0; r < count; ++r) {
            const __m512i evens_first = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
            const __m512 even = load(sums_ + i * 256 + r * 16), odd = load(sums_ + i * 256 + (r + 8) * 16);
            const int64_t column = 32 * (d + i);
            float* to = out + (r0 + r) * out_stride + column;
            store(to, load(to) + _mm512_permutex2var_ps(even, evens_first, odd));
            if (column + 16 >= value_dim_) continue;
            store(to + 16, load(to + 16) + _mm512_permutex2var_ps(even, _mm512_add_epi32(evens_first, _mm512_set1_epi32(8)), odd));
          }
      }
    }
  }

 private:
  static constexpr int kTile = 512;  // elements
  static constexpr int kGroups = kBlock / 16;
  static constexpr int kFetch = 16;  // a tile's lines
  const int64_t dim_, value_dim_, rows_;
  const int parts_;
  const int64_t chunks_ = ceil_div<int64_t>(dim_, 32), value_chunks_ = ceil_div<int64_t>(value_dim_, 32), panels_ = ceil_div<int64_t>(rows_, 16);
  uint16_t *copies_ = nullptr, *p_tiles_ = nullptr;
  float* sums_ = nullptr;

  // Where tiles of 16 rows begin, and the bytes between their rows: in the cache itself, or in a copy where rows do not lie
  // evenly or are not whole chunks.  Rows of a copy beyond n are zero: what nobody has written may be NaN.
  void arrange(const BlockRows<S>& rows, int64_t offset, int n, int64_t dim, const void** tiles, int64_t* stride) const {
    const int64_t width = round_up<int64_t>(dim, 32);
    for (int g = 0; 16 * g < n; ++g) {
      if (rows.step[g] != 0 && dim == width) {
        tiles[g] = rows.at[16 * g] + offset;
        stride[g] = rows.step[g] * 2;
        continue;
      }
      uint16_t* to = copies_ + 16 * g * width;
      tiles[g] = to;
      stride[g] = width * 2;
      for (int j = 16 * g; j < 16 * g + 16; ++j, to += width) {
        if (j >= n) {
          memset(to, 0, static_cast<size_t>(width) * 2);
          continue;
        }
        const S* row = rows.at[j] + offset;
        for (int64_t d = 0; d < dim; d += 32) {
          const __mmask32 there = dim - d >= 32 ? ~0u : (1u << (dim - d)) - 1;
          _mm512_store_si512(to + d, _mm512_maskz_loadu_epi16(there, row + d));
        }
      }
    }
  }
  // [16 keys, 16 rows] to the first `count` rows of [rows, kBlock].
  static VISHWAMAI_INLINE void transpose(const float* from, int count, float* to) {
    __m512i block[16];
    for (int r = 0; r < 16; ++r) block[r] = _mm512_load_si512(from + r * 16);
    transpose16(block);
    for (int r = 0; r < count; ++r) _mm512_storeu_si512(to + r * kBlock, block[r]);
  }
  static VISHWAMAI_INLINE void put_pairs(__m256i p, uint16_t* to) {
    const __m512i low = _mm512_cvtepu16_epi32(p);
    _mm512_store_si512(to, low);
    _mm512_store_si512(to + 8 * 32, _mm512_slli_epi32(low, 16));
  }
  // 32 numbers in the parts that they take.
  VISHWAMAI_INLINE void split(f32v x, f32v y, __m512i part[3]) const {
    if (parts_ == 1) part[0] = (__m512i)_mm512_cvtne2ps_pbh(y, x);
    else AmxEngine<3>::split(x, y, part);
  }
};
#undef VISHWAMAI_KEYS
#undef VISHWAMAI_VALUES

template <class S>
using CacheProducts = std::conditional_t<std::is_same_v<S, bf16>, TileProducts, VectorProducts<S>>;
#else
template <class S>
using CacheProducts = VectorProducts<S>;
#endif

}  // namespace vishwamai::VISHWAMAI_ISA
