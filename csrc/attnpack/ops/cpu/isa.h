#pragma once

#include <attnpack/ops/cpu/isa/kernels.h>

namespace attnpack {

// The instruction set in use: "baseline", "avx2", "avx512" or "avx512_bf16". It is the fastest that the CPU has, or the
// one that the environment variable ATTNPACK_ISA names.
const char* isa_name();
const Kernels& kernels_in_use();

}  // namespace attnpack
