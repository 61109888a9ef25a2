// Products of few rows (decoding), which are bound by reading B: it is read once, as it lies, without the blocks of
// core/cpp/gemm.h.
#pragma once

#include "cpu_epilogue.h"
#include "vishwamai/core/cpp/gemm.h"
#include "vishwamai/core/cpp/rows.h"

namespace vishwamai::VISHWAMAI_ISA {
namespace {

// Few rows of A times a B whose rows are contiguous, or in panels of the FmaEngine: bound by reading B once, so it is
// used where it lies, each vector of it for all rows while it is in a register.
//
// Sums are taken in three steps, in each of which few terms are added to what is of their own size: kRun of k in a
// register, kStretch of these in the first cache level, the stretches. In one chain as long as k, terms would lose
// their last digits.
constexpr int64_t kFewRows = 48;                  // of float32: as far as it beats the blocks of gemm.h
constexpr int kRun = kVectorBytes == 64 ? 16 : 8;  // of k that a sum takes in while it is in a register
constexpr int kNarrow = 4;  // rows that sums in registers serve best

// Bytes ahead of the products that panels are asked for.
constexpr int64_t kPanelAhead = 2048;

// c[M, J vectors], `stride` apart, += A B for one run; `count` columns where that is less than J vectors. Of panels
// each line is asked for in time.
template <int M, int J, bool kPanels, class S, class T, class C>
VISHWAMAI_INLINE void add_run(const T* a, int depth, const S* b, int64_t b_row, T* c, int64_t stride, C count) {
  V<T> sum[M][J] = {};
  const auto add = [&](int i) __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int t = 0; t < J; ++t) {
      const int64_t at = i * b_row + t * lanes<T>;
      if (kPanels && at * static_cast<int64_t>(sizeof(S)) % 64 == 0) __builtin_prefetch(b + at + kPanelAhead / static_cast<int64_t>(sizeof(S)), 0, 2);
      const V<T> x = get(b + at, count);
#pragma GCC unroll 4
      for (int r = 0; r < M; ++r) sum[r][t] += x * a[r * kRun + i];
    }
  };
  if (depth == kRun) {
#pragma GCC unroll 16
    for (int i = 0; i < kRun; ++i) add(i);
  } else {
    for (int i = 0; i < depth; ++i) add(i);
  }
  for (int r = 0; r < M; ++r)
    for (int t = 0; t < J; ++t) store(c + r * stride + t * lanes<T>, load(c + r * stride + t * lanes<T>) + sum[r][t]);
}

// c[M, n], `stride` apart, += A B, for A in runs of k, [run][M][kRun], the last one filled up with zeros. B lies in
// rows b_row apart, or in panels `panel` apart. Either way it is read in several places by turns, which brings more
// from memory than one long line of it.
template <int M, class S, class T>
void multiply_narrow(const T* a, int64_t k, const S* b, int64_t b_row, int64_t panel, int64_t n, T* c, int64_t stride) {
  constexpr int W = lanes<T>, J = kVectorBytes == 64 || M == 1 ? 4 : 2;  // sums take 8 registers of 16, or 16 of 32
  constexpr std::integral_constant<int, W> whole;
  for (int64_t k0 = 0; k0 < k; k0 += kRun, a += M * kRun, b += kRun * b_row) {
    const int depth = static_cast<int>(least<int64_t>(kRun, k - k0));
    int64_t j = 0;
    if (panel) {
      for (; j < n; j += 2 * W) add_run<M, 2, true>(a, depth, b + j / (2 * W) * panel, b_row, c + j, stride, whole);
      continue;
    }
    for (; j + J * W <= n; j += J * W) add_run<M, J, false>(a, depth, b + j, b_row, c + j, stride, whole);
    for (; j < n; j += W) add_run<M, 1, false>(a, depth, b + j, b_row, c + j, stride, static_cast<int>(least<int64_t>(W, n - j)));
  }
}

