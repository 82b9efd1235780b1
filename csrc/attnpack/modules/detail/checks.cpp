#include <attnpack/modules/detail/checks.h>

#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/autocast_mode.h>

#include <cmath>
#include <limits>
#include <set>

#include <attnpack/core/padded.h>
#include <attnpack/core/sizes.h>
#include <attnpack/layers/sharded_attention.h>

namespace attnpack {

void check_settings(const std::optional<Window>& window, double softcap, double dropout,
                    const std::optional<double>& scale, const std::optional<int64_t>& chunk) {
  ScoreRules rules;
  rules.window = window.value_or(kNoWindow);
  rules.chunk = chunk;
  rules.softcap = softcap;
  rules.scale = scale;
  check_rule_numbers(rules, true);  // the dtype is that of the inputs
  check_dropout("dropout", dropout);
}

void check_parameter_size(const char* names, at::IntArrayRef sizes, size_t element_bytes) {
  check_storable(names, sizes, element_bytes);
}

void check_dropout(const char* name, double dropout) {
  ATTNPACK_CHECK(dropout >= 0 && dropout < 1, name, ": got ", dropout, ", want 0 <= dropout < 1");
}

void check_size(const char* name, int64_t size) { ATTNPACK_CHECK(size > 0, name, ": got ", size, ", want at least 1"); }

int64_t resolve_head_dim(int64_t embed_dim, int64_t num_heads, const std::optional<int64_t>& head_dim) {
  check_size("num_heads", num_heads);
  if (head_dim) {
    check_size("head_dim", *head_dim);
    ATTNPACK_CHECK(*head_dim <= std::numeric_limits<int64_t>::max() / num_heads, "head_dim: got ", *head_dim, " for ",
                   num_heads, " heads, which no tensor can hold together; want a smaller one");
    return *head_dim;
  }
  ATTNPACK_CHECK(embed_dim % num_heads == 0, "num_heads: got ", num_heads, ", which does not divide embed_dim ",
                 embed_dim, "; choose a divisor or give head_dim");
  return embed_dim / num_heads;
}

void check_eps(const char* name, double eps) {
  ATTNPACK_CHECK(eps >= 0 && std::isfinite(eps), name, ": got ", eps, ", want a small number such as 1e-6");
}

void check_heads(int64_t num_heads, int64_t num_kv_heads, const std::optional<std::vector<int64_t>>& head_map) {
  check_size("num_kv_heads", num_kv_heads);
  if (!head_map) {
    ATTNPACK_CHECK(num_heads % num_kv_heads == 0, "num_kv_heads: got ", num_kv_heads,
                   ", which does not divide num_heads ", num_heads, "; for uneven groups give head_map");
    return;
  }
  ATTNPACK_CHECK(static_cast<int64_t>(head_map->size()) == num_heads, "head_map: got ", head_map->size(),
                 " entries, want one kv head for each of the ", num_heads, " heads");
  for (int64_t kv_head : *head_map) {
    ATTNPACK_CHECK(kv_head >= 0 && kv_head < num_kv_heads, "head_map: got kv head ", kv_head, ", want 0 to ",
                   num_kv_heads - 1);
  }
}

void check_device(const char* name, const at::Tensor& input, const at::Tensor& weight) {
  ATTNPACK_CHECK(input.device() == weight.device(), name, ": got device ", input.device(),
                 ", want the module's device ", weight.device(), "; ",
                 weight.is_meta() ? "its weights hold no numbers yet, assign it a state dict first"
                                  : "move one of them with .to()");
}

namespace {

void check_place(const char* name, const at::Tensor& input, const at::Tensor& weight) {
  if (!weight.defined()) return;
  check_device(name, input, weight);
  if (!weight.is_floating_point()) return;  // stored weights multiply any float dtype
  // Autocast casts both to its own dtype.
  const auto type = input.device().type();
  ATTNPACK_CHECK(input.scalar_type() == weight.scalar_type() || at::autocast::is_autocast_enabled(type), name,
                 ": got dtype ", input.scalar_type(), ", want the module's dtype ", weight.scalar_type(),
                 "; convert one of them with .to()");
}

}  // namespace

void check_input(const char* name, const at::Tensor& input, int64_t width, const at::Tensor& weight) {
  check_padded(name, input);
  ATTNPACK_CHECK(input.dim() == 3 && input.sym_size(2) == width, name, ": got shape ", input.sym_sizes(),
                 ", want [batch, length, ", width, "]");
  check_place(name, input, weight);
}

void check_tokens(const char* name, const at::Tensor& input, int64_t width, const at::Tensor& weight) {
  check_defined(name, input);
  ATTNPACK_CHECK(input.dim() > 0 && input.sym_size(-1) == width, name, ": got shape ", input.sym_sizes(),
                 ", want [..., ", width, "]");
  check_place(name, input, weight);
}

void check_inputs(const at::Tensor& x, const std::optional<at::Tensor>& context,
                  const std::optional<at::Tensor>& value_context, bool cache, const ProjectionInput& q,
                  const ProjectionInput& k, const ProjectionInput& v) {
  const at::Tensor& keys = context ? *context : x;
  check_input("x", x, q.width, q.weight);
  check_input(context ? "context" : "x, taken as context", keys, k.width, k.weight);
  check_input(value_context ? "value_context" : "x or context, taken as value_context",
              value_context ? *value_context : keys, v.width, v.weight);
  const auto same_batch = [&](const char* name, const std::optional<at::Tensor>& other) {
    ATTNPACK_CHECK(!other || other->sym_size(0) == x.sym_size(0), name, ": got batch ", other->sym_size(0), ", want ",
                   x.sym_size(0), " as in x");
  };
  same_batch("context", context);
  same_batch("value_context", value_context);
  ATTNPACK_CHECK(!value_context || context,
                 "value_context: got a tensor without context; give context, where the keys come from, too");
  ATTNPACK_CHECK(!context || !cache,
                 "cache: got one together with context; a cache holds self-attention's keys, leave it out or take a "
                 "CrossCache");
  ATTNPACK_CHECK(!value_context || value_context->sym_size(1) == context->sym_size(1), "value_context: got length ",
                 value_context->sym_size(1), ", want ", context->sym_size(1),
                 " as context has: each of its keys needs one value");
}

void check_one_latent(bool value_context) {
  ATTNPACK_CHECK(!value_context,
                 "value_context: got a tensor, but latent attention makes keys and values of one latent; leave it out");
}

void check_keys_are_values(bool value_context) {
  ATTNPACK_CHECK(!value_context,
                 "value_context: got a tensor, but with keys_as_values the keys are the values; leave it out");
}

void check_kv_from(bool context, bool cache) {
  ATTNPACK_CHECK(!context,
                 "context: got one together with kv_from, which gives keys and values; leave one of them out");
  ATTNPACK_CHECK(!cache, "cache: got one together with kv_from, to which nothing is appended; leave one of them out");
}

void check_no_index_cache(bool index_cache) {
  ATTNPACK_CHECK(
      !index_cache,
      "index_cache: got one, but only SparseAttention with selector 'indexer' and SparseLatentAttention have keys ",
      "for it; ", "leave it out");
}

void check_no_key_index(bool key_index) {
  ATTNPACK_CHECK(!key_index,
                 "key_index: got one, but only multi-head, grouped-query, multi-query and latent attention take it; ",
                 "leave it out, or call attnpack::attention");
}

void check_no_cu_seqlens(bool cu_seqlens) {
  ATTNPACK_CHECK(!cu_seqlens,
                 "cu_seqlens: got a tensor, but attention layers take padded sequences and kv_lens; pad them, or call ",
                 "attnpack::attention_varlen");
}

void check_no_key_block(int64_t key_block) {
  ATTNPACK_CHECK(key_block == 1, "key_block: got ", key_block, ", but only multi-head, grouped-query and multi-query ",
                 "attention take blocks; leave it out, and name single keys");
}

void check_no_kv_from(const char* module, bool kv_from) {
  ATTNPACK_CHECK(!kv_from, "kv_from: got a cache, but ", module, " reads no other layer's; leave it out");
}

void check_gate_options(const std::optional<std::string>& gate, const std::string& activation) {
  ATTNPACK_CHECK(!gate || *gate == "head" || *gate == "element", "gate: got '", gate.value_or(""),
                 "', want 'head' or 'element', or none");
  check_gate_activation(activation);
  ATTNPACK_CHECK(gate || activation == "sigmoid", "gate_activation: got '", activation,
                 "' without a gate; give gate 'head' or 'element' too, or leave it out");
}

void check_keys_and_values(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  ATTNPACK_CHECK(k.sym_size(0) == q.sym_size(0), "k: got batch ", k.sym_size(0), ", want ", q.sym_size(0), " as in q");
  ATTNPACK_CHECK(v.sym_size(0) == k.sym_size(0) && v.sym_size(1) == k.sym_size(1), "v: got shape ", v.sym_sizes(),
                 ", want batch and length of k ", k.sym_sizes(), ": each key needs one value");
}

void check_lengths(const char* name, const std::optional<at::Tensor>& lengths, const at::Tensor& x, int64_t low) {
  if (!lengths || !x.defined() || x.dim() < 2) return;  // such an x is refused where it is read
  check_defined(name, *lengths);
  ATTNPACK_CHECK(lengths->scalar_type() == at::kLong || lengths->scalar_type() == at::kInt, name, " has dtype ",
                 lengths->scalar_type(), ", wants int32 or int64: call .long() on it, in C++ .to(at::kLong)");
  ATTNPACK_CHECK(lengths->dim() == 1 && lengths->sym_size(0) == x.sym_size(0), name, " has shape ",
                 lengths->sym_sizes(), ", wants [batch] = [", x.sym_size(0), "]: the valid tokens of each sequence");
  if (sharded_attention()) return;  // x is a part of sequences whose lengths these are, and the operator checks them
  if (lengths->is_cpu() && !at::isTensorSubclassLike(*lengths)) check_length_values(name, *lengths, low, x.size(1));
}

void check_length_values(const char* name, const at::Tensor& lengths, int64_t low, int64_t high) {
  const auto read = lengths.to(at::kCPU, at::kLong).contiguous();
  const auto* length = read.const_data_ptr<int64_t>();
  for (int64_t b = 0; b < read.numel(); ++b) {
    ATTNPACK_CHECK(length[b] >= low && length[b] <= high, name, "[", b, "] is ", length[b], ", wants ", low, " to ",
                   high, ": the valid tokens of that row");
  }
}

void check_ids(const char* name, const at::Tensor& ids) {
  check_defined(name, ids);
  ATTNPACK_CHECK(ids.scalar_type() == at::kLong || ids.scalar_type() == at::kInt, name, " has dtype ",
                 ids.scalar_type(), ", wants int64 token numbers: call .long() on it, in C++ .to(at::kLong)");
  ATTNPACK_CHECK(ids.dim() == 2, name, ": got shape ", ids.sym_sizes(),
                 ", want token numbers [B, L]; for one sequence ", "pass ", name, ".unsqueeze(0)");
}

void check_vocabulary(const char* name, const at::Tensor& ids, int64_t vocab_size) {
  const auto outside = ids.masked_select((ids < 0).logical_or(ids >= vocab_size));
  ATTNPACK_CHECK(outside.numel() == 0, name, " holds ", outside[0].item<int64_t>(), ", wants 0 to ", vocab_size - 1,
                 ", the tokens of vocab_size ", vocab_size, ": use the tokenizer that belongs to the model");
}

void check_states(const char* name, const at::Tensor& x, int64_t embed_dim) {
  check_defined(name, x);
  ATTNPACK_CHECK(x.is_floating_point(), name, ": got ", x.scalar_type(), " of shape ", x.sym_sizes(),
                 ", want states [batch, length, ", embed_dim, "]; to take token numbers give the stack embed_tokens");
}

void check_output_width(int64_t out_dim, int64_t embed_dim) {
  ATTNPACK_CHECK(out_dim == embed_dim, "attention: gives width ", out_dim, ", want its embed_dim ", embed_dim,
                 "; a block adds it to x, leave head_dim out or take a module with an output projection");
}

void check_part_width(const char* name, int64_t width, int64_t embed_dim) {
  ATTNPACK_CHECK(width == embed_dim, name, ": got width ", width, ", want ", embed_dim,
                 " as attention has; a block's parts add up, make them of one embed_dim");
}

void check_layer_width(int64_t layer, int64_t width, int64_t first) {
  ATTNPACK_CHECK(width == first, "layers[", layer, "]: got width ", width, ", want ", first,
                 " as the first block has; each reads what the one before it gives");
}

void check_embedding_width(int64_t width, int64_t embed_dim, const char* name) {
  ATTNPACK_CHECK(width == embed_dim, name, ": got width ", width, ", want ", embed_dim, " as the blocks have");
}

void check_layers_given(int64_t layers) { ATTNPACK_CHECK(layers > 0, "layers: got none, want at least one block"); }

void check_own_keys(bool own_keys) {
  ATTNPACK_CHECK(own_keys,
                 "kv_from: got none, but this module has no keys of its own (own_keys=False); give it the cache of the "
                 "layer whose keys it reads");
}

void check_chunked_call(bool cross) {
  ATTNPACK_CHECK(!cross, "context: got one, but this module has chunks of its own positions; use one without chunk");
}

void check_kv_source(int64_t layer, int64_t source, bool has_keys) {
  ATTNPACK_CHECK(source >= 0 && source < layer && has_keys, "layers[", layer, "]: got kv_from ", source,
                 ", want the number of an earlier layer with keys of its own");
}

void check_layer_input(bool given, bool wanted) {
  ATTNPACK_CHECK(given == wanted, "layer_input: got ", given ? "one" : "none", ", but this block has ",
                 wanted ? "a tail with an input_dim: give it" : "no tail that reads it: leave it out");
}

void check_norm_kind(const std::string& kind) {
  static const std::set<std::string> known{"rms", "rms_plus_one", "layer", "layer_no_bias"};
  ATTNPACK_CHECK(known.contains(kind), "norm: got '", kind,
                 "', want 'rms', 'rms_plus_one', 'layer' or 'layer_no_bias'");
}

at::Tensor token_positions(const at::Tensor& x, const std::optional<at::Tensor>& positions,
                           const std::optional<at::Tensor>& past) {
  if (positions) {
    check_positions(positions, x.sym_size(0), x.sym_size(1));
    return *positions;
  }
  if (const auto* over = sharded_attention(); over && !past) return over->positions(x.size(1)).to(x.device());
  const auto steps = at::arange(x.size(1), x.options().dtype(at::kLong).requires_grad(false));
  return past ? past->to(steps.device()).unsqueeze(1) + steps : steps;
}

std::optional<at::Tensor> past_lengths(const at::Tensor& lengths, const at::Tensor& x) {
  return x.dim() > 0 && lengths.size(0) == x.size(0) ? std::make_optional(lengths) : std::nullopt;
}

void check_learned_positions(const at::Tensor& positions, int64_t max_positions) {
  if (positions.numel() == 0 || positions.is_meta()) return;
  const auto most = positions.max().item<int64_t>(), least = positions.min().item<int64_t>();
  ATTNPACK_CHECK(least >= 0 && most < max_positions, "positions: got ", least, " to ", most, ", want 0 to ",
                 max_positions - 1, ", the positions that the model has learned; give it a shorter sequence");
}

void check_layout(const std::optional<std::string>& layout, bool pre_norm, bool cross_attention) {
  if (!layout) return;
  static const std::set<std::string> known{"sandwich", "output", "parallel", "parallel_two"};
  ATTNPACK_CHECK(known.contains(*layout), "layout: got '", *layout,
                 "', want 'sandwich', 'output', 'parallel' or 'parallel_two', or none for that of pre_norm");
  ATTNPACK_CHECK(pre_norm, "pre_norm: got false together with layout '", *layout,
                 "', which says where the norms are; leave one of them out");
  ATTNPACK_CHECK(!cross_attention, "layout: got '", *layout,
                 "' for a block with cross-attention, want none; pre_norm says where its norms are");
}

void check_activation(const std::string& activation) {
  static const std::set<std::string> known{"swiglu", "geglu",     "geglu_tanh", "clamped_swiglu",
                                           "gelu",   "gelu_tanh", "relu",       "relu2"};
  ATTNPACK_CHECK(known.contains(activation), "activation: got '", activation,
                 "', want 'swiglu', 'geglu', 'geglu_tanh' or 'clamped_swiglu' (with a gate), 'gelu', 'gelu_tanh', "
                 "'relu' or 'relu2'");
}

void check_cross_attention(bool has_cross_attention, bool context) {
  ATTNPACK_CHECK(has_cross_attention == context, "context: ",
                 has_cross_attention ? "got none, but this block has cross-attention; give what it reads, or a filled "
                                       "cross_cache"
                                     : "got a tensor, but this block has no cross-attention; give it cross_attention");
}

void check_cross_cache(bool is_cross_cache, bool given, bool has_cross_attention) {
  ATTNPACK_CHECK(!given || (is_cross_cache && has_cross_attention), "cross_cache: got ",
                 is_cross_cache ? "a CrossCache, but this block has no cross-attention; leave it out"
                                : "a cache that appends, want a CrossCache: cross-attention reads a context");
}

void check_self_cache(bool is_cross_cache) {
  ATTNPACK_CHECK(!is_cross_cache, "cache: got a CrossCache, want the cache of self-attention; give it as cross_cache");
}

void check_cross_distances(bool counts_distances, bool cache) {
  ATTNPACK_CHECK(!counts_distances || !cache,
                 "cache: got one for a block whose cross-attention has a window or ALiBi, which count from a token's "
                 "place in the whole target; leave the cache out, or make cross-attention without them");
}

void check_projected_cache(bool is_cross_cache) {
  ATTNPACK_CHECK(!is_cross_cache,
                 "cache: got a CrossCache, but ProjectedAttention is given its keys; keep k and v yourself");
}

void check_cache_layers(int64_t cached, int64_t layers) {
  ATTNPACK_CHECK(cached == layers, "cache: got one of ", cached, " layers, want ", layers, " as the model has");
}

}  // namespace attnpack
