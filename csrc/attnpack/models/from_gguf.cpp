#include <attnpack/models/from_gguf.h>

#include <attnpack/core/check.h>
#include <attnpack/models/detail/gguf_checkpoint.h>
#include <attnpack/models/detail/load.h>
#include <attnpack/modules/state_dict.h>
#include <attnpack/weights/detail/file_errors.h>

namespace attnpack {

namespace {

// Whether the weight of that module may be stored.
bool is_storable(const std::string& name, const torch::nn::Module& module) {
  const auto leaf = name.substr(name.rfind('.') + 1);
  const bool is_table = dynamic_cast<const EmbeddingImpl*>(&module);
  return (is_table || dynamic_cast<const LinearImpl*>(&module)) && may_be_stored(leaf, is_table);
}

// The weights that stay as the file holds them.
StateDict stored_weights(const CausalLMImpl& model, const GgufCheckpoint& checkpoint) {
  StateDict weights;
  for (const auto& item : model.named_modules()) {
    const auto name = item.key() + ".weight";
    if (!is_storable(item.key(), *item.value())) continue;
    if (const auto blocks = checkpoint.blocks(name)) weights[name] = *blocks;
  }
  return weights;
}

}  // namespace

CausalLM causal_lm_from_gguf(const std::string& path, const GgufOptions& options) {
  ATTNPACK_CHECK(options.weights() == "expanded" || options.weights() == "stored", "weights: got '", options.weights(),
                 "', want 'expanded' or 'stored'");
  const bool stored = options.weights() == "stored";
  ATTNPACK_CHECK(!stored || options.device().is_cpu(), "device: got ", options.device(),
                 ", want cpu: only the CPU multiplies weights as they are stored");
  check_load_options(options.dtype(), options.device(), options.max_positions());
  return naming(path, "cannot be loaded", kLoadAgain, [&] {
    const GgufCheckpoint checkpoint(std::make_shared<const GgufFile>(path), options.max_positions());
    check_checkpoint_tensors(path, checkpoint.shapes(), checkpoint.options());
    auto model = empty_model(checkpoint.options(), options.dtype());
    auto weights = stored ? stored_weights(*model, checkpoint) : StateDict();
    read_weights(*model, weights, options.dtype(), options.device(), checkpoint);
    if (stored)
      for (auto& parameter : model->parameters()) parameter.set_requires_grad(false);
    return model;
  });
}

}  // namespace attnpack
