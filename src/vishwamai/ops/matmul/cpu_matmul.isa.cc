// The matrix product: core/cpp/gemm.h on the engine that the operands ask for, with the epilogue on each block while it
// is in the cache. With very few rows (decoding) B is read as it lies (cpu_few.h).
#include "cpu_few.h"
#include "vishwamai/core/cpp/splits.h"

namespace vishwamai::VISHWAMAI_ISA {
namespace {

#if defined(__AMX_BF16__)
// A small product of bfloat16, or of int8 to int32, whose operands stay in the second cache level, if nothing is added
// to them: A is multiplied as it lies, B is packed a few panels at a time, a finished tile of bfloat16 is rounded while
// it is in the first level, and one of int32 is stored where it belongs. With longer rows, lines of A would share the
// cache's sets, and those of C its translations of addresses.
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
  // who wrote a part of the result writes it again, if it can
  parallel_for(threads, g.groups * blocks * runs, multiply, Share::runs);
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

#if defined(VISHWAMAI_DOT)
// A small product of int8 to int32: A is multiplied as it lies, each task packs the columns of B that it alone uses, and
// sums are stored where they belong.
constexpr int64_t kSmallDepth = 1024, kSmallColumns = 1024, kSmallRows = 1024;

bool is_small(const MatmulArgs& g) {
  return g.storage == Storage::s8 && g.result == Storage::s32 && !g.packed && g.a_k == 1 && g.m >= 64 && g.m <= kSmallRows && g.n <= kSmallColumns && g.k > 0 &&
         g.k <= kSmallDepth && g.k % 4 == 0;  // a lane takes four of k
}

void small(const MatmulArgs& g, const Threads& threads) {
  using E = Int8Engine;
  constexpr int64_t C = E::kCols, kHigh = 256;
  const auto columns = columns_of<int8_t, E>(g);
  const int64_t wide = g.n > 512 ? 4 : 2, runs = ceil_div(g.n, wide * C), panel = E::b_elements(g.k);
  const int64_t blocks = ceil_div(g.m, kHigh), different = g.a_group ? g.groups : 1;
  const auto rows_at = [&](int64_t group, int64_t row) { return static_cast<const int8_t*>(g.a) + group * g.a_group + row * g.a_row; };
  Scratch of_all(Scratch::size<int32_t>(different * g.m));
  int32_t* const starts = of_all.take<int32_t>(different * g.m);
  parallel_for(threads, different * blocks, [&](int64_t i) {
    const int64_t group = i / blocks, row = i % blocks * kHigh;
    E::row_starts(rows_at(group, row), g.a_row, least(kHigh, g.m - row), g.k, starts + group * g.m + row);
  });
  parallel_for(threads, g.groups * runs, [&](int64_t i) {
    const int64_t group = i / runs, col0 = i % runs * wide * C, panels = ceil_div(least(wide * C, g.n - col0), C);
    Scratch scratch(Scratch::size<int8_t>(panels * panel) + Scratch::size<int32_t>(kHigh * C));
    int8_t* const b = scratch.take<int8_t>(panels * panel);
    int32_t* const tile = scratch.take<int32_t>(kHigh * C);
    columns.pack(group, 0, g.k, col0 / C, panels, b, panel);
    for (int64_t row = 0; row < g.m; row += kHigh) {  // so many of A stay in the second cache level
      const int high = static_cast<int>(least(kHigh, g.m - row));
      const int32_t* const from = starts + group % different * g.m + row;
      for (int64_t p = 0; p < panels; ++p) {
        const int64_t col = col0 + p * C;
        const bool whole = col + C <= g.n;
        int32_t* const out = static_cast<int32_t*>(g.out) + (group * g.m + row) * g.n + col;
        E::multiply(rows_at(group, row), g.a_row, b + p * panel, g.k, high, whole ? out : tile, whole ? g.n : C, false, from);
        for (int64_t r = 0; r < high && !whole; ++r) finish_row(g, tile + r * C, group, row + r, col, g.n - col);
      }
    }
  }, Share::runs);
}
#endif

template <class S, class E>
void run(const MatmulArgs& g, const Threads& threads) {
  run<E>(g, rows_of<S, E>(g), columns_of<S, E>(g), threads);
}

#if defined(__AMX_BF16__)
// float32 in parts, unless the operands turn out, as they are packed, to be numbers that do not split; then nothing was
// gained.
template <class E>
bool run_split(const MatmulArgs& g, const Threads& threads) {
  uint32_t most_a = 0, most_b = 0;
  run<E>(g, WatchedRows<E>{rows_of<float, E>(g), &most_a}, WatchedColumns<E>{columns_of<float, E>(g), &most_b}, threads);
  return splits_well(bit_cast<float>(most_a), bit_cast<float>(most_b));
}
#endif

template <class S, class E>
void pack(const MatmulArgs& g, const Threads& threads) {
  using Element = typename E::Element;
  constexpr int64_t kRun = 8;  // panels that a task packs
  const auto columns = columns_of<S, E>(g);
  const int64_t panels = ceil_div<int64_t>(g.n, E::kCols), panel = E::b_elements(round_up<int64_t>(g.k, E::kStep));
  parallel_for(threads, ceil_div(panels, kRun), [&](int64_t i) {
    columns.pack(0, 0, g.k, kRun * i, least(kRun, panels - kRun * i), static_cast<Element*>(g.out) + kRun * i * panel, panel);
  });
}

#if defined(VISHWAMAI_DOT) || defined(__AMX_BF16__) || defined(VISHWAMAI_NEON_BF16)
using HalfPanels = HalfEngine;

void pack_halves(const MatmulArgs& g, const Threads& threads) { pack<bf16, HalfEngine>(g, threads); }
#else
// Without products of bfloat16, panels of it are those of float32 in half the bytes: widened by few rows as they are
// multiplied, and by many a block at a time.
struct HalfPanels {
  using Element = bf16;
  static constexpr int64_t kCols = FmaEngine<float>::kCols, kStep = 1;
  static constexpr int64_t b_elements(int64_t k) { return k * kCols; }

