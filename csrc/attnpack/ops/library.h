#pragma once

namespace attnpack {

// The version of the library that runs. ATTNPACK_VERSION (version.h) is that of the headers a program was compiled
// with.
const char* version();

// The instruction set of the CPU kernels in use: "baseline", "avx2", "avx512" or "avx512_bf16". It is the fastest that
// the CPU has, or the one that the environment variable ATTNPACK_ISA names. Raises if the CPU lacks what it names.
const char* instruction_set();

}  // namespace attnpack
