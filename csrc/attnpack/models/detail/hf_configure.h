#pragma once

#include <attnpack/models/causal_lm.h>
#include <attnpack/models/detail/hf_settings.h>

// The functions that turn the settings of a family into options, file by file. The rows of hf_families.cpp name them.
namespace attnpack {

// hf_llama_relatives.cpp: RMSNorm, grouped attention and one feed-forward
void configure_smollm3(const HfSettings& config, CausalLMOptions& options);
void configure_granite(const HfSettings& config, CausalLMOptions& options);
void configure_glm4(const HfSettings& config, CausalLMOptions& options);
void configure_exaone4(const HfSettings& config, CausalLMOptions& options);
void configure_olmo3(const HfSettings& config, CausalLMOptions& options);
void configure_ministral(const HfSettings& config, CausalLMOptions& options);
void configure_ministral3(const HfSettings& config, CausalLMOptions& options);
void configure_seed_oss(const HfSettings& config, CausalLMOptions& options);
void configure_hunyuan(const HfSettings& config, CausalLMOptions& options);
void configure_ernie(const HfSettings& config, CausalLMOptions& options);
void configure_helium(const HfSettings& config, CausalLMOptions& options);
void configure_arcee(const HfSettings& config, CausalLMOptions& options);

// hf_gemma4.cpp
void configure_gemma4(const HfSettings& config, CausalLMOptions& options);

// hf_layer_norm_families.cpp
void configure_cohere2(const HfSettings& config, CausalLMOptions& options);
void configure_phi(const HfSettings& config, CausalLMOptions& options);
void configure_gpt_neox(const HfSettings& config, CausalLMOptions& options);
void configure_stablelm(const HfSettings& config, CausalLMOptions& options);

// hf_mixture_families.cpp: mixtures of experts
void configure_granite_hybrid(const HfSettings& config, CausalLMOptions& options);
void configure_mixtral(const HfSettings& config, CausalLMOptions& options);
void configure_minimax_m2(const HfSettings& config, CausalLMOptions& options);
void configure_mistral4(const HfSettings& config, CausalLMOptions& options);
void configure_llama4(const HfSettings& config, CausalLMOptions& options);

// hf_hybrid_families.cpp: recurrent layers, with attention every few layers
void configure_qwen_hybrid(const HfSettings& config, CausalLMOptions& options);
void configure_qwen3_5_moe(const HfSettings& config, CausalLMOptions& options);
void configure_qwen3_next(const HfSettings& config, CausalLMOptions& options);
void configure_olmo_hybrid(const HfSettings& config, CausalLMOptions& options);
void configure_kimi_linear(const HfSettings& config, CausalLMOptions& options);
void configure_bamba(const HfSettings& config, CausalLMOptions& options);
void configure_lfm2(const HfSettings& config, CausalLMOptions& options);
void configure_lfm2_moe(const HfSettings& config, CausalLMOptions& options);

}  // namespace attnpack
