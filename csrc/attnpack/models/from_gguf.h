#pragma once

#include <attnpack/models/causal_lm.h>

#include <optional>
#include <string>

namespace attnpack {

struct GgufOptions {
  TORCH_ARG(at::ScalarType, dtype) = at::kFloat;  // of the parameters that are not stored as the file holds them
  TORCH_ARG(at::Device, device) = at::kCPU;
  TORCH_ARG(std::optional<int64_t>, max_positions);  // limits the file's own context
  TORCH_ARG(std::string, weights) = "expanded";      // or "stored"
};

// The CausalLM of a GGUF file, in evaluation mode. An error about another architecture lists those that are read. The
// weights are read tensor by tensor into memory of their own, which grows by their size in `dtype` and little more.
//
// weights("stored"): linear layers and token embeddings in Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K and Q6_K stay as
// the file holds them, in memory that is mapped from it, and are multiplied as they are. (Rows of some architectures'
// q_proj and k_proj change places, so these are copied.) Such a model has no gradients, and all its parameters are
// frozen. Leave the file as it is while a model uses it: if it is overwritten, weights change, and if it is cut,
// reading them ends the process.
//
// Raises c10::ValueError, a sentence that names the file, for a file that is damaged, that lacks tensors or has others,
// for numbers of a type that only the Python package gguf widens, and for a setting that CausalLM cannot compute, by
// its name. All sizes are checked against the file before anything is built.
CausalLM causal_lm_from_gguf(const std::string& path, const GgufOptions& options = {});

}  // namespace attnpack
