#include <attnpack/ops/cuda/kernels/launchers.h>
#include <attnpack/ops/cuda/kernels/sm90/launch_sm90.cuh>

namespace attnpack::cuda {

bool has_sm90_image() {
  cudaFuncAttributes attributes;
  const bool has =
      cudaFuncGetAttributes(&attributes, forward_sm90_kernel<BFloat16, 64, 64, Scores::kPlain>) == cudaSuccess;
  cudaGetLastError();
  return has;
}

const char* forward_sm90(const AttentionParams& p, const ForwardPlan& plan, void* workspace, int device, void* stream) {
  return is_plain(p)    ? launch_forward_sm90<Scores::kPlain>(p, plan, workspace, device, stream)
         : is_masked(p) ? forward_masked_sm90(p, plan, workspace, device, stream)
                        : forward_rules_sm90(p, plan, workspace, device, stream);
}

}  // namespace attnpack::cuda
