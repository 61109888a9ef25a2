// Layer and root-mean-square normalization over rows, one read of memory per pass.
//
// A row is read from memory once; the further walks over it (variance, scaling) find it in the first cache levels,
// which is why the variance is taken from the centred values and not from the cancelling difference of moments.
#include "cpu_norm.h"

#include <limits>

#include "vishwamai/core/cpp/rows.h"

namespace vishwamai::VISHWAMAI_ISA {
namespace {

// A result of this size leaves the cache before anyone reads it, so it is written past the cache. Above the upper bound
// the allocator hands out fresh pages, whose lines the kernel has just put into the cache by clearing them.
constexpr int64_t kStreamFrom = 8 << 20, kStreamTo = 32 << 20;

template <class T>
struct Moments {
  T mean, rstd;
};

// Sums f(vector) over the row in two chains, so that one addition does not wait for the other; the sums of its pieces
// as float64, for a mean far from zero shows its last digit in every result.
template <class S, class F, class T = compute_t<S>>
VISHWAMAI_INLINE double sum_row(const S* x, int64_t n, F&& f) {
  constexpr int W = lanes<T>;
  double sum = 0;
  for_pieces(n, [&](int64_t i, int64_t length) __attribute__((always_inline)) {
    const int64_t end = i + length;
    V<T> a = {}, b = {};
    for (; i + 2 * W <= end; i += 2 * W) {
      a += f(load(x + i));
      b += f(load(x + i + W));
    }
    for (; i < end; i += W) {
      const int count = static_cast<int>(least<int64_t>(W, end - i));
      a += only<T>(f(load(x + i, count)), count);
    }
    sum += sum_lanes<T>(a + b);
  });
  return sum;
}

// The moments of a row whose squares leave the range of T, or come near its lower end and lose digits.
template <class S, class T = compute_t<S>>
[[gnu::noinline]] Moments<T> wide_moments(const S* x, int64_t n, bool layer, double eps) {
  using Wide = std::conditional_t<std::is_same_v<T, float>, double, long double>;
  auto average = [&](auto f) {
    Wide sum = 0;
    for_vectors<T>(n, [&](int64_t i, auto count) {
      const V<T> v = get(x + i, count);
      for (int64_t lane = 0; lane < static_cast<int64_t>(count); ++lane) sum += f(static_cast<Wide>(v[lane]));
    });
    return sum / static_cast<Wide>(n);
  };
  const Wide mean = layer ? average([](Wide v) { return v; }) : Wide(0);
  const Wide square = average([&](Wide v) { return (v - mean) * (v - mean); });
  return {static_cast<T>(mean), static_cast<T>(1 / __builtin_sqrtl(square + static_cast<Wide>(eps)))};
}

template <class S, class T = compute_t<S>>
VISHWAMAI_INLINE Moments<T> moments(const S* x, int64_t n, bool layer, double eps) {
  constexpr T kLeast = std::is_same_v<T, float> ? T(1e-30) : T(1e-290);
  const double inverse = 1.0 / static_cast<double>(n);
  const T mean = layer ? static_cast<T>(sum_row(x, n, [](V<T> v) { return v; }) * inverse) : T(0);
  const V<T> m = splat(mean);
  T root = static_cast<T>(sum_row(x, n, [&](V<T> v) { return (v - m) * (v - m); }) * inverse + eps);
  if (!(root > kLeast && root <= std::numeric_limits<T>::max())) return wide_moments(x, n, layer, eps);
  if constexpr (std::is_same_v<T, float>) root = __builtin_sqrtf(root);
  else root = __builtin_sqrt(root);
  return {mean, 1 / root};
}

// A parameter as numbers of type T: where it is stored in 16 bits, it is widened once for the call.
template <class T>
class Parameter {
 public:
  Parameter(const void* data, Storage storage, int64_t count)
      : own_(storage == Storage::f32 || storage == Storage::f64), count_(static_cast<size_t>(count)),
        scratch_(own_ || data == nullptr ? 0 : Scratch::size<T>(count_)) {
    if (own_ || data == nullptr) {
      data_ = static_cast<const T*>(data);
    } else if constexpr (std::is_same_v<T, float>) {
      T* wide = scratch_.take<T>(count_);
      auto widen = [&](auto s) { for_vectors<T>(count, [&](int64_t i, auto n) { put(wide + i, get(static_cast<const decltype(s)*>(data) + i, n), n); }); };
      if (storage == Storage::bf16) widen(bf16());
      else widen(f16());
      data_ = wide;
    }
  }
  const T* at(int64_t offset) const { return data_ ? data_ + offset : nullptr; }

