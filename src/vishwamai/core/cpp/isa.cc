#include "isa.h"

#include <cstdlib>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace vishwamai {
namespace {

#if defined(__x86_64__)
constexpr Isa kSets[] = {Isa::generic, Isa::avx2, Isa::avx512, Isa::avx512_bf16, Isa::amx};

// The AMX bits are read from cpuid directly: the compiler's __builtin_cpu_supports does not know them before GCC 14.
bool cpu_has_amx() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  const bool tile = d & (1u << 24), bf16 = d & (1u << 22), int8 = d & (1u << 25);
  return tile && bf16 && int8;
}

// Linux gives a process its tile registers only when asked: arch_prctl(ARCH_REQ_XCOMP_PERM, XTILEDATA).
bool amx_permitted() {
#if defined(__linux__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

Isa detect() {
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  const bool products = avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
  if (products && cpu_has_amx() && amx_permitted()) return Isa::amx;
  return products ? Isa::avx512_bf16 : avx512 ? Isa::avx512 : avx2 ? Isa::avx2 : Isa::generic;
}
#elif defined(__aarch64__)
constexpr Isa kSets[] = {Isa::generic, Isa::neon_dot, Isa::neon_bf16};

bool cpu_has_amx() { return false; }

Isa detect() {
#if defined(__linux__)
  // Bits of the kernel's ABI (arch/arm64/include/uapi/asm/hwcap.h), which older headers of the C library lack.
  constexpr unsigned long kDot = 1ul << 20, kInt8Matrix = 1ul << 13, kBf16 = 1ul << 14;
  const unsigned long second = getauxval(AT_HWCAP2);
  const bool dot = getauxval(AT_HWCAP) & kDot, matrix = (second & kInt8Matrix) && (second & kBf16);
#elif defined(__APPLE__)
  const auto has = [](const char* feature) {
    int value = 0;
    size_t size = sizeof(value);
    return sysctlbyname(feature, &value, &size, nullptr, 0) == 0 && value != 0;
  };
  const bool dot = has("hw.optional.arm.FEAT_DotProd"), matrix = has("hw.optional.arm.FEAT_I8MM") && has("hw.optional.arm.FEAT_BF16");
#else
  const bool dot = false, matrix = false;
#endif
  return dot && matrix ? Isa::neon_bf16 : dot ? Isa::neon_dot : Isa::generic;
}
#else
constexpr Isa kSets[] = {Isa::generic};

bool cpu_has_amx() { return false; }

Isa detect() { return Isa::generic; }
#endif

// Whether this architecture has the set, and its machine everything up to it.
bool has(Isa isa) {
  for (const Isa set : kSets) {
    if (set == isa) return isa <= best_isa();
  }
  return false;
}

// Processors with tiles run VDPBF16PS at a quarter of the rate of a multiply-add (docs/notes/cpu.md): where the system
// denies the tiles, bfloat16 is faster widened to float32.
Isa preferred() {
  const Isa best = best_isa();
  return best == Isa::avx512_bf16 && cpu_has_amx() ? Isa::avx512 : best;
}

struct Choice {
  Isa isa;
  const char* complaint;
};

const Choice& choice() {
  static const Choice chosen = [] {
    const char* wanted = std::getenv("VISHWAMAI_CPU_ISA");
    const Isa own = preferred();
    if (wanted == nullptr || *wanted == 0) return Choice{own, nullptr};
    for (int i = 0; i <= static_cast<int>(Isa::neon_bf16); ++i) {
      if (std::strcmp(wanted, isa_name(static_cast<Isa>(i))) != 0) continue;
      if (!has(static_cast<Isa>(i))) {
        return Choice{own, "VISHWAMAI_CPU_ISA asks for an instruction set that this machine or build does not have"};
      }
      return Choice{static_cast<Isa>(i), nullptr};
    }
    return Choice{own, "VISHWAMAI_CPU_ISA is none of generic, avx2, avx512, avx512_bf16, amx, neon_dot, neon_bf16"};
  }();
  return chosen;
}

}  // namespace

Isa best_isa() {
  static const Isa best = detect();
  return best;
}

Isa isa() { return choice().isa; }

const char* isa_complaint() { return choice().complaint; }

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::neon_bf16: return "neon_bf16";
    case Isa::neon_dot: return "neon_dot";
    case Isa::amx: return "amx";
    case Isa::avx512_bf16: return "avx512_bf16";
    case Isa::avx512: return "avx512";
    case Isa::avx2: return "avx2";
    default: return "generic";
  }
}

}  // namespace vishwamai
