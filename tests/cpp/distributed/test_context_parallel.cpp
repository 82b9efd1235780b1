// Context parallelism: attention and modules over a sequence that is sharded over the ranks, here threads.
#include <ATen/autocast_mode.h>
#include <attnpack/cache/dynamic_cache.h>
#include <attnpack/distributed/detail/pieces.h>
#include <attnpack/models/generate.h>

#include "catch.h"
#include "context_modules.h"
#include "counted_group.h"

namespace {

using namespace attnpack;
namespace parallel = attnpack::distributed;
using parallel::ContextParallel;
using parallel::ContextParallelOptions;
using parallel::Group;
using parallel::Layout;
using parallel::Method;
using ranks::contains;
using ranks::draw;
using ranks::on_ranks;
using Results = std::vector<std::string>;

}  // namespace

TEST_CASE("attention over parts of a sequence gives numbers and gradients of one process") {
  for (const int size : {1, 2, 4}) CHECK(on_ranks(size, context_cases::all_are_near) == Results(size, "near"));
}

TEST_CASE("modules over parts of a sequence give numbers and gradients of one process") {
  for (const int size : {2, 4}) CHECK(on_ranks(size, context_modules::all_are_near) == Results(size, "near"));
}

TEST_CASE("a checkpoint of one process goes into shared modules and comes back") {
  for (const int size : {2, 4}) CHECK(on_ranks(size, context_modules::checkpoint_comes_back) == Results(size, "near"));
}

TEST_CASE("a sequence comes back") {
  CHECK(on_ranks(4, [](const Group& group) {
          const auto x = draw({2, 16, 3}, 1);
          const auto part = parallel::shard_sequence(x, group, 1, Layout::kZigzag);
          return ranks::compared({{parallel::unshard_sequence(part, group, 1, Layout::kZigzag), x}});
        }) == Results(4, "near"));
}

TEST_CASE("heads over one group and the sequence over another one") {
  const auto pairs = std::array{c10::make_intrusive<c10d::HashStore>(), c10::make_intrusive<c10d::HashStore>(),
                                c10::make_intrusive<c10d::HashStore>(), c10::make_intrusive<c10d::HashStore>()};
  CHECK(on_ranks(4, [&](const Group& all) -> std::string {
          const int row = all->getRank() / 2, column = all->getRank() % 2;
          const auto heads = parallel::gloo_group(pairs[row], column, 2, std::chrono::seconds(20));
          const auto sequence = parallel::gloo_group(pairs[2 + column], row, 2, std::chrono::seconds(20));
          const auto make = [] { return GroupedQueryAttention(context_modules::grouped(1)); };
          auto whole = ranks::made(make), shared = ranks::made(make);
          parallel::tensor_parallel(*shared, heads);
          const auto x = draw({2, 8, 24}, 1);
          const ContextParallel scope(sequence, ContextParallelOptions().method(Method::kRing));
          const auto part = shared(parallel::shard_sequence(x, sequence));
          std::thread([&] {  // the scope is that of its thread
            whole->zero_grad();
            CHECK(whole(x).size(1) == 8);
          })
              .join();
          const ContextParallel inner(all, ContextParallelOptions().method(Method::kUlysses));
          const auto quarter = whole(parallel::shard_sequence(x, all));
          const auto wanted = parallel::unshard_sequence(quarter, all);
          return ranks::compared({{parallel::unshard_sequence(part, sequence), wanted}});
        }) == Results(4, "near"));
}

