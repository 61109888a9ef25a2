// Products with a matrix of blocks: work and memory are those of the blocks that are there.
//
// Forward, values and dense columns are packed once.  A task takes some rows and one stripe of the result, as wide as a
// block, and adds up the products of the blocks that stand there, in the order in which they were given. The gradient
// of the dense operand is the same with the matrix transposed. The gradient of the values is one product over the rows
// for each block, from columns of both operands that are packed once.
#include "cpu_sparse.h"
#include "vishwamai/core/cpp/gemm.h"
#include "vishwamai/core/cpp/splits.h"

namespace vishwamai::VISHWAMAI_ISA {
namespace {

constexpr int64_t kPackedBytes = 64 << 20;  // packed rows of the dense operand that are held at a time, about

template <class R, class T>
void store_rows(const T* c, int64_t stride, int64_t rows, int64_t cols, R* out, int64_t out_stride) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t i = 0; i < cols; i += lanes<T>)
      store(out + r * out_stride + i, load(c + r * stride + i), static_cast<int>(least<int64_t>(lanes<T>, cols - i)));
}

template <class S, class E, class R>
struct Product {
  using T = typename E::Acc;
  using Packed = typename E::Element;
  static constexpr int64_t C = E::kCols;

  const SparseArgs& a;
  const int side = a.transpose ? 1 : 0;  // of an index: the block of contracted columns
  const int64_t take = a.transpose ? a.block_columns : a.block_rows, give = a.transpose ? a.block_rows : a.block_columns;
  const int64_t contracted = a.transpose ? a.columns : a.rows, width = a.transpose ? a.rows : a.columns;
  const int64_t sources = contracted / take, targets = width / give;
  const int64_t panels = ceil_div(give, C), panel_elements = E::b_elements(round_up<int64_t>(take, E::kStep));
  const int64_t a_panel = E::a_elements(take);

  int64_t source_of(const int32_t* index) const { return greatest<int64_t>(0, least<int64_t>(index[side], sources - 1)); }
  int64_t target_of(const int32_t* index) const { return greatest<int64_t>(0, least<int64_t>(index[1 - side], targets - 1)); }

  // order[starts[t] ... starts[t + 1]): the blocks of stripe t, as they were given.
  void sort(const int32_t* indices, int64_t* starts, int64_t* order) const {
    for (int64_t t = 0; t <= targets; ++t) starts[t] = 0;
    for (int64_t n = 0; n < a.blocks; ++n) ++starts[target_of(indices + 2 * n) + 1];
    for (int64_t t = 0; t < targets; ++t) starts[t + 1] += starts[t];
    for (int64_t n = 0; n < a.blocks; ++n) order[starts[target_of(indices + 2 * n)]++] = n;
    for (int64_t t = targets; t > 0; --t) starts[t] = starts[t - 1];
    starts[0] = 0;
  }

  void pack_values(const S* values, int64_t n, Packed* out) const {
    const S* block = values + n * a.block_rows * a.block_columns;
    const int64_t k_stride = a.transpose ? 1 : a.block_columns, col_stride = a.transpose ? a.block_columns : 1;
    for (int64_t j = 0; j < panels; ++j) {
      E::pack_b(block + j * C * col_stride, k_stride, col_stride, take, round_up<int64_t>(take, E::kStep),
                static_cast<int>(least<int64_t>(C, give - j * C)), out + (n * panels + j) * panel_elements);
    }
  }

  // Stripe t of `rows` rows, whose packed panels lie `source_stride` apart from source to source.
  void stripe(const Packed* dense, int64_t source_stride, int64_t rows, const Packed* values, const int32_t* indices, const int64_t* starts,
              const int64_t* order, int64_t t, R* out) const {
    const int64_t stride = panels * C + 16;
    Scratch scratch(Scratch::size<T>(round_up<int64_t>(rows, kPanelRows) * stride));
    T* c = scratch.take<T>(round_up<int64_t>(rows, kPanelRows) * stride);
    if (starts[t] == starts[t + 1]) memset(c, 0, sizeof(T) * static_cast<size_t>(rows * stride));
    for (int64_t i = starts[t]; i < starts[t + 1]; ++i) {
      multiply_panels<E>(dense + source_of(indices + 2 * order[i]) * source_stride, a_panel, values + order[i] * panels * panel_elements, panel_elements,
                         rows, panels, take, c, stride, i > starts[t], Nothing(), (starts[t + 1] - starts[t]) * take);
    }
    store_rows(c, stride, rows, give, out + t * give, width);
  }

