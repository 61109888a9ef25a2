// Attention forward: blocks of queries against blocks of keys with a running softmax (FlashAttention; Dao et al.,
// 2022).
//
// Keys and values are packed once per kv head, in the order in which the products read them.  A task then takes a block
// of queries of one head and walks over the key blocks that the masks leave, 32 queries at a time: S = Q K^T, the rows'
// softmax, O += P V. A row's running "maximum" is that of the first scores, and is only renewed when a sum of
// probabilities exceeds 2^16: they stay far inside float32, and the sums are rescaled in the few blocks that need it
// instead of in all (the idea of FlashAttention-4).
#include "cpu_blocks.h"

namespace vishwamai::VISHWAMAI_ISA {
namespace {

constexpr int64_t kPackedBytes = 48 << 20;  // packed keys and values held at a time

template <class S, class E>
struct Forward {
  using T = typename E::Acc;
  using Packed = typename E::Element;
  using Exp = Exponent<S>;
  static constexpr int W = lanes<T>, C = E::kCols;
  static constexpr int kBlockKeys = std::is_same_v<S, bf16> ? 256 : 128;
  static constexpr int64_t kScoreStride = kBlockKeys + 16;  // keeps the rows of a tile out of one cache set

  const AttentionArgs& a;
  const int64_t padded_keys = round_up<int64_t>(a.kv_len, C);
  const int64_t v_panels = ceil_div<int64_t>(a.v_dim, C);
  const int64_t out_stride = v_panels * C + 16;
  const int64_t key_elements = padded_keys / C * E::b_elements(a.qk_dim);
  const int64_t value_elements = v_panels * E::b_elements(padded_keys);
  const int64_t key_blocks = ceil_div<int64_t>(a.kv_len, kBlockKeys);
  // A mask that is the same for all queries (padding) and no other change to the scores: whole columns without a
  // visible key are skipped, and the others' mask is applied while the exponentials are taken. A dropout's variant of
  // that is not compiled.
  const bool by_key = a.mask && a.mask_strides[2] == 0 && !a.bias && !a.slopes && !a.q_segments && a.softcap == 0 && a.scale > 0 && !a.dropout_seed;
  const bool modified = Scores<T>::needed(a, by_key);

  // Packs one block of keys of kv head g = b * kv_heads + h. Values that are infinite or NaN are packed as 0 and
  // `special` is set.
  void pack(int64_t g, int64_t block, Packed* keys, Packed* values, uint8_t* special) const {
    const int64_t begin = block * kBlockKeys, end = least(padded_keys, begin + kBlockKeys), valid = least(a.kv_len, end);
    const S* key = static_cast<const S*>(a.key) + g * a.kv_len * a.qk_dim;
    const S* value = static_cast<const S*>(a.value) + g * a.kv_len * a.v_dim;
    for (int64_t k = begin; k < end; k += C) {
      E::pack_b(key + k * a.qk_dim, 1, a.qk_dim, a.qk_dim, a.qk_dim, static_cast<int>(least<int64_t>(C, valid - k)),
                keys + k / C * E::b_elements(a.qk_dim));
    }
    const S* rows = value + begin * a.v_dim;
    const int64_t elements = (valid - begin) * a.v_dim;
    *special = !all_finite(rows, elements);
    Scratch scratch(*special ? Scratch::size<S>(elements) : 0);
    if (*special) {
      S* finite = scratch.take<S>(elements);
      copy_finite(rows, elements, finite);
      rows = finite;
    }
    pack_rows<E>(rows, a.v_dim, valid - begin, end - begin, values + E::b_elements(begin), E::b_elements(padded_keys));
  }

  // Adds what is infinite or NaN in the values of keys k0 + [begin, end) to the output of the rows that see those keys.
  __attribute__((noinline)) void add_special(int64_t b, int64_t h, int64_t k0, int begin, int end, int rows, const T* s, const uint8_t* shown, T* out) const {
    const S* value = static_cast<const S*>(a.value) + ((b * a.kv_heads + h / (a.q_heads / a.kv_heads)) * a.kv_len + k0) * a.v_dim;
    for (int k = begin; k < end; ++k) {
      if ((by_key && !shown[k]) || all_finite(value + k * a.v_dim, a.v_dim)) continue;
      for (int r = 0; r < rows; ++r) {
        if (s[r * kScoreStride + k] == static_cast<T>(-kInfinity)) continue;
        for (int64_t d = 0; d < a.v_dim; ++d) {
          const T x = convert<T>(value[k * a.v_dim + d]);
          if (!is_finite(x)) out[r * out_stride + d] += x;
        }
      }
    }
  }