TEST_CASE("keys travel with as many heads as they have") {
  constexpr int64_t kBatch = 2, kLength = 16, kDim = 8, kValueDim = 6;
  for (const int size : {2, 4}) {
    for (const auto& [heads, kv_heads] : {std::pair<int64_t, int64_t>{8, 2}, {8, 1}, {8, 8}}) {
      const auto n = kLength / size, kv = kBatch * kv_heads * n * (kDim + kValueDim) * 4;
      const auto share = heads / size, read = std::max<int64_t>(kv_heads / size, 1);
      const auto away = kBatch * n * 4 * (size - 1);  // bytes of one head of the positions for every other rank
      const auto there = away * (share * kDim + read * (kDim + kValueDim)), back = away * share * (kValueDim + 1);
      for (const auto& [method, wanted] : std::vector<std::pair<Method, std::pair<int64_t, int64_t>>>{
               {Method::kAllGather, {(size - 1) * kv, (size - 1) * kv}},
               {Method::kRing, {(size - 1) * kv, (2 * size - 1) * kv}},
               {Method::kUlysses, {there + back, there + back - away * share}}}) {
        const auto results =
            on_ranks(size, [&, heads = heads, kv_heads = kv_heads, method = method](const Group& plain) {
              const auto counted = ranks::counted(plain);
              std::vector<at::Tensor> own{draw({kBatch, heads, n, kDim}, 1), draw({kBatch, kv_heads, n, kDim}, 2),
                                          draw({kBatch, kv_heads, n, kValueDim}, 3)};
              for (auto& x : own) x.requires_grad_();
              const auto out = parallel::attention(own[0], own[1], own[2], counted.group,
                                                   AttentionOptions().causal(true), Layout::kContiguous, method);
              const auto forward = counted.take();
              out.sum().backward();
              return std::to_string(forward) + " " + std::to_string(counted.take());
            });
        CHECK(results == Results(size, std::to_string(wanted.first) + " " + std::to_string(wanted.second)));
      }
    }
  }
}

TEST_CASE("latents travel in place of keys and values") {
  const auto results = on_ranks(2, [](const Group& plain) {
    const auto counted = ranks::counted(plain);
    auto layer = ranks::made([] { return MultiHeadLatentAttention(context_modules::latent()); });
    const ContextParallel scope(counted.group);
    const auto out = layer(draw({2, 8, 24}, 1));
    return std::to_string(counted.take());
  });
  CHECK(results == Results(2, std::to_string(2 * 8 * (10 + 6) * 4)));
}

TEST_CASE("the gradient of a piece is the same by the kernel and by the join") {
  using O = AttentionOptions;
  for (const auto& rules : {O().causal(true).sinks(draw({4}, 7)), O().window({5, 2}).softcap(1.5),
                            O().kv_lens(at::tensor({3, 20})).head_map(std::vector<int64_t>{1, 0, 0, 1})}) {
    const auto query = draw({2, 4, 24, 8}, 1), key = draw({2, 2, 24, 8}, 2), value = draw({2, 2, 24, 6}, 3);
    const parallel::Piece rows{0, 24}, keys{8, 20};
    const auto [out, lse] = parallel::attend_piece(query, key, value, rules, rows, {0, 24});
    const auto grad_lse = draw({2, 4, 24}, 5).masked_fill(lse.isinf(), 0);
    for (const auto& given : {std::optional(grad_lse), std::optional<at::Tensor>()}) {
      const parallel::RowsBefore before{query, out, lse, draw({2, 4, 24, 6}, 4), given};
      const auto k = key.narrow(2, 8, 12), v = value.narrow(2, 8, 12);
      const auto a = parallel::backward_by_kernel(before, k, v, rules, rows, keys);
      const auto b = parallel::backward_by_join(before, k, v, rules, rows, keys);
      std::vector<std::pair<at::Tensor, at::Tensor>> pairs{{a.query, b.query}, {a.key, b.key}, {a.value, b.value}};
      if (rules.sinks()) pairs.emplace_back(a.sinks, b.sinks);
      CHECK(ranks::compared(pairs) == "near");
    }
  }
}

TEST_CASE("half precision and autocast give one dtype, and gradients") {
  for (const auto& [method, name] : context_cases::methods()) {
    const auto results = on_ranks(2, [method = method](const Group& group) -> std::string {
      for (const bool autocast : {false, true}) {
        const auto dtype = autocast ? at::kFloat : at::kBFloat16;
        const auto whole = draw({2, 4, 16, 8}, 1).to(dtype);
        const auto x = parallel::shard_sequence(whole, group, 2).requires_grad_();
        at::autocast::set_autocast_enabled(at::kCPU, autocast);
        const auto out =
            parallel::attention(x, x, x, group, AttentionOptions().causal(true), Layout::kContiguous, method);
        at::autocast::set_autocast_enabled(at::kCPU, false);
        if (out.scalar_type() != at::kBFloat16) return "dtype of out";
        out.sum().backward();
        if (x.grad().scalar_type() != dtype) return "dtype of the gradient";
        const auto wanted = attention(whole.to(at::kFloat), whole.to(at::kFloat), whole.to(at::kFloat),
                                      AttentionOptions().causal(true));
        const auto part = parallel::shard_sequence(wanted, group, 2);
        if (!at::allclose(out.to(at::kFloat), part, 0.02, 0.02)) return "far";
      }
      return "near";
    });
    CHECK(results == Results(2, "near"));
  }
}

