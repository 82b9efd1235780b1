#include <attnpack/distributed/sharded_cache.h>

#include <attnpack/core/check.h>
#include <attnpack/distributed/detail/rules.h>
#include <attnpack/distributed/detail/sharded_keys.h>

#include <array>

namespace attnpack::distributed {

ShardedCache::ShardedCache(Group group) : group_(std::move(group)), cache_(std::make_shared<DynamicCache>()) {}

at::Tensor ShardedCache::attend(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                const AttentionOptions& options) {
  const at::NoGradGuard no_grad;
  auto texts = rule_texts(options);
  texts.insert(texts.end(),
               {{"past", std::to_string(len_)}, {"query", shown(query)}, {"key", shown(key)}, {"value", shown(value)}});
  agree_on("a ShardedCache", group_, query.device(), texts, [&] {
    refuse_unshared(options);
    ATTNPACK_CHECK(!options.kv_lens(), "kv_lens: got one, want none: the sequences of a ShardedCache have one length");
    attnpack::attention(query, key.narrow(2, 0, 0), value.narrow(2, 0, 0), options);  // checks the arguments
    ATTNPACK_CHECK(query.size(2) == key.size(2), "query: got ", query.size(2), " rows for ", key.size(2),
                   " new keys, want as many");
  });
  return rollback_on_error(std::array{cache_}, [&] {
    const auto past = at::full({query.size(0)}, len_, query.options().dtype(at::kLong));
    const auto new_lens = at::full_like(past, key.size(2));
    const auto [keys, values] = append_share(*cache_, key, value, past, new_lens, /*kv_lora_rank=*/0, group_);
    const auto out = attend_sharded_keys(query, keys, values, past, std::nullopt, options, group_);
    len_ += key.size(2);
    return out;
  });
}

}  // namespace attnpack::distributed
