// Cross entropy of a linear layer on the blocks of core/cpp/gemm.h: a block of logits is reduced while it is in the
// cache.
//
// Forward, a block leaves the maximum, the sum of exponentials and the sum of each of its rows, and they are joined at
// the end in the order of the vocabulary (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018).
// Backward walks the vocabulary in stretches (Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models",
// 2025): the gradient of a stretch's logits, rounded like an operand, is held for all tokens, and both products with it
// follow at once.
// Where the cotangents are known up to a factor, `total` does both in one walk over the tokens (Hsu et al., "Liger
// Kernel", 2024): the logits of some tokens are held, and become their own gradient.
#include "cpu_loss.h"
#include "vishwamai/core/cpp/gemm.h"
#include "vishwamai/core/cpp/splits.h"

namespace vishwamai::VISHWAMAI_ISA {
namespace {

constexpr int64_t kStretchBytes = 32 << 20;  // of logits' gradients held at a time
constexpr int64_t kLogitsBytes = 64 << 20;   // of logits held at a time by `total`

template <class S, class E>
struct Loss {
  using T = typename E::Acc;
  using Packed = typename E::Element;
  static constexpr int64_t C = E::kCols;
  static constexpr int W = lanes<T>;
  static constexpr T kLowest = static_cast<T>(-__builtin_inff());

  const LossArgs& a;

  // Logits of the entries from `first` on, in place.
  VISHWAMAI_INLINE V<T> logit(const T* z, int64_t first, int64_t i, int count) const {
    V<T> x = load(z + i, count);
    if (a.bias) x += load(static_cast<const T*>(a.bias) + first + i, count);
    if (a.softcap != 0) x = tanh<T>(x / static_cast<T>(a.softcap)) * static_cast<T>(a.softcap);
    return x;
  }
  static int lanes_at(int64_t i, int64_t n) { return static_cast<int>(least<int64_t>(W, n - i)); }

  auto logits_gemm(const S* x, int64_t tokens, int64_t first_entry, int64_t entries, const Threads& threads) const {
    const RowPanels<S, E> rows{{x, 0, a.features, 1}, tokens};
    const ColumnPanels<S, E> weight{{static_cast<const S*>(a.weight) + first_entry * a.features, 0, 1, a.features}, entries};
    auto gemm = make_gemm<E>(rows, weight, 1, tokens, a.features);
    gemm.choose_blocks(threads);
    return gemm;
  }

  // What a block of entries leaves of a row.
  struct Part {
    T most, sum, total;
  };
  Part reduce(T* z, int64_t first, int64_t n) const {
    V<T> most = splat(kLowest), total = {}, sum = {};
    const bool plain = !a.bias && a.softcap == 0;
    for (int64_t i = 0; i < n; i += W) {
      const int count = lanes_at(i, n);
      V<T> x = logit(z, first, i, count);
      if (count < W) x = iota<T>() < static_cast<T>(count) ? x : splat(kLowest);
      if (!plain || count < W) store(z + i, x);  // a row of a block has room for whole vectors
      most = maximum(most, x);
    }
    const T m = max_lanes<T>(most), shift = m == kLowest ? T(0) : m;
    for (int64_t i = 0; i < n; i += W) sum += exp(load(z + i) - shift);
    if (a.logit_sum) {
      for (int64_t i = 0; i < n; i += W) total += load(z + i, lanes_at(i, n));
    }
    return {m, sum_lanes<T>(sum), sum_lanes<T>(total)};
  }

