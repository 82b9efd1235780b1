#pragma once

#include <attnpack/cache/cross_cache.h>
#include <attnpack/core/check.h>
#include <attnpack/layers/query_factors.h>
#include <attnpack/layers/sharded_attention.h>
#include <attnpack/modules/attention_module.h>
#include <attnpack/modules/detail/checks.h>
#include <attnpack/modules/linear.h>
#include <attnpack/modules/norm.h>
#include <attnpack/modules/rotary_embedding.h>

#include <array>
#include <concepts>
#include <string>
#include <utility>

namespace attnpack {

// [B, L, H * D] -> [B, H, L, D], a view
inline at::Tensor split_heads(const at::Tensor& x, int64_t num_heads, int64_t head_dim) {
  if (x.dim() != 3 || x.is_nested()) return x.unflatten(-1, {num_heads, head_dim}).transpose(1, 2);
  return x.view_symint({x.sym_size(0), x.sym_size(1), num_heads, head_dim}).transpose(1, 2);
}

// The cache of forward's inputs if it holds a context.
inline std::shared_ptr<CrossCache> cross_cache(const AttentionInputs& inputs) {
  return std::dynamic_pointer_cast<CrossCache>(inputs.cache());
}

// Raises for inputs that only some modules take: names of keys, and the keys of another layer in a call without a
// cache.
inline void check_no_named_keys(const AttentionInputs& inputs) {
  check_no_key_index(inputs.key_index().has_value());
  check_no_key_block(inputs.key_block());
  ATTNPACK_CHECK(!inputs.kv, "kv_from: got the keys of another layer, which this module does not take");
}

// The layer's inputs that come from forward's inputs.
inline LayerInputs layer_inputs(const AttentionInputs& inputs, bool causal, bool named_keys = false) {
  check_no_index_cache(inputs.index_cache() != nullptr);
  check_no_cu_seqlens(inputs.cu_seqlens().has_value());
  if (!named_keys) check_no_named_keys(inputs);
  LayerInputs r;
  if (inputs.cache() && sharded_attention()) refuse_single_process_inputs({.cache = true});
  const auto cross = cross_cache(inputs);
  r.positions = inputs.positions();
  r.cross = inputs.context().has_value() || cross;
  r.mask = inputs.mask();
  r.causal = inputs.causal().value_or(causal && !r.cross);
  r.kv_lens = inputs.kv_lens();
  if (cross && cross->filled() && !r.kv_lens) r.kv_lens = cross->lengths();
  return r;
}

// The keys and values that kv_from holds for x, as AttendOptions::cache.
inline CacheTensors keys_of_kv_from(const AttentionInputs& inputs, const at::Tensor& x, int64_t num_kv_heads,
                                    int64_t head_dim, int64_t v_head_dim) {
  check_kv_from(inputs.context() || inputs.value_context(), inputs.cache() != nullptr);
  return shared_keys(*inputs.kv_from(), x, inputs.kv_lens(), num_kv_heads, head_dim, v_head_dim);
}

// Queries through a latent, as in latent attention: q_b(norm(q_a(x))).
inline at::Tensor low_rank(Linear& q_a, RMSNorm& norm, Linear& q_b, const at::Tensor& x) {
  const auto low = q_a(x);
  return q_b(norm ? norm(low) : low);
}

// The outputs of the heads times their gate, if there is one.
inline at::Tensor gated(const at::Tensor& joined, const at::Tensor& x, Linear& gate_proj, int64_t num_heads,
                        const std::string& activation) {
  return gate_proj ? gate_heads(joined, gate_proj(x), num_heads, activation) : joined;
}

// Runs call on options that hold the tensors that reserve(cache) gives, with room for new_len positions. Where call
// raises, the cache is as it was before.
template <typename Options, typename Reserve, typename Call>
auto with_room(const std::shared_ptr<KVCache>& cache, int64_t new_len, Options options, const Reserve& reserve,
               const Call& call) {
  if (!cache) return call(options);
  return rollback_on_error(std::array{cache}, [&] {
    options.cache = reserve(*cache);
    auto result = call(options);
    cache->commit(new_len, options.kv_lens);
    return result;
  });
}

// The same with room for key and value. An empty CrossCache stores them.
template <typename Call>
auto with_cache(const std::shared_ptr<KVCache>& cache, const at::Tensor& key, const at::Tensor& value,
                AttendOptions options, const Call& call) {
  if (const auto cross = std::dynamic_pointer_cast<CrossCache>(cache)) {
    return rollback_on_error(std::array{cross}, [&] {
      if (!cross->filled()) cross->store(key, value, options.kv_lens);
      return call(options);
    });
  }
  const auto kv_lens = options.kv_lens;
  return with_room(
      cache, key.size(2), std::move(options), [&](KVCache& into) { return into.reserve_valid(key, value, kv_lens); },
      call);
}

// The positions of x's tokens after those of the cache.
inline at::Tensor counted_positions(const at::Tensor& x, const AttentionInputs& inputs) {
  const auto& source = inputs.kv_from() ? inputs.kv_from() : inputs.cache();
  auto past = source && !cross_cache(inputs) ? past_lengths(source->lengths(), x) : std::nullopt;
  if (past && inputs.kv_from())  // it holds these tokens already
    past = inputs.kv_lens() ? *past - *inputs.kv_lens() : *past - at::Scalar(x.size(1));
  return token_positions(x, std::nullopt, past);
}

// The positions of x's tokens for RoPE.
inline at::Tensor query_positions(const at::Tensor& x, const AttentionInputs& inputs) {
  return inputs.positions() ? token_positions(x, inputs.positions(), std::nullopt) : counted_positions(x, inputs);
}

// Raises for a rope of more dims than `most`, which the words show.
inline void check_rope_dim(const RotaryEmbedding& rope, int64_t most, const std::string& words) {
  ATTNPACK_CHECK(rope->options.dim() <= most, "rope: got dim ", rope->options.dim(), ", want at most ", words);
}

// The rules that are options of a module by the same name.
template <typename Options>
ScoreRules rules_from_options(const Options& o) {
  ScoreRules rules;
#define ATTNPACK_RULE_OF_OPTION(type, name, value, text)     \
  if constexpr (requires {                                   \
                  { o.name() } -> std::convertible_to<type>; \
                })                                           \
    rules.name = o.name();
  ATTNPACK_SCORE_RULES(ATTNPACK_RULE_OF_OPTION)
#undef ATTNPACK_RULE_OF_OPTION
  if constexpr (requires { o.window(); }) rules.window = o.window().value_or(kNoWindow);
  return rules;
}

// The settings of a call that follow from options of a module.
template <typename Options>
AttendOptions attend_options(const Options& o, const AttentionInputs& inputs, bool is_training,
                             const RotaryEmbedding& rope, bool named_keys = false) {
  AttendOptions r{layer_inputs(inputs, o.causal(), named_keys)};
  auto rules = rules_from_options(o);
  rules.causal = r.causal;  // of this call
  static_cast<ScoreRules&>(r) = std::move(rules);
  if (r.chunk) check_chunked_call(r.cross);
  r.dropout_p = is_training ? o.dropout() : 0.0;
  if (rope) r.rope = rope->settings;
  return r;
}

// The settings of a call of x, with the factors of its queries where the module has a query_scale.
template <typename Options, typename Settings>
Settings with_query_scale(const Options& o, const at::Tensor& x, const AttentionInputs& inputs, Settings settings) {
  if constexpr (requires { o.query_scale(); }) {
    if (o.query_scale()) {
      settings.query_scale =
          query_factors(counted_positions(x, inputs), inputs.positions(), x.sym_size(0), *o.query_scale());
    }
  }
  return settings;
}

// A call of a module over its own keys or those of kv_from. The module's private queries(), heads(), settings(),
// shared_settings() and output() are its steps.
struct AttentionSteps {
  template <typename Module>
  static at::Tensor forward(Module& m, const at::Tensor& x, const AttentionInputs& inputs) {
    if (inputs.kv_from()) {
      const auto settings = with_query_scale(m.options, x, inputs, m.shared_settings(x, inputs));
      return m.output(attend_shared(m.queries(x, inputs), settings), x);
    }
    auto [q, k, v] = m.heads(x, inputs);
    return with_cache(inputs.cache(), k, v, with_query_scale(m.options, x, inputs, m.settings(inputs)),
                      [&, &q = q, &k = k, &v = v](const AttendOptions& o) { return m.output(attend(q, k, v, o), x); });
  }