  // The mask of keys [k0, k1) in `shown`, 0 beyond them.  Bit i: one of keys [k0 + i * C, k0 + (i + 1) * C) is visible.
  uint64_t look_up_mask(int64_t b, int64_t h, int64_t k0, int64_t k1, uint8_t* shown) const {
    const uint8_t* mask = a.mask + b * a.mask_strides[0] + h * a.mask_strides[1];
    uint64_t live = 0;
    for (int64_t k = k0; k < k0 + kBlockKeys; ++k) {
      const bool seen = k < k1 && mask[k * a.mask_strides[3]] != 0;
      shown[k - k0] = seen;
      live |= uint64_t{seen} << (k - k0) / C;
    }
    return live;
  }

  // The state of 32 query rows while key blocks go by; m in the unit of Exp.
  struct Rows {
    T *m, *l, *out;  // [32], [32][W] partial sums, [32][out_stride]
    bool started;
  };

  // Softmax of one row's scores s[begin, end), of which [seen.begin, seen.end) are visible, with `kMasked` those alone
  // whose byte of `shown` is not zero; the others' scores are -infinity already with `kFilled`. Writes P from column 0
  // on.
  template <bool kDropout, bool kMasked, bool kFilled = false>
  VISHWAMAI_INLINE void soften(T* s, int begin, int end, int seen_begin, int seen_end, T unit_scale, const T* keep, const uint8_t* shown,
                    Packed* p, int row, Rows& state) const {
    const T none = static_cast<T>(-kInfinity);
    if constexpr (!kFilled) {
      if (seen_begin >= seen_end) seen_begin = seen_end = begin;
      fill(s, begin, seen_begin, none);
      fill(s, seen_end, end, none);
    }
    T m = state.m[row], shrink = 1;
    auto score = [&](int i) __attribute__((always_inline)) {
      if constexpr (kMasked) return load_bools<T>(shown + i) ? load(s + i) : splat(none);
      else return load(s + i);
    };
    auto greatest_score = [&] {
      V<T> x = splat(none), y = x;
      for (int i = begin; i < end; i += C) {
        x = maximum(x, score(i));
        y = maximum(y, score(i + W));
      }
      return max_lanes<T>(maximum(x, y)) * unit_scale;
    };
    if (m == none && seen_begin < seen_end) {
      const int first = seen_begin / C * C;
      m = max_lanes<T>(maximum(score(first), score(first + W))) * unit_scale;
      if (m == none) m = greatest_score();
    }
    V<T> sum_x, sum_y;
    // A fused multiply-add takes a score's exact product from the rounded maximum, and what is left of huge scores is
    // their rounding, by which an exponential may overflow or a whole row vanish. Their products are rounded first.
    auto round_huge = [&] {
      if (__builtin_expect(!(m > T(1 << 24) || m < T(-(1 << 24))) || m == none, 1)) return;
      for (int i = begin; i < end; i += W) store(s + i, load(s + i) * unit_scale);
      unit_scale = T(1);
    };
    round_huge();
    auto exponentials = [&]() __attribute__((always_inline)) {
      const V<T> shift = splat(m == none ? T(0) : m), scale = splat(unit_scale);
      sum_x = sum_y = V<T>{};
      for (int i = begin; i < end; i += C) {
        V<T> x = Exp::power(score(i) * scale - shift), y = Exp::power(score(i + W) * scale - shift);
        sum_x += x;
        sum_y += y;
        if constexpr (kDropout) {
          x *= load(keep + i);
          y *= load(keep + i + W);
        }
        E::put(p, E::a_stride(kBlockKeys), row, i - begin, x, y);
      }
    };
    exponentials();
    if (__builtin_expect(any_above<T>(sum_x + sum_y, T(65536)), 0)) {
      const T renewed = greatest_score();
      shrink = Exp::power(m - renewed);
      m = renewed;
      round_huge();
      exponentials();
      if (state.started) {
        T* out = state.out + row * out_stride;
        for (int64_t d = 0; d < v_panels * C; d += W) store(out + d, load(out + d) * shrink);
      }
    }
    state.m[row] = m;
    store(state.l + row * W, load(state.l + row * W) * shrink + sum_x + sum_y);
  }