  void forward(const Threads& threads) const {
    const auto gemm = logits_gemm(static_cast<const S*>(a.x), a.tokens, 0, a.vocab, threads);
    const int64_t blocks = gemm.col_blocks();
    Scratch scratch(Scratch::size<Part>(blocks * a.tokens));
    Part* parts = scratch.take<Part>(blocks * a.tokens);
    T *logsumexp = static_cast<T*>(a.logsumexp), *at_label = static_cast<T*>(a.label_logit), *total = static_cast<T*>(a.logit_sum);
    for (int64_t t = 0; t < a.tokens; ++t) at_label[t] = 0;
    gemm.run(threads, [&](int64_t, int64_t row, int64_t col, int64_t rows, int64_t cols, const T* c, int64_t stride) {
      for (int64_t r = 0; r < rows; ++r) {
        T* z = const_cast<T*>(c) + r * stride;  // the block is ours until this returns
        parts[col / gemm.cols * a.tokens + row + r] = reduce(z, col, cols);
        const int64_t label = a.labels[row + r] - col;
        if (label >= 0 && label < cols) at_label[row + r] = z[label];
      }
    });
    constexpr int64_t kRun = 256;
    parallel_for(threads, ceil_div(a.tokens, kRun), [&](int64_t i) {
      for (int64_t t = i * kRun; t < least(a.tokens, (i + 1) * kRun); ++t) {
        const Sums sums = joined(parts + t, blocks, a.tokens);
        logsumexp[t] = sums.logsumexp;
        if (total) total[t] = sums.total;
      }
    });
  }

  struct Sums {
    T logsumexp, total;
  };
  // Of a row, from what its blocks leave, `stride` apart.
  static Sums joined(const Part* parts, int64_t blocks, int64_t stride) {
    T most = kLowest, sum = 0, total = 0;
    for (int64_t b = 0; b < blocks; ++b) most = greatest(most, parts[b * stride].most);
    for (int64_t b = 0; b < blocks; ++b) {
      const Part& part = parts[b * stride];
      total += part.total;
      // A block whose entries all have -infinity adds nothing; a NaN goes through by its sum.
      sum += part.most == kLowest && part.sum == part.sum ? T(0) : part.sum * exp(splat(part.most - most))[0];
    }
    return {most + static_cast<T>(__builtin_log(sum)), total};
  }

  // A row's logsumexp, the cotangents of it, of its label's logit and of each logit, and its label.
  struct Row {
    T logsumexp, dlogsumexp, dlabel, each;
    int64_t label;
  };
  Row row_of(int64_t t) const {
    const auto at = [&](const void* rows) { return rows ? static_cast<const T*>(rows)[t] : T(0); };
    return {at(a.logsumexp), at(a.dlogsumexp), at(a.dlabel_logit), at(a.dlogit_sum), a.labels[t]};
  }

  // The gradient of a row's logits before the cap, of the entries from `first` on: rounded to `out`, which may be z
  // itself, and as it is to `wide` unless that is null. z: products, or with `kFinal` logits.
  template <bool kFinal>
  void slope(const T* z, const Row& row, int64_t first, int64_t n, S* out, T* wide) const {
    const T shift = row.logsumexp == kLowest ? T(0) : row.logsumexp;
    const T inverse_cap = a.softcap != 0 ? static_cast<T>(1 / a.softcap) : T(0);
    const int64_t label = row.label - first;
    for (int64_t i = 0; i < n; i += W) {
      const int count = lanes_at(i, n);
      const V<T> x = kFinal ? load(z + i, count) : logit(z, first, i, count);
      V<T> d = exp(x - shift) * row.dlogsumexp + row.each;
      if (label >= i && label < i + count) d[label - i] += row.dlabel;
      if (inverse_cap != 0) d *= T(1) - (x * inverse_cap) * (x * inverse_cap);
      if (wide) store(wide + i, d, count);
      store(out + i, d, count);
    }
  }

  // x as the right operand of every stretch's dW = dz^T x.
  ColumnPanels<S, E> pack_columns(const S* x, int64_t tokens, Packed* out, int64_t panel, const Threads& threads) const {
    const ColumnPanels<S, E> columns{{x, 0, a.features, 1}, a.features};
    const int64_t steps = ceil_div(tokens, kDepth<E>);
    parallel_for(threads, ceil_div(a.features, C) * steps, [&](int64_t i) {
      const int64_t k0 = i % steps * kDepth<E>;
      columns.pack(0, k0, least(kDepth<E>, tokens - k0), i / steps, 1, out + i / steps * panel + E::b_elements(k0), panel);
    });
    return columns;
  }

