#pragma once

// Which instruction sets this CPU has. The build asks too (cmake/Kernels.cmake), so there are no other headers here.
namespace attnpack {

#if defined(__x86_64__)
inline bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
inline bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
inline bool has_avx512_bf16() {
  return has_avx512() && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
}

// Whether pairs are faster than widened numbers. Intel's cores take two cycles for a VDPBF16PS of 512 bits. In two
// cycles they also do four fused multiply-adds of half its work, so pairs reach half the speed of widened numbers
// (PERFORMANCE.md).
inline bool has_fast_pairs() { return !__builtin_cpu_is("intel"); }
#endif

}  // namespace attnpack
