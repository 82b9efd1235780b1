#pragma once

#include <attnpack/models/detail/gguf_families.h>

#include <initializer_list>
#include <optional>
#include <string>
#include <vector>

// Shared by the architectures when they read their settings.
namespace attnpack {

// The rows of the table of architectures, by the file that they stand in.
GgufFamilies gguf_older_families();    // gguf_older_families.cpp
GgufFamilies gguf_newer_families();    // since 2025, and older ones with LayerNorm
GgufFamilies gguf_mixture_families();  // with experts
GgufFamily gguf_gemma4();              // gguf_gemma4.cpp
GgufFamilies gguf_hybrid_families();   // recurrent layers, with attention every few layers

GgufNames joined(std::initializer_list<GgufNames> names);
GgufNames expert_names();      // the gate and the experts
GgufNames shared_names();      // the expert for all tokens
GgufNames correction_names();  // of the choice of experts
GgufNames latent_names();      // latent attention
GgufNames sandwich_names();    // norms before and behind attention and feed-forward

// Values of expert_gating_func: of all experts, or of those chosen.
inline constexpr int64_t kSoftmax = 1, kSigmoid = 2, kSoftmaxOfChosen = 3;
// Experts that softmax scores, without groups.
MixtureOfExpertsOptions plain_experts(const GgufSettings& file, bool normalize);
// Experts that sigmoid scores, without groups.
MixtureOfExpertsOptions sigmoid_experts(const GgufSettings& file, bool normalize);
// Experts each as wide as feed_forward_length: llama.cpp writes no width of theirs for these architectures.
MixtureOfExpertsOptions wide_experts(const GgufSettings& file);
// The experts of DeepSeek and its relatives; `normalize` and `gating` are what a file that says nothing means.
MixtureOfExpertsOptions grouped_experts(const GgufSettings& file, bool normalize, int64_t gating);
// Whether the choice of experts has corrections.
bool is_corrected(const GgufSettings& file);
// The first leading_dense_block_count layers have no experts.
void set_first_dense(const GgufSettings& file, CausalLMOptions& options);

// Raises unless the counts of heads in `key` are as many in all layers that have any.
void check_equal_heads(const GgufSettings& file, const char* key, bool are_equal);
// Raises unless `key` is absent, or `width`, which `other` is.
void check_width(const GgufSettings& file, const char* key, const char* other, int64_t width);
// The dims of a head.
int64_t width_of_head(const GgufSettings& file);
// The first dims of a head that rotate, if not all do.
void set_rotated_part(const GgufSettings& file, CausalLMOptions& options);
// Whether each layer has the window: the file lists it, or all but the last of each `period` do.
std::vector<bool> sliding_layers(const GgufSettings& file, int64_t layers, int64_t period);
// The window in these layers, and none in the others.
void set_windows(const GgufSettings& file, CausalLMOptions& options, int64_t width, int64_t period);
// The same by the settings of the file. False, and nothing is set, without a window.
bool set_windows_in_turns(const GgufSettings& file, CausalLMOptions& options, int64_t period);
// Latent attention.
void set_latent(const GgufSettings& file, CausalLMOptions& options);
// Granite's factors on embeddings, residuals, scores and logits, and whether it rotates.
void configure_granite(const GgufSettings& file, CausalLMOptions& options);
void configure_granite_experts(const GgufSettings& file, CausalLMOptions& options);
std::set<std::string> granite_settings(bool experts = false);

}  // namespace attnpack
