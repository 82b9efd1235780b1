#pragma once

#include <attnpack/backend/replacement.h>

// torch's scaled_dot_product_attention on the operator, for programs that call it: from Python, from C++
// (at::scaled_dot_product_attention) and in compiled graphs. Nothing is replaced before enable_sdpa is called.
namespace attnpack {

// Replaces scaled_dot_product_attention for tensors on the CPU, and on CUDA devices where attnpack's kernels run. The
// meaning stays that of torch, with the gradients: causality is top-left, and an error is torch's own. There are two
// differences: an excluded key that holds NaN has no influence, and in torch's modules a row without keys attends
// nothing, where torch gives NaN. A call that the operator does not take is passed on to torch, and sdpa_report counts
// it. Calls may be nested; torch's own function comes back when each Replacement is disabled. Any thread may call it,
// but no thread may run attention meanwhile.
Replacement enable_sdpa();

// The same for a scope.
class SdpaGuard : public ReplacementGuard {
 public:
  SdpaGuard() : ReplacementGuard(enable_sdpa()) {}
};

// Whether a Replacement of scaled_dot_product_attention is enabled now; the calls since the last reset that were taken
// and passed on, with the reason of each; and that reset.
bool sdpa_enabled();
ReplacementReport sdpa_report();
void reset_sdpa_report();

}  // namespace attnpack
