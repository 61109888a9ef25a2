// AdamW over vectors of gradient, moments and parameter (adam.h).
#include "adam.h"
#include "rows.h"

namespace vishwamai::VISHWAMAI_ISA {
namespace {

template <class S>
void run(const AdamArgs& a, int64_t begin, int64_t n) {
  const float* gradient = a.gradient + begin;
  float *param = a.param + begin, *second = a.second + begin;
  S* first = static_cast<S*>(a.first) + begin;
  for_vectors<float>(n, [&](int64_t i, auto count) {
    const f32v g = get(gradient + i, count) * a.clip;
    const f32v mu = g * a.add_first + get(first + i, count) * a.keep_first;
    const f32v nu = g * g * a.add_second + get(second + i, count) * a.keep_second;
    put(first + i, mu, count);
    put(second + i, nu, count);
    if (a.rate == 0) return;
    const f32v p = get(param + i, count), direction = mu * a.first_scale / (square_root(nu * a.second_scale) + a.eps);
    put(param + i, V<float>(p + (direction + p * a.decay) * a.rate), count);
  });
}

}  // namespace

void adam_run(const AdamArgs& a, const Threads& threads) {
  VISHWAMAI_ROWS_OF_AVX512(a.storage, adam_run(a, threads));
  constexpr int64_t each = kTaskBytes / static_cast<int64_t>(sizeof(float)) / 2;
  parallel_for(threads, ceil_div(a.n, each), [&](int64_t task) {
    const int64_t begin = task * each, n = least(each, a.n - begin);
    if (a.storage == Storage::bf16) run<bf16>(a, begin, n);
    else run<float>(a, begin, n);
  }, Share::runs);
}

}  // namespace vishwamai::VISHWAMAI_ISA
