// Attention backward: five products per block of scores, with P recomputed from the logsumexp (FlashAttention-2; Dao, 2023).
//
// The scores are held transposed, [keys, queries]: P^T and dS^T are then row-major left operands of dV += P^T dO and
// dK += dS^T Q, the statistics of the queries are vectors along the rows, and dQ^T += K^T dS^T needs no transpose either.
// A task owns some key blocks of one kv head, with their dK and dV, and its own sum of dQ; the tasks of a head split its
// key blocks, and their dQ sums are added in a fixed order at the end.
#include "cpu_blocks.h"

namespace vishwamai::VISHWAMAI_ISA {
namespace {

constexpr int64_t kWorkBytes = 96 << 20;  // packed queries and dQ sums held at a time

template <class S, class E>
struct Backward {
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
  // A mask that is the same for all queries (padding): a key is hidden as a whole, and panels without a visible one are skipped.
  const bool by_key = a.mask && a.mask_strides[2] == 0;
  const bool modified = Scores<T>::needed(a, by_key);

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

  // delta = rowsum(dO * O) - dlogsumexp, and the logsumexp in the unit of Exp, with +infinity where a row attends to nothing, so that P = 0.
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
    T* keep;
    uint32_t* row_hashes;
  };
  size_t work_size() const {
    return Scratch::size<Packed>(kPanels * E::a_elements(a.qk_dim)) + Scratch::size<Packed>(kPanels * E::a_elements(a.v_dim)) +
           Scratch::size<Packed>(dq_rows / kPanelRows * E::a_elements(kKeys)) + 2 * Scratch::size<T>(kPanelRows * kStride) +
           Scratch::size<T>(kKeys * kStride) + 2 * Scratch::size<Packed>(E::a_elements(kQueries)) + Scratch::size<T>(kQueries) +
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
    for (int64_t d = 0; d < a.qk_dim; d += kPanelRows) {
      E::pack_a(key + begin * a.qk_dim + d, 1, a.qk_dim, static_cast<int>(least<int64_t>(kPanelRows, a.qk_dim - d)), end - begin,
                w.keys_by_feature + d / kPanelRows * E::a_elements(kKeys));
    }
  }

  // Which keys of [k0, k1) a mask that is the same for all queries shows to head h, in `shown`.  Bit i: it shows some of the i-th 32.
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

  // Which columns of the query block from q0 on the masks leave to the 32 keys from `key` on, C to a bit; `spans`: the queries' segments.
  uint64_t columns_of(const Blocks& blocks, int64_t b, int64_t key, int rows, int64_t q0, const SegmentSpan* spans) const {
    const Range range = queries_of(a, key, key + rows - 1);
    uint64_t bits = Runs::of(greatest(range.begin, q0) - q0, least(range.end, q0 + kQueries) - q0, C);
    if (a.q_segments) bits = meeting(bits, spans, span_of(a.kv_segments + b * a.kv_segments_stride, key, key + rows));
    return bits && blocks.codes ? bits & blocks.live_queries(key, key + rows, q0, least(a.q_len, q0 + kQueries), C) : bits;
  }

