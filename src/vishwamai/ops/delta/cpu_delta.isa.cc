// The recurrences with a matrix state, token by token. The columns of a state do not depend on one another, so a block
// of them stays in the first cache while many tokens pass, and memory is read and written once. Each token takes two
// passes over the block: one for the correction, and one that decays, writes and reads. They are as many multiply-adds
// as the three products of a chunk with the state, without those within the chunk.
#include "cpu_delta.h"

#include "vishwamai/core/cpp/rows.h"

namespace vishwamai::VISHWAMAI_ISA {

namespace {

constexpr int64_t kTokens = 16;  // whose vectors are widened at once
constexpr int kWidth = 4;        // vectors of a block of columns

// Tokens of one head, widened: rows of `key_dim`, and of `value_dim` for value and y.
template <class T>
struct Tokens {
  int64_t count, key_dim, value_dim;
  const T *key, *query;
  const T* factor;        // of the state, [count, key_dim] or [count]; null: 1
  const T* weighted_key;  // factor * key, [count, key_dim]; null: the factor belongs to the sum
  const T* beta;          // null: 1
  const bool* begins;     // the state before the token is 0
  const T* value;
  T* y;
};

template <class T, int N>
VISHWAMAI_INLINE void clear(T* state, int64_t rows) {
  for (int64_t i = 0; i < rows * N; ++i) store(state + i * lanes<T>, V<T>{});
}

// Block of N vectors of columns, from column `column` on: from `from` (null: zeros), whose rows are `from_step` apart,
// to `to`; `state` has room for it. `from` and `to` may be `state`, or the same memory.
template <class T, bool kChannels, bool kCorrection, int N>
__attribute__((noinline)) void advance(const Tokens<T>& a, int64_t column, const T* from, int64_t from_step, T* to, int64_t to_step,
                                       T* state) {
  constexpr int W = lanes<T>;
  constexpr int64_t kStep = N * W;
  const int64_t rows = a.key_dim;
  for (int64_t t = 0; t < a.count; ++t) {
    const T* in = t == 0 ? from : state;
    int64_t in_step = t == 0 ? from_step : kStep;
    if (in == nullptr || a.begins[t]) {
      clear<T, N>(state, rows);
      in = state, in_step = kStep;
    }
    const T *key = a.key + t * rows, *query = a.query + t * rows;
    const T* factors = kChannels ? a.factor + t * rows : nullptr;
    const T factor = kChannels || a.factor == nullptr ? T(1) : a.factor[t];
    V<T> u[N];
    for (int j = 0; j < N; ++j) u[j] = load(a.value + t * a.value_dim + column + j * W);
    if constexpr (kCorrection) {
      const T* const weights = kChannels ? a.weighted_key + t * rows : key;
      V<T> even[N] = {}, odd[N] = {};
      int64_t k = 0;
      const auto pass = [&](auto copies) __attribute__((always_inline)) {
        const auto add = [&](V<T>* sum, int64_t k) __attribute__((always_inline)) {
          const V<T> weight = splat(weights[k]);
          for (int j = 0; j < N; ++j) {
            const V<T> s = load(in + k * in_step + j * W);
            if constexpr (decltype(copies)::value) store(state + k * kStep + j * W, s);
            sum[j] += weight * s;
          }
        };
        for (; k + 2 <= rows; k += 2) add(even, k), add(odd, k + 1);
        if (k < rows) add(even, k);
      };
      if (in == state) pass(std::false_type());
      else pass(std::true_type());
      in = state, in_step = kStep;
      const V<T> whole = splat(factor);
      for (int j = 0; j < N; ++j) u[j] -= whole * (even[j] + odd[j]);
    }
    if (a.beta != nullptr) {
      const V<T> beta = splat(a.beta[t]);
      for (int j = 0; j < N; ++j) u[j] *= beta;
    }
    const bool last = t + 1 == a.count;
    T* const out = last ? to : state;
    const int64_t out_step = last ? to_step : kStep;
    V<T> y[N] = {}, decay = splat(factor);
    for (int64_t k = 0; k < rows; ++k) {
      const V<T> written = splat(key[k]), read = splat(query[k]);
      if constexpr (kChannels) decay = splat(factors[k]);
      for (int j = 0; j < N; ++j) {
        const V<T> s = load(in + k * in_step + j * W) * decay + written * u[j];
        store(out + k * out_step + j * W, s);
        y[j] += read * s;
      }
    }
    for (int j = 0; j < N; ++j) store(a.y + t * a.value_dim + column + j * W, y[j]);
  }
}

// The same where the columns end within the block: by a copy of it.
template <class T, bool kChannels, bool kCorrection, int N>
void advance_ragged(const Tokens<T>& a, int64_t column, int64_t columns, const T* from, T* to, int64_t step, T* state) {
  constexpr int W = lanes<T>;
  if (columns >= N * W) return advance<T, kChannels, kCorrection, N>(a, column, from, step, to, step, state);
  for (int64_t k = 0; from != nullptr && k < a.key_dim; ++k)
    for (int j = 0; j < N; ++j)
      store(state + (k * N + j) * W, load(from + k * step + j * W, static_cast<int>(greatest<int64_t>(0, columns - j * W))));
  advance<T, kChannels, kCorrection, N>(a, column, from == nullptr ? nullptr : state, N * W, state, N * W, state);
  for (int64_t k = 0; k < a.key_dim; ++k)
    for (int j = 0; j < N && j * W < columns; ++j)
      store(to + k * step + j * W, load(state + (k * N + j) * W), static_cast<int>(columns - j * W));
}

template <class S, class T>
VISHWAMAI_INLINE void widened(const S* from, T* to, int64_t n) {
  for_vectors<T>(n, [&](int64_t i, auto count) __attribute__((always_inline)) { put(to + i, get(from + i, count), count); });
}

template <class S, bool kChannels, bool kCorrection, class T = compute_t<S>>
void run(const DeltaArgs& a, const Threads& threads) {
  constexpr int W = lanes<T>;
  constexpr int64_t kColumns = kWidth * W;
  const int64_t dim = a.key_dim, blocks = ceil_div(a.value_dim, kColumns), group = a.heads / a.key_heads;
  // A task: a head of a sequence; or some of its columns, where there are few heads for the threads.
  const int64_t heads = a.count * a.heads;
  const int64_t parts = threads.count <= 1 ? 1 : greatest<int64_t>(1, least(blocks, 2 * threads.count / greatest<int64_t>(1, heads)));
  const int64_t each = ceil_div(blocks, parts);
  parallel_for(threads, heads * parts, [&](int64_t task) {
    const DeltaSequence& sequence = a.sequences[task / (a.heads * parts)];
    const int64_t head = task / parts % a.heads, begin = task % parts * each * kColumns;
    const int64_t columns = least(a.value_dim - begin, each * kColumns);
    if (columns <= 0) return;
    const T* before = sequence.before == nullptr ? nullptr : static_cast<const T*>(sequence.before) + head * dim * a.value_dim + begin;
    T* after = sequence.after == nullptr ? nullptr : static_cast<T*>(sequence.after) + head * dim * a.value_dim + begin;
    const int64_t padded = round_up(columns, kColumns);
    const auto size = [](int64_t n) { return Scratch::size<T>(static_cast<size_t>(n)); };
    Scratch scratch(size(2 * kTokens * padded) + size(4 * kTokens * dim) + size(dim * kColumns) +
                    (after == nullptr ? size(dim * a.value_dim) : 0));
    T *const values = scratch.take<T>(static_cast<size_t>(2 * kTokens * padded)), *const ys = values + kTokens * padded;
    T *const keys = scratch.take<T>(static_cast<size_t>(4 * kTokens * dim)), *const queries = keys + kTokens * dim;
    T *const factors = queries + kTokens * dim, *const weighted = factors + kTokens * dim;
    T* const state = scratch.take<T>(static_cast<size_t>(dim * kColumns));
    if (after == nullptr) after = scratch.take<T>(static_cast<size_t>(dim * a.value_dim)) + begin;
    const int64_t row = sequence.row * a.heads + head, key_row = sequence.row * a.key_heads + head / group;
    const int32_t* const segments = a.segments == nullptr ? nullptr : a.segments + sequence.row * a.segments_stride;
    const T scale = static_cast<T>(a.scale);
    const T* const skip = a.skip == nullptr ? nullptr : static_cast<const T*>(a.skip) + sequence.row * a.skip_stride + head;
    for (int64_t done = 0; done < sequence.count; done += kTokens) {
      Tokens<T> some{};
      some.count = least(kTokens, sequence.count - done);
      some.key_dim = dim, some.value_dim = padded;
      const int64_t token = sequence.first + done, place = row * a.tokens + token;
      widened(static_cast<const S*>(a.key) + (key_row * a.tokens + token) * dim, keys, some.count * dim);
      widened(static_cast<const S*>(a.query) + (key_row * a.tokens + token) * dim, queries, some.count * dim);
      bool begins[kTokens];
      for (int64_t t = 0; t < some.count; ++t) {
        begins[t] = segments != nullptr && done + t > 0 && segments[token + t] != segments[token + t - 1];
        const S* const value = static_cast<const S*>(a.value) + (place + t) * a.value_dim + begin;
        for (int64_t i = 0; i < padded; i += W)
          store(values + t * padded + i, load(value + i, static_cast<int>(greatest<int64_t>(0, columns - i))));
      }
      if (a.decay != nullptr) {
        const int64_t n = some.count * (kChannels ? dim : 1);
        const T* const decay = static_cast<const T*>(a.decay) + place * (kChannels ? dim : 1);
        for_vectors<T>(n, [&](int64_t i, auto count) __attribute__((always_inline)) { put(factors + i, exp(get(decay + i, count)), count); });
        if constexpr (kChannels && kCorrection)
          for_vectors<T>(n, [&](int64_t i, auto count) __attribute__((always_inline)) {
            put(weighted + i, get(factors + i, count) * get(keys + i, count), count);
          });
      }
      some.key = keys, some.query = queries, some.value = values, some.y = ys, some.begins = begins;
      some.factor = a.decay == nullptr ? nullptr : factors, some.weighted_key = weighted;
      some.beta = a.beta == nullptr ? nullptr : static_cast<const T*>(a.beta) + place;
      const T* const from = done == 0 ? before : after;
      for (int64_t i = 0; i < columns;) {
        const T* const in = from == nullptr ? nullptr : from + i;
        if (columns - i > 2 * W) {
          advance_ragged<T, kChannels, kCorrection, kWidth>(some, i, columns - i, in, after + i, a.value_dim, state);
          i += kColumns;
        } else {
          advance_ragged<T, kChannels, kCorrection, 1>(some, i, columns - i, in, after + i, a.value_dim, state);
          i += W;
        }
      }
      for (int64_t t = 0; t < some.count; ++t) {
        S* const y = static_cast<S*>(a.y) + (place + t) * a.value_dim + begin;
        for_vectors<T>(columns, [&](int64_t i, auto count) __attribute__((always_inline)) {
          V<T> sum = load(ys + t * padded + i) * scale;
          if (skip != nullptr) sum += *skip * load(values + t * padded + i);
          put(y + i, sum, count);
        });
      }
    }
  });
}

}  // namespace

void delta_run(const DeltaArgs& a, const Threads& threads) {
  VISHWAMAI_ROWS_OF_AVX512(a.storage, delta_run(a, threads));
  for_storage(a.storage, [&](auto s) {
    using S = decltype(s);
    const bool channels = a.decay != nullptr && a.channels != 1;
    if (a.correction) return channels ? run<S, true, true>(a, threads) : run<S, false, true>(a, threads);
    return channels ? run<S, true, false>(a, threads) : run<S, false, false>(a, threads);
  });
}

}  // namespace vishwamai::VISHWAMAI_ISA
