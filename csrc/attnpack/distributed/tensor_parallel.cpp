#include <attnpack/distributed/tensor_parallel.h>

#include <attnpack/core/check.h>
#include <attnpack/distributed/detail/heads.h>
#include <attnpack/distributed/detail/shard_group.h>
#include <attnpack/distributed/detail/shared_children.h>
#include <attnpack/models/causal_lm.h>
#include <attnpack/modules/attention/grouped_attention.h>
#include <attnpack/modules/attention/latent_attention.h>
#include <attnpack/modules/block.h>
#include <attnpack/modules/feed_forward.h>
#include <attnpack/modules/norm.h>
#include <attnpack/modules/stack.h>

#include <unordered_set>

namespace attnpack::distributed {

namespace {

void check_dropout(double dropout) {
  ATTNPACK_CHECK(
      dropout == 0, "dropout: got ", dropout,
      ", which is not supported over several processes: the ranks would not draw the numbers of one process; set "
      "it to 0");
}

// Dropout of states that all ranks have: each would draw its own.
template <typename... Impls>
void check_dropout_of(const torch::nn::Module& module) {
  const auto check = [](const auto* found) {
    if (found) check_dropout(found->dropout);
  };
  (check(module.as<Impls>()), ...);
}

// Raises for parameters that cannot be shared.
void check_known(const char* owner, const char* kind, const torch::nn::Module& module) {
  for (const auto& parameter : module.named_parameters()) style_of_parameter(kind, owner, parameter.key());
}

// The kv heads that each rank's query heads read.
struct KeyRows {
  RankRows rows;
  bool repeated = false;  // several ranks have one, and their gradients are summed
};

// Plans the children of a module. units: query heads or hidden numbers; a layer has as many rows for each of them.
void share_children(const torch::nn::Module& module, const char* kind, int64_t units, ShardGroup& shards,
                    const KeyRows& keys = {}) {
  const auto children = module.named_children();
  const auto& group = shards.group();
  for (const auto& [name, style, reads_x] : shared_children(kind)) {
    const auto* found = children.find(name);
    if (!found) continue;
    if (const auto norm = std::dynamic_pointer_cast<RMSNormImpl>(*found)) {
      shards.sum_gradient(norm->weight);
      continue;
    }
    const Linear layer(std::dynamic_pointer_cast<LinearImpl>(*found));
    const auto& size = layer->options;
    if (style == ParallelStyle::kOutputs)
      shards.keep_outputs(layer, rows_of_share(units, size.out_features() / units, group));
    if (style == ParallelStyle::kInputs)
      shards.keep_inputs(layer, rows_of_share(units, size.in_features() / units, group));
    if (style == ParallelStyle::kKeys) shards.keep_outputs(layer, keys.rows);
    if (reads_x) shards.column_parallel(layer);
    if (style == ParallelStyle::kWhole) shards.sum_gradients(layer);
    if (style == ParallelStyle::kKeys && keys.repeated) shards.sum_gradients(layer, keys.rows);
  }
}

template <typename Attention>
void share_grouped(Attention* found, ShardGroup& shards) {
  if (!found) return;
  constexpr auto kKind = "GroupedQueryAttention";
  auto& module = *found;
  const auto& group = shards.group();
  const auto& o = module.options;
  const auto kv_heads = o.num_kv_heads(), heads = o.num_heads();
  const int64_t ranks = group->getSize();
  check_heads("grouped attention", heads, ranks);
  check_dropout(o.dropout());
  check_known("grouped attention", kKind, module);
  check_norm_of_heads(o.qk_norm() && o.qk_norm().all_heads(), heads);
  std::vector<std::vector<int64_t>> read;
  for (int64_t rank = 0; rank < ranks; ++rank)
    read.push_back(kv_heads_of(share_of(heads, ranks, rank), heads, kv_heads, o.head_map()).heads);
  share_children(module, kKind, heads, shards,
                 {rows_of(read, kv_heads, *o.head_dim()), o.head_map() || kv_heads % ranks != 0});
  if (o.sinks()) shards.keep(module, "sinks", module.sinks, 0, rows_of_share(heads, 1, group));
  const auto share = share_of(heads, ranks, group->getRank());
  shards.then([&module, share, local = kv_heads_of(share, heads, kv_heads, o.head_map())] {
    const auto slopes = module.slopes.begin() + share.first;
    module.slopes = std::vector<double>(slopes, slopes + share.count);
    module.options.num_heads(share.count).num_kv_heads(static_cast<int64_t>(local.heads.size())).head_map(local.map);
  });
}

void share_latent(MultiHeadLatentAttentionImpl* found, ShardGroup& shards) {
  if (!found) return;
  constexpr auto kKind = "MultiHeadLatentAttention";
  auto& module = *found;
  const auto heads = module.options.num_heads(), ranks = int64_t{shards.group()->getSize()};
  check_heads(kKind, heads, ranks);
  check_dropout(module.options.dropout());
  check_known(kKind, kKind, module);
  share_children(module, kKind, heads, shards);
  shards.then(
      [&module, count = share_of(heads, ranks, shards.group()->getRank()).count] { module.options.num_heads(count); });
}

void share_feed_forward(FeedForwardImpl* module, ShardGroup& shards) {
  if (!module) return;
  constexpr auto kKind = "FeedForward";
  check_known(kKind, kKind, *module);
  check_dropout(module->options.dropout());
  const auto hidden_dim = module->options.hidden_dim();
  share_children(*module, kKind, hidden_dim, shards);
  const auto share = share_of(hidden_dim, shards.group()->getSize(), shards.group()->getRank());
  shards.then([module, count = share.count] { module->options.hidden_dim(count); });
}

// The table of tokens that a stack reads. Its table of positions stays whole.
template <typename Stack>
EmbeddingImpl* tokens_of(const torch::nn::Module& module) {
  const auto* stack = module.as<Stack>();
  return stack && stack->embed_tokens ? stack->embed_tokens.operator->() : nullptr;
}

void share_model(CausalLMImpl* model, ShardGroup& shards) {
  if (!model) return;
  if (model->lm_head) shards.keep_head(model->lm_head);
  if (model->options.latent()) return;
  shards.then([model] {  // its caches hold this rank's kv heads
    for (const auto& part : model->modules())
      if (const auto* attention = part->as<GroupedQueryAttentionImpl>())
        model->options.num_kv_heads(attention->options.num_kv_heads());
  });
}

}  // namespace

TensorShares tensor_parallel(torch::nn::Module& module, const Group& group) {
  std::unordered_set<const torch::nn::Module*> seen;
  ShardGroup shards(group);
  for (const auto& child : module.modules()) {
    if (!seen.insert(child.get()).second) continue;
    for (auto* table : {tokens_of<EncoderImpl>(*child), tokens_of<DecoderImpl>(*child)})
      if (table && seen.insert(table).second) shards.keep_table(*table);
    check_dropout_of<EncoderImpl, DecoderImpl, EncoderBlockImpl, DecoderBlockImpl>(*child);
    share_grouped(child->as<GroupedQueryAttentionImpl>(), shards);
    share_grouped(child->as<MultiHeadAttentionImpl>(), shards);
    share_grouped(child->as<MultiQueryAttentionImpl>(), shards);
    share_latent(child->as<MultiHeadLatentAttentionImpl>(), shards);
    share_feed_forward(child->as<FeedForwardImpl>(), shards);
    share_model(child->as<CausalLMImpl>(), shards);
  }
  return shards.apply(module);
}

}  // namespace attnpack::distributed
