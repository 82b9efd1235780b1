#include <attnpack/ops/cuda/kernels/launchers.h>
#include <attnpack/ops/cuda/kernels/sm90/launch_sm90.cuh>

// Calls whose scores have rules. ptxas takes minutes for all of their kernels, so the build compiles this file in
// parts: one with the choice of a kernel, and one for each kernel.
//
// part: -DATTNPACK_CHOICE=1
// part: -DATTNPACK_STORAGE=BFloat16 -DATTNPACK_WIDTH=64 -DATTNPACK_VALUES=64
// part: -DATTNPACK_STORAGE=BFloat16 -DATTNPACK_WIDTH=128 -DATTNPACK_VALUES=128
// part: -DATTNPACK_STORAGE=BFloat16 -DATTNPACK_WIDTH=192 -DATTNPACK_VALUES=128
// part: -DATTNPACK_STORAGE=BFloat16 -DATTNPACK_WIDTH=256 -DATTNPACK_VALUES=256
// part: -DATTNPACK_STORAGE=Float16 -DATTNPACK_WIDTH=64 -DATTNPACK_VALUES=64
// part: -DATTNPACK_STORAGE=Float16 -DATTNPACK_WIDTH=128 -DATTNPACK_VALUES=128
// part: -DATTNPACK_STORAGE=Float16 -DATTNPACK_WIDTH=192 -DATTNPACK_VALUES=128
// part: -DATTNPACK_STORAGE=Float16 -DATTNPACK_WIDTH=256 -DATTNPACK_VALUES=256
namespace attnpack::cuda {

#define ATTNPACK_LAUNCH(...) \
  const char* launch_width<__VA_ARGS__, Scores::kAny>(const AttentionParams&, const ForwardPlan&, void*, int, void*)

#ifdef ATTNPACK_STORAGE
template ATTNPACK_LAUNCH(ATTNPACK_STORAGE, ATTNPACK_WIDTH, ATTNPACK_VALUES);
#else
extern template ATTNPACK_LAUNCH(BFloat16, 64, 64);
extern template ATTNPACK_LAUNCH(BFloat16, 128, 128);
extern template ATTNPACK_LAUNCH(BFloat16, 192, 128);
extern template ATTNPACK_LAUNCH(BFloat16, 256, 256);
extern template ATTNPACK_LAUNCH(Float16, 64, 64);
extern template ATTNPACK_LAUNCH(Float16, 128, 128);
extern template ATTNPACK_LAUNCH(Float16, 192, 128);
extern template ATTNPACK_LAUNCH(Float16, 256, 256);

const char* forward_rules_sm90(const AttentionParams& p, const ForwardPlan& plan, void* workspace, int device,
                               void* stream) {
  return launch_forward_sm90<Scores::kAny>(p, plan, workspace, device, stream);
}
#endif

}  // namespace attnpack::cuda
