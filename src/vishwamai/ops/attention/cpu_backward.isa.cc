// Attention backward: dQ, dK and dV from the gradients of the scores (cpu_score_gradients.h), five products for each
// block of them. A task owns some key blocks of one kv head, with their dK and dV, and its own sum of dQ; the tasks of a
// head split its key blocks, and their dQ sums are added in a fixed order at the end.
#include "cpu_score_gradients.h"

namespace vishwamai::VISHWAMAI_ISA {
namespace {

constexpr int64_t kWorkBytes = 96 << 20;  // packed queries and dQ sums held at a time

template <class S, class E>
struct Backward : ScoreGradients<S, E> {
  using Base = ScoreGradients<S, E>;
  using typename Base::T, typename Base::Packed, typename Base::Head, typename Base::Room, typename Base::Work;
  using Base::W, Base::C, Base::kKeys, Base::kQueries, Base::kStride, Base::kPanels, Base::a, Base::group,
      Base::q_blocks, Base::key_blocks, Base::padded_queries, Base::qk_panels, Base::v_panels, Base::dq_rows,
      Base::by_key, Base::room, Base::place, Base::statistics, Base::pack_by_feature, Base::pack_by_query,
      Base::work_size, Base::take_work, Base::pack_keys, Base::look_up_mask, Base::columns_of, Base::panel;

  // Key blocks chunk, chunk + chunks, ... of kv head h; `dq` holds a [dq_rows, kStride] block for each (head of the
  // group, query block).
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
          typename Base::Spans spans;
          this->look_up_spans(b, q0, q1, &spans);
          if (seed) for (int64_t i = 0; i < kQueries; ++i) w.row_hashes[i] = row_hash(seed[0], q0 + i);
          uint64_t computed[kPanels] = {};  // the columns that each panel of keys has scores for, C to a bit
          for (int64_t k = k0; k < k1; k += kPanelRows) {
            const int64_t i = (k - k0) / kPanelRows;
            const int rows = static_cast<int>(least<int64_t>(kPanelRows, k1 - k));
            if ((live >> i & 1) == 0) continue;
            Runs runs{computed[i] = columns_of(blocks, b, k, rows, q0, spans), C};
            for (int begin, end; runs.next(&begin, &end);) {
              this->template panel<true>(scores, blocks, shown + i * kPanelRows, seed, k, rows, q0, begin, end, w.keys + i * E::a_elements(a.qk_dim), w.values + i * E::a_elements(a.v_dim),
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
};

template <class S, class E>
void run(const AttentionArgs& a, const Threads& threads) {
  Backward<S, E>{{a}}.run(threads);
}

}  // namespace

void attention_backward(const AttentionArgs& a, const Threads& threads) {
  if (a.storage == Storage::f64) return VISHWAMAI_FLOAT64_OR(attention_backward(a, threads), run<double, FmaEngine<double>>(a, threads));
  if (a.storage == Storage::bf16) return run<bf16, HalfEngine>(a, threads);
#if defined(__AMX_BF16__)
  if (a.parts == 2) return run<float, AmxEngine<2>>(a, threads);
  return run<float, AmxEngine<3>>(a, threads);
#else
  return VISHWAMAI_BASE_OR(attention_backward(a, threads), run<float, FmaEngine<float>>(a, threads));
#endif
}

}  // namespace vishwamai::VISHWAMAI_ISA
