#pragma once

#include <ATen/core/Tensor.h>

#include <attnpack/modules/attention_module.h>

#include <array>
#include <optional>
#include <string>
#include <vector>

namespace attnpack {

// Refuses settings of the scores that are wrong for any input.
void check_settings(const std::optional<Window>& window, double softcap, double dropout,
                    const std::optional<double>& scale, const std::optional<int64_t>& chunk = std::nullopt);

// Checks that a probability of dropout is 0 <= p < 1.
void check_dropout(const char* name, double dropout);

// Checks that a size of a module is at least 1.
void check_size(const char* name, int64_t size);
void check_eps(const char* name, double eps);  // of a norm

// head_dim as given, else embed_dim / num_heads, which must be whole.
int64_t resolve_head_dim(int64_t embed_dim, int64_t num_heads, const std::optional<int64_t>& head_dim);

// Checks that every head reads one kv head: the map names num_heads of them, or num_kv_heads divides num_heads.
void check_heads(int64_t num_heads, int64_t num_kv_heads, const std::optional<std::vector<int64_t>>& head_map);

// Checks that input is on the device of weight.
void check_device(const char* name, const at::Tensor& input, const at::Tensor& weight);

// Checks that input is [B, L, width] in the dtype and on the device of weight.
void check_input(const char* name, const at::Tensor& input, int64_t width, const at::Tensor& weight);

// The input of a projection: rows of `width` numbers, in the dtype and on the device of weight if it is defined.
struct ProjectionInput {
  int64_t width;
  at::Tensor weight;
};

// Checks x [B, L, q.width], context [B, Lkv, k.width] and value_context [B, Lkv, v.width], which stand for one another
// where they are not given. context and cache must not be given together, nor value_context without context; lengths
// and batches must agree.
void check_inputs(const at::Tensor& x, const std::optional<at::Tensor>& context,
                  const std::optional<at::Tensor>& value_context, bool cache, const ProjectionInput& q,
                  const ProjectionInput& k, const ProjectionInput& v);

// Refuses a value_context for latent attention.
void check_one_latent(bool value_context);

// Refuses a value_context for a module whose keys are the values.
void check_keys_are_values(bool value_context);

// Refuses a call without kv_from of a module that has no keys of its own.
void check_own_keys(bool own_keys);

// Refuses a context for a module with chunks, whose keys stand elsewhere than its queries.
void check_chunked_call(bool cross);

// Refuses a layer that reads the keys of a layer that is not before it, or has none.
void check_kv_source(int64_t layer, int64_t source, bool has_keys);

// Checks that the tail of a block gets an input if it has an input_dim.
void check_layer_input(bool given, bool wanted);

// Refuses kv_from beside what it stands for, and for a module that cannot read another layer's cache.
void check_kv_from(bool context, bool cache);
void check_no_kv_from(const char* module, bool kv_from);

// Refuses index_cache for a module without an indexer.
void check_no_index_cache(bool index_cache);

// Refuses key_index for a module that does not take it.
void check_no_key_index(bool key_index);

// Refuses packed sequences for a module that takes them as a nested tensor, or not at all.
void check_no_cu_seqlens(bool cu_seqlens);

// Refuses blocks of keys for a module whose key_index names single keys, or that has none.
void check_no_key_block(int64_t key_block);

// Checks gate ("head", "element" or none) and the name of its activation.
void check_gate_options(const std::optional<std::string>& gate, const std::string& activation);

// Checks that k and v [B, Lkv, ...] are of the batch of q and of one length.
void check_keys_and_values(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v);

// As check_input for [..., width], which norms and feed-forwards map token by token.
void check_tokens(const char* name, const at::Tensor& input, int64_t width, const at::Tensor& weight);

// Checks that lengths, if given, are int32 or int64, with one number per sequence of x [B, L, ...]. On the CPU the
// numbers must be low to L; elsewhere reading them would wait for the device.
void check_lengths(const char* name, const std::optional<at::Tensor>& lengths, const at::Tensor& x, int64_t low = 0);

// Checks that all lengths are low to high. It reads them, so the call waits for the device.
void check_length_values(const char* name, const at::Tensor& lengths, int64_t low, int64_t high);

// Checks that ids are token numbers [B, L]. check_vocabulary finds wrong values; call it after a look-up has failed,
// since reading them makes CUDA wait.
void check_ids(const char* name, const at::Tensor& ids);
void check_vocabulary(const char* name, const at::Tensor& ids, int64_t vocab_size);

// Checks that x is no tensor of token numbers, which a stack without embed_tokens cannot read.
void check_states(const char* name, const at::Tensor& x, int64_t embed_dim);

// Checks that the parts of a block and of a stack have one width: a block adds them up.
void check_output_width(int64_t out_dim, int64_t embed_dim);
void check_part_width(const char* name, int64_t width, int64_t embed_dim);
void check_layer_width(int64_t layer, int64_t width, int64_t first);
void check_embedding_width(int64_t width, int64_t embed_dim, const char* name = "embed_tokens");

// Checks that a stack is made of at least one block.
void check_layers_given(int64_t layers);

// Checks the name of a norm; make_norm lists them.
void check_norm_kind(const std::string& kind);

// The position of each token of x [B, L, ...], [L] or [B, L]: positions if they are given, else those after past [B],
// else 0..L-1.
at::Tensor token_positions(const at::Tensor& x, const std::optional<at::Tensor>& positions,
                           const std::optional<at::Tensor>& past);

// How many positions of each sequence a cache holds, [B], from its lengths; none for a cache that holds no sequence
// yet.
std::optional<at::Tensor> past_lengths(const at::Tensor& lengths, const at::Tensor& x);

// Checks that positions are 0 to max_positions - 1, which reads them.
void check_learned_positions(const at::Tensor& positions, int64_t max_positions);

// Checks the layout of a decoder block, and that nothing is given that it does not go with.
void check_layout(const std::optional<std::string>& layout, bool pre_norm, bool cross_attention);

// Checks the name of a feed-forward's activation.
void check_activation(const std::string& activation);

// Checks that a block is given a context if it has cross-attention, and only then.
void check_cross_attention(bool has_cross_attention, bool context);

// Checks that a cross_cache, if given, is a CrossCache of a block that has cross-attention, and that the other cache is
// none.
void check_cross_cache(bool is_cross_cache, bool given, bool has_cross_attention);
void check_self_cache(bool is_cross_cache);

// Refuses a cache for a block whose cross-attention counts distances: these are right only for the whole target.
void check_cross_distances(bool counts_distances, bool cache);

// Refuses a CrossCache for attention over keys that are given.
void check_projected_cache(bool is_cross_cache);

// Checks that a model's cache has as many layers as the model.
void check_cache_layers(int64_t cached, int64_t layers);

}  // namespace attnpack
