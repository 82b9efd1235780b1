#include <attnpack/models/from_hf.h>

#include <attnpack/models/detail/hf_checkpoint.h>
#include <attnpack/models/detail/load.h>
#include <attnpack/weights/detail/file_errors.h>

namespace attnpack {

CausalLM causal_lm_from_hf(const std::string& directory, const FromHfOptions& options) {
  check_load_options(options.dtype(), options.device(), options.max_positions());
  return naming(directory, "cannot be loaded", kLoadAgain, [&] {
    const HfCheckpoint checkpoint(directory, options.max_positions());
    check_checkpoint_tensors(directory, checkpoint.shapes(), checkpoint.options());
    auto model = empty_model(checkpoint.options(), options.dtype());
    read_weights(*model, {}, options.dtype(), options.device(), checkpoint);
    return model;
  });
}

}  // namespace attnpack
