// The gradients of attention's scores, block by block, for the two passes that sum them up: P is recomputed from the
// logsumexp (FlashAttention-2; Dao, 2023).
//
// The scores are held transposed, [keys, queries]: P^T and dS^T are then row-major left operands of dV += P^T dO and
// dK += dS^T Q, the statistics of the queries are vectors along the rows, and dQ^T += K^T dS^T needs no transpose
// either.
#pragma once

#include "cpu_blocks.h"

namespace vishwamai::VISHWAMAI_ISA {

template <class S, class E>
struct ScoreGradients {
  using T = typename E::Acc;
  using Packed = typename E::Element;
  using Exp = Exponent<S>;
  static constexpr int W = lanes<T>, C = E::kCols;
  static constexpr int kKeys = std::is_same_v<S, bf16> ? 256 : 128, kQueries = kKeys;
  static constexpr int64_t kStride = kQueries + 16;  // of score rows: not a multiple of a cache way
  static constexpr int kPanels = kKeys / kPanelRows;

  const AttentionArgs& a;
  const int64_t group = a.q_heads / a.kv_heads;
  const int64_t q_blocks = ceil_div<int64_t>(a.q_len, kQueries), key_blocks = ceil_div<int64_t>(a.kv_len, kKeys);
  const int64_t padded_queries = q_blocks * kQueries;
  const int64_t qk_panels = ceil_div<int64_t>(a.qk_dim, C), v_panels = ceil_div<int64_t>(a.v_dim, C);
  const int64_t dq_rows = round_up<int64_t>(a.qk_dim, kPanelRows);
  // A mask that is the same for all queries (padding): a key is hidden as a whole, and panels without a visible one are
  // skipped.
  const bool by_key = a.mask && a.mask_strides[2] == 0;
  const bool modified = Scores<T>::needed(a, by_key) || a.positions;

  // One query head, packed: as the right operand of products over features, and of products over queries.
  struct Head {
    Packed *queries_by_feature, *douts_by_feature;  // Q^T, dO^T: panels of C queries
    Packed *queries, *douts;                        // Q, dO: panels of C features
    T *sums, *delta;                           // [padded_queries]
  };
  struct Room {
    int64_t by_qk = 0, by_v = 0, qk = 0, v = 0, statistics = 0, elements = 0;
  };
  // Elements of each part of a Head, in units of Packed; the statistics are stored in the same memory.
  Room room() const {
    auto whole = [](int64_t n) { return round_up<int64_t>(n, 64); };
    Room r;
    r.by_qk = whole(padded_queries / C * E::b_elements(a.qk_dim)), r.by_v = whole(padded_queries / C * E::b_elements(a.v_dim));
    r.qk = whole(qk_panels * E::b_elements(padded_queries)), r.v = whole(v_panels * E::b_elements(padded_queries));
    r.statistics = whole(padded_queries * static_cast<int64_t>(sizeof(T) / sizeof(Packed)));
    r.elements = r.by_qk + r.by_v + r.qk + r.v + 2 * r.statistics;
    return r;
  }
  static Head place(Packed* p, const Room& r) {
    Head head;
    head.queries_by_feature = p;
    head.douts_by_feature = p += r.by_qk;
    head.queries = p += r.by_v;
    head.douts = p += r.qk;
    head.sums = reinterpret_cast<T*>(p += r.v);
    head.delta = reinterpret_cast<T*>(p += r.statistics);
    return head;
  }

  const S* rows_of(const void* base, int64_t b, int64_t h, int64_t dim) const {
    return static_cast<const S*>(base) + (b * a.q_heads + h) * a.q_len * dim;
  }

