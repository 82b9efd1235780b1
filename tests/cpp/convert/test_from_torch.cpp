// torch::nn's attention and transformer layers as attnpack's, in a program without Python.
#include <torch/torch.h>

#include "catch.h"
#include "complains.h"

#include <attnpack/attnpack.h>

namespace attnpack {

namespace {

namespace tnn = torch::nn;

bool agree(const at::Tensor& a, const at::Tensor& b) { return at::allclose(a, b, 1e-9, 1e-10); }

at::Tensor draw(at::IntArrayRef sizes) { return torch::randn(sizes, at::kDouble); }

// [B, L, E] <-> [L, B, E]
at::Tensor swapped(const at::Tensor& x) { return x.transpose(0, 1); }

// A layer of torch in fp64 whose parameters are all random: biases and norms begin at 0 and 1.
template <typename Holder>
Holder randomised(Holder layer) {
  torch::NoGradGuard no_grad;
  layer->to(at::kDouble);
  for (auto& parameter : layer->parameters()) parameter.add_(0.1 * torch::randn_like(parameter));
  return layer;
}

at::Tensor causal_mask(int64_t length) { return at::full({length, length}, -INFINITY, at::kDouble).triu(1); }

}  // namespace

TEST_CASE("attention of torch::nn gives the same outputs and gradients") {
  torch::manual_seed(0);
  for (const int kind : {0, 1, 2}) {
    auto options = tnn::MultiheadAttentionOptions(24, 4).bias(kind != 1);
    if (kind == 2) options.kdim(10).vdim(10);  // of one width: torch::nn in C++ asserts it
    auto theirs = randomised(tnn::MultiheadAttention(options));
    auto ours = convert::from_torch(theirs);
    const auto x = draw({2, 5, 24}), k = draw({2, 7, kind == 2 ? 10 : 24}), v = draw({2, 7, kind == 2 ? 10 : 24});
    const auto lens = at::tensor({7, 4});
    const auto padded = at::arange(7).unsqueeze(0) >= lens.unsqueeze(1);
    const auto bias = draw({5, 7});
    const auto [wanted, wanted_weights] = theirs->forward(swapped(x), swapped(k), swapped(v), padded, true, bias);
    const auto inputs = AttentionInputs(k).value_context(v).kv_lens(lens).mask(bias);
    const auto [out, weights] = ours->forward_with_weights(x, inputs);
    REQUIRE(agree(out, swapped(wanted)));
    REQUIRE(agree(weights.mean(1), wanted_weights));
    REQUIRE(agree(ours->forward(x, AttentionInputs(k).value_context(v).mask(padded.logical_not().view({2, 1, 1, 7}))),
                  swapped(std::get<0>(theirs->forward(swapped(x), swapped(k), swapped(v), padded)))));
    ours->forward(x, inputs).pow(3).sum().backward();
    wanted.pow(3).sum().backward();
    REQUIRE(agree(ours->o_proj->weight.grad(), theirs->out_proj->weight.grad()));
    const auto rows = kind == 2 ? theirs->q_proj_weight.grad() : theirs->in_proj_weight.grad().narrow(0, 0, 24);
    REQUIRE(agree(ours->q_proj->weight.grad(), rows));
  }
}

TEST_CASE("stacks of torch::nn are stacks") {
  torch::manual_seed(0);
  const auto x = draw({2, 5, 24}), memory = draw({2, 7, 24});
  const auto last = [] { return torch::nn::AnyModule(tnn::LayerNorm(tnn::LayerNormOptions({24}).eps(1e-2))); };
  const auto encoder_layer =
      tnn::TransformerEncoderLayer(tnn::TransformerEncoderLayerOptions(24, 4).dim_feedforward(32).dropout(0.0));
  const auto decoder_layer =
      tnn::TransformerDecoderLayer(tnn::TransformerDecoderLayerOptions(24, 4).dim_feedforward(32).dropout(0.0));
  for (const bool with_norm : {false, true}) {
    auto encoder_options = tnn::TransformerEncoderOptions(encoder_layer, 3);
    auto decoder_options = tnn::TransformerDecoderOptions(decoder_layer, 2);
    if (with_norm) encoder_options.norm(last()), decoder_options.norm(last());
    auto encoder = randomised(tnn::TransformerEncoder(encoder_options));
    auto decoder = randomised(tnn::TransformerDecoder(decoder_options));
    auto ours = convert::from_torch(encoder);
    REQUIRE(ours->is_training());
    const auto out = ours->forward(x), wanted = encoder->forward(swapped(x));
    REQUIRE(agree(out, swapped(wanted)));
    out.pow(3).sum().backward();
    wanted.pow(3).sum().backward();
    const auto* theirs = encoder->layers->ptr<tnn::TransformerEncoderLayerImpl>(2).get();
    REQUIRE(agree(ours->layer(2)->mlp.as<FeedForward>()->up_proj->weight.grad(), theirs->linear1->weight.grad()));
    REQUIRE(agree(convert::from_torch(decoder)->forward(x, DecoderInputs().context(memory)),
                  swapped(decoder->forward(swapped(x), swapped(memory), causal_mask(5)))));
  }
  auto whole = randomised(tnn::Transformer(tnn::TransformerOptions(24, 4, 2, 3).dim_feedforward(32).dropout(0.0)));
  whole->eval();
  auto ours = convert::from_torch(whole);
  REQUIRE_FALSE(ours->is_training());
  const auto wanted = whole->forward(swapped(memory), swapped(x), {}, causal_mask(5));
  REQUIRE(agree(ours->forward(memory, x), swapped(wanted)));
  whole->encoder = torch::nn::AnyModule(tnn::Linear(3, 3));
  REQUIRE(complains("custom_encoder: got a Transformer with torch::nn::LinearImpl, want torch's own",
                    [&] { convert::from_torch(whole); }));
  auto batch_norm = tnn::TransformerEncoder(
      tnn::TransformerEncoderOptions(encoder_layer, 1).norm(torch::nn::AnyModule(tnn::BatchNorm1d(24))));
  REQUIRE(complains("norm: got torch::nn::BatchNorm1dImpl, want a torch::nn::LayerNorm",
                    [&] { convert::from_torch(batch_norm); }));
}

TEST_CASE("a bool mask hides, which that of torch::nn in C++ does not") {
  torch::manual_seed(0);
  auto theirs = randomised(tnn::MultiheadAttention(24, 4));
  auto ours = convert::from_torch(theirs);
  const auto x = draw({1, 5, 24}), t = swapped(x);
  const auto hidden = at::ones({5, 5}, at::kBool).triu(1);
  const auto out = ours->forward(x, AttentionInputs().mask(hidden.logical_not()));
  const auto by_float = std::get<0>(theirs->forward(t, t, t, {}, true, causal_mask(5)));
  REQUIRE(agree(out, swapped(by_float)));
  const auto by_bool = std::get<0>(theirs->forward(t, t, t, {}, true, hidden));
  const auto added = std::get<0>(theirs->forward(t, t, t, {}, true, hidden.to(at::kDouble)));
  REQUIRE(agree(by_bool, added));  // pytorch#80494; if torch mends it, say so in from_torch.h
  REQUIRE_FALSE(agree(by_bool, by_float));
}

TEST_CASE("an encoder layer of torch::nn is a block") {
  torch::manual_seed(0);
  for (const bool gelu : {false, true}) {
    auto options = tnn::TransformerEncoderLayerOptions(24, 4).dim_feedforward(32).dropout(0.5);
    if (gelu) options.activation(torch::kGELU);
    auto theirs = randomised(tnn::TransformerEncoderLayer(options));
    auto training = convert::from_torch(theirs);
    theirs->eval();
    auto ours = convert::from_torch(theirs);
    const auto x = draw({2, 6, 24});
    const auto lens = at::tensor({6, 4});
    const auto padded = at::arange(6).unsqueeze(0) >= lens.unsqueeze(1);
    REQUIRE(agree(ours->forward(x), swapped(theirs->forward(swapped(x)))));
    const auto real = padded.logical_not().unsqueeze(2);
    REQUIRE(agree(ours->forward(x, EncoderInputs().kv_lens(lens)) * real,
                  swapped(theirs->forward(swapped(x), {}, padded)) * real));
    REQUIRE(training->is_training());
    REQUIRE_FALSE(at::equal(training->forward(x), training->forward(x)));
    REQUIRE(training->dropout == 0.5);
    REQUIRE(training->mlp.as<FeedForward>()->options.dropout() == 0.5);
    REQUIRE(training->self_attn.as<MultiHeadAttention>()->options.dropout() == 0.5);
  }
}

TEST_CASE("a decoder layer of torch::nn under a causal mask is a block with cross-attention") {
  torch::manual_seed(0);
  auto theirs =
      randomised(tnn::TransformerDecoderLayer(tnn::TransformerDecoderLayerOptions(24, 4).dim_feedforward(32)));
  theirs->eval();
  auto ours = convert::from_torch(theirs);
  const auto x = draw({2, 5, 24}), memory = draw({2, 7, 24});
  const auto lens = at::tensor({7, 3});
  const auto padded = at::arange(7).unsqueeze(0) >= lens.unsqueeze(1);
  const auto wanted = swapped(theirs->forward(swapped(x), swapped(memory), causal_mask(5), {}, {}, padded));
  REQUIRE(agree(ours->forward(x, DecoderBlockInputs(memory).context_lens(lens)), wanted));
  const auto cache = std::make_shared<DynamicCache>();
  const torch::NoGradGuard no_grad;
  std::vector<at::Tensor> steps;
  for (const auto& token : x.split(1, 1))
    steps.push_back(ours->forward(token, DecoderBlockInputs(memory).context_lens(lens).cache(cache)));
  REQUIRE(agree(at::cat(steps, 1), wanted));
}

TEST_CASE("a converted layer has weights of its own, and what was frozen stays frozen") {
  torch::manual_seed(0);
  tnn::TransformerEncoderLayer theirs(tnn::TransformerEncoderLayerOptions(24, 4).dim_feedforward(32));
  theirs->linear1->weight.set_requires_grad(false);
  theirs->self_attn->in_proj_weight.set_requires_grad(false);
  auto ours = convert::from_torch(theirs);
  const auto trained = state_dict(*ours);
  for (const auto& [name, tensor] : trained) {
    const bool frozen =
        name == "mlp.up_proj.weight" || (name.rfind("self_attn.", 0) == 0 && name.find("o_proj") == std::string::npos &&
                                         name.find("weight") != std::string::npos);
    INFO(name);
    REQUIRE(tensor.requires_grad() != frozen);
    REQUIRE(tensor.is_leaf());
  }
  const auto before = trained.at("mlp.down_proj.weight").detach().clone();
  theirs->linear2->weight.detach().zero_();
  REQUIRE(at::equal(ours->mlp.as<FeedForward>()->down_proj->weight, before));
}

TEST_CASE("what attnpack does not have is refused by its name") {
  const auto made = [](const tnn::MultiheadAttentionOptions& options) {
    return [=] { convert::from_torch(tnn::MultiheadAttention(options)); };
  };
  REQUIRE(
      complains("add_bias_kv: got a module with it", made(tnn::MultiheadAttentionOptions(24, 4).add_bias_kv(true))));
  REQUIRE(complains("add_zero_attn: got a module with it",
                    made(tnn::MultiheadAttentionOptions(24, 4).add_zero_attn(true))));
  const std::function<at::Tensor(const at::Tensor&)> own = [](const at::Tensor& x) { return x; };
  REQUIRE(complains("activation: got a function, want torch::kReLU or torch::kGELU", [&] {
    convert::from_torch(tnn::TransformerEncoderLayer(tnn::TransformerEncoderLayerOptions(24, 4).activation(own)));
  }));
  REQUIRE(complains("module: got an empty holder", [] { convert::from_torch(tnn::TransformerEncoderLayer(nullptr)); }));
}

}  // namespace attnpack
