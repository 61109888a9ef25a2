// Activations, their derivatives and dropout, element by element.
//
// Each function is written so that one exponential and one reciprocal are all it takes, and so that its tails are the
// limits: arguments are clamped where the function has reached 0 or x, which also keeps every intermediate finite.
#include "cpu_activation.h"
#include "vishwamai/core/cpp/dropout.h"
#include "vishwamai/core/cpp/rows.h"

namespace vishwamai::VISHWAMAI_ISA {
namespace {

constexpr double kSqrt2OverPi = 0.79788456080286535588;
constexpr double kInvSqrt2Pi = 0.39894228040143267794, kCubic = 0.044715;

// What results of storage S need: 16-bit ones are computed with fewer terms.
template <class S, class T = compute_t<S>>
VISHWAMAI_INLINE V<T> sigmoid(V<T> x) {  // |x| <= 80: 1 + e^80 is within what `reciprocal` takes
  return reciprocal(exp_within<S>(-x) + T(1));
}
// P(y < x) of a standard normal y, for |x| <= 15, and its density.
template <class S>
struct Normal {
  using T = compute_t<S>;
  V<T> density, below;
  explicit VISHWAMAI_INLINE Normal(V<T> x) {
    if constexpr (std::is_same_v<T, double>) {
      density = exp_within<S>(x * x * T(-0.5));
      below = normal_cdf(x);
    } else {
      const V<T> t = bound(x < T(0) ? -x : x, T(0), T(14.5));
      density = exp_within<S>(t * t * T(-0.5));
      const V<T> tail = density * normal_tail(reciprocal(t * T(0.3) + T(1)));
      below = x < T(0) ? tail : T(1) - tail;
    }
    density *= static_cast<T>(kInvSqrt2Pi);
  }
};

struct Gelu {
  template <class S, class T = compute_t<S>>
  static constexpr T reach = std::is_same_v<T, double> ? T(40) : T(15);
  template <class S, class T = compute_t<S>>
  static VISHWAMAI_INLINE V<T> value(V<T> x) {
    return maximum(splat(-reach<S>), x) * Normal<S>(bound(x, -reach<S>, reach<S>)).below;
  }
  template <class S, class T = compute_t<S>>
  static VISHWAMAI_INLINE V<T> slope(V<T> x) {
    const V<T> z = bound(x, -reach<S>, reach<S>);
    const Normal<S> normal(z);
    return normal.below + z * normal.density;
  }
};
// x / 2 (1 + tanh(u)) = x sigmoid(2 u): no cancellation on the left.
struct GeluTanh {
  template <class S, class T = compute_t<S>>
  static VISHWAMAI_INLINE V<T> value(V<T> x) {
    const V<T> z = bound(x, T(-9.7), T(9.7));  // 2 u = 80 there
    const V<T> twice = z * (z * z * static_cast<T>(2 * kSqrt2OverPi * kCubic) + static_cast<T>(2 * kSqrt2OverPi));
    return maximum(splat(T(-9.7)), x) * sigmoid<S>(twice);
  }
  template <class S, class T = compute_t<S>>
  static VISHWAMAI_INLINE V<T> slope(V<T> x) {
    const V<T> z = bound(x, T(-9.7), T(9.7)), square = z * z;
    const V<T> s = sigmoid<S>(z * (square * static_cast<T>(2 * kSqrt2OverPi * kCubic) + static_cast<T>(2 * kSqrt2OverPi)));
    const V<T> inner = z * (square * static_cast<T>(6 * kSqrt2OverPi * kCubic) + static_cast<T>(2 * kSqrt2OverPi));
    return s * ((T(1) - s) * inner + T(1));
  }
};
struct Silu {
  template <class S, class T = compute_t<S>>
  static VISHWAMAI_INLINE V<T> value(V<T> x) {
    return maximum(splat(T(-80)), x) * sigmoid<S>(V<T>(bound(x, -80, 80)));
  }
  template <class S, class T = compute_t<S>>
  static VISHWAMAI_INLINE V<T> slope(V<T> x) {
    const V<T> z = bound(x, -80, 80), s = sigmoid<S>(z);
    return s * ((T(1) - s) * z + T(1));
  }
};
struct Relu2 {
  template <class S, class T = compute_t<S>>
  static VISHWAMAI_INLINE V<T> value(V<T> x) {
    const V<T> z = maximum(V<T>{}, x);
    return z * z;
  }
  template <class S, class T = compute_t<S>>
  static VISHWAMAI_INLINE V<T> slope(V<T> x) {
    return maximum(V<T>{}, x) * T(2);
  }
};

// Whole vectors of a run of elements; `keep`: a factor of each. A function of its own, so that the compiler makes one.
template <class F, class S, bool kSlope, bool kKeep, class T = compute_t<S>>
__attribute__((noinline)) void vectors(const S* x, const S* dy, const T* keep, int64_t n, S* out) {
  for (int64_t i = 0; i < n; i += lanes<T>) {
    V<T> v = load(x + i);
    if constexpr (kSlope) v = load(dy + i) * F::template slope<S>(v);
    else v = F::template value<S>(v);
    if constexpr (kKeep) {
      const V<T> factor = load(keep + i);
      v = factor == T(0) ? factor : v * factor;  // a dropped NaN is 0
    }
    store(out + i, v);
  }
}

// One run of n elements; the last of them as a vector of their own.
template <class F, class S, bool kSlope, bool kKeep, class T = compute_t<S>>
void run(const S* x, const S* dy, const T* keep, int64_t n, S* out) {
  constexpr int W = lanes<T>;
  const int64_t whole = n / W * W;
  const size_t rest = static_cast<size_t>(n - whole);
  vectors<F, S, kSlope, kKeep>(x, dy, keep, whole, out);
  if (rest == 0) return;
  S last_x[W] = {}, last_dy[W] = {}, last_out[W];
  T last_keep[W] = {};
  memcpy(last_x, x + whole, rest * sizeof(S));
  if constexpr (kSlope) memcpy(last_dy, dy + whole, rest * sizeof(S));
  if constexpr (kKeep) memcpy(last_keep, keep + whole, rest * sizeof(T));
  vectors<F, S, kSlope, kKeep>(last_x, last_dy, last_keep, W, last_out);
  memcpy(out + whole, last_out, rest * sizeof(S));
}
template <class F, bool kKeep, class S, class T = compute_t<S>>
void run(const S* x, const S* dy, const T* keep, int64_t n, S* out) {
  if (dy) run<F, S, true, kKeep>(x, dy, keep, n, out);
  else run<F, S, false, kKeep>(x, dy, keep, n, out);
}

template <class F, class S>
void plain(const ActivationArgs& a, const Threads& threads) {
  const int64_t n = a.groups * a.rows * a.features, each = kTaskBytes / static_cast<int64_t>(sizeof(S)) / 2;
  parallel_for(threads, ceil_div(n, each), [&](int64_t task) {
    const int64_t begin = task * each, count = least(each, n - begin);
    const S* x = static_cast<const S*>(a.x) + begin;
    const S* dy = a.dy ? static_cast<const S*>(a.dy) + begin : nullptr;
    S* out = static_cast<S*>(a.out) + begin;
    run<F, false>(x, dy, static_cast<const compute_t<S>*>(nullptr), count, out);
  }, Share::runs);
}

template <class F, class S, class T = compute_t<S>>
void dropped(const ActivationArgs& a, const Threads& threads) {
  const int64_t n = a.features, per = rows_per_task(a.rows, 2 * n * static_cast<int64_t>(sizeof(S)));
  const int64_t parts = ceil_div(a.rows, per);
  parallel_for(threads, a.groups * parts, [&](int64_t task) {
    const int64_t group = task / parts, first = task % parts * per, last = least(a.rows, first + per);
    const uint32_t *seed = a.seed + group * a.seed_stride, *columns = a.column_numbers + group * a.column_stride;
    const uint32_t* rows = a.row_numbers + group * a.row_stride;
    const size_t length = static_cast<size_t>(n);
    Scratch scratch(Scratch::size<uint32_t>(length) + Scratch::size<T>(length));
    uint32_t* hashes = scratch.take<uint32_t>(length);
    T* keep = scratch.take<T>(length);
    for (int64_t i = 0; i < n; ++i) hashes[i] = column_hash(seed[1], columns[i]);
    for (int64_t r = first; r < last; ++r) {
      keep_factors(row_hash(seed[0], rows[r]), hashes, n, a.threshold, static_cast<T>(a.keep_scale), keep);
      const int64_t at = (group * a.rows + r) * n;
      const S* dy = a.dy ? static_cast<const S*>(a.dy) + at : nullptr;
      run<F, true>(static_cast<const S*>(a.x) + at, dy, static_cast<const T*>(keep), n, static_cast<S*>(a.out) + at);
    }
  }, Share::runs);
}

template <class F>
void dispatch(const ActivationArgs& a, const Threads& threads) {
  for_storage(a.storage, [&](auto s) {
    if (a.seed) dropped<F, decltype(s)>(a, threads);
    else plain<F, decltype(s)>(a, threads);
  });
}

}  // namespace

void activation_run(const ActivationArgs& a, const Threads& threads) {
  VISHWAMAI_ROWS_OF_AVX512(a.storage, activation_run(a, threads));
  switch (a.kind) {
    case ActivationKind::gelu: return dispatch<Gelu>(a, threads);
    case ActivationKind::gelu_tanh: return dispatch<GeluTanh>(a, threads);
    case ActivationKind::silu: return dispatch<Silu>(a, threads);
    case ActivationKind::relu2: return dispatch<Relu2>(a, threads);
  }
}

}  // namespace vishwamai::VISHWAMAI_ISA
