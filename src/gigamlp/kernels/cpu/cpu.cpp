// Which instruction sets were compiled, and which of them this machine has. CMakeLists.txt defines GIGAMLP_HAVE_*.
#include <chrono>

#include "net.h"
#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace gigamlp {

extern const Isa kAmx, kAvx512Vnni, kAvx512VnniPlain, kAvxVnni, kAvx2, kAvx2Wide, kPortable;

double now_us() {
  using Clock = std::chrono::steady_clock;
  return std::chrono::duration<double, std::micro>(Clock::now().time_since_epoch()).count();
}

#if defined(__x86_64__)
[[maybe_unused]] static const char* lacks_avx2() {
  if (!__builtin_cpu_supports("avx2")) return "this CPU has no AVX2";
  if (!__builtin_cpu_supports("fma")) return "this CPU has no FMA";
  return nullptr;  // every CPU with AVX2 and FMA has F16C, BMI, BMI2 and POPCNT too
}

[[maybe_unused]] static const char* lacks_avx512vnni() {
  if (!__builtin_cpu_supports("avx512vnni")) return "this CPU has no AVX-512 VNNI";
  if (!__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512dq"))
    return "this CPU lacks a part of AVX-512 (VL, BW or DQ)";
  return lacks_avx2();
}

[[maybe_unused]] static const char* lacks_vbmi2() {
  if (!__builtin_cpu_supports("avx512vbmi2")) return "this CPU has no AVX-512 VBMI2";
  if (!__builtin_cpu_supports("avx512vbmi")) return "this CPU has no AVX-512 VBMI";
  return lacks_avx512vnni();
}

[[maybe_unused]] static const char* lacks_avxvnni() {
  unsigned a = 0, b = 0, c = 0, d = 0;  // leaf 7.1, EAX bit 4; gcc 12 has no name for it
  if (!__get_cpuid_count(7, 1, &a, &b, &c, &d) || !(a >> 4 & 1)) return "this CPU has no AVX-VNNI";
  return lacks_avx2();
}

[[maybe_unused]] static const char* lacks_amx() {
#ifndef GIGAMLP_EMULATE_AMX
  unsigned a = 0, b = 0, c = 0, d = 0;  // leaf 7.0, EDX bits 24 (tiles) and 25 (int8)
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d >> 24 & 1) || !(d >> 25 & 1)) return "this CPU has no AMX-INT8";
#if defined(__linux__)
  constexpr long kRequest = 0x1023, kTileData = 18;  // Linux gives tiles to a process that asks for them
  if (syscall(SYS_arch_prctl, kRequest, kTileData) != 0) return "the kernel gives this process no AMX tiles";
#else
  return "AMX is used on Linux only";
#endif
#endif
  return lacks_vbmi2();
}
#endif

struct Known {
  Choice at[8];
  int count;
};

static Known known() {
  Known k = {};
#ifdef GIGAMLP_HAVE_AVX512VNNI
  k.at[k.count++] = {&kAvx512Vnni, lacks_vbmi2()};
#endif
#ifdef GIGAMLP_HAVE_AMX
  k.at[k.count++] = {&kAmx, lacks_amx()};
#endif
#ifdef GIGAMLP_HAVE_AVX512VNNI_PLAIN
  k.at[k.count++] = {&kAvx512VnniPlain, lacks_avx512vnni()};
#endif
#ifdef GIGAMLP_HAVE_AVXVNNI
  k.at[k.count++] = {&kAvxVnni, lacks_avxvnni()};
#endif
#ifdef GIGAMLP_HAVE_AVX2
  k.at[k.count++] = {&kAvx2, lacks_avx2()};
#endif
#ifdef GIGAMLP_HAVE_AVX2WIDE
  k.at[k.count++] = {&kAvx2Wide, lacks_avx2()};
#endif
  k.at[k.count++] = {&kPortable, nullptr};
  return k;
}

int isa_count() { return known().count; }
Choice isa_at(int index) { return known().at[index]; }

}  // namespace gigamlp
