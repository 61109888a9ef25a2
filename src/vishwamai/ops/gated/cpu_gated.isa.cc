// Gated linear units on the blocks of core/cpp/gemm.h.
//
// Forward, panels of both weights take turns, so that a block of C holds both products of the same columns: the
// activation and the product of both are taken of sums that never left the cache. Backward, the gradients of the sums,
// d gate and d up, are computed while they are packed: dx = [d gate | d up] @ [gate | up]^T is one product of twice the
// depth, and the weights' gradients are one product with panels that take turns again.
#include "cpu_gated.h"
#include "vishwamai/core/cpp/gemm.h"
#include "vishwamai/core/cpp/splits.h"

namespace vishwamai::VISHWAMAI_ISA {
namespace {

// Panels of two matrices of the same shape by turns.
template <class Columns, class E>
struct Pairs {
  Columns first, second;
  static constexpr int64_t kUnit = 2;
  bool shared() const { return first.shared() && second.shared(); }
  int64_t columns() const { return 2 * round_up<int64_t>(first.columns(), E::kCols); }
  void pack(int64_t group, int64_t k0, int64_t depth, int64_t panel, int64_t count, typename E::Element* out, int64_t panel_stride) const {
    const int64_t odd = panel % 2;  // whose turn it is first
    first.pack(group, k0, depth, (panel + 1) / 2, (count - odd + 1) / 2, out + odd * panel_stride, 2 * panel_stride);
    second.pack(group, k0, depth, panel / 2, (count + odd) / 2, out + (1 - odd) * panel_stride, 2 * panel_stride);
  }
};

// body(column, count, panel) for every pair of panels of a block: `column` is the first of each matrix's own, `panel`
// the pair's offset in the block.
template <class E, class Body>
void each_pair(int64_t n, int64_t col, int64_t cols, const Body& body) {
  for (int64_t panel = 0; panel < cols; panel += 2 * E::kCols) {
    const int64_t column = (col + panel) / 2;
    body(column, least<int64_t>(E::kCols, n - column), panel);
  }
}

template <class R, class T>
void store_row(R* out, const T* z, int64_t n) {
  for (int64_t i = 0; i < n; i += lanes<T>) store(out + i, load(z + i), static_cast<int>(least<int64_t>(lanes<T>, n - i)));
}

template <class S>
struct Slopes {
  using T = compute_t<S>;
  const GatedArgs& g;
  const S *gate = static_cast<const S*>(g.gate_sums), *up = static_cast<const S*>(g.up_sums), *dh = static_cast<const S*>(g.dh);

