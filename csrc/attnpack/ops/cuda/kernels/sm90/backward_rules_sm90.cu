#include <attnpack/ops/cuda/kernels/sm90/launch_backward_sm90.cuh>

// Gradients of calls whose scores have rules, in parts, as forward_rules_sm90.cu.
//
// part: -DATTNPACK_CHOICE=1
// part: -DATTNPACK_STORAGE=BFloat16 -DATTNPACK_WIDTH=64 -DATTNPACK_VALUES=64
// part: -DATTNPACK_STORAGE=BFloat16 -DATTNPACK_WIDTH=128 -DATTNPACK_VALUES=128
// part: -DATTNPACK_STORAGE=Float16 -DATTNPACK_WIDTH=64 -DATTNPACK_VALUES=64
// part: -DATTNPACK_STORAGE=Float16 -DATTNPACK_WIDTH=128 -DATTNPACK_VALUES=128
namespace attnpack::cuda {

#define ATTNPACK_LAUNCH(...)                                                                                          \
  const char* launch_gradients<__VA_ARGS__, Scores::kAny>(const AttentionBackwardParams&, const BackwardPlan&, void*, \
                                                          int, void*)

#ifdef ATTNPACK_STORAGE
template ATTNPACK_LAUNCH(ATTNPACK_STORAGE, ATTNPACK_WIDTH, ATTNPACK_VALUES);
#else
extern template ATTNPACK_LAUNCH(BFloat16, 64, 64);
extern template ATTNPACK_LAUNCH(BFloat16, 128, 128);
extern template ATTNPACK_LAUNCH(Float16, 64, 64);
extern template ATTNPACK_LAUNCH(Float16, 128, 128);

const char* backward_rules_sm90(const AttentionBackwardParams& bp, const BackwardPlan& plan, void* workspace,
                                int device, void* stream) {
  return launch_backward_sm90<Scores::kAny>(bp, plan, workspace, device, stream);
}
#endif

}  // namespace attnpack::cuda
