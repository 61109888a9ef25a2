// Attention of a few queries over a long cache: bound by reading keys and values once.
//
// All query rows that share a kv head are computed together, straight from the arrays (packing would double the
// traffic), and the keys are split between tasks; the parts are joined by their maxima and sums (Flash-Decoding; Dao et
// al., 2023).
#include "cpu_scores.h"
#include "vishwamai/core/cpp/cache_products.h"

namespace vishwamai::VISHWAMAI_ISA {
namespace {

template <class S>
struct Decode {
  using T = compute_t<S>;
  using Exp = Exponent<S>;
  using Products = CacheProducts<S>;
  using Query = typename Products::Query;
  static constexpr int W = lanes<T>;

  const AttentionArgs& a;
  const int64_t group = a.q_heads / a.kv_heads;
  const int64_t rows = group * a.q_len;  // query rows of one kv head
  const int64_t out_stride = round_up<int64_t>(a.v_dim, W);
  const int64_t part_stride = out_stride + 16;  // a part: output sums, then m and l
  const bool modified = Scores<T>::needed(a);

  // Keys [begin, end) for every row of kv head (b, h); writes rows x part_stride sums. `apart`: values of keys that a row
  // gives a probability of 0 are not multiplied.
  void part(int64_t b, int64_t h, int64_t begin, int64_t end, T* result, bool apart) const {
    const bool dropped = a.dropout_seed != nullptr;
    typename Products::Scope scope;
    (void)scope;
    Products products(a.qk_dim, a.v_dim, rows, true);
    Scratch scratch(Scratch::size<Query>(products.query_elements()) + Scratch::size<T>(rows * kBlock) + Scratch::size<T>(kBlock) +
                    Scratch::size<uint32_t>(kBlock) + products.scratch_bytes());
    Query* query = scratch.take<Query>(products.query_elements());
    T* p = scratch.take<T>(rows * kBlock);
    T* keep = scratch.take<T>(kBlock);
    uint32_t* hashes = scratch.take<uint32_t>(kBlock);
    products.take(scratch);
    const S* q = static_cast<const S*>(a.query) + (b * a.q_heads + h * group) * a.q_len * a.qk_dim;
    for (int64_t r = 0; r < rows; ++r) products.load_query(q + r * a.qk_dim, r, query);
    products.finish_query(query);
    for (int64_t r = 0; r < rows; ++r) {
      memset(result + r * part_stride, 0, sizeof(T) * static_cast<size_t>(part_stride));
      result[r * part_stride + out_stride] = static_cast<T>(-kInfinity);
    }
    // Of the keys that a row of any batch element sees, those that one of this element's sees.
    const Places places = places_of(a, b, 0, a.q_len);
    const Range mine = keys_of(a, places.first, places.last);
    begin = greatest(begin, mine.begin), end = least(end, mine.end);
    const S* key = static_cast<const S*>(a.key) + (b * a.kv_heads + h) * a.kv_len * a.qk_dim;
    const S* value = static_cast<const S*>(a.value) + (b * a.kv_heads + h) * a.kv_len * a.v_dim;
    const T unit_scale = Exp::kPerNat * static_cast<T>(modified ? 1.0 : a.scale);
    BlockRows<S> keys[2], values[2];  // this block's and the next one's
    auto find = [&](int64_t k, int at) {
      const int n = static_cast<int>(greatest<int64_t>(0, least<int64_t>(kBlock, end - k)));
      for (int j = 0; j < n; ++j) keys[at].at[j] = key + (k + j) * a.qk_dim, values[at].at[j] = value + (k + j) * a.v_dim;
      keys[at].settle(n), values[at].settle(n);
      return n;
    };
    int now = 0, n = find(begin, now);
    for (int64_t k0 = begin; k0 < end; k0 += kBlock, now = 1 - now) {
      const int next = find(k0 + kBlock, 1 - now);
      Ahead ahead(keys[1 - now], 0, a.qk_dim, values[1 - now], 0, a.v_dim, next);
      products.scores(keys[now], 0, n, query, p, ahead);
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t head = h * group + r / a.q_len, row = r % a.q_len;
        const int64_t place = place_of(a, b, row);
        const Range own = keys_of(a, place, place);
        const int seen_begin = static_cast<int>(least<int64_t>(n, greatest<int64_t>(own.begin - k0, 0)));
        const int seen_end = static_cast<int>(least<int64_t>(own.end - k0, n));
        T* s = p + r * kBlock;
        if (seen_begin >= seen_end) {
          fill(s, 0, kBlock, T(0));
          continue;
        }
        if (modified) Scores<T>(a, b, head, false).apply(s + seen_begin, row, k0 + seen_begin, seen_end - seen_begin);
        fill(s, 0, seen_begin, static_cast<T>(-kInfinity));
        fill(s, seen_end, kBlock, static_cast<T>(-kInfinity));
        if (dropped) {
          const uint32_t* seed = a.dropout_seed + (b * a.q_heads + head) * 2;
          for (int j = 0; j < n; ++j) hashes[j] = column_hash(seed[1], k0 + j);
          keep_factors(row_hash(seed[0], row), hashes, n, a.dropout_threshold, static_cast<T>(a.keep_scale), keep);
          fill(keep, n, kBlock, T(0));
        }
        soften(s, unit_scale, dropped ? keep : nullptr, result + r * part_stride);
      }
      if (apart) add_apart(values[now], n, p, result);
      else products.add(values[now], 0, n, p, result, part_stride, ahead);
      n = next;
    }
  }

