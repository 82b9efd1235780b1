// Conversion in a program without Python: weights and modules.
#include <torch/torch.h>

#include "catch.h"

#include <attnpack/attnpack.h>

namespace attnpack {

namespace {

template <typename F>
bool refuses(const std::string& words, const F& f) {
  try {
    f();
  } catch (const std::exception& error) {
    return std::string(error.what()).find(words) != std::string::npos;
  }
  return false;
}

// The heads of both projections in each group are those of its first.
void share(MultiHeadAttention& layer, const convert::Groups& groups) {
  at::NoGradGuard no_grad;
  for (auto& projection : {layer->k_proj, layer->v_proj}) {
    for (auto& tensor : projection->parameters()) {
      auto heads = tensor.unflatten(0, {layer->options.num_heads(), -1});
      for (const auto& group : groups) {
        for (const auto head : group) heads[head].copy_(heads[group[0]]);
      }
    }
  }
}

MultiHeadAttention make_layer() {
  torch::manual_seed(0);
  MultiHeadAttention layer(
      MultiHeadAttentionOptions(24, 4).causal(true).bias(true).sinks(true).rope(RotaryEmbedding(6)));
  layer->to(at::kDouble);
  layer->eval();
  return layer;
}

}  // namespace

TEST_CASE("pooling is the mean of each group of consecutive heads") {
  const auto weight = torch::randn({24, 8}, at::kDouble);
  const auto heads = weight.view({4, 6, 8});
  REQUIRE(at::allclose(convert::pool_kv_heads(weight, 4, 2), heads.view({2, 2, 6, 8}).mean(1).flatten(0, 1)));
  REQUIRE(at::equal(convert::pool_kv_heads(weight, 4, 4), weight));
  const auto first = convert::PoolOptions().method("first").groups(convert::Groups{{2}, {3, 0, 1}});
  REQUIRE(at::equal(convert::pool_kv_heads(weight, 4, 2, first), at::cat({heads[2], heads[3]})));
  REQUIRE(refuses("which does not divide", [&] { convert::pool_kv_heads(weight, 4, 3); }));
}

TEST_CASE("equal heads of a group leave a layer's output, by every method") {
  auto layer = make_layer();
  const convert::Groups groups{{0, 2}, {1, 3}};
  share(layer, groups);
  const auto x = torch::randn({2, 5, 24}, at::kDouble);
  const auto wanted = layer->forward(x);
  for (const auto* method : {"mean", "first", "aligned"}) {
    auto made = convert::to_gqa(layer, 2, convert::ToGqaOptions().method(method).groups(groups));
    REQUIRE(made->options.head_map() == std::vector<int64_t>{0, 1, 0, 1});
    REQUIRE(at::allclose(made->forward(x), wanted));
  }
  const auto calibrated = convert::ToGqaOptions().method("similar").calibration({x.flatten(0, 1), {}, {}});
  REQUIRE(at::allclose(convert::to_gqa(layer, 2, calibrated)->forward(x), wanted));
}

TEST_CASE("a converted layer keeps what conversion does not concern, in memory of its own") {
  auto layer = make_layer();
  layer->v_proj->weight.set_requires_grad(false);
  const auto before = layer->k_proj->weight.clone();
  auto made = convert::to_mqa(layer);
  REQUIRE(made->options.num_kv_heads() == 1);
  REQUIRE(made->options.causal());
  REQUIRE(made->rope->options.dim() == 6);
  REQUIRE_FALSE(made->is_training());
  REQUIRE(made->k_proj->weight.requires_grad());
  REQUIRE_FALSE(made->v_proj->weight.requires_grad());
  REQUIRE(at::equal(made->q_proj->weight, layer->q_proj->weight));
  REQUIRE(at::equal(made->sinks, layer->sinks));
  {
    at::NoGradGuard no_grad;
    for (auto& parameter : made->parameters()) parameter.add_(1);
  }
  REQUIRE(at::equal(layer->k_proj->weight, before));
  const auto copy = std::dynamic_pointer_cast<MultiQueryAttentionImpl>(made->clone());
  const auto x = torch::randn({2, 5, 24}, at::kDouble);
  REQUIRE(at::equal(copy->forward(x), made->forward(x)));
  REQUIRE(convert::to_gqa(made, 1)->forward(x).sizes() == x.sizes());
  REQUIRE(refuses("want 1 to the 1 heads", [&] { convert::to_gqa(made, 2); }));
}

TEST_CASE("a layer without RoPE is exactly a latent one of full rank, and another rank loses something") {
  torch::manual_seed(0);
  GroupedQueryAttention layer(GroupedQueryAttentionOptions(24, 4, 2).causal(true).bias(true));
  layer->to(at::kDouble);
  const auto x = torch::randn({2, 5, 24}, at::kDouble);
  auto full = convert::to_mla(layer, 24);
  REQUIRE(at::allclose(full->forward(x), layer->forward(x)));
  REQUIRE(full->options.kv_lora_rank() == 24);
  REQUIRE(full->kv_b_proj->weight.requires_grad());
  auto low = convert::to_mla(layer, 4, convert::ToMlaOptions().calibration({x.flatten(0, 1), {}, {}}));
  REQUIRE_FALSE(at::allclose(low->forward(x), layer->forward(x)));
  GroupedQueryAttention windowed(GroupedQueryAttentionOptions(24, 4, 2).window(Window{2, 0}));
  REQUIRE(refuses("window: got a layer with it", [&] { convert::to_mla(windowed, 8); }));
}

TEST_CASE("fused projections come apart and together bit for bit") {
  const auto weight = torch::randn({48, 24});
  for (const auto* layout : {"concat", "grouped"}) {
    const auto [q, k, v] = convert::split_qkv(weight, layout, 4, 2);
    REQUIRE(k.sizes() == at::IntArrayRef({12, 24}));
    REQUIRE(at::equal(convert::fuse_qkv(q, k, v, layout, 4, 2), weight));
  }
  const auto [q, k, v] = convert::split_qkv(weight.t().contiguous(), "conv1d", 4, 2);
  REQUIRE(at::equal(q, weight.narrow(0, 0, 24)));
  REQUIRE(at::equal(convert::fuse_qkv(q, k, v, "conv1d", 4, 2), weight.t()));
}

}  // namespace attnpack
