#include <attnpack/ops/cuda/kernels/launchers.h>
#include <attnpack/ops/cuda/kernels/launch.cuh>
#include <attnpack/ops/cuda/kernels/mask_bits.cuh>

// The small kernels that make bits and lists of a bool mask.
namespace attnpack::cuda {
namespace {

__global__ void __launch_bounds__(kMaskThreads)
    pack_mask_kernel(const __grid_constant__ AttentionParams p, const __grid_constant__ MaskBits mask,
                     void* workspace) {
  pack_mask_block(p, mask, workspace, blockIdx.x);
}
__global__ void __launch_bounds__(kMaskThreads)
    list_keys_kernel(const __grid_constant__ AttentionParams p, const __grid_constant__ MaskBits mask,
                     const __grid_constant__ MaskLists lists, int64_t tile_rows, void* workspace) {
  __shared__ MaskListShared shared;
  list_keys_block(p, mask, lists, tile_rows, workspace, blockIdx.x, shared);
}
__global__ void __launch_bounds__(kMaskThreads)
    list_rows_kernel(const __grid_constant__ AttentionParams p, const __grid_constant__ MaskBits mask,
                     const __grid_constant__ MaskLists lists, void* workspace) {
  __shared__ MaskListShared shared;
  list_rows_block<kBackwardOwnersSm90>(p, mask, lists, workspace, blockIdx.x, shared);
}

}  // namespace

const char* pack_mask(const AttentionParams& p, const MaskBits& mask, void* workspace, int device, void* stream) {
  return launch(pack_mask_kernel, mask_blocks(mask), kMaskThreads, 0, device, stream, p, mask, workspace);
}
const char* list_keys(const AttentionParams& p, const MaskBits& mask, const MaskLists& lists, int64_t tile_rows,
                      void* workspace, int device, void* stream) {
  return launch(list_keys_kernel, count_lists(lists), kMaskThreads, 0, device, stream, p, mask, lists, tile_rows,
                workspace);
}
const char* list_rows(const AttentionParams& p, const MaskBits& mask, const MaskLists& lists, void* workspace,
                      int device, void* stream) {
  return launch(list_rows_kernel, count_lists(lists), kMaskThreads, 0, device, stream, p, mask, lists, workspace);
}

}  // namespace attnpack::cuda
