// Caches without modules: the tensors that a copy shares, and the state after a failure.
#include <torch/torch.h>

#include "catch.h"
#include "complains.h"

#include <attnpack/attnpack.h>

namespace attnpack {

TEST_CASE("a cache's copy has memory of its own") {
  torch::manual_seed(0);
  torch::NoGradGuard no_grad;
  GroupedQueryAttention layer(24, 4, 2);
  const std::vector<std::shared_ptr<KVCache>> caches = {std::make_shared<DynamicCache>(),
                                                        std::make_shared<StaticCache>(1, 2, 6, 6)};
  for (const auto& cache : caches) {
    layer->forward(torch::randn({1, 6, 24}), AttentionInputs().cache(cache));
    const auto copy = cache->clone();
    const auto key = copy->k().clone(), value = copy->v().clone();
    cache->crop(2);
    layer->forward(torch::randn({1, 4, 24}), AttentionInputs().cache(cache));  // written where the old rows lay
    REQUIRE_FALSE(at::equal(cache->k(), key));
    REQUIRE(copy->len() == 6);
    REQUIRE(at::equal(copy->k(), key));
    REQUIRE(at::equal(copy->v(), value));
  }
}

TEST_CASE("a layer that fails takes the layers before it back") {
  torch::manual_seed(0);
  torch::NoGradGuard no_grad;
  CausalLM model(CausalLMOptions(16, 24, 2, 4));
  const auto small = std::make_shared<StaticCache>(1, 4, 4, 6);
  const auto cache =
      std::make_shared<ModelCache>(std::vector<std::shared_ptr<KVCache>>{std::make_shared<DynamicCache>(), small});
  const auto ids = torch::randint(16, {1, 3}, at::kLong);
  model->forward(ids, CausalLMInputs().cache(cache));
  REQUIRE(complains("cache", [&] { model->forward(ids, CausalLMInputs().cache(cache)); }));
  REQUIRE(cache->layers()[0]->len() == 3);
  REQUIRE(cache->layers()[0]->k().size(2) == 3);
  const auto next = torch::randint(16, {1, 1}, at::kLong);
  const auto whole = model->forward(at::cat({ids, next}, 1)).select(1, 3);
  REQUIRE(at::allclose(model->forward(next, CausalLMInputs().cache(cache)).select(1, 0), whole, 1e-4, 1e-5));
}

TEST_CASE("a state names its tensors, and a refused one changes nothing") {
  DynamicCache cache, other;
  cache.reserve(torch::ones({1, 2, 3, 4}), torch::ones({1, 2, 3, 4}));
  cache.commit(3, std::nullopt);
  const auto state = cache.state();
  REQUIRE(cache.tensor_names() == std::vector<std::string>{"lengths", "key", "value"});
  REQUIRE(state.tensors[0]->is_same(cache.lengths()));
  REQUIRE(state.tensors[1]->is_same(cache.tensors().key));
  REQUIRE_FALSE(other.state().tensors[1]);
  other.restore(state);
  REQUIRE((other.len() == 3 && other.tensors().value.is_same(cache.tensors().value)));
  auto wrong = state;
  wrong.tensors[2] = std::nullopt;
  wrong.numbers[0] = 1;
  REQUIRE(complains("tensors: got only one of key and value", [&] { other.restore(wrong); }));
  REQUIRE((other.len() == 3 && other.tensors().value.is_same(cache.tensors().value)));
}

}  // namespace attnpack