  // delta = rowsum(dO * O) - dlogsumexp, and the logsumexp in the unit of Exp, with +infinity where a row attends to
  // nothing, so that P = 0.
  void statistics(int64_t b, int64_t h, int64_t begin, int64_t end, T* sums, T* delta) const {
    const S *out = rows_of(a.out, b, h, a.v_dim), *dout = rows_of(a.dout, b, h, a.v_dim);
    const int64_t first = (b * a.q_heads + h) * a.q_len;
    for (int64_t i = begin; i < end; ++i) {
      if (i >= a.q_len) {
        sums[i - begin] = static_cast<T>(kInfinity), delta[i - begin] = 0;
        continue;
      }
      V<T> sum = {};
      for (int64_t d = 0; d < a.v_dim; d += W) {
        const int count = static_cast<int>(least<int64_t>(W, a.v_dim - d));
        sum += load(out + i * a.v_dim + d, count) * load(dout + i * a.v_dim + d, count);
      }
      delta[i - begin] = sum_lanes<T>(sum) - (a.dlogsumexp ? static_cast<const T*>(a.dlogsumexp)[first + i] : T(0));
      const T lse = static_cast<const T*>(a.logsumexp)[first + i];
      const bool nothing = lse == static_cast<T>(-kInfinity);
      sums[i - begin] = nothing ? static_cast<T>(kInfinity) : lse * Exp::kPerNat;
      if (nothing) delta[i - begin] = 0;
    }
  }

  // The parts of Q and dO that products over features need, for one block of queries.
  void pack_by_feature(int64_t b, int64_t h, int64_t block, Packed* queries, Packed* douts) const {
    const S *q = rows_of(a.query, b, h, a.qk_dim), *dout = rows_of(a.dout, b, h, a.v_dim);
    for (int64_t c = 0; c < kQueries; c += C) {
      const int64_t i = block * kQueries + c;
      const int cols = static_cast<int>(greatest<int64_t>(0, least<int64_t>(C, a.q_len - i)));
      if (cols == 0) {
        memset(queries + c / C * E::b_elements(a.qk_dim), 0, sizeof(Packed) * static_cast<size_t>(E::b_elements(a.qk_dim)));
        memset(douts + c / C * E::b_elements(a.v_dim), 0, sizeof(Packed) * static_cast<size_t>(E::b_elements(a.v_dim)));
        continue;
      }
      E::pack_b(q + i * a.qk_dim, 1, a.qk_dim, a.qk_dim, a.qk_dim, cols, queries + c / C * E::b_elements(a.qk_dim));
      E::pack_b(dout + i * a.v_dim, 1, a.v_dim, a.v_dim, a.v_dim, cols, douts + c / C * E::b_elements(a.v_dim));
    }
  }
  void pack_by_query(int64_t b, int64_t h, int64_t block, const Head& head) const {
    const int64_t begin = block * kQueries, valid = least<int64_t>(kQueries, a.q_len - begin);
    const S *q = rows_of(a.query, b, h, a.qk_dim), *dout = rows_of(a.dout, b, h, a.v_dim);
    pack_rows<E>(q + begin * a.qk_dim, a.qk_dim, valid, kQueries, head.queries + E::b_elements(begin), E::b_elements(padded_queries));
    pack_rows<E>(dout + begin * a.v_dim, a.v_dim, valid, kQueries, head.douts + E::b_elements(begin), E::b_elements(padded_queries));
  }

  // A task's memory for one block of keys against one block of queries.
  struct Work {
    Packed *keys, *values, *keys_by_feature;  // left operands: [panel], [panel], [feature panel]
    T *products, *dprobabilities;             // [32, kStride]
    T* dscores;                               // [kKeys, kStride]
    Packed *p, *ds;                           // one panel each: P^T and dS^T
    T *keep, *steep;  // of one key: the dropout's factors, the derivatives of the soft-cap
    uint32_t* row_hashes;
  };
  size_t work_size() const {
    return Scratch::size<Packed>(kPanels * E::a_elements(a.qk_dim)) + Scratch::size<Packed>(kPanels * E::a_elements(a.v_dim)) +
           Scratch::size<Packed>(dq_rows / kPanelRows * E::a_elements(kKeys)) + 2 * Scratch::size<T>(kPanelRows * kStride) +
           Scratch::size<T>(kKeys * kStride) + 2 * Scratch::size<Packed>(E::a_elements(kQueries)) + 2 * Scratch::size<T>(kQueries) +
           Scratch::size<uint32_t>(kQueries);
  }
  Work take_work(Scratch& scratch) const {
    Work w;
    w.keys = scratch.take<Packed>(kPanels * E::a_elements(a.qk_dim));
    w.values = scratch.take<Packed>(kPanels * E::a_elements(a.v_dim));
    w.keys_by_feature = scratch.take<Packed>(dq_rows / kPanelRows * E::a_elements(kKeys));
    w.products = scratch.take<T>(kPanelRows * kStride);
    w.dprobabilities = scratch.take<T>(kPanelRows * kStride);
    w.dscores = scratch.take<T>(kKeys * kStride);
    w.p = scratch.take<Packed>(E::a_elements(kQueries));
    w.ds = scratch.take<Packed>(E::a_elements(kQueries));
    w.keep = scratch.take<T>(kQueries);
    w.steep = scratch.take<T>(kQueries);
    w.row_hashes = scratch.take<uint32_t>(kQueries);
    return w;
  }

