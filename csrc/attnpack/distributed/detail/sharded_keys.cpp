#include <attnpack/distributed/detail/sharded_keys.h>

#include <attnpack/distributed/collectives.h>
#include <attnpack/layers/detail/latent_algebra.h>
#include <attnpack/layers/latent_attend.h>
#include <attnpack/ops/detail/attention_arguments.h>
#include <attnpack/ops/merge_states.h>

#include <algorithm>
#include <limits>

namespace attnpack::distributed {

at::Tensor held_positions(const at::Tensor& lengths, int64_t rank, int64_t ranks) {
  return lengths.add(ranks - 1 - rank).div(ranks, "floor").clamp_min(0);
}

std::pair<at::Tensor, at::Tensor> append_share(KVCache& cache, const at::Tensor& key, const at::Tensor& value,
                                               const at::Tensor& past, const at::Tensor& new_lens, int64_t kv_lora_rank,
                                               const Group& group) {
  const int64_t ranks = group->getSize(), rank = group->getRank(), length = key.size(2);
  const int64_t most = (length + ranks - 1) / ranks;  // of the new tokens on one rank
  const auto lens = held_positions(past + new_lens, rank, ranks) - held_positions(past, rank, ranks);
  const auto first = (rank - past).remainder(ranks);                                  // [B]
  const auto index = (first.unsqueeze(1) + at::arange(most, past.options()) * ranks)  // [B, M]
                         .clamp_max(std::max<int64_t>(length - 1, 0))
                         .view({-1, 1, most, 1});
  const auto local = [&](const at::Tensor& x) { return x.gather(2, index.expand({-1, x.size(1), -1, x.size(3)})); };
  const auto own_key = local(key), own_value = local(value);
  const auto room =
      kv_lora_rank > 0 ? cache.reserve_latents(own_key, kv_lora_rank) : cache.reserve_valid(own_key, own_value, lens);
  kv_cache_append_(room.key, room.value, room.lengths, own_key, own_value, lens);
  cache.commit(most, lens);
  const int64_t held = lens.numel() ? cache.lengths().max().item<int64_t>() : 0;
  return {room.key.narrow(2, 0, held), room.value.narrow(2, 0, held)};
}

namespace {

// The mask of the positions, [B or 1, 1, L, K], or with ALiBi's bias, [B or 1, Hq, L, K]; none where one new token sees
// all keys.
std::optional<at::Tensor> mask_of(const at::Tensor& query, int64_t num_keys, const at::Tensor& past,
                                  const AttentionOptions& options, const Group& group) {
  const auto& slopes = options.alibi_slopes();
  AttentionArguments ranges{options.rules()};
  if (query.size(2) == 1) {  // a new token is the last
    ranges.causal = false;
    ranges.window[1] = -1;
  }
  const auto first = past.slice(0, 0, 1);
  const auto starts = past.eq(first).all().item<bool>() ? first : past;
  const auto place = query.options().dtype(at::kLong);
  const auto rows = starts.view({-1, 1, 1, 1}) + at::arange(query.size(2), place).view({-1, 1});
  const auto keys = at::arange(num_keys, place) * group->getSize() + int64_t{group->getRank()};
  const auto allowed = allowed_by_range(rows, keys, ranges);
  if (!slopes) return allowed;
  const auto exact = at::promote_types(query.scalar_type(), at::kFloat);
  const auto bias = -slopes->to(exact).view({-1, 1, 1}) * (keys - rows).abs();
  return allowed ? bias.masked_fill(allowed->logical_not(), -std::numeric_limits<double>::infinity()) : bias;
}

}  // namespace

at::Tensor attend_sharded_keys(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                               const at::Tensor& past, const std::optional<at::Tensor>& kv_lens,
                               const AttentionOptions& options, const Group& group) {
  const at::NoGradGuard no_grad;
  auto local = options;
  local.rules(options.rules().without_ranges()).alibi_slopes(std::nullopt).kv_lens(kv_lens);
  local.mask(mask_of(query, key.size(2), past, options, group));
  if (group->getRank() != 0) local.sinks(std::nullopt);  // a logit joins once
  const auto [out, lse] = attnpack::attention_with_lse(query, key, value, local);
  const auto parts = all_gather(at::cat({out.to(lse.dtype()), lse.unsqueeze(-1)}, -1).unsqueeze(0), group);
  const auto out_of = [&](int64_t rank) { return parts[rank].narrow(-1, 0, value.size(-1)); };
  const auto lse_of = [&](int64_t rank) { return parts[rank].select(-1, value.size(-1)).contiguous(); };
  auto joined = std::make_tuple(out_of(0), lse_of(0));
  for (int64_t rank = 1; rank < group->getSize(); ++rank)
    joined = merge_states(std::get<0>(joined), std::get<1>(joined), out_of(rank), lse_of(rank));
  return std::get<0>(joined).to(out.dtype());
}

at::Tensor attend_sharded_latents(const at::Tensor& query, const at::Tensor& latents, int64_t rotated_dim,
                                  const std::optional<at::Tensor>& kv_b, int64_t v_dim, const at::Tensor& past,
                                  const std::optional<at::Tensor>& kv_lens, const AttentionOptions& options,
                                  const Group& group) {
  const bool absorbed = kv_b && query.size(2) == 1;
  const at::NoGradGuard no_grad;
  const auto [q, key, value] =
      latent_heads(query, latents, rotated_dim, kv_b, v_dim, absorbed ? "absorbed" : "expanded", kv_lens);
  const auto out = attend_sharded_keys(q, key, value, past, kv_lens, options, group);
  return absorbed ? unfold_output(out, *kv_b, v_dim) : out;
}

}  // namespace attnpack::distributed
