// Tensors by name into a module: all of them, or none and a sentence.
#include <torch/torch.h>

#include "catch.h"
#include "complains.h"

#include <attnpack/attnpack.h>

namespace attnpack {

namespace {

Factory on_meta() {
  Factory meta;
  meta.device = at::kMeta;
  return meta;
}

StateDict copies(const torch::nn::Module& module) {
  StateDict tensors;
  for (const auto& [name, tensor] : state_dict(module)) tensors[name] = tensor.detach().clone();
  return tensors;
}

bool equal(const StateDict& a, const StateDict& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const auto& one, const auto& other) {
    return one.first == other.first && at::equal(one.second, other.second);
  });
}

}  // namespace

TEST_CASE("a tensor that cannot be loaded leaves all as it was") {
  torch::manual_seed(0);
  MultiHeadAttention layer(24, 4);
  const auto before = copies(*layer);
  const auto ones = torch::ones({24, 24});
  const std::vector<std::pair<std::string, at::Tensor>> wrong = {
      {"got v_proj.weight on meta", ones.to(at::kMeta)},
      {"got v_proj.weight of dtype ComplexFloat, want real numbers", torch::complex(ones, ones)},
      {"got an undefined tensor as v_proj.weight", at::Tensor()},
      {"got v_proj.weight of shape [24, 23], want [24, 24]", torch::ones({24, 23})},
      {"parse", ones.to_sparse()},  // torch's own words: copy_ does not take it
  };
  for (const auto& [words, tensor] : wrong) {
    auto tensors = copies(*layer);
    for (auto& [name, each] : tensors) each = torch::zeros_like(each);
    tensors["v_proj.weight"] = tensor;  // the last by name: the others are good
    REQUIRE(complains(words, [&, &tensors = tensors] { load_state_dict(*layer, tensors); }));
    REQUIRE(equal(state_dict(*layer), before));
  }
}

TEST_CASE("a module on meta has no room for numbers") {
  MultiHeadAttention layer(MultiHeadAttentionOptions(24, 4).factory(on_meta()));
  REQUIRE(complains("the module's k_proj.weight is on meta, where nothing can be copied to: use assign_state_dict",
                    [&] { load_state_dict(*layer, copies(*MultiHeadAttention(24, 4))); }));
}

TEST_CASE("assigned tensors are floating, and parameters keep requires_grad") {
  MultiHeadAttention layer(24, 4), trained(24, 4);
  auto integers = copies(*trained);
  integers["v_proj.weight"] = torch::ones({24, 24}, at::kInt);
  const auto before = layer->q_proj->weight;
  REQUIRE(complains("got v_proj.weight of dtype Int, want a floating one as Float",
                    [&] { assign_state_dict(*layer, integers); }));
  REQUIRE(layer->q_proj->weight.is_same(before));

  layer->k_proj->weight.requires_grad_(false);
  const auto plain = copies(*trained);
  assign_state_dict(*layer, plain);
  REQUIRE(layer->q_proj->weight.requires_grad());
  REQUIRE_FALSE(layer->k_proj->weight.requires_grad());
  REQUIRE(layer->q_proj->weight.data_ptr() == plain.at("q_proj.weight").data_ptr());
  REQUIRE_FALSE(plain.at("q_proj.weight").requires_grad());
  assign_state_dict(*layer, state_dict(*trained));
  REQUIRE(layer->q_proj->weight.is_same(trained->q_proj->weight));
  REQUIRE_FALSE(layer->k_proj->weight.requires_grad());
}

}  // namespace attnpack
