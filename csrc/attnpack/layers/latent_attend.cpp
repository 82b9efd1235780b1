#include <attnpack/layers/latent_attend.h>

#include <ATen/ATen.h>
#include <ATen/TensorSubclassLikeUtils.h>
#include <torch/library.h>

#include <attnpack/core/extremes.h>
#include <attnpack/core/padded.h>
#include <attnpack/layers/detail/latent_algebra.h>
#include <attnpack/layers/detail/mask_columns.h>
#include <attnpack/layers/detail/place_tokens.h>
#include <attnpack/layers/sharded_attention.h>
#include <attnpack/ops/detail/latent_rows.h>
#include <attnpack/ops/detail/schema.h>
#include <attnpack/ops/detail/unknown_sizes.h>
#include <attnpack/ops/linear.h>
#include <attnpack/ops/query_scale.h>

namespace attnpack {
namespace {

using c10::SymInt;

// Values of no width. The op that appends takes keys and values; latents are both, and are stored once.
Tensor without_width(const Tensor& x) {
  return at::empty_symint({x.sym_size(0), x.sym_size(1), x.sym_size(2), 0}, x.options());
}

// Stands for keys or values of that width in checks. Nothing is computed or read.
Tensor as_wide(const Tensor& latents, const SymInt& width) {
  auto shape = latents.sym_sizes().vec();
  shape.back() = width;
  return latents.narrow_symint(3, 0, 1).expand_symint(shape);
}

void check_latents(const Tensor& query, const Tensor& latent, const Tensor& k_rope) {
  check_defined("query", query);
  check_defined("latent", latent);
  check_defined("k_rope", k_rope);
  ATTNPACK_CHECK(query.dim() == 4, "query has shape ", query.sym_sizes(),
                 ", wants [batch, num_heads, length, head_dim]");
  ATTNPACK_CHECK(latent.dim() == 3 && latent.sym_size(2) > 0, "latent has shape ", latent.sym_sizes(),
                 ", wants [batch, length, kv_lora_rank]");
  ATTNPACK_CHECK(k_rope.dim() == 3 && k_rope.sym_size(0) == latent.sym_size(0) &&
                     k_rope.sym_size(1) == latent.sym_size(1) && k_rope.sym_size(2) <= query.sym_size(3),
                 "k_rope has shape ", k_rope.sym_sizes(), ", wants [batch, length, qk_rope_head_dim] beside latent ",
                 latent.sym_sizes(), " and query ", query.sym_sizes());
}

// Checks the arguments that turn latents into heads: kv_b, v_dim and path.
void check_up_projection(const Tensor& query, const Tensor& latent, const Tensor& k_rope,
                         const std::optional<Tensor>& kv_b, const SymInt& v_dim, c10::string_view path) {
  check_latents(query, latent, k_rope);
  ATTNPACK_CHECK(path == "auto" || path == "expanded" || path == "absorbed", "path: got '", path,
                 "', want 'auto', 'expanded' or 'absorbed'");
  const SymInt width = query.sym_size(3), rotated = k_rope.sym_size(2), latent_dim = latent.sym_size(2);
  if (!kv_b) {
    ATTNPACK_CHECK(width == latent_dim + rotated, "query has head_dim ", width, " without kv_b, wants ", latent_dim,
                   " + ", rotated, ", the width of latent and k_rope");
    return;
  }
  check_defined("kv_b", *kv_b);
  const SymInt rows = query.sym_size(1) * (width - rotated + v_dim);
  ATTNPACK_CHECK(v_dim >= 0 && kv_b->dim() == 2 && kv_b->sym_size(0) == rows && kv_b->sym_size(1) == latent_dim,
                 "kv_b has shape ", kv_b->sym_sizes(), " for v_dim ", v_dim,
                 ", wants [num_heads * (qk_nope_head_dim + v_head_dim), kv_lora_rank] = [", rows, ", ", latent_dim,
                 "]");
}

// Queries and unrotated latents of the new tokens. The operator takes the latents as keys, and values of no width.
NewTokens new_tokens(const Tensor& query, const Tensor& latent, const Tensor& k_rope) {
  check_latents(query, latent, k_rope);
  // Autocast may have made the norm's output wider than the projections'.
  const Tensor key =
      at::cat({latent.unsqueeze(1).to(query.scalar_type()), k_rope.unsqueeze(1).to(query.scalar_type())}, -1);
  return {query, key, without_width(key), k_rope.sym_size(2)};
}

std::optional<CacheTensors> cache_tensors(const LatentCacheArguments& cache) {
  if (!cache.latents) return std::nullopt;
  ATTNPACK_CHECK(cache.lengths, "cache has no lengths: pass both of its tensors");
  return CacheTensors{*cache.latents, without_width(*cache.latents), *cache.lengths};
}

struct PlacedLatents : PlacedTokens {
  SymInt latent_dim, rotated_dim;

