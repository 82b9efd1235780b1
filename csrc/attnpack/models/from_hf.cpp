#include <attnpack/models/from_hf.h>

#include <ATen/ops/empty.h>

#include <attnpack/core/check.h>
#include <attnpack/models/detail/hf_checkpoint.h>
#include <attnpack/modules/detail/checks.h>
#include <attnpack/modules/state_dict.h>
#include <attnpack/weights/detail/file_errors.h>

namespace attnpack {

namespace {

// The model that the checkpoint describes, without numbers.
CausalLM empty_model(const HfCheckpoint& checkpoint, at::ScalarType dtype) {
  Factory factory;
  factory.device = at::kMeta;
  factory.dtype = dtype;
  auto options = checkpoint.options();
  return CausalLM(options.factory(factory));
}

}  // namespace

CausalLM causal_lm_from_hf(const std::string& directory, const FromHfOptions& options) {
  ATTNPACK_CHECK(at::isFloatingType(options.dtype()) && c10::elementSize(options.dtype()) > 1, "dtype is ",
                 options.dtype(), ", wants a floating one such as at::kFloat");
  if (options.max_positions()) check_size("max_positions", *options.max_positions());
  return naming(directory, "cannot be loaded", "get the checkpoint again, or give another", [&] {
    const HfCheckpoint checkpoint(directory, options.max_positions());
    check_checkpoint_tensors(directory, checkpoint.shapes(), checkpoint.options());
    auto model = empty_model(checkpoint, options.dtype());
    StateDict weights;
    for (const auto& [name, tensor] : state_dict(*model)) {
      weights[name] = at::empty(tensor.sizes(), at::TensorOptions().dtype(options.dtype()).device(options.device()));
      checkpoint.read(name, weights[name]);
    }
    assign_state_dict(*model, weights);
    model->eval();
    return model;
  });
}

}  // namespace attnpack