// The same for any number of rows. What lies `ahead` elements on is asked for, a line for each row of A: all at once
// they would stop the loads.
template <class S, class T>
void multiply_few(const T* a, int m, int64_t k, const S* b, int64_t b_row, int64_t n, T* c, int64_t stride, int64_t ahead) {
  constexpr int W = lanes<T>, R = kRun;
  for (int64_t k0 = 0; k0 < k; k0 += R, a += m * R, b += R * b_row) {
    const int depth = static_cast<int>(least<int64_t>(R, k - k0));
    for (int64_t j = 0; j < n; j += W) {
      const int count = static_cast<int>(least<int64_t>(W, n - j));
      V<T> y[R];
      if (depth == R && count == W) {
#pragma GCC unroll 16
        for (int i = 0; i < R; ++i) y[i] = load(b + i * b_row + j);
      } else {
        for (int i = 0; i < R; ++i) y[i] = i < depth ? load(b + i * b_row + j, count) : V<T>{};
      }
      for (int r = 0; r < m; ++r) {
        if (r < R) __builtin_prefetch(b + r * b_row + j + ahead, 0, 2);
        V<T> sum = y[0] * a[r * R];
#pragma GCC unroll 16
        for (int i = 1; i < R; ++i) sum += y[i] * a[r * R + i];
        store(c + r * stride + j, load(c + r * stride + j) + sum);
      }
    }
  }
}

#if !defined(__AVX512F__)
// c[M, a panel], `stride` apart, += A B for runs of k, of which 8 stay in registers: where there are 16 of these, more
// rows at a time than they hold would read and write c for each run. `lines` of what `ahead` points to are asked for
// with each run.
template <int M, class S, class T>
void multiply_panel(const T* a, int64_t a_run, int64_t k, const S* b, T* c, int64_t stride, const char* ahead, int64_t lines) {
  constexpr int64_t kPanel = FmaEngine<T>::kCols, kChunk = 8 * kRun;
  for (int64_t k0 = 0; k0 < k; k0 += kChunk) {
    V<T> sum[M][2] = {};
    const int64_t end = least(k, k0 + kChunk);
    for (int64_t k1 = k0; k1 < end; k1 += kRun, a += a_run) {
      for (int64_t line = 0; line < lines; ++line, ahead += 64) __builtin_prefetch(ahead, 0, 2);
      const auto add = [&](int i) __attribute__((always_inline)) {
        const V<T> low = load(b), high = load(b + lanes<T>);
        b += kPanel;
#pragma GCC unroll 8
        for (int r = 0; r < M; ++r) {
          const V<T> x = splat(a[r * kRun + i]);
          sum[r][0] += low * x;
          sum[r][1] += high * x;
        }
      };
      if (k1 + kRun <= end) {
#pragma GCC unroll 8
        for (int i = 0; i < kRun; ++i) add(i);
      } else {
        for (int i = 0; i < end - k1; ++i) add(i);
      }
    }
    for (int r = 0; r < M; ++r)
      for (int t = 0; t < 2; ++t) store(c + r * stride + t * lanes<T>, load(c + r * stride + t * lanes<T>) + sum[r][t]);
  }
}

// The same for any number of rows, as evenly as they divide. While the panel is in the first cache level, what follows
// it comes from memory.
template <class S, class T>
void multiply_panel(const T* a, int m, int64_t k, const S* b, T* c, int64_t stride) {
  const int64_t a_run = m * kRun, passes = ceil_div<int64_t>(m, 6), runs = ceil_div<int64_t>(k, kRun);
  const int64_t lines = ceil_div<int64_t>(kRun * FmaEngine<T>::kCols * static_cast<int64_t>(sizeof(S)), 64 * passes);
  const char* ahead = reinterpret_cast<const char*>(b + k * FmaEngine<T>::kCols);
  for (int64_t r = 0, left = passes; left > 0; --left, ahead += 64 * lines * runs) {
    const int64_t rows = ceil_div(m - r, left);
    const T* const x = a + r * kRun;
    T* const to = c + r * stride;
    if (rows == 6) multiply_panel<6>(x, a_run, k, b, to, stride, ahead, lines);
    else if (rows == 5) multiply_panel<5>(x, a_run, k, b, to, stride, ahead, lines);
    else if (rows == 4) multiply_panel<4>(x, a_run, k, b, to, stride, ahead, lines);
    else multiply_panel<3>(x, a_run, k, b, to, stride, ahead, lines);
    r += rows;
  }
}
#endif