  void run(const Threads& threads) const {
    int64_t rows = 256;  // of a task
    while (rows > 64 && a.groups * ceil_div(a.m, rows) * targets < 2 * threads.count) rows /= 2;
    const int64_t together = greatest<int64_t>(1, 128 / give);  // narrow stripes: several to a task
    const int64_t runs = ceil_div(targets, together), bands = ceil_div(a.m, rows), row_panels = rows / kPanelRows;
    const int64_t band = sources * row_panels * a_panel;
    const int64_t wave = least(bands, greatest<int64_t>(1, kPackedBytes / greatest<int64_t>(1, band * static_cast<int64_t>(sizeof(Packed)))));
    Scratch scratch(Scratch::size<int64_t>(targets + 1) + Scratch::size<int64_t>(a.blocks) + Scratch::size<Packed>(a.blocks * panels * panel_elements) +
                    Scratch::size<Packed>(wave * band));
    int64_t* starts = scratch.take<int64_t>(targets + 1);
    int64_t* order = scratch.take<int64_t>(a.blocks);
    Packed* values = scratch.take<Packed>(a.blocks * panels * panel_elements);
    Packed* dense = scratch.take<Packed>(wave * band);
    for (int64_t g = 0; g < a.groups; ++g) {
      const int32_t* indices = a.indices + g * a.indices_group;
      if (g == 0 || a.indices_group) sort(indices, starts, order);
      if (g == 0 || a.values_group) {
        parallel_for(threads, a.blocks, [&](int64_t n) { pack_values(static_cast<const S*>(a.values) + g * a.values_group, n, values); });
      }
      const S* from = static_cast<const S*>(a.dense) + g * a.m * contracted;
      R* out = static_cast<R*>(a.out) + g * a.m * width;
      for (int64_t b0 = 0; b0 < bands; b0 += wave) {
        const int64_t count = least(wave, bands - b0);
        parallel_for(threads, count * row_panels, [&](int64_t i) {
          const int64_t row = b0 * rows + i * kPanelRows;
          if (row >= a.m) return;
          for (int64_t s = 0; s < sources; ++s) {
            E::pack_a(from + row * contracted + s * take, contracted, 1, static_cast<int>(least<int64_t>(kPanelRows, a.m - row)), take,
                      dense + i / row_panels * band + (s * row_panels + i % row_panels) * a_panel);
          }
        });
        parallel_for(threads, count * runs, [&](int64_t i) {
          typename E::Scope scope;
          (void)scope;
          const int64_t row = (b0 + i / runs) * rows, first = i % runs * together;
          for (int64_t t = first; t < least(targets, first + together); ++t) {
            stripe(dense + i / runs * band, row_panels * a_panel, least(rows, a.m - row), values, indices, starts, order, t, out + row * width);
          }
        });
      }
    }
  }
};

template <class S, class E, class R>
struct ValuesGradient {
  using T = typename E::Acc;
  using Packed = typename E::Element;
  static constexpr int64_t C = E::kCols;

  const SparseArgs& a;
  const int64_t lefts = a.rows / a.block_rows, rights = a.columns / a.block_columns;
  const int64_t left_panels = ceil_div<int64_t>(a.block_rows, kPanelRows), right_panels = ceil_div(a.block_columns, C);
  const int64_t padded = round_up<int64_t>(a.m, E::kStep), depth = least(kDepth<E>, padded), stretches = ceil_div(a.m, kDepth<E>);
  const int64_t a_panel = E::a_elements(depth), left_block = stretches * left_panels * a_panel, right_panel = E::b_elements(padded);

  void pack_left(const S* from, int64_t block, Packed* out) const {
    for (int64_t s = 0; s < stretches; ++s) {
      for (int64_t p = 0; p < left_panels; ++p) {
        E::pack_a(from + block * a.block_rows + p * kPanelRows + s * kDepth<E> * a.rows, 1, a.rows,
                  static_cast<int>(least<int64_t>(kPanelRows, a.block_rows - p * kPanelRows)), least(kDepth<E>, a.m - s * kDepth<E>),
                  out + (s * left_panels + p) * a_panel);
      }
    }
  }
  void pack_right(const S* from, int64_t block, Packed* out) const {
    const ColumnPanels<S, E> source{{from + block * a.block_columns, 0, a.columns, 1}, a.block_columns};
    for (int64_t s = 0; s < stretches; ++s) {
      source.pack(0, s * kDepth<E>, least(kDepth<E>, a.m - s * kDepth<E>), 0, right_panels, out + E::b_elements(s * kDepth<E>), right_panel);
    }
  }

