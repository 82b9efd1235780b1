// Whole models to latent attention in a program without Python.
#include <torch/torch.h>

#include "catch.h"

#include <attnpack/attnpack.h>

namespace attnpack {

namespace {

CausalLMOptions small_options() {
  return CausalLMOptions(50, 24, 2, 4)
      .num_kv_heads(2)
      .hidden_dim(32)
      .max_positions(64)
      .bias(true)
      .scores(ScoreSettings().scale(0.3));
}

CausalLM small_model(CausalLMOptions options) {
  torch::manual_seed(0);
  CausalLM model(options);
  const at::NoGradGuard no_grad;
  for (auto& parameter : model->parameters()) parameter.add_(0.2 * at::randn_like(parameter));
  model->eval();
  return model;
}

bool refuses_model(const std::string& words, const CausalLMOptions& options, const ToMlaOptions& wanted = {}) {
  try {
    to_mla(small_model(options), 24, wanted);
  } catch (const std::exception& error) {
    return std::string(error.what()).find(words) != std::string::npos;
  }
  return false;
}

}  // namespace

TEST_CASE("a model of full rank is exact, and its state dict is that of a dense DeepSeek-V3") {
  const at::NoGradGuard no_grad;
  auto model = small_model(small_options());
  const auto ids = torch::randint(50, {2, 30}, at::kLong);
  auto made = to_mla(model, 24);  // 2 * 2 kv heads * 6
  REQUIRE(at::allclose(made->forward(ids), model->forward(ids), 0, 1e-4));
  REQUIRE(*made->options.latent()->kv_lora_rank() == 24);
  REQUIRE(*made->options.latent()->qk_rope_head_dim() == 12);
  REQUIRE_FALSE(made->is_training());
  const auto state = state_dict(*made);
  for (const auto* name : {"q_a_proj.weight", "q_a_layernorm.weight", "q_b_proj.weight", "kv_a_proj_with_mqa.bias",
                           "kv_a_layernorm.weight", "kv_b_proj.weight", "o_proj.bias"})
    REQUIRE(state.count(c10::str("model.layers.1.self_attn.", name)) == 1);
  const auto greedy = GenerateOptions(9);
  REQUIRE(at::equal(generate(*made, ids, greedy), generate(*model, ids, greedy)));
}

TEST_CASE("fewer rotating dims and narrower latents lose something, and less with a text") {
  const at::NoGradGuard no_grad;
  auto model = small_model(small_options());
  const auto ids = torch::randint(50, {2, 30}, at::kLong);
  const auto error = [&](const ToMlaOptions& options) {
    auto made = to_mla(model, 7, options);
    return (made->forward(ids) - model->forward(ids)).norm().item<double>();
  };
  const auto narrow = ToMlaOptions().rope_dim(4).length(30);
  const auto blind = error(narrow), seen = error(ToMlaOptions(narrow).ids(ids));
  REQUIRE(seen > 1e-2);
  REQUIRE(seen < blind);
}

TEST_CASE("factors of a model lie in its weights as well") {
  const at::NoGradGuard no_grad;
  for (const bool tied : {false, true}) {
    auto model = small_model(small_options().embed_scale(3).residual_scale(0.4).logit_scale(0.7).tie_embeddings(tied));
    const auto ids = torch::randint(50, {2, 30}, at::kLong);
    auto folded = convert::fold_multipliers(model);
    REQUIRE(folded->options.embed_scale() == 1);
    REQUIRE(folded->options.residual_scale() == 1);
    REQUIRE(folded->options.logit_scale() == 1);
    REQUIRE(at::allclose(folded->forward(ids), model->forward(ids), 0, 1e-4));
    REQUIRE(at::allclose(to_mla(folded, 24)->forward(ids), model->forward(ids), 0, 1e-4));
  }
}

TEST_CASE("what latent attention cannot hold is named, all of it") {
  REQUIRE(
      refuses_model("qk_norm (norms of queries and keys), window", small_options().qk_norm(true).window(Window{3, 0})));
  REQUIRE(refuses_model("softcap (a soft cap on the scores)", small_options().scores(ScoreSettings().softcap(5))));
  REQUIRE(refuses_model("rope_dim: got 14, want an even number from 2 to 12", small_options(),
                        ToMlaOptions().rope_dim(14)));
  REQUIRE(refuses_model("ids: got shape", small_options(), ToMlaOptions().ids(torch::zeros({3}, at::kLong))));
}

}  // namespace attnpack