  __attribute__((noinline)) void add_apart(const BlockRows<S>& values, int n, const T* p, T* result) const {
    for (int64_t r = 0; r < rows; ++r)
      for (int j = 0; j < n; ++j) {
        const T weight = p[r * kBlock + j];
        if (weight == T(0)) continue;
        for (int64_t d = 0; d < a.v_dim; ++d) result[r * part_stride + d] += weight * convert<T>(values.at[j][d]);
      }
  }

  // Whether a row's output, but not its sum of probabilities, is infinite or NaN: by a value, which may be hidden.
  bool poisoned(const T* result) const {
    for (int64_t r = 0; r < rows; ++r, result += part_stride)
      if (is_finite(result[out_stride + 1]) && !all_finite(result, a.v_dim)) return true;
    return false;
  }

  // Scores to probabilities relative to the row's running maximum; rescales what was summed before.
  void soften(T* s, T unit_scale, const T* keep, T* state) const {
    T &m = state[out_stride], &l = state[out_stride + 1];
    V<T> top = splat(static_cast<T>(-kInfinity));
    for (int i = 0; i < kBlock; i += W) {
      const V<T> x = load(s + i) * unit_scale;  // rounded: fused with the difference below, it may exceed the maximum
      store(s + i, x);
      top = maximum(top, x);
    }
    const T highest = max_lanes<T>(top);
    if (highest > m) {
      const T shrink = m == static_cast<T>(-kInfinity) ? T(0) : Exp::power(m - highest);
      for (int64_t d = 0; d < out_stride; d += W) store(state + d, load(state + d) * shrink);
      l *= shrink;
      m = highest;
    }
    const V<T> shift = splat(m == static_cast<T>(-kInfinity) ? T(0) : m);
    V<T> sum = {};
    for (int i = 0; i < kBlock; i += W) {
      V<T> x = Exp::power(load(s + i) - shift);
      sum += x;
      if (keep) x *= load(keep + i);
      store(s + i, x);
    }
    l += sum_lanes<T>(sum);
  }

  // Joins the parts of query row r of kv head (b, h), and the sink.
  void join(int64_t b, int64_t h, int64_t r, int64_t parts, const T* first, int64_t stride) const {
    const int64_t head = h * group + r / a.q_len;
    const T none = static_cast<T>(-kInfinity);
    T m = none, l = 0;
    for (int64_t i = 0; i < parts; ++i) m = greatest(m, first[i * stride + out_stride]);
    const T* sinks = static_cast<const T*>(a.sinks);
    const T sink = sinks ? sinks[b * a.sinks_stride + head] * Exp::kPerNat : none;
    m = greatest(m, sink);
    auto weight = [&](T part_m) { return part_m == none ? T(0) : Exp::power(part_m - m); };
    l = weight(sink);
    for (int64_t i = 0; i < parts; ++i) l += weight(first[i * stride + out_stride]) * first[i * stride + out_stride + 1];
    const T inverse = l == 0 ? T(0) : 1 / l;
    const int64_t row = (b * a.q_heads + h * group) * a.q_len + r;
    S* out = static_cast<S*>(a.out) + row * a.v_dim;
    for (int64_t d = 0; d < a.v_dim; d += W) {
      V<T> sum = {};
      for (int64_t i = 0; i < parts; ++i) sum += load(first + i * stride + d) * weight(first[i * stride + out_stride]);
      store(out + d, sum * inverse, static_cast<int>(least<int64_t>(W, a.v_dim - d)));
    }
    if (a.logsumexp) {
      static_cast<T*>(a.logsumexp)[row] = l == 0 ? none : m * Exp::kNats + static_cast<T>(__builtin_log(l));
    }
  }

  void run(const Threads& threads) const {
    Places everywhere = places_of(a, 0, 0, a.q_len);
    for (int64_t b = 1; b < a.batch && a.positions_stride != 0; ++b) {
      const Places more = places_of(a, b, 0, a.q_len);
      everywhere = {least(everywhere.first, more.first), greatest(everywhere.last, more.last)};
    }
    const Range all = keys_of(a, everywhere.first, everywhere.last);
    const int64_t heads = a.batch * a.kv_heads, keys = greatest<int64_t>(0, all.end - all.begin);
    const int64_t wanted = ceil_div<int64_t>(4 * threads.count, heads);
    const int64_t each = round_up<int64_t>(greatest<int64_t>(ceil_div(keys, wanted), 4 * kBlock), kBlock);
    const int64_t parts = greatest<int64_t>(1, ceil_div(keys, each));
    Scratch scratch(Scratch::size<T>(heads * parts * rows * part_stride));
    T* results = scratch.take<T>(heads * parts * rows * part_stride);
    parallel_for(threads, heads * parts, [&](int64_t i) {
      const int64_t g = i / parts, k = all.begin + i % parts * each;
      T* result = results + i * rows * part_stride;
      part(g / a.kv_heads, g % a.kv_heads, k, least(all.end, k + each), result, false);
      if (poisoned(result)) part(g / a.kv_heads, g % a.kv_heads, k, least(all.end, k + each), result, true);
    });
    for (int64_t g = 0; g < heads; ++g)
      for (int64_t r = 0; r < rows; ++r)
        join(g / a.kv_heads, g % a.kv_heads, r, parts, results + (g * parts * rows + r) * part_stride, rows * part_stride);
  }
};

}  // namespace

void attention_decode(const AttentionArgs& a, const Threads& threads) {
  switch (a.storage) {
    case Storage::f32: return VISHWAMAI_BASE_OR(attention_decode(a, threads), Decode<float>{a}.run(threads));
    case Storage::bf16: return Decode<bf16>{a}.run(threads);
    case Storage::f64: return VISHWAMAI_FLOAT64_OR(attention_decode(a, threads), Decode<double>{a}.run(threads));
    default: return;
  }
}

}  // namespace vishwamai::VISHWAMAI_ISA