TEST_CASE("a sequence may be empty") {
  for (const auto& [method, name] : context_cases::methods()) {
    const auto results = on_ranks(2, [method = method](const Group& group) -> std::string {
      const auto x = at::zeros({2, 4, 0, 8}).requires_grad_();
      const auto out = parallel::attention(x, x, x, group, {}, Layout::kZigzag, method);
      out.sum().backward();
      return out.sizes() == x.sizes() && x.grad().sizes() == x.sizes() ? "near" : "shapes";
    });
    CHECK(results == Results(2, "near"));
  }
}

namespace {

void all_say(const Results& results, const std::string& text) {
  for (const auto& result : results) {
    INFO(result);
    CHECK(contains(result, text));
  }
}

// The error of a call under a scope of two ranks.
template <typename Call>
Results said(const Call& call, const ContextParallelOptions& options = {}) {
  return on_ranks(2, [&](const Group& group) {
    auto layer = ranks::made([] { return GroupedQueryAttention(context_modules::grouped(2)); });
    const ContextParallel scope(group, options);
    call(layer, draw({2, 4, 24}, 1), group->getRank());
    return std::string("no error");
  });
}

}  // namespace

TEST_CASE("what modules do not do over parts of a sequence is an error on all ranks") {
  using Layer = GroupedQueryAttention;
  all_say(said([](Layer& layer, const at::Tensor& x, int rank) {
            layer->forward(x, rank ? AttentionInputs().mask(at::ones({4, 4})) : AttentionInputs());
          }),
          "mask");
  all_say(said([](Layer& layer, const at::Tensor& x, int) {
            layer->forward(x, AttentionInputs().cache(std::make_shared<DynamicCache>()));
          }),
          "cache: got one under ContextParallel");
  all_say(said([](Layer& layer, const at::Tensor& x, int) { layer->forward_with_weights(x); }),
          "weights are asked for under ContextParallel");
  all_say(said([](Layer& layer, const at::Tensor& x, int) {
            layer->forward(x, AttentionInputs().positions(at::arange(3)));
          }),
          "positions: got [3], want 4");
  all_say(said([](Layer& layer, const at::Tensor& x, int rank) { layer(x.narrow(1, 0, 4 - rank)); }),
          "different arguments: rank 0 has query float32 [2, 8, 4, 6]");
  all_say(said([](Layer& layer, const at::Tensor& x, int) { layer(x.narrow(1, 0, 3)); },
               ContextParallelOptions().layout(Layout::kZigzag)),
          "query: got 3 positions on a rank, want an even number");
  all_say(said([](Layer& layer, const at::Tensor& x, int) {
            layer->forward(x, AttentionInputs().kv_lens(at::tensor({9, 1})));
          }),
          "kv_lens: got");
  all_say(said([](Layer&, const at::Tensor& x, int) {
            auto dropping = GroupedQueryAttention(context_modules::grouped(2).dropout(0.1));
            dropping(x);
          }),
          "dropout_p: got 0.1");
  all_say(said([](Layer&, const at::Tensor& x, int) {
            const auto rope =
                RotaryEmbedding(RotaryEmbeddingOptions(6).scaling(RopeScaling().rope_type("dynamic").factor(2)));
            GroupedQueryAttention layer(context_modules::grouped(2).rope(rope));
            layer(x);
          }),
          "rope: got frequencies that follow the length under ContextParallel");
  all_say(said([](Layer&, const at::Tensor&, int) {
            CausalLM model(CausalLMOptions(19, 24, 1, 4));
            generate(*model, at::arange(4).view({1, 4}), GenerateOptions(2));
          }),
          "generate is called under ContextParallel");
  CHECK_THROWS_WITH(ContextParallel(nullptr), Catch::Contains("group: got none"));
}

