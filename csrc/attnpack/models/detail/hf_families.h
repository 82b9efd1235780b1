#pragma once

#include <attnpack/models/detail/hf_config.h>
#include <attnpack/models/detail/hf_parts.h>

#include <functional>
#include <initializer_list>
#include <optional>
#include <string>
#include <vector>

// Shared by the families when they read their settings.
namespace attnpack {

// The number of tokens that a layer with a window sees, its own included; none for null.
std::optional<int64_t> window_size(const HfSettings& config, std::optional<int64_t> usual);

// Windows of `size` tokens in the layers that layer_types says, or else in those that `slides` says.
void set_windows(const HfSettings& config, CausalLMOptions& options, std::optional<int64_t> size,
                 const std::function<bool(int64_t layer)>& slides);

// A window of `size` tokens in every layer, or in none. Raises where layer_types says otherwise: transformers does not
// read it for such a family.
void set_window(const HfSettings& config, CausalLMOptions& options, std::optional<int64_t> size);

// RoPE of two kinds: layers with a window have their own. Where all have it, it is an option of the model.
void set_ropes_by_kind(CausalLMOptions& options, const HfRopeByKind& ropes);

// Whether the layer has a window.
bool slides(const CausalLMOptions& options, int64_t layer);

// Layers without rotation. Where no layer rotates, it is an option of the model.
void set_rotated_layers(CausalLMOptions& options, const std::function<bool(int64_t layer)>& rotates);

// Which layers are of one of two kinds by that setting; none where it is absent. A kind has several words where older
// checkpoints have others; an error names the first.
std::optional<std::vector<bool>> layers_of_kind(const HfSettings& config, int64_t layers,
                                                std::initializer_list<std::string_view> kind,
                                                std::initializer_list<std::string_view> other,
                                                const char* setting = "layer_types");

// The layers' own settings, one for each layer.
std::vector<LayerSettings>& layers_of(CausalLMOptions& options);

// Which layers rotate by no_rope_layers (1 for those that do), or else all but each no_rope_layer_interval-th.
std::vector<bool> rotated_layers(const HfSettings& config, int64_t layers);

// The first dims of a head that rotate, by partial_rotary_factor; `usual` is the factor where the configuration has
// none.
void set_rotated_part(const HfSettings& config, CausalLMOptions& options, double usual);

// Granite's factors on embeddings, residuals, scores and logits.
void set_multipliers(const HfSettings& config, CausalLMOptions& options);

// Latent attention in every layer by the settings of DeepSeek's names; `latent` has the usual sizes, for those that are
// absent. A q_lora_rank of null means queries without a latent.
void set_latent(const HfSettings& config, CausalLMOptions& options, MultiHeadLatentAttentionOptions latent);

// Layers of Mamba-2 where layer_types says so, in all where it is absent; sizes by the names that Bamba and Granite 4
// share.
void set_mamba_layers(const HfSettings& config, CausalLMOptions& options);

// The growth of the scores of Ministral 3 and Mistral 4, whose numbers stand beside those of the RoPE.
std::optional<QueryScale> log_query_scale(const HfSettings& config);

// Whether a layer has the plain feed-forward by decoder_sparse_step and mlp_only_layers.
std::function<bool(int64_t layer)> dense_by_step(const HfSettings& config);

// The setting that says how many experts there are, under one of its two names.
const char* count_of_experts(const HfSettings& config);

// Layers with the plain feed-forward in a model with experts.
void set_dense_layers(CausalLMOptions& options, const std::function<bool(int64_t layer)>& is_dense);

// The activation by FeedForward's name, with a gate or without one; `usual` is Hugging Face's name of the usual one.
std::string gated_activation(const HfSettings& config, const char* usual);
std::string plain_activation(const HfSettings& config, const char* usual);

// The first layers have the plain feed-forward, as many as the setting says.
void set_first_dense(const HfSettings& config, CausalLMOptions& options, const char* setting, int64_t usual);

// Checks that hidden_act is silu, or absent.
void check_silu(const HfSettings& config);

// Recurrent layers with these settings, beside layers that attend.
void set_recurrent_layers(CausalLMOptions& options, const RecurrentSettings& settings,
                          const std::vector<bool>& recurrent);

// Experts of that width; `count` is the setting that says how many there are, `usual` and `usual_k` are defaults.
MixtureOfExpertsOptions experts(const HfSettings& config, int64_t width, const char* count, int64_t usual,
                                int64_t usual_k);

}  // namespace attnpack
