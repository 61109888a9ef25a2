// Vectors of the instruction set that this file is compiled for, with the compiler's own vector types.
//
// V<float> holds 16, 8 or 4 numbers (AVX-512, AVX2, SSE2 or NEON). Arithmetic is written with operators; the few things
// that operators cannot say (bfloat16 conversion, partial loads, 2^x) are functions here, with an intrinsic where that
// is faster and a portable form everywhere. A `count` argument below `lanes` means the first lanes only: the rest read
// as zero and are not written.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#ifndef VISHWAMAI_ISA
#error "compile kernel sources with -DVISHWAMAI_ISA=, the name of an instruction set (CMakeLists.txt)"
#endif
#define VISHWAMAI_INLINE inline __attribute__((always_inline))

namespace vishwamai {

struct bf16 {
  uint16_t bits;
};

namespace VISHWAMAI_ISA {

#if defined(__AVX512F__)
#define VISHWAMAI_AVX512 1
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

typedef float f32v __attribute__((vector_size(kVectorBytes)));
typedef double f64v __attribute__((vector_size(kVectorBytes)));
typedef int32_t i32v __attribute__((vector_size(kVectorBytes)));
typedef uint32_t u32v __attribute__((vector_size(kVectorBytes)));
typedef int64_t i64v __attribute__((vector_size(kVectorBytes)));
typedef uint64_t u64v __attribute__((vector_size(kVectorBytes)));
typedef int16_t i16v __attribute__((vector_size(kVectorBytes)));
typedef uint16_t u16half __attribute__((vector_size(kVectorBytes / 2)));

namespace detail {
template <class T> struct VectorOf;
template <> struct VectorOf<float> { using type = f32v; using mask = i32v; using bits = u32v; };
template <> struct VectorOf<double> { using type = f64v; using mask = i64v; using bits = u64v; };
template <> struct VectorOf<int32_t> { using type = i32v; using mask = i32v; using bits = u32v; };
}  // namespace detail
template <class T> using V = typename detail::VectorOf<T>::type;
template <class T> using Mask = typename detail::VectorOf<T>::mask;  // -1 true, 0 false in each lane
namespace detail {
typedef uint8_t bytes32 __attribute__((vector_size(kVectorBytes / 4)));
typedef uint8_t bytes64 __attribute__((vector_size(kVectorBytes / 8)));
}  // namespace detail
template <class T> constexpr int lanes = kVectorBytes / static_cast<int>(sizeof(T));

// The number type in which values of a storage type are computed.
namespace detail {
template <class S> struct Compute { using type = float; };
template <> struct Compute<double> { using type = double; };
}  // namespace detail
template <class S> using compute_t = typename detail::Compute<S>::type;

template <class T> VISHWAMAI_INLINE V<T> splat(T x) {
  return x - V<T>{};  // a plain broadcast: adding zero is an addition, for it would turn -0 into 0
}

template <class T> VISHWAMAI_INLINE V<T> iota() {
  V<T> v = {};
  for (int i = 0; i < lanes<T>; ++i) v[i] = static_cast<T>(i);
  return v;
}

template <class To, class From> VISHWAMAI_INLINE To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  __builtin_memcpy(&to, &from, sizeof(To));
  return to;
}

template <class T> VISHWAMAI_INLINE V<T> load(const T* p) {
  V<T> v;
  __builtin_memcpy(&v, p, sizeof(v));
  return v;
}
// By intrinsics: GCC 12 widens a vector that the compiler was told to convert in halves, and bytes one by one.
VISHWAMAI_INLINE u32v widen(u16half half) {
#if defined(VISHWAMAI_AVX512)
  return (u32v)_mm512_cvtepu16_epi32((__m256i)half);
#elif defined(__AVX2__)
  return (u32v)_mm256_cvtepu16_epi32((__m128i)half);
#else
  return __builtin_convertvector(half, u32v);
#endif
}
VISHWAMAI_INLINE f32v load(const bf16* p) {
  u16half half;
  __builtin_memcpy(&half, p, sizeof(half));
  return bit_cast<f32v>(widen(half) << 16);
}
// A lane is true where the byte is not zero.
template <class T> VISHWAMAI_INLINE Mask<T> load_bools(const uint8_t* p) {
  std::conditional_t<sizeof(T) == 8, detail::bytes64, detail::bytes32> bytes;
  __builtin_memcpy(&bytes, p, sizeof(bytes));
#if defined(VISHWAMAI_AVX512)
  if constexpr (sizeof(T) == 4) return (i32v)_mm512_cvtepi8_epi32((__m128i)bytes) != 0;
#elif defined(__AVX2__)
  if constexpr (sizeof(T) == 4) return (i32v)_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(bit_cast<int64_t>(bytes))) != 0;
#endif
  return __builtin_convertvector(bytes, Mask<T>) != 0;
}
template <class T> VISHWAMAI_INLINE void store(T* p, V<T> v) { __builtin_memcpy(p, &v, sizeof(v)); }

