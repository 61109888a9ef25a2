// From raw products q.k to logits: scale, bias, soft-cap, masks and dropout, for a run of scores that share one index.
//
// The forward pass walks along keys for one query, the backward pass along queries for one key. Both call the index
// that stays "major" and the one that runs "minor"; the strides of bias and mask are swapped to match.
#pragma once

#include "cpu_attention.h"
#include "vishwamai/core/cpp/dropout.h"
#include "vishwamai/core/cpp/engine.h"

namespace vishwamai::VISHWAMAI_ISA {

constexpr float kInfinity = __builtin_inff();

template <class T>
struct Scores {
  T scale, softcap;
  const T* bias;
  int64_t bias_major, bias_minor;
  const uint8_t* mask;
  int64_t mask_major, mask_minor;
  const int32_t *major_segments, *minor_segments;
  const bool transposed, bias_last;
  const int32_t* positions;  // the places of the queries
  T slope;
  int64_t origin, low, high;

  // Of one (batch, query head); `transposed`: the major index is the key; `apart`: the mask is left to the caller.
  Scores(const AttentionArgs& a, int64_t b, int64_t h, bool transposed, bool apart = false) : transposed(transposed), bias_last(a.bias_last) {
    scale = static_cast<T>(a.scale), softcap = static_cast<T>(a.softcap);
    bias = a.bias ? static_cast<const T*>(a.bias) + b * a.bias_strides[0] + h * a.bias_strides[1] : nullptr;
    mask = a.mask && !apart ? a.mask + b * a.mask_strides[0] + h * a.mask_strides[1] : nullptr;
    const int major = transposed ? 3 : 2, minor = transposed ? 2 : 3;
    bias_major = a.bias_strides[major], bias_minor = a.bias_strides[minor];
    mask_major = a.mask_strides[major], mask_minor = a.mask_strides[minor];
    const int32_t* q = a.q_segments ? a.q_segments + b * a.q_segments_stride : nullptr;
    const int32_t* kv = a.kv_segments ? a.kv_segments + b * a.kv_segments_stride : nullptr;
    major_segments = transposed ? kv : q, minor_segments = transposed ? q : kv;
    positions = a.positions ? a.positions + b * a.positions_stride : nullptr;
    slope = a.slopes ? static_cast<const T*>(a.slopes)[b * a.slopes_stride + h] : T(0);
    origin = a.origin;
    low = greatest<int64_t>(a.low, INT32_MIN), high = least<int64_t>(a.high, INT32_MAX);
  }

  // Whether anything but a positive scale, the band and a mask that `apart` is left to the caller stands between
  // products and logits.
  static bool needed(const AttentionArgs& a, bool apart = false) {
    return a.bias || a.slopes || (a.mask && !apart) || a.q_segments || a.softcap != 0 || !(a.scale > 0);
  }

  // s[i] = logit of (major, minor + i) from the product q.k in s[i], -infinity where masked, for i < n. The band is left
  // to the caller, unless queries with positions of their own run; `steep[i]` is the derivative of the soft-cap.
  void apply(T* s, int64_t major, int64_t minor, int n, T* steep = nullptr) const {
    constexpr int W = lanes<T>;
    const T* bias_row = bias ? bias + major * bias_major + minor * bias_minor : nullptr;
    const uint8_t* mask_row = mask ? mask + major * mask_major + minor * mask_minor : nullptr;
    const V<T> none = splat(static_cast<T>(-kInfinity));
    for (int i = 0; i < n; i += W) {
      const int count = least(W, n - i);
      V<T> x = load(s + i, count) * scale;
      if (bias_row && !bias_last) x += strided(bias_row + i * bias_minor, bias_minor, count);
      if (softcap != 0) {
        const V<T> bounded = tanh<T>(x / softcap);
        if (steep) store(steep + i, T(1) - bounded * bounded, count);
        x = bounded * softcap;
      }
      if (bias_row && bias_last) x += strided(bias_row + i * bias_minor, bias_minor, count);
      if (slope != 0) {
        const V<T> away = distances(major, minor + i, count);
        x -= maximum(away, -away) * slope;
      }
      if (mask_row) {
        uint8_t some[W] = {};
        const uint8_t* bytes = mask_row + i;
        if (mask_minor != 1 || count < W) {
          for (int j = 0; j < count; ++j) some[j] = mask_row[(i + j) * mask_minor];
          bytes = some;
        }
        x = load_bools<T>(bytes) ? x : none;
      }
      if (minor_segments) {
        const int32_t own = major_segments[major];
        x = shown(minor_segments + minor + i, count, [own](auto other) { return other == own; }) ? x : none;
      }
      if (transposed && positions) {
        const int32_t key = static_cast<int32_t>(major), from = static_cast<int32_t>(low), to = static_cast<int32_t>(high);
        x = shown(positions + minor + i, count, [=](auto place) { return (key - place >= from) & (key - place <= to); }) ? x : none;
      }
      store(s + i, x, count);
    }
  }

