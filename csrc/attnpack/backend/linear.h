#pragma once

#include <attnpack/backend/replacement.h>

// torch's linear by the fastest kernel for the CPU, the dtype and the size (ops/linear.h), for programs that call it:
// nn.Linear, F.linear, at::linear and compiled graphs. Nothing is replaced before enable_linear is called.
namespace attnpack {

// Replaces linear for tensors on the CPU, with its gradients; results have torch's tolerance, not its bits. A call for
// which torch's own kernel is as fast, or which the operator does not take, is passed on to torch, and linear_report
// counts it. Calls may be nested; torch's own function comes back when each Replacement is disabled. Any thread may
// call it, but no thread may run linear layers meanwhile.
Replacement enable_linear();

// Whether a Replacement of linear is enabled now; the calls since the last reset that were taken and passed on, with
// the reason of each; and that reset.
bool linear_enabled();
ReplacementReport linear_report();
void reset_linear_report();

}  // namespace attnpack