// Round to nearest even, as XLA does; a NaN stays a (quiet) NaN.
VISHWAMAI_INLINE u16half to_bf16(f32v v) {
#if defined(__AVX512BF16__)
  return (u16half)_mm512_cvtneps_pbh(v);
#elif defined(VISHWAMAI_NEON_BF16)
  return (u16half)vreinterpret_u16_bf16(vcvt_bf16_f32((float32x4_t)v));
#else
  const u32v x = bit_cast<u32v>(v);
  const u32v rounded = (x + 0x7fff + ((x >> 16) & 1)) >> 16;
  const u32v nan = (x >> 16) | 0x40;
  const i32v is_nan = v != v;
  return __builtin_convertvector(is_nan ? nan : rounded, u16half);
#endif
}
VISHWAMAI_INLINE void store(bf16* p, f32v v) {
  const u16half half = to_bf16(v);
  __builtin_memcpy(p, &half, sizeof(half));
}

#ifdef VISHWAMAI_AVX512
VISHWAMAI_INLINE __mmask16 first(int count) {
  return count >= 16 ? 0xffff : count <= 0 ? 0 : static_cast<__mmask16>((1u << count) - 1);
}
VISHWAMAI_INLINE f32v load(const float* p, int count) { return _mm512_maskz_loadu_ps(first(count), p); }
VISHWAMAI_INLINE f64v load(const double* p, int count) {
  return _mm512_maskz_loadu_pd(static_cast<__mmask8>(first(count)), p);
}
VISHWAMAI_INLINE f32v load(const bf16* p, int count) {
  return bit_cast<f32v>(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first(count), p)), 16));
}
VISHWAMAI_INLINE void store(float* p, f32v v, int count) { _mm512_mask_storeu_ps(p, first(count), v); }
VISHWAMAI_INLINE void store(double* p, f64v v, int count) {
  _mm512_mask_storeu_pd(p, static_cast<__mmask8>(first(count)), v);
}
VISHWAMAI_INLINE void store(bf16* p, f32v v, int count) {
  _mm256_mask_storeu_epi16(p, first(count), bit_cast<__m256i>(to_bf16(v)));
}
#else
template <class S> VISHWAMAI_INLINE V<compute_t<S>> load(const S* p, int count) {
  constexpr int W = lanes<compute_t<S>>;
  if (count >= W) return load(p);
  S some[W] = {};
  for (int i = 0; i < count; ++i) some[i] = p[i];
  return load(some);
}
template <class S> VISHWAMAI_INLINE void store(S* p, V<compute_t<S>> v, int count) {
  constexpr int W = lanes<compute_t<S>>;
  if (count >= W) return store(p, v);
  S some[W];
  store(some, v);
  for (int i = 0; i < count; ++i) p[i] = some[i];
}
#endif

// A store that does not read the line first, for results that nobody reads soon; p is aligned to the vector's storage.
template <class S> VISHWAMAI_INLINE void stream(S* p, V<compute_t<S>> v) {
#ifdef VISHWAMAI_AVX512
  if constexpr (std::is_same_v<S, float>) return _mm512_stream_ps(p, v);
  if constexpr (std::is_same_v<S, bf16>) return _mm256_stream_si256((__m256i*)p, bit_cast<__m256i>(to_bf16(v)));
#elif defined(__AVX2__)
  if constexpr (std::is_same_v<S, float>) return _mm256_stream_ps(p, v);
#endif
  store(p, v);
}
VISHWAMAI_INLINE void stream_fence() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

VISHWAMAI_INLINE f32v maximum(f32v a, f32v b) {  // b where a is NaN
#ifdef VISHWAMAI_AVX512
  return _mm512_max_ps(a, b);
#elif defined(__AVX2__)
  return _mm256_max_ps(a, b);
#elif defined(__x86_64__)
  return _mm_max_ps(a, b);
#else
  return a > b ? a : b;
#endif
}
VISHWAMAI_INLINE f64v maximum(f64v a, f64v b) { return a > b ? a : b; }
// a where it is less than b; keeps a NaN in a.
template <class T> VISHWAMAI_INLINE V<T> minimum(V<T> a, V<T> b) { return a > b ? b : a; }