 private:
  bool own_;
  size_t count_;
  Scratch scratch_;
  const T* data_ = nullptr;
};

template <class S, bool kStream>
void forward_rows(const NormForwardArgs& a, const Parameter<compute_t<S>>& scales, const Parameter<compute_t<S>>& offsets, int64_t group, int64_t first, int64_t last) {
  using T = compute_t<S>;
  const int64_t n = a.features;
  const T *scale = scales.at(group * a.scale_stride), *offset = offsets.at(group * a.offset_stride);
  for (int64_t row = group * a.rows + first; row < group * a.rows + last; ++row) {
    const S* x = static_cast<const S*>(a.x) + row * n;
    S* y = static_cast<S*>(a.y) + row * n;
    if (a.residual) {
      const S* residual = static_cast<const S*>(a.residual) + row * n;
      S* total = static_cast<S*>(a.total) + row * n;
      for_vectors<T>(n, [&](int64_t i, auto count) { put(total + i, get(x + i, count) + get(residual + i, count), count); });
      x = total;
    }
    const Moments<T> m = moments(x, n, a.layer, a.eps);
    const V<T> mean = splat(m.mean), rstd = splat(m.rstd);
    auto finish = [&](auto has_scale, auto has_offset) __attribute__((always_inline)) {
      for_vectors<T>(n, [&](int64_t i, auto count) __attribute__((always_inline)) {
        V<T> v = (get(x + i, count) - mean) * rstd;
        if constexpr (has_scale) v *= get(scale + i, count);
        if constexpr (has_offset) v += get(offset + i, count);
        if constexpr (kStream) stream(y + i, v);
        else put(y + i, v, count);
      });
    };
    if (scale && offset) finish(std::true_type(), std::true_type());
    else if (scale) finish(std::true_type(), std::false_type());
    else if (offset) finish(std::false_type(), std::true_type());
    else finish(std::false_type(), std::false_type());
  }
  if constexpr (kStream) stream_fence();
}

template <class S>
void forward(const NormForwardArgs& a, const Threads& threads) {
  const int64_t row_bytes = a.features * static_cast<int64_t>(sizeof(S));
  const int64_t per = rows_per_task(a.rows, 2 * row_bytes), parts = ceil_div(a.rows, per);
  const bool streamed = row_bytes % 64 == 0 && reinterpret_cast<uintptr_t>(a.y) % 64 == 0 &&
                        a.groups * a.rows * row_bytes >= kStreamFrom && a.groups * a.rows * row_bytes < kStreamTo;
  const Parameter<compute_t<S>> scales(a.scale, a.scale_storage, a.scale_stride ? a.groups * a.features : a.features);
  const Parameter<compute_t<S>> offsets(a.offset, a.offset_storage, a.offset_stride ? a.groups * a.features : a.features);
  parallel_for(threads, a.groups * parts, [&](int64_t task) {
    const int64_t group = task / parts, first = task % parts * per, last = least(a.rows, first + per);
    if (streamed) forward_rows<S, true>(a, scales, offsets, group, first, last);
    else forward_rows<S, false>(a, scales, offsets, group, first, last);
  }, Share::runs);
}

// ds = rstd * (g - mean(g) - xhat * mean(g * xhat)), g = dy * scale; the parameters' sums go to `dscale` and `doffset`.
template <class S, class T = compute_t<S>>
void backward_row(const NormBackwardArgs& a, int64_t row, const T* scale, T* dscale, T* doffset) {
  const int64_t n = a.features;
  const S *s = static_cast<const S*>(a.s) + row * n, *dy = static_cast<const S*>(a.dy) + row * n;
  const S* dtotal = a.dtotal ? static_cast<const S*>(a.dtotal) + row * n : nullptr;
  S* dx = static_cast<S*>(a.dx) + row * n;
  const Moments<T> m = moments(s, n, a.layer, a.eps);
  const V<T> mean = splat(m.mean), rstd = splat(m.rstd);
  V<T> sum_g = {}, sum_gx = {};
  for_pieces(n, [&](int64_t first, int64_t length) __attribute__((always_inline)) {
    V<T> some_g = {}, some_gx = {};
    for_vectors<T>(length, [&](int64_t j, auto count) __attribute__((always_inline)) {
      const int64_t i = first + j;
      const V<T> xhat = (get(s + i, count) - mean) * rstd;
      V<T> g = get(dy + i, count);
      if (dscale) put(dscale + i, get(dscale + i, count) + g * xhat, count);
      if (doffset) put(doffset + i, get(doffset + i, count) + g, count);
      if (scale) g *= get(scale + i, count);
      some_g += g;
      some_gx += g * xhat;
    });
    sum_g += some_g;
    sum_gx += some_gx;
  });
  const T inverse = T(1) / static_cast<T>(n);
  const V<T> mean_g = splat(a.layer ? sum_lanes<T>(sum_g) * inverse : T(0)), mean_gx = splat(sum_lanes<T>(sum_gx) * inverse);
  for_vectors<T>(n, [&](int64_t i, auto count) {
    const V<T> xhat = (get(s + i, count) - mean) * rstd;
    V<T> g = get(dy + i, count);
    if (scale) g *= get(scale + i, count);
    V<T> d = rstd * (g - mean_g - xhat * mean_gx);
    if (dtotal) d += get(dtotal + i, count);
    put(dx + i, d, count);
  });
}

// out[group or 0] = sum over the parts (and the groups, when shared) of partial[group][part], always in the same order;
// the sums are rounded to `storage` at the end.
template <class T>
void sum_parts(const T* partial, int64_t groups, int64_t parts, int64_t n, bool shared, Storage storage, void* result) {
  const bool own = storage == Storage::f32 || storage == Storage::f64;
  const int64_t cells = shared ? n : groups * n;
  Scratch scratch(own ? 0 : Scratch::size<T>(static_cast<size_t>(cells)));
  T* out = own ? static_cast<T*>(result) : scratch.take<T>(static_cast<size_t>(cells));
  for (int64_t g = 0; g < groups; ++g) {
    T* target = shared ? out : out + g * n;
    for (int64_t p = 0; p < parts; ++p) {
      const T* source = partial + (g * parts + p) * n;
      const bool begin = p == 0 && (g == 0 || !shared);
      for_vectors<T>(n, [&](int64_t i, auto count) {
        const V<T> v = get(source + i, count);
        put(target + i, begin ? v : get(target + i, count) + v, count);
      });
    }
  }
  if constexpr (std::is_same_v<T, float>) {
    auto narrow = [&](auto s) { for_vectors<T>(cells, [&](int64_t i, auto count) { put(static_cast<decltype(s)*>(result) + i, get(out + i, count), count); }); };
    if (storage == Storage::bf16) narrow(bf16());
    if (storage == Storage::f16) narrow(f16());
  }
}

template <class S>
void backward(const NormBackwardArgs& a, const Threads& threads) {
  using T = compute_t<S>;
  const int64_t n = a.features;
  // The parts depend on the shape alone, so the parameters' gradients do not depend on the number of threads.
  const int64_t least_rows = rows_per_task(a.rows, 3 * n * static_cast<int64_t>(sizeof(S)));
  const int64_t parts = least<int64_t>(64, ceil_div(greatest<int64_t>(a.rows, 1), least_rows));
  const int64_t per = ceil_div(a.rows, parts);
  const size_t cells = static_cast<size_t>(a.groups * parts * n);
  Scratch scratch((a.dscale ? Scratch::size<T>(cells) : 0) + (a.doffset ? Scratch::size<T>(cells) : 0));
  T* dscale = a.dscale ? scratch.take<T>(cells) : nullptr;
  T* doffset = a.doffset ? scratch.take<T>(cells) : nullptr;
  const Parameter<T> scales(a.scale, a.scale_storage, a.scale_stride ? a.groups * n : n);
  parallel_for(threads, a.groups * parts, [&](int64_t task) {
    const int64_t group = task / parts, part = task % parts;
    T* my_scale = dscale ? dscale + task * n : nullptr;
    T* my_offset = doffset ? doffset + task * n : nullptr;
    if (my_scale) memset(my_scale, 0, sizeof(T) * static_cast<size_t>(n));
    if (my_offset) memset(my_offset, 0, sizeof(T) * static_cast<size_t>(n));
    const T* scale = scales.at(group * a.scale_stride);
    for (int64_t r = part * per; r < least(a.rows, (part + 1) * per); ++r) {
      backward_row<S>(a, group * a.rows + r, scale, my_scale, my_offset);
    }
  }, Share::runs);
  if (dscale) sum_parts(dscale, a.groups, parts, n, a.dscale_shared, a.scale_storage, a.dscale);
  if (doffset) sum_parts(doffset, a.groups, parts, n, a.doffset_shared, a.offset_storage, a.doffset);
}

}  // namespace

void norm_forward(const NormForwardArgs& a, const Threads& threads) {
  switch (a.storage) {
    case Storage::f32: return VISHWAMAI_BASE_OR(norm_forward(a, threads), forward<float>(a, threads));
    case Storage::bf16: return forward<bf16>(a, threads);
    case Storage::f64: return VISHWAMAI_BASE_OR(norm_forward(a, threads), forward<double>(a, threads));
    default: return;  // the handler has rejected it
  }
}

void norm_backward(const NormBackwardArgs& a, const Threads& threads) {
  switch (a.storage) {
    case Storage::f32: return VISHWAMAI_BASE_OR(norm_backward(a, threads), backward<float>(a, threads));
    case Storage::bf16: return backward<bf16>(a, threads);
    case Storage::f64: return VISHWAMAI_BASE_OR(norm_backward(a, threads), backward<double>(a, threads));
    default: return;
  }
}

}  // namespace vishwamai::VISHWAMAI_ISA
