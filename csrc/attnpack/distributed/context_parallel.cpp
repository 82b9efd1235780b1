#include <attnpack/distributed/context_parallel.h>

#include <attnpack/core/check.h>
#include <attnpack/distributed/detail/gather_sequence.h>
#include <attnpack/distributed/detail/methods.h>
#include <attnpack/distributed/detail/validate.h>
#include <attnpack/layers/attend.h>
#include <attnpack/layers/latent_attend.h>

#include <utility>

namespace attnpack::distributed {

namespace {

// The options of a layer as those of the operator. The queries are scaled already.
AttentionOptions rules_of(const LayerInputs& o) {
  return AttentionOptions().rules(o).query_scale(std::nullopt).mask(o.mask).kv_lens(o.kv_lens);
}

// Refuses what the operator's checks do not know of.
void refuse_inputs(const LayerInputs& o, int64_t length) {
  refuse_single_process_inputs(
      {.mask = o.mask.has_value(), .cache = o.cache.has_value(), .rope_by_length = o.rope && o.rope->by_length()});
  check_part_positions(o.positions, length);
}

// [B, H, L, Dv] -> [B, L, H * Dv]
at::Tensor join_heads(const at::Tensor& out) { return out.transpose(1, 2).flatten(2); }

class ShardedSequence : public ShardedAttention {
 public:
  ShardedSequence(Group group, const ContextParallelOptions& options) : group_(std::move(group)), options_(options) {}

  at::Tensor attend(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                    const AttendOptions& o) const override {
    const auto rules = rules_of(o);
    agree(query, key, value, rules, o);
    const auto [q, k] = rotate(query, key, o);
    return join_heads(attend_heads(q, k, value, rules));
  }

  at::Tensor latent_attend(const at::Tensor& query, const at::Tensor& latent, const at::Tensor& k_rope,
                           const std::optional<at::Tensor>& kv_b, int64_t v_dim,
                           const LatentAttendOptions& o) const override {
    const auto rules = rules_of(o);
    // Heads of the width that the latents will give, without their memory.
    const auto like = [&](int64_t width) {
      return latent.narrow(-1, 0, 1).unsqueeze(1).to(query.scalar_type()).expand({-1, query.size(1), -1, width});
    };
    agree(query, like(query.size(-1)), like(kv_b ? v_dim : latent.size(-1)), rules, o);
    const auto [q, latents] = latent_rotate(query, latent, k_rope, o);
    const auto heads = [&, &q = q](const at::Tensor& all, const std::optional<at::Tensor>& kv_lens) {
      return latent_heads(q, all, k_rope.size(-1), kv_b, v_dim, "expanded", kv_lens);
    };
    if (options_.method() == Method::kAllGather) {  // latents travel, and each rank expands them
      const auto whole = gather_sequence(latents, group_, 2, options_.layout(), /*alike=*/false);
      const auto [all_q, key, value] = heads(whole, o.kv_lens);
      return join_heads(std::get<0>(attend_rows(all_q, key, value, rules, group_, options_.layout())));
    }
    const auto [part_q, key, value] = heads(latents, std::nullopt);
    return join_heads(attend_heads(part_q, key, value, rules));
  }

  at::Tensor positions(int64_t length) const override {
    return distributed::positions(options_.layout(), length, group_);
  }

 private:
  void agree(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const AttentionOptions& rules,
             const LayerInputs& inputs) const {
    agree_on_attention(query, key, value, group_, rules, options_.layout(), options_.method(),
                       [&] { refuse_inputs(inputs, query.size(2)); });
  }

  at::Tensor attend_heads(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                          const AttentionOptions& rules) const {
    return std::get<0>(attend_by(options_.method(), query, key, value, group_, rules, options_.layout()));
  }

  Group group_;
  ContextParallelOptions options_;
};

}  // namespace

ContextParallel::ContextParallel(Group group, const ContextParallelOptions& options) {
  ATTNPACK_CHECK(group, "group: got none, want the processes that hold the sequence, such as gloo_group gives");
  local_ = std::make_unique<ShardedSequence>(std::move(group), options);
  before_ = set_sharded_attention(local_.get());
}

ContextParallel::~ContextParallel() { set_sharded_attention(before_); }

}  // namespace attnpack::distributed
