#pragma once

#include <attnpack/ops/cpu/isa/kernels.h>

namespace attnpack {

// Those of instruction_set() (ops/library.h).
const Kernels& kernels_in_use();
// Those for stored weights. They are of another instruction set where that one only multiplies bytes faster: Intel's
// processors have VPDPBUSD beside products of pairs that they do better without.
const Kernels& byte_kernels();

}  // namespace attnpack