  // The gradient of one of the sums at element `at`, `count` of them.
  VISHWAMAI_INLINE V<T> of(bool of_up, int64_t at, int count) const {
    const V<T> d = load(dh + at, count), z = load(gate + at, count);
    return of_up ? d * activate<T>(g.activation, z) : d * load(up + at, count) * derivative<T>(g.activation, z);
  }
  // Rounded to the operands' type, as a product's operand is; zeros from `n` to `padded`.
  void row(bool of_up, int64_t at, int64_t n, int64_t padded, S* out) const {
    constexpr int W = lanes<T>;
    int64_t i = 0;
    for (; i < n; i += W) store(out + i, of(of_up, at + i, static_cast<int>(least<int64_t>(W, n - i))), static_cast<int>(least<int64_t>(W, n - i)));
    for (i = greatest<int64_t>(0, n); i < padded; ++i) out[i] = S{};
  }
};

// [d gate | d up], each half padded to `half` columns, as rows of A.
template <class S, class E>
struct SlopeRows {
  Slopes<S> slopes;
  int64_t half;
  bool shared() const { return false; }
  void pack(int64_t group, int64_t panel, int64_t k0, int64_t depth, typename E::Element* out) const {
    const GatedArgs& g = slopes.g;
    const int64_t row0 = panel * kPanelRows, rows = least<int64_t>(kPanelRows, g.m - row0);
    Scratch scratch(Scratch::size<S>(kPanelRows * depth));
    S* values = scratch.take<S>(kPanelRows * depth);
    for (int64_t r = 0; r < rows; ++r) {
      for (int of_up = 0; of_up < 2; ++of_up) {
        const int64_t begin = greatest(k0, of_up * half) - of_up * half, end = least(k0 + depth, (of_up + 1) * half) - of_up * half;
        if (begin >= end) continue;
        slopes.row(of_up != 0, (group * g.m + row0 + r) * g.n + begin, greatest<int64_t>(0, least(end, g.n) - begin), end - begin,
                   values + r * depth + begin + of_up * half - k0);
      }
    }
    E::pack_a(values, depth, 1, static_cast<int>(rows), depth, out);
  }
};

// [gate | up]^T with the same padding, as columns of B: one for each feature of x.
template <class S, class E>
struct WeightColumns {
  const GatedArgs& g;
  int64_t half;
  static constexpr int64_t kUnit = 1;
  bool shared() const { return g.gate_group == 0 && g.up_group == 0; }
  int64_t columns() const { return g.k; }
  void pack(int64_t group, int64_t k0, int64_t depth, int64_t first, int64_t count, typename E::Element* out, int64_t panel_stride) const {
    for (int of_up = 0; of_up < 2; ++of_up) {
      const int64_t begin = greatest(k0, of_up * half), end = least(k0 + depth, (of_up + 1) * half), from = begin - of_up * half;
      if (begin >= end) continue;
      const S* weight = of_up ? static_cast<const S*>(g.up) + group * g.up_group : static_cast<const S*>(g.gate) + group * g.gate_group;
      const int64_t valid = greatest<int64_t>(0, least(end - begin, g.n - from));
      for (int64_t j = 0; j < count; ++j) {
        const int64_t feature = (first + j) * E::kCols;
        E::pack_b(weight + feature * g.n + from, 1, g.n, valid, round_up<int64_t>(end - begin, E::kStep),
                  static_cast<int>(least<int64_t>(E::kCols, g.k - feature)), out + j * panel_stride + E::b_elements(begin - k0));
      }
    }
  }
};

// d gate or d up as columns of B: rows are what is summed over.
template <class S, class E>
struct SlopeColumns {
  Slopes<S> slopes;
  bool of_up;
  bool shared() const { return false; }
  int64_t columns() const { return slopes.g.n; }
  void pack(int64_t group, int64_t k0, int64_t depth, int64_t first, int64_t count, typename E::Element* out, int64_t panel_stride) const {
    constexpr int64_t C = E::kCols, kRows = round_up<int64_t>(32, E::kStep);
    const GatedArgs& g = slopes.g;
    const int64_t col = first * C, cols = least(count * C, g.n - col), stride = round_up<int64_t>(cols, C);
    Scratch scratch(Scratch::size<S>(kRows * stride));
    S* values = scratch.take<S>(kRows * stride);
    for (int64_t k = 0; k < depth; k += kRows) {
      const int64_t rows = least(kRows, depth - k);
      for (int64_t r = 0; r < rows; ++r) slopes.row(of_up, (group * g.m + k0 + k + r) * g.n + col, cols, stride, values + r * stride);
      for (int64_t j = 0; j < count; ++j) {
        E::pack_b(values + j * C, stride, 1, rows, round_up<int64_t>(rows, E::kStep), static_cast<int>(least<int64_t>(C, cols - j * C)),
                  out + j * panel_stride + E::b_elements(k));
      }
    }
  }
};

// A row of h, and of what the backward pass needs, from both sums.
template <class S, class T>
void finish_row(const GatedArgs& g, const T* gate, const T* up, int64_t at, int64_t n) {
  S* h = static_cast<S*>(g.h) + at;
  for (int64_t i = 0; i < n; i += lanes<T>) {
    const int count = static_cast<int>(least<int64_t>(lanes<T>, n - i));
    const V<T> z = load(gate + i), y = load(up + i);
    if (g.gate_sums) {
      store(static_cast<S*>(g.gate_sums) + at + i, z, count);
      store(static_cast<S*>(g.up_sums) + at + i, y, count);
    }
    store(h + i, activate<T>(g.activation, z) * y, count);
  }
}

template <class S, class E>
void forward(const GatedArgs& g, const Threads& threads) {
  using T = typename E::Acc;
  const RowPanels<S, E> a{{static_cast<const S*>(g.x), g.x_group, g.k, 1}, g.m};
  using Columns = ColumnPanels<S, E>;
  const Pairs<Columns, E> b{Columns{{static_cast<const S*>(g.gate), g.gate_group, g.n, 1}, g.n},
                            Columns{{static_cast<const S*>(g.up), g.up_group, g.n, 1}, g.n}};
  auto gemm = make_gemm<E>(a, b, g.groups, g.m, g.k);
  gemm.choose_blocks(threads);
  gemm.run(threads, [&](int64_t group, int64_t row, int64_t col, int64_t rows, int64_t cols, const T* c, int64_t stride) {
    for (int64_t r = 0; r < rows; ++r) {
      each_pair<E>(g.n, col, cols, [&](int64_t column, int64_t count, int64_t panel) {
        const T* z = c + r * stride + panel;
        finish_row<S>(g, z, z + E::kCols, (group * g.m + row + r) * g.n + column, count);
      });
    }
  });
}

template <class S, class E, class R>
void input_gradient(const GatedArgs& g, const Threads& threads) {
  using T = typename E::Acc;
  const int64_t half = round_up<int64_t>(g.n, E::kStep);
  auto gemm = make_gemm<E>(SlopeRows<S, E>{{g}, half}, WeightColumns<S, E>{g, half}, g.groups, g.m, 2 * half);
  gemm.choose_blocks(threads);
  gemm.run(threads, [&](int64_t group, int64_t row, int64_t col, int64_t rows, int64_t cols, const T* c, int64_t stride) {
    R* dx = static_cast<R*>(g.dx) + (group * g.m + row) * g.k + col;
    for (int64_t r = 0; r < rows; ++r) store_row(dx + r * g.k, c + r * stride, cols);
  });
}

template <class S, class E, class R>
void weight_gradient(const GatedArgs& g, const Threads& threads) {
  using T = typename E::Acc;
  const RowPanels<S, E> a{{static_cast<const S*>(g.x), g.x_group, 1, g.k}, g.k};
  using Columns = SlopeColumns<S, E>;
  const Pairs<Columns, E> b{Columns{{g}, false}, Columns{{g}, true}};
  auto gemm = make_gemm<E>(a, b, g.groups, g.k, g.m);
  gemm.choose_blocks(threads);
  gemm.run(threads, [&](int64_t group, int64_t row, int64_t col, int64_t rows, int64_t cols, const T* c, int64_t stride) {
    R *dgate = static_cast<R*>(g.dgate) + group * g.dweight_group, *dup = static_cast<R*>(g.dup) + group * g.dweight_group;
    for (int64_t r = 0; r < rows; ++r) {
      each_pair<E>(g.n, col, cols, [&](int64_t column, int64_t count, int64_t panel) {
        const T* z = c + r * stride + panel;
        store_row(dgate + (row + r) * g.n + column, z, count);
        store_row(dup + (row + r) * g.n + column, z + E::kCols, count);
      });
    }
  });
}

// Few rows are bound by reading the weights, which are taken as they lie.
constexpr int64_t kSkinnyRows = 4;

// c[r, n] = x[r, :] @ b for kRows rows; rows of x lie `k` apart and those of b `b_row`.
template <class S, int kRows>
void skinny_sums(const S* x, int64_t k, const S* b, int64_t b_row, int64_t n, compute_t<S>* c, int64_t stride) {
  using T = compute_t<S>;
  constexpr int W = lanes<T>, kUnroll = 8;
  memset(c, 0, sizeof(T) * static_cast<size_t>(kRows * stride));
  for (int64_t k0 = 0; k0 < k; k0 += kUnroll, b += kUnroll * b_row) {
    const int depth = static_cast<int>(least<int64_t>(kUnroll, k - k0));
    T factor[kRows][kUnroll] = {};
    for (int r = 0; r < kRows; ++r)
      for (int i = 0; i < depth; ++i) factor[r][i] = convert<T>(x[r * k + k0 + i]);
    for (int64_t j = 0; j < n; j += W) {
      const int count = static_cast<int>(least<int64_t>(W, n - j));
      V<T> sum[kRows];
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) sum[r] = load(c + r * stride + j);
      if (depth == kUnroll && count == W) {
#pragma GCC unroll 8
        for (int i = 0; i < kUnroll; ++i) {
          const V<T> y = load(b + i * b_row + j);
#pragma GCC unroll 4
          for (int r = 0; r < kRows; ++r) sum[r] += y * factor[r][i];
        }
      } else {
        for (int i = 0; i < depth; ++i) {
          const V<T> y = load(b + i * b_row + j, count);
          for (int r = 0; r < kRows; ++r) sum[r] += y * factor[r][i];
        }
      }
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) store(c + r * stride + j, sum[r]);
    }
  }
}

