#include <attnpack/ops/cuda/kernels/launchers.h>
#include <attnpack/ops/cuda/kernels/sm90/launch_sm90.cuh>

namespace attnpack::cuda {

// Calls whose scores have rules: a file of its own, because each takes as long to compile as forward_sm90.cu.
const char* forward_rules_sm90(const AttentionParams& p, const ForwardPlan& plan, void* workspace, int device,
                               void* stream) {
  return launch_forward_sm90<Scores::kAny>(p, plan, workspace, device, stream);
}

}  // namespace attnpack::cuda
