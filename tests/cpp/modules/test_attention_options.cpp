// Newer options of attention in a program without Python: gates, keys as values, shared caches, differences of heads.
#include <torch/torch.h>

#include "catch.h"
#include "close.h"
#include "complains.h"

#include <attnpack/attnpack.h>

namespace attnpack {

namespace {

GroupedQueryAttentionOptions options() {
  return GroupedQueryAttentionOptions(24, 4, 2).causal(true).rope(RotaryEmbedding(6));
}

}  // namespace

TEST_CASE("a gate is a factor before o_proj") {
  torch::manual_seed(0);
  const auto x = torch::randn({2, 5, 24});
  GroupedQueryAttention plain(options()), gated(options().gate("head").gate_activation("softplus"));
  auto tensors = state_dict(*plain);
  tensors["gate_proj.weight"] = at::zeros({4, 24});
  load_state_dict(*gated, tensors, true);
  REQUIRE(close(gated->forward(x), plain->forward(x) * std::log(2.0)));
  const auto copy = std::dynamic_pointer_cast<GroupedQueryAttentionImpl>(gated->clone());
  REQUIRE(at::equal(copy->forward(x), gated->forward(x)));
  REQUIRE(complains("gate: got 'both'", [] { GroupedQueryAttention(options().gate("both")); }));
  REQUIRE(complains("without a gate", [] { GroupedQueryAttention(options().gate_activation("softplus")); }));
}

TEST_CASE("keys are the values, and queries come of a latent") {
  torch::manual_seed(0);
  const auto x = torch::randn({2, 5, 24});
  GroupedQueryAttention layer(options().keys_as_values(true).q_lora_rank(8));
  REQUIRE(state_dict(*layer).count("v_proj.weight") == 0);
  const auto [q, k, v] = layer->project(x);
  REQUIRE(at::equal(v, layer->k_proj(x).view({2, 5, 2, 6}).transpose(1, 2)));
  REQUIRE(layer->q_b_proj->weight.sizes() == at::IntArrayRef({24, 8}));
  layer->forward(x).sum().backward();
  REQUIRE(layer->q_a_layernorm->weight.grad().defined());
}

TEST_CASE("a layer reads the cache of another") {
  torch::manual_seed(0);
  torch::NoGradGuard no_grad;
  const auto x = torch::randn({2, 5, 24});
  GroupedQueryAttention owner(options()), reader(options());
  auto cache = std::make_shared<DynamicCache>();
  REQUIRE(complains("kv_from: got an empty cache", [&] { reader->forward(x, AttentionInputs().kv_from(cache)); }));
  owner->forward(x, AttentionInputs().cache(cache));
  const auto out = reader->forward(x, AttentionInputs().kv_from(cache));
  REQUIRE(cache->len() == 5);
  auto tensors = state_dict(*reader);
  for (const std::string name : {"k_proj.weight", "v_proj.weight"}) tensors[name] = state_dict(*owner)[name];
  GroupedQueryAttention both(options());
  load_state_dict(*both, tensors, true);
  REQUIRE(close(out, both->forward(x)));
  const auto other = std::make_shared<DynamicCache>();
  REQUIRE(
      complains("together with kv_from", [&] { reader->forward(x, AttentionInputs().kv_from(cache).cache(other)); }));
}

TEST_CASE("differential attention of both forms") {
  torch::manual_seed(0);
  const auto x = torch::randn({2, 5, 24});
  for (const int64_t version : {1, 2}) {
    DifferentialAttention layer(DifferentialAttentionOptions(24, 4, 2).version(version).causal(true));
    const auto out = layer->forward(x);
    REQUIRE(out.sizes() == x.sizes());
    out.sum().backward();
    for (const auto& parameter : layer->parameters()) REQUIRE(parameter.grad().defined());
    const auto copy = std::dynamic_pointer_cast<DifferentialAttentionImpl>(layer->clone());
    REQUIRE(at::equal(copy->forward(x), out));
    torch::NoGradGuard no_grad;
    const auto cache = std::make_shared<DynamicCache>();
    const auto first = layer->forward(x.narrow(1, 0, 3), AttentionInputs().cache(cache));
    const auto second = layer->forward(x.narrow(1, 3, 2), AttentionInputs().cache(cache));
    REQUIRE(close(at::cat({first, second}, 1), out));
  }
}

}  // namespace attnpack