  // Softmax of a panel's rows, where all of them see the keys of columns [begin, seen_end).
  template <bool kMasked>
  __attribute__((noinline)) void soften_alike(T* s, int rows, int begin, int end, int seen_end, T unit_scale, const uint8_t* shown, Packed* p, Rows& state) const {
    for (int r = 0; r < rows; ++r) {
      T* row = s + r * kScoreStride;
      fill(row, seen_end, end, static_cast<T>(-kInfinity));
      soften<false, kMasked, true>(row, begin, end, begin, seen_end, unit_scale, nullptr, shown, p, r, state);
    }
  }

  void finish(int64_t b, int64_t h, int64_t first_row, int rows, const Rows& state) const {
    const T* sinks = static_cast<const T*>(a.sinks);
    for (int r = 0; r < rows; ++r) {
      const int64_t row = (b * a.q_heads + h) * a.q_len + first_row + r;
      T l = sum_lanes<T>(load(state.l + r * W)), m = state.m[r], weight = 1;
      if (m == static_cast<T>(-kInfinity)) m = l = 0;
      if (sinks) {
        const T sink = sinks[b * a.sinks_stride + h] * Exp::kPerNat;
        const T joint = l > 0 || l != l ? greatest(m, sink) : sink;
        const T own = l == 0 ? T(0) : Exp::power(m - joint);
        const T sink_weight = joint == static_cast<T>(-kInfinity) ? T(0) : Exp::power(sink - joint);
        l = l * own + sink_weight;
        weight = own;
        m = joint;
      }
      const V<T> inverse = splat(l == 0 ? T(0) : weight / l);  // a NaN goes through
      S* out = static_cast<S*>(a.out) + row * a.v_dim;
      const T* sums = state.out + r * out_stride;
      auto result = [&](int64_t d) __attribute__((always_inline)) { return (state.started ? load(sums + d) : V<T>{}) * inverse; };
      int64_t d = 0;
      for (; d + W <= a.v_dim; d += W) store(out + d, result(d));
      if (d < a.v_dim) store(out + d, result(d), static_cast<int>(a.v_dim - d));
      if (a.logsumexp) {
        T value = l == 0 ? static_cast<T>(-kInfinity) : m * Exp::kNats + static_cast<T>(__builtin_log(l));
        static_cast<T*>(a.logsumexp)[row] = value;
      }
    }
  }

