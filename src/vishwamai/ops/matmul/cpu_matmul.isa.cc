// The matrix product: core/cpp/gemm.h on the engine that the operands ask for, with the epilogue on each block while it is
// in the cache.  With very few rows (decoding) B is read as it lies.
#include "cpu_matmul.h"
#include "vishwamai/core/cpp/gemm.h"
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
void finish_row(const MatmulArgs& a, const double* z, int64_t group, int64_t row, int64_t col, int64_t n) {
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

// Up to kSkinnyRows rows of A times a B whose rows are contiguous: bound by reading B once, so it is used where it lies.
constexpr int64_t kSkinnyRows = 4;

template <class S, int kRows>
void skinny_columns(const MatmulArgs& g, int64_t group, int64_t col0, int64_t n) {
  using T = compute_t<S>;
  constexpr int W = lanes<T>, kUnroll = 8;
  const S* a = static_cast<const S*>(g.a) + group * g.a_group;
  const S* b = static_cast<const S*>(g.b) + group * g.b_group + col0;
  const int64_t stride = round_up<int64_t>(n, W);
  Scratch scratch(Scratch::size<T>(kRows * stride));
  T* c = scratch.take<T>(kRows * stride);
  memset(c, 0, sizeof(T) * static_cast<size_t>(kRows * stride));
  for (int64_t k = 0; k < g.k; k += kUnroll) {
    const int depth = static_cast<int>(least<int64_t>(kUnroll, g.k - k));
    T x[kRows][kUnroll] = {};
    for (int r = 0; r < kRows; ++r)
      for (int i = 0; i < depth; ++i) x[r][i] = convert<T>(a[r * g.a_row + (k + i) * g.a_k]);
    const S* rows = b + k * g.b_k;
    for (int64_t j = 0; j < n; j += W) {
      const int count = static_cast<int>(least<int64_t>(W, n - j));
      V<T> sum[kRows];
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) sum[r] = load(c + r * stride + j);
      if (depth == kUnroll && count == W) {
#pragma GCC unroll 8
        for (int i = 0; i < kUnroll; ++i) {
          const V<T> y = load(rows + i * g.b_k + j);
#pragma GCC unroll 4
          for (int r = 0; r < kRows; ++r) sum[r] += y * x[r][i];
        }
      } else {
        for (int i = 0; i < depth; ++i) {
          const V<T> y = load(rows + i * g.b_k + j, count);
          for (int r = 0; r < kRows; ++r) sum[r] += y * x[r][i];
        }
      }
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) store(c + r * stride + j, sum[r]);
    }
  }
  for (int r = 0; r < kRows; ++r) finish_row(g, c + r * stride, group, r, col0, n);
}

template <class S>
void skinny(const MatmulArgs& g, const Threads& threads) {
  const int64_t wide = 4096 / static_cast<int64_t>(sizeof(S));  // a page of a row
  const int64_t cols = least(wide, greatest<int64_t>(64, round_up<int64_t>(ceil_div<int64_t>(g.n, 2 * threads.count), 64)));
  const int64_t blocks = ceil_div(g.n, cols);
  parallel_for(threads, g.groups * blocks, [&](int64_t i) {
    const int64_t group = i / blocks, col0 = i % blocks * cols, n = least(cols, g.n - col0);
    switch (g.m) {
      case 1: return skinny_columns<S, 1>(g, group, col0, n);
      case 2: return skinny_columns<S, 2>(g, group, col0, n);
      case 3: return skinny_columns<S, 3>(g, group, col0, n);
      default: return skinny_columns<S, 4>(g, group, col0, n);
    }
  });
}

template <class S, class E>
void run(const MatmulArgs& g, const Threads& threads) {
  const RowPanels<S, E> a{{static_cast<const S*>(g.a), g.a_group, g.a_row, g.a_k}, g.m};
  const ColumnPanels<S, E> b{{static_cast<const S*>(g.b), g.b_group, g.b_k, g.b_col}, g.n};
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

}  // namespace

void matmul(const MatmulArgs& g, const Threads& all) {
  Threads threads = all;
  if (g.groups * g.m * g.n * greatest<int64_t>(1, g.k) < 64 * 64 * 64) threads.count = 1;  // a hand-over costs more than the product
  const bool few_rows = !g.packed && g.m <= kSkinnyRows && g.b_col == 1 && g.k > 0;
  if (few_rows && g.storage == Storage::f32) return skinny<float>(g, threads);
  if (few_rows && g.storage == Storage::bf16) return skinny<bf16>(g, threads);
  if (g.storage == Storage::f64) return run<double, FmaEngine<double>>(g, threads);
  if (g.storage == Storage::s8) return run<int8_t, Int8Engine>(g, threads);
  if (g.storage == Storage::bf16) return run<bf16, HalfEngine>(g, threads);
#if defined(__AMX_BF16__)
  // With few rows the product is bound by reading B, and a look at B beforehand would double that.
  if (!g.packed && g.m > 16 && splits_well(largest(static_cast<const float*>(g.a), (g.a_group ? g.groups : 1) * g.m * g.k, threads),
                              largest(static_cast<const float*>(g.b), (g.b_group ? g.groups : 1) * g.n * g.k, threads))) {
    return g.parts == 2 ? run<float, AmxEngine<2>>(g, threads) : run<float, AmxEngine<3>>(g, threads);
  }
#endif
  run<float, FmaEngine<float>>(g, threads);
}

}  // namespace vishwamai::VISHWAMAI_ISA
