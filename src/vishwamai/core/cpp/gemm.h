// Matrix products of any size on an engine: panels, blocks, threads (Goto and van de Geijn, "Anatomy of
// High-Performance Matrix Multiplication", 2008).
//
// A and B are packed into panels (engine.h), each number once.  A task multiplies a block of C in memory that stays in
// the second cache level, one stretch of k after another: a panel of B for a stretch stays in the first level, panels
// of A come from the second. The finished block goes to `finish`, which scales, activates, reduces or stores it; so an
// operation is made of where its panels come from and what becomes of a block:
//
//   const auto a = RowPanels<S, E>{{data, group_stride, row_stride, k_stride}, m};
//   const auto b = ColumnPanels<S, E>{{data, group_stride, k_stride, col_stride}, n};
//   auto gemm = make_gemm<E>(a, b, groups, m, k);
//   gemm.choose_blocks(threads);
//   gemm.run(threads, [&](int64_t group, int64_t row, int64_t col, int64_t rows, int64_t cols, const Acc* c, int64_t stride) {...});
//
// A source of its own (two matrices whose panels take turns, gathered rows) has the same members as those two.
#pragma once

#include "engine.h"
#include "parallel.h"

namespace vishwamai::VISHWAMAI_ISA {

// Element (i, j) of group g lies at data[g * group + i * row + j * col]; a group stride of 0: all groups share it.
template <class S>
struct Matrix {
  const S* data;
  int64_t group, row, col;
};

// k at a time: a panel of B for so much k stays in the first cache level, with room to spare for A to pass through.
template <class E>
constexpr int64_t kDepth = E::kStep >= 32 ? 32768 / (E::b_elements(E::kStep) * static_cast<int64_t>(sizeof(typename E::Element))) * E::kStep : 256;

// Asks for `bytes` from p on to be brought to the second cache level: part i of n of them.
VISHWAMAI_INLINE void prefetch(const void* p, int64_t bytes, int64_t i, int64_t n) {
  const char* const from = static_cast<const char*>(p);
  const int64_t lines = ceil_div<int64_t>(bytes, 64);
  for (int64_t line = lines * i / n, end = lines * (i + 1) / n; line < end; ++line) __builtin_prefetch(from + 64 * line, 0, 2);
}

// Panels of 32 rows of A.
template <class S, class E>
struct RowPanels {
  Matrix<S> a;
  int64_t m;
  bool shared() const { return a.group == 0; }
  void pack(int64_t group, int64_t panel, int64_t k0, int64_t depth, typename E::Element* out) const {
    const int64_t row = panel * kPanelRows;
    E::pack_a(a.data + group * a.group + row * a.row + k0 * a.col, a.row, a.col, static_cast<int>(least<int64_t>(kPanelRows, m - row)), depth, out);
  }
};

// Panels of E::kCols columns of B.
template <class S, class E>
struct ColumnPanels {
  Matrix<S> b;
  int64_t n;
  static constexpr int64_t kUnit = 1;  // panels that must be in one block
  bool shared() const { return b.group == 0; }
  int64_t columns() const { return n; }
  bool along_k() const { return b.row == 1 && b.col != 1; }  // its memory is in runs of k
  // Packs `count` panels from `first` on for k in [k0, k0 + depth); `out` is where the first one's row k0 goes.  Where
  // rows of B are contiguous, few rows are taken at a time and all their columns, so that memory is read in runs: a
  // page that is visited for a line or two costs its translation each time.
  void pack(int64_t group, int64_t k0, int64_t depth, int64_t first, int64_t count, typename E::Element* out, int64_t panel_stride) const {
    constexpr int64_t C = E::kCols;
    const int64_t step = b.col == 1 ? round_up<int64_t>(32, E::kStep) : depth;
    const S* from = b.data + group * b.group + k0 * b.row;
    for (int64_t k = 0; k < depth; k += step) {
      const int64_t kn = least(step, depth - k);
      int64_t j = 0;
      if constexpr (requires { E::pack_b_rows(from, 0, 0, out, 0); }) {
        if (b.col == 1 && kn == E::kStep) {
          j = least(count, n / C - first);
          E::pack_b_rows(from + k * b.row + first * C, b.row, j, out + E::b_elements(k), panel_stride);
        }
      }
      for (; j < count; ++j) {
        const int64_t col = (first + j) * C;
        E::pack_b(from + k * b.row + col * b.col, b.row, b.col, kn, round_up<int64_t>(kn, E::kStep), static_cast<int>(least<int64_t>(C, n - col)),
                  out + j * panel_stride + E::b_elements(k));
      }
    }
  }
  // Fetches what pack will read: part i of n of it.
  void prefetch(int64_t group, int64_t k0, int64_t depth, int64_t first, int64_t count, int64_t i, int64_t n) const {
    const S* from = b.data + group * b.group + k0 * b.row + first * E::kCols * b.col;
    const int64_t width = least(count * E::kCols, this->n - first * E::kCols), lines = b.col == 1 ? depth : width;
    const int64_t bytes = (b.col == 1 ? width : depth) * static_cast<int64_t>(sizeof(S)), stride = b.col == 1 ? b.row : b.col;
    for (int64_t line = lines * i / n; line < lines * (i + 1) / n; ++line) vishwamai::VISHWAMAI_ISA::prefetch(from + line * stride, bytes, 0, 1);
  }
};

// Beyond so much k, each stretch of it is summed up by itself: up to it one chain of float32 sums is within twice the
// error of torch's and XLA's, which are in blocks. Engines in registers always do so, for it costs them nothing.
constexpr int64_t kLongSum = 2048;

// C[m, columns] of a block, `stride` apart, (+)= the panels of A times the panels of B, for `depth` of `k`. `ahead(i,
// n)` is called before each of the n small products, to fetch a part of what comes next.
struct Nothing {
  void operator()(int64_t, int64_t) const {}
};
template <class E, class Ahead = Nothing>
inline void multiply_panels(const typename E::Element* a, int64_t a_panel, const typename E::Element* b, int64_t b_panel, int64_t m, int64_t b_panels,
                            int64_t depth, typename E::Acc* c, int64_t stride, bool accumulate, const Ahead& ahead = {}, int64_t k = 0) {
  const int64_t lda = E::a_stride(depth), a_panels = ceil_div<int64_t>(m, kPanelRows);
  for (int64_t j = 0; j < b_panels; ++j) {
    for (int64_t row = 0, i = 0; row < m; row += kPanelRows, ++i) {
      ahead(j * a_panels + i, a_panels * b_panels);
      const int rows = static_cast<int>(least<int64_t>(kPanelRows, m - row));
      typename E::Acc* const to = c + row * stride + j * E::kCols;
      if constexpr (requires { E::add(a, lda, b, depth, rows, to, stride); }) {
        if (accumulate && k > kLongSum) {
          E::template add<true>(a + i * a_panel, lda, b + j * b_panel, depth, rows, to, stride);
          continue;
        }
      }
      E::template product<true>(a + i * a_panel, lda, b + j * b_panel, depth, rows, to, stride, accumulate);
    }
  }
}

template <class E, class A, class B>
struct Gemm {
  using T = typename E::Acc;
  using Packed = typename E::Element;
  static constexpr int64_t C = E::kCols;
  static constexpr int64_t kPackedBytes = 64 << 20;  // of packed A and of packed B that are held at a time, about

