#pragma once

#include <attnpack/cache/cross_cache.h>
#include <attnpack/modules/attention_module.h>

#include <array>

namespace attnpack {

// [B, L, H * D] -> [B, H, L, D], a view
inline at::Tensor split_heads(const at::Tensor& x, int64_t num_heads, int64_t head_dim) {
  return x.unflatten(-1, {num_heads, head_dim}).transpose(1, 2);
}

// The cache of forward's inputs if it holds a context.
inline std::shared_ptr<CrossCache> cross_cache(const AttentionInputs& inputs) {
  return std::dynamic_pointer_cast<CrossCache>(inputs.cache());
}

// The layer's inputs that come from forward's inputs.
inline LayerInputs layer_inputs(const AttentionInputs& inputs, bool causal) {
  LayerInputs r;
  const auto held = cross_cache(inputs);
  r.positions = inputs.positions();
  r.cross = inputs.context().has_value() || held;
  r.mask = inputs.mask();
  r.causal = inputs.causal().value_or(causal && !r.cross);
  r.kv_lens = inputs.kv_lens();
  if (held && held->filled() && !r.kv_lens) r.kv_lens = held->lengths();
  return r;
}

// Runs call on options that hold the tensors that reserve(cache) gives, with room for new_len positions. Where call
// raises, the cache is as it was before.
template <typename Options, typename Reserve, typename Call>
auto with_room(const std::shared_ptr<KVCache>& cache, int64_t new_len, Options options, const Reserve& reserve,
               const Call& call) {
  if (!cache) return call(options);
  return all_or_none(std::array{cache}, [&] {
    options.cache = reserve(*cache);
    auto result = call(options);
    cache->commit(new_len, options.kv_lens);
    return result;
  });
}

// The same with room for key and value. An empty CrossCache stores them.
template <typename Call>
auto with_cache(const std::shared_ptr<KVCache>& cache, const at::Tensor& key, const at::Tensor& value,
                const AttendOptions& options, const Call& call) {
  if (const auto held = std::dynamic_pointer_cast<CrossCache>(cache)) {
    return all_or_none(std::array{held}, [&] {
      if (!held->filled()) held->store(key, value, options.kv_lens);
      return call(options);
    });
  }
  return with_room(
      cache, key.size(2), options, [&](KVCache& held) { return held.reserve_valid(key, value, options.kv_lens); },
      call);
}

}  // namespace attnpack
