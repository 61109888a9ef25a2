// The grouped matrix product and its gradients: core/cpp/gemm.h on each group.
//
// Threads share out the groups; a group that is a large part of all rows is worked on by all of them, before the
// others.
#include "cpu_grouped.h"
#include "vishwamai/core/cpp/gemm.h"
#include "vishwamai/core/cpp/splits.h"

namespace vishwamai::VISHWAMAI_ISA {
namespace {

// Calls body(batch, group, first row, rows, threads) for every group with rows; with `empty` for those without, too.
template <class Body>
void for_groups(const GroupedArgs& a, const Threads& threads, bool empty, const Body& body) {
  struct Part {
    int64_t batch, group, row, rows;
  };
  const int64_t count = a.batch * a.groups;
  Scratch scratch(Scratch::size<Part>(static_cast<size_t>(count)));
  Part* const parts = scratch.take<Part>(static_cast<size_t>(count));
  int64_t small = 0;
  for (int64_t b = 0; b < a.batch; ++b) {
    int64_t row = 0;
    for (int64_t g = 0; g < a.groups; ++g) {
      const int64_t wanted = a.sizes[b * a.sizes_batch + g], rows = least(greatest<int64_t>(0, wanted), a.m - row);
      const Part part{b, g, row, rows};
      row += rows;
      if (rows == 0 && !empty) continue;
      if (threads.count > 1 && rows * threads.count * 2 > a.batch * a.m) body(part.batch, part.group, part.row, part.rows, threads);
      else parts[small++] = part;
    }
  }
  parallel_for(threads, small, [&](int64_t i) { body(parts[i].batch, parts[i].group, parts[i].row, parts[i].rows, Threads{}); });
}

template <class R, class T>
VISHWAMAI_INLINE void write_run(R* out, const T* z, int64_t n) {
  for (int64_t i = 0; i < n; i += lanes<T>) store(out + i, load(z + i), static_cast<int>(least<int64_t>(lanes<T>, n - i)));
}
// One product A [m, k] B [k, n] into `out` [m, n].
template <class S, class E, class R>
void one(const Matrix<S>& left, const Matrix<S>& right, int64_t m, int64_t k, int64_t n, R* out, const Threads& threads) {
  auto gemm = make_gemm<E>(RowPanels<S, E>{left, m}, ColumnPanels<S, E>{right, n}, 1, m, k);
  gemm.choose_blocks(threads);
  gemm.run(threads, [&](int64_t, int64_t row, int64_t col, int64_t rows, int64_t cols, const typename E::Acc* c, int64_t stride) {
    for (int64_t r = 0; r < rows; ++r) write_run(out + (row + r) * n + col, c + r * stride, cols);
  });
}

template <class S, class E, class R>
void rows(const GroupedArgs& a, const Threads& threads) {
  R* const out = static_cast<R*>(a.out);
  for (int64_t b = 0; b < a.batch; ++b) {  // rows without a group
    int64_t used = 0;
    for (int64_t g = 0; g < a.groups; ++g) used = least(a.m, used + greatest<int64_t>(0, a.sizes[b * a.sizes_batch + g]));
    memset(static_cast<void*>(out + (b * a.m + used) * a.n), 0, sizeof(R) * static_cast<size_t>((a.m - used) * a.n));
  }
  for_groups(a, threads, false, [&](int64_t b, int64_t g, int64_t row, int64_t count, const Threads& mine) {
    const S* right = static_cast<const S*>(a.rhs) + b * a.rhs_batch + g * a.k * a.n;
    one<S, E, R>({static_cast<const S*>(a.lhs) + (b * a.m + row) * a.k, 0, a.k, 1}, {right, 0, a.transposed ? 1 : a.n, a.transposed ? a.k : 1}, count, a.k, a.n,
                 out + (b * a.m + row) * a.n, mine);
  });
}

template <class S, class E, class R>
void weights(const GroupedArgs& a, const Threads& threads) {
  for_groups(a, threads, true, [&](int64_t b, int64_t g, int64_t row, int64_t count, const Threads& mine) {
    one<S, E, R>({static_cast<const S*>(a.lhs) + (b * a.m + row) * a.k, 0, 1, a.k}, {static_cast<const S*>(a.rhs) + (b * a.m + row) * a.n, 0, a.n, 1}, a.k, count, a.n,
                 static_cast<R*>(a.out) + (b * a.groups + g) * a.k * a.n, mine);
  });
}

template <bool kWeights, class S, class E>
void run(const GroupedArgs& a, const Threads& threads) {
  if constexpr (std::is_same_v<S, double>) return kWeights ? weights<S, E, double>(a, threads) : rows<S, E, double>(a, threads);
  else if (a.result == Storage::bf16) return kWeights ? weights<S, E, bf16>(a, threads) : rows<S, E, bf16>(a, threads);
  else return kWeights ? weights<S, E, float>(a, threads) : rows<S, E, float>(a, threads);
}

template <bool kWeights>
void dispatch(const GroupedArgs& a, const Threads& all) {
  Threads threads = all;
  // a hand-over costs more than the products
  if (a.batch * a.m * a.n * greatest<int64_t>(1, a.k) < 64 * 64 * 64) threads.count = 1;
  if (a.storage == Storage::f64) {
    return kWeights ? VISHWAMAI_FLOAT64_OR(grouped_weights(a, threads), run<true, double, FmaEngine<double>>(a, threads))
                    : VISHWAMAI_FLOAT64_OR(grouped_rows(a, threads), run<false, double, FmaEngine<double>>(a, threads));
  }
  if (a.storage == Storage::bf16) return run<kWeights, bf16, HalfEngine>(a, threads);
#if defined(__AMX_BF16__)
  // A look at matrices of which few rows make use would cost as much as the product.
  if (a.batch * a.m > 16 * a.groups) {
    const int64_t matrices = a.rhs_batch || kWeights ? a.batch : 1;
    const float left = largest(static_cast<const float*>(a.lhs), a.batch * a.m * a.k, threads);
    const float right = largest(static_cast<const float*>(a.rhs), matrices * (kWeights ? a.m : a.groups * a.k) * a.n, threads);
    if (splits_well(left, right)) return run<kWeights, float, AmxEngine<3>>(a, threads);
  }
#endif
  if constexpr (kWeights) VISHWAMAI_BASE_OR(grouped_weights(a, threads), run<true, float, FmaEngine<float>>(a, threads));
  else VISHWAMAI_BASE_OR(grouped_rows(a, threads), run<false, float, FmaEngine<float>>(a, threads));
}

}  // namespace

void grouped_rows(const GroupedArgs& a, const Threads& threads) { dispatch<false>(a, threads); }
void grouped_weights(const GroupedArgs& a, const Threads& threads) { dispatch<true>(a, threads); }

}  // namespace vishwamai::VISHWAMAI_ISA
