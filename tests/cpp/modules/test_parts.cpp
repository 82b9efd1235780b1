// Parts of blocks and stacks in a program without Python: layers by number, torch's modules as parts, LoRA, dropout.
#include <torch/torch.h>

#include "catch.h"
#include "complains.h"

#include <attnpack/attnpack.h>

namespace attnpack {

namespace {

MultiHeadAttention attention() { return MultiHeadAttention(MultiHeadAttentionOptions(24, 4).rope(RotaryEmbedding(6))); }

}  // namespace

TEST_CASE("a layer of a stack is reached by its number, and its parts as what they are") {
  torch::manual_seed(0);
  CausalLM model(CausalLMOptions(32, 24, 2, 4).num_kv_heads(2));
  REQUIRE(model->layer(1).ptr() == model->model->layers->ptr(1));
  auto* heads = model->layer(1)->self_attn.as<GroupedQueryAttention>();
  REQUIRE(heads != nullptr);
  REQUIRE(heads->options.num_kv_heads() == 2);
  REQUIRE(model->layer(0)->self_attn.as<MultiHeadAttention>() == nullptr);
  REQUIRE(model->layer(0)->mlp.as<FeedForwardImpl>()->options.hidden_dim() == 96);
  REQUIRE(Part<TokenModule>().as<FeedForward>() == nullptr);
  REQUIRE(complains("layer: got 2, want 0 to 1", [&] { model->layer(2); }));
  Encoder encoder(EncoderOptions({EncoderBlock(attention(), FeedForward(24, 32))}));
  REQUIRE(encoder->layer(0)->self_attn.as<MultiHeadAttention>() != nullptr);
}

TEST_CASE("modules of torch can be a block's feed-forward") {
  torch::manual_seed(0);
  torch::nn::Sequential inner(torch::nn::Linear(24, 32), torch::nn::ReLU(), torch::nn::Linear(32, 24));
  EncoderBlock block(attention(), inner);
  FeedForward same(FeedForwardOptions(24, 32).activation("relu").bias(true));
  StateDict state = state_dict(*block), wanted;
  REQUIRE(state.count("mlp.0.weight") == 1);
  wanted = {{"up_proj.weight", state["mlp.0.weight"]},
            {"up_proj.bias", state["mlp.0.bias"]},
            {"down_proj.weight", state["mlp.2.weight"]},
            {"down_proj.bias", state["mlp.2.bias"]}};
  load_state_dict(*same, wanted);
  EncoderBlock peer(block->self_attn, same);
  const auto x = torch::randn({2, 5, 24});
  REQUIRE(at::allclose(block(x), peer(x), 1e-5, 1e-6));

  const auto copy = std::dynamic_pointer_cast<EncoderBlockImpl>(block->clone());
  REQUIRE(at::equal(copy->forward(x), block(x)));
  {
    torch::NoGradGuard no_grad;
    for (auto& parameter : inner->parameters()) parameter.zero_();
  }
  REQUIRE_FALSE(at::allclose(copy->forward(x), block(x)));
  REQUIRE(copy->mlp.as<torch::nn::Sequential>() != inner.get());

  DecoderBlock linear(attention(), torch::nn::Linear(24, 24));
  REQUIRE(state_dict(*linear).count("mlp.weight") == 1);
  REQUIRE(linear->forward(x).sizes() == x.sizes());
  REQUIRE(complains("does not do what its place needs", [] { EncoderBlock(attention(), attention()); }));
}

TEST_CASE("LoRA: a projection's weight may be any tensor, and gradients reach what it was made of") {
  torch::manual_seed(0);
  auto layer = attention();
  for (auto& parameter : layer->parameters()) parameter.set_requires_grad(false);
  const auto base = layer->q_proj->weight;
  const auto a = torch::randn({2, 24}).set_requires_grad(true), b = torch::zeros({24, 2}).set_requires_grad(true);
  const auto x = torch::randn({2, 5, 24});
  const auto before = layer->forward(x);
  layer->q_proj->weight = base + b.matmul(a);  // again after each step of an optimiser over a and b
  REQUIRE(at::equal(layer->forward(x), before));
  layer->forward(x).pow(2).sum().backward();
  REQUIRE(b.grad().abs().max().item<float>() > 0);
  REQUIRE_FALSE(base.grad().defined());
  REQUIRE(at::equal(state_dict(*layer)["q_proj.weight"], base));
  b.detach().fill_(0.1);
  layer->q_proj->weight = base + b.matmul(a);
  REQUIRE_FALSE(at::allclose(layer->forward(x), before));
  layer->q_proj->bind_members();  // the module's own weight again
  REQUIRE(at::equal(layer->forward(x), before));
}

TEST_CASE("dropout acts only in training") {
  torch::manual_seed(0);
  const auto x = torch::randn({2, 5, 24});
  EncoderBlock block(
      EncoderBlockOptions(attention(), FeedForward(FeedForwardOptions(24, 32).dropout(0.5))).dropout(0.5));
  REQUIRE_FALSE(at::equal(block(x), block(x)));
  block->eval();
  EncoderBlock plain(block->self_attn, FeedForward(24, 32));
  load_state_dict(*plain, state_dict(*block));
  REQUIRE(at::equal(block(x), plain(x)));
  REQUIRE(complains("dropout: got 1, want 0 <= dropout < 1",
                    [] { EncoderBlock(EncoderBlockOptions(attention(), FeedForward(24, 32)).dropout(1)); }));
}

TEST_CASE("encode and decode are the halves of forward, and the context is projected once") {
  torch::manual_seed(0);
  const torch::NoGradGuard no_grad;
  Encoder encoder(EncoderOptions({EncoderBlock(attention(), FeedForward(24, 32))}));
  Decoder decoder(DecoderOptions(
      {DecoderBlock(DecoderBlockOptions(attention(), FeedForward(24, 32)).cross_attention(attention()))}));
  EncoderDecoder model(encoder, decoder);
  const auto source = torch::randn({2, 7, 24}), target = torch::randn({2, 4, 24});
  const auto lens = at::tensor({7, 5});
  const auto wanted = model(source, target, EncoderDecoderInputs().source_lens(lens));
  const auto context = model->encode(source, lens);
  REQUIRE(at::equal(model->decode(context, target, EncoderDecoderInputs().source_lens(lens)), wanted));
  const auto inputs =
      EncoderDecoderInputs().cache(std::make_shared<ModelCache>(1)).cross_cache(model->new_cross_cache());
  std::vector<at::Tensor> steps;
  for (const auto& token : target.split(1, 1)) {
    auto own = inputs;
    if (steps.empty()) own.source_lens(lens);
    steps.push_back(model->decode(steps.empty() ? context : at::Tensor(), token, own));
  }
  REQUIRE(at::allclose(at::cat(steps, 1), wanted, 1e-4, 1e-5));
  REQUIRE(complains("context: got none, but no cross_cache holds it", [&] { model->decode({}, target); }));
}

TEST_CASE("the library says its version and its instruction set") {
  REQUIRE(std::string(version()) == ATTNPACK_VERSION);
  const std::string isa = instruction_set();
  REQUIRE((isa == "baseline" || isa.rfind("avx", 0) == 0));
}

TEST_CASE("fixed positions are sines and cosines") {
  const auto table = sinusoidal_positions(9, 6);
  REQUIRE(table.sizes() == at::IntArrayRef({9, 6}));
  REQUIRE(std::abs(table[3][2].item<double>() - std::sin(3 / std::pow(10000.0, 2.0 / 6))) < 1e-6);
  REQUIRE(std::abs(table[3][3].item<double>() - std::cos(3 / std::pow(10000.0, 2.0 / 6))) < 1e-6);
  REQUIRE(complains("dim: got 5, want an even number", [] { sinusoidal_positions(2, 5); }));
}

}  // namespace attnpack
