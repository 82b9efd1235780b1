// Latent attention and its cache in a program without Python.
#include <torch/torch.h>

#include "catch.h"
#include "close.h"
#include "complains.h"

#include <attnpack/attnpack.h>
#include <attnpack/layers/latent_attend.h>

namespace attnpack {

namespace {

MultiHeadLatentAttentionOptions sizes() {
  RopeScaling yarn;
  yarn.rope_type("yarn").factor(4.0).original_max_position_embeddings(8).mscale(1.0).mscale_all_dim(0.7);
  return MultiHeadLatentAttentionOptions(24, 3)
      .kv_lora_rank(10)
      .q_lora_rank(12)
      .qk_nope_head_dim(5)
      .qk_rope_head_dim(6)
      .v_head_dim(7)
      .causal(true)
      .rope(RotaryEmbedding(RotaryEmbeddingOptions(6).interleaved(true).scaling(yarn)));
}

}  // namespace

TEST_CASE("both paths of latent attention are its equations") {
  torch::manual_seed(0);
  torch::NoGradGuard no_grad;
  MultiHeadLatentAttention layer(sizes().q_lora_rank(std::nullopt).rope(nullptr).latent_norm(false));
  const auto x = torch::randn({2, 6, 24});
  const auto q = layer->q_proj(x).view({2, 6, 3, 11}).transpose(1, 2);
  const auto both = layer->kv_a_proj_with_mqa(x);
  const auto kv = layer->kv_b_proj(both.narrow(-1, 0, 10)).view({2, 6, 3, 12}).transpose(1, 2);
  const auto shared = both.narrow(-1, 10, 6).unsqueeze(1).expand({2, 3, 6, 6});
  const auto key = at::cat({kv.narrow(-1, 0, 5), shared}, -1);
  const auto scores = at::matmul(q, key.transpose(2, 3)) / std::sqrt(11.0);
  const auto probs = scores.masked_fill(at::ones({6, 6}, at::kBool).triu(1), -INFINITY).softmax(-1);
  const auto wanted = layer->o_proj(at::matmul(probs, kv.narrow(-1, 5, 7)).transpose(1, 2).flatten(2));
  for (const char* path : {"auto", "expanded", "absorbed"}) {
    layer->options.path(path);
    REQUIRE(close(layer->forward(x), wanted));
    const auto [out, weights] = layer->forward_with_weights(x);
    REQUIRE(close(out, wanted));
    REQUIRE(close(weights, probs));
  }
  REQUIRE(layer->fold()->forward(x).sizes() == x.sizes());
  REQUIRE(close(layer->fold()->forward(x), wanted));
}

TEST_CASE("latent steps with every cache equal the whole") {
  torch::manual_seed(0);
  torch::NoGradGuard no_grad;
  MultiHeadLatentAttention layer(sizes());
  const auto x = torch::randn({2, 9, 24});
  const auto whole = layer->forward(x);
  auto latents = std::make_shared<LatentCache>();
  const std::vector<std::shared_ptr<KVCache>> caches = {
      latents, std::make_shared<DynamicCache>(),
      std::make_shared<StaticCache>(StaticCacheOptions(2, 1, 9, 16).v_head_dim(0))};
  for (const auto& cache : caches) {
    std::vector<at::Tensor> steps;
    for (const auto& part : x.split_with_sizes({4, 1, 1, 3}, 1))
      steps.push_back(layer->forward(part, AttentionInputs().cache(cache)));
    REQUIRE(close(at::cat(steps, 1), whole));
    REQUIRE(cache->len() == 9);
    REQUIRE(cache->nbytes() == 2 * 9 * 16 * 4);
  }
  REQUIRE(latents->v().sizes() == at::IntArrayRef({2, 1, 9, 10}));
  REQUIRE(latents->k_rope().sizes() == at::IntArrayRef({2, 1, 9, 6}));
  REQUIRE(latents->v().data_ptr() == latents->k().data_ptr());
  const auto copy = std::dynamic_pointer_cast<LatentCache>(latents->clone());
  REQUIRE(copy != nullptr);
  latents->crop(2);
  REQUIRE(copy->len() == 9);
  REQUIRE(copy->kv_lora_rank() == 10);
  REQUIRE(complains("cache: got a LatentCache",
                    [&] { MultiQueryAttention(24, 4)->forward(x, AttentionInputs().cache(latents)); }));
  REQUIRE(latents->len() == 2);
}

TEST_CASE("a decoder of latent attention trains, and its clone is another") {
  torch::manual_seed(0);
  std::vector<DecoderBlock> blocks;
  for (int i = 0; i < 2; ++i)
    blocks.push_back(DecoderBlock(DecoderBlockOptions(MultiHeadLatentAttention(sizes()), FeedForward(24, 32))));
  Decoder decoder{DecoderOptions(blocks)};
  const auto x = torch::randn({2, 7, 24}), wanted = torch::randn({2, 7, 24});
  torch::optim::Adam optimiser(decoder->parameters(), torch::optim::AdamOptions(1e-2));
  const auto copy = std::dynamic_pointer_cast<DecoderImpl>(decoder->clone());
  float first = 0, last = 0;
  for (int step = 0; step < 20; ++step) {
    optimiser.zero_grad();
    auto loss = (decoder->forward(x) - wanted).square().mean();
    loss.backward();
    optimiser.step();
    (step == 0 ? first : last) = loss.item<float>();
  }
  REQUIRE(last < first);
  REQUIRE_FALSE(close(copy->forward(x), decoder->forward(x)));
}

TEST_CASE("keys of a dynamic rope stay unrotated in the cache") {
  torch::manual_seed(0);
  torch::NoGradGuard no_grad;
  RopeScaling dynamic;
  dynamic.rope_type("dynamic").factor(4.0);
  for (const bool raw : {true, false}) {
    const auto rope = RotaryEmbedding(RotaryEmbeddingOptions(6).max_positions(4).scaling(dynamic).raw_keys(raw));
    GroupedQueryAttention layer(GroupedQueryAttentionOptions(24, 4, 2).causal(true).rope(rope));
    auto cache = std::make_shared<DynamicCache>();
    const auto x = torch::randn({1, 9, 24});
    at::Tensor step;
    for (const auto& token : x.split(1, 1)) step = layer->forward(token, AttentionInputs().cache(cache));
    REQUIRE(close(step.select(1, 0), layer->forward(x).select(1, 8)) == raw);
  }
}

TEST_CASE("wrong latent arguments are named") {
  REQUIRE(
      complains("kv_lora_rank: got none", [] { MultiHeadLatentAttention(MultiHeadLatentAttentionOptions(24, 3)); }));
  REQUIRE(complains("path: got 'fast'", [] { MultiHeadLatentAttention(sizes().path("fast")); }));
  REQUIRE(complains("rope: got dim 8, want at most qk_rope_head_dim 6",
                    [] { MultiHeadLatentAttention(sizes().rope(RotaryEmbedding(8))); }));
  MultiHeadLatentAttention layer(sizes());
  const auto x = torch::randn({1, 3, 24});
  REQUIRE(complains("value_context", [&] { layer->forward(x, AttentionInputs(x).value_context(x)); }));
}

TEST_CASE("latent attention takes all rules but a head map") {
  torch::manual_seed(0);
  const auto query = torch::randn({1, 3, 4, 11}), latent = torch::randn({1, 4, 10}), k_rope = torch::randn({1, 4, 6}),
             kv_b = torch::randn({3 * 12, 10});
  LatentAttendOptions options;
  options.causal = true;
  options.window = {1, -1};
  options.softcap = 2;
  options.sinks = torch::randn({3});
  options.alibi_slopes = torch::rand({3});
  options.query_scale = torch::rand({4}) + 1;
  const auto [q, k, v] = latent_project(query, latent, k_rope, kv_b, 7, "expanded", options);
  const auto expected = attention(q, k, v, AttentionOptions().rules(options)).transpose(1, 2).flatten(2);
  for (const char* path : {"expanded", "absorbed"})
    CHECK(at::allclose(latent_attend(query, latent, k_rope, kv_b, 7, path, options), expected, 1e-4, 1e-4));
  options.head_map = std::vector<int64_t>{0, 0, 0};
  REQUIRE(complains("head_map is given, latent attention wants none",
                    [&] { latent_attend(query, latent, k_rope, kv_b, 7, "auto", options); }));
}

TEST_CASE("a layer with rotary dims and no rope says that it does not rotate them") {
  const auto printed = [](const MultiHeadLatentAttentionOptions& options) {
    return c10::str(*MultiHeadLatentAttention(options));
  };
  REQUIRE(printed(sizes().rope(nullptr)).find("rope=none: no dim is rotated") != std::string::npos);
  REQUIRE(printed(sizes()).find("rope=none") == std::string::npos);
  REQUIRE(printed(sizes().rope(nullptr).qk_rope_head_dim(0)).find("rope=none") == std::string::npos);
}

}  // namespace attnpack