  void backward(const Threads& threads) const {
    const int64_t fitting = kStretchBytes / greatest<int64_t>(1, a.tokens * static_cast<int64_t>(sizeof(S)));
    const int64_t stretch = least(round_up<int64_t>(a.vocab, C), round_up<int64_t>(least<int64_t>(greatest<int64_t>(fitting, 512), 8192), C));
    // no multiple of a page: columns are read too
    const int64_t stride = stretch + 64 / static_cast<int64_t>(sizeof(S));
    const int64_t padded = round_up<int64_t>(a.tokens, E::kStep), x_panels = ceil_div(a.features, C), x_panel = E::b_elements(padded);
    const int64_t row_blocks = ceil_div<int64_t>(a.tokens, kPanelRows);  // at most
    const S *x = static_cast<const S*>(a.x), *weight = static_cast<const S*>(a.weight);
    Scratch scratch(Scratch::size<S>(a.tokens * stride) + Scratch::size<T>(a.tokens * a.features) + Scratch::size<Packed>(x_panels * x_panel) +
                    Scratch::size<T>(a.dbias ? row_blocks * stretch : 0));
    S* dz = scratch.take<S>(a.tokens * stride);
    T* dx = scratch.take<T>(a.tokens * a.features);
    Packed* packed_x = scratch.take<Packed>(x_panels * x_panel);
    T* bias_parts = scratch.take<T>(a.dbias ? row_blocks * stretch : 0);

    const auto x_columns = pack_columns(x, a.tokens, packed_x, x_panel, threads);

    for (int64_t v0 = 0; v0 < a.vocab; v0 += stretch) {
      const int64_t entries = least(stretch, a.vocab - v0);
      const auto logits = logits_gemm(x, a.tokens, v0, entries, threads);
      logits.run(threads, [&](int64_t, int64_t row, int64_t col, int64_t rows, int64_t cols, const T* c, int64_t c_stride) {
        T* z = const_cast<T*>(c);  // the block is ours until this returns
        for (int64_t r = 0; r < rows; ++r) {
          T* const from = z + r * c_stride;
          slope<false>(from, row_of(row + r), v0 + col, cols, dz + (row + r) * stride + col, a.dbias ? from : nullptr);
        }
        if (!a.dbias) return;
        T* sums = bias_parts + row / logits.rows * stretch + col;
        for (int64_t i = 0; i < cols; i += W) {
          const int count = lanes_at(i, cols);
          V<T> sum = {};
          for (int64_t r = 0; r < rows; ++r) sum += load(z + r * c_stride + i, count);
          store(sums + i, sum, count);
        }
      });
      if (a.dbias) {
        for (int64_t v = 0; v < entries; ++v) {
          T sum = 0;
          for (int64_t b = 0; b < logits.row_blocks(); ++b) sum += bias_parts[b * stretch + v];
          static_cast<T*>(a.dbias)[v0 + v] = sum;
        }
      }
      auto dweight = make_gemm<E>(RowPanels<S, E>{{dz, 0, 1, stride}, entries}, x_columns, 1, entries, a.tokens);
      dweight.ready = packed_x;
      dweight.choose_blocks(threads);
      dweight.run(threads, [&](int64_t, int64_t row, int64_t col, int64_t rows, int64_t cols, const T* c, int64_t c_stride) {
        for (int64_t r = 0; r < rows; ++r) {
          S* out = static_cast<S*>(a.dweight) + (v0 + row + r) * a.features + col;
          for (int64_t i = 0; i < cols; i += W) store(out + i, load(c + r * c_stride + i), lanes_at(i, cols));
        }
      });
      const ColumnPanels<S, E> some_entries{{weight + v0 * a.features, 0, a.features, 1}, a.features};
      auto dinput = make_gemm<E>(RowPanels<S, E>{{dz, 0, stride, 1}, a.tokens}, some_entries, 1, a.tokens, entries);
      dinput.choose_blocks(threads);
      const bool first = v0 == 0, last = v0 + stretch >= a.vocab;
      dinput.run(threads, [&](int64_t, int64_t row, int64_t col, int64_t rows, int64_t cols, const T* c, int64_t c_stride) {
        for (int64_t r = 0; r < rows; ++r) {
          T* total = dx + (row + r) * a.features + col;
          S* out = static_cast<S*>(a.dx) + (row + r) * a.features + col;
          for (int64_t i = 0; i < cols; i += W) {
            const int count = lanes_at(i, cols);
            V<T> sum = load(c + r * c_stride + i);
            if (!first) sum += load(total + i, count);
            if (last) store(out + i, sum, count);
            else store(total + i, sum, count);
          }
        }
      });
    }
  }