VISHWAMAI_INLINE f32v square_root(f32v x) {
#ifdef VISHWAMAI_AVX512
  return _mm512_sqrt_ps(x);
#elif defined(__AVX2__)
  return _mm256_sqrt_ps(x);
#elif defined(__x86_64__)
  return _mm_sqrt_ps(x);
#else
  for (int i = 0; i < lanes<float>; ++i) x[i] = __builtin_sqrtf(x[i]);
  return x;
#endif
}

template <class T> VISHWAMAI_INLINE T sum_lanes(V<T> v) {
#ifdef VISHWAMAI_AVX512
  if constexpr (std::is_same_v<T, float>) return _mm512_reduce_add_ps(v);
#endif
  T x[lanes<T>];
  store(x, v);
  for (int half = lanes<T> / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) x[i] += x[i + half];
  return x[0];
}
template <class T> VISHWAMAI_INLINE T max_lanes(V<T> v) {
#ifdef VISHWAMAI_AVX512
  if constexpr (std::is_same_v<T, float>) return _mm512_reduce_max_ps(v);
#endif
  T x[lanes<T>];
  store(x, v);
  for (int half = lanes<T> / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) x[i] = x[i] > x[i + half] ? x[i] : x[i + half];
  return x[0];
}
template <class T> VISHWAMAI_INLINE bool any_above(V<T> v, T bound) {
#ifdef VISHWAMAI_AVX512
  if constexpr (std::is_same_v<T, float>) return _mm512_cmp_ps_mask(v, _mm512_set1_ps(bound), _CMP_GT_OQ) != 0;
#endif
  return max_lanes<T>(v) > bound;
}

constexpr double kLog2E = 1.44269504088896340736, kLn2 = 0.693147180559945309417;

// The nearest integer of |x| < 2^22.
VISHWAMAI_INLINE f32v nearest(f32v x) {
#ifdef VISHWAMAI_AVX512
  return _mm512_roundscale_ps(x, 0x08);
#else
  const f32v shifter = splat(12582912.0f);  // 1.5 * 2^23: adding it leaves no bits for a fraction
  return (x + shifter) - shifter;
#endif
}
VISHWAMAI_INLINE f64v nearest(f64v x) {
  const f64v shifter = splat(6755399441055744.0);  // 1.5 * 2^52
  return (x + shifter) - shifter;
}

// p * 2^n for integers n of at most 1000 (float: 250) either way: in two steps, since 2^n itself may be out of range.
VISHWAMAI_INLINE f32v times_power_of_two(f32v p, f32v n) {
#ifdef VISHWAMAI_AVX512
  return _mm512_scalef_ps(p, n);
#else
  const i32v exponent = __builtin_convertvector(n, i32v), half = exponent >> 1;
  p *= bit_cast<f32v>((half + 127) << 23);
  return p * bit_cast<f32v>((exponent - half + 127) << 23);
#endif
}
VISHWAMAI_INLINE f64v times_power_of_two(f64v p, f64v n) {
  const f64v shifter = splat(6755399441055744.0);
  const i64v exponent = bit_cast<i64v>(n + shifter) - bit_cast<i64v>(shifter), half = exponent >> 1;
  p *= bit_cast<f64v>((half + 1023) << 52);
  return p * bit_cast<f64v>((exponent - half + 1023) << 52);
}

// e^x within about one unit in the last place; 0 for -infinity, NaN for NaN. x - n ln 2 is taken with ln 2 in two
// pieces (Cody and Waite), so that nothing is lost for large |x|.
VISHWAMAI_INLINE f32v exp(f32v x) {
  const f32v bounded = minimum<float>(maximum(splat(-110.0f), x), splat(90.0f));  // a NaN stays
  const f32v n = nearest(bounded * static_cast<float>(kLog2E));
  const f32v r = (bounded - n * 0.693145751953125f) - n * 1.42860677e-6f;
  f32v p = splat(1.38368471e-3f);  // minimax on |r| <= ln 2 / 2, relative error 2e-9 (Lawson's fit)
  p = p * r + 8.37481609e-3f;
  p = p * r + 4.16682256e-2f;
  p = p * r + 0.166664202f;
  p = p * r + 0.499999921f;
  p = p * r + 1.0f;
  return times_power_of_two(p * r + 1.0f, n);
}
VISHWAMAI_INLINE f64v exp(f64v x) {
  const f64v bounded = minimum<double>(maximum(splat(-750.0), x), splat(710.0));
  const f64v n = nearest(bounded * kLog2E);
  const f64v r = (bounded - n * 6.93147180369123816490e-01) - n * 1.90821492927058770002e-10;
  f64v p = splat(1.0 / 6227020800.0);  // Taylor: the first term left out, 0.347^14 / 14!, is 4e-18
  constexpr double c[] = {1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320, 1.0 / 5040,
                          1.0 / 720,       1.0 / 120,      1.0 / 24,      1.0 / 6,      0.5,         1.0, 1.0};
  for (double a : c) p = p * r + a;
  return times_power_of_two(p, n);
}