  A a;
  B b;
  int64_t groups, m, k;
  const Packed* ready = nullptr;  // B packed beforehand: all its panels, each for the whole of k; of one group
  int64_t rows = 0, cols = 0;     // of a task's block of C: multiples of 32 and of C * B::kUnit
  int64_t depth = kDepth<E>;      // k at a time

  int64_t columns() const { return b.columns(); }
  int64_t row_blocks() const { return ceil_div(m, rows); }
  int64_t col_blocks() const { return ceil_div(columns(), cols); }
  int64_t padded_k() const { return round_up<int64_t>(k, E::kStep); }
  int64_t b_panel() const { return E::b_elements(padded_k()); }  // elements of a panel of B

  void choose_blocks(const Threads& threads) {
    constexpr int64_t kUnitCols = C * B::kUnit, kLeast = round_up<int64_t>(64, kUnitCols);
    // What is in use at a time stays in the second cache level: three parts of a number want smaller blocks.
    const bool thick = E::b_elements(32) * static_cast<int64_t>(sizeof(Packed)) > 32 * C * 4 && m > 512;
    rows = least<int64_t>(round_up<int64_t>(m, kPanelRows), thick ? 256 : 512);
    // Where one block is all of the rows, the time goes into reading B: wide blocks read it in long runs, unless these
    // lie along k. For tiles and
    // a large B that is worth sums of 2 MiB: otherwise B goes to memory and back in panels.
    const bool one_block = m <= rows || (E::kStep >= 32 && !thick && m <= 1024 && k >= 2048);
    int64_t wide = thick ? 384 : 256;
    bool long_runs = false;
    if constexpr (requires { b.along_k(); }) long_runs = E::kStep == 1 && b.along_k();
    if (rows <= 64 && !long_runs) wide = 2048, depth = round_up<int64_t>(kDepth<E> / 4, E::kStep);
    else if (rows > 64 && one_block && columns() > 1024) rows = round_up<int64_t>(m, kPanelRows), wide = 512, depth = round_up<int64_t>(kDepth<E> / 2, E::kStep);
    cols = least<int64_t>(round_up<int64_t>(columns(), kUnitCols), round_up<int64_t>(wide, kUnitCols));
    while (groups * row_blocks() * col_blocks() < 2 * threads.count && (rows > 64 || cols > kLeast)) {
      if ((cols >= rows && cols > kLeast) || rows <= 64) cols = round_up<int64_t>(cols / 2, kUnitCols);
      else rows = round_up<int64_t>(rows / 2, kPanelRows);
    }
  }

