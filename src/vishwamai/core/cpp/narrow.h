// Storage types narrower than bfloat16's 8 exponent bits allow to widen by a shift: float16, float8 (e4m3fn, e5m2), int8
// and pairs of int4.
//
// They are widened to float while loading. float8 goes through float16, whose conversion keeps denormal numbers
// although the processor is set to treat float's as zero (as XLA sets it).
#pragma once

#include "simd.h"

namespace vishwamai::VISHWAMAI_ISA {

struct f16 {
  uint16_t bits;
};
struct f8e5m2 {
  uint8_t bits;
};
struct f8e4m3 {
  uint8_t bits;
};
// Two int4 in a byte, the first in the lower half.
struct s4x2 {
  uint8_t bits;
};
// Numbers that a unit of a storage type holds, and the unit where number `i` of a row begins: a multiple of that.
template <class S> constexpr int kNumbers = 1;
template <> inline constexpr int kNumbers<s4x2> = 2;
template <class S> VISHWAMAI_INLINE const S* at(const S* p, int64_t i) { return p + i / kNumbers<S>; }

VISHWAMAI_INLINE f32v widen_half(u16half half) {
#if defined(VISHWAMAI_AVX512)
  return _mm512_cvtph_ps(bit_cast<__m256i>(half));
#elif defined(__AVX2__)
  return _mm256_cvtph_ps(bit_cast<__m128i>(half));
#else
  // Giesen, "Float->half variants" (2012): the exponent is moved by an addition; a denormal becomes the mantissa of
  // 2^-14 and 2^-14 is subtracted again, so no step meets a denormal float.
  const u32v h = __builtin_convertvector(half, u32v);
  const u32v magnitude = (h & 0x7fffu) << 13, exponent = magnitude & 0x0f800000u;
  const u32v moved = magnitude + 0x38000000u;
  const f32v denormal = bit_cast<f32v>(moved + 0x00800000u) - splat(bit_cast<float>(0x38800000u));
  u32v x = exponent == 0x0f800000u ? moved + 0x38000000u : moved;
  x = exponent == 0u ? bit_cast<u32v>(denormal) : x;
  return bit_cast<f32v>(x | (h & 0x8000u) << 16);
#endif
}

// Round to nearest even; a NaN stays one.
VISHWAMAI_INLINE u16half to_half(f32v v) {
#if defined(VISHWAMAI_AVX512)
  return bit_cast<u16half>(_mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__AVX2__)
  return bit_cast<u16half>(_mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
#else
  const u32v bits = bit_cast<u32v>(v), sign = bits & 0x80000000u, x = bits ^ sign;
  const u32v huge = x > 0x7f800000u ? u32v{} + 0x7e00u : u32v{} + 0x7c00u;
  const u32v tiny = bit_cast<u32v>(bit_cast<f32v>(x) + splat(0.5f)) - 0x3f000000u;  // the sum rounds at 2^-24
  const u32v usual = (x - 0x38000000u + 0xfffu + ((x >> 13) & 1u)) >> 13;
  u32v h = x < 0x38800000u ? tiny : usual;
  h = x >= 0x47800000u ? huge : h;
  return __builtin_convertvector(h | sign >> 16, u16half);
#endif
}

VISHWAMAI_INLINE f32v load(const f16* p) {
  u16half half;
  __builtin_memcpy(&half, p, sizeof(half));
  return widen_half(half);
}
VISHWAMAI_INLINE void store(f16* p, f32v v) {
  const u16half half = to_half(v);
  __builtin_memcpy(p, &half, sizeof(half));
}
VISHWAMAI_INLINE f32v load(const f8e5m2* p) {  // float16's upper half
#if defined(VISHWAMAI_AVX512)
  return _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 8));
#elif defined(__AVX2__)
  return _mm256_cvtph_ps(_mm_slli_epi16(_mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))), 8));
#else
  detail::bytes32 bytes;
  __builtin_memcpy(&bytes, p, sizeof(bytes));
  return widen_half(__builtin_convertvector(bytes, u16half) << 8);