// 2^x, relative error 1e-7 before rounding, in the fewest steps: no care for x above 127.
VISHWAMAI_INLINE f32v exp2_rough(f32v x) {
#ifdef VISHWAMAI_AVX512
  const f32v f = _mm512_reduce_ps(x, 0x09);  // x - floor(x), in [0, 1)
  f32v p = f * 0.0018775769f + 0.0089893403f;
  p = p * f + 0.0558263171f;
  p = p * f + 0.240153618f;
  p = p * f + 0.693153073f;
  p = p * f + 0.999999925f;
  return _mm512_scalef_ps(p, x);
#else
  const f32v bounded = minimum<float>(maximum(splat(-160.0f), x), splat(130.0f));
  const f32v n = nearest(bounded);
  const f32v f = bounded - n;
  f32v p = f * 0.00132764736f + 0.00967554188f;
  p = p * f + 0.0555071327f;
  p = p * f + 0.240221197f;
  p = p * f + 0.693146967f;
  return times_power_of_two(p * f + 1.00000007f, n);
#endif
}
// tanh: odd series near 0 (the quotient would cancel there), the exponential elsewhere.
template <class T> VISHWAMAI_INLINE V<T> tanh(V<T> x) {
  if constexpr (std::is_same_v<T, double>) {
    V<T> r = {};
    for (int i = 0; i < lanes<T>; ++i) r[i] = __builtin_tanh(x[i]);
    return r;
  } else {
    const V<T> s = x * x;
    V<T> p = splat(T(-1382.0 / 155925));
    p = p * s + T(62.0 / 2835);
    p = p * s + T(-17.0 / 315);
    p = p * s + T(2.0 / 15);
    p = p * s + T(-1.0 / 3);
    const V<T> near_zero = x + x * s * p;
    const V<T> magnitude = x < T(0) ? -x : x;
    const V<T> e = exp(magnitude * T(-2));
    const V<T> far = (T(1) - e) / (T(1) + e);
    return magnitude < T(0.35) ? near_zero : (x < T(0) ? -far : far);
  }
}

// The upper tail of the normal distribution at t >= 0 over exp(-t^2 / 2), with u = 1 / (1 + 0.3 t): the fit of
// core/activations.py, relative error 1.7e-7 up to t = 14.5.
VISHWAMAI_INLINE f32v normal_tail(f32v u) {
  f32v p = splat(0.0354237221f);
  constexpr float c[] = {-0.156158388f, 0.204556704f, -0.0520339490f, 0.127691736f, 0.100175962f, 0.120712139f, 0.119632006f};
  for (float a : c) p = p * u + a;
  return p * u;
}
// P(y < x) of a standard normal y, with relative accuracy on both sides.
VISHWAMAI_INLINE f32v normal_cdf(f32v x) {
  const f32v t = minimum<float>(x < 0.0f ? -x : x, splat(14.5f));  // a NaN stays
  const f32v tail = exp(t * t * -0.5f) * normal_tail(1.0f / (t * 0.3f + 1.0f));
  return x < 0.0f ? tail : 1.0f - tail;
}
VISHWAMAI_INLINE f64v normal_cdf(f64v x) {
  f64v r = {};
  for (int i = 0; i < lanes<double>; ++i) r[i] = 0.5 * __builtin_erfc(x[i] * -0.70710678118654752440);
  return r;
}

template <class T> constexpr VISHWAMAI_INLINE T ceil_div(T a, T b) { return (a + b - 1) / b; }
template <class T> constexpr VISHWAMAI_INLINE T round_up(T a, T b) { return (a + b - 1) / b * b; }
template <class T> constexpr VISHWAMAI_INLINE T least(T a, T b) { return a < b ? a : b; }
template <class T> constexpr VISHWAMAI_INLINE T greatest(T a, T b) { return a > b ? a : b; }

}  // namespace VISHWAMAI_ISA
}  // namespace vishwamai
