#include <attnpack/ops/cuda/kernels/sm90/launch_backward_sm90.cuh>

namespace attnpack::cuda {

const char* backward_masked_sm90(const AttentionBackwardParams& bp, const BackwardPlan& plan, void* workspace,
                                 int device, void* stream) {
  const AttentionParams& p = bp.forward;
  const char* error = pack_mask(p, plan.mask, workspace, device, stream);
  if (!error) error = list_keys(p, plan.mask, plan.lists_of_rows, kBackwardOwnersSm90, workspace, device, stream);
  if (!error) error = list_rows(p, plan.mask, plan.lists_of_keys, workspace, device, stream);
  return error ? error : launch_backward_sm90<Scores::kMasked>(bp, plan, workspace, device, stream);
}

}  // namespace attnpack::cuda
