// Tensors by name into a module: either all are loaded, or none is and a sentence says why.
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
      {"got v_proj.weight in layout Sparse, want a dense tensor: call .to_dense()", ones.to_sparse()},
      {"got v_proj.weight of dtype QInt8, want plain numbers: call .dequantize()",
       at::quantize_per_tensor(ones, 0.1, 0, at::kQInt8)},
  };
  for (const auto& [words, tensor] : wrong) {
    auto tensors = copies(*layer);
    for (auto& [name, each] : tensors) each = torch::zeros_like(each);
    tensors["v_proj.weight"] = tensor;  // the last by name: the others are good
    REQUIRE(complains(words, [&, &tensors = tensors] { load_state_dict(*layer, tensors); }));
    REQUIRE(equal(state_dict(*layer), before));
  }
}

TEST_CASE("sparse and quantised tensors are not assigned") {
  MultiHeadAttention layer(24, 4);
  auto tensors = copies(*layer);
  tensors["v_proj.weight"] = torch::ones({24, 24}).to_sparse();
  REQUIRE(complains("got v_proj.weight in layout Sparse", [&] { assign_state_dict(*layer, tensors); }));
  tensors["v_proj.weight"] = at::quantize_per_tensor(torch::ones({24, 24}), 0.1, 0, at::kQInt8);
  REQUIRE(complains("got v_proj.weight of dtype QInt8", [&] { assign_state_dict(*layer, tensors); }));
}

TEST_CASE("a module loads its own tensors in other places, and views of them") {
  torch::manual_seed(0);
  MultiHeadAttention layer(24, 4);
  const auto before = copies(*layer);
  auto tensors = state_dict(*layer);
  std::swap(tensors["k_proj.weight"], tensors["v_proj.weight"]);
  tensors["q_proj.weight"] = tensors["q_proj.weight"].t();
  const auto out = tensors["o_proj.weight"];  // the same memory as another storage
  tensors["o_proj.weight"] = torch::from_blob(out.data_ptr(), {24, 24}).t();
  load_state_dict(*layer, tensors);
  REQUIRE(at::equal(layer->k_proj->weight, before.at("v_proj.weight")));
  REQUIRE(at::equal(layer->v_proj->weight, before.at("k_proj.weight")));
  REQUIRE(at::equal(layer->q_proj->weight, before.at("q_proj.weight").t()));
  REQUIRE(at::equal(layer->o_proj->weight, before.at("o_proj.weight").t()));
}

TEST_CASE("elements that share memory are refused before the first write") {
  MultiHeadAttention layer(24, 4);
  const auto row = torch::ones({1, 24}).expand({24, 24});
  auto tensors = copies(*layer);
  tensors["v_proj.weight"] = row;
  const auto weight = layer->v_proj->weight;
  REQUIRE(complains("the given v_proj.weight has strides [0, 1] for shape [24, 24]",
                    [&] { assign_state_dict(*layer, tensors); }));
  REQUIRE(layer->v_proj->weight.is_same(weight));
  load_state_dict(*layer, tensors);  // to read it is fine
  REQUIRE(at::equal(layer->v_proj->weight, row));

  layer->v_proj->assign_parameter("weight", row);
  for (auto& [name, each] : tensors) each = torch::zeros_like(each);
  const auto before = copies(*layer);
  REQUIRE(complains("the module's v_proj.weight has strides [0, 1] for shape [24, 24]",
                    [&] { load_state_dict(*layer, tensors); }));
  REQUIRE(equal(state_dict(*layer), before));
}

TEST_CASE("names that are missing or unexpected are listed, and only these") {
  MultiHeadAttention layer(24, 4);
  auto tensors = copies(*layer);
  tensors.erase("k_proj.weight");
  REQUIRE(complains("state dict: missing k_proj.weight; want exactly", [&] { load_state_dict(*layer, tensors); }));
  tensors["a"] = tensors["b"] = torch::ones({1});
  REQUIRE(complains("state dict: missing k_proj.weight; unexpected a, b; want exactly",
                    [&] { load_state_dict(*layer, tensors); }));
  tensors["k_proj.weight"] = torch::ones({24, 24});
  REQUIRE(complains("state dict: unexpected a, b; want exactly", [&] { assign_state_dict(*layer, tensors); }));
}

TEST_CASE("a parameter in two places stays one when tensors are assigned") {
  const auto block = [] { return GroupedQueryAttention(GroupedQueryAttentionOptions(12, 2, 1)); };
  Embedding embedding(EmbeddingOptions(9, 12));
  Encoder encoder(
      EncoderOptions({EncoderBlock(block(), FeedForward(FeedForwardOptions(12, 8)))}).embed_tokens(embedding));
  Decoder decoder(
      DecoderOptions(
          {DecoderBlock(DecoderBlockOptions(block(), FeedForward(FeedForwardOptions(12, 8))).cross_attention(block()))})
          .embed_tokens(embedding));
  EncoderDecoder module(encoder, decoder);
  const auto copy = std::dynamic_pointer_cast<EncoderDecoderImpl>(module->clone());
  StateDict tensors;
  for (const auto& [name, tensor] : state_dict(*copy)) tensors[name] = tensor.detach().clone();
  assign_state_dict(*copy, tensors);
  const auto one = copy->encoder->embed_tokens->weight, other = copy->decoder->embed_tokens->weight;
  REQUIRE(one.is_same(other));
  REQUIRE(at::equal(one, embedding->weight));
  const auto ids = torch::randint(9, {1, 3}, at::kLong);
  const auto empty_head = EncoderDecoderGenerateInputs().head(Linear(nullptr));
  REQUIRE(complains("head: got an empty Linear", [&] { generate(*module, ids, ids, GenerateOptions(2), empty_head); }));
}

TEST_CASE("an encoder-decoder wants both of its parts") {
  REQUIRE(complains("encoder: got none, want an Encoder", [] { EncoderDecoder(Encoder(nullptr), Decoder(nullptr)); }));
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
