// The operator in a program without Python: options, lse, head maps, gradients, errors, threads, the kernels' exp.
#include <torch/torch.h>

#include "catch.h"
#include "close.h"
#include "complains.h"

#include <attnpack/attnpack.h>

#include <cmath>
#include <thread>

#define ATTNPACK_ISA of_the_test  // the kernels' own arithmetic, compiled here
#include <attnpack/ops/cpu/isa/math.h>

namespace attnpack {

namespace {

struct Inputs {
  at::Tensor query, key, value;
};

Inputs make_inputs(int64_t q_len, int64_t kv_len, at::ScalarType dtype = at::kFloat) {
  torch::manual_seed(0);
  return {at::randn({2, 4, q_len, 8}).to(dtype), at::randn({2, 2, kv_len, 8}).to(dtype),
          at::randn({2, 2, kv_len, 6}).to(dtype)};
}

at::Tensor heads(const at::Tensor& x, const std::vector<int64_t>& map) {
  return x.index_select(1, at::tensor(map, at::kLong));
}

// softmax(query key^T / sqrt(8), masked) value by ATen, for query heads that read `map`.
std::tuple<at::Tensor, at::Tensor> plain(const Inputs& x, const at::Tensor& allowed,
                                         const std::vector<int64_t>& map = {0, 0, 1, 1}) {
  const auto products = x.query.matmul(heads(x.key, map).transpose(-2, -1)) / std::sqrt(8.0);
  const auto scores = products.masked_fill(allowed.logical_not(), -INFINITY);
  return {scores.softmax(-1).matmul(heads(x.value, map)), scores.logsumexp(-1)};
}

at::Tensor everything() { return at::ones({1, 1}, at::kBool); }

}  // namespace

TEST_CASE("attention is softmax of scaled products times value, decode and prefill") {
  for (const auto& [q_len, kv_len] : {std::pair{3, 700}, {50, 70}}) {
    const auto x = make_inputs(q_len, kv_len);
    REQUIRE(close(attention(x.query, x.key, x.value), std::get<0>(plain(x, everything()))));
  }
}

TEST_CASE("lse comes with the same out") {
  const auto x = make_inputs(50, 70);
  const auto [out, lse] = attention_with_lse(x.query, x.key, x.value);
  REQUIRE(at::equal(out, attention(x.query, x.key, x.value)));
  REQUIRE(close(lse, std::get<1>(plain(x, everything()))));
  const auto y = make_inputs(3, 5, at::kBFloat16);
  const auto [low_out, low_lse] = attention_with_lse(y.query, y.key, y.value);
  REQUIRE(low_out.scalar_type() == at::kBFloat16);
  REQUIRE(low_lse.scalar_type() == at::kFloat);
}

TEST_CASE("options for positions") {
  const auto x = make_inputs(5, 9);
  const auto column = at::arange(9), row = at::arange(5).unsqueeze(1);
  const auto run = [&](const AttentionOptions& options) { return attention(x.query, x.key, x.value, options); };
  const auto is = [&](const at::Tensor& out, const at::Tensor& allowed) {
    return close(out, std::get<0>(plain(x, allowed)));
  };
  REQUIRE(is(run(AttentionOptions().causal(true)), column <= row));
  REQUIRE(is(run(AttentionOptions().causal(true).q_offset(2)), column <= row + 2));
  REQUIRE(is(run(AttentionOptions().causal(true).q_offset(End{})), column <= row + 4));
  REQUIRE(is(run(AttentionOptions().causal(true).q_offset(at::tensor({1, 3}))),
             column <= row + at::tensor({1, 3}).view({2, 1, 1, 1})));
  REQUIRE(is(run(AttentionOptions().window({2, 1}).q_offset(1)), (column >= row - 1).logical_and(column <= row + 2)));
  REQUIRE(is(run(AttentionOptions().kv_lens(at::tensor({9, 4}))), column < at::tensor({9, 4}).view({2, 1, 1, 1})));
}

TEST_CASE("options for named keys") {
  const auto x = make_inputs(5, 9);
  const auto index = at::tensor({3, 0, -1, 3}, at::kInt).expand({2, 1, 5, 4});
  const auto column = at::arange(9), row = at::arange(5).unsqueeze(1);
  const auto run = [&](const AttentionOptions& options) { return attention(x.query, x.key, x.value, options); };
  const auto is = [&](const at::Tensor& out, const at::Tensor& allowed) {
    return close(out, std::get<0>(plain(x, allowed)));
  };
  const auto keys = (column == 0).logical_or(column == 3),
             blocks = (column < 2).logical_or(column.div(2, "floor") == 3);
  REQUIRE(is(run(AttentionOptions().key_index(index)), keys.expand({5, 9})));
  REQUIRE(is(run(AttentionOptions().key_index(index).key_block(2)), blocks.expand({5, 9})));
  REQUIRE(is(run(AttentionOptions().key_index(index).causal(true).q_offset(1)), keys.logical_and(column <= row + 1)));
  const auto probs = attention_scores(x.query, x.key, AttentionOptions().key_index(index));
  REQUIRE(probs.masked_select(keys.logical_not()).eq(0).all().item<bool>());
  REQUIRE(complains("key_index[0, 0, 0, 1] is 9, wants 0 to 8, the keys of a sequence of 9, or -1 for none",
                    [&] { run(AttentionOptions().key_index(at::tensor({3, 9}).expand({2, 1, 5, 2}))); }));
  REQUIRE(complains("key_index is undefined", [&] { run(AttentionOptions().key_index(at::Tensor())); }));
}

TEST_CASE("options for scores") {
  const auto x = make_inputs(5, 9);
  const auto mask = at::randn({4, 1, 9});
  const auto raw = x.query.matmul(heads(x.key, {0, 0, 1, 1}).transpose(-2, -1));
  const auto values = heads(x.value, {0, 0, 1, 1});
  const auto run = [&](const AttentionOptions& options) { return attention(x.query, x.key, x.value, options); };
  REQUIRE(close(run(AttentionOptions().scale(0.5).mask(mask)), (raw * 0.5 + mask).softmax(-1).matmul(values)));
  const auto capped = 2 * (raw / std::sqrt(8.0) / 2).tanh();
  REQUIRE(close(run(AttentionOptions().softcap(2)), capped.softmax(-1).matmul(values)));
  REQUIRE(close(attention_scores(x.query, x.key, AttentionOptions().softcap(2), "capped"), capped));
  const auto slopes = at::tensor({0.5, 0.25, 0.125, 0.0625}, at::kFloat);
  const auto distance = (at::arange(5).unsqueeze(1) - at::arange(9)).abs();
  const auto scores = raw / std::sqrt(8.0) - slopes.view({4, 1, 1}) * distance;
  REQUIRE(close(run(AttentionOptions().alibi_slopes(slopes)), scores.softmax(-1).matmul(values)));
  const auto sinks = at::randn({4});
  const auto joined = at::cat({raw / std::sqrt(8.0), sinks.view({1, 4, 1, 1}).expand({2, 4, 5, 1})}, -1);
  const auto probs = joined.softmax(-1).narrow(-1, 0, 9);
  REQUIRE(close(run(AttentionOptions().sinks(sinks)), probs.matmul(values)));
  REQUIRE(close(attention_scores(x.query, x.key, AttentionOptions().sinks(sinks)), probs));
}

TEST_CASE("a head map may be uneven and leave a kv head unread") {
  const auto x = make_inputs(40, 70);
  for (const std::vector<int64_t>& map : {std::vector<int64_t>{1, 0, 1, 1}, {0, 0, 0, 0}})
    REQUIRE(close(attention(x.query, x.key, x.value, AttentionOptions().head_map(map)),
                  std::get<0>(plain(x, everything(), map))));
}

TEST_CASE("gradients of out and lse") {
  auto x = make_inputs(40, 70, at::kDouble);
  for (auto* t : {&x.query, &x.key, &x.value}) t->requires_grad_();
  const auto lower = at::ones({40, 70}, at::kBool).tril();
  const auto gradients = [&](const at::Tensor& out, const at::Tensor& lse) {
    return torch::autograd::grad({out.square().sum() + lse.square().sum()}, {x.query, x.key, x.value});
  };
  const auto [out, lse] = attention_with_lse(x.query, x.key, x.value, AttentionOptions().causal(true));
  const auto [plain_out, plain_lse] = plain(x, lower);
  const auto ours = gradients(out, lse), theirs = gradients(plain_out, plain_lse);
  for (size_t i = 0; i < 3; ++i) REQUIRE(at::allclose(ours[i], theirs[i]));
}

TEST_CASE("a row without keys gives zero and lse minus infinity") {
  const auto x = make_inputs(3, 5);
  const auto [out, lse] = attention_with_lse(x.query, x.key, x.value, AttentionOptions().causal(true).q_offset(-3));
  REQUIRE(out.eq(0).all().item<bool>());
  REQUIRE(lse.eq(-INFINITY).all().item<bool>());
}

TEST_CASE("halves of the keys merge to the whole") {
  const auto x = make_inputs(3, 10);
  const auto part = [&](int64_t begin, int64_t count) {
    return attention_with_lse(x.query, x.key.narrow(2, begin, count), x.value.narrow(2, begin, count));
  };
  const auto [out_a, lse_a] = part(0, 4);
  const auto [out_b, lse_b] = part(4, 6);
  const auto [out, lse] = merge_states(out_a, lse_a, out_b, lse_b);
  const auto [whole, whole_lse] = part(0, 10);
  REQUIRE((close(out, whole) && close(lse, whole_lse)));
}

TEST_CASE("rotation turns pairs of dims") {
  const auto x = at::randn({2, 3, 5, 8});
  const auto [cos, sin] = rope_table(at::arange(5), {1.0, 0.1, 0.01});
  const auto turned = apply_rope(x, cos, sin);
  const auto first = x.narrow(-1, 0, 3), second = x.narrow(-1, 3, 3);
  REQUIRE(close(turned.narrow(-1, 0, 3), first * cos - second * sin));
  REQUIRE(close(turned.narrow(-1, 3, 3), second * cos + first * sin));
  REQUIRE(at::equal(turned.narrow(-1, 6, 2), x.narrow(-1, 6, 2)));
}

TEST_CASE("errors name the argument, what it got and what it wants") {
  const auto x = make_inputs(5, 9);
  const auto run = [&](const AttentionOptions& options) { attention(x.query, x.key, x.value, options); };
  REQUIRE(
      complains("attnpack: key has head_dim 7, query 8", [&] { attention(x.query, x.key.narrow(3, 0, 7), x.value); }));
  REQUIRE(complains("pass head_map", [&] { attention(x.query.narrow(1, 0, 3), x.key, x.value); }));
  REQUIRE(complains("mask has shape [9, 5], which does not broadcast",
                    [&] { run(AttentionOptions().mask(at::ones({9, 5}))); }));
  REQUIRE(complains("kv_lens[1] is 10, wants 0 to kv_len = 9",
                    [&] { run(AttentionOptions().kv_lens(at::tensor({9, 10}))); }));
  REQUIRE(complains("dropout_p is 1", [&] { run(AttentionOptions().dropout_p(1)); }));
  REQUIRE(complains("stage is 'raw'", [&] { attention_scores(x.query, x.key, {}, "raw"); }));
}

TEST_CASE("several threads may call at once") {
  const auto x = make_inputs(40, 300);
  const auto options = AttentionOptions().causal(true).softcap(3);  // shared, only read
  const auto expected = attention(x.query, x.key, x.value, options);
  std::vector<int> wrong(8, 0);
  std::vector<std::thread> threads;
  for (int& count : wrong)
    threads.emplace_back([&] {
      for (int i = 0; i < 50; ++i) count += !at::equal(attention(x.query, x.key, x.value, options), expected);
    });
  for (auto& thread : threads) thread.join();
  REQUIRE(wrong == std::vector<int>(8, 0));
}

TEST_CASE("the kernels' exp is within 2 ulp and exact at its ends") {
  namespace kernels = of_the_test;
  double worst = 0;
  for (float x = -104.0f; x <= 0.0f; x += 1.0f / 4096) {
    const double exact = std::exp(static_cast<double>(x));
    const double ulp = std::max(std::exp2(std::floor(std::log2(exact)) - 23), 0x1p-149);
    worst = std::max(worst, std::abs(kernels::exp_one<float>(x) - exact) / ulp);
  }
  REQUIRE(worst <= 2);
  REQUIRE(kernels::exp_one<float>(-INFINITY) == 0);
  REQUIRE(kernels::exp_one<float>(0) == 1);
  REQUIRE(std::isnan(kernels::exp_one<float>(NAN)));
  double worst_double = 0;
  for (double x = -700; x <= 0; x += 1.0 / 64)
    worst_double = std::max(worst_double, std::abs(kernels::exp_one<double>(x) / std::exp(x) - 1));
  REQUIRE(worst_double <= 2 * std::numeric_limits<double>::epsilon());
  REQUIRE(kernels::exp_one<double>(-INFINITY) == 0);
}

}  // namespace attnpack