template <class S, int kRows>
void skinny_columns(const GatedArgs& g, int64_t group, int64_t col, int64_t n) {
  using T = compute_t<S>;
  const int64_t stride = round_up<int64_t>(n, lanes<T>);
  Scratch scratch(2 * Scratch::size<T>(kRows * stride));
  T *gate = scratch.take<T>(kRows * stride), *up = scratch.take<T>(kRows * stride);
  const S* x = static_cast<const S*>(g.x) + group * g.x_group;
  skinny_sums<S, kRows>(x, g.k, static_cast<const S*>(g.gate) + group * g.gate_group + col, g.n, n, gate, stride);
  skinny_sums<S, kRows>(x, g.k, static_cast<const S*>(g.up) + group * g.up_group + col, g.n, n, up, stride);
  for (int64_t r = 0; r < kRows; ++r) finish_row<S>(g, gate + r * stride, up + r * stride, (group * g.m + r) * g.n + col, n);
}

template <class S>
void skinny(const GatedArgs& g, const Threads& threads) {
  const int64_t wide = 4096 / static_cast<int64_t>(sizeof(S));  // a page of a row
  const int64_t cols = least(wide, greatest<int64_t>(64, round_up<int64_t>(ceil_div<int64_t>(g.n, 2 * threads.count), 64)));
  const int64_t blocks = ceil_div(g.n, cols);
  parallel_for(threads, g.groups * blocks, [&](int64_t i) {
    const int64_t group = i / blocks, col = i % blocks * cols, n = least(cols, g.n - col);
    switch (g.m) {
      case 1: return skinny_columns<S, 1>(g, group, col, n);
      case 2: return skinny_columns<S, 2>(g, group, col, n);
      case 3: return skinny_columns<S, 3>(g, group, col, n);
      default: return skinny_columns<S, 4>(g, group, col, n);
    }
  });
}

