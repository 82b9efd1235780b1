// Attention over the keys that a selector names, in a program without Python.
#include <torch/torch.h>

#include "catch.h"
#include "close.h"
#include "complains.h"

#include <attnpack/attnpack.h>

namespace attnpack {

namespace {

SparseAttentionOptions options(int64_t top_k) {
  return SparseAttentionOptions(24, 4, 2).top_k(top_k).causal(true).rope(RotaryEmbedding(6));
}

AttentionInputs with_caches(bool indexer) {
  auto inputs = AttentionInputs().cache(std::make_shared<DynamicCache>());
  return indexer ? inputs.index_cache(std::make_shared<LatentCache>()) : inputs;
}

}  // namespace

TEST_CASE("sparse attention by tokens is that of the whole sequence") {
  torch::manual_seed(0);
  const auto x = torch::randn({2, 9, 24});
  for (const std::string selector : {"indexer", "mean", "max"}) {
    auto made = options(3).selector(selector);
    if (selector != "indexer") made.key_block(2);
    SparseAttention layer(made);
    const auto whole = layer->forward(x);
    whole.sum().backward();
    REQUIRE(layer->k_proj->weight.grad().defined());
    torch::NoGradGuard no_grad;
    const auto inputs = with_caches(selector == "indexer");
    std::vector<at::Tensor> parts;
    for (const auto& token : x.split(1, 1)) parts.push_back(layer->forward(token, inputs));
    REQUIRE(close(at::cat(parts, 1), whole));
    const auto copy = std::dynamic_pointer_cast<SparseAttentionImpl>(layer->clone());
    REQUIRE(at::equal(copy->forward(x), whole));
    const auto [out, weights] = layer->forward_with_weights(x);
    const int64_t most = selector == "indexer" ? 3 : 6;
    REQUIRE((weights > 0).sum(-1).max().item<int64_t>() <= most);
    REQUIRE(close(out, whole));
  }
}

TEST_CASE("a decoder of sparse attention by tokens is that of the whole sequence") {
  torch::manual_seed(0);
  torch::NoGradGuard no_grad;
  const auto x = torch::randn({2, 19, 24});
  for (const std::string selector : {"indexer", "mean", "max"}) {
    auto made = options(3).selector(selector);
    if (selector != "indexer") made.key_block(2);
    std::vector<DecoderBlock> layers;
    for (int i = 0; i < 2; ++i) layers.emplace_back(SparseAttention(made), FeedForward(24, 48));
    Decoder decoder{DecoderOptions(layers)};
    const auto whole = decoder->forward(x);
    const auto cache = decoder->new_cache();
    std::vector<at::Tensor> parts;
    for (const auto& token : x.split(1, 1)) parts.push_back(decoder->forward(token, DecoderInputs().cache(cache)));
    REQUIRE(close(at::cat(parts, 1), whole));
    const auto held = std::dynamic_pointer_cast<SparseCache>(cache->layers()[1]);
    REQUIRE(held->index().defined() == (selector != "max"));
    REQUIRE(held->block() == (selector == "mean" ? 2 : 0));
  }
}

TEST_CASE("latent attention over named keys") {
  torch::manual_seed(0);
  torch::NoGradGuard no_grad;
  const auto x = torch::randn({2, 7, 24});
  MultiHeadLatentAttention layer(MultiHeadLatentAttentionOptions(24, 3)
                                     .kv_lora_rank(12)
                                     .qk_nope_head_dim(6)
                                     .qk_rope_head_dim(4)
                                     .v_head_dim(5)
                                     .causal(true));
  const auto index = torch::randint(0, 7, {2, 1, 7, 3});
  const auto mask = torch::zeros({2, 1, 7, 7}, at::kBool).scatter(3, index, true);
  const auto out = layer->forward(x, AttentionInputs().key_index(index));
  REQUIRE(close(out, layer->forward(x, AttentionInputs().mask(mask))));
  GroupedQueryAttention grouped(GroupedQueryAttentionOptions(24, 4, 2).causal(true));
  const auto named = grouped->forward(x, AttentionInputs().key_index(index));
  REQUIRE(close(named, grouped->forward(x, AttentionInputs().mask(mask))));
  SelfAttention single(24, 8);
  REQUIRE(complains("key_index: got one, but only multi-head, grouped-query, multi-query and latent attention take it",
                    [&] { single->forward(x, AttentionInputs().key_index(index)); }));
}

namespace {

SparseLatentAttentionOptions latent_options(int64_t top_k) {
  return SparseLatentAttentionOptions(24, 3)
      .top_k(top_k)
      .index_heads(4)
      .index_head_dim(8)
      .q_lora_rank(10)
      .kv_lora_rank(12)
      .qk_nope_head_dim(6)
      .qk_rope_head_dim(4)
      .v_head_dim(5)
      .causal(true)
      .rope(RotaryEmbedding(RotaryEmbeddingOptions(4).interleaved(true)));
}

}  // namespace

TEST_CASE("sparse latent attention by tokens is that of the whole sequence") {
  torch::manual_seed(0);
  const auto x = torch::randn({2, 9, 24});
  SparseLatentAttention layer(latent_options(3));
  const auto whole = layer->forward(x);
  whole.sum().backward();
  REQUIRE(layer->kv_b_proj->weight.grad().defined());
  REQUIRE(!layer->indexer->wq_b->weight.grad().defined());
  torch::NoGradGuard no_grad;
  const auto latents = layer->new_cache();
  const auto apart = AttentionInputs().cache(std::make_shared<DynamicCache>());
  for (const auto& inputs :
       {AttentionInputs().cache(latents), AttentionInputs(apart).index_cache(std::make_shared<LatentCache>())}) {
    std::vector<at::Tensor> parts;
    for (const auto& token : x.split(1, 1)) parts.push_back(layer->forward(token, inputs));
    REQUIRE(close(at::cat(parts, 1), whole));
  }
  REQUIRE(std::dynamic_pointer_cast<LatentCache>(latents)->index().sizes() == at::IntArrayRef({2, 1, 9, 8}));
  REQUIRE(latents->nbytes() == 2 * 9 * (12 + 4 + 8) * 4);
  const auto copy = std::dynamic_pointer_cast<SparseLatentAttentionImpl>(layer->clone());
  REQUIRE(at::equal(copy->forward(x), layer->forward(x)));
  REQUIRE(close(copy->forward(x), whole));
  REQUIRE(close(layer->fold()->forward(x), whole));
  const auto [out, weights] = layer->forward_with_weights(x);
  REQUIRE((weights > 0).sum(-1).max().item<int64_t>() == 3);
  REQUIRE(close(out, whole));
  MultiHeadLatentAttention dense(MultiHeadLatentAttentionOptions(24, 3)
                                     .q_lora_rank(10)
                                     .kv_lora_rank(12)
                                     .qk_nope_head_dim(6)
                                     .qk_rope_head_dim(4)
                                     .v_head_dim(5)
                                     .causal(true)
                                     .rope(layer->options.rope()));
  load_state_dict(*dense, state_dict(*layer), /*strict=*/false);
  REQUIRE(close(dense->forward(x, AttentionInputs().mask(weights > 0)), whole));
  layer->options.top_k(9);
  REQUIRE(at::equal(layer->forward(x), dense->forward(x)));
}

TEST_CASE("a training step by the indexer's loss lowers it for latents too") {
  torch::manual_seed(0);
  const auto x = torch::randn({2, 9, 24});
  SparseLatentAttention layer(latent_options(3));
  torch::optim::Adam optimiser(layer->indexer->parameters(), torch::optim::AdamOptions(1e-2));
  const auto first = layer->indexer_loss(x).item<double>();
  for (int i = 0; i < 30; ++i) {
    layer->zero_grad();
    layer->indexer_loss(x, /*sparse=*/i % 2 == 1).backward();
    for (const auto& item : layer->named_parameters())
      REQUIRE((item.key().rfind("indexer.", 0) == 0) == item.value().grad().defined());
    optimiser.step();
  }
  REQUIRE(layer->indexer_loss(x).item<double>() < first);
}

TEST_CASE("sparse latent attention names what is wrong") {
  torch::NoGradGuard no_grad;
  const auto x = torch::randn({2, 5, 24});
  REQUIRE(
      complains("top_k: got none", [] { SparseLatentAttention(SparseLatentAttentionOptions(24, 3).q_lora_rank(10)); }));
  REQUIRE(complains("q_lora_rank: got none, want the width of the queries' latent",
                    [] { SparseLatentAttention(SparseLatentAttentionOptions(24, 3).top_k(2)); }));
  REQUIRE(complains("v_head_dim: got none, SparseLatentAttention needs it", [] {
    SparseLatentAttention(SparseLatentAttentionOptions(24, 3)
                              .top_k(2)
                              .q_lora_rank(4)
                              .kv_lora_rank(4)
                              .qk_nope_head_dim(4)
                              .qk_rope_head_dim(0));
  }));
  SparseLatentAttention layer(latent_options(3));
  const auto cache = std::make_shared<DynamicCache>();
  REQUIRE(complains("index_cache: got none beside cache", [&] { layer->forward(x, AttentionInputs().cache(cache)); }));
  REQUIRE(cache->len() == 0);
  REQUIRE(complains("context: got one", [&] { layer->forward(x, AttentionInputs(x)); }));
  REQUIRE(complains("kv_from: got one", [&] { layer->forward(x, AttentionInputs().kv_from(cache)); }));
  REQUIRE(complains("key_index: got one, but the indexer",
                    [&] { layer->forward(x, AttentionInputs().key_index(torch::zeros({2, 1, 5, 1}, at::kLong))); }));
}

TEST_CASE("sparse attention over all keys is grouped-query attention") {
  torch::manual_seed(0);
  torch::NoGradGuard no_grad;
  const auto x = torch::randn({2, 9, 24});
  SparseAttention layer(options(9));
  GroupedQueryAttention grouped(GroupedQueryAttentionOptions(24, 4, 2).causal(true).rope(RotaryEmbedding(6)));
  load_state_dict(*grouped, state_dict(*layer), /*strict=*/false);
  REQUIRE(at::equal(layer->forward(x), grouped->forward(x)));
}

TEST_CASE("the indexer's loss trains only the indexer") {
  torch::manual_seed(0);
  const auto x = torch::randn({2, 9, 24});
  SparseAttention layer(options(3).index_heads(2).index_head_dim(8));
  for (const bool sparse : {false, true}) {
    layer->zero_grad();
    const auto loss = layer->indexer_loss(x, sparse);
    REQUIRE(loss.item<double>() > 0);
    loss.backward();
    for (const auto& item : layer->named_parameters())
      REQUIRE((item.key().rfind("index_", 0) == 0) == item.value().grad().defined());
  }
  SparseAttention blocks(options(3).selector("mean"));
  REQUIRE(complains("indexer_loss: got selector 'mean'", [&] { blocks->indexer_loss(x); }));
}

TEST_CASE("sparse attention names what is wrong") {
  torch::NoGradGuard no_grad;
  const auto x = torch::randn({2, 5, 24});
  REQUIRE(complains("top_k: got none", [] { SparseAttention(SparseAttentionOptions(24, 4, 2)); }));
  SparseAttention layer(options(3));
  const auto cache = std::make_shared<DynamicCache>();
  REQUIRE(complains("index_cache: got none beside cache", [&] { layer->forward(x, AttentionInputs().cache(cache)); }));
  REQUIRE(cache->len() == 0);
  REQUIRE(complains("context: got one", [&] { layer->forward(x, AttentionInputs(x)); }));
  REQUIRE(complains("kv_from: got one", [&] { layer->forward(x, AttentionInputs().kv_from(cache)); }));
  GroupedQueryAttention grouped(24, 4, 2);
  REQUIRE(complains("index_cache: got one, but only SparseAttention",
                    [&] { grouped->forward(x, AttentionInputs().index_cache(std::make_shared<LatentCache>())); }));
}

}  // namespace attnpack