  void pack_keys(int64_t b, int64_t h, int64_t block, const Work& w, bool by_feature) const {
    const int64_t begin = block * kKeys, end = least(a.kv_len, begin + kKeys);
    const S* key = static_cast<const S*>(a.key) + (b * a.kv_heads + h) * a.kv_len * a.qk_dim;
    const S* value = static_cast<const S*>(a.value) + (b * a.kv_heads + h) * a.kv_len * a.v_dim;
    for (int64_t k = begin; k < end; k += kPanelRows) {
      const int rows = static_cast<int>(least<int64_t>(kPanelRows, end - k));
      E::pack_a(key + k * a.qk_dim, a.qk_dim, 1, rows, a.qk_dim, w.keys + (k - begin) / kPanelRows * E::a_elements(a.qk_dim));
      E::pack_a(value + k * a.v_dim, a.v_dim, 1, rows, a.v_dim, w.values + (k - begin) / kPanelRows * E::a_elements(a.v_dim));
    }
    if (!by_feature) return;
    // For dQ, where the gradient of a hidden score, 0, meets the key. Where the key is seen its scores are NaN already.
    const S* rows = key + begin * a.qk_dim;
    const int64_t elements = (end - begin) * a.qk_dim;
    const bool finite = all_finite(rows, elements);
    Scratch scratch(finite ? 0 : Scratch::size<S>(elements));
    if (!finite) {
      S* copy = scratch.take<S>(elements);
      copy_finite(rows, elements, copy);
      rows = copy;
    }
    for (int64_t d = 0; d < a.qk_dim; d += kPanelRows) {
      E::pack_a(rows + d, 1, a.qk_dim, static_cast<int>(least<int64_t>(kPanelRows, a.qk_dim - d)), end - begin,
                w.keys_by_feature + d / kPanelRows * E::a_elements(kKeys));
    }
  }

  // Which keys of [k0, k1) a mask that is the same for all queries shows to head h, in `shown`. Bit i: it shows some of
  // the i-th 32.
  uint64_t look_up_mask(int64_t b, int64_t h, int64_t k0, int64_t k1, uint8_t* shown) const {
    if (!by_key) return ~uint64_t{0};
    const uint8_t* mask = a.mask + b * a.mask_strides[0] + h * a.mask_strides[1];
    uint64_t live = 0;
    for (int64_t k = k0; k < k1; ++k) {
      shown[k - k0] = mask[k * a.mask_strides[3]] != 0;
      live |= uint64_t{shown[k - k0]} << (k - k0) / kPanelRows;
    }
    return live;
  }

  // Of the queries of a block, C to a span.
  struct Spans {
    SegmentSpan segments[kQueries / C], places[kQueries / C];
  };
  void look_up_spans(int64_t b, int64_t q0, int64_t q1, Spans* spans) const {
    if (a.q_segments) spans_of(a.q_segments + b * a.q_segments_stride, q0, q1, C, spans->segments);
    if (a.positions) spans_of(a.positions + b * a.positions_stride, q0, q1, C, spans->places);
  }

  // Which columns of the query block from q0 on the masks leave to the 32 keys from `key` on, C to a bit.
  uint64_t columns_of(const Blocks& blocks, int64_t b, int64_t key, int rows, int64_t q0, const Spans& spans) const {
    const Range range = queries_of(a, key, key + rows - 1);
    uint64_t bits = Runs::of(greatest(range.begin, q0) - q0, least(range.end, q0 + kQueries) - q0, C);
    if (a.positions) bits = meeting(bits, spans.places, places_that_see(a, key, key + rows - 1));
    if (a.q_segments) bits = meeting(bits, spans.segments, span_of(a.kv_segments + b * a.kv_segments_stride, key, key + rows));
    return bits && blocks.codes ? bits & blocks.live_queries(key, key + rows, q0, least(a.q_len, q0 + kQueries), C) : bits;
  }