 private:
  // Which of the next `count` lanes pass a test of their integers.
  template <class Test>
  static VISHWAMAI_INLINE Mask<T> shown(const int32_t* p, int count, Test test) {
    constexpr int W = lanes<T>;
    if constexpr (sizeof(T) == sizeof(int32_t)) {
      if (count == W) return test(load(p));
    }
    uint8_t some[W];
    for (int j = 0; j < W; ++j) some[j] = j < count && test(p[j]);
    return load_bools<T>(some);
  }
  // From the key that a query stands at to the key, or the other way round.
  VISHWAMAI_INLINE V<T> distances(int64_t major, int64_t minor, int count) const {
    if (transposed && positions) {
      T some[lanes<T>] = {};
      for (int j = 0; j < count; ++j) some[j] = static_cast<T>(positions[minor + j] + origin - major);
      return load(some);
    }
    const int64_t first = transposed ? minor + origin - major : minor - origin - (positions ? positions[major] : major);
    return iota<T>() + static_cast<T>(first);
  }
  static VISHWAMAI_INLINE V<T> strided(const T* p, int64_t stride, int count) {
    if (stride == 1) return load(p, count);
    if (stride == 0) return splat(*p);
    T some[lanes<T>] = {};
    for (int i = 0; i < count; ++i) some[i] = p[i * stride];
    return load(some);
  }
};

template <class T>
VISHWAMAI_INLINE void fill(T* p, int from, int to, T value) {
  for (int i = from; i < to; ++i) p[i] = value;
}

// What is infinite or NaN in a key or value that a mask hides must not be multiplied, were it by a probability of 0.
template <class T>
VISHWAMAI_INLINE bool is_finite(T x) { return x * T(0) == T(0); }

// Whether all of x[0, n) are finite.
template <class S>
bool all_finite(const S* x, int64_t n) {
  using T = compute_t<S>;
  constexpr int W = lanes<T>;
  V<T> sum[4] = {};  // of zeros, or NaN
  int64_t i = 0;
  for (; i + 4 * W <= n; i += 4 * W)
    for (int j = 0; j < 4; ++j) sum[j] += load(x + i + j * W) * T(0);
  for (; i < n; i += W) sum[0] += load(x + i, static_cast<int>(least<int64_t>(W, n - i))) * T(0);
  return is_finite(sum_lanes<T>(sum[0] + sum[1] + sum[2] + sum[3]));
}

// x[0, n) with 0 for what is infinite or NaN.
template <class S>
void copy_finite(const S* x, int64_t n, S* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = is_finite(convert<compute_t<S>>(x[i])) ? x[i] : S{};
}

// `rows` rows of `dim` features, padded with zeros to `padded` rows, as panels of E::kCols features, `panel_stride`
// apart.
template <class E, class S>
VISHWAMAI_INLINE void pack_rows(const S* in, int64_t dim, int64_t rows, int64_t padded, typename E::Element* out, int64_t panel_stride) {
  int64_t ready = 0;  // rows that are packed, in all panels of whole width
  const int64_t whole = dim / E::kCols;
  if constexpr (requires { E::pack_b_rows(in, 0, 0, out, 0); }) {
    for (; ready + E::kStep <= rows; ready += E::kStep) E::pack_b_rows(in + ready * dim, dim, whole, out + E::b_elements(ready), panel_stride);
  }
  for (int64_t v = 0; v * E::kCols < dim; ++v) {
    const int64_t done = v < whole ? ready : 0;
    if (done == padded) continue;
    E::pack_b(in + done * dim + v * E::kCols, dim, 1, rows - done, padded - done, static_cast<int>(least<int64_t>(E::kCols, dim - v * E::kCols)),
              out + v * panel_stride + E::b_elements(done));
  }
}

// C (+)= A B where C sums up `terms` in all. More than kChain are summed up apart, block by block, and added: one chain
// of float32 sums loses a digit for every hundred times as many terms. Engines in registers always do so.
constexpr int64_t kChain = 2048;

template <class E>
VISHWAMAI_INLINE void add_product(const typename E::Element* a, int64_t lda, const typename E::Element* b, int64_t k, int rows, typename E::Acc* c,
                                  int64_t ldc, bool accumulate, int64_t terms) {
  if constexpr (requires { E::add(a, lda, b, k, rows, c, ldc); }) {
    if (accumulate && terms > kChain) return E::add(a, lda, b, k, rows, c, ldc);
  }
  E::product(a, lda, b, k, rows, c, ldc, accumulate);
}

struct Range {
  int64_t begin, end;
  bool empty() const { return begin >= end; }
};
// Keys that queries see at any of the places first ... last.
VISHWAMAI_INLINE Range keys_of(const AttentionArgs& a, int64_t first, int64_t last) {
  return {greatest<int64_t>(0, first + a.low), least(a.kv_len, last + a.high + 1)};
}
// Queries that may see one of the keys; all of them where they have positions of their own.
VISHWAMAI_INLINE Range queries_of(const AttentionArgs& a, int64_t first_key, int64_t last_key) {
  if (a.positions) return {0, a.q_len};
  return {greatest<int64_t>(0, first_key - a.high), least(a.q_len, last_key - a.low + 1)};
}

struct SegmentSpan {
  int32_t least_id, greatest_id;
  bool disjoint(const SegmentSpan& other) const { return greatest_id < other.least_id || other.greatest_id < least_id; }
};
inline SegmentSpan span_of(const int32_t* ids, int64_t begin, int64_t end) {
  SegmentSpan span{ids[begin], ids[begin]};
  for (int64_t i = begin + 1; i < end; ++i) {
    span.least_id = least(span.least_id, ids[i]);
    span.greatest_id = greatest(span.greatest_id, ids[i]);
  }
  return span;
}

// The spans of ids [begin, end), `step` to a span.
inline void spans_of(const int32_t* ids, int64_t begin, int64_t end, int step, SegmentSpan* spans) {
  for (int64_t i = begin; i < end; i += step) *spans++ = span_of(ids, i, least(end, i + step));
}

// Where queries stand.
struct Places {
  int64_t first, last;
};
VISHWAMAI_INLINE int64_t place_of(const AttentionArgs& a, int64_t b, int64_t row) {
  return a.positions ? a.positions[b * a.positions_stride + row] : row;
}
inline Places places_of(const AttentionArgs& a, int64_t b, int64_t begin, int64_t end) {
  if (!a.positions) return {begin, end - 1};
  const SegmentSpan span = span_of(a.positions + b * a.positions_stride, begin, end);
  return {span.least_id, span.greatest_id};
}
// The places from which one of the keys is seen.
inline SegmentSpan places_that_see(const AttentionArgs& a, int64_t first_key, int64_t last_key) {
  return {static_cast<int32_t>(greatest<int64_t>(first_key - a.high, INT32_MIN)), static_cast<int32_t>(least<int64_t>(last_key - a.low, INT32_MAX))};
}

// `bits` without those whose span is disjoint from `own`.
inline uint64_t meeting(uint64_t bits, const SegmentSpan* spans, const SegmentSpan& own) {
  for (uint64_t left = bits; left != 0; left &= left - 1) {
    const int i = __builtin_ctzll(left);
    if (spans[i].disjoint(own)) bits &= ~(uint64_t{1} << i);
  }
  return bits;
}

// The unit in which exponents are held.  bfloat16 takes log2, which saves a product per score; the wider types take the
// natural logarithm, where the difference to the maximum is rounded once and the factor log2(e) only scales what is
// left.
template <class S, class T = compute_t<S>>
struct Exponent {
  static constexpr bool kBinary = std::is_same_v<S, bf16>;
  static constexpr T kPerNat = static_cast<T>(kBinary ? kLog2E : 1.0);  // this unit from natural logarithms
  static constexpr T kNats = static_cast<T>(kBinary ? kLn2 : 1.0);

  static VISHWAMAI_INLINE V<T> power(V<T> x) {
    if constexpr (kBinary) return exp2_rough(x);
    else return exp(x);
  }
  static VISHWAMAI_INLINE T power(T x) { return power(splat(x))[0]; }
};

}  // namespace vishwamai::VISHWAMAI_ISA