  // The sum of shares * losses, and its gradients.
  void total(const Threads& threads) const {
    const S *const x = static_cast<const S*>(a.x), *const weight = static_cast<const S*>(a.weight);
    const T* const shares = static_cast<const T*>(a.shares);
    T *const dx = static_cast<T*>(a.dx), *const dweight = static_cast<T*>(a.dweight), *const dbias = static_cast<T*>(a.dbias);
    const int64_t features = a.features;
    Scratch all_tokens(Scratch::size<int64_t>(a.tokens) + Scratch::size<double>(a.tokens));
    int64_t *const live = all_tokens.take<int64_t>(a.tokens), count = 0;
    double *const losses = all_tokens.take<double>(a.tokens);
    for (int64_t t = 0; t < a.tokens; ++t) {
      if (shares[t] != 0) live[count++] = t;  // one that is not a number, too
      else memset(dx + t * features, 0, sizeof(T) * static_cast<size_t>(features));
    }
    if (count == 0) {
      if (dweight) memset(dweight, 0, sizeof(T) * static_cast<size_t>(a.vocab * features));
      if (dbias) memset(dbias, 0, sizeof(T) * static_cast<size_t>(a.vocab));
    }
    const int64_t row_bytes = a.vocab * static_cast<int64_t>(sizeof(T)), fitting = kLogitsBytes / row_bytes / kPanelRows * kPanelRows;
    const int64_t most = greatest<int64_t>(1, least(count, greatest<int64_t>(128, fitting)));  // tokens at a time
    const int64_t stretch = round_up<int64_t>(least<int64_t>(a.vocab, 8192), C), panels = stretch / C, stretches = ceil_div(a.vocab, stretch);
    const int64_t stride = round_up<int64_t>(a.vocab, C) + 64 / static_cast<int64_t>(sizeof(T));  // no multiple of a page
    constexpr int64_t kNarrow = sizeof(T) / sizeof(S), kRun = 16;
    const int64_t runs = ceil_div(most, kRun), x_panel = E::b_elements(round_up<int64_t>(most, E::kStep)), x_panels = ceil_div(features, C);
    const bool gathers = count < a.tokens;
    Scratch scratch(Scratch::size<T>(most * stride) + Scratch::size<Part>(stretches * panels * most) + Scratch::size<Packed>(x_panels * x_panel) +
                    Scratch::size<S>(gathers ? most * features : 0) + Scratch::size<T>(dbias ? 2 * runs * a.vocab : 0));
    T* const logits = scratch.take<T>(most * stride);
    Part* const parts = scratch.take<Part>(stretches * panels * most);
    Packed* const packed_x = scratch.take<Packed>(x_panels * x_panel);
    S* const gathered = scratch.take<S>(gathers ? most * features : 0);
    T* const bias_sums = scratch.take<T>(dbias ? 2 * runs * a.vocab : 0);

    for (int64_t t0 = 0; t0 < count; t0 += most) {
      const int64_t tokens = least(most, count - t0);
      const S* rows_of_x = x + t0 * features;
      if (gathers) {
        for (int64_t r = 0; r < tokens; ++r) memcpy(gathered + r * features, x + live[t0 + r] * features, sizeof(S) * static_cast<size_t>(features));
        rows_of_x = gathered;
      }
      for (int64_t i = 0; i < stretches * panels * tokens; ++i) parts[i] = {kLowest, 0, 0};
      for (int64_t v0 = 0; v0 < a.vocab; v0 += stretch) {
        const auto gemm = logits_gemm(rows_of_x, tokens, v0, least(stretch, a.vocab - v0), threads);
        gemm.run(threads, [&](int64_t, int64_t row, int64_t col, int64_t rows, int64_t cols, const T* c, int64_t c_stride) {
          Part* const of_block = parts + (v0 / C + col / gemm.cols) * tokens + row;
          for (int64_t r = 0; r < rows; ++r) {
            T* const z = const_cast<T*>(c) + r * c_stride;  // the block is ours until this returns
            of_block[r] = reduce(z, v0 + col, cols);
            memcpy(logits + (row + r) * stride + v0 + col, z, sizeof(T) * static_cast<size_t>(cols));
          }
        });
      }
      parallel_for(threads, ceil_div(tokens, kRun), [&](int64_t run) {
        T *const sums = bias_sums + 2 * run * a.vocab, *const wide = dbias ? sums + a.vocab : nullptr;
        if (dbias) memset(sums, 0, sizeof(T) * static_cast<size_t>(a.vocab));
        for (int64_t r = run * kRun; r < least(tokens, (run + 1) * kRun); ++r) {
          T* const z = logits + r * stride;
          const int64_t t = live[t0 + r], label = a.labels[t];
          const T share = shares[t], smoothing = static_cast<T>(a.smoothing), z_loss = static_cast<T>(a.z_loss);
          const Sums of_row = joined(parts + r, stretches * panels, tokens);
          const T lse = of_row.logsumexp, at_label = label >= 0 && label < a.vocab ? z[label] : T(0);
          T loss = lse - (1 - smoothing) * at_label;
          if (smoothing != 0) loss -= smoothing / static_cast<T>(a.vocab) * of_row.total;
          if (z_loss != 0) loss += z_loss * lse * lse;
          losses[t0 + r] = loss * share;
          const T dlse = z_loss != 0 ? share * (1 + 2 * z_loss * lse) : share;
          const Row row{lse, dlse, -(1 - smoothing) * share, -smoothing / static_cast<T>(a.vocab) * share, label};
          slope<true>(z, row, 0, a.vocab, reinterpret_cast<S*>(z), wide);
          if (!dbias) continue;
          for (int64_t v = 0; v < a.vocab; ++v) sums[v] += wide[v];
        }
      });
      if (dbias) {
        for (int64_t v = 0; v < a.vocab; ++v) {
          T sum = t0 == 0 ? T(0) : dbias[v];
          for (int64_t run = 0; run < ceil_div(tokens, kRun); ++run) sum += bias_sums[2 * run * a.vocab + v];
          dbias[v] = sum;
        }
      }
      const S* const dz = reinterpret_cast<const S*>(logits);  // every row begins where its logits did
      const auto x_columns = pack_columns(rows_of_x, tokens, packed_x, E::b_elements(round_up<int64_t>(tokens, E::kStep)), threads);
      for (int64_t v0 = 0; v0 < a.vocab; v0 += stretch) {
        const int64_t entries = least(stretch, a.vocab - v0);
        if (dweight) {
          auto of_weight = make_gemm<E>(RowPanels<S, E>{{dz + v0, 0, 1, kNarrow * stride}, entries}, x_columns, 1, entries, tokens);
          of_weight.ready = packed_x;
          of_weight.choose_blocks(threads);
          of_weight.run(threads, [&](int64_t, int64_t row, int64_t col, int64_t rows, int64_t cols, const T* c, int64_t c_stride) {
            for (int64_t r = 0; r < rows; ++r) add_to(dweight + (v0 + row + r) * features + col, c + r * c_stride, cols, t0 == 0);
          });
        }
        const ColumnPanels<S, E> some_entries{{weight + v0 * features, 0, features, 1}, features};
        auto of_x = make_gemm<E>(RowPanels<S, E>{{dz + v0, 0, kNarrow * stride, 1}, tokens}, some_entries, 1, tokens, entries);
        of_x.choose_blocks(threads);
        of_x.run(threads, [&](int64_t, int64_t row, int64_t col, int64_t rows, int64_t cols, const T* c, int64_t c_stride) {
          for (int64_t r = 0; r < rows; ++r) add_to(dx + live[t0 + row + r] * features + col, c + r * c_stride, cols, v0 == 0);
        });
      }
    }
    double sum = 0;
    for (int64_t r = 0; r < count; ++r) sum += losses[r];
    *static_cast<T*>(a.loss) = static_cast<T>(sum);
  }

