// Attention over the keys that a selector names, in a program without Python.
#include <torch/torch.h>

#include "catch.h"
#include "complains.h"

#include <attnpack/attnpack.h>

namespace attnpack {

namespace {

bool close(const at::Tensor& a, const at::Tensor& b) { return at::allclose(a, b, 1e-4, 1e-5); }

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
  GroupedQueryAttention grouped(24, 4, 2);
  REQUIRE(complains("key_index: got some, but of the modules MultiHeadLatentAttention alone",
                    [&] { grouped->forward(x, AttentionInputs().key_index(index)); }));
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

TEST_CASE("the indexer's loss trains the indexer alone") {
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