  Tensor latent() const { return key.narrow_symint(3, 0, latent_dim); }  // [B, 1, K, C]
  Tensor nope() const { return query.narrow_symint(3, 0, query.sym_size(3) - rotated_dim); }
  Tensor rotated() const { return query.narrow_symint(3, query.sym_size(3) - rotated_dim, rotated_dim); }
};

// place_tokens for a cache whose latents are bytes (ops/detail/latent_rows.h). It expands the latents that attention
// reads. New latents are read as they are stored; gradients flow through them as if they were exact.
PlacedTokens place_rows(const NewTokens& tokens, const CacheTensors& cache, const SymInt& latent_dim,
                        const LayerArguments& layer,
                        c10::function_ref<void(const Tensor&, const Tensor&, const std::optional<Tensor>&)> check) {
  ATTNPACK_CHECK(!layer.cross, "cache is given together with a context: a cache holds the keys of self-attention");
  auto rope = rope_settings(layer.rope);
  if (*tokens.rotated_dims == 0) rope.reset();
  ATTNPACK_CHECK(!rope || !rope->raw_keys,
                 "cache: got a QuantizedCache for RoPE that rotates all stored keys at each call, want one that stores "
                 "them as they are; use a LatentCache");
  const Tensor past = copy_lengths(cache.lengths);
  const auto [q, k] = rotate_tokens(tokens, rope, {layer.positions, false, past, layer.kv_lens});
  const Tensor rows = latent_rows(k.detach(), latent_dim), no_values = without_width(rows);

  // Nothing is written before everything is checked.
  check_kv_cache_append(cache.key, cache.value, cache.lengths, rows, no_values, layer.kv_lens);
  SymInt readable = cache.key.sym_size(2);
  std::optional<SymInt> limit;
  const auto& mask = layer.mask;
  const bool covers = covers_positions(mask);
  if (covers && mask->sym_size(-1) < readable) readable = *(limit = mask->sym_size(-1));
  const auto keys_like = at::empty_symint({1}, k.options().requires_grad(false))
                             .expand_symint({cache.key.sym_size(0), 1, readable, SymInt(1)});
  check(keys_like, keys_like, std::nullopt);

  kv_cache_append_(cache.key, cache.value, cache.lengths, rows, no_values, layer.kv_lens, limit);
  const Tensor lengths = copy_lengths(cache.lengths);
  // The free capacity is not expanded where the lengths can be looked at.
  if (!covers && lengths.is_cpu() && !at::isTensorSubclassLike(lengths) && lengths.numel() > 0)
    readable = lengths.max().item<int64_t>();
  const auto expand = [&, &k = k](const Tensor& r) { return latents_of_rows(r, latent_dim, k.scalar_type()); };
  Tensor key = expand(cache.key.narrow_symint(2, 0, readable));
  if (at::GradMode::is_enabled() && k.requires_grad())
    key = with_new_rows(key, as_if_exact(k, expand(rows)), past, layer.kv_lens);
  return {q, key, without_width(key), past, lengths, true};
}

PlacedLatents place_latents(const Tensor& query, const Tensor& latent, const Tensor& k_rope,
                            const LatentCacheArguments& cache, const LayerArguments& layer, const ScoreRules& rules,
                            const std::optional<Tensor>& key_index = std::nullopt) {
  ATTNPACK_CHECK(!rules.head_map, "head_map is given, latent attention wants none: all heads read the same latents");
  AttentionArguments args = attention_arguments(layer, rules, {key_index});
  const auto check = [&](const Tensor& keys, const Tensor&, const std::optional<Tensor>& kv_lens) {
    args.kv_lens = kv_lens;
    const Tensor like = as_wide(keys, query.sym_size(3));
    check_attention(query, like, like, args);
  };
  const NewTokens tokens = new_tokens(query, latent, k_rope);
  const auto tensors = cache_tensors(cache);
  const SymInt latent_dim = latent.sym_size(2);
  const bool rows = tensors && tensors->key.scalar_type() == at::kByte;
  return {rows ? place_rows(tokens, *tensors, latent_dim, layer, check) : place_tokens(tokens, tensors, layer, check),
          latent_dim, k_rope.sym_size(2)};
}

// Query, key and value as the operator takes them. Absorbed outputs are still latents.
struct Heads {
  Tensor query, key, value;
  bool absorbed;
};

// Zeros the latents beyond kv_lens. A zero gradient would otherwise multiply them, and 0 * NaN is not zero.
Tensor only_valid(const Tensor& latent, const std::optional<Tensor>& kv_lens) {  // [B, K, C]
  const Tensor slots = at::arange(latent.sym_size(1), kv_lens->options().dtype(at::kLong));
  const Tensor beyond = slots.ge(kv_lens->unsqueeze(1));  // [B, K]
  return latent.masked_fill(beyond.unsqueeze(-1), 0);
}

Heads make_heads(const PlacedLatents& tokens, const std::optional<Tensor>& kv_b, const SymInt& v_dim,
                 c10::string_view path) {
  if (!kv_b) return {tokens.query, tokens.key, tokens.latent(), true};
  const SymInt heads = tokens.query.sym_size(1), nope = tokens.query.sym_size(3) - tokens.rotated_dim;
  if (path == "absorbed" || (path == "auto" && absorbed_is_cheaper(tokens.query.sym_size(2), tokens.key.sym_size(2),
                                                                   nope, v_dim, tokens.latent_dim))) {
    const Tensor folded = fold_query(tokens.nope(), *kv_b);
    const Tensor query = tokens.rotated_dim == 0 ? folded : at::cat({folded, tokens.rotated()}, -1);
    return {query, tokens.key, tokens.latent(), true};
  }
  Tensor latent = tokens.latent().squeeze(1);
  if (tokens.kv_lens && at::GradMode::is_enabled() && kv_b->requires_grad())
    latent = only_valid(latent, tokens.kv_lens);
  const auto [key, value] =
      expand_latents(tokens.key, attnpack::linear(latent, *kv_b, std::nullopt), tokens.latent_dim, heads, v_dim);
  return {tokens.query, key, value, false};
}

// The default scale is that of the query's dims before folding makes the query wider. Without dims the scores are 0.
AttentionArguments operator_arguments(const Tensor& query, const PlacedLatents& tokens, const LayerArguments& layer,
                                      const ScoreRules& rules, const std::optional<Tensor>& key_index) {
  AttentionArguments args = attention_arguments(layer, rules, {key_index});
  args.q_offsets = tokens.q_offsets;
  args.kv_lens = tokens.kv_lens;
  if (args.scale) return args;
  args.scale = default_scale(query.sym_size(3).expect_int());
  return args;
}

Tensor attend_heads(const Heads& heads, AttentionArguments args, double dropout_p, const std::optional<Tensor>& kv_b,
                    const SymInt& v_dim) {
  args.dropout_p = dropout_p;
  args.dropout_seed = dropout_seed(dropout_p, heads.query.device());
  Tensor out = std::get<0>(attention_op(heads.query, heads.key, heads.value, args));
  if (kv_b && heads.absorbed) out = unfold_output(out, *kv_b, v_dim);
  return out.transpose(1, 2).flatten(2);
}

Tensor latent_attend_composite(const Tensor& query, const Tensor& latent, const Tensor& k_rope,
                               const std::optional<Tensor>& kv_b, SymInt v_dim, c10::string_view path,
                               const LatentCacheArguments& cache, const LayerArguments& layer,
                               const std::optional<Tensor>& key_index, const ScoreRules& rules) {
  check_up_projection(query, latent, k_rope, kv_b, v_dim, path);
  const PlacedLatents tokens = place_latents(query, latent, k_rope, cache, layer, rules, key_index);
  const Heads heads = make_heads(tokens, kv_b, v_dim, path);
  return attend_heads(heads, operator_arguments(query, tokens, layer, rules, key_index), rules.dropout_p, kv_b, v_dim);
}

std::tuple<Tensor, Tensor> latent_attend_with_weights_composite(
    const Tensor& query, const Tensor& latent, const Tensor& k_rope, const std::optional<Tensor>& kv_b, SymInt v_dim,
    c10::string_view path, const LatentCacheArguments& cache, const LayerArguments& layer,
    const std::optional<Tensor>& key_index, const ScoreRules& rules, bool at_names) {
  check_up_projection(query, latent, k_rope, kv_b, v_dim, path);
  check_at_names(at_names, key_index);
  PlacedLatents tokens = place_latents(query, latent, k_rope, cache, layer, rules, key_index);
  trim_to_longest(tokens, layer.mask);
  const Heads heads = make_heads(tokens, kv_b, v_dim, path);
  const AttentionArguments args = operator_arguments(query, tokens, layer, rules, key_index);
  return {attend_heads(heads, args, rules.dropout_p, kv_b, v_dim),
          probabilities(heads.query, heads.key, args, at_names)};
}

// The two halves of the expanded path. Between them a kv_b_proj that is no plain linear layer computes kv from the
// latents.
std::tuple<Tensor, Tensor, Tensor, Tensor> latent_append_composite(const Tensor& query, const Tensor& latent,
                                                                   const Tensor& k_rope,
                                                                   const LatentCacheArguments& cache,
                                                                   const LayerArguments& layer,
                                                                   const ScoreRules& rules) {
  const PlacedLatents tokens = place_latents(query, latent, k_rope, cache, layer, rules);
  const auto options = at::TensorOptions(at::kLong).device(query.device());
  const SymInt batch = query.sym_size(0);
  const Tensor past = tokens.q_offsets ? *tokens.q_offsets : at::zeros_symint({batch}, options);
  const Tensor all = at::ones_symint({tokens.key.sym_size(2)}, options).sum().expand_symint({batch});
  const Tensor lens = tokens.kv_lens ? tokens.kv_lens->to(at::kLong) : all;
  return {tokens.query.clone(), tokens.key.clone(), past, lens.clone()};
}

std::tuple<Tensor, Tensor> latent_expand_composite(const Tensor& latents, const Tensor& kv, SymInt latent_dim,
                                                   SymInt num_heads, SymInt v_dim) {
  ATTNPACK_CHECK(num_heads >= 1, "num_heads is ", num_heads, ", wants at least 1");
  ATTNPACK_CHECK(v_dim >= 0, "v_dim is ", v_dim, ", wants 0 or more");
  ATTNPACK_CHECK(latents.dim() == 4 && is_one(latents.sym_size(1)), "latents has shape ", latents.sym_sizes(),
                 ", wants [batch, 1, length, kv_lora_rank + qk_rope_head_dim]");
  ATTNPACK_CHECK(latent_dim >= 0 && latent_dim <= latents.sym_size(3), "latent_dim is ", latent_dim, ", wants 0 to ",
                 latents.sym_size(3), ", the width of latents");
  const bool fits = kv.dim() == 3 && kv.sym_size(0) == latents.sym_size(0) && kv.sym_size(1) == latents.sym_size(2);
  ATTNPACK_CHECK(fits && kv.sym_size(2) % num_heads == 0 && kv.sym_size(2) >= num_heads * v_dim, "kv has shape ",
                 kv.sym_sizes(), ", wants [", latents.sym_size(0), ", ", latents.sym_size(2), ", ", num_heads,
                 " * (qk_nope_head_dim + v_dim)] with v_dim = ", v_dim);
  ATTNPACK_CHECK(kv.device() == latents.device(), "kv is on ", kv.device(), ", latents on ", latents.device(),
                 ": move one of them with .to()");
  return expand_latents(latents, kv, latent_dim, num_heads, v_dim);
}

std::tuple<Tensor, Tensor> rotate_latents(const Tensor& query, const Tensor& latent, const Tensor& k_rope,
                                          const std::optional<RopeSettings>& rope, const Placement& place) {
  const NewTokens tokens = new_tokens(query, latent, k_rope);
  return rotate_tokens(tokens, is_below_one(k_rope.sym_size(2)) ? std::nullopt : rope, place);
}

// With key_positions, keys come from another sequence.
std::tuple<Tensor, Tensor> latent_rotate_composite(const Tensor& query, const Tensor& latent, const Tensor& k_rope,
                                                   const RopeArguments& rope, const std::optional<Tensor>& positions,
                                                   const std::optional<Tensor>& key_positions) {
  return rotate_latents(query, latent, k_rope, rope_settings(rope),
                        {.positions = positions, .cross = key_positions.has_value(), .keys_at = key_positions});
}

Heads heads_of(const Tensor& query, const Tensor& latents, const SymInt& rotated_dim, const std::optional<Tensor>& kv_b,
               const SymInt& v_dim, c10::string_view path, const std::optional<Tensor>& kv_lens) {
  const PlacedLatents tokens{
      {query, latents, without_width(latents), std::nullopt, kv_lens}, latents.sym_size(3) - rotated_dim, rotated_dim};
  return make_heads(tokens, kv_b, v_dim, path == "auto" ? "expanded" : path);
}

std::tuple<Tensor, Tensor, Tensor> latent_heads_composite(const Tensor& query, const Tensor& latents,
                                                          SymInt rotated_dim, const std::optional<Tensor>& kv_b,
                                                          SymInt v_dim, c10::string_view path,
                                                          const std::optional<Tensor>& kv_lens) {
  ATTNPACK_CHECK(latents.dim() == 4 && is_one(latents.sym_size(1)), "latents has shape ", latents.sym_sizes(),
                 ", wants [batch, 1, length, kv_lora_rank + qk_rope_head_dim]");
  ATTNPACK_CHECK(rotated_dim >= 0 && rotated_dim < latents.sym_size(3), "rotated_dim is ", rotated_dim, ", wants 0 to ",
                 latents.sym_size(3), ", the width of latents, without the end");
  const Tensor parts = latents.squeeze(1);
  check_up_projection(query, parts.narrow_symint(2, 0, latents.sym_size(3) - rotated_dim),
                      parts.narrow_symint(2, latents.sym_size(3) - rotated_dim, rotated_dim), kv_b, v_dim, path);
  if (kv_lens) check_new_lens(*kv_lens, latents.sym_size(0));
  const Heads heads = heads_of(query, latents, rotated_dim, kv_b, v_dim, path, kv_lens);
  return {heads.query, heads.key, heads.value};
}

LatentCacheArguments latent_cache_arguments(const std::optional<CacheTensors>& cache) {
  if (!cache) return {};
  return {cache->key, cache->lengths};
}

}  // namespace

Tensor latent_attend(const Tensor& unscaled, const Tensor& latent, const Tensor& k_rope,
                     const std::optional<Tensor>& kv_b, int64_t v_dim, const std::string& path,
                     const LatentAttendOptions& options) {
  const Tensor query = scale_queries(unscaled, options.query_scale);
  if (const auto* over = sharded_attention()) {
    check_up_projection(query, latent, k_rope, kv_b, v_dim, path);
    refuse_named_keys(options.key_index, /*key_block=*/1);
    return over->latent_attend(query, latent, k_rope, kv_b, v_dim, options);
  }
  static const DispatchedOp<decltype(latent_attend_composite)> op("attnpack::latent_attend");
  return op(query, latent, k_rope, kv_b, v_dim, path, latent_cache_arguments(options.cache), layer_arguments(options),
            options.key_index, options);
}

std::tuple<Tensor, Tensor> latent_attend_with_weights(const Tensor& query, const Tensor& latent, const Tensor& k_rope,
                                                      const std::optional<Tensor>& kv_b, int64_t v_dim,
                                                      const std::string& path, const LatentAttendOptions& options,
                                                      bool at_names) {
  refuse_context_parallel("weights are asked for", "ask one process for them");
  static const DispatchedOp<decltype(latent_attend_with_weights_composite)> op("attnpack::latent_attend_with_weights");
  return op(scale_queries(query, options.query_scale), latent, k_rope, kv_b, v_dim, path,
            latent_cache_arguments(options.cache), layer_arguments(options), options.key_index, options, at_names);
}

std::tuple<Tensor, Tensor, Tensor> latent_project(const Tensor& query, const Tensor& latent, const Tensor& k_rope,
                                                  const std::optional<Tensor>& kv_b, int64_t v_dim,
                                                  const std::string& path, const LatentAttendOptions& options) {
  check_up_projection(query, latent, k_rope, kv_b, v_dim, path);
  const auto [q, latents] = latent_rotate(query, latent, k_rope, options);
  return latent_heads(q, latents, k_rope.size(2), kv_b, v_dim, path);
}

std::tuple<Tensor, Tensor> latent_rotate(const Tensor& query, const Tensor& latent, const Tensor& k_rope,
                                         const LatentAttendOptions& options) {
  return rotate_latents(query, latent, k_rope, options.rope,
                        {options.positions, options.cross, std::nullopt, options.kv_lens});
}

std::tuple<Tensor, Tensor, Tensor> latent_heads(const Tensor& query, const Tensor& latents, int64_t rotated_dim,
                                                const std::optional<Tensor>& kv_b, int64_t v_dim,
                                                const std::string& path, const std::optional<Tensor>& kv_lens) {
  const Heads heads = heads_of(query, latents, rotated_dim, kv_b, v_dim, path, kv_lens);
  return {heads.query, heads.key, heads.value};
}

}  // namespace attnpack