  // P^T and dS^T of the 32 keys from `key` on against columns [begin, end) of the query block from q0 on.
  // `p` and `ds` of w are written from column 0 on, dscores (the panel's rows) in place. `shown`: of the panel's keys,
  // with by_key. Without kOperands the gradients are those of the bias.
  template <bool kOperands>
  void panel(const Scores<T>& scores, const Blocks& blocks, const uint8_t* shown, const uint32_t* seed, int64_t key, int rows, int64_t q0, int begin, int end,
             const Packed* keys, const Packed* values, const Packed* queries_by_feature, const Packed* douts_by_feature, const T* sums,
             const T* delta, const Work& w, T* dscores) const {
    for (int c = begin; c < end; c += C) {
      E::product(keys, E::a_stride(a.qk_dim), queries_by_feature + c / C * E::b_elements(a.qk_dim), a.qk_dim, rows, w.products + c, kStride, false);
      E::product(values, E::a_stride(a.v_dim), douts_by_feature + c / C * E::b_elements(a.v_dim), a.v_dim, rows, w.dprobabilities + c, kStride, false);
    }
    const V<T> unit_scale = splat(Exp::kPerNat * static_cast<T>(modified ? 1.0 : a.scale));
    // The gradient of a bias that is added after the soft-cap is that of the logits.
    const bool capped = a.softcap != 0 && (kOperands || !a.bias_last);
    const bool hidden = blocks.codes && !blocks.whole(q0 + begin, least(a.q_len, q0 + end), key, key + rows);
    for (int r = 0; r < rows; ++r) {
      T *s = w.products + r * kStride, *dp = w.dprobabilities + r * kStride, *ds = dscores + r * kStride;
      Range own = queries_of(a, key + r, key + r);
      own = {greatest(own.begin, q0 + begin), least(own.end, q0 + end)};
      int seen_begin = static_cast<int>(own.begin - q0), seen_end = static_cast<int>(own.end - q0);
      if (seen_begin >= seen_end || (by_key && !shown[r])) seen_begin = seen_end = begin;
      if (modified && seen_begin < seen_end) scores.apply(s + seen_begin, key + r, q0 + seen_begin, seen_end - seen_begin, w.steep + seen_begin);
      if (hidden && seen_begin < seen_end) blocks.hide_queries(s + seen_begin, key + r, q0 + seen_begin, seen_end - seen_begin);
      fill(s, begin, seen_begin, static_cast<T>(-kInfinity));
      fill(s, seen_end, end, static_cast<T>(-kInfinity));
      if (seed) keep_factors(column_hash(seed[1], key + r), w.row_hashes, kQueries, a.dropout_threshold, static_cast<T>(a.keep_scale), w.keep);
      auto gradients = [&](int i, V<T>& p, V<T>& g) __attribute__((always_inline)) {
        const V<T> logit = load(s + i);
        p = Exp::power(minimum<T>(logit * unit_scale - load(sums + i), V<T>{}));  // huge logits may exceed their sum's
        V<T> d = load(dp + i);
        V<T> kept = p;
        if (seed) {
          const V<T> keep = load(w.keep + i);
          d *= keep;
          kept *= keep;
        }
        g = p * (d - load(delta + i));
        if (capped) g *= load(w.steep + i);
        g = p > T(0) ? g : (p == T(0) ? V<T>{} : p);  // exactly zero where masked; a NaN goes through
        p = kept;
      };
      for (int i = begin; i < end; i += C) {
        V<T> p0, p1, g0, g1;
        gradients(i, p0, g0);
        gradients(i + W, p1, g1);
        store(ds + i, g0);
        store(ds + i + W, g1);
        if constexpr (kOperands) {
          E::put(w.p, E::a_stride(kQueries), r, i - begin, p0, p1);
          E::put(w.ds, E::a_stride(kQueries), r, i - begin, g0, g1);
        }
      }
    }
  }
};

}  // namespace vishwamai::VISHWAMAI_ISA