// c[m, n], `stride` apart, = A B; `part` has room for as much.  Panels of B, if it lies in such, are `panel` apart.
template <class S, class T>
void product_of_few(const T* a, int m, int64_t k, const S* b, int64_t b_row, int64_t panel, int64_t n, T* c, T* part, int64_t stride) {
  // of a panel it stays in the first cache level
  constexpr int64_t kStretch = kVectorBytes == 64 ? 64 * kRun : 16384 / (FmaEngine<T>::kCols * static_cast<int64_t>(sizeof(S)));
  for (int64_t k0 = 0; k0 < k; k0 += kStretch) {
    const int64_t depth = least(kStretch, k - k0);
    const T* const a_now = a + k0 * m;
    const S* const b_now = b + k0 * b_row;
    T* const to = k0 == 0 ? c : part;
    for (int r = 0; r < m; ++r) memset(to + r * stride, 0, sizeof(T) * static_cast<size_t>(round_up<int64_t>(n, lanes<T>)));
    switch (m <= (panel ? kNarrow : 2) ? m : 0) {
      case 1: multiply_narrow<1>(a_now, depth, b_now, b_row, panel, n, to, stride); break;
      case 2: multiply_narrow<2>(a_now, depth, b_now, b_row, panel, n, to, stride); break;
      case 3: multiply_narrow<3>(a_now, depth, b_now, b_row, panel, n, to, stride); break;
      case 4: multiply_narrow<4>(a_now, depth, b_now, b_row, panel, n, to, stride); break;
      default:
#if !defined(__AVX512F__)
        if (panel) {
          multiply_panel(a_now, m, depth, b_now, to, stride);
          break;
        }
#endif
        multiply_few(a_now, m, depth, b_now, b_row, n, to, stride, panel ? 2 * kPanelAhead : kRun * b_row);
    }
    if (k0 == 0) continue;
    for (int r = 0; r < m; ++r)
      for (int64_t j = 0; j < n; j += lanes<T>) store(c + r * stride + j, load(c + r * stride + j) + load(part + r * stride + j));
  }
}

template <class S>
void few_rows(const MatmulArgs& g, const Threads& threads) {
  using T = compute_t<S>;
  constexpr int64_t R = kRun, kPanel = FmaEngine<T>::kCols;
  const int64_t runs = ceil_div<int64_t>(g.k, R), m = g.m, a_elements = runs * m * R;
  const auto pack_a = [&](int64_t group, T* to) {
    const S* a = static_cast<const S*>(g.a) + group * g.a_group;
    for (int64_t k = 0; k < g.k; k += R) {
      const int64_t depth = least<int64_t>(R, g.k - k);
      for (int64_t r = 0; r < m; ++r, to += R) {
        const S* from = a + r * g.a_row + k * g.a_k;
        if (depth == R && g.a_k == 1) for (int64_t i = 0; i < R; i += lanes<T>) store(to + i, load(from + i));
        else for (int64_t i = 0; i < R; ++i) to[i] = i < depth ? convert<T>(from[i * g.a_k]) : T(0);
      }
    }
  };
  const bool own_a = g.a_group != 0;  // a task packs it for itself
  Scratch of_all(Scratch::size<T>(own_a ? 0 : a_elements));
  T* const shared_a = of_all.take<T>(own_a ? 0 : a_elements);
  if (!own_a) pack_a(0, shared_a);
  // The sums stay in the first or second cache level. One row takes what memory gives, most of it in long runs of B's
  // rows; with more, runs of a page will do. Every thread gets as many blocks.
  const int64_t size = sizeof(T), fitting = 65536 / m / size;
  const int64_t most = m <= 2 ? fitting : greatest<int64_t>(128, least<int64_t>(4096 / static_cast<int64_t>(sizeof(S)), fitting));
  const int64_t rounds = ceil_div<int64_t>(g.n, most * threads.count);
  const int64_t cols = greatest<int64_t>(64, round_up<int64_t>(ceil_div<int64_t>(g.n, rounds * threads.count), 64));
  const int64_t blocks = ceil_div(g.n, cols);
  parallel_for(threads, g.groups * blocks, [&](int64_t i) {
    const int64_t group = i / blocks, col0 = i % blocks * cols, n = least(cols, g.n - col0), stride = round_up<int64_t>(n, kPanel) + 16;
    Scratch scratch(2 * Scratch::size<T>(m * stride) + Scratch::size<T>(own_a ? a_elements : 0));
    T* const c = scratch.take<T>(m * stride);
    T* const part = scratch.take<T>(m * stride);
    T* const a = own_a ? scratch.take<T>(a_elements) : shared_a;
    if (own_a) pack_a(group, a);
    const int rows = static_cast<int>(m);
    if (g.packed) {
      const S* b = static_cast<const S*>(g.packed) + col0 * g.k;
      const int64_t together = m <= kNarrow ? 4 * kPanel : kPanel;
      for (int64_t j = 0; j < n; j += together) {
        product_of_few(a, rows, g.k, b + j * g.k, kPanel, kPanel * g.k, least(together, round_up(n - j, kPanel)), c + j, part, stride);
      }
    } else {
      product_of_few(a, rows, g.k, static_cast<const S*>(g.b) + group * g.b_group + col0, g.b_k, 0, n, c, part, stride);
    }
    for (int64_t r = 0; r < m; ++r) finish_row(g, c + r * stride, group, r, col0, n);
  });
}

