#pragma once

#include <attnpack/cache/latent_cache.h>
#include <attnpack/cache/static_cache.h>
#include <attnpack/core/check.h>
#include <attnpack/layers/select_keys.h>
#include <attnpack/layers/sharded_attention.h>
#include <attnpack/modules/attention_module.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

// Checks and calls of the modules whose queries read the keys that a selector names. Holder is the cache that holds an
// indexer's keys too, `holder` its name.
namespace attnpack {

// Raises for inputs that such a module does not have, and where a process has not all keys.
inline void check_selects(const AttentionInputs& inputs, const std::string& module, const char* caches) {
  refuse_context_parallel(module.c_str(), "leave ContextParallel for its layers");
  ATTNPACK_CHECK(!inputs.context() && !inputs.value_context() && !inputs.kv_from(),
                 inputs.kv_from() ? "kv_from" : "context", ": got one, but ", module,
                 " selects among the keys of x; leave it out");
  ATTNPACK_CHECK(!std::dynamic_pointer_cast<CrossCache>(inputs.cache()), "cache: got a CrossCache, but ", module,
                 " selects among the keys of x; use ", caches);
}

// Raises unless the indexer's keys have one place, or none without a cache.
template <typename Holder>
void check_index_cache(const AttentionInputs& inputs, const std::string& holder) {
  const auto cache = inputs.cache(), index = inputs.index_cache();
  if (std::dynamic_pointer_cast<Holder>(cache)) {
    ATTNPACK_CHECK(!index, "index_cache: got one beside a ", holder, ", which holds the indexer's keys; leave it out");
    return;
  }
  ATTNPACK_CHECK(bool(cache) == bool(index), "index_cache: got ", index ? "one without cache" : "none beside cache",
                 ", want both or none: the indexer's keys lie in a LatentCache of their own, or with the others in a ",
                 holder);
  ATTNPACK_CHECK(
      !index || std::dynamic_pointer_cast<LatentCache>(index) || std::dynamic_pointer_cast<StaticCache>(index),
      "index_cache: got a cache of keys and values, want a LatentCache or a StaticCache of one head for the "
      "indexer's keys");
  ATTNPACK_CHECK(!index || index->sym_len() == cache->sym_len(), "index_cache: holds ", index ? index->sym_len() : 0,
                 " positions, cache ", cache ? cache->sym_len() : 0, ", want as many: give both to the same calls");
}

// The caches that a call takes back by itself where it raises.
template <typename Holder>
std::vector<std::shared_ptr<KVCache>> caches_of_selection(const AttentionInputs& inputs) {
  std::vector<std::shared_ptr<KVCache>> caches;
  if (inputs.index_cache()) caches.push_back(inputs.index_cache());
  if (const auto holder = std::dynamic_pointer_cast<Holder>(inputs.cache())) caches.push_back(holder);
  return caches;
}

// The keys that the indexer names, [B, 1, L, n]; none where it names all. Its keys go into the caches of the call, if
// there are any.
template <typename Holder>
std::optional<at::Tensor> name_keys(const IndexerTokens& tokens, int64_t top_k, int64_t num_local,
                                    const AttentionInputs& of_call, LayerInputs inputs) {
  const auto length = tokens.key.sym_size(2);
  const auto index_cache = of_call.index_cache();
  if (index_cache) {
    inputs.cache = index_cache->reserve_latents(tokens.key, tokens.key.size(3));
  } else if (const auto holder = std::dynamic_pointer_cast<Holder>(of_call.cache())) {
    inputs.cache = holder->reserve_index(tokens.key);
  }
  const auto keys = inputs.cache ? inputs.cache->key.sym_size(2) : length;
  const auto selected = index_keys(tokens, top_k, num_local, inputs);
  if (index_cache) index_cache->commit(length, inputs.kv_lens);
  return selected.sym_size(3) < keys ? std::make_optional(selected) : std::nullopt;
}

}  // namespace attnpack
