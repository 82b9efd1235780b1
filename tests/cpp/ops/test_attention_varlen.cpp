// Packed sequences in a program without Python: the bits of one call per sequence, gradients, options, errors.
#include <torch/torch.h>

#include "catch.h"

#include <attnpack/attnpack.h>

namespace attnpack {

namespace {

struct Packed {
  at::Tensor query, key, value, queries, keys;
};

// Sequences of 3, 0 and 210 queries, and 5, 2 and 210 keys.
Packed make_packed() {
  torch::manual_seed(0);
  return {at::randn({213, 4, 8}), at::randn({217, 2, 8}), at::randn({217, 2, 6}), at::tensor({0, 3, 3, 213}, at::kInt),
          at::tensor({0, 5, 7, 217}, at::kInt)};
}

at::Tensor as_batch(const at::Tensor& x, int64_t begin, int64_t end) {
  return x.slice(0, begin, end).transpose(0, 1).unsqueeze(0);
}

std::string varlen_complaint(const std::function<void()>& f) {
  try {
    f();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "";
}

}  // namespace

TEST_CASE("packed sequences are one call each, bit by bit") {
  const auto x = make_packed();
  const auto options = VarlenOptions().cu_seqlens_k(x.keys).causal(true).window({40, 0}).softcap(3);
  const auto [out, lse] = attention_varlen_with_lse(x.query, x.key, x.value, x.queries, options);
  REQUIRE(out.sizes() == at::IntArrayRef({213, 4, 6}));
  REQUIRE(at::equal(out, attention_varlen(x.query, x.key, x.value, x.queries, options)));
  const auto dense = AttentionOptions().causal(true).window({40, 0}).softcap(3).q_offset(End{});
  for (const auto& [q, r, k, l] : {std::tuple{0, 3, 0, 5}, {3, 213, 7, 217}}) {
    const auto [o, s] =
        attention_with_lse(as_batch(x.query, q, r), as_batch(x.key, k, l), as_batch(x.value, k, l), dense);
    REQUIRE(at::equal(as_batch(out, q, r), o));
    REQUIRE(at::equal(lse.slice(1, q, r), s[0]));
  }
}

TEST_CASE("packed sequences have the gradients of one call each") {
  const auto x = make_packed();
  const auto query = x.query.clone().requires_grad_();
  attention_varlen(query, x.key, x.value, x.queries, VarlenOptions().cu_seqlens_k(x.keys)).square().sum().backward();
  const auto last = x.query.slice(0, 3, 213).clone().requires_grad_();
  attention(as_batch(last, 0, 210), as_batch(x.key, 7, 217), as_batch(x.value, 7, 217)).square().sum().backward();
  REQUIRE(at::equal(query.grad().slice(0, 3, 213), last.grad()));
}

TEST_CASE("packed sequences take offsets like attention") {
  const auto x = make_packed();
  const auto run = [&](const QOffset& offset) {
    return attention_varlen(x.query, x.key, x.value, x.queries,
                            VarlenOptions().cu_seqlens_k(x.keys).causal(true).q_offset(offset));
  };
  REQUIRE(at::equal(run(End{}), run(at::tensor({2, 2, 0}, at::kLong))));
  REQUIRE(at::equal(run(0), run(at::tensor({0, 0, 0}, at::kInt))));
  REQUIRE_FALSE(at::equal(run(0), run(End{})));
}

TEST_CASE("packed sequences name what is wrong") {
  const auto x = make_packed();
  const auto run = [&](const VarlenOptions& options) {
    return varlen_complaint([&] { attention_varlen(x.query, x.key, x.value, x.queries, options); });
  };
  REQUIRE(run(VarlenOptions()).find("key has 217 rows, query 213: pass cu_seqlens_k") != std::string::npos);
  REQUIRE(run(VarlenOptions().cu_seqlens_k(x.queries)).find("cu_seqlens_k ends at 213, wants 217") !=
          std::string::npos);
  REQUIRE(run(VarlenOptions().block_table(x.keys)).find("key has shape [217, 2, 8], wants a pool") !=
          std::string::npos);
}

TEST_CASE("keys in pages: appended, shared, and read with the bits of packed keys") {
  torch::manual_seed(0);
  const int64_t held = 21, pages = 12, page_size = 4;
  const at::Tensor new_keys = at::randn({2, 2, held, 8}), new_values = at::randn({2, 2, held, 6});
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const at::Tensor keys = at::full({pages, page_size, 2, 8}, nan), values = at::full({pages, page_size, 2, 6}, nan);
  const at::Tensor table = at::randperm(pages).view({2, 6}).to(at::kInt), lengths = at::zeros({2}, at::kLong);
  kv_cache_append_paged_(keys, values, table, lengths, new_keys, new_values, at::tensor({held, int64_t{5}}));
  REQUIRE(at::equal(lengths, at::tensor({held, int64_t{5}})));

  const at::Tensor query = at::randn({4, 4, 8}), ends = at::tensor({0, 1, 4}, at::kInt);
  const auto packed = [&](const at::Tensor& x) {
    return at::cat({x[0].transpose(0, 1), x[1].transpose(0, 1).narrow(0, 0, 5)});
  };
  const auto options = VarlenOptions().causal(true).softcap(3);
  const at::Tensor expected = attention_varlen(query, packed(new_keys), packed(new_values), ends,
                                               VarlenOptions(options).cu_seqlens_k(at::tensor({0, 21, 26}, at::kInt)));
  const auto paged = VarlenOptions(options).block_table(table).kv_lens(lengths);
  REQUIRE(at::equal(attention_varlen(query, keys, values, ends, paged), expected));

  table[1][1] = 12;
  const std::string message = varlen_complaint([&] { attention_varlen(query, keys, values, ends, paged); });
  REQUIRE(message.find("block_table[1, 1] is 12, wants a page from 0 to 11") != std::string::npos);
}

}  // namespace attnpack
