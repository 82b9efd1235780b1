#include <attnpack/ops/cuda/kernels/launchers.h>
#include <attnpack/ops/cuda/kernels/sm90/launch_sm90.cuh>

// Calls with a bool mask and no other rule: two small kernels make bits and lists of the mask first.
namespace attnpack::cuda {
namespace {

__global__ void __launch_bounds__(kMaskThreads)
    pack_mask_kernel(const __grid_constant__ AttentionParams p, const __grid_constant__ MaskPlan mask,
                     void* workspace) {
  pack_mask_block(p, mask, workspace, blockIdx.x);
}
__global__ void __launch_bounds__(kMaskThreads)
    list_steps_kernel(const __grid_constant__ AttentionParams p, const __grid_constant__ MaskPlan mask,
                      int64_t tile_rows, void* workspace) {
  __shared__ MaskListShared shared;
  list_steps_block(p, mask, tile_rows, workspace, blockIdx.x, shared);
}

}  // namespace

const char* forward_masked_sm90(const AttentionParams& p, const ForwardPlan& plan, void* workspace, int device,
                                void* stream) {
  const MaskPlan& mask = plan.mask;
  if (const char* error =
          launch(pack_mask_kernel, mask_blocks(mask), kMaskThreads, 0, device, stream, p, mask, workspace))
    return error;
  if (const char* error = launch(list_steps_kernel, mask_lists(mask), kMaskThreads, 0, device, stream, p, mask,
                                 plan.tile_rows, workspace))
    return error;
  return launch_forward_sm90<Scores::kMasked>(p, plan, workspace, device, stream);
}

}  // namespace attnpack::cuda
