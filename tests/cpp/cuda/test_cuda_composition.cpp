// CUDA tensors without a kernel run through compositions of ATen ops. These also run on CPU tensors, which are tested
// here.
#include <torch/torch.h>

#include "catch.h"

#include <attnpack/attnpack.h>
#include <attnpack/ops/cuda/composition.h>
#include <attnpack/ops/cuda/device_constants.h>
#include <attnpack/ops/detail/kv_window.h>
#include <attnpack/ops/kv_cache.h>

using namespace attnpack;

namespace {

bool close(const Tensor& a, const Tensor& b) { return at::allclose(a, b, 1e-9, 1e-11); }

struct Cache {
  Tensor key, value, lengths;
  explicit Cache(at::ScalarType dtype)
      : key(at::full({3, 2, 9, 6}, -1, dtype)),
        value(at::full({3, 2, 9, 5}, -1, dtype)),
        lengths(at::tensor({0, 5, 2}, at::kLong)) {}
  bool operator==(const Cache& other) const {
    return key.equal(other.key) && value.equal(other.value) && lengths.equal(other.lengths);
  }
};

}  // namespace

TEST_CASE("composed appends are the CPU's, bit by bit") {
  torch::manual_seed(0);
  const at::NoGradGuard no_grad;
  const std::vector<double> inv_freq{1.0, 0.1};
  for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16})
    for (const auto& lens : std::vector<std::optional<Tensor>>{std::nullopt, at::tensor({4, 0, 3}, at::kInt)}) {
      const auto draw = [&](int64_t heads, int64_t width) { return at::randn({3, heads, 4, width}).to(dtype); };
      const Tensor key = draw(2, 6), value = draw(2, 5), query = draw(4, 6);
      Cache here(dtype), composed(dtype);
      kv_cache_append_(here.key, here.value, here.lengths, key, value, lens);
      kv_cache_append_composed(composed.key, composed.value, composed.lengths, key, value, lens);
      CHECK(here == composed);
      CHECK(!(here == Cache(dtype)));
      for (const bool interleaved : {false, true}) {
        Cache one(dtype), other(dtype);
        const Tensor rotated = kv_cache_append_rotated_(one.key, one.value, one.lengths, query, key, value, inv_freq,
                                                        1.5, interleaved, lens);
        CHECK(rotated.equal(kv_cache_append_rotated_composed(other.key, other.value, other.lengths, query, key, value,
                                                             inv_freq, 1.5, interleaved, lens, std::nullopt)));
        CHECK(one == other);
        CHECK(!one.key.equal(here.key));
      }
    }
}

TEST_CASE("a composed append drops what goes beyond the capacity") {
  Cache cache(at::kFloat);
  const Tensor key = at::randn({3, 2, 6, 6}), value = at::randn({3, 2, 6, 5});
  kv_cache_append_composed(cache.key, cache.value, cache.lengths, key, value, std::nullopt);
  CHECK(cache.lengths.equal(at::tensor({6, 9, 8}, at::kLong)));
  CHECK(cache.key[1].narrow(1, 5, 4).equal(key[1].narrow(1, 0, 4)));
  CHECK(cache.value[1].narrow(1, 5, 4).equal(value[1].narrow(1, 0, 4)));
  CHECK((cache.key[1].narrow(1, 0, 5) == -1).all().item<bool>());
}

