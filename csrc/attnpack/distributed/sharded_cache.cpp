#include <attnpack/distributed/sharded_cache.h>

#include <attnpack/core/check.h>
#include <attnpack/distributed/collectives.h>
#include <attnpack/distributed/detail/rules.h>
#include <attnpack/ops/merge_states.h>

#include <array>
#include <limits>

namespace attnpack::distributed {

ShardedCache::ShardedCache(Group group) : group_(std::move(group)), held_(std::make_shared<DynamicCache>()) {}

at::Tensor ShardedCache::attend(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                const AttentionOptions& options) {
  const at::NoGradGuard no_grad;
  auto said = said_of(options);
  said.insert(said.end(),
              {{"past", std::to_string(len_)}, {"query", shown(query)}, {"key", shown(key)}, {"value", shown(value)}});
  agree_on("a ShardedCache", group_, query.device(), said, [&] {
    refuse_unshared(options);
    ATTNPACK_CHECK(!options.kv_lens(), "kv_lens: got one, want none: the sequences of a ShardedCache have one length");
    attnpack::attention(query, key.narrow(2, 0, 0), value.narrow(2, 0, 0), options);  // judges the arguments
    ATTNPACK_CHECK(query.size(2) == key.size(2), "query: got ", query.size(2), " rows for ", key.size(2),
                   " new keys, want as many");
  });
  return all_or_none(std::array{held_}, [&] {
    const auto [keys, values] = append(key, value);
    auto own = options;
    own.causal(false).window({-1, -1}).alibi_slopes(std::nullopt).mask(mask(query, keys.size(2), options));
    if (group_->getRank() != 0) own.sinks(std::nullopt);  // a logit joins once
    const auto [out, lse] = attention_with_lse(query, keys, values, own);
    const auto parts = all_gather(at::cat({out.to(lse.dtype()), lse.unsqueeze(-1)}, -1).unsqueeze(0), group_);
    const auto out_of = [&](int64_t rank) { return parts[rank].narrow(-1, 0, out.size(-1)); };
    const auto lse_of = [&](int64_t rank) { return parts[rank].select(-1, out.size(-1)).contiguous(); };
    auto joined = std::make_tuple(out_of(0), lse_of(0));
    for (int64_t rank = 1; rank < group_->getSize(); ++rank)
      joined = merge_states(std::get<0>(joined), std::get<1>(joined), out_of(rank), lse_of(rank));
    len_ += key.size(2);
    return std::get<0>(joined).to(out.dtype());
  });
}

std::pair<at::Tensor, at::Tensor> ShardedCache::append(const at::Tensor& key, const at::Tensor& value) {
  const int64_t ranks = group_->getSize(), first = ((group_->getRank() - len_) % ranks + ranks) % ranks;
  const auto own = [&](const at::Tensor& x) { return x.slice(2, first, std::nullopt, ranks); };
  const auto room = held_->reserve(own(key), own(value));
  kv_cache_append_(room.key, room.value, room.lengths, own(key), own(value));
  held_->commit(own(key).size(2), std::nullopt);
  return {held_->k(), held_->v()};
}

std::optional<at::Tensor> ShardedCache::mask(const at::Tensor& query, int64_t num_keys,
                                             const AttentionOptions& options) const {
  const auto [left, right] = options.window();
  const auto& slopes = options.alibi_slopes();
  if (!slopes && !options.causal() && left < 0 && right < 0) return std::nullopt;
  const auto rows = at::arange(len_, len_ + query.size(2), query.options().dtype(at::kLong)).unsqueeze(1);
  const auto ahead =
      at::arange(num_keys, rows.options()) * group_->getSize() + static_cast<int64_t>(group_->getRank()) - rows;
  auto allowed = at::ones_like(ahead, at::kBool);
  if (options.causal()) allowed = allowed.logical_and(ahead <= 0);
  if (left >= 0) allowed = allowed.logical_and(ahead >= -left);
  if (right >= 0) allowed = allowed.logical_and(ahead <= right);
  if (!slopes) return allowed;
  const auto exact = at::promote_types(query.scalar_type(), at::kFloat);
  const auto bias = -slopes->to(exact).view({-1, 1, 1}) * ahead.abs();
  return bias.masked_fill(allowed.logical_not(), -std::numeric_limits<double>::infinity());
}

}  // namespace attnpack::distributed
