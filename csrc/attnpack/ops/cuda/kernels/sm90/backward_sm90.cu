#include <attnpack/ops/cuda/kernels/sm90/launch_backward_sm90.cuh>

namespace attnpack::cuda {

const char* backward_sm90(const AttentionBackwardParams& bp, const BackwardPlan& plan, void* workspace, int device,
                          void* stream) {
  return is_plain(bp.forward)    ? launch_backward_sm90<Scores::kPlain>(bp, plan, workspace, device, stream)
         : is_masked(bp.forward) ? backward_masked_sm90(bp, plan, workspace, device, stream)
                                 : backward_rules_sm90(bp, plan, workspace, device, stream);
}

}  // namespace attnpack::cuda