// Few rows of A times a B whose columns are contiguous (a tied embedding): each column is read once, for up to
// kColumnRows rows of A at a time, and its sums are lanes that are added up at the end. With more rows, it comes from the
// first cache level again.
constexpr int64_t kFewColumns = 16;  // rows of A
constexpr int kColumnRows = 4, kColumnsAtOnce = kVectorBytes == 64 ? 4 : 2;

// How a type is multiplied: in pairs of bfloat16 where the instruction set has that, else as float32.
template <class S>
struct Widened {
  using Number = float;
  static constexpr int kStep = lanes<float>;
  using Vector = f32v;
  template <class P>
  static VISHWAMAI_INLINE Vector read(const P* p, int count) { return load(p, count); }
  template <class P>
  static VISHWAMAI_INLINE Vector read(const P* p) { return load(p); }
  static VISHWAMAI_INLINE f32v add(f32v sum, Vector a, Vector b) { return sum + a * b; }
};
#if defined(VISHWAMAI_DOT)
struct Pairs {
  using Number = bf16;
  static constexpr int kStep = 32;
  using Vector = __m512i;
  static VISHWAMAI_INLINE Vector read(const bf16* p, int count) { return _mm512_maskz_loadu_epi16(count >= 32 ? ~0u : (1u << count) - 1, p); }
  static VISHWAMAI_INLINE Vector read(const bf16* p) { return _mm512_loadu_si512(p); }
  static VISHWAMAI_INLINE f32v add(f32v sum, Vector a, Vector b) { return DotEngine::multiply_add(sum, a, b); }
};
template <>
struct Widened<bf16> : Pairs {};
#elif defined(VISHWAMAI_NEON_BF16)
template <>
struct Widened<bf16> {
  using Number = bf16;
  static constexpr int kStep = 8;
  using Vector = bfloat16x8_t;
  static VISHWAMAI_INLINE Vector read(const bf16* p, int count) {
    if (count >= kStep) return read(p);
    bf16 some[kStep] = {};
    for (int i = 0; i < count; ++i) some[i] = p[i];
    return read(some);
  }
  static VISHWAMAI_INLINE Vector read(const bf16* p) { return vreinterpretq_bf16_u16(vld1q_u16(reinterpret_cast<const uint16_t*>(p))); }
  static VISHWAMAI_INLINE f32v add(f32v sum, Vector a, Vector b) { return (f32v)vbfdotq_f32((float32x4_t)sum, a, b); }
};
#endif