#if defined(__AMX_BF16__)
int64_t span(int64_t group_stride, int64_t groups, int64_t elements) { return (group_stride ? groups : 1) * elements; }

float largest_input(const GatedArgs& g, const Threads& threads) {
  return largest(static_cast<const float*>(g.x), span(g.x_group, g.groups, g.m * g.k), threads);
}
float largest_weight(const GatedArgs& g, const Threads& threads) {
  float most = 0;
  for (int64_t group = 0; group < g.groups; ++group) {
    const float gate = largest(static_cast<const float*>(g.gate) + group * g.gate_group, g.k * g.n, threads);
    const float up = largest(static_cast<const float*>(g.up) + group * g.up_group, g.k * g.n, threads);
    most = greater_or_nan(most, greater_or_nan(gate, up));
    if (g.gate_group == 0 && g.up_group == 0) break;
  }
  return most;
}
float largest_slope(const GatedArgs& g, const Threads& threads) {
  const Slopes<float> slopes{g};
  return greatest_magnitude(g.groups * g.m * g.n, threads, [&](int64_t begin, int64_t end) {
    f32v top = {};
    for (int64_t i = begin; i < end; i += lanes<float>) {
      const int count = static_cast<int>(least<int64_t>(lanes<float>, end - i));
      top = greater_magnitude(greater_magnitude(top, slopes.of(false, i, count)), slopes.of(true, i, count));
    }
    return top;
  });
}
#endif

