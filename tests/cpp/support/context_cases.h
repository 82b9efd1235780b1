#pragma once

// Attention over parts of a sequence against attention of one process, for threads and for processes.
#include <attnpack/distributed/attention.h>
#include <attnpack/distributed/collectives.h>
#include <attnpack/layers/alibi.h>

#include "ranks.h"

namespace context_cases {

namespace parallel = attnpack::distributed;
using attnpack::AttentionOptions;
using parallel::Layout;
using parallel::Method;
using ranks::Group;

constexpr int64_t kLength = 24, kDim = 8, kValueDim = 6;

struct Heads {
  int64_t query, kv;
  std::optional<std::vector<int64_t>> map;
};

struct Case {
  std::string name;
  AttentionOptions options;
  Heads heads{6, 2, std::nullopt};
  bool sinks = false;
  int64_t kv_len = kLength;
};

inline std::vector<Case> cases() {
  using O = AttentionOptions;
  const auto slopes = at::tensor(attnpack::alibi_slopes(6), at::kDouble);
  return {{"causal", O().causal(true)},
          {"all keys", O()},
          {"window, soft cap, sinks", O().causal(true).window({5, 0}).softcap(1.5), {6, 2, {}}, true},
          {"window to the right, alibi", O().window({2, 3}).alibi_slopes(slopes)},
          {"wide window", O().window({std::numeric_limits<int64_t>::max(), std::numeric_limits<int64_t>::max()})},
          {"lengths, sinks", O().causal(true).kv_lens(at::tensor({24, 5})), {6, 2, {}}, true},
          {"no keys", O().kv_lens(at::tensor({0, 17}))},
          {"head map", O().causal(true).scale(0.7), {6, 2, std::vector<int64_t>{1, 0, 0, 1, 1, 1}}},
          {"head map with a gap", O().causal(true), {4, 3, std::vector<int64_t>{2, 0, 2, 0}}},
          {"one kv head", O().causal(true), {6, 1, {}}},
          {"fewer heads than ranks", O().causal(true), {3, 3, {}}, true},
          {"other length", O().causal(true).kv_lens(at::tensor({32, 13})), {6, 2, {}}, false, 32}};
}

// Over out, lse and all gradients.
inline std::string attention_is_near(const Group& group, const Case& c, Layout layout, Method method) {
  using ranks::draw;
  std::vector<at::Tensor> whole{draw({2, c.heads.query, kLength, kDim}, 1), draw({2, c.heads.kv, c.kv_len, kDim}, 2),
                                draw({2, c.heads.kv, c.kv_len, kValueDim}, 3)};
  const auto shard = [&](const at::Tensor& x) { return parallel::shard_sequence(x, group, 2, layout); };
  std::vector<at::Tensor> own;
  for (auto& x : whole) {
    own.push_back(shard(x).requires_grad_());
    x.requires_grad_();
  }
  const auto sinks = draw({c.heads.query}, 5).requires_grad_(), own_sinks = sinks.detach().clone().requires_grad_();
  auto options = c.options, own_options = c.options;
  options.head_map(c.heads.map).sinks(c.sinks ? std::optional(sinks) : std::nullopt);
  own_options.head_map(c.heads.map).sinks(c.sinks ? std::optional(own_sinks) : std::nullopt);
  const auto [out, lse] = attnpack::attention_with_lse(whole[0], whole[1], whole[2], options);
  const auto [part, part_lse] =
      parallel::attention_with_lse(own[0], own[1], own[2], group, own_options, layout, method);
  const auto upstream = draw(out.sizes(), 9), lse_upstream = draw(lse.sizes(), 10);
  const auto loss = [](const at::Tensor& x, const at::Tensor& y, const at::Tensor& up, const at::Tensor& y_up) {
    return (x * up).sum() + (y.masked_fill(y.isinf(), 0) * y_up).sum();
  };
  loss(out, lse, upstream, lse_upstream).backward();
  loss(part, part_lse, shard(upstream), shard(lse_upstream)).backward();
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs{{part, shard(out)}, {part_lse, shard(lse)}};
  for (size_t i = 0; i < 3; ++i) pairs.emplace_back(own[i].grad(), shard(whole[i].grad()));
  if (c.sinks) pairs.emplace_back(parallel::all_reduce(own_sinks.grad(), group), sinks.grad());
  return ranks::compared(pairs);
}

inline std::vector<std::pair<Method, std::string>> methods() {
  return {{Method::kAllGather, "all-gather"}, {Method::kUlysses, "ulysses"}, {Method::kRing, "ring"}};
}

// "near", or the first case that is not.
inline std::string all_are_near(const Group& group) {
  for (const auto& [method, name] : methods()) {
    for (const auto layout : {Layout::kContiguous, Layout::kZigzag}) {
      for (const auto& each : cases()) {
        const auto found = attention_is_near(group, each, layout, method);
        if (found != "near")
          return name + (layout == Layout::kZigzag ? ", zigzag, " : ", contiguous, ") + each.name + ": " + found;
      }
    }
  }
  return "near";
}

// "near" if ranks that mean different calls are told so.
inline std::string difference_is_said(const Group& group) {
  const auto x = ranks::draw({1, 2, 4, 8}, 1);
  try {
    parallel::attention(x, x, x, group, AttentionOptions().causal(group->getRank() == 1));
    return "no error";
  } catch (const c10::Error& error) {
    const std::string said = error.what_without_backtrace();
    return ranks::contains(said, "rank 0 has causal 0, rank 1 has causal 1") ? "near" : said;
  }
}

}  // namespace context_cases
