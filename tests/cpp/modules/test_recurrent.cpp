// Recurrent layers in a program without Python: steps, caches, models with both kinds of layers.
#include <torch/torch.h>

#include "catch.h"
#include "close.h"
#include "complains.h"

#include <attnpack/attnpack.h>

namespace attnpack {

namespace {

// Steps with a cache give what the whole sequence gives.
template <typename Module>
void compare_steps(Module& layer) {
  const at::NoGradGuard no_grad;
  const auto x = torch::randn({2, 7, layer->embed_dim()});
  const auto whole = layer->forward(x);
  const auto cache = layer->new_cache();
  std::vector<at::Tensor> outs;
  for (const auto& part : x.split_with_sizes({4, 1, 2}, 1)) {
    outs.push_back(layer->forward(part, AttentionInputs().cache(cache)));
    REQUIRE(cache->nbytes() > 0);
  }
  REQUIRE(at::allclose(at::cat(outs, 1), whole, 1e-4, 1e-4));
  REQUIRE(cache->len() == 7);
  REQUIRE(complains("a state cannot forget its last tokens", [&] { cache->crop(3); }));
  const auto copy = std::dynamic_pointer_cast<typename Module::ContainedType>(layer->clone());
  REQUIRE(at::equal(copy->forward(x), whole));
}

}  // namespace

TEST_CASE("steps of recurrent layers, clones and caches") {
  torch::manual_seed(0);
  GatedDeltaNet delta(GatedDeltaNetOptions(16, 2, 4).head_k_dim(4).head_v_dim(6));
  compare_steps(delta);
  KimiDeltaAttention kimi(KimiDeltaAttentionOptions(16, 2).head_dim(4));
  compare_steps(kimi);
  LinearAttention plain(LinearAttentionOptions(16, 2).feature_map("elu").decay("learned"));
  compare_steps(plain);
  Mamba2 mamba(Mamba2Options(16, 4).head_dim(6).state_dim(5).num_groups(2));
  compare_steps(mamba);
  GatedConvolution convolution(GatedConvolutionOptions(16).bias(true));
  compare_steps(convolution);
  REQUIRE(complains("head_k_dim: got none", [] { GatedDeltaNet(GatedDeltaNetOptions(16, 2, 4).head_v_dim(6)); }));
  REQUIRE(complains("causal: got false for GatedDeltaNet",
                    [&] { delta->forward(torch::randn({1, 2, 16}), AttentionInputs().causal(false)); }));
}

TEST_CASE("a cache that is written in place keeps its memory, and is reset where a call raises") {
  torch::manual_seed(0);
  GatedDeltaNet layer(GatedDeltaNetOptions(16, 2, 4).head_k_dim(4).head_v_dim(6));
  const auto plain = std::make_shared<RecurrentCache>(), owned = std::make_shared<RecurrentCache>();
  owned->write_in_place(true);
  const auto x = torch::randn({2, 7, 16});
  const auto step = [&](const std::shared_ptr<RecurrentCache>& cache, int64_t begin, int64_t count) {
    return layer->forward(x.narrow(1, begin, count), AttentionInputs().cache(cache));
  };
  {
    const at::NoGradGuard no_grad;
    for (const auto& cache : {plain, owned}) step(cache, 0, 4);
    const auto before = plain->state_matrix();
    const auto* const place = owned->state_matrix().const_data_ptr();
    for (int64_t i = 4; i < 7; ++i) REQUIRE(at::equal(step(owned, i, 1), step(plain, i, 1)));
    REQUIRE(owned->state_matrix().const_data_ptr() == place);
    REQUIRE(plain->state_matrix().const_data_ptr() != before.const_data_ptr());
    REQUIRE(at::equal(owned->state_matrix(), plain->state_matrix()));
  }
  const auto* const place = owned->state_matrix().const_data_ptr();
  REQUIRE(step(owned, 0, 1).requires_grad());  // a state that autograd may read is not written
  REQUIRE(owned->state_matrix().const_data_ptr() != place);
  for (const auto& cache : {plain, owned}) {
    REQUIRE(complains("stop", [&] {
      rollback_on_error(std::vector<std::shared_ptr<KVCache>>{cache}, [&]() -> int { TORCH_CHECK(false, "stop"); });
    }));
  }
  REQUIRE(plain->len() == 7);
  REQUIRE(owned->len() == 0);
}

TEST_CASE("a model with recurrent layers has caches of both kinds") {
  torch::manual_seed(0);
  CausalLM model(CausalLMOptions(32, 16, 3, 2)
                     .hidden_dim(16)
                     .recurrent(RecurrentSettings().head_k_dim(8))
                     .layer_settings({LayerSettings(), LayerSettings().recurrent(false), LayerSettings()}));
  model->eval();
  const auto ids = torch::randint(32, {2, 6}, torch::kLong);
  const auto tokens = generate(*model, ids, GenerateOptions(4));
  for (const char* cache : {"none", "static", "paged"})
    REQUIRE(at::equal(tokens, generate(*model, ids, GenerateOptions(4).cache(cache))));
  const auto caches = model->dynamic_cache()->layers();
  REQUIRE(std::dynamic_pointer_cast<RecurrentCache>(caches[0]));
  REQUIRE(std::dynamic_pointer_cast<DynamicCache>(caches[1]));
}

}  // namespace attnpack
