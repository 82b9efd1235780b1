#include <attnpack/ops/cuda/kernels/launchers.h>
#include <attnpack/ops/cuda/kernels/sm90/launch_sm90.cuh>

namespace attnpack::cuda {

const char* forward_masked_sm90(const AttentionParams& p, const ForwardPlan& plan, void* workspace, int device,
                                void* stream) {
  const char* error = pack_mask(p, plan.mask, workspace, device, stream);
  if (!error) error = list_keys(p, plan.mask, plan.lists, plan.tile_rows, workspace, device, stream);
  return error ? error : launch_forward_sm90<Scores::kMasked>(p, plan, workspace, device, stream);
}

}  // namespace attnpack::cuda
