#pragma once

// Models whose heads and vocabulary the ranks share, against one process.
#include <attnpack/distributed/collectives.h>
#include <attnpack/models/generate.h>

#include "context_modules.h"

namespace shared_models {

using namespace attnpack;
namespace parallel = attnpack::distributed;
using ranks::draw;
using ranks::Group;

// Output and gradient of the input, and the output after a step along the gradients of all parameters.
template <typename Call>
std::vector<at::Tensor> step(torch::nn::Module& module, const at::Tensor& x, const Call& call) {
  const auto input = x.is_floating_point() ? x.detach().clone().requires_grad_() : x;
  const auto out = call(input);
  (out * draw(out.sizes(), 9)).sum().backward();
  const at::NoGradGuard no_grad;
  for (auto& parameter : distinct_parameters(module))
    if (parameter.grad().defined()) parameter.sub_(parameter.grad(), 0.03);
  return {out.detach(), x.is_floating_point() ? input.grad() : out.detach(), call(x)};
}

inline std::string near(const std::vector<at::Tensor>& got, const std::vector<at::Tensor>& wanted) {
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs;
  for (size_t i = 0; i < got.size(); ++i) pairs.emplace_back(got[i], wanted[i]);
  return ranks::compared(pairs);
}

struct Case {
  std::string name;
  int64_t vocab_size;
  std::function<CausalLM()> make;
};

inline std::vector<Case> cases() {
  const auto tiny = [](int64_t vocab_size) { return CausalLMOptions(vocab_size, 24, 2, 4).hidden_dim(20); };
  const auto grouped = [tiny](int64_t vocab_size) { return tiny(vocab_size).num_kv_heads(1).qk_norm(true).bias(true); };
  const auto latent = context_modules::latent().rope(nullptr).causal(false);
  return {
      {"tied", 19, [=] { return CausalLM(grouped(19).tie_embeddings(true)); }},
      {"tied, latent", 20, [=] { return CausalLM(tiny(20).latent(latent).tie_embeddings(true)); }},
      {"a head, soft cap", 18, [=] { return CausalLM(grouped(18).final_softcap(3).embed_scale(2)); }},
      {"a head with a bias", 19,
       [=] {
         CausalLM model(grouped(19));
         model->lm_head = model->replace_module("lm_head", Linear(LinearOptions(24, 19).bias(true)));
         return model;
       }},
      {"a head that is tied by hand", 19,
       [=] {
         CausalLM model(grouped(19));
         model->lm_head->assign_parameter("weight", model->model->embed_tokens->weight);
         return model;
       }},
      {"fewer tokens than ranks", 3, [=] { return CausalLM(grouped(3).tie_embeddings(true)); }},
      {"learned positions", 21, [=] { return CausalLM(grouped(21).position_embedding("learned").max_positions(16)); }},
  };
}

// Whether the ranks hold the rows of the vocabulary, all of them, each a share, and ties are ties.
inline std::string rows_are_shared(const Group& group, CausalLM& model, const Case& c) {
  const auto& table = model->model->embed_tokens->weight;
  const auto head = model->lm_head ? model->lm_head->weight : table;
  for (const auto& weight : {table, head}) {
    const auto own = weight.size(0), ranks = int64_t{group->getSize()};
    if (own > (c.vocab_size + ranks - 1) / ranks) return "too many rows";
    if (parallel::all_reduce(at::tensor(own), group).item<int64_t>() != c.vocab_size) return "rows are lost";
  }
  const bool by_hand = c.name == "a head that is tied by hand";
  return by_hand == (model->lm_head && head.is_same(table)) ? "near" : "a tie is lost";
}

// Tokens of one process, greedy and drawn from a seed; and of seeds by rank, where each rank would draw its own.
inline std::string tokens_are_equal(const Group& group, CausalLM& shared, CausalLM& whole, const at::Tensor& ids) {
  const int64_t count = 3;  // the prompt's, and two of steps: each takes a second of sockets in all cases together
  const auto tokens = [&](CausalLM& model, GenerateOptions options) { return generate(*model, ids, options); };
  for (const std::string cache : {"dynamic", "static", "none"}) {
    const auto options = GenerateOptions(count).cache(cache);
    if (!tokens(shared, options).equal(tokens(whole, options))) return cache + ": other tokens";
  }
  const auto drawn = GenerateOptions(count).temperature(1.0).seed(3);
  if (!tokens(shared, drawn).equal(tokens(whole, drawn))) return "other tokens drawn";
  const auto many = GenerateOptions(count).temperature(2.0).num_return_sequences(4).seed(group->getRank());
  const auto all = parallel::all_gather(tokens(shared, many).unsqueeze(0), group);
  return all.eq(all[0]).all().item<bool>() ? "near" : "the ranks draw other tokens";
}

inline std::string model_is_near(const Group& group, const Case& c) {
  auto whole = ranks::made(c.make), shared = ranks::made(c.make);
  const auto shares = parallel::tensor_parallel(*shared, group);
  if (const auto found = rows_are_shared(group, shared, c); found != "near") return found;
  const auto ids = at::arange(14).view({2, 7}).remainder(c.vocab_size);
  const auto run = [](CausalLM& model) { return [&](const at::Tensor& x) { return model(x); }; };
  const auto stepped = near(step(*shared, ids, run(shared)), step(*whole, ids, run(whole)));
  if (stepped != "near") return stepped;
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs;
  const auto gradients = shares.whole_of(context_modules::gradients_of(*shared));
  for (const auto& [name, gradient] : context_modules::gradients_of(*whole))
    pairs.emplace_back(gradients.at(name), gradient);
  if (const auto found = ranks::compared(pairs); found != "near") return "gradients: " + found;
  const auto tensors = state_dict(*whole);
  load_state_dict(*shared, shares.part_of(tensors));
  const auto back = shares.whole_of(state_dict(*shared));
  for (const auto& [name, tensor] : back) {
    if (!tensor.equal(tensors.at(name))) return name + " has changed";
    for (const auto& [other, each] : back)  // ties stay ties
      if (tensor.is_same(each) != tensors.at(name).is_same(tensors.at(other))) return name + " and " + other;
  }
  return tokens_are_equal(group, shared, whole, ids);
}

inline std::string all_are_near(const Group& group) {
  for (const auto& each : cases()) {
    const auto found = model_is_near(group, each);
    if (found != "near") return each.name + ": " + found;
  }
  return "near";
}

}  // namespace shared_models
