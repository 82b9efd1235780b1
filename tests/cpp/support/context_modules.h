#pragma once

// Modules over parts of a sequence, and checkpoints of shared modules, against one process.
#include <attnpack/distributed/context_parallel.h>
#include <attnpack/distributed/tensor_parallel.h>
#include <attnpack/models/causal_lm.h>
#include <attnpack/modules/attention/differential_attention.h>
#include <attnpack/modules/attention/grouped_attention.h>
#include <attnpack/modules/attention/latent_attention.h>
#include <attnpack/modules/attention/self_attention.h>
#include <attnpack/modules/block.h>
#include <attnpack/modules/feed_forward.h>

#include "context_cases.h"

namespace context_modules {

using namespace attnpack;
namespace parallel = attnpack::distributed;
using context_cases::Layout;
using context_cases::Method;
using ranks::draw;
using ranks::Group;

constexpr int64_t kLength = 16, kWidth = 24;

inline GroupedQueryAttentionOptions grouped(int64_t kv_heads) {
  return GroupedQueryAttentionOptions(kWidth, 8, kv_heads).head_dim(6).bias(true).causal(true).rope(RotaryEmbedding(6));
}

inline MultiHeadLatentAttentionOptions latent() {
  return MultiHeadLatentAttentionOptions(kWidth, 4)
      .kv_lora_rank(10)
      .qk_nope_head_dim(4)
      .qk_rope_head_dim(6)
      .v_head_dim(5)
      .causal(true)
      .rope(RotaryEmbedding(6));
}

// A module, and how it is called with x [2, L, E] or ids [2, L], and a context [2, Lkv, E].
struct Made {
  std::shared_ptr<torch::nn::Module> module;
  std::function<at::Tensor(const at::Tensor& x, const at::Tensor& context)> call;
};

template <typename Holder>
Made over_keys(Holder layer, AttentionInputs inputs = {}) {
  return {layer.ptr(), [=](const at::Tensor& x, const at::Tensor&) mutable { return layer->forward(x, inputs); }};
}

inline Made model(const CausalLMOptions& options, const CausalLMInputs& inputs = {}) {
  CausalLM made(options);
  return {made.ptr(), [=](const at::Tensor& ids, const at::Tensor&) mutable { return made->forward(ids, inputs); }};
}

struct Case {
  std::string name;
  std::function<Made()> make;
  bool ids = false;
};

inline std::vector<Case> cases() {
  const auto lens = at::tensor({kLength, int64_t{9}});
  const auto tiny = [] { return CausalLMOptions(19, kWidth, 2, 4).hidden_dim(20).tie_embeddings(true); };
  return {
      {"grouped", [] { return over_keys(GroupedQueryAttention(grouped(4))); }},
      {"all settings",
       [] {
         return over_keys(GroupedQueryAttention(
             grouped(2).sinks(true).alibi(true).qk_norm(true).softcap(1.5).window(Window{5, 0}).gate("head")));
       }},
      {"head map",
       [] {
         return over_keys(GroupedQueryAttention(grouped(3).head_map(std::vector<int64_t>{2, 2, 0, 1, 1, 0, 0, 2})));
       }},
      {"lengths", [=] { return over_keys(GroupedQueryAttention(grouped(2)), AttentionInputs().kv_lens(lens)); }},
      {"self", [] { return over_keys(SelfAttention(SelfAttentionOptions(kWidth).causal(true))); }},
      {"differential",
       [] {
         return over_keys(DifferentialAttention(
             DifferentialAttentionOptions(kWidth, 4, 2).head_dim(6).causal(true).rope(RotaryEmbedding(6))));
       }},
      {"latent", [] { return over_keys(MultiHeadLatentAttention(latent().q_lora_rank(9).bias(true))); }},
      {"latent, lengths",
       [=] { return over_keys(MultiHeadLatentAttention(latent()), AttentionInputs().kv_lens(lens)); }},
      {"folded", [] { return over_keys(MultiHeadLatentAttention(latent().folded(true))); }},
      {"cross-attention",
       [] {
         DecoderBlock block(
             DecoderBlockOptions(GroupedQueryAttention(grouped(1)), FeedForward(FeedForwardOptions(kWidth, 16)))
                 .cross_attention(GroupedQueryAttention(grouped(2))));
         return Made{block.ptr(), [=](const at::Tensor& x, const at::Tensor& context) mutable {
                       return block->forward(x, DecoderBlockInputs().context(context));
                     }};
       }},
      {"model", [=] { return model(tiny().num_kv_heads(1), CausalLMInputs().lengths(lens)); }, true},
      {"learned positions", [=] { return model(tiny().position_embedding("learned").max_positions(kLength)); }, true},
  };
}

// Output, and the gradients of the weights, added up over the ranks.
inline std::string module_is_near(const Group& group, const Case& c, Layout layout, Method method) {
  Made whole, spread;
  const auto fill = [&](Made& into) {
    return ranks::made([&] {
      into = c.make();
      return into.module;
    });
  };
  fill(whole);
  fill(spread);
  const auto x = c.ids ? at::arange(2 * kLength).view({2, kLength}).remainder(5) : draw({2, kLength, kWidth}, 3);
  const auto context = draw({2, 8, kWidth}, 4);
  const auto shard = [&](const at::Tensor& t) { return parallel::shard_sequence(t, group, 1, layout); };
  const auto out = whole.call(x, context);
  const auto upstream = draw(out.sizes(), 9);
  (out * upstream).sum().backward();
  at::Tensor part;
  {
    const parallel::ContextParallel scope(group, parallel::ContextParallelOptions().layout(layout).method(method));
    part = spread.call(shard(x), shard(context));
  }
  (part * shard(upstream)).sum().backward();
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs{{part, shard(out)}};
  const auto wanted = state_dict(*whole.module);
  for (const auto& [name, parameter] : state_dict(*spread.module)) {
    if (parameter.grad().defined())
      pairs.emplace_back(parallel::all_reduce(parameter.grad(), group), wanted.at(name).grad());
  }
  return ranks::compared(pairs);
}

inline std::string all_are_near(const Group& group) {
  for (const auto& [method, name] : context_cases::methods()) {
    for (const auto layout : {Layout::kContiguous, Layout::kZigzag}) {
      if (layout == Layout::kContiguous && group->getSize() > 2) continue;  // two ranks show it
      for (const auto& each : cases()) {
        const auto found = module_is_near(group, each, layout, method);
        if (found != "near") return name + ", " + each.name + ": " + found;
      }
    }
  }
  return "near";
}

inline StateDict gradients_of(const torch::nn::Module& module) {
  StateDict gradients;
  for (const auto& [name, parameter] : state_dict(module))
    if (parameter.grad().defined()) gradients[name] = parameter.grad();
  return gradients;
}

// A checkpoint of one process goes into shared modules, and comes back bit for bit. So do gradients.
inline std::string checkpoint_comes_back(const Group& group) {
  const auto tiny = [] { return CausalLMOptions(19, kWidth, 2, 4).hidden_dim(21).tie_embeddings(true); };
  const auto with_sinks = ScoreSettings().sinks(true);
  for (const auto& options :
       {tiny().num_kv_heads(1).bias(true).scores(with_sinks), tiny().num_kv_heads(2).qk_norm(true),
        tiny().latent(latent().rope(nullptr).causal(false).q_lora_rank(9))}) {
    auto whole = ranks::made([&] { return CausalLM(options); });
    auto shared = ranks::made([&] { return CausalLM(options); });
    const auto shares = parallel::tensor_parallel(*shared, group);
    for (auto& parameter : shared->parameters()) parameter.detach().zero_();
    const auto tensors = state_dict(*whole);
    const auto part = shares.part_of(tensors);
    load_state_dict(*shared, part);
    const auto ids = at::arange(14).view({2, 7}).remainder(5);
    const auto out = shared(ids), wanted = whole(ids);
    std::vector<std::pair<at::Tensor, at::Tensor>> pairs{{out, wanted}};
    for (const auto& each : {out, wanted}) (each * draw(each.sizes(), 9)).sum().backward();
    const auto gradients = shares.whole_of(gradients_of(*shared));
    for (const auto& [name, gradient] : gradients_of(*whole)) pairs.emplace_back(gradients.at(name), gradient);
    const auto found = ranks::compared(pairs);
    if (found != "near") return found;
    int64_t smaller = 0;
    for (const auto& [name, tensor] : part) smaller += tensor.numel() < tensors.at(name).numel();
    if (smaller < 10) return "too few parts: " + std::to_string(smaller);
    for (const auto& [name, tensor] : shares.whole_of(state_dict(*shared)))
      if (!tensor.equal(tensors.at(name))) return name + " has changed";
  }
  return "near";
}

}  // namespace context_modules