#endif
}
// 2^-8 times the numbers: the factor that float16's other exponent bias leaves, for the caller to put where it costs
// nothing.
VISHWAMAI_INLINE f32v load(const f8e4m3* p) {
#ifdef VISHWAMAI_AVX512
  // the sign fills the upper byte
  const __m256i x = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  const __m256i half = _mm256_and_si256(_mm256_slli_epi16(x, 7), _mm256_set1_epi16(static_cast<int16_t>(0xbfff)));
  const __m256i all = _mm256_set1_epi16(0x3f80);  // all bits set is its NaN; it has no infinity
  const __mmask16 nan = _mm256_cmpeq_epi16_mask(_mm256_and_si256(half, all), all);
  return _mm512_cvtph_ps(_mm256_mask_mov_epi16(half, nan, _mm256_set1_epi16(0x7e00)));
#else
  detail::bytes32 bytes;
  __builtin_memcpy(&bytes, p, sizeof(bytes));
  const u16half x = __builtin_convertvector(bytes, u16half), magnitude = (x & 0x7f) << 7;
  const u16half half = magnitude | (x & 0x80) << 8;
  return widen_half(magnitude == 0x3f80 ? half | 0x7e00 : half);  // all bits set is its NaN; it has no infinity
#endif
}
VISHWAMAI_INLINE f32v load(const int8_t* p) {
#if defined(VISHWAMAI_AVX512)
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(__AVX2__)
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
  i32v x;
  for (int i = 0; i < lanes<float>; ++i) x[i] = p[i];
  return __builtin_convertvector(x, f32v);
#endif
}
// Each number in the upper half of a byte of its own, above bits that the shift drops.
VISHWAMAI_INLINE f32v load(const s4x2* p) {
#if defined(VISHWAMAI_AVX512)
  const __m128i pairs = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  const __m128i bytes = _mm_unpacklo_epi8(_mm_slli_epi16(pairs, 4), pairs);
  return _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_cvtepi8_epi32(bytes), 4));
#elif defined(__AVX2__)
  int32_t four;
  __builtin_memcpy(&four, p, sizeof(four));
  const __m128i pairs = _mm_cvtsi32_si128(four), bytes = _mm_unpacklo_epi8(_mm_slli_epi16(pairs, 4), pairs);
  return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_cvtepi8_epi32(bytes), 4));
#else
  i32v x;
  for (int i = 0; i < lanes<float>; ++i) x[i] = static_cast<int8_t>(i % 2 ? p[i / 2].bits : p[i / 2].bits << 4) >> 4;
  return __builtin_convertvector(x, f32v);
#endif
}

// What numbers read by `load` must be multiplied by.
template <class S> constexpr float kLoadUnit = 1.0f;
template <> inline constexpr float kLoadUnit<f8e4m3> = 256.0f;

namespace detail {
template <class S> VISHWAMAI_INLINE f32v load_some(const S* p, int count) {
  if (count >= lanes<float>) return load(p);
  S some[lanes<float>] = {};
  for (int i = 0; i < count; i += kNumbers<S>) some[i / kNumbers<S>] = p[i / kNumbers<S>];
  return load(some);
}
}  // namespace detail
VISHWAMAI_INLINE f32v load(const f8e5m2* p, int count) { return detail::load_some(p, count); }
VISHWAMAI_INLINE f32v load(const f8e4m3* p, int count) { return detail::load_some(p, count); }
VISHWAMAI_INLINE f32v load(const int8_t* p, int count) { return detail::load_some(p, count); }
VISHWAMAI_INLINE f32v load(const s4x2* p, int count) { return detail::load_some(p, count); }  // an odd count as the next one
#ifdef VISHWAMAI_AVX512
VISHWAMAI_INLINE f32v load(const f16* p, int count) {
  return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first(count), p));
}
VISHWAMAI_INLINE void store(f16* p, f32v v, int count) {
  _mm256_mask_storeu_epi16(p, first(count), bit_cast<__m256i>(to_half(v)));
}
#else
VISHWAMAI_INLINE f32v load(const f16* p, int count) { return detail::load_some(p, count); }
VISHWAMAI_INLINE void store(f16* p, f32v v, int count) {
  if (count >= lanes<float>) return store(p, v);
  f16 some[lanes<float>];
  store(some, v);
  for (int i = 0; i < count; ++i) p[i] = some[i];
}
#endif

}  // namespace vishwamai::VISHWAMAI_ISA
