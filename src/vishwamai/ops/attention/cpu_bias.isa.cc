// The gradient of attention's bias: the gradients of the scores (cpu_score_gradients.h), summed over what shares it.
#include "cpu_score_gradients.h"

namespace vishwamai::VISHWAMAI_ISA {
namespace {

template <class S, class E>
struct BiasGradient : ScoreGradients<S, E> {
  using Base = ScoreGradients<S, E>;
  using typename Base::T, typename Base::Packed, typename Base::Work;
  using Base::W, Base::C, Base::kKeys, Base::kQueries, Base::kStride, Base::a, Base::group, Base::key_blocks,
      Base::by_key, Base::statistics, Base::pack_by_feature, Base::work_size, Base::take_work, Base::pack_keys,
      Base::look_up_mask, Base::columns_of, Base::panel;

  // dbias over the key block `block` for bias batch bb and head bh: the sum of dS over whatever shares that bias.
  void task(int64_t bb, int64_t bh, int64_t block) const {
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
          typename Base::Spans spans;
          this->look_up_spans(b, q0, q1, &spans);
          statistics(b, h, q0, q0 + kQueries, sums, delta);
          pack_by_feature(b, h, q_block, queries, douts);
          if (seed) for (int64_t i = 0; i < kQueries; ++i) w.row_hashes[i] = row_hash(seed[0], q0 + i);
          for (int64_t k = k0; k < k1; k += kPanelRows) {
            const int64_t i = (k - k0) / kPanelRows;
            const int rows = static_cast<int>(least<int64_t>(kPanelRows, k1 - k));
            if ((live >> i & 1) == 0) continue;
            Runs runs{columns_of(blocks, b, k, rows, q0, spans), C};
            for (int begin, end; runs.next(&begin, &end);) {
              this->template panel<false>(scores, blocks, shown + i * kPanelRows, seed, k, rows, q0, begin, end, w.keys + i * E::a_elements(a.qk_dim),
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

  void run(const Threads& threads) const {
    const int64_t* shape = a.dbias_shape;
    memset(a.dbias, 0, sizeof(T) * static_cast<size_t>(shape[0] * shape[1] * shape[2] * shape[3]));
    // Key blocks write to disjoint columns, unless all keys share one.
    const int64_t blocks = shape[3] == 1 ? 1 : key_blocks;
    parallel_for(threads, shape[0] * shape[1] * blocks, [&](int64_t i) {
      typename E::Scope scope;
      (void)scope;
      const int64_t bias_head = i / blocks;
      for (int64_t block = i % blocks; block < key_blocks; block += blocks) task(bias_head / shape[1], bias_head % shape[1], block);
    });
  }
};

template <class S, class E>
void run(const AttentionArgs& a, const Threads& threads) {
  BiasGradient<S, E>{{a}}.run(threads);
}

}  // namespace

void attention_bias_gradient(const AttentionArgs& a, const Threads& threads) {
  if (a.storage == Storage::f64) return VISHWAMAI_FLOAT64_OR(attention_bias_gradient(a, threads), run<double, FmaEngine<double>>(a, threads));
  if (a.storage == Storage::bf16) return run<bf16, HalfEngine>(a, threads);
#if defined(__AMX_BF16__)
  if (a.parts == 2) return run<float, AmxEngine<2>>(a, threads);
  return run<float, AmxEngine<3>>(a, threads);
#else
  return VISHWAMAI_BASE_OR(attention_bias_gradient(a, threads), run<float, FmaEngine<float>>(a, threads));
#endif
}

}  // namespace vishwamai::VISHWAMAI_ISA
