// Caches that do not keep every position of their sequence: the ring of a window, and a context that is stored once.
#include <torch/torch.h>

#include "catch.h"
#include "complains.h"

#include <attnpack/attnpack.h>

namespace attnpack {

TEST_CASE("a sliding cache has the bits of a full one and flat memory") {
  torch::manual_seed(0);
  torch::NoGradGuard no_grad;
  GroupedQueryAttention layer(GroupedQueryAttentionOptions(24, 4, 2)
                                  .causal(true)
                                  .window(Window{30, 0})
                                  .rope(RotaryEmbedding(RotaryEmbeddingOptions(6))));
  const auto full = std::make_shared<DynamicCache>();
  const auto ring = std::make_shared<SlidingWindowCache>(SlidingWindowCacheOptions(30));
  for (int64_t length : {1, 500, 1, 1, 70, 300, 1, 900, 2}) {
    const auto x = torch::randn({2, length, 24});
    REQUIRE(
        at::equal(layer->forward(x, AttentionInputs().cache(ring)), layer->forward(x, AttentionInputs().cache(full))));
    REQUIRE(ring->nbytes_allocated() <= 2 * 2 * 12 * 4 * (30 + 256 + 64));
  }
  REQUIRE(ring->len() == full->len());
  REQUIRE(complains("n: got 40", [&] { ring->crop(40); }));
  GroupedQueryAttention wide(GroupedQueryAttentionOptions(24, 4, 2).causal(true).window(Window{31, 0}));
  REQUIRE(complains("cache: got a SlidingWindowCache",
                    [&] { wide->forward(torch::randn({2, 1, 24}), AttentionInputs().cache(ring)); }));
  REQUIRE(complains("window: got (3, 1)", [] { SlidingWindowCache(SlidingWindowCacheOptions(Window{3, 1})); }));
}

TEST_CASE("a cross cache holds a context once") {
  torch::manual_seed(0);
  torch::NoGradGuard no_grad;
  GroupedQueryAttention layer(GroupedQueryAttentionOptions(24, 4, 2).qk_norm(true));
  const auto cache = std::make_shared<CrossCache>();
  const auto context = torch::randn({2, 7, 24}), x = torch::randn({2, 3, 24});
  REQUIRE(complains("context: got none", [&] { layer->forward(x, AttentionInputs().cache(cache)); }));
  const auto lens = torch::tensor({7, 4});
  const auto wanted = layer->forward(x, AttentionInputs(context).kv_lens(lens));
  REQUIRE(at::equal(layer->forward(x, AttentionInputs(context).kv_lens(lens).cache(cache)), wanted));
  layer->k_proj->weight.zero_();  // later calls do not read it
  REQUIRE(at::equal(layer->forward(x, AttentionInputs().cache(cache)), wanted));
  REQUIRE(at::equal(layer->forward(x, AttentionInputs(context).cache(cache)), wanted));
  cache->reorder(torch::tensor({1, 1}));
  REQUIRE(at::equal(layer->forward(x, AttentionInputs().cache(cache))[1], wanted[1]));
  REQUIRE(complains("context: got shape",
                    [&] { layer->forward(x, AttentionInputs(torch::randn({2, 8, 24})).cache(cache)); }));
  REQUIRE(complains("holds a whole context", [&] { cache->crop(3); }));
  REQUIRE(cache->len() == 7);
  REQUIRE(cache->nbytes() == 2 * 2 * 7 * 12 * 4);
  cache->reset();
  REQUIRE_FALSE(cache->filled());
}

TEST_CASE("an encoder-decoder goes on from its caches without the source") {
  torch::manual_seed(0);
  torch::NoGradGuard no_grad;
  const auto attention = [] { return MultiHeadAttention(MultiHeadAttentionOptions(24, 4)); };
  const auto mlp = [] { return FeedForward(FeedForwardOptions(24, 32)); };
  const auto block = [&] { return DecoderBlock(DecoderBlockOptions(attention(), mlp()).cross_attention(attention())); };
  Encoder encoder(EncoderOptions({EncoderBlock(attention(), mlp())}));
  Decoder decoder(DecoderOptions({block(), block()}));
  EncoderDecoder model(encoder, decoder);
  const auto source = torch::randn({2, 5, 24}), target = torch::randn({2, 4, 24});
  const auto whole = model->forward(source, target);
  const auto self = std::make_shared<ModelCache>(2);
  const auto cross = std::make_shared<ModelCache>(
      std::vector<std::shared_ptr<KVCache>>{std::make_shared<CrossCache>(), std::make_shared<CrossCache>()});
  for (int64_t i = 0; i < 4; ++i) {
    const auto out = model->forward(i == 0 ? source : at::Tensor(), target.narrow(1, i, 1),
                                    EncoderDecoderInputs().cache(self).cross_cache(cross));
    REQUIRE(at::allclose(out, whole.narrow(1, i, 1), 1e-4, 1e-5));
  }
}

}  // namespace attnpack
