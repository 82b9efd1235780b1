// Several processes, each of which is a thread here: a rank with a gloo group of its own. Results are those of one
// process.
#include <attnpack/cache/dynamic_cache.h>
#include <attnpack/distributed/attention.h>
#include <attnpack/distributed/collectives.h>
#include <attnpack/distributed/sharded_cache.h>
#include <attnpack/distributed/tensor_parallel.h>
#include <attnpack/layers/alibi.h>
#include <attnpack/modules/feed_forward.h>
#include <attnpack/modules/mixture_of_experts.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "catch.h"
#include "shared_models.h"

namespace {

using namespace attnpack;
namespace parallel = attnpack::distributed;
using context_modules::grouped;
using context_modules::latent;
using parallel::Group;
using parallel::Layout;
using ranks::compared;
using ranks::contains;
using ranks::draw;
using ranks::made;
using ranks::on_ranks;
using shared_models::near;
using shared_models::step;
using Results = std::vector<std::string>;

std::vector<std::pair<AttentionOptions, std::string>> rules() {
  const auto slopes = at::tensor(alibi_slopes(6), at::kDouble);
  return {{AttentionOptions().causal(true), "causal"},
          {AttentionOptions(), "all keys"},
          {AttentionOptions().causal(true).window({5, 0}).softcap(1.5), "window, soft cap"},
          {AttentionOptions().window({2, 3}).alibi_slopes(slopes), "window to the right, alibi"},
          {AttentionOptions().causal(true).head_map(std::vector<int64_t>{1, 0, 0, 1, 1, 1}).scale(0.7), "head map"}};
}

}  // namespace

TEST_CASE("what is not supported, and what differs between ranks, is an error on all of them") {
  const auto call = [](const Group& group, const AttentionOptions& options, int64_t length = 4) {
    const auto x = draw({1, 2, length, 8}, 1);
    parallel::attention(x, x, x, group, options);
    return std::string("no error");
  };
  const auto all_say = [](const std::vector<std::string>& results, const std::string& text) {
    for (const auto& result : results) CHECK(contains(result, text));
  };
  all_say(on_ranks(2, [&](const Group& g) { return call(g, AttentionOptions().mask(at::ones({4, 4}))); }),
          "mask: got a tensor [4, 4], which is not supported over several processes");
  all_say(on_ranks(2, [&](const Group& g) { return call(g, AttentionOptions().dropout_p(0.5)); }),
          "dropout_p: got 0.5");
  all_say(on_ranks(2, [&](const Group& g) { return call(g, AttentionOptions().q_offset(3)); }), "q_offset: got one");
  all_say(
      on_ranks(
          2, [&](const Group& g) { return call(g, AttentionOptions().key_index(at::zeros({1, 1, 4, 2}, at::kLong))); }),
      "key_index: got a tensor [1, 1, 4, 2], which is not supported over several processes");
  all_say(on_ranks(2, [&](const Group& g) { return call(g, {}, 4 + g->getRank()); }),
          "different arguments: rank 0 has query float32 [1, 2, 4, 8]; key float32 [1, 2, 4, 8]; value float32 [1, 2, "
          "4, 8], "
          "rank 1 has query float32 [1, 2, 5, 8]; ");
  all_say(on_ranks(2, [&](const Group& g) { return call(g, AttentionOptions().causal(g->getRank() == 1)); }),
          "different arguments: rank 0 has causal 0, rank 1 has causal 1, want the same on all ranks");
  const auto one_wrong = on_ranks(2, [&](const Group& g) {
    return call(g, g->getRank() ? AttentionOptions().kv_lens(at::tensor({99})) : AttentionOptions());
  });
  CHECK(contains(one_wrong[0], "kv_lens: got"));
  CHECK(contains(one_wrong[1], "kv_lens: got"));
  all_say(on_ranks(2,
                   [](const Group& g) {
                     parallel::gloo_group(nullptr, g->getRank(), 2);
                     return std::string("no error");
                   }),
          "store: got none");
}

TEST_CASE("inputs of a shared module whose shapes differ between ranks are an error on all of them") {
  const auto results = on_ranks(2, [](const Group& group) -> std::string {
    auto layer = made([] { return FeedForward(FeedForwardOptions(8, 6)); });
    parallel::tensor_parallel(*layer, group);
    layer(draw({1, 3 + group->getRank(), 8}, 1));
    return "no error";
  });
  for (const auto& result : results)
    CHECK(contains(result, "give a module different arguments: rank 0 has x float32 [1, 3, 8]"));
}