TEST_CASE("after an error, and after its scope, a module is that of one process") {
  const auto results = on_ranks(2, [](const Group& group) -> std::string {
    auto layer = ranks::made([] { return GroupedQueryAttention(context_modules::grouped(2)); });
    const auto x = draw({2, 4, 24}, 1);
    const auto wanted = layer(x);
    try {
      const ContextParallel scope(group);
      layer->forward(x, AttentionInputs().mask(at::ones({4, 4})));
      return "no error";
    } catch (const c10::Error&) {
    }
    return layer(x).equal(wanted) ? "near" : "other numbers";
  });
  CHECK(results == Results(2, "near"));
}

TEST_CASE("second derivatives are those of one process, and a ring refuses them") {
  // The gradients of a gradient's square.
  const auto second = [](const auto& attend, const std::vector<at::Tensor>& given) {
    std::vector<at::Tensor> leaves;
    for (const auto& x : given) leaves.push_back(x.clone().requires_grad_());
    at::Tensor sum = at::zeros({});
    for (const auto& grad : torch::autograd::grad({attend(leaves).square().sum()}, leaves, {}, /*retain_graph=*/true,
                                                  /*create_graph=*/true))
      sum = sum + grad.square().sum();
    return torch::autograd::grad({sum}, leaves);
  };
  for (const auto& [method, name] : context_cases::methods()) {
    const auto results = on_ranks(2, [&, method = method](const Group& group) -> std::string {
      const auto options = AttentionOptions().causal(true);
      const std::vector<at::Tensor> whole{draw({1, 4, 8, 8}, 1), draw({1, 2, 8, 8}, 2), draw({1, 2, 8, 8}, 3)};
      std::vector<at::Tensor> own;
      for (const auto& x : whole) own.push_back(parallel::shard_sequence(x, group, 2));
      const auto got = second(
          [&](const auto& x) {
            return parallel::attention(x[0], x[1], x[2], group, options, Layout::kContiguous, method);
          },
          own);
      const auto wanted = second([&](const auto& x) { return attention(x[0], x[1], x[2], options); }, whole);
      std::vector<std::pair<at::Tensor, at::Tensor>> pairs;
      for (size_t i = 0; i < got.size(); ++i) pairs.emplace_back(got[i], parallel::shard_sequence(wanted[i], group, 2));
      return ranks::compared(pairs);
    });
    if (method == Method::kRing)
      all_say(results, "create_graph: got true for the backward of a ring over several processes");
    else
      CHECK(results == Results(2, "near"));
  }
}

TEST_CASE("a rank that does not come to a ring gives the others a sentence within the timeout") {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  Results said(2);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      const auto group = parallel::gloo_group(store, rank, 2, std::chrono::milliseconds(500));
      const auto x = draw({1, 2, 4, 8}, 1).requires_grad_();
      try {
        const auto out = parallel::attention(x, x, x, group, {}, Layout::kContiguous, Method::kRing);
        if (rank == 0) out.sum().backward();
      } catch (const c10::Error& error) {
        said[rank] = error.what_without_backtrace();
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(rank * 1500));
    });
  }
  for (auto& thread : threads) thread.join();
  CHECK(contains(said[0], "attnpack: a collective of 2 processes failed on rank 0: another process died"));
}

TEST_CASE("a checkpoint that does not fit shared modules is an error on all ranks") {
  const auto results = on_ranks(2, [](const Group& group) -> std::string {
    auto layer = ranks::made([] { return FeedForward(FeedForwardOptions(8, 6)); });
    const auto whole = state_dict(*layer);
    const auto shares = parallel::tensor_parallel(*layer, group);
    const auto error = [](const auto& call) -> std::string {
      try {
        call();
        return "no error; ";
      } catch (const c10::Error& error) {
        return error.what_without_backtrace() + std::string("; ");
      }
    };
    auto said = error([&] { shares.part_of(state_dict(*layer)); });
    said += error([&] { shares.whole_of(group->getRank() ? whole : state_dict(*layer)); });
    said += error([&] { shares.whole_of(group->getRank() ? StateDict{} : state_dict(*layer)); });
    return said;
  });
  for (const auto& text : results) {
    INFO(text);
    CHECK(
        contains(text, "got down_proj.weight of shape [8, 3], want 6 along dim 1, the length of the parameter of one"));
    CHECK(contains(text, "got down_proj.weight of shape [8, 6], want 3 along dim 1, the length of this rank's part"));
    CHECK(contains(text, "a state dict different arguments: rank 0 has down_proj.weight float32 [8, 6]; "));
    CHECK(contains(text, "rank 1 has none of these"));
  }
}
