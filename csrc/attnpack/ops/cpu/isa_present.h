#pragma once

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

// Which instruction sets this CPU has. The build asks too (cmake/Kernels.cmake), so there are no headers of ours here.
namespace attnpack {

#if defined(__x86_64__)
inline bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
inline bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
inline bool has_avx512_vnni() { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }
inline bool has_avx512_bf16() { return has_avx512_vnni() && __builtin_cpu_supports("avx512bf16"); }

// Whether pairs are faster than widened numbers. Intel's cores take two cycles for a VDPBF16PS of 512 bits. In two
// cycles they also do four fused multiply-adds of half its work, so pairs reach half the speed of widened numbers
// (PERFORMANCE.md).
inline bool has_fast_pairs() { return !__builtin_cpu_is("intel"); }
#elif defined(__aarch64__)
// Whether the system names a feature of the CPU: by a bit of HWCAP or HWCAP2 (Linux, Documentation/arch/arm64/
// elf_hwcaps.rst), or by a name (macOS, hw.optional.arm).
#if defined(__linux__)
inline bool has_dot_products() { return getauxval(AT_HWCAP) >> 20 & 1; }    // HWCAP_ASIMDDP
inline bool has_byte_matrices() { return getauxval(AT_HWCAP2) >> 13 & 1; }  // HWCAP2_I8MM
inline bool has_bf16() { return getauxval(AT_HWCAP2) >> 14 & 1; }           // HWCAP2_BF16
#elif defined(__APPLE__)
inline bool has_feature(const char* name) {
  int found = 0;
  size_t bytes = sizeof(found);
  return sysctlbyname(name, &found, &bytes, nullptr, 0) == 0 && found;
}
inline bool has_dot_products() { return has_feature("hw.optional.arm.FEAT_DotProd"); }
inline bool has_byte_matrices() { return has_feature("hw.optional.arm.FEAT_I8MM"); }
inline bool has_bf16() { return has_feature("hw.optional.arm.FEAT_BF16"); }
#endif
inline bool has_neon_dotprod() { return has_dot_products(); }
inline bool has_neon_bf16() { return has_dot_products() && has_byte_matrices() && has_bf16(); }
#endif

}  // namespace attnpack