  // finish(group, row, column, rows, columns, block, stride) is called once for every block, on any thread.
  template <class Finish>
  void run(const Threads& threads, const Finish& finish) const {
    constexpr int64_t kElement = sizeof(Packed);
    const int64_t blocks_down = row_blocks(), blocks_across = col_blocks(), panels_across = cols / C;
    // blocks under one B
    const int64_t b_groups = b.shared() ? 1 : groups, down = groups / greatest<int64_t>(1, b_groups) * blocks_down;
    const int64_t stretches = ceil_div<int64_t>(k, depth), a_panel = E::a_elements(least(depth, padded_k()));
    const int64_t a_block = rows / kPanelRows * stretches * a_panel, b_block = panels_across * b_panel();
    // a task packs for itself what no other needs
    const bool pack_a = blocks_across > 1, pack_b = ready == nullptr && down > 1;
    // Waves: so many groups of B, blocks of columns in them and blocks of rows under these are packed at a time.
    const auto fitting = [](int64_t count, int64_t bytes) { return least(count, greatest<int64_t>(1, kPackedBytes / greatest<int64_t>(1, bytes))); };
    const int64_t b_wave = pack_b ? fitting(b_groups, blocks_across * b_block * kElement) : b_groups;
    const int64_t across_wave = pack_b && b_wave == 1 ? fitting(blocks_across, b_block * kElement) : blocks_across;
    const int64_t down_wave = pack_a ? fitting(b_wave * down, a_block * kElement) : b_wave * down;
    Scratch scratch(Scratch::size<Packed>(pack_a ? down_wave * a_block : 0) + Scratch::size<Packed>(pack_b ? b_wave * across_wave * b_block : 0));
    Packed* const packed_a = scratch.take<Packed>(pack_a ? down_wave * a_block : 0);
    Packed* const packed_b = scratch.take<Packed>(pack_b ? b_wave * across_wave * b_block : 0);
    for (int64_t g0 = 0; g0 < b_groups; g0 += b_wave) {
      const int64_t group_count = least(b_wave, b_groups - g0);
      for (int64_t x0 = 0; x0 < blocks_across; x0 += across_wave) {
        const int64_t across = least(across_wave, blocks_across - x0);
        const int64_t first_panel = x0 * panels_across, panels = least(across * panels_across, ceil_div(columns(), C) - first_panel);
        for (int64_t y0 = 0; y0 < group_count * down; y0 += down_wave) {
          const int64_t high = least(down_wave, group_count * down - y0);
          const int64_t run = greatest<int64_t>(4, least<int64_t>(64, ceil_div<int64_t>(group_count * panels * stretches, 4 * threads.count)));
          const int64_t runs = ceil_div(panels, run), b_tasks = pack_b && y0 == 0 ? group_count * runs * stretches : 0;
          constexpr int64_t kStretches = 4;  // that one task packs of a panel of A
          const int64_t pieces = ceil_div(stretches, kStretches), a_panels = rows / kPanelRows, a_tasks = pack_a ? high * a_panels * pieces : 0;
          // Each thread begins with neighbouring indices, of which as large a part packs A as of all: it packs the rows
          // that it will multiply, and finds them in its own cache. What another core has packed takes a quarter longer
          // to multiply.
          const int64_t tasks = a_tasks + b_tasks;
          if (tasks > 0) {
            auto pack = [&](int64_t index) {
              int64_t i = index * a_tasks / tasks;  // that pack A come before this one
              if ((index + 1) * a_tasks / tasks == i) {
                i = index - i;
                const int64_t group = i / (runs * stretches), panel = i / stretches % runs * run, k0 = i % stretches * depth;
                b.pack(g0 + group, k0, least(depth, k - k0), first_panel + panel, least(run, panels - panel),
                       packed_b + (group * across_wave * panels_across + panel) * b_panel() + E::b_elements(k0), b_panel());
                return;
              }
              const int64_t y = i / (a_panels * pieces), panel = i / pieces % a_panels, piece = i % pieces * kStretches;
              const int64_t of_all = g0 * down + y0 + y, group = of_all / blocks_down, row = of_all % blocks_down * rows + panel * kPanelRows;
              if (row >= m) return;
              for (int64_t s = piece; s < least(piece + kStretches, stretches); ++s) {
                a.pack(group, row / kPanelRows, s * depth, least(depth, k - s * depth), packed_a + y * a_block + (s * a_panels + panel) * a_panel);
              }
            };
            parallel_for(threads, tasks, pack, Share::runs);
          }
          auto multiply = [&](int64_t i) {
            typename E::Scope scope;
            (void)scope;
            const int64_t y = i / across, x = x0 + i % across, index = g0 * down + y0 + y, group = index / blocks_down;
            const int64_t of_wave = b.shared() ? 0 : group - g0;
            const Packed* b_ready = ready    ? ready + x * b_block
                                    : pack_b ? packed_b + (of_wave * across_wave + x - x0) * b_block
                                             : nullptr;
            block(group, index % blocks_down * rows, x * cols, pack_a ? packed_a + y * a_block : nullptr, b_ready, finish);
          };
          parallel_for(threads, high * across, multiply, Share::runs);
        }
      }
    }
  }