  void task(int64_t b, int64_t h, int64_t q_begin, int64_t q_end, const Packed* keys, const Packed* values, const uint8_t* special) const {
    const int64_t panels = ceil_div<int64_t>(q_end - q_begin, kPanelRows);
    const bool dropped = a.dropout_seed != nullptr;
    Scratch scratch(Scratch::size<Packed>(panels * E::a_elements(a.qk_dim)) + Scratch::size<T>(panels * kPanelRows * out_stride) +
                    Scratch::size<T>(panels * kPanelRows) + Scratch::size<T>(panels * kPanelRows * W) +
                    Scratch::size<T>(kPanelRows * kScoreStride) + Scratch::size<Packed>(E::a_elements(kBlockKeys)) +
                    Scratch::size<T>(kBlockKeys) + Scratch::size<uint32_t>(kBlockKeys) + Scratch::size<uint8_t>(kBlockKeys));
    Packed* query = scratch.take<Packed>(panels * E::a_elements(a.qk_dim));
    T* out = scratch.take<T>(panels * kPanelRows * out_stride);
    T* m = scratch.take<T>(panels * kPanelRows);
    T* l = scratch.take<T>(panels * kPanelRows * W);
    T* s = scratch.take<T>(kPanelRows * kScoreStride);
    Packed* p = scratch.take<Packed>(E::a_elements(kBlockKeys));
    T* keep = scratch.take<T>(kBlockKeys);
    uint32_t* column_hashes = scratch.take<uint32_t>(kBlockKeys);
    uint8_t* shown = scratch.take<uint8_t>(kBlockKeys);

    const S* q = static_cast<const S*>(a.query) + ((b * a.q_heads + h) * a.q_len + q_begin) * a.qk_dim;
    for (int64_t i = 0; i < panels; ++i) {
      E::pack_a(q + i * kPanelRows * a.qk_dim, a.qk_dim, 1, static_cast<int>(least<int64_t>(kPanelRows, q_end - q_begin - i * kPanelRows)),
                a.qk_dim, query + i * E::a_elements(a.qk_dim));
    }
    for (int64_t i = 0; i < panels * kPanelRows; ++i) m[i] = static_cast<T>(-kInfinity);
    memset(l, 0, sizeof(T) * static_cast<size_t>(panels * kPanelRows * W));
    uint64_t started = 0;  // one bit for each panel; a block of queries has at most 8

    const Scores<T> scores(a, b, h, false);
    const Blocks blocks(a, h);
    const T unit_scale = Exp::kPerNat * static_cast<T>(modified ? 1.0 : a.scale);
    const uint32_t* seed = dropped ? a.dropout_seed + (b * a.q_heads + h) * 2 : nullptr;
    const int32_t* q_segments = a.q_segments ? a.q_segments + b * a.q_segments_stride : nullptr;
    const int32_t* kv_segments = a.kv_segments ? a.kv_segments + b * a.kv_segments_stride : nullptr;

    const Places everywhere = places_of(a, b, q_begin, q_end);
    const Range all = keys_of(a, everywhere.first, everywhere.last);
    for (int64_t k0 = all.begin / kBlockKeys * kBlockKeys; k0 < all.end; k0 += kBlockKeys) {
      const int64_t k1 = least(a.kv_len, k0 + kBlockKeys);
      if (dropped) for (int64_t k = k0; k < k1; ++k) column_hashes[k - k0] = column_hash(seed[1], k);
      uint64_t live = ~uint64_t{0};
      if (by_key) live = look_up_mask(b, h, k0, k1, shown);
      if (live == 0) continue;
      SegmentSpan key_spans[kBlockKeys / C];
      if (kv_segments) spans_of(kv_segments, k0, k1, C, key_spans);
      for (int64_t i = 0; i < panels; ++i) {
        const int64_t first = q_begin + i * kPanelRows;
        const int rows = static_cast<int>(least<int64_t>(kPanelRows, q_end - first));
        const Places places = places_of(a, b, first, first + rows);
        Range range = keys_of(a, places.first, places.last);
        range = {greatest(range.begin, k0), least(range.end, k1)};
        if (range.empty()) continue;
        Runs runs{Runs::of(range.begin - k0, range.end - k0, C), C};
        runs.bits &= live;
        if (q_segments) runs.bits = meeting(runs.bits, key_spans, span_of(q_segments, first, first + rows));
        if (blocks.codes) runs.bits &= blocks.live_keys(first, first + rows, k0, k1, C);
        for (int begin, end; runs.next(&begin, &end);) {
          for (int c = begin; c < end; c += C) {
            E::product(query + i * E::a_elements(a.qk_dim), E::a_stride(a.qk_dim), keys + (k0 + c) / C * E::b_elements(a.qk_dim),
                       a.qk_dim, rows, s + c, kScoreStride, false);
          }
          const bool hidden = blocks.codes && !blocks.whole(first, first + rows, k0 + begin, least<int64_t>(k1, k0 + end));
          Rows state{m + i * kPanelRows, l + i * kPanelRows * W, out + i * kPanelRows * out_stride, ((started >> i) & 1) != 0};
          const int all_end = static_cast<int>(least<int64_t>(end, k1 - k0));
          const Range narrow{greatest(keys_of(a, places.last, places.last).begin - k0, int64_t{begin}), least(keys_of(a, places.first, places.first).end - k0, int64_t{all_end})};
          // for all rows
          const bool alike = !modified && !hidden && !dropped && narrow.begin == begin && narrow.end == all_end;
          if (alike && by_key) soften_alike<true>(s, rows, begin, end, all_end, unit_scale, shown, p, state);
          else if (alike) soften_alike<false>(s, rows, begin, end, all_end, unit_scale, nullptr, p, state);
          else for (int r = 0; r < rows; ++r) {
            T* row = s + r * kScoreStride;
            const int64_t place = place_of(a, b, first + r);
            const Range own = keys_of(a, place, place);
            const int seen_begin = static_cast<int>(greatest<int64_t>(own.begin - k0, begin));
            const int seen_end = static_cast<int>(least<int64_t>(own.end - k0, least<int64_t>(end, k1 - k0)));
            if (modified && seen_begin < seen_end) scores.apply(row + seen_begin, first + r, k0 + seen_begin, seen_end - seen_begin);
            if (hidden && seen_begin < seen_end) blocks.hide_keys(row + seen_begin, first + r, k0 + seen_begin, seen_end - seen_begin);
            if (dropped) {
              keep_factors(row_hash(seed[0], first + r), column_hashes, static_cast<int>(k1 - k0), a.dropout_threshold,
                           static_cast<T>(a.keep_scale), keep);
              fill(keep, static_cast<int>(k1 - k0), kBlockKeys, T(0));
              soften<true, false>(row, begin, end, seen_begin, seen_end, unit_scale, keep, nullptr, p, r, state);
            } else if (by_key) {
              soften<false, true>(row, begin, end, seen_begin, seen_end, unit_scale, nullptr, shown, p, r, state);
            } else {
              soften<false, false>(row, begin, end, seen_begin, seen_end, unit_scale, nullptr, nullptr, p, r, state);
            }
          }
          for (int64_t v = 0; v < v_panels; ++v) {
            add_product<E>(p, E::a_stride(kBlockKeys), values + v * E::b_elements(padded_keys) + E::b_elements(k0 + begin), end - begin,
                           rows, state.out + v * C, out_stride, state.started, all.end - all.begin);
          }
          if (__builtin_expect(special[k0 / kBlockKeys], 0)) add_special(b, h, k0, begin, all_end, rows, s, shown, state.out);
          started |= uint64_t{1} << i;
        }
      }
    }
    for (int64_t i = 0; i < panels; ++i) {
      const int64_t first = q_begin + i * kPanelRows;
      finish(b, h, first, static_cast<int>(least<int64_t>(kPanelRows, q_end - first)),
             Rows{m + i * kPanelRows, l + i * kPanelRows * W, out + i * kPanelRows * out_stride, ((started >> i) & 1) != 0});
    }
  }