  // P^T and dS^T of the 32 keys from `key` on against columns [begin, end) of the query block from q0 on.
  // `p` and `ds` of w are written from column 0 on, dscores (the panel's rows) in place.  `shown`: of the panel's keys, with by_key.
  template <bool kOperands>
  void panel(const Scores<T>& scores, const Blocks& blocks, const uint8_t* shown, const uint32_t* seed, int64_t key, int rows, int64_t q0, int begin, int end,
             const Packed* keys, const Packed* values, const Packed* queries_by_feature, const Packed* douts_by_feature, const T* sums,
             const T* delta, const Work& w, T* dscores) const {
    for (int c = begin; c < end; c += C) {
      E::product(keys, E::a_stride(a.qk_dim), queries_by_feature + c / C * E::b_elements(a.qk_dim), a.qk_dim, rows, w.products + c, kStride, false);
      E::product(values, E::a_stride(a.v_dim), douts_by_feature + c / C * E::b_elements(a.v_dim), a.v_dim, rows, w.dprobabilities + c, kStride, false);
    }
    const V<T> unit_scale = splat(Exp::kPerNat * static_cast<T>(modified ? 1.0 : a.scale));
    const T inverse_cap = a.softcap != 0 ? static_cast<T>(1 / a.softcap) : T(0);
    const bool hidden = blocks.codes && !blocks.whole(q0 + begin, least(a.q_len, q0 + end), key, key + rows);
    for (int r = 0; r < rows; ++r) {
      T *s = w.products + r * kStride, *dp = w.dprobabilities + r * kStride, *ds = dscores + r * kStride;
      Range own = queries_of(a, key + r, key + r);
      own = {greatest(own.begin, q0 + begin), least(own.end, q0 + end)};
      int seen_begin = static_cast<int>(own.begin - q0), seen_end = static_cast<int>(own.end - q0);
      if (seen_begin >= seen_end || (by_key && !shown[r])) seen_begin = seen_end = begin;
      if (modified && seen_begin < seen_end) scores.apply(s + seen_begin, key + r, q0 + seen_begin, seen_end - seen_begin);
      if (hidden && seen_begin < seen_end) blocks.hide_queries(s + seen_begin, key + r, q0 + seen_begin, seen_end - seen_begin);
      fill(s, begin, seen_begin, static_cast<T>(-kInfinity));
      fill(s, seen_end, end, static_cast<T>(-kInfinity));
      if (seed) keep_factors(column_hash(seed[1], key + r), w.row_hashes, kQueries, a.dropout_threshold, static_cast<T>(a.keep_scale), w.keep);
      auto gradients = [&](int i, V<T>& p, V<T>& g) __attribute__((always_inline)) {
        const V<T> logit = load(s + i);
        p = Exp::power(logit * unit_scale - load(sums + i));
        V<T> d = load(dp + i);
        V<T> kept = p;
        if (seed) {
          const V<T> keep = load(w.keep + i);
          d *= keep;
          kept *= keep;
        }
        g = p * (d - load(delta + i));
        if (inverse_cap != 0) g *= T(1) - (logit * inverse_cap) * (logit * inverse_cap);
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

  // Key blocks chunk, chunk + chunks, ... of kv head h; `dq` holds a [dq_rows, kStride] block for each (head of the group, query block).
  void task(int64_t b, int64_t h, int64_t chunk, int64_t chunks, const Packed* packed, const Room& r, T* dq) const {
    const int64_t dk_stride = qk_panels * C + 16, dv_stride = v_panels * C + 16;
    Scratch scratch(work_size() + Scratch::size<T>(kKeys * dk_stride) + Scratch::size<T>(kKeys * dv_stride) +
                    Scratch::size<Packed>(E::b_elements(kKeys)));
    const Work w = take_work(scratch);
    T *dk = scratch.take<T>(kKeys * dk_stride), *dv = scratch.take<T>(kKeys * dv_stride);
    Packed* ds_panel = scratch.take<Packed>(E::b_elements(kKeys));
    uint8_t shown[kKeys];
    memset(dq, 0, sizeof(T) * static_cast<size_t>(group * q_blocks * dq_rows * kStride));
    for (int64_t block = chunk; block < key_blocks; block += chunks) {
      const int64_t k0 = block * kKeys, k1 = least(a.kv_len, k0 + kKeys);
      bool packed_keys = false;
      memset(dk, 0, sizeof(T) * static_cast<size_t>(kKeys * dk_stride));
      memset(dv, 0, sizeof(T) * static_cast<size_t>(kKeys * dv_stride));
      const Range range = queries_of(a, k0, k1 - 1);
      for (int64_t g = 0; g < group && !range.empty(); ++g) {
        const int64_t q_head = h * group + g;
        const uint64_t live = look_up_mask(b, q_head, k0, k1, shown);
        if (live == 0) continue;
        if (!packed_keys) pack_keys(b, h, block, w, packed_keys = true);
        const Head head = place(const_cast<Packed*>(packed) + g * r.elements, r);
        const Scores<T> scores(a, b, q_head, true, by_key);
        const Blocks blocks(a, q_head);
        const uint32_t* seed = a.dropout_seed ? a.dropout_seed + (b * a.q_heads + q_head) * 2 : nullptr;
        for (int64_t q_block = range.begin / kQueries; q_block * kQueries < range.end; ++q_block) {
          const int64_t q0 = q_block * kQueries, q1 = least(a.q_len, q0 + kQueries);
          SegmentSpan spans[kQueries / C];
          if (a.q_segments) spans_of(a.q_segments + b * a.q_segments_stride, q0, q1, C, spans);
          if (seed) for (int64_t i = 0; i < kQueries; ++i) w.row_hashes[i] = row_hash(seed[0], q0 + i);
          uint64_t computed[kPanels] = {};  // the columns that each panel of keys has scores for, C to a bit
          for (int64_t k = k0; k < k1; k += kPanelRows) {
            const int64_t i = (k - k0) / kPanelRows;
            const int rows = static_cast<int>(least<int64_t>(kPanelRows, k1 - k));
            if ((live >> i & 1) == 0) continue;
            Runs runs{computed[i] = columns_of(blocks, b, k, rows, q0, spans), C};
            for (int begin, end; runs.next(&begin, &end);) {
              panel<true>(scores, blocks, shown + i * kPanelRows, seed, k, rows, q0, begin, end, w.keys + i * E::a_elements(a.qk_dim), w.values + i * E::a_elements(a.v_dim),
                          head.queries_by_feature + q0 / C * E::b_elements(a.qk_dim), head.douts_by_feature + q0 / C * E::b_elements(a.v_dim),
                          head.sums + q0, head.delta + q0, w, w.dscores + i * kPanelRows * kStride);
              for (int64_t v = 0; v < v_panels; ++v) {
                add_product<E>(w.p, E::a_stride(kQueries), head.douts + v * E::b_elements(padded_queries) + E::b_elements(q0 + begin), end - begin, rows,
                               dv + i * kPanelRows * dv_stride + v * C, dv_stride, true, group * (range.end - range.begin));
              }
              for (int64_t v = 0; v < qk_panels; ++v) {
                add_product<E>(w.ds, E::a_stride(kQueries), head.queries + v * E::b_elements(padded_queries) + E::b_elements(q0 + begin), end - begin, rows,
                               dk + i * kPanelRows * dk_stride + v * C, dk_stride, true, group * (range.end - range.begin));
              }
            }
          }
          T* dq_block = dq + (g * q_blocks + q_block) * dq_rows * kStride;
          for (int64_t c = 0; c < kQueries; c += C) {
            Runs keys{0, kPanelRows};
            for (int i = 0; i < kPanels; ++i) keys.bits |= (computed[i] >> (c / C) & 1) << i;
            for (int begin, end; keys.next(&begin, &end);) {
              const int64_t depth = least<int64_t>(end, k1 - k0) - begin;
              E::pack_b(w.dscores + begin * kStride + c, kStride, 1, depth, round_up<int64_t>(depth, kPanelRows), C, ds_panel);
              for (int64_t d = 0; d < dq_rows; d += kPanelRows) {
                add_product<E>(w.keys_by_feature + d / kPanelRows * E::a_elements(kKeys) + E::a_offset(begin), E::a_stride(k1 - k0), ds_panel, depth,
                               kPanelRows, dq_block + d * kStride + c, kStride, true, ceil_div(a.kv_len, chunks));
              }
            }
          }
        }
      }
      write_rows(dk, dk_stride, static_cast<T>(a.scale), static_cast<S*>(a.dkey) + ((b * a.kv_heads + h) * a.kv_len + k0) * a.qk_dim, k1 - k0, a.qk_dim);
      write_rows(dv, dv_stride, T(1), static_cast<S*>(a.dvalue) + ((b * a.kv_heads + h) * a.kv_len + k0) * a.v_dim, k1 - k0, a.v_dim);
    }
  }

  static void write_rows(const T* in, int64_t stride, T scale, S* out, int64_t rows, int64_t dim) {
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t d = 0; d < dim; d += W)
        store(out + r * dim + d, load(in + r * stride + d) * scale, static_cast<int>(least<int64_t>(W, dim - d)));
  }

  // dQ = scale * the sum of the chunks' dQ^T, transposed.
  void write_queries(int64_t b, int64_t q_head, int64_t q_block, const T* dq, int64_t chunks, int64_t chunk_stride) const {
    const int64_t q0 = q_block * kQueries, rows = least<int64_t>(kQueries, a.q_len - q0);
    Scratch scratch(Scratch::size<T>(dq_rows * kStride) + Scratch::size<T>(rows * (dq_rows + W)));
    T* sum = scratch.take<T>(dq_rows * kStride);
    T* transposed = scratch.take<T>(rows * (dq_rows + W));
    for (int64_t i = 0; i < dq_rows * kStride; i += W) {
      V<T> x = load(dq + i);
      for (int64_t c = 1; c < chunks; ++c) x += load(dq + c * chunk_stride + i);
      store(sum + i, x);
    }
    transpose_into(sum, kStride, static_cast<int>(a.qk_dim), static_cast<int>(rows), transposed, dq_rows + W);
    write_rows(transposed, dq_rows + W, static_cast<T>(a.scale), static_cast<S*>(a.dquery) + ((b * a.q_heads + q_head) * a.q_len + q0) * a.qk_dim, rows,
               a.qk_dim);
  }

  void run(const Threads& threads) const {
    const int64_t kv_heads = a.batch * a.kv_heads;
    const Room r = room();
    const int64_t dq_elements = group * q_blocks * dq_rows * kStride;
    const int64_t bytes = group * r.elements * static_cast<int64_t>(sizeof(Packed)) + dq_elements * static_cast<int64_t>(sizeof(T));
    const int64_t wave = least(kv_heads, greatest<int64_t>(threads.count, kWorkBytes / greatest<int64_t>(1, bytes)));
    const int64_t chunks = greatest<int64_t>(1, least(key_blocks, wave >= 4 * threads.count ? 1 : ceil_div<int64_t>(2 * threads.count, wave)));
    Scratch scratch(Scratch::size<Packed>(wave * group * r.elements) + Scratch::size<T>(wave * chunks * dq_elements));
    Packed* packed = scratch.take<Packed>(wave * group * r.elements);
    T* dq = scratch.take<T>(wave * chunks * dq_elements);
    for (int64_t g0 = 0; g0 < kv_heads; g0 += wave) {
      const int64_t heads = least(wave, kv_heads - g0);
      parallel_for(threads, heads * group * q_blocks, [&](int64_t i) {
        const int64_t index = i / q_blocks, block = i % q_blocks, g = g0 + index / group, b = g / a.kv_heads;
        const int64_t q_head = g % a.kv_heads * group + index % group, begin = block * kQueries;
        const Head head = place(packed + index * r.elements, r);
        statistics(b, q_head, begin, begin + kQueries, head.sums + begin, head.delta + begin);
        pack_by_feature(b, q_head, block, head.queries_by_feature + begin / C * E::b_elements(a.qk_dim), head.douts_by_feature + begin / C * E::b_elements(a.v_dim));
        pack_by_query(b, q_head, block, head);
      });
      parallel_for(threads, heads * chunks, [&](int64_t i) {
        typename E::Scope scope;
        (void)scope;
        const int64_t g = g0 + i / chunks;
        task(g / a.kv_heads, g % a.kv_heads, i % chunks, chunks, packed + i / chunks * group * r.elements, r, dq + i * dq_elements);
      });
      parallel_for(threads, heads * group * q_blocks, [&](int64_t i) {
        const int64_t index = i / q_blocks, g = g0 + index / group;
        const T* sums = dq + index / group * chunks * dq_elements + (index % group * q_blocks + i % q_blocks) * dq_rows * kStride;
        write_queries(g / a.kv_heads, g % a.kv_heads * group + index % group, i % q_blocks, sums, chunks, dq_elements);
      });
    }
  }

  // dbias over the key block `block` for bias batch bb and head bh: the sum of dS over whatever shares that bias.
  void bias_task(int64_t bb, int64_t bh, int64_t block) const {
    Scratch scratch(work_size() + Scratch::size<Packed>(kQueries / C * E::b_elements(a.qk_dim)) +
                    Scratch::size<Packed>(kQueries / C * E::b_elements(a.v_dim)) + 2 * Scratch::size<T>(kQueries));
    const Work w = take_work(scratch);
    Packed* queries = scratch.take<Packed>(kQueries / C * E::b_elements(a.qk_dim));
    Packed* douts = scratch.take<Packed>(kQueries / C * E::b_elements(a.v_dim));
    T *sums = scratch.take<T>(kQueries), *delta = scratch.take<T>(kQueries);
    uint8_t shown[kKeys];
    const int64_t *shape = a.dbias_shape, k0 = block * kKeys, k1 = least(a.kv_len, k0 + kKeys);
    T* dbias = static_cast<T*>(a.dbias) + (bb * shape[1] + bh) * shape[2] * shape[3];
    const int64_t q_stride = shape[2] == 1 ? 0 : shape[3], k_stride = shape[3] == 1 ? 0 : 1;
    const Range range = queries_of(a, k0, k1 - 1);
    for (int64_t b = shape[0] == 1 ? 0 : bb; b < (shape[0] == 1 ? a.batch : bb + 1); ++b) {
      for (int64_t h = shape[1] == 1 ? 0 : bh; h < (shape[1] == 1 ? a.q_heads : bh + 1); ++h) {
        const uint64_t live = range.empty() ? 0 : look_up_mask(b, h, k0, k1, shown);
        if (live == 0) continue;
        pack_keys(b, h / group, block, w, false);
        const Scores<T> scores(a, b, h, true, by_key);
        const Blocks blocks(a, h);
        const uint32_t* seed = a.dropout_seed ? a.dropout_seed + (b * a.q_heads + h) * 2 : nullptr;
        for (int64_t q_block = range.begin / kQueries; q_block * kQueries < range.end; ++q_block) {
          const int64_t q0 = q_block * kQueries, q1 = least(a.q_len, q0 + kQueries);
          SegmentSpan spans[kQueries / C];
          if (a.q_segments) spans_of(a.q_segments + b * a.q_segments_stride, q0, q1, C, spans);
          statistics(b, h, q0, q0 + kQueries, sums, delta);
          pack_by_feature(b, h, q_block, queries, douts);
          if (seed) for (int64_t i = 0; i < kQueries; ++i) w.row_hashes[i] = row_hash(seed[0], q0 + i);
          for (int64_t k = k0; k < k1; k += kPanelRows) {
            const int64_t i = (k - k0) / kPanelRows;
            const int rows = static_cast<int>(least<int64_t>(kPanelRows, k1 - k));
            if ((live >> i & 1) == 0) continue;
            Runs runs{columns_of(blocks, b, k, rows, q0, spans), C};
            for (int begin, end; runs.next(&begin, &end);) {
              panel<false>(scores, blocks, shown + i * kPanelRows, seed, k, rows, q0, begin, end, w.keys + i * E::a_elements(a.qk_dim),
                           w.values + i * E::a_elements(a.v_dim), queries, douts, sums, delta, w, w.dscores);
              for (int r = 0; r < rows; ++r) {
                const T* ds = w.dscores + r * kStride;  // zero beyond q1
                T* target = dbias + q0 * q_stride + (k + r) * k_stride;
                if (q_stride != 0) {
                  for (int64_t c = begin; c < least<int64_t>(end, q1 - q0); ++c) target[c * q_stride] += ds[c];
                } else {
                  V<T> sum = {};
                  for (int c = begin; c < end; c += W) sum += load(ds + c);
                  *target += sum_lanes<T>(sum);
                }
              }
            }
          }
        }
      }
    }
  }

  void run_bias(const Threads& threads) const {
    const int64_t* shape = a.dbias_shape;
    memset(a.dbias, 0, sizeof(T) * static_cast<size_t>(shape[0] * shape[1] * shape[2] * shape[3]));
    // Key blocks write to disjoint columns, unless all keys share one.
    const int64_t blocks = shape[3] == 1 ? 1 : key_blocks;
    parallel_for(threads, shape[0] * shape[1] * blocks, [&](int64_t i) {
      typename E::Scope scope;
      (void)scope;
      const int64_t bias_head = i / blocks;
      for (int64_t block = i % blocks; block < key_blocks; block += blocks) bias_task(bias_head / shape[1], bias_head % shape[1], block);
    });
  }
};

template <class S, class E>
void run(const AttentionArgs& a, const Threads& threads) {
  if (a.dbias) Backward<S, E>{a}.run_bias(threads);
  else Backward<S, E>{a}.run(threads);
}

void run_any(const AttentionArgs& a, const Threads& threads) {
  if (a.storage == Storage::f64) return VISHWAMAI_AVX512_OR(attention_backward(a, threads), run<double, FmaEngine<double>>(a, threads));
  if (a.storage == Storage::bf16) return run<bf16, HalfEngine>(a, threads);
#if defined(__AMX_BF16__)
  if (a.parts == 2) return run<float, AmxEngine<2>>(a, threads);
  return run<float, AmxEngine<3>>(a, threads);
#else
  return run<float, FmaEngine<float>>(a, threads);
#endif
}

}  // namespace

void attention_backward(const AttentionArgs& a, const Threads& threads) { run_any(a, threads); }
void attention_bias_gradient(const AttentionArgs& a, const Threads& threads) { run_any(a, threads); }

}  // namespace vishwamai::VISHWAMAI_ISA
