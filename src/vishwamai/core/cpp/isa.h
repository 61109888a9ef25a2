// Which instruction sets this build contains, which one this machine can run, and the one that is used.
//
// Kernel sources named *.isa.cc are compiled once per instruction set into a namespace of that name; VISHWAMAI_DISPATCH
// calls the chosen one. Those sources must not instantiate non-inlined standard library templates: the linker keeps one
// copy of such a function, and it may be the one compiled for a machine that this is not.
#pragma once

namespace vishwamai {

// Of one architecture each contains those before it; generic is of all.
enum class Isa : int { generic = 0, avx2 = 1, avx512 = 2, avx512_bf16 = 3, amx = 4, neon_dot = 5, neon_bf16 = 6 };

// The fastest instruction set of this machine, or the one that VISHWAMAI_CPU_ISA asks for; settled at the first call.
Isa isa();

// The greatest instruction set that this machine and this build both have.
Isa best_isa();

const char* isa_name(Isa isa);

// nullptr, or what was wrong with VISHWAMAI_CPU_ISA (then the fastest one is used).
const char* isa_complaint();

}  // namespace vishwamai

// Declares `result function parameters` in the namespace of every instruction set.
#define VISHWAMAI_DECLARE(result, function, ...)                                \
  namespace generic { result function(__VA_ARGS__); }                          \
  namespace avx2 { result function(__VA_ARGS__); }                             \
  namespace avx512 { result function(__VA_ARGS__); }                           \
  namespace avx512_bf16 { result function(__VA_ARGS__); }                      \
  namespace amx { result function(__VA_ARGS__); }                              \
  namespace neon_dot { result function(__VA_ARGS__); }                         \
  namespace neon_bf16 { result function(__VA_ARGS__); }

// The set to which this one adds only products of bfloat16 and int8: it computes all other types.
#if defined(__AVX512BF16__)
#define VISHWAMAI_BASE avx512
#elif defined(VISHWAMAI_NEON_DOT)
#define VISHWAMAI_BASE generic
#endif

// In a kernel source: `call`, a function of that source, as it is compiled for the base; the expression after it in sets
// without one. For types that gain nothing from the additions.
#if defined(VISHWAMAI_BASE)
#define VISHWAMAI_BASE_OR(call, ...) ::vishwamai::VISHWAMAI_BASE::call
#else
#define VISHWAMAI_BASE_OR(call, ...) __VA_ARGS__
#endif

// The same with AVX2 for every set beyond it: for float64 where no model computes in it, at half the vectors' width.
#if defined(__AVX512F__)
#define VISHWAMAI_FLOAT64_OR(call, ...) ::vishwamai::avx2::call
#else
#define VISHWAMAI_FLOAT64_OR(call, ...) VISHWAMAI_BASE_OR(call, __VA_ARGS__)
#endif

// First in a function of bytes and of other types: returns `call` of the base where this set adds products of bytes alone.
#if defined(VISHWAMAI_NEON_DOT) && !defined(VISHWAMAI_NEON_BF16)
#define VISHWAMAI_BYTES_OR_BASE(storage, call) \
  if (storage != ::vishwamai::Storage::s8) return ::vishwamai::VISHWAMAI_BASE::call
#else
#define VISHWAMAI_BYTES_OR_BASE(storage, call)
#endif

// Three kinds of sources: VISHWAMAI_DISPATCH_ROWS calls those that have no products, VISHWAMAI_DISPATCH_BYTES those with
// products of bytes, VISHWAMAI_DISPATCH all others. A set that adds nothing for a kind is not compiled for it.
#if defined(__x86_64__)
#define VISHWAMAI_DISPATCH_ROWS(function, ...)                 \
  switch (::vishwamai::isa()) {                                \
    case ::vishwamai::Isa::amx:                                \
    case ::vishwamai::Isa::avx512_bf16:                        \
      return ::vishwamai::avx512_bf16::function(__VA_ARGS__);  \
    case ::vishwamai::Isa::avx512:                             \
      return ::vishwamai::avx512::function(__VA_ARGS__);       \
    case ::vishwamai::Isa::avx2:                               \
      return ::vishwamai::avx2::function(__VA_ARGS__);         \
    default:                                                   \
      return ::vishwamai::generic::function(__VA_ARGS__);      \
  }
#define VISHWAMAI_DISPATCH(function, ...)                                                       \
  if (::vishwamai::isa() == ::vishwamai::Isa::amx) return ::vishwamai::amx::function(__VA_ARGS__); \
  VISHWAMAI_DISPATCH_ROWS(function, __VA_ARGS__)
#define VISHWAMAI_DISPATCH_BYTES(function, ...) VISHWAMAI_DISPATCH(function, __VA_ARGS__)
#elif defined(__aarch64__)
#define VISHWAMAI_DISPATCH_ROWS(function, ...) return ::vishwamai::generic::function(__VA_ARGS__);
#define VISHWAMAI_DISPATCH(function, ...)                                                                    \
  if (::vishwamai::isa() == ::vishwamai::Isa::neon_bf16) return ::vishwamai::neon_bf16::function(__VA_ARGS__); \
  VISHWAMAI_DISPATCH_ROWS(function, __VA_ARGS__)
#define VISHWAMAI_DISPATCH_BYTES(function, ...)                                                            \
  if (::vishwamai::isa() == ::vishwamai::Isa::neon_dot) return ::vishwamai::neon_dot::function(__VA_ARGS__); \
  VISHWAMAI_DISPATCH(function, __VA_ARGS__)
#else
#define VISHWAMAI_DISPATCH_ROWS(function, ...) return ::vishwamai::generic::function(__VA_ARGS__);
#define VISHWAMAI_DISPATCH(function, ...) VISHWAMAI_DISPATCH_ROWS(function, __VA_ARGS__)
#define VISHWAMAI_DISPATCH_BYTES(function, ...) VISHWAMAI_DISPATCH_ROWS(function, __VA_ARGS__)
#endif
