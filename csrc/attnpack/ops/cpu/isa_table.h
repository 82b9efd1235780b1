#pragma once

#include <attnpack/kernels/table.h>
#include <attnpack/ops/cpu/isa_present.h>

// All instruction sets that are built, whether this CPU has them, and which one it uses. No headers of torch.
namespace attnpack {

// The kernels of one instruction set. One that multiplies pairs of bf16 is compiled without what needs no pairs, which
// takes the kernels of `plain`: linear attention, convolutions, and attention in all dtypes but bf16 where rows are not
// quantised. (Linear layers of 4 rows lost a tenth by that.) Elsewhere `plain` is the instruction set itself.
// Stored weights are multiplied by the kernels of `stored`, or by those of `other` if the CPU lacks VNNI.
#define ATTNPACK_KERNELS(isa, plain, stored, other)                      \
  {Split<isa::prefill_scratch, plain::prefill_scratch>::by_bf16,         \
   Split<isa::prefill, plain::prefill>::by_bf16,                         \
   Split<isa::decode_scratch, plain::decode_scratch>::by_bits,           \
   Split<isa::decode, plain::decode>::by_bits,                           \
   Split<isa::merge, plain::merge>::by_bits,                             \
   Split<isa::backward_scratch, plain::backward_scratch>::by_bf16,       \
   Split<isa::backward, plain::backward>::by_bf16,                       \
   isa::linear_scratch,                                                  \
   isa::linear_rows,                                                     \
   by_vnni(stored::has_byte_products, other::has_byte_products),         \
   by_vnni(stored::round_input, other::round_input),                     \
   by_vnni(stored::stored_linear_scratch, other::stored_linear_scratch), \
   by_vnni(stored::stored_linear_rows, other::stored_linear_rows),       \
   by_vnni(stored::widen_stored_rows, other::widen_stored_rows),         \
   plain::linear_attention_scratch,                                      \
   plain::linear_attention,                                              \
   plain::linear_attention_backward_scratch,                             \
   plain::linear_attention_backward,                                     \
   plain::causal_conv1d_scratch,                                         \
   plain::causal_conv1d,                                                 \
   plain::causal_conv1d_backward_scratch,                                \
   plain::causal_conv1d_backward,                                        \
   Split<isa::rms_norm_rows, plain::rms_norm_rows>::by_bf16,             \
   plain::swiglu,                                                        \
   Split<isa::quantize_rows, plain::quantize_rows>::by_bf16,             \
   Split<isa::dequantize_rows, plain::dequantize_rows>::by_bf16,         \
   isa::rotate_rows,                                                     \
   isa::multiply_adds,                                                   \
   isa::pair_multiply_adds,                                              \
   isa::read_through}

template <class Params>
DType dtype_of(const Params& p) {
  if constexpr (requires { p.forward; })
    return p.forward.dtype;
  else
    return p.dtype;
}

// kPairs or kPlain, by the dtype of the call.
template <auto kPairs, auto kPlain>
struct Split;
template <class Result, class Params, class... Rest, Result (*kPairs)(const Params&, Rest...),
          Result (*kPlain)(const Params&, Rest...)>
struct Split<kPairs, kPlain> {
  static Result by_bf16(const Params& p, Rest... rest) {
    return dtype_of(p) == DType::kBFloat16 ? kPairs(p, rest...) : kPlain(p, rest...);
  }
  // Products with quantised rows are of bytes, in every dtype but fp64.
  static Result by_bits(const Params& p, Rest... rest) {
    return p.quantized_bits && p.dtype != DType::kFloat64 ? kPairs(p, rest...) : by_bf16(p, rest...);
  }
};

template <class Function>
Function* by_vnni(Function* stored, Function* other) {
#if defined(__x86_64__)
  return has_avx512_vnni() ? stored : other;
#else
  return stored;
#endif
}

#if defined(ATTNPACK_HAS_AVX512_BF16)
const bool streams_past_l2 = has_avx512_bf16() && has_fast_pairs();
#elif defined(ATTNPACK_HAS_NEON_BF16)
const bool streams_past_l2 = has_neon_bf16();
#else
const bool streams_past_l2 = false;
#endif

// From the plainest to the widest. The default is the last one that is present and faster.
inline const Isa kIsas[] = {
    {"baseline", true, true, ATTNPACK_KERNELS(baseline, baseline, baseline, baseline)},
#if defined(ATTNPACK_HAS_AVX512_BF16_EMULATED)
    {"avx512_bf16_emulated", has_avx512(), false, ATTNPACK_KERNELS(avx512_bf16_emulated, avx512, avx512_vnni, avx2)},
#endif
#if defined(ATTNPACK_HAS_AVX2)
    {"avx2", has_avx2(), true, ATTNPACK_KERNELS(avx2, avx2, avx2, avx2)},
#endif
#if defined(ATTNPACK_HAS_AVX512)
    {"avx512", has_avx512(), true, ATTNPACK_KERNELS(avx512, avx512, avx512_vnni, avx2)},
#endif
#if defined(ATTNPACK_HAS_AVX512_BF16)
    {"avx512_bf16", has_avx512_bf16(), has_fast_pairs(), ATTNPACK_KERNELS(avx512_bf16, avx512, avx512_vnni, avx2)},
#endif
#if defined(ATTNPACK_HAS_NEON_DOTPROD)
    {"neon_dotprod", has_neon_dotprod(), true,
     ATTNPACK_KERNELS(neon_dotprod, neon_dotprod, neon_dotprod, neon_dotprod)},
#endif
#if defined(ATTNPACK_HAS_NEON_BF16)
    {"neon_bf16", has_neon_bf16(), true, ATTNPACK_KERNELS(neon_bf16, neon_dotprod, neon_bf16, neon_bf16)},
#endif
};

#undef ATTNPACK_KERNELS

}  // namespace attnpack
