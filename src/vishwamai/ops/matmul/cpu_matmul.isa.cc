// The matrix product: core/cpp/gemm.h on the engine that the operands ask for, with the epilogue on each block while it is
// in the cache.  With very few rows (decoding) B is read as it lies.
#include "cpu_matmul.h"
#include "vishwamai/core/cpp/gemm.h"
#include "vishwamai/core/cpp/rows.h"
#include "vishwamai/core/cpp/splits.h"

namespace vishwamai::VISHWAMAI_ISA {
namespace {

// ---- the epilogue -----------------------------------------------------------------------------------------------
template <class R, class T>
void write_row(const MatmulArgs& a, const T* z, int64_t group, int64_t row, int64_t col, int64_t n) {
  constexpr int W = lanes<T>;
  const T* bias = a.bias ? static_cast<const T*>(a.bias) + group * a.bias_group + col : nullptr;
  const T* scale_b = a.scale_b ? static_cast<const T*>(a.scale_b) + group * a.scale_b_group + col * a.scale_b_col : nullptr;
  const T scale_a = a.scale_a ? static_cast<const T*>(a.scale_a)[group * a.scale_a_group + row * a.scale_a_row] : T(1);
  const int64_t first = (group * a.m + row) * a.n + col;
  R* out = static_cast<R*>(a.out) + first;
  R* preactivation = a.preactivation ? static_cast<R*>(a.preactivation) + first : nullptr;
  if (!a.scale_a && !a.scale_b && !bias && !preactivation && a.activation == Activation::none) {
    for (int64_t i = 0; i < n; i += W) store(out + i, load(z + i), static_cast<int>(least<int64_t>(W, n - i)));
    return;
  }
  for (int64_t i = 0; i < n; i += W) {
    const int count = static_cast<int>(least<int64_t>(W, n - i));
    V<T> x = load(z + i);
    if (a.scale_a) x *= scale_a;
    if (scale_b) x *= a.scale_b_col ? load(scale_b + i, count) : splat(*scale_b);
    if (bias) x += load(bias + i, count);
    if (preactivation) store(preactivation + i, x, count);
    store(out + i, activate<T>(a.activation, x), count);
  }
}
[[maybe_unused]] void finish_row(const MatmulArgs& a, const double* z, int64_t group, int64_t row, int64_t col, int64_t n) {
  write_row<double>(a, z, group, row, col, n);
}
void finish_row(const MatmulArgs& a, const float* z, int64_t group, int64_t row, int64_t col, int64_t n) {
  if (a.result == Storage::bf16) write_row<bf16>(a, z, group, row, col, n);
  else write_row<float>(a, z, group, row, col, n);
}
// Sums of int8 products: as they are, or converted for a floating epilogue.
void finish_row(const MatmulArgs& a, const int32_t* z, int64_t group, int64_t row, int64_t col, int64_t n) {
  if (a.result == Storage::s32) {
    memcpy(static_cast<int32_t*>(a.out) + (group * a.m + row) * a.n + col, z, sizeof(int32_t) * static_cast<size_t>(n));
    return;
  }
  constexpr int kRun = 256;
  alignas(64) float x[kRun];
  for (int64_t i = 0; i < n; i += kRun) {
    const int64_t count = least<int64_t>(kRun, n - i);
    for (int64_t j = 0; j < count; j += lanes<float>) store(x + j, __builtin_convertvector(load(z + i + j), f32v));
    finish_row(a, x, group, row, col + i, count);
  }
}

// Few rows of A times a B whose rows are contiguous, or in panels of the FmaEngine: bound by reading B once, so it is used where
// it lies, each vector of it for all rows while it is in a register.
//
// Sums are taken in three steps, in each of which few terms are added to what is of their own size: kRun of k in a register, kStretch
// of these in the first cache level, the stretches.  In one chain as long as k, terms would lose their last digits.
constexpr int64_t kFewRows = 48;                  // of float32: as far as it beats the blocks of gemm.h
constexpr int kRun = kVectorBytes == 64 ? 16 : 8;  // of k that a sum takes in while it is in a register
constexpr int64_t kStretch = 64 * kRun;
constexpr int kNarrow = 4;  // rows that sums in registers serve best

// c[M, J vectors], `stride` apart, += A B for one run; `count` columns where that is less than J vectors.  kAhead elements on is asked for.
template <int M, int J, int kAhead, class S, class T, class C>
VISHWAMAI_INLINE void add_run(const T* a, int depth, const S* b, int64_t b_row, T* c, int64_t stride, C count) {
  V<T> sum[M][J] = {};
  const auto add = [&](int i) __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int t = 0; t < J; ++t) {
      if (kAhead) __builtin_prefetch(b + i * b_row + t * lanes<T> + kAhead, 0, 2);
      const V<T> x = get(b + i * b_row + t * lanes<T>, count);
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

// c[M, n], `stride` apart, += A B, for A in runs of k, [run][M][kRun], the last one filled up with zeros.  B lies in rows b_row apart, or in
// panels `panel` apart.  Either way it is read in several places by turns, which brings more from memory than one long line of it.
template <int M, class S, class T>
void multiply_narrow(const T* a, int64_t k, const S* b, int64_t b_row, int64_t panel, int64_t n, T* c, int64_t stride) {
  constexpr int W = lanes<T>, J = kVectorBytes == 64 || M == 1 ? 4 : 2;  // sums take 8 registers of 16, or 16 of 32
  constexpr std::integral_constant<int, W> whole;
  for (int64_t k0 = 0; k0 < k; k0 += kRun, a += M * kRun, b += kRun * b_row) {
    const int depth = static_cast<int>(least<int64_t>(kRun, k - k0));
    int64_t j = 0;
    if (panel) {
      for (; j < n; j += 2 * W) add_run<M, 2, 512>(a, depth, b + j / (2 * W) * panel, b_row, c + j, stride, whole);
      continue;
    }
    for (; j + J * W <= n; j += J * W) add_run<M, J, 0>(a, depth, b + j, b_row, c + j, stride, whole);
    for (; j < n; j += W) add_run<M, 1, 0>(a, depth, b + j, b_row, c + j, stride, static_cast<int>(least<int64_t>(W, n - j)));
  }
}

// The same for any number of rows.  What lies `ahead` elements on is asked for, a line for each row of A: all at once they would stop the loads.
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

// c[m, n], `stride` apart, = A B; `part` has room for as much.  Panels of B, if it lies in such, are `panel` apart.
template <class S, class T>
void product_of_few(const T* a, int m, int64_t k, const S* b, int64_t b_row, int64_t panel, int64_t n, T* c, T* part, int64_t stride) {
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
      default: multiply_few(a_now, m, depth, b_now, b_row, n, to, stride, panel ? 2048 : kRun * b_row);
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
  // The sums stay in the first or second cache level.  One row takes what memory gives, most of it in long runs of B's rows; with
  // more, runs of a page will do.  Every thread gets as many blocks.
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
      const T* b = static_cast<const T*>(g.packed) + col0 * g.k;
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

#if defined(__AMX_BF16__)
// A small product of bfloat16, or of int8 to int32, whose operands stay in the second cache level, if nothing is added to them: A
// is multiplied as it lies, B is packed a few panels at a time, a finished tile of bfloat16 is rounded while it is in the first
// level, and one of int32 is stored where it belongs.  With longer rows, lines of A would share the cache's sets, and those of C its
// translations of addresses.
constexpr int64_t kSmallBytes = 1024, kSmallColumns = 1024, kSmallRows = 1024;  // bytes of a row of A

bool is_small(const MatmulArgs& g) {
  const bool sums = g.result == Storage::s32;
  const int64_t bytes = g.k * (sums ? 1 : 2);
  return !g.packed && (sums || g.storage == Storage::bf16) && g.a_k == 1 && g.m % kPanelRows == 0 && g.m >= 256 && g.m <= kSmallRows && g.n <= kSmallColumns &&
         bytes % 64 == 0 && bytes > (sums ? 0 : 512) && bytes <= kSmallBytes;
}

template <class S, class E>
void small(const MatmulArgs& g, const Threads& threads) {
  using Element = typename E::Element;
  using Acc = typename E::Acc;
  constexpr int64_t C = E::kCols, kHigh = 512, kTile = kPanelRows * C, kBytes = sizeof(S);
  const ColumnPanels<S, E> columns{{static_cast<const S*>(g.b), g.b_group, g.b_k, g.b_col}, g.n};
  const int64_t wide = threads.count > 1 ? 2 : 4, runs = ceil_div(g.n, wide * C), blocks = ceil_div(g.m, kHigh), panel = E::b_elements(g.k);
  auto multiply = [&](int64_t i) {
    const typename E::Scope scope;
    const int64_t group = i / (blocks * runs), row0 = i / runs % blocks * kHigh, col0 = i % runs * wide * C;
    const int64_t high = least(kHigh, g.m - row0), width = least(wide * C, g.n - col0), panels = ceil_div(width, C);
    Scratch scratch(Scratch::size<Element>(panels * panel) + Scratch::size<Acc>(2 * kTile));
    Element* const b = scratch.take<Element>(panels * panel);
    Acc* const tiles = scratch.take<Acc>(2 * kTile);
    columns.pack(group, 0, g.k, col0 / C, panels, b, panel);
    const Element* const a = reinterpret_cast<const Element*>(static_cast<const S*>(g.a) + group * g.a_group + row0 * g.a_row);
    const int64_t down = high / kPanelRows, products = panels * down, in_place = g.result == Storage::s32 ? width / C * down : 0;
    for (int64_t p = 0; p <= products; ++p) {  // a tile is finished while the next one is multiplied
      if (p < products) {
        const int64_t row = p % down * kPanelRows, first = (group * g.m + row0 + row) * g.n + col0 + p / down * C;
        Acc* const to = p < in_place ? static_cast<Acc*>(g.out) + first : tiles + p % 2 * kTile;
        // Passing: the panel of B is to stay in the first level.
        multiply_tiles<true, Element>({a + row * g.a_row, g.a_row * kBytes, 16 * g.a_row, 64 / kBytes}, b + p / down * panel, g.k * kBytes / 64, true, to,
                                      p < in_place ? g.n : C, false);
      }
      if (p <= in_place) continue;
      const int64_t row = row0 + (p - 1) % down * kPanelRows, col = (p - 1) / down * C;
      for (int64_t r = 0; r < kPanelRows; ++r) finish_row(g, tiles + (p - 1) % 2 * kTile + r * C, group, row + r, col0 + col, least(C, width - col));
    }
  };
  parallel_for(threads, g.groups * blocks * runs, multiply, Share::runs);  // who wrote a part of the result writes it again, if it can
}
#endif

template <class E, class A, class B>
void run(const MatmulArgs& g, const A& a, const B& b, const Threads& threads) {
  auto gemm = make_gemm<E>(a, b, g.groups, g.m, g.k);
  gemm.choose_blocks(threads);
  if ((gemm.ready = static_cast<const typename E::Element*>(g.packed)) != nullptr && g.m <= kPanelRows) {
    // Bound by reading B: in one go through each panel where nothing needs a part of it again.
    gemm.cols = least(gemm.cols, int64_t{128});
    if (E::kStep >= 32) gemm.depth = greatest<int64_t>(E::kStep, gemm.padded_k());
  }
  gemm.run(threads, [&](int64_t group, int64_t row, int64_t col, int64_t rows, int64_t cols, const typename E::Acc* c, int64_t stride) {
    for (int64_t r = 0; r < rows; ++r) finish_row(g, c + r * stride, group, row + r, col, cols);
  });
}

template <class S, class E>
RowPanels<S, E> rows_of(const MatmulArgs& g) {
  return {{static_cast<const S*>(g.a), g.a_group, g.a_row, g.a_k}, g.m};
}
template <class S, class E>
ColumnPanels<S, E> columns_of(const MatmulArgs& g) {
  return {{static_cast<const S*>(g.b), g.b_group, g.b_k, g.b_col}, g.n};
}

template <class S, class E>
void run(const MatmulArgs& g, const Threads& threads) {
  run<E>(g, rows_of<S, E>(g), columns_of<S, E>(g), threads);
}

#if defined(__AMX_BF16__)
// float32 in parts, unless the operands turn out, as they are packed, to be numbers that do not split; then nothing was gained.
template <class E>
bool run_split(const MatmulArgs& g, const Threads& threads) {
  uint32_t most_a = 0, most_b = 0;
  run<E>(g, WatchedRows<E>{rows_of<float, E>(g), &most_a}, WatchedColumns<E>{columns_of<float, E>(g), &most_b}, threads);
  return splits_well(bit_cast<float>(most_a), bit_cast<float>(most_b));
}
#endif

}  // namespace

void matmul(const MatmulArgs& g, const Threads& all) {
  Threads threads = all;
  if (g.groups * g.m * g.n * greatest<int64_t>(1, g.k) < 64 * 64 * 64) threads.count = 1;  // a hand-over costs more than the product
  const bool as_it_lies = g.k > 0 && (g.packed || g.b_col == 1);
  if (as_it_lies && g.storage == Storage::f32 && g.m <= kFewRows) return few_rows<float>(g, threads);
  if (as_it_lies && !g.packed && g.storage == Storage::bf16 && g.m <= 4) return few_rows<bf16>(g, threads);
  if (g.storage == Storage::f64) return VISHWAMAI_AVX512_OR(matmul(g, threads), run<double, FmaEngine<double>>(g, threads));
#if defined(__AMX_BF16__)
  if (is_small(g)) return g.result == Storage::s32 ? small<int8_t, Int8Engine>(g, threads) : small<bf16, HalfEngine>(g, threads);
#endif
  if (g.storage == Storage::s8) return run<int8_t, Int8Engine>(g, threads);
  if (g.storage == Storage::bf16) return run<bf16, HalfEngine>(g, threads);
#if defined(__AMX_BF16__)
  // Few rows are bound by reading B, in parts or not.
  if (!g.packed && g.m > 16 && (g.parts == 2 ? run_split<AmxEngine<2>>(g, threads) : run_split<AmxEngine<3>>(g, threads))) return;
#endif
  run<float, FmaEngine<float>>(g, threads);
}

}  // namespace vishwamai::VISHWAMAI_ISA