TEST_CASE("composed appends and slides of caches that drop positions are the CPU's") {
  torch::manual_seed(0);
  const at::NoGradGuard no_grad;
  const Tensor dropped = at::tensor({512, 0, 256}, at::kLong), first = at::tensor({700, 20, 556}, at::kLong);
  const Tensor key = at::randn({3, 2, 4, 6}), value = at::randn({3, 2, 4, 5});
  Tensor keys = at::randn({3, 2, 310, 6}), values = at::randn({3, 2, 310, 5}), lengths = first.clone();
  Tensor other_keys = keys.clone(), other_values = values.clone(), other_lengths = first.clone();
  const auto lens = at::tensor({4, 0, 3}, at::kInt);
  kv_cache_append_(keys, values, lengths, key, value, lens, std::nullopt, dropped);
  kv_cache_append_composed(other_keys, other_values, other_lengths, key, value, lens, dropped);
  CHECK(keys.equal(other_keys));
  CHECK(values.equal(other_values));
  CHECK(lengths.equal(at::tensor({704, 20, 559}, at::kLong)));
  CHECK(lengths.equal(other_lengths));
  CHECK(keys[0].narrow(1, 188, 4).equal(key[0]));
  for (const int64_t keep_first : {0, 3}) {
    const auto [k, v, d] = kv_window_slide(keys, values, lengths, dropped, 400, 10, keep_first);
    const auto [k2, v2, d2] = kv_window_slide_composed(keys, values, lengths, dropped, 400, 10, keep_first);
    CHECK(d.equal(at::tensor({512, 0, 512}, at::kLong)));
    CHECK(d.equal(d2));
    CHECK(k.equal(k2));
    CHECK(v.equal(v2));
    CHECK(k[2].narrow(1, keep_first, 47 - keep_first).equal(keys[2].narrow(1, 256 + keep_first, 47 - keep_first)));
    CHECK(k[2].narrow(1, 0, keep_first).equal(keys[2].narrow(1, 0, keep_first)));
  }
}

TEST_CASE("composed attention and its gradients are the CPU's") {
  torch::manual_seed(0);
  const auto options = at::TensorOptions(at::kDouble);
  const Tensor query = at::randn({2, 4, 5, 6}, options).requires_grad_(),
               key = at::randn({2, 2, 7, 6}, options).requires_grad_(),
               value = at::randn({2, 2, 7, 3}, options).requires_grad_(),
               mask = at::randn({4, 5, 7}, options).requires_grad_(), sinks = at::randn({4}, options).requires_grad_(),
               slopes = at::rand({4}, options), lens = at::tensor({7, 4}, at::kLong);
  const auto options_of_call = AttentionOptions()
                                   .mask(mask)
                                   .causal(true)
                                   .q_offset(2)
                                   .window({4, -1})
                                   .kv_lens(lens)
                                   .softcap(1.5)
                                   .sinks(sinks)
                                   .alibi_slopes(slopes)
                                   .scale(0.7);
  const auto [out, lse] = attention_with_lse(query, key, value, options_of_call);
  const Tensor grad_out = at::randn_like(out), grad_lse = at::randn_like(lse);
  const auto wanted = torch::autograd::grad({out, lse}, {query, key, value, mask, sinks}, {grad_out, grad_lse});
  AttentionArguments args{options_of_call.rules()};
  args.mask = mask;
  args.q_offset = 2;
  args.kv_lens = lens;
  const auto [o, l] = attention_composed(query, key, value, args);
  CHECK(close(o, out));
  CHECK(close(l, lse));
  const auto [q, k, v, m, s] = attention_backward_composed(grad_out, grad_lse, query, key, value, args, true, true);
  const Tensor got[]{q, k, v, m, s};
  for (int i = 0; i < 5; ++i) CHECK(close(got[i], wanted[i]));
}

TEST_CASE("numbers are put on a device once, each list by itself") {
  const std::vector<double> a{1, 2}, b{1, 2, 3}, nan{NAN};
  const auto kept = [](const std::vector<double>& numbers) { return on_device<double>(numbers, at::kCPU); };
  CHECK(kept(a).equal(at::tensor(a, at::kDouble)));
  CHECK(kept(b).equal(at::tensor(b, at::kDouble)));
  CHECK(kept(a).data_ptr() == kept(a).data_ptr());
  CHECK(kept(nan).isnan().all().item<bool>());
  CHECK(kept({}).numel() == 0);
  CHECK(on_device<int64_t>(std::vector<int64_t>{7}, at::kCPU).equal(at::tensor({7}, at::kLong)));
}
