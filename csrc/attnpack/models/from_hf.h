#pragma once

#include <attnpack/models/causal_lm.h>

#include <optional>
#include <string>

namespace attnpack {

struct FromHfOptions {
  TORCH_ARG(at::ScalarType, dtype) = at::kFloat;  // of the parameters; stored weights are converted
  TORCH_ARG(at::Device, device) = at::kCPU;
  TORCH_ARG(std::optional<int64_t>, max_positions);  // limits the configuration's own context
};

// The CausalLM of a Hugging Face directory, in evaluation mode: config.json and safetensors, also in shards. An
// error about another model_type lists the families, and so does docs/variants.md. A model with pictures or sound, such
// as gemma3, gives its language model. Weights in FP8 (e4m3 with scales by block, as DeepSeek-V3 and Qwen3-FP8) and in
// MXFP4 (gpt-oss) become numbers of `dtype`; activations are not rounded to FP8. The weights are read tensor
// by tensor into memory of their own, which grows by their size in `dtype` and little more; the directory may go
// afterwards.
//
// Raises c10::ValueError, a sentence that names the directory or the file, for a file that is damaged, for tensors that
// are missing, unexpected or of another shape, and for a setting that CausalLM cannot compute, by its name. All sizes
// are checked against the files before anything is built.
CausalLM causal_lm_from_hf(const std::string& directory, const FromHfOptions& options = {});

}  // namespace attnpack