  static void add_to(T* to, const T* from, int64_t n, bool first) {
    for (int64_t i = 0; i < n; i += W) {
      const int count = lanes_at(i, n);
      store(to + i, first ? load(from + i, count) : load(to + i, count) + load(from + i, count), count);
    }
  }
};

#if defined(__AMX_BF16__)
bool finite_input(const LossArgs& a, const Threads& threads) {
  return a.tokens > 16 && splits_well(largest(static_cast<const float*>(a.x), a.tokens * a.features, threads),
                                      largest(static_cast<const float*>(a.weight), a.vocab * a.features, threads));
}
// The logits' gradients are as large as the losses' are, and must not underflow in their lower parts.
bool fair_slopes(const LossArgs& a, const Threads& threads) {
  const auto of = [&](const void* rows) { return rows ? largest(static_cast<const float*>(rows), a.tokens, threads) : 0.0f; };
  const float most = greater_or_nan(greater_or_nan(of(a.dlogsumexp), of(a.shares)), greater_or_nan(of(a.dlabel_logit), of(a.dlogit_sum)));
  return most < 1e20f && most > 1e-20f;
}
#endif

Threads fitting(const LossArgs& a, const Threads& all) {
  Threads threads = all;
  if (a.tokens * a.vocab * a.features < 64 * 64 * 64) threads.count = 1;  // a hand-over costs more than the product
  return threads;
}

}  // namespace

void loss_forward(const LossArgs& a, const Threads& all) {
  const Threads threads = fitting(a, all);
  if (a.storage == Storage::f64) return VISHWAMAI_FLOAT64_OR(loss_forward(a, threads), Loss<double, FmaEngine<double>>{a}.forward(threads));
  if (a.storage == Storage::bf16) return Loss<bf16, HalfEngine>{a}.forward(threads);
#if defined(__AMX_BF16__)
  if (finite_input(a, threads)) {
    return a.parts == 2 ? Loss<float, AmxEngine<2>>{a}.forward(threads) : Loss<float, AmxEngine<3>>{a}.forward(threads);
  }
#endif
  VISHWAMAI_BASE_OR(loss_forward(a, threads), Loss<float, FmaEngine<float>>{a}.forward(threads));
}

void loss_backward(const LossArgs& a, const Threads& all) {
  const Threads threads = fitting(a, all);
  if (a.storage == Storage::f64) return VISHWAMAI_FLOAT64_OR(loss_backward(a, threads), Loss<double, FmaEngine<double>>{a}.backward(threads));
  if (a.storage == Storage::bf16) return Loss<bf16, HalfEngine>{a}.backward(threads);
#if defined(__AMX_BF16__)
  if (finite_input(a, threads) && fair_slopes(a, threads)) {
    return a.parts == 2 ? Loss<float, AmxEngine<2>>{a}.backward(threads) : Loss<float, AmxEngine<3>>{a}.backward(threads);
  }
#endif
  VISHWAMAI_BASE_OR(loss_backward(a, threads), Loss<float, FmaEngine<float>>{a}.backward(threads));
}

void loss_total(const LossArgs& a, const Threads& all) {
  const Threads threads = fitting(a, all);
  if (a.storage == Storage::f64) return VISHWAMAI_FLOAT64_OR(loss_total(a, threads), Loss<double, FmaEngine<double>>{a}.total(threads));
  if (a.storage == Storage::bf16) return Loss<bf16, HalfEngine>{a}.total(threads);
#if defined(__AMX_BF16__)
  if (finite_input(a, threads) && fair_slopes(a, threads)) {
    return a.parts == 2 ? Loss<float, AmxEngine<2>>{a}.total(threads) : Loss<float, AmxEngine<3>>{a}.total(threads);
  }
#endif
  VISHWAMAI_BASE_OR(loss_total(a, threads), Loss<float, FmaEngine<float>>{a}.total(threads));
}

}  // namespace vishwamai::VISHWAMAI_ISA