  // The block of C at (row0, col0); `a_ready` and `b_ready` are its panels, or null to pack them here.
  template <class Finish>
  void block(int64_t group, int64_t row0, int64_t col0, const Packed* a_ready, const Packed* b_ready, const Finish& finish) const {
    const int64_t height = least(rows, m - row0), width = least(cols, columns() - col0), deepest = least(depth, padded_k());
    const int64_t a_panels = ceil_div<int64_t>(height, kPanelRows), b_panels = ceil_div<int64_t>(width, C), stride = b_panels * C + 16;
    const int64_t a_panel = E::a_elements(deepest), own_a = a_ready ? 0 : a_panels * a_panel, own_b = b_ready ? 0 : b_panels * E::b_elements(deepest);
    Scratch scratch(Scratch::size<Packed>(own_a) + Scratch::size<Packed>(own_b) + Scratch::size<T>(a_panels * kPanelRows * stride));
    Packed* const packed_a = scratch.take<Packed>(own_a);
    Packed* const packed_b = scratch.take<Packed>(own_b);
    T* const c = scratch.take<T>(a_panels * kPanelRows * stride);
    if (k == 0) memset(c, 0, sizeof(T) * static_cast<size_t>(a_panels * kPanelRows * stride));
    for (int64_t k0 = 0; k0 < k; k0 += depth) {
      // this stretch and the next
      const int64_t kn = least(depth, k - k0), then = greatest<int64_t>(0, least(depth, k - k0 - depth));
      if (own_a) {
        for (int64_t i = 0; i < a_panels; ++i) a.pack(group, row0 / kPanelRows + i, k0, kn, packed_a + i * a_panel);
      }
      if (own_b) b.pack(group, k0, kn, col0 / C, b_panels, packed_b, E::b_elements(deepest));
      const Packed* const a_now = own_a ? packed_a : a_ready + k0 / depth * (rows / kPanelRows) * a_panel;
      const Packed* const b_now = own_b ? packed_b : b_ready + E::b_elements(k0);
      // while this stretch is multiplied, the next one comes from memory
      const auto ahead = [&](int64_t i, int64_t n) {
        if (then == 0) return;
        if constexpr (requires { b.prefetch(group, k0, then, col0, b_panels, i, n); }) {
          if (own_b) b.prefetch(group, k0 + depth, then, col0 / C, b_panels, i, n);
        }
        if (!own_b) prefetch(b_now + i / a_panels * b_panel() + E::b_elements(depth), E::b_elements(then) * static_cast<int64_t>(sizeof(Packed)), i % a_panels, a_panels);
        if (!own_a) prefetch(a_now + rows / kPanelRows * a_panel, a_panels * a_panel * static_cast<int64_t>(sizeof(Packed)), i, n);
      };
      multiply_panels<E>(a_now, a_panel, b_now, own_b ? E::b_elements(deepest) : b_panel(), height, b_panels, kn, c, stride, k0 > 0, ahead, k);
    }
    finish(group, row0, col0, height, width, static_cast<const T*>(c), stride);
  }
};

template <class E, class A, class B>
Gemm<E, A, B> make_gemm(const A& a, const B& b, int64_t groups, int64_t m, int64_t k) {
  return Gemm<E, A, B>{a, b, groups, m, k};
}

}  // namespace vishwamai::VISHWAMAI_ISA
