// Activations, their derivatives and dropout, element by element.
//
// Each function is written so that one exponential and one reciprocal are all it takes, and so that its tails are the
// limits: arguments are clamped where the function has reached 0 or x, which also keeps every intermediate finite.
#include "cpu_activation.h"
#include "vishwamai/core/cpp/dropout.h"
#include "vishwamai/core/cpp/rows.h"

namespace vishwamai::VISHWAMAI_ISA {
namespace {

constexpr double kSqrtHalf = 0.70710678118654752440, kSqrt2OverPi = 0.79788456080286535588;
constexpr double kInvSqrt2Pi = 0.39894228040143267794, kCubic = 0.044715;

// What results of storage S need: 16-bit ones are computed with fewer terms.
template <class S, class T = compute_t<S>>
VISHWAMAI_INLINE V<T> sigmoid(V<T> x) {  // |x| <= 80: 1 + e^80 is within what `reciprocal` takes
  return reciprocal(exp_within<S>(-x) + T(1));
}
// `erf` of simd.h with an estimate in place of its division.
VISHWAMAI_INLINE f32v error_function(f32v x) {
  const f32v c = bound(x, -4.0f, 4.0f), s = c * c;
  f32v p = splat(-2.72614225801306e-10f);
  constexpr float numerator[] = {2.77068142495902e-08f,  -2.10102402082508e-06f, -5.69250639462346e-05f,
                                 -7.34990630326855e-04f, -2.95459980854025e-03f, -1.60960333262415e-02f};
  for (float a : numerator) p = p * s + a;
  f32v q = splat(-1.45660718464996e-05f);
  constexpr float denominator[] = {-2.13374055278905e-04f, -1.68282697438203e-03f, -7.37332916720468e-03f,
                                   -1.42647390514189e-02f};
  for (float a : denominator) q = q * s + a;
  return c * p * reciprocal(q);
}
VISHWAMAI_INLINE f64v error_function(f64v x) { return erf<double>(x); }

struct Gelu {
  template <class S, class T = compute_t<S>>
  static VISHWAMAI_INLINE V<T> value(V<T> x) {
    return maximum(splat(T(-40)), x) * T(0.5) * (error_function(x * static_cast<T>(kSqrtHalf)) + T(1));
  }
  template <class S, class T = compute_t<S>>
  static VISHWAMAI_INLINE V<T> slope(V<T> x) {
    const V<T> z = bound(x, -14, 14);
    const V<T> density = exp_within<S>(z * z * T(-0.5)) * static_cast<T>(kInvSqrt2Pi);
    return (error_function(z * static_cast<T>(kSqrtHalf)) + T(1)) * T(0.5) + z * density;
  }
};
// x / 2 (1 + tanh(u)) = x sigmoid(2 u): no cancellation on the left.
struct GeluTanh {
  template <class S, class T = compute_t<S>>
  static VISHWAMAI_INLINE V<T> value(V<T> x) {
    const V<T> z = bound(x, -9.7, 9.7);  // 2 u = 80 there
    const V<T> twice = z * (z * z * static_cast<T>(2 * kSqrt2OverPi * kCubic) + static_cast<T>(2 * kSqrt2OverPi));
    return maximum(splat(T(-9.7)), x) * sigmoid<S>(twice);
  }
  template <class S, class T = compute_t<S>>
  static VISHWAMAI_INLINE V<T> slope(V<T> x) {
    const V<T> z = bound(x, -9.7, 9.7), square = z * z;
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

// One run of n elements; `keep`: a factor of each, or null.
template <class F, class S, class T = compute_t<S>>
VISHWAMAI_INLINE void run(const S* x, const S* dy, const T* keep, int64_t n, S* out) {
  auto walk = [&](auto value) __attribute__((always_inline)) {
    for_vectors<T>(n, [&](int64_t i, auto count) __attribute__((always_inline)) {
      put(out + i, value(i, count), count);
    });
  };
  auto kept = [&](V<T> v, int64_t i, auto count) __attribute__((always_inline)) {  // a dropped NaN is 0
    const V<T> factor = get(keep + i, count);
    return factor == T(0) ? factor : v * factor;
  };
  if (dy && keep) {
    walk([&](int64_t i, auto count) __attribute__((always_inline)) {
      return kept(get(dy + i, count), i, count) * F::template slope<S>(get(x + i, count));
    });
  } else if (dy) {
    walk([&](int64_t i, auto count) __attribute__((always_inline)) {
      return get(dy + i, count) * F::template slope<S>(get(x + i, count));
    });
  } else if (keep) {
    walk([&](int64_t i, auto count) __attribute__((always_inline)) {
      return kept(F::template value<S>(get(x + i, count)), i, count);
    });
  } else {
    walk([&](int64_t i, auto count) __attribute__((always_inline)) { return F::template value<S>(get(x + i, count)); });
  }
}

template <class F, class S>
void plain(const ActivationArgs& a, const Threads& threads) {
  const int64_t n = a.groups * a.rows * a.features, each = kTaskBytes / static_cast<int64_t>(sizeof(S)) / 2;
  parallel_for(threads, ceil_div(n, each), [&](int64_t task) {
    const int64_t begin = task * each, count = least(each, n - begin);
    const S* x = static_cast<const S*>(a.x) + begin;
    const S* dy = a.dy ? static_cast<const S*>(a.dy) + begin : nullptr;
    S* out = static_cast<S*>(a.out) + begin;
    run<F>(x, dy, static_cast<const compute_t<S>*>(nullptr), count, out);
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
      run<F>(static_cast<const S*>(a.x) + at, dy, static_cast<const T*>(keep), n, static_cast<S*>(a.out) + at);
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
  switch (a.kind) {
    case ActivationKind::gelu: return dispatch<Gelu>(a, threads);
    case ActivationKind::gelu_tanh: return dispatch<GeluTanh>(a, threads);
    case ActivationKind::silu: return dispatch<Silu>(a, threads);
    case ActivationKind::relu2: return dispatch<Relu2>(a, threads);
  }
}

}  // namespace vishwamai::VISHWAMAI_ISA
