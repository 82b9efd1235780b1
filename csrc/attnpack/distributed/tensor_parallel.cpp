#include <attnpack/distributed/tensor_parallel.h>

#include <attnpack/core/check.h>
#include <attnpack/distributed/detail/heads.h>
#include <attnpack/distributed/detail/shard_group.h>
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

void check_heads(const char* name, int64_t num_heads, double dropout, const Group& group) {
  ATTNPACK_CHECK(num_heads % group->getSize() == 0, "num_heads: got ", num_heads, " heads of ", name, " for ",
                 group->getSize(), " ranks, want a number that the ranks divide: take a group of fewer ranks");
  check_dropout(dropout);
}

// Raises for a parameter that has no known share: a new part of a module would be sharded wrongly.
void check_known(const char* name, const torch::nn::Module& module, const std::unordered_set<std::string>& known) {
  for (const auto& parameter : module.named_parameters()) {
    ATTNPACK_CHECK(known.count(parameter.key().substr(0, parameter.key().find('.'))), name, " has a parameter '",
                   parameter.key(), "', which tensor_parallel does not know how to shard: leave this module out");
  }
}

// Raises for a norm over all heads: a rank has only a share of them.
template <typename Attention>
void check_grouped(const Attention& module, const Group& group) {
  const auto& o = module.options;
  check_heads("grouped attention", o.num_heads(), o.dropout(), group);
  check_known("grouped attention", module,
              {"q_proj", "q_a_proj", "q_a_layernorm", "q_b_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "q_norm",
               "k_norm", "sinks"});
  ATTNPACK_CHECK(!(o.qk_norm() && o.qk_norm().all_heads()),
                 "qk_norm: got a norm over all heads, of which a rank has a share, want one over head_dim, or leave "
                 "the layer whole");
}

void sum_gradient(const RMSNorm& norm, ShardGroup& shards) {
  if (norm) shards.sum_gradient(norm->weight);
}

// Queries of the heads, straight from x or by a low rank, and the gate's factors.
template <typename Attention>
void share_queries(Attention& module, int64_t heads, ShardGroup& shards) {
  const auto keep = [&](const Linear& layer) {
    if (layer) shards.keep_outputs(layer, rows_of_share(heads, layer->options.out_features() / heads, shards.group()));
  };
  for (const auto* layer : {&module.q_proj, &module.q_b_proj, &module.gate_proj}) keep(*layer);
  for (const auto* layer : {&module.q_proj, &module.q_a_proj, &module.gate_proj}) shards.column_parallel(*layer);
  shards.sum_gradients(module.q_a_proj);
  sum_gradient(module.q_a_layernorm, shards);
}

template <typename Attention>
void share_grouped(Attention* found, ShardGroup& shards) {
  if (!found) return;
  auto& module = *found;
  const auto& group = shards.group();
  check_grouped(module, group);
  const auto& o = module.options;
  const auto dim = *o.head_dim(), kv_heads = o.num_kv_heads(), heads = o.num_heads();
  const int64_t ranks = group->getSize();
  std::vector<std::vector<int64_t>> read;
  for (int64_t rank = 0; rank < ranks; ++rank)
    read.push_back(kv_heads_of(share_of(heads, ranks, rank), heads, kv_heads, o.head_map()).heads);

  share_queries(module, heads, shards);
  shards.keep_inputs(module.o_proj, rows_of_share(heads, dim, group));
  const auto kv_rows = rows_of(read, kv_heads, dim);
  const bool divides = !o.head_map() && kv_heads % ranks == 0;
  for (const auto* layer : {&module.k_proj, &module.v_proj}) {
    shards.keep_outputs(*layer, kv_rows);
    shards.column_parallel(*layer);
    if (!divides) shards.sum_gradients(*layer, kv_rows);
  }
  for (const auto* norm : {&module.q_norm, &module.k_norm}) sum_gradient(*norm, shards);
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
  auto& module = *found;
  const auto& group = shards.group();
  const auto heads = module.options.num_heads();
  check_heads("MultiHeadLatentAttention", heads, module.options.dropout(), group);
  check_known("MultiHeadLatentAttention", module,
              {"q_proj", "q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj",
               "o_proj", "gate_proj"});
  share_queries(module, heads, shards);
  if (const auto& layer = module.kv_b_proj)
    shards.keep_outputs(layer, rows_of_share(heads, layer->options.out_features() / heads, group));
  shards.keep_inputs(module.o_proj, rows_of_share(heads, module.o_proj->options.in_features() / heads, group));
  shards.column_parallel(module.kv_a_proj_with_mqa);
  shards.sum_gradients(module.kv_a_proj_with_mqa);
  sum_gradient(module.kv_a_layernorm, shards);
  shards.then([&module, count = share_of(heads, group->getSize(), group->getRank()).count] {
    module.options.num_heads(count);
  });
}

void share_feed_forward(FeedForwardImpl* module, ShardGroup& shards) {
  if (!module) return;
  check_known("FeedForward", *module, {"gate_proj", "up_proj", "down_proj"});
  check_dropout(module->options.dropout());
  const auto rows = rows_of_share(module->options.hidden_dim(), 1, shards.group());
  for (const auto* layer : {&module->gate_proj, &module->up_proj}) {
    shards.keep_outputs(*layer, rows);
    shards.column_parallel(*layer);
  }
  shards.keep_inputs(module->down_proj, rows);
  shards.then([module, count = shards.count(rows)] { module->options.hidden_dim(count); });
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