#define ATTNPACK_LATENT_SCHEMA ATTNPACK_LATENT_CACHE_SCHEMA ", " ATTNPACK_LAYER_SCHEMA

TORCH_LIBRARY_FRAGMENT(attnpack, m) {
  m.def(
      "latent_attend(Tensor query, Tensor latent, Tensor k_rope, Tensor? kv_b, SymInt v_dim, str "
      "path, " ATTNPACK_LATENT_SCHEMA ", Tensor? key_index=None" ATTNPACK_RULES_SCHEMA ") -> Tensor",
      attnpack::from_schema<attnpack::latent_attend_composite>);
  m.def(
      "latent_attend_with_weights(Tensor query, Tensor latent, Tensor k_rope, Tensor? kv_b, SymInt v_dim, str "
      "path, " ATTNPACK_LATENT_SCHEMA ", Tensor? key_index=None" ATTNPACK_RULES_SCHEMA
      ", bool at_names=False) -> (Tensor, Tensor)",
      attnpack::from_schema<attnpack::latent_attend_with_weights_composite>);
  m.def("latent_append(Tensor query, Tensor latent, Tensor k_rope, " ATTNPACK_LATENT_SCHEMA ATTNPACK_RULES_SCHEMA
        ") -> (Tensor, Tensor, Tensor, Tensor)",
        attnpack::from_schema<attnpack::latent_append_composite>);
  m.def(
      "latent_expand(Tensor latents, Tensor kv, SymInt latent_dim, SymInt num_heads, SymInt v_dim) -> (Tensor, Tensor)",
      &attnpack::latent_expand_composite);
  // The steps of latent_attend, for processes that share a sequence.
  m.def("latent_rotate(Tensor(a) query, Tensor latent, Tensor k_rope, " ATTNPACK_ROPE_SCHEMA
        ", Tensor? positions=None, Tensor? key_positions=None) -> (Tensor(a), Tensor)",
        attnpack::from_schema<attnpack::latent_rotate_composite>);
  m.def(
      "latent_heads(Tensor(a) query, Tensor(b) latents, SymInt rotated_dim, Tensor? kv_b, SymInt v_dim, str path, "
      "Tensor? kv_lens=None) -> (Tensor(a), Tensor(b), Tensor(b))",
      attnpack::from_schema<attnpack::latent_heads_composite>);
}

namespace attnpack {
namespace {

void register_latent_composites(torch::Library& m) {
  m.impl("latent_attend", from_schema<latent_attend_composite>);
  m.impl("latent_attend_with_weights", from_schema<latent_attend_with_weights_composite>);
  m.impl("latent_append", from_schema<latent_append_composite>);
}

}  // namespace
}  // namespace attnpack

// The schema says that the cache's tensors are written, and vmap has no rule for such ops. But without a cache nothing
// is written. For lazy tensors torch has a fallback, which breaks ops that write (ops/lazy).
TORCH_LIBRARY_IMPL(attnpack, FuncTorchBatchedDecomposition, m) { attnpack::register_latent_composites(m); }
TORCH_LIBRARY_IMPL(attnpack, Negative, m) { attnpack::register_latent_composites(m); }
TORCH_LIBRARY_IMPL(attnpack, Conjugate, m) { attnpack::register_latent_composites(m); }
