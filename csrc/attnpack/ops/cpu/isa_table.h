#pragma once

#include <attnpack/ops/cpu/isa/kernels.h>

// All instruction sets that are built, whether this CPU has them, and which one it uses. No headers of torch.
namespace attnpack {

#define ATTNPACK_KERNELS(isa)                                                                  \
  {isa::prefill_scratch, isa::prefill,          isa::decode_scratch,     isa::decode,          \
   isa::merge,           isa::backward_scratch, isa::backward,           isa::linear_scratch,  \
   isa::linear_rows,     isa::rms_norm_rows,    isa::quantize_rows,      isa::dequantize_rows, \
   isa::rotate_rows,     isa::multiply_adds,    isa::pair_multiply_adds, isa::read_through}

struct Isa {
  const char* name;
  bool present;
  bool faster;  // than the instruction sets before it
  Kernels kernels;
};

#if defined(__x86_64__)
inline bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}

// Whether pairs are faster than widened numbers. Intel's cores take two cycles for a VDPBF16PS of 512 bits. In two
// cycles they also do four fused multiply-adds of half its work, so pairs reach half the speed of widened numbers
// (PERFORMANCE.md).
inline bool has_fast_pairs() { return !__builtin_cpu_is("intel"); }
#endif

// From the plainest to the widest. The default is the last one that is present and faster.
inline const Isa kIsas[] = {
    {"baseline", true, true, ATTNPACK_KERNELS(baseline)},
#if defined(ATTNPACK_AVX512_BF16_EMULATED)
    {"avx512_bf16_emulated", has_avx512(), false, ATTNPACK_KERNELS(avx512_bf16_emulated)},
#endif
#if defined(__x86_64__)
    {"avx2", __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"), true,
     ATTNPACK_KERNELS(avx2)},
    {"avx512", has_avx512(), true, ATTNPACK_KERNELS(avx512)},
#endif
#if defined(ATTNPACK_AVX512_BF16)
    {"avx512_bf16", has_avx512() && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni"),
     has_fast_pairs(), ATTNPACK_KERNELS(avx512_bf16)},
#endif
};

#undef ATTNPACK_KERNELS

}  // namespace attnpack
