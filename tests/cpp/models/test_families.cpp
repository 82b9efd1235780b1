#include <torch/torch.h>

#include "catch.h"

#include <attnpack/attnpack.h>

using namespace attnpack;

namespace {

CausalLMOptions mixed() {
  return CausalLMOptions(32, 24, 3, 4)
      .num_kv_heads(2)
      .hidden_dim(32)
      .norm("rms_plus_one")
      .layout("sandwich")
      .activation("geglu_tanh")
      .embed_scale(3)
      .final_softcap(2)
      .scores(ScoreSettings().softcap(3).sinks(true).rope_dim(4))
      .qk_norm(QkNorm(true).plus_one(true))
      .experts(MixtureOfExpertsOptions(1, 8, 4, 2))
      .layer_settings({LayerSettings().window(Window{3, 0}).experts(false), LayerSettings().rope(false),
                       LayerSettings().window(Window{5, 0}).rope_base(100)});
}

}  // namespace

TEST_CASE("layers with a window get a ring of its size, the others a growing cache") {
  torch::manual_seed(0);
  CausalLM model(mixed());
  const auto cache = model->sliding_cache();
  const auto ids = torch::randint(32, {2, 1000});
  torch::NoGradGuard no_grad;
  const auto whole = model->forward(ids);
  for (int64_t i = 0; i < 1000; i += 50) {
    const auto logits = model->forward(ids.slice(1, i, i + 50), CausalLMInputs().cache(cache));
    REQUIRE(torch::allclose(logits, whole.slice(1, i, i + 50), 1e-4, 1e-5));
  }
  const auto& layers = cache->layers();
  REQUIRE(std::dynamic_pointer_cast<SlidingWindowCache>(layers[0]));
  REQUIRE(std::dynamic_pointer_cast<DynamicCache>(layers[1]));
  REQUIRE(std::dynamic_pointer_cast<SlidingWindowCache>(layers[2]));
  REQUIRE(2 * layers[0]->nbytes() < layers[1]->nbytes());
  REQUIRE(2 * layers[2]->nbytes() < layers[1]->nbytes());
}

TEST_CASE("a model of mixed layers is cloned, saved and generates alike with each cache") {
  torch::manual_seed(1);
  CausalLM model(mixed());
  const auto ids = torch::randint(32, {2, 12});
  const auto wanted = generate(*model, ids, GenerateOptions(6));
  for (const char* cache : {"static", "sliding", "paged", "none"})
    REQUIRE(torch::equal(generate(*model, ids, GenerateOptions(6).cache(cache)), wanted));
  CausalLM copy(mixed());
  load_state_dict(*copy, state_dict(*model));
  REQUIRE(torch::equal(copy->forward(ids), model->forward(ids)));
  const auto cloned = std::dynamic_pointer_cast<CausalLMImpl>(model->clone());
  REQUIRE(torch::equal(cloned->forward(ids), model->forward(ids)));
  REQUIRE(c10::str(model).find("final_softcap=2") != std::string::npos);
}

TEST_CASE("an expert gate chooses as by hand") {
  // Groups {0, 1}, {2, 3}, {4, 5}: the two best groups by the sum of their two best are the first and the last.
  const auto logits = torch::tensor({{3.0, 1.0, 3.5, -9.0, 2.0, 2.5}}, torch::kDouble);
  const auto by = [&](RouteOptions o, std::optional<at::Tensor> correction = std::nullopt) {
    return route_experts(logits, correction, o);
  };
  auto [weights, index] = by({"sigmoid", 2, true, 1.5, 3, 2});
  REQUIRE(torch::equal(index, torch::tensor({{0, 5}})));
  const auto s = torch::sigmoid(logits);
  const auto pair = torch::stack({s[0][0], s[0][5]});
  REQUIRE(torch::allclose(weights[0], 1.5 * pair / pair.sum()));
  std::tie(weights, index) = by({"softmax", 2, false, 1.0, 3, 2});  // best experts: groups 1 and 0
  REQUIRE(torch::equal(index, torch::tensor({{2, 0}})));
  REQUIRE(torch::allclose(weights[0][0], logits.softmax(-1)[0][2]));
  // The correction changes the choice, and no weight.
  const auto correction = torch::tensor({0.0, 9.0, 0.0, 0.0, 0.0, 0.0}, torch::kDouble);
  std::tie(weights, index) = by({"sigmoid", 1}, correction);
  REQUIRE(index.item<int64_t>() == 1);
  REQUIRE(torch::allclose(weights[0][0], s[0][1]));
}
