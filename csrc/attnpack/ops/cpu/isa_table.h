#pragma once

#include <attnpack/ops/cpu/isa/kernels.h>
#include <attnpack/ops/cpu/isa_present.h>

// All instruction sets that are built, whether this CPU has them, and which one it uses. No headers of torch.
namespace attnpack {

#define ATTNPACK_KERNELS(isa)                                                                  \
  {isa::prefill_scratch, isa::prefill,          isa::decode_scratch,     isa::decode,          \
   isa::merge,           isa::backward_scratch, isa::backward,           isa::linear_scratch,  \
   isa::linear_rows,     isa::rms_norm_rows,    isa::quantize_rows,      isa::dequantize_rows, \
   isa::rotate_rows,     isa::multiply_adds,    isa::pair_multiply_adds, isa::read_through}

// As ATTNPACK_KERNELS, but fp64, which has no pairs, takes the kernels of `wide`.
#define ATTNPACK_PAIR_KERNELS(isa, wide)                         \
  {ByDtype<isa::prefill_scratch, wide::prefill_scratch>::call,   \
   ByDtype<isa::prefill, wide::prefill>::call,                   \
   ByDtype<isa::decode_scratch, wide::decode_scratch>::call,     \
   ByDtype<isa::decode, wide::decode>::call,                     \
   ByDtype<isa::merge, wide::merge>::call,                       \
   ByDtype<isa::backward_scratch, wide::backward_scratch>::call, \
   ByDtype<isa::backward, wide::backward>::call,                 \
   isa::linear_scratch,                                          \
   isa::linear_rows,                                             \
   ByDtype<isa::rms_norm_rows, wide::rms_norm_rows>::call,       \
   ByDtype<isa::quantize_rows, wide::quantize_rows>::call,       \
   ByDtype<isa::dequantize_rows, wide::dequantize_rows>::call,   \
   isa::rotate_rows,                                             \
   isa::multiply_adds,                                           \
   isa::pair_multiply_adds,                                      \
   isa::read_through}

template <class Params>
bool is_double(const Params& p) {
  if constexpr (requires { p.forward; })
    return p.forward.dtype == DType::kFloat64;
  else
    return p.dtype == DType::kFloat64;
}

template <auto kPairs, auto kWide>
struct ByDtype;
template <class Result, class Params, class... Rest, Result (*kPairs)(const Params&, Rest...),
          Result (*kWide)(const Params&, Rest...)>
struct ByDtype<kPairs, kWide> {
  static Result call(const Params& p, Rest... rest) { return is_double(p) ? kWide(p, rest...) : kPairs(p, rest...); }
};

struct Isa {
  const char* name;
  bool present;
  bool faster;  // than the instruction sets before it
  Kernels kernels;
};

// From the plainest to the widest. The default is the last one that is present and faster.
inline const Isa kIsas[] = {
    {"baseline", true, true, ATTNPACK_KERNELS(baseline)},
#if defined(ATTNPACK_HAS_AVX512_BF16_EMULATED)
    {"avx512_bf16_emulated", has_avx512(), false, ATTNPACK_PAIR_KERNELS(avx512_bf16_emulated, avx512)},
#endif
#if defined(ATTNPACK_HAS_AVX2)
    {"avx2", has_avx2(), true, ATTNPACK_KERNELS(avx2)},
#endif
#if defined(ATTNPACK_HAS_AVX512)
    {"avx512", has_avx512(), true, ATTNPACK_KERNELS(avx512)},
#endif
#if defined(ATTNPACK_HAS_AVX512_BF16)
    {"avx512_bf16", has_avx512_bf16(), has_fast_pairs(), ATTNPACK_PAIR_KERNELS(avx512_bf16, avx512)},
#endif
};

#undef ATTNPACK_KERNELS
#undef ATTNPACK_PAIR_KERNELS

}  // namespace attnpack