// c[r, j] = the sums of R rows of A (`a_row` apart, padded with zeros to whole vectors) and J columns of B.
template <int R, int J, class S, class M = Widened<S>>
VISHWAMAI_INLINE void dot_columns(const typename M::Number* a, int64_t a_row, const S* b, int64_t b_col, int64_t k, int rows, int columns, float* c, int64_t stride) {
  const S* column[J];
  const typename M::Number* row[R];
  for (int j = 0; j < J; ++j) column[j] = b + least(j, columns - 1) * b_col;
  for (int r = 0; r < R; ++r) row[r] = a + least(r, rows - 1) * a_row;
  f32v sum[R][J] = {};
  int64_t i = 0;
  const auto step = [&](auto... count) __attribute__((always_inline)) {
    typename M::Vector x[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) x[r] = M::read(row[r] + i);
#pragma GCC unroll 4
    for (int j = 0; j < J; ++j) {
      __builtin_prefetch(column[j] + i + 4 * b_col, 0, 2);
      const typename M::Vector y = M::read(column[j] + i, count...);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) sum[r][j] = M::add(sum[r][j], x[r], y);
    }
  };
  for (; i + M::kStep <= k; i += M::kStep) step();
  if (i < k) step(static_cast<int>(k - i));
  for (int r = 0; r < rows; ++r)
    for (int j = 0; j < columns; ++j) c[r * stride + j] += sum_lanes<float>(sum[r][j]);
}

template <class S>
void few_columns(const MatmulArgs& g, const Threads& threads) {
  using M = Widened<S>;
  using Number = typename M::Number;
  // Sums are taken in stretches: in one chain as long as k, terms would lose their last digits.
  constexpr int64_t kStretch = 256 * M::kStep, kBlock = 256;
  constexpr int J = kColumnsAtOnce;
  const int64_t padded = round_up<int64_t>(g.k, M::kStep), m = g.m, a_groups = g.a_group ? g.groups : 1;
  Scratch of_all(Scratch::size<Number>(a_groups * m * padded));
  Number* const a = of_all.take<Number>(a_groups * m * padded);
  for (int64_t r = 0; r < a_groups * m; ++r) {
    const S* from = static_cast<const S*>(g.a) + r / m * g.a_group + r % m * g.a_row;
    for (int64_t i = 0; i < padded; ++i) {
      if constexpr (std::is_same_v<Number, S>) a[r * padded + i] = i < g.k ? from[i * g.a_k] : Number{};
      else a[r * padded + i] = i < g.k ? convert<Number>(from[i * g.a_k]) : Number{};
    }
  }
  const int64_t blocks = ceil_div(g.n, kBlock);
  parallel_for(threads, g.groups * blocks, [&](int64_t task) {
    const int64_t group = task / blocks, col0 = task % blocks * kBlock, n = least(kBlock, g.n - col0);
    const S* const b = static_cast<const S*>(g.b) + group * g.b_group + col0 * g.b_col;
    const Number* const of_group = a + (g.a_group ? group : 0) * m * padded;
    alignas(64) float c[kFewColumns * kBlock] = {};
    for (int64_t j = 0; j < n; j += J) {
      const int columns = static_cast<int>(least<int64_t>(J, n - j));
      for (int64_t k0 = 0; k0 < g.k; k0 += kStretch) {
        const int64_t depth = least(kStretch, g.k - k0);
        const S* const from = b + j * g.b_col + k0;
        for (int64_t r = 0; r < m; r += kColumnRows) {
          const int rows = static_cast<int>(least<int64_t>(kColumnRows, m - r));
          const Number* const x = of_group + r * padded + k0;
          float* const to = c + r * kBlock + j;
          if (rows == 1) dot_columns<1, J, S>(x, padded, from, g.b_col, depth, rows, columns, to, kBlock);
          else dot_columns<kColumnRows, J, S>(x, padded, from, g.b_col, depth, rows, columns, to, kBlock);
        }
      }
    }
    for (int64_t r = 0; r < m; ++r) finish_row(g, c + r * kBlock, group, r, col0, n);
  });
}