  void run(const Threads& threads) const {
    const int64_t kv_heads = a.batch * a.kv_heads, group = a.q_heads / a.kv_heads;
    int64_t block_queries = 256;  // fewer where there would not be enough tasks to share out
    while (block_queries > kPanelRows && a.batch * a.q_heads * ceil_div(a.q_len, block_queries) < 4 * threads.count) block_queries /= 2;
    const int64_t q_blocks = ceil_div(a.q_len, block_queries);
    const int64_t bytes = (key_elements + value_elements) * static_cast<int64_t>(sizeof(Packed));
    const int64_t wave = greatest<int64_t>(greatest<int64_t>(1, kPackedBytes / greatest<int64_t>(1, bytes)), ceil_div<int64_t>(2 * threads.count, group * q_blocks));
    Scratch scratch(Scratch::size<uint8_t>(least(wave, kv_heads) * key_blocks) +
                    least(wave, kv_heads) * (Scratch::size<Packed>(key_elements) + Scratch::size<Packed>(value_elements)));
    uint8_t* special = scratch.take<uint8_t>(least(wave, kv_heads) * key_blocks);
    Packed* memory = scratch.take<Packed>(0);
    const int64_t key_room = static_cast<int64_t>(Scratch::size<Packed>(key_elements) / sizeof(Packed));
    const int64_t room = key_room + static_cast<int64_t>(Scratch::size<Packed>(value_elements) / sizeof(Packed));
    for (int64_t g0 = 0; g0 < kv_heads; g0 += wave) {
      const int64_t heads = least(wave, kv_heads - g0);
      parallel_for(threads, heads * key_blocks, [&](int64_t i) {
        Packed* keys = memory + i / key_blocks * room;
        pack(g0 + i / key_blocks, i % key_blocks, keys, keys + key_room, special + i);
      });
      parallel_for(threads, heads * group * q_blocks, [&](int64_t i) {
        typename E::Scope scope;
        (void)scope;
        // The last query blocks first: under a causal mask they are the longest.
        const int64_t block = q_blocks - 1 - i / (heads * group), head = i % (heads * group), g = g0 + head / group;
        const Packed* keys = memory + head / group * room;
        task(g / a.kv_heads, g % a.kv_heads * group + head % group, block * block_queries,
             least(a.q_len, (block + 1) * block_queries), keys, keys + key_room, special + head / group * key_blocks);
      });
    }
  }
};

template <class S, class E>
void run(const AttentionArgs& a, const Threads& threads) {
  Forward<S, E>{a}.run(threads);
}

}  // namespace

void attention_forward(const AttentionArgs& a, const Threads& threads) {
  if (a.storage == Storage::f64) return VISHWAMAI_FLOAT64_OR(attention_forward(a, threads), run<double, FmaEngine<double>>(a, threads));
  if (a.storage == Storage::bf16) return run<bf16, HalfEngine>(a, threads);
#if defined(__AMX_BF16__)
  if (a.parts == 2) return run<float, AmxEngine<2>>(a, threads);
  return run<float, AmxEngine<3>>(a, threads);
#else
  return VISHWAMAI_BASE_OR(attention_forward(a, threads), run<float, FmaEngine<float>>(a, threads));
#endif
}

}  // namespace vishwamai::VISHWAMAI_ISA
