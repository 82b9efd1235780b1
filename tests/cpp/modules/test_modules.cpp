// The modules in a program without Python: options, shapes, clone, training, caches, generation, errors.
#include <torch/torch.h>

#include "catch.h"
#include "close.h"
#include "complains.h"

#include <attnpack/attnpack.h>

namespace attnpack {

namespace {

bool same(const at::Tensor& a, const at::Tensor& b) { return at::equal(a, b); }

DecoderBlock make_block(bool cross = false) {
  auto options = DecoderBlockOptions(
      GroupedQueryAttention(GroupedQueryAttentionOptions(24, 4, 2).rope(RotaryEmbedding(6)).qk_norm(true)),
      FeedForward(24, 32));
  if (cross) options.cross_attention(MultiHeadAttention(24, 4)).norm("layer");
  return DecoderBlock(options);
}

CausalLM make_model() {
  torch::manual_seed(0);
  CausalLM model(CausalLMOptions(32, 24, 2, 4).num_kv_heads(2).hidden_dim(32));
  model->eval();
  return model;
}

}  // namespace

TEST_CASE("attention modules are the operator between projections") {
  torch::manual_seed(0);
  GroupedQueryAttention layer(GroupedQueryAttentionOptions(24, 4, 2).causal(true).bias(true).out_bias(false));
  REQUIRE(layer->o_proj->bias.defined() == false);
  REQUIRE(layer->k_proj->weight.sizes() == at::IntArrayRef({12, 24}));
  const auto x = torch::randn({2, 5, 24});
  const auto heads = [](const at::Tensor& t, int64_t n) { return t.view({2, 5, n, 6}).transpose(1, 2); };
  const auto q = heads(at::linear(x, layer->q_proj->weight, layer->q_proj->bias), 4);
  const auto k = heads(at::linear(x, layer->k_proj->weight, layer->k_proj->bias), 2).repeat_interleave(2, 1);
  const auto v = heads(at::linear(x, layer->v_proj->weight, layer->v_proj->bias), 2).repeat_interleave(2, 1);
  const auto scores = at::matmul(q, k.transpose(2, 3)) / std::sqrt(6.0);
  const auto hidden = at::ones({5, 5}, at::kBool).triu(1);
  const auto probs = scores.masked_fill(hidden, -INFINITY).softmax(-1);
  const auto wanted = at::linear(at::matmul(probs, v).transpose(1, 2).flatten(2), layer->o_proj->weight);
  REQUIRE(close(layer->forward(x), wanted));
  const auto [out, weights] = layer->forward_with_weights(x);
  REQUIRE(same(out, layer(x)));
  REQUIRE(close(weights, probs));
  REQUIRE(close(std::get<0>(layer->project(x)), q));
}

TEST_CASE("every kind of attention runs with and without a context") {
  torch::manual_seed(0);
  const auto x = torch::randn({2, 5, 24}), context = torch::randn({2, 7, 10});
  MultiHeadAttention cross(MultiHeadAttentionOptions(24, 4).kdim(10).vdim(10));
  REQUIRE(cross->forward(x, context).sizes() == x.sizes());
  const auto mask = at::zeros({2, 1, 1, 7}, at::kBool);
  REQUIRE(cross->forward(x, AttentionInputs(context).mask(mask)).abs().max().item<float>() == 0);
  REQUIRE(SelfAttention(24, 16)->forward(x).sizes() == at::IntArrayRef({2, 5, 16}));
  REQUIRE(MultiQueryAttention(MultiQueryAttentionOptions(24, 4).head_dim(8))->forward(x).sizes() == x.sizes());
  const auto kv = torch::randn({2, 5, 12});
  REQUIRE(ProjectedAttention(4, 2, 6)->forward(x, kv, kv).sizes() == x.sizes());
  torch::nn::Sequential stacked(MultiHeadAttention(24, 4), MultiQueryAttention(24, 4), FeedForward(24, 48));
  REQUIRE(stacked->forward(x).sizes() == x.sizes());
}

TEST_CASE("clone copies parts and keeps the type") {
  torch::manual_seed(0);
  Decoder decoder(DecoderOptions({make_block(), make_block()}));
  const auto x = torch::randn({2, 5, 24});
  auto copy = std::dynamic_pointer_cast<DecoderImpl>(decoder->clone());
  REQUIRE(copy != nullptr);
  REQUIRE(same(copy->forward(x), decoder->forward(x)));
  REQUIRE(copy->parameters().size() == decoder->parameters().size());
  {
    torch::NoGradGuard no_grad;
    for (auto& parameter : copy->parameters()) parameter.mul_(2);
  }
  REQUIRE_FALSE(close(copy->forward(x), decoder->forward(x)));
  auto model = make_model();
  auto twin = std::dynamic_pointer_cast<CausalLMImpl>(model->clone());
  const auto ids = torch::randint(32, {1, 4}, at::kLong);
  REQUIRE(same(twin->forward(ids), model->forward(ids)));
}

TEST_CASE("an embedding of encoder and decoder is one parameter, of the clone too") {
  torch::manual_seed(0);
  Embedding table(16, 24);
  Encoder encoder(EncoderOptions({EncoderBlock(MultiHeadAttention(24, 4), FeedForward(24, 32))}).embed_tokens(table));
  EncoderDecoder model(encoder, Decoder(DecoderOptions({make_block(true)}).embed_tokens(table)));
  const auto ids = torch::randint(16, {2, 5}, at::kLong);
  const auto step = [&](EncoderDecoderImpl& each) {
    const auto weight = each.decoder->embed_tokens->weight;
    const auto before = weight.detach().clone();
    torch::optim::SGD optimiser(each.parameters(), torch::optim::SGDOptions(0.1));
    each.forward(ids, ids).pow(3).sum().backward();
    optimiser.step();
    REQUIRE(weight.grad().abs().max().item<float>() > 1);
    return close(weight, before - 0.1 * weight.grad());
  };
  REQUIRE(step(*model));
  const auto copy = std::dynamic_pointer_cast<EncoderDecoderImpl>(model->clone());
  REQUIRE(copy->encoder->embed_tokens->weight.is_same(copy->decoder->embed_tokens->weight));
  REQUIRE_FALSE(copy->encoder->embed_tokens->weight.is_same(table->weight));
  REQUIRE(same(copy->forward(ids, ids), model->forward(ids, ids)));
  REQUIRE(step(*copy));

  struct OwnImpl : torch::nn::Module {
    explicit OwnImpl(EncoderDecoder inner) { register_module("inner", inner); }
  } around(model);
  REQUIRE(around.parameters().size() == distinct_parameters(around).size() + 1);
}

TEST_CASE("a causal encoder block is causal") {
  torch::manual_seed(0);
  const auto x = torch::randn({1, 6, 24}), changed = at::cat({x.narrow(1, 0, 5), torch::randn({1, 1, 24})}, 1);
  for (const bool causal : {true, false}) {
    EncoderBlock block(MultiHeadAttention(MultiHeadAttentionOptions(24, 4).causal(causal)), FeedForward(24, 32));
    const auto first = [&](const at::Tensor& input) { return block->forward(input).narrow(1, 0, 5); };
    REQUIRE(same(first(x), first(changed)) == causal);
  }
}

TEST_CASE("a fresh tied model knows nothing yet") {
  torch::manual_seed(0);
  CausalLM model(CausalLMOptions(512, 64, 2, 4).tie_embeddings(true));
  const auto ids = torch::randint(512, {2, 32}, at::kLong);
  const auto loss = torch::nll_loss(model->forward(ids).flatten(0, 1).log_softmax(1), ids.roll(-1, 1).flatten());
  REQUIRE(std::abs(loss.item<float>() - std::log(512.0)) < 0.3);
  REQUIRE(std::abs(model->model->embed_tokens->weight.std().item<float>() - 0.02) < 0.002);
  REQUIRE(complains("init_std: got -1", [] { CausalLM(CausalLMOptions(8, 24, 1, 4).init_std(-1)); }));
}

TEST_CASE("the umbrella's functions beside torch's of the same names") {
  using namespace torch;
  using namespace attnpack;
  const auto x = torch::randn({3, 4}), weight = torch::randn({5, 4});
  REQUIRE(close(attnpack::linear(x, weight), at::matmul(x, weight.t())));
  REQUIRE(close(linear(x, weight), at::matmul(x, weight.t())));
  REQUIRE(close(rms_norm(x, torch::ones(4), 1e-6), x * x.square().mean(-1, true).add(1e-6).rsqrt()));
  REQUIRE(alibi_slopes(2) == std::vector<double>{0.0625, 0.00390625});
  REQUIRE(attnpack::Linear(4, 5)->forward(x).sizes() == at::IntArrayRef({3, 5}));
}

TEST_CASE("a module made on meta takes tensors by name and shares them") {
  torch::manual_seed(0);
  MultiHeadAttention layer(24, 4);
  Factory meta;
  meta.device = at::kMeta;
  MultiHeadAttention twin(MultiHeadAttentionOptions(24, 4).factory(meta));
  REQUIRE(twin->q_proj->weight.is_meta());
  assign_state_dict(*twin, state_dict(*layer));
  const auto x = torch::randn({2, 5, 24});
  REQUIRE(same(twin->forward(x), layer->forward(x)));
  REQUIRE(complains("x: got device cpu, want the module's device meta; its weights hold no numbers",
                    [&] { MultiHeadAttention(MultiHeadAttentionOptions(24, 4).factory(meta))->forward(x); }));
  const auto ids = at::zeros({1, 3}, at::kLong);
  REQUIRE(complains("ids: got device cpu, want the module's device meta; its weights hold no numbers",
                    [&] { CausalLM(CausalLMOptions(8, 24, 1, 4).factory(meta))->forward(ids); }));
  twin->forward(x).sum().backward();
  REQUIRE(layer->q_proj->weight.grad().defined());
  REQUIRE(same(std::dynamic_pointer_cast<MultiHeadAttentionImpl>(twin->clone())->forward(x), layer->forward(x)));
}

TEST_CASE("steps with a cache equal the whole") {
  torch::manual_seed(0);
  torch::NoGradGuard no_grad;
  auto block = make_block();
  const auto x = torch::randn({2, 6, 24});
  const auto whole = block->forward(x);
  const std::vector<std::shared_ptr<KVCache>> caches = {std::make_shared<DynamicCache>(),
                                                        std::make_shared<StaticCache>(2, 2, 6, 6)};
  for (const auto& cache : caches) {
    std::vector<at::Tensor> steps;
    for (const auto& token : x.split(2, 1)) steps.push_back(block->forward(token, DecoderBlockInputs().cache(cache)));
    REQUIRE(close(at::cat(steps, 1), whole));
    REQUIRE(cache->len() == 6);
    REQUIRE(cache->k().sizes() == at::IntArrayRef({2, 2, 6, 6}));
    auto copy = cache->clone();
    cache->crop(2);
    REQUIRE(cache->len() == 2);
    REQUIRE(copy->len() == 6);
    cache->reorder(at::tensor({1, 0}, at::kLong));
    REQUIRE(same(cache->k()[0], copy->k()[1].narrow(1, 0, 2)));
  }
  REQUIRE(complains("cache", [&] { block->forward(torch::randn({2, 7, 24}), DecoderBlockInputs().cache(caches[1])); }));
  REQUIRE(caches[1]->len() == 2);
}

TEST_CASE("an encoder-decoder trains") {
  torch::manual_seed(0);
  Encoder encoder(EncoderOptions({EncoderBlock(MultiHeadAttention(24, 4), FeedForward(24, 32))}));
  EncoderDecoder model(encoder, Decoder(DecoderOptions({make_block(true)}).norm("none")));
  const auto source = torch::randn({2, 7, 24}), target = torch::randn({2, 5, 24}), wanted = torch::randn({2, 5, 24});
  torch::optim::Adam optimiser(model->parameters(), torch::optim::AdamOptions(1e-2));
  float first = 0, last = 0;
  for (int step = 0; step < 20; ++step) {
    optimiser.zero_grad();
    auto loss = (model->forward(source, target) - wanted).square().mean();
    loss.backward();
    optimiser.step();
    (step == 0 ? first : last) = loss.item<float>();
  }
  REQUIRE(last < first);
}

TEST_CASE("generation is the same with every cache") {
  auto model = make_model();
  const auto ids = torch::randint(32, {2, 4}, at::kLong);
  const auto tokens = generate(*model, ids, GenerateOptions(6));
  REQUIRE(tokens.sizes() == at::IntArrayRef({2, 10}));
  for (const char* cache : {"static", "none"}) {
    REQUIRE(same(generate(*model, ids, GenerateOptions(6).cache(cache)), tokens));
  }
  int calls = 0;
  generate(*model, ids, GenerateOptions(6).callback([&](const at::Tensor&) { return ++calls < 2; }));
  REQUIRE(calls == 2);
  REQUIRE(complains("int2", [&] { generate(*model, ids, GenerateOptions(6).cache("int2")); }));
}

TEST_CASE("a window of the model is that of its layers") {
  auto model = make_model();
  CausalLM windowed(CausalLMOptions(32, 24, 2, 4).num_kv_heads(2).hidden_dim(32).window(Window{2, 0}));
  load_state_dict(*windowed, state_dict(*model));
  const auto ids = torch::randint(32, {2, 9}, at::kLong);
  const auto near = torch::ones({9, 9}, at::kBool).triu(-2);  // causality cuts the other side
  REQUIRE(close(windowed->forward(ids), model->forward(ids, CausalLMInputs().mask(near))));
  REQUIRE(!close(windowed->forward(ids), model->forward(ids)));
}

TEST_CASE("wrong arguments are named") {
  REQUIRE(complains("num_heads: got 5", [&] { MultiHeadAttention(24, 5); }));
  REQUIRE(complains("num_kv_heads: got 3", [&] { GroupedQueryAttention(24, 4, 3); }));
  REQUIRE(complains("softcap is -30", [&] { MultiHeadAttention(MultiHeadAttentionOptions(24, 4).softcap(-30)); }));
  REQUIRE(complains("num_kv_heads: got 2, MultiHeadAttention has 4; use GroupedQueryAttention",
                    [&] { MultiHeadAttention(MultiHeadAttentionOptions(24, 4).num_kv_heads(2)); }));
  const std::vector<int64_t> map{0, 0, 0, 0};
  REQUIRE(complains("head_map: got one, MultiQueryAttention has none",
                    [&] { MultiQueryAttention(MultiQueryAttentionOptions(24, 4).head_map(map)); }));
  MultiHeadAttention layer(24, 4);
  REQUIRE(complains("x: got shape [5, 24]", [&] { layer->forward(torch::randn({5, 24})); }));
  REQUIRE(complains("does not do", [&] { DecoderBlock(FeedForward(24, 32).ptr(), FeedForward(24, 32)); }));
  REQUIRE(complains("missing", [&] { load_state_dict(*layer, {}); }));
}

TEST_CASE("what does not fit is named before anything is written") {
  REQUIRE(complains("feed_forward: got width 20, want 24",
                    [] { EncoderBlock(EncoderBlockOptions(MultiHeadAttention(24, 4), FeedForward(20, 32))); }));
  REQUIRE(complains("attention: gives width 1, want its embed_dim 24",
                    [] { EncoderBlock(EncoderBlockOptions(SelfAttention(24, 1), FeedForward(24, 32))); }));
  REQUIRE(complains("attention: got none, want an attention module",
                    [] { EncoderBlock(EncoderBlockOptions(GroupedQueryAttention{nullptr}, FeedForward(24, 32))); }));
  REQUIRE(complains("feed_forward: got none, want a module",
                    [] { DecoderBlock(DecoderBlockOptions(MultiHeadAttention(24, 4), FeedForward{nullptr})); }));
  REQUIRE(complains("layers[0]: got an empty holder, want a block",
                    [] { Encoder(EncoderOptions(std::vector<EncoderBlock>{EncoderBlock{nullptr}})); }));
  REQUIRE(complains("in_features: got -4, want 0 or more", [] { Linear(-4, 3); }));
  REQUIRE(complains("out_features: got -3, want 0 or more", [] { Linear(4, -3); }));
  REQUIRE(complains("attention: got none", [] { DecoderBlock(DecoderBlockOptions(nullptr, FeedForward(24, 32))); }));

  MultiHeadAttention layer(24, 4);
  const auto x = torch::randn({2, 5, 24});
  REQUIRE(complains("positions has shape [4]",
                    [&] { layer->forward(x, AttentionInputs().positions(at::arange(4, at::kLong))); }));
  REQUIRE(complains("value_context: got length 3, want 5",
                    [&] { layer->forward(x, AttentionInputs(x).value_context(x.narrow(1, 0, 3))); }));

  torch::nn::Linear foreign(2, 2);
  REQUIRE(complains("bias belongs to a module that is not attnpack's",
                    [&] { assign_state_dict(*foreign, state_dict(*foreign)); }));

  auto model = make_model();
  auto cache = model->dynamic_cache();
  const auto ids = at::arange(1, 7, at::kLong).view({2, 3});
  model->forward(ids, CausalLMInputs().cache(cache));
  REQUIRE(complains("ids holds 32, wants 0 to 31", [&] { model->forward(ids + 26, CausalLMInputs().cache(cache)); }));
  REQUIRE(complains("lengths has shape [1], wants [batch] = [2]",
                    [&] { model->forward(ids, CausalLMInputs().cache(cache).lengths(at::tensor({3}, at::kLong))); }));
  REQUIRE(complains("index[1] is 2, wants 0 to 1", [&] { cache->reorder(at::tensor({0, 2}, at::kLong)); }));
  REQUIRE(cache->len() == 3);
}

}  // namespace attnpack
