#include <attnpack/ops/cuda/kernels/launchers.h>

// Stand-ins for the launchers of sm90/, in a build that has no architecture 90. No plan names them, because
// has_sm90_image is false.
namespace attnpack::cuda {
namespace {

constexpr const char* kNotBuilt = "this build has no kernels for Hopper: add architecture 90";

}  // namespace

bool has_sm90_image() { return false; }
const char* forward_sm90(const AttentionParams&, const ForwardPlan&, void*, int, void*) { return kNotBuilt; }
const char* latent_sm90(const AttentionParams&, const ForwardPlan&, void*, int, void*) { return kNotBuilt; }
const char* backward_sm90(const AttentionBackwardParams&, const BackwardPlan&, void*, int, void*) { return kNotBuilt; }

}  // namespace attnpack::cuda