Threads fitting(const GatedArgs& g, const Threads& all) {
  Threads threads = all;
  // a hand-over costs more than the products
  if (g.groups * g.m * g.n * greatest<int64_t>(1, g.k) < 32 * 64 * 64) threads.count = 1;
  return threads;
}

}  // namespace

void gated_forward(const GatedArgs& g, const Threads& all) {
  const Threads threads = fitting(g, all);
  if (g.storage == Storage::f64) return VISHWAMAI_FLOAT64_OR(gated_forward(g, threads), forward<double, FmaEngine<double>>(g, threads));
  if (g.m <= kSkinnyRows && g.k > 0) {
    return g.storage == Storage::bf16 ? skinny<bf16>(g, threads) : VISHWAMAI_BASE_OR(gated_forward(g, threads), skinny<float>(g, threads));
  }
  if (g.storage == Storage::bf16) return forward<bf16, HalfEngine>(g, threads);
#if defined(__AMX_BF16__)
  // With few rows the products are bound by reading the weights, and a look at them beforehand would double that.
  if (g.m > 16 && splits_well(largest_input(g, threads), largest_weight(g, threads))) {
    return g.parts == 2 ? forward<float, AmxEngine<2>>(g, threads) : forward<float, AmxEngine<3>>(g, threads);
  }
#endif
  VISHWAMAI_BASE_OR(gated_forward(g, threads), forward<float, FmaEngine<float>>(g, threads));
}

void gated_input_gradient(const GatedArgs& g, const Threads& all) {
  const Threads threads = fitting(g, all);
  if (g.storage == Storage::f64) return VISHWAMAI_FLOAT64_OR(gated_input_gradient(g, threads), input_gradient<double, FmaEngine<double>, double>(g, threads));
#if defined(__AMX_BF16__)
  if (g.storage == Storage::f32 && g.m > 16 && splits_well(largest_slope(g, threads), largest_weight(g, threads))) {
    return g.parts == 2 ? input_gradient<float, AmxEngine<2>, float>(g, threads) : input_gradient<float, AmxEngine<3>, float>(g, threads);
  }
#endif
  if (g.storage == Storage::f32) return VISHWAMAI_BASE_OR(gated_input_gradient(g, threads), input_gradient<float, FmaEngine<float>, float>(g, threads));
  if (g.result == Storage::bf16) return input_gradient<bf16, HalfEngine, bf16>(g, threads);
  input_gradient<bf16, HalfEngine, float>(g, threads);
}

void gated_weight_gradient(const GatedArgs& g, const Threads& all) {
  const Threads threads = fitting(g, all);
  if (g.storage == Storage::f64) return VISHWAMAI_FLOAT64_OR(gated_weight_gradient(g, threads), weight_gradient<double, FmaEngine<double>, double>(g, threads));
#if defined(__AMX_BF16__)
  if (g.storage == Storage::f32 && g.m > 16 && splits_well(largest_input(g, threads), largest_slope(g, threads))) {
    return g.parts == 2 ? weight_gradient<float, AmxEngine<2>, float>(g, threads) : weight_gradient<float, AmxEngine<3>, float>(g, threads);
  }
#endif
  if (g.storage == Storage::f32) return VISHWAMAI_BASE_OR(gated_weight_gradient(g, threads), weight_gradient<float, FmaEngine<float>, float>(g, threads));
  if (g.result == Storage::bf16) return weight_gradient<bf16, HalfEngine, bf16>(g, threads);
  weight_gradient<bf16, HalfEngine, float>(g, threads);
}

}  // namespace vishwamai::VISHWAMAI_ISA