#if defined(VISHWAMAI_DOT)
// Few rows of A times a packed B of bfloat16, whose panels are read four at a time by turns, each some way ahead of the
// products: bound by reading them.
constexpr int64_t kFewPacked = 16;

using Pair = DotEngine::Element;  // bits of one bfloat16

template <int R>
__attribute__((noinline)) void add_pairs(const Pair* a, int64_t a_row, const Pair* b, int64_t k, int rows, float* c, int64_t stride) {
  constexpr int64_t kAhead = 4096;
  const Pair* row[R];
  for (int r = 0; r < R; ++r) row[r] = a + least(r, rows - 1) * a_row;
  f32v sum[R][2] = {};
  for (int64_t i = 0; i < k; i += 2) {
    const Pair* const at = b + DotEngine::b_at(i / 2);
    if (R <= 4) {  // line after line, whatever the order in which the halves are read
      __builtin_prefetch(b + i * DotEngine::kCols + kAhead, 0, 2);
      __builtin_prefetch(b + i * DotEngine::kCols + kAhead + 32, 0, 2);
    }
    const __m512i low = DotEngine::columns(at), high = DotEngine::columns(at + DotEngine::kHalf);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const __m512i x = DotEngine::broadcast(row[r] + i);
      sum[r][0] = DotEngine::multiply_add(sum[r][0], x, low);
      sum[r][1] = DotEngine::multiply_add(sum[r][1], x, high);
    }
  }
  for (int r = 0; r < rows; ++r)
    for (int t = 0; t < 2; ++t) store(c + r * stride + 16 * t, load(c + r * stride + 16 * t) + sum[r][t]);
}

void few_packed(const MatmulArgs& g, const Threads& threads) {
  constexpr int64_t C = DotEngine::kCols, kSet = 4, kStretch = 1024;
  const int64_t padded = round_up<int64_t>(g.k, DotEngine::kStep), panel = DotEngine::b_elements(padded), m = g.m;
  Scratch of_all(Scratch::size<Pair>(m * padded));
  Pair* const a = of_all.take<Pair>(m * padded);
  for (int64_t r = 0; r < m; ++r) {
    memcpy(a + r * padded, static_cast<const Pair*>(g.a) + r * g.a_row, sizeof(Pair) * static_cast<size_t>(g.k));
    memset(a + r * padded + g.k, 0, sizeof(Pair) * static_cast<size_t>(padded - g.k));
  }
  const int64_t panels = ceil_div(g.n, C), each = round_up<int64_t>(ceil_div<int64_t>(panels, 4 * threads.count), kSet);
  parallel_for(threads, ceil_div(panels, each), [&](int64_t task) {
    for (int64_t p0 = task * each; p0 < least((task + 1) * each, panels); p0 += kSet) {
      const int64_t set = least(kSet, panels - p0), stride = kSet * C;
      alignas(64) float c[kFewPacked * kSet * C] = {};
      for (int64_t k0 = 0; k0 < padded; k0 += kStretch) {
        const int64_t depth = least(kStretch, padded - k0);
        for (int64_t p = 0; p < set; ++p) {
          const Pair* const b = static_cast<const Pair*>(g.packed) + (p0 + p) * panel + DotEngine::b_elements(k0);
          for (int64_t r = 0, parts = ceil_div<int64_t>(m, 6); parts > 0; --parts) {
            const int rows = static_cast<int>(ceil_div(m - r, parts));
            const Pair* const x = a + r * padded + k0;
            float* const to = c + r * stride + p * C;
            if (rows == 1) add_pairs<1>(x, padded, b, depth, rows, to, stride);
            else if (rows == 2) add_pairs<2>(x, padded, b, depth, rows, to, stride);
            else if (rows <= 4) add_pairs<4>(x, padded, b, depth, rows, to, stride);
            else add_pairs<6>(x, padded, b, depth, rows, to, stride);
            r += rows;
          }
        }
      }
      for (int64_t r = 0; r < m; ++r) finish_row(g, c + r * stride, 0, r, p0 * C, least(set * C, g.n - p0 * C));
    }
  }, Share::runs);
}
#endif

}  // namespace
}  // namespace vishwamai::VISHWAMAI_ISA