  void run(const Threads& threads) const {
    Scratch scratch(Scratch::size<Packed>(lefts * left_block) + Scratch::size<Packed>(rights * right_panels * right_panel) +
                    Scratch::size<uint8_t>(lefts + rights));
    Packed* left = scratch.take<Packed>(lefts * left_block);
    Packed* right = scratch.take<Packed>(rights * right_panels * right_panel);
    uint8_t* used = scratch.take<uint8_t>(lefts + rights);
    for (int64_t g = 0; g < a.groups; ++g) {
      const int32_t* indices = a.indices + g * a.indices_group;
      const auto left_of = [&](int64_t n) { return greatest<int64_t>(0, least<int64_t>(indices[2 * n], lefts - 1)); };
      const auto right_of = [&](int64_t n) { return greatest<int64_t>(0, least<int64_t>(indices[2 * n + 1], rights - 1)); };
      memset(used, 0, static_cast<size_t>(lefts + rights));
      for (int64_t n = 0; n < a.blocks; ++n) used[left_of(n)] = used[lefts + right_of(n)] = 1;
      parallel_for(threads, lefts + rights, [&](int64_t i) {
        if (!used[i]) return;
        if (i < lefts) pack_left(static_cast<const S*>(a.left) + g * a.m * a.rows, i, left + i * left_block);
        else pack_right(static_cast<const S*>(a.right) + g * a.m * a.columns, i - lefts, right + (i - lefts) * right_panels * right_panel);
      });
      const int64_t together = greatest<int64_t>(1, 64 * 64 / (a.block_rows * a.block_columns));
      parallel_for(threads, ceil_div(a.blocks, together), [&](int64_t i) {
        typename E::Scope scope;
        (void)scope;
        const int64_t stride = right_panels * C + 16, height = left_panels * kPanelRows;
        Scratch own(Scratch::size<T>(height * stride));
        T* c = own.take<T>(height * stride);
        for (int64_t n = i * together; n < least(a.blocks, (i + 1) * together); ++n) {
          if (stretches == 0) memset(c, 0, sizeof(T) * static_cast<size_t>(height * stride));
          for (int64_t s = 0; s < stretches; ++s) {
            multiply_panels<E>(left + left_of(n) * left_block + s * left_panels * a_panel, a_panel,
                               right + right_of(n) * right_panels * right_panel + E::b_elements(s * kDepth<E>), right_panel, a.block_rows, right_panels,
                               least(kDepth<E>, a.m - s * kDepth<E>), c, stride, s > 0, Nothing(), a.m);
          }
          store_rows(c, stride, a.block_rows, a.block_columns,
                     static_cast<R*>(a.dvalues) + (g * a.blocks + n) * a.block_rows * a.block_columns, a.block_columns);
        }
      });
    }
  }
};

// Blocks below this size would be mostly padding in a tile.
constexpr int64_t kLeastTile = 16;

// `plain`: the kernel of float32 numbers that are not split.
template <template <class, class, class> class Kernel, class Plain, class Splits>
void run_any(const SparseArgs& a, const Threads& threads, const Plain& plain, const Splits& splits) {
  const bool tiles = a.block_rows >= kLeastTile && a.block_columns >= kLeastTile;
  if (tiles && a.storage == Storage::bf16) {
    if (a.result == Storage::bf16) return Kernel<bf16, HalfEngine, bf16>{a}.run(threads);
    return Kernel<bf16, HalfEngine, float>{a}.run(threads);
  }
#if defined(__AMX_BF16__)
  if (tiles && a.storage == Storage::f32 && a.m > 16 && splits()) {
    if (a.parts == 2) return Kernel<float, AmxEngine<2>, float>{a}.run(threads);
    return Kernel<float, AmxEngine<3>, float>{a}.run(threads);
  }
#else
  (void)splits;
#endif
  if (a.storage == Storage::f32) return plain();
  if (a.result == Storage::bf16) return Kernel<bf16, FmaEngine<float>, bf16>{a}.run(threads);
  Kernel<bf16, FmaEngine<float>, float>{a}.run(threads);
}

Threads fitting(const SparseArgs& a, const Threads& all) {
  Threads threads = all;
  // a hand-over costs more than the product
  if (a.groups * a.m * a.blocks * a.block_rows * a.block_columns < 64 * 64 * 64) threads.count = 1;
  return threads;
}

}  // namespace

void sparse_product(const SparseArgs& a, const Threads& all) {
  const Threads threads = fitting(a, all);
  if (a.storage == Storage::f64) return VISHWAMAI_FLOAT64_OR(sparse_product(a, threads), Product<double, FmaEngine<double>, double>{a}.run(threads));
  const auto plain = [&] { VISHWAMAI_BASE_OR(sparse_product(a, threads), Product<float, FmaEngine<float>, float>{a}.run(threads)); };
  run_any<Product>(a, threads, plain, [&] {
    return splits_well(largest(static_cast<const float*>(a.dense), a.groups * a.m * (a.transpose ? a.columns : a.rows), threads),
                       largest(static_cast<const float*>(a.values), (a.values_group ? a.groups : 1) * a.blocks * a.block_rows * a.block_columns, threads));
  });
}

void sparse_values_gradient(const SparseArgs& a, const Threads& all) {
  const Threads threads = fitting(a, all);
  if (a.storage == Storage::f64) return VISHWAMAI_FLOAT64_OR(sparse_values_gradient(a, threads), ValuesGradient<double, FmaEngine<double>, double>{a}.run(threads));
  const auto plain = [&] { VISHWAMAI_BASE_OR(sparse_values_gradient(a, threads), ValuesGradient<float, FmaEngine<float>, float>{a}.run(threads)); };
  run_any<ValuesGradient>(a, threads, plain, [&] {
    return splits_well(largest(static_cast<const float*>(a.left), a.groups * a.m * a.rows, threads),
                       largest(static_cast<const float*>(a.right), a.groups * a.m * a.columns, threads));
  });
}

}  // namespace vishwamai::VISHWAMAI_ISA