  const bf16* panels;
  int64_t n, k;
  static constexpr int64_t kUnit = 1;
  bool shared() const { return true; }
  int64_t columns() const { return n; }
  bool along_k() const { return true; }
  void pack(int64_t, int64_t k0, int64_t depth, int64_t first, int64_t count, float* out, int64_t panel_stride) const {
    for (int64_t j = 0; j < count; ++j, out += panel_stride) {
      const bf16* const from = panels + (first + j) * b_elements(k) + b_elements(k0);
      for (int64_t i = 0; i < b_elements(depth); i += lanes<float>) store(out + i, load(from + i));
    }
  }
  void prefetch(int64_t, int64_t k0, int64_t depth, int64_t first, int64_t count, int64_t i, int64_t parts) const {
    for (int64_t j = count * i / parts; j < count * (i + 1) / parts; ++j)
      vishwamai::VISHWAMAI_ISA::prefetch(panels + (first + j) * b_elements(k) + b_elements(k0), b_elements(depth) * 2, 0, 1);
  }
};

void pack_halves(const MatmulArgs& g, const Threads& threads) {
  constexpr int64_t C = HalfPanels::kCols, kRun = 8;  // panels that a task packs
  const int64_t panels = ceil_div<int64_t>(g.n, C);
  parallel_for(threads, ceil_div(panels, kRun), [&](int64_t task) {
    for (int64_t k = 0; k < g.k; ++k) {
      for (int64_t p = kRun * task; p < least(kRun * (task + 1), panels); ++p) {
        const bf16* const from = static_cast<const bf16*>(g.b) + k * g.b_k + p * C * g.b_col;
        bf16* const to = static_cast<bf16*>(g.out) + p * HalfPanels::b_elements(g.k) + k * C;
        const int64_t count = least(C, g.n - p * C);
        for (int64_t c = 0; c < C; ++c) to[c] = c < count ? from[c * g.b_col] : bf16{};
      }
    }
  });
}
#endif

template <class E>
int64_t bytes_of_panels(const MatmulArgs& g) {
  return ceil_div<int64_t>(g.n, E::kCols) * E::b_elements(round_up<int64_t>(g.k, E::kStep)) * static_cast<int64_t>(sizeof(typename E::Element));
}

}  // namespace

void matmul_pack(const MatmulArgs& g, const Threads& threads) {
  VISHWAMAI_BYTES_OR_BASE(g.storage, matmul_pack(g, threads));
  if (g.storage == Storage::s8) return pack<int8_t, Int8Engine>(g, threads);
  if (g.storage == Storage::bf16) return pack_halves(g, threads);
  if (g.storage == Storage::f32) return VISHWAMAI_BASE_OR(matmul_pack(g, threads), pack<float, FmaEngine<float>>(g, threads));
}

int64_t matmul_packed_bytes(const MatmulArgs& g) {
  VISHWAMAI_BYTES_OR_BASE(g.storage, matmul_packed_bytes(g));
  if (g.storage == Storage::s8) return bytes_of_panels<Int8Engine>(g);
  if (g.storage == Storage::bf16) return bytes_of_panels<HalfPanels>(g);
  return g.storage == Storage::f32 ? bytes_of_panels<FmaEngine<float>>(g) : -1;
}

void matmul(const MatmulArgs& g, const Threads& all) {
  VISHWAMAI_BYTES_OR_BASE(g.storage, matmul(g, all));
  Threads threads = all;
  // a hand-over costs more than the product
  if (g.groups * g.m * g.n * greatest<int64_t>(1, g.k) < 64 * 64 * 64) threads.count = 1;
  const bool as_it_lies = g.k > 0 && (g.packed || g.b_col == 1);
  if (as_it_lies && g.storage == Storage::f32 && g.m <= kFewRows) return VISHWAMAI_BASE_OR(matmul(g, threads), few_rows<float>(g, threads));
  if (as_it_lies && !g.packed && g.storage == Storage::bf16 && g.m <= 4) return few_rows<bf16>(g, threads);
#if defined(VISHWAMAI_DOT)
  if (g.packed && g.storage == Storage::bf16 && g.m <= kFewPacked) return few_packed(g, threads);
#elif !defined(__AMX_BF16__) && !defined(VISHWAMAI_NEON_BF16)
  if (g.packed && g.storage == Storage::bf16) {
    if (g.k > 0 && g.m <= kFewRows) return few_rows<bf16>(g, threads);
    MatmulArgs widened = g;
    widened.packed = nullptr;
    return run<HalfEngine>(widened, rows_of<bf16, HalfEngine>(g), HalfPanels{static_cast<const bf16*>(g.packed), g.n, g.k}, threads);
  }
#endif
  if (g.k > 0 && !g.packed && g.b_k == 1 && g.b_col != 1 && g.m <= kFewColumns && (g.storage == Storage::f32 || g.storage == Storage::bf16)) {
    return g.storage == Storage::f32 ? few_columns<float>(g, threads) : few_columns<bf16>(g, threads);
  }
  if (g.storage == Storage::f64) return VISHWAMAI_BASE_OR(matmul(g, threads), run<double, FmaEngine<double>>(g, threads));
#if defined(__AMX_BF16__)
  if (is_small(g)) return g.result == Storage::s32 ? small<int8_t, Int8Engine>(g, threads) : small<bf16, HalfEngine>(g, threads);
#endif
#if defined(VISHWAMAI_DOT)
  if (is_small(g)) return small(g, threads);
#endif
  if (g.storage == Storage::s8) return run<int8_t, Int8Engine>(g, threads);
  if (g.storage == Storage::bf16) return run<bf16, HalfEngine>(g, threads);
#if defined(__AMX_BF16__)
  // Few rows are bound by reading B, in parts or not.
  if (!g.packed && g.m > 16 && (g.parts == 2 ? run_split<AmxEngine<2>>(g, threads) : run_split<AmxEngine<3>>(g, threads))) return;
#endif
  VISHWAMAI_BASE_OR(matmul(g, threads), run<float, FmaEngine<float>>(g, threads));
}

}  // namespace vishwamai::VISHWAMAI_ISA
