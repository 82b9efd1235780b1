#pragma once

#include <ATen/core/Tensor.h>

#include <attnpack/models/causal_lm.h>

#include <functional>
#include <string>
#include <vector>

// Where the tensors of a family's checkpoints go: one of theirs may hold several of CausalLM's.
namespace attnpack {

// A tensor of CausalLM: its name, and how it is cut out of the stored one. No cut: all of it. Several parts of one name
// stand one after the other in its rows, in the order of their numbers.
struct HfPart {
  std::string name;
  std::function<at::Tensor(const at::Tensor&)> cut;
  int piece = 0;
};

// The parts of the stored tensor of that name; none for one that a model does not need.
using HfParts = std::vector<HfPart> (*)(const std::string& name, const CausalLMOptions& options);

std::vector<HfPart> llama_parts(const std::string& name, const CausalLMOptions& options);
std::vector<HfPart> phi3_parts(const std::string& name, const CausalLMOptions& options);
std::vector<HfPart> starcoder2_parts(const std::string& name, const CausalLMOptions& options);
std::vector<HfPart> gpt2_parts(const std::string& name, const CausalLMOptions& options);
std::vector<HfPart> gpt_bigcode_parts(const std::string& name, const CausalLMOptions& options);
std::vector<HfPart> falcon_parts(const std::string& name, const CausalLMOptions& options);
std::vector<HfPart> gpt_oss_parts(const std::string& name, const CausalLMOptions& options);
std::vector<HfPart> glm4_parts(const std::string& name, const CausalLMOptions& options);
std::vector<HfPart> hunyuan_parts(const std::string& name, const CausalLMOptions& options);
std::vector<HfPart> phi_parts(const std::string& name, const CausalLMOptions& options);
std::vector<HfPart> gpt_neox_parts(const std::string& name, const CausalLMOptions& options);
std::vector<HfPart> gemma4_parts(const std::string& name, const CausalLMOptions& options);
std::vector<HfPart> mixtral_parts(const std::string& name, const CausalLMOptions& options);
std::vector<HfPart> granite_hybrid_parts(const std::string& name, const CausalLMOptions& options);
std::vector<HfPart> llama4_parts(const std::string& name, const CausalLMOptions& options);
std::vector<HfPart> packed_experts_parts(const std::string& name, const CausalLMOptions& options);
std::vector<HfPart> qwen_hybrid_parts(const std::string& name, const CausalLMOptions& options);
std::vector<HfPart> qwen3_5_moe_parts(const std::string& name, const CausalLMOptions& options);
std::vector<HfPart> qwen3_next_parts(const std::string& name, const CausalLMOptions& options);
std::vector<HfPart> olmo_hybrid_parts(const std::string& name, const CausalLMOptions& options);
std::vector<HfPart> kimi_linear_parts(const std::string& name, const CausalLMOptions& options);
std::vector<HfPart> bamba_parts(const std::string& name, const CausalLMOptions& options);
std::vector<HfPart> lfm2_parts(const std::string& name, const CausalLMOptions& options);
std::vector<HfPart> lfm2_moe_parts(const std::string& name, const CausalLMOptions& options);

}  // namespace attnpack