  template <typename Module>
  static std::tuple<at::Tensor, at::Tensor> forward_with_weights(Module& m, const at::Tensor& x,
                                                                 const AttentionInputs& inputs) {
    if (inputs.kv_from()) {
      const auto settings = with_query_scale(m.options, x, inputs, m.shared_settings(x, inputs));
      const auto [out, weights] = attend_shared_with_weights(m.queries(x, inputs), settings);
      return {m.output(out, x), weights};
    }
    auto [q, k, v] = m.heads(x, inputs);
    return with_cache(inputs.cache(), k, v, with_query_scale(m.options, x, inputs, m.settings(inputs)),
                      [&, &q = q, &k = k, &v = v](const AttendOptions& o) -> std::tuple<at::Tensor, at::Tensor> {
                        auto [out, weights] = attend_with_weights(q, k, v, o);
                        return {m.output(out, x), weights};
                      });
  }

  template <typename Module>
  static std::tuple<at::Tensor, at::Tensor, at::Tensor> project(Module& m, const at::Tensor& x,
                                                                const AttentionInputs& inputs) {
    auto [q, k, v] = m.heads(x, inputs);
    auto [rotated_q, rotated_k] = rotate(q, k, m.settings(inputs));
    return {rotated_q, rotated_k, v};
  }
};

}  // namespace attnpack