TEST_CASE("a rank that does not come gives the others a sentence within the timeout") {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::thread> threads;
  std::string said;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      const auto group = parallel::gloo_group(store, rank, 2, std::chrono::milliseconds(500));
      try {
        if (rank == 0) parallel::all_reduce(at::ones({2}), group);
        std::this_thread::sleep_for(std::chrono::milliseconds(rank * 1500));
      } catch (const c10::Error& error) {
        said = error.what_without_backtrace();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  CHECK(contains(said, "attnpack: a collective of 2 processes failed on rank 0: another process died"));
}

TEST_CASE("a cache whose positions the ranks share gives the numbers of one process") {
  for (const int ranks : {2, 3}) {
    const auto results = on_ranks(ranks, [](const Group& group) -> std::string {
      for (auto [options, name] : rules()) {
        options.sinks(draw({6}, 5));
        parallel::ShardedCache cache(group);
        at::Tensor keys, values;
        int64_t past = 0;
        for (const int64_t length : {5, 1, 1, 3}) {
          const auto q = draw({2, 6, length, 8}, past), k = draw({2, 2, length, 8}, past + 20),
                     v = draw({2, 2, length, 5}, past + 40);
          keys = past ? at::cat({keys, k}, 2) : k;
          values = past ? at::cat({values, v}, 2) : v;
          auto plain = options;
          const auto wanted = attention(q, keys, values, plain.q_offset(past));
          const auto found = compared({{cache.attend(q, k, v, options), wanted}});
          past += length;
          if (found != "near") return name + ": " + found;
          if (cache.len() != past) return "length";
        }
        const auto held = parallel::all_reduce(at::tensor(cache.nbytes()), group).item<int64_t>();
        if (held != 2 * 2 * past * (8 + 5) * 4) return "bytes " + std::to_string(held);
      }
      return "near";
    });
    CHECK(results == std::vector<std::string>(ranks, "near"));
  }
}

namespace {

using Modules = std::vector<std::function<Part<TokenModule>()>>;

// An attention module under the interface of a module that maps x to x.
template <typename Holder>
struct SelfImpl : torch::nn::Module, TokenModule {
  explicit SelfImpl(Holder made) : inner(register_module("inner", std::move(made))) {}
  at::Tensor forward(const at::Tensor& x) override { return inner->forward(x); }
  Holder inner;
};

template <typename Holder>
Part<TokenModule> self(Holder inner) {
  return std::static_pointer_cast<torch::nn::Module>(std::make_shared<SelfImpl<Holder>>(std::move(inner)));
}

Modules modules() {
  return {
      [] { return self(GroupedQueryAttention(grouped(4))); },
      [] { return self(GroupedQueryAttention(grouped(1).qk_norm(true).sinks(true).alibi(true))); },
      [] { return self(GroupedQueryAttention(grouped(3).head_map(std::vector<int64_t>{2, 2, 0, 1, 1, 0, 0, 2}))); },
      [] { return self(MultiHeadAttention(MultiHeadAttentionOptions(24, 4).window(Window{3, 0}).softcap(2))); },
      [] { return self(MultiQueryAttention(MultiQueryAttentionOptions(24, 4).bias(true))); },
      [] { return self(MultiHeadLatentAttention(latent())); },
      [] { return self(MultiHeadLatentAttention(latent().q_lora_rank(9).bias(true).gate("element"))); },
      [] { return self(GroupedQueryAttention(grouped(1).q_lora_rank(9).gate("head").gate_activation("softplus"))); },
      [] { return self(GroupedQueryAttention(grouped(4).gate("element").keys_as_values(true).qk_norm(true))); },
      [] { return Part<TokenModule>(FeedForward(FeedForwardOptions(24, 20).bias(true))); },
      [] { return Part<TokenModule>(FeedForward(FeedForwardOptions(24, 5).activation("gelu"))); },
      [] {
        return Part<TokenModule>(MixtureOfExperts(MixtureOfExpertsOptions(24, 10, 4, 2).shared_dim(6).normalize(true)));
      },
  };
}

}  // namespace

TEST_CASE("modules whose heads the ranks share give numbers and gradients of one process") {
  for (const int ranks : {2, 4}) {
    const auto results = on_ranks(ranks, [](const Group& group) -> std::string {
      int number = 0;
      for (const auto& make : modules()) {
        const auto make_module = [&] { return std::make_shared<Part<TokenModule>>(make())->module(); };
        const auto run = [](const std::shared_ptr<torch::nn::Module>& module) {
          return [module](const at::Tensor& x) { return dynamic_cast<TokenModule&>(*module).forward(x); };
        };
        const auto whole = made(make_module), shared = made(make_module);
        for (auto& parameter : shared->parameters()) parameter.requires_grad_(false);
        parallel::tensor_parallel(*shared, group);
        for (auto& parameter : shared->parameters()) parameter.requires_grad_(true);  // it remembers what to sum
        const auto x = draw({2, 7, 24}, 3);
        const auto found = near(step(*shared, x, run(shared)), step(*whole, x, run(whole)));
        if (found != "near") return "module " + std::to_string(number) + ": " + found;
        ++number;
      }
      return "near";
    });
    CHECK(results == std::vector<std::string>(ranks, "near"));
  }
}

TEST_CASE("a model whose heads and vocabulary the ranks share trains and generates as one process") {
  for (const int ranks : {2, 4}) CHECK(on_ranks(ranks, shared_models::all_are_near) == Results(ranks, "near"));
}

TEST_CASE("encoder and decoder whose vocabulary the ranks share give numbers and tokens of one process") {
  const auto results = on_ranks(2, [](const Group& group) -> std::string {
    const auto make = [] {
      const Embedding tokens(19, 24);  // of both
      const auto self = [](bool causal) { return GroupedQueryAttention(grouped(2).causal(causal)); };
      const auto cross = GroupedQueryAttention(grouped(1).causal(false).rope(nullptr));
      const EncoderBlock reader(EncoderBlockOptions(self(false), FeedForward(FeedForwardOptions(24, 20))));
      const DecoderBlock writer(
          DecoderBlockOptions(self(true), FeedForward(FeedForwardOptions(24, 20))).cross_attention(cross));
      return EncoderDecoder(Encoder(EncoderOptions({reader}).embed_tokens(tokens)),
                            Decoder(DecoderOptions({writer}).embed_tokens(tokens)));
    };
    auto whole = made(make), shared = made(make);
    parallel::tensor_parallel(*shared, group);
    if (shared->decoder->embed_tokens->weight.size(0) == 19) return "whole";
    const auto source = at::arange(14).view({2, 7}), target = at::arange(6).view({2, 3});
    const auto run = [&](EncoderDecoder& model) { return [&](const at::Tensor& x) { return model(source, x); }; };
    const auto found = near(step(*shared, target, run(shared)), step(*whole, target, run(whole)));
    if (found != "near") return found;
    const auto tokens = [&](EncoderDecoder& model) { return generate(*model, source, target, GenerateOptions(5)); };
    return tokens(shared).equal(tokens(whole)) ? "near" : "other tokens";
  });
  CHECK(results == Results(2, "near"));
}

TEST_CASE("ids outside a shared vocabulary, and ids that differ between ranks, are an error on all of them") {
  const auto said = [](const auto& ids_of) {
    return on_ranks(2, [&](const Group& group) -> std::string {
      auto model = made([] { return CausalLM(CausalLMOptions(19, 24, 1, 4)); });
      parallel::tensor_parallel(*model, group);
      model(ids_of(group->getRank()));
      return "no error";
    });
  };
  for (const int64_t wrong : {-1, 19}) {
    for (const auto& result : said([&](int) { return at::full({1, 2}, wrong, at::kLong); }))
      CHECK(contains(result, "ids holds " + std::to_string(wrong) + ", wants 0 to 18"));
  }
  const auto one = said([](int rank) { return at::full({1, 2}, 19 * rank, at::kLong); });
  for (const auto& result : one) CHECK(contains(result, "ids holds 19"));
  for (const auto& result : said([](int rank) { return at::zeros({1, 2 + rank}, at::kLong); }))
    CHECK(contains(result, "give a model different arguments: rank 0 has ids int64 [1, 2]"));
}

TEST_CASE("modules that cannot be shared are refused, and left as they are") {
  const auto said = [](const auto& make) {
    const auto results = on_ranks(2, [&](const Group& group) -> std::string {
      auto module = made(make);
      const auto before = module->parameters();
      std::string error = "no error";
      try {
        parallel::tensor_parallel(*module, group);
      } catch (const c10::Error& raised) {
        error = raised.what_without_backtrace();
      }
      const auto after = module->parameters();
      for (size_t i = 0; i < before.size(); ++i)
        if (!after[i].is_same(before[i])) return "changed";
      return error;
    });
    CHECK(results[0] == results[1]);
    return results[0];
  };
  const auto attention = [](const GroupedQueryAttentionOptions& options) {
    return [=] {  // beside a feed-forward, which could be shared
      return DecoderBlock(DecoderBlockOptions(GroupedQueryAttention(options), FeedForward(FeedForwardOptions(24, 6))));
    };
  };
  CHECK(contains(said(attention(GroupedQueryAttentionOptions(24, 3, 3))), "num_heads: got 3 heads of grouped"));
  CHECK(contains(said(attention(grouped(4).qk_norm(QkNorm(true).all_heads(true)))), "qk_norm: got a norm over all"));
  CHECK(contains(said(attention(grouped(4).dropout(0.1))), "dropout: got 0.1, which is not supported"));
  const auto tiny = [] { return CausalLMOptions(19, 24, 1, 4); };
  CHECK(contains(said([&] { return CausalLM(tiny().dropout(0.1)); }), "dropout: got 0.1, which is not supported"));
  CHECK(contains(said([&] { return CausalLM(tiny().attention_dropout(0.2)); }), "dropout: got 0.2"));
  CHECK(contains(said([] { return FeedForward(FeedForwardOptions(8, 6).dropout(0.3)); }), "dropout: got 0.3"));

  struct PairImpl : torch::nn::Module {
    Linear head = register_module("head", Linear(24, 19));  // a layer that stays whole
    CausalLM model = register_module("model", CausalLM(CausalLMOptions(19, 24, 1, 4).tie_embeddings(true)));
    PairImpl() { head->assign_parameter("weight", model->model->embed_tokens->weight); }
  };
  CHECK(contains(said([] { return std::make_shared<PairImpl>(); }),
                 "weight is a weight that stands in another place too, of which ranks have another share there"));
}
