#pragma once

#include <attnpack/ops/cpu/isa/kernels.h>

namespace attnpack {

// Those of instruction_set() (ops/library.h).
const Kernels& kernels_in_use();

}  // namespace attnpack
