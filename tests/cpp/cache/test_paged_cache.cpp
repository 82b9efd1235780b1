// Caches whose sequences share the pages of a pool.
#include <torch/torch.h>

#include "catch.h"
#include "complains.h"

#include <attnpack/attnpack.h>

namespace attnpack {

namespace {

PagedCacheOptions options_for(int64_t batch, int64_t num_pages) {
  return PagedCacheOptions(batch, 2, 6, num_pages).page_size(4);
}

GroupedQueryAttention layer_with_rope() {
  return GroupedQueryAttention(
      GroupedQueryAttentionOptions(24, 4, 2).causal(true).rope(RotaryEmbedding(RotaryEmbeddingOptions(6))));
}

at::Tensor call(GroupedQueryAttention& layer, const at::Tensor& x, const std::shared_ptr<KVCache>& cache) {
  return layer->forward(x, AttentionInputs().cache(cache));
}

}  // namespace

TEST_CASE("a paged cache has the bits of a dynamic one") {
  torch::manual_seed(0);
  torch::NoGradGuard no_grad;
  auto layer = layer_with_rope();
  const auto full = std::make_shared<DynamicCache>();
  const auto paged = std::make_shared<PagedCache>(PagedCacheOptions(2, 2, 6, 40));
  for (int64_t length : {37, 1, 1, 90, 3, 1}) {
    const auto x = torch::randn({2, length, 24});
    REQUIRE(at::equal(call(layer, x, paged), call(layer, x, full)));
  }
  REQUIRE(at::equal(paged->k(), full->k()));
  REQUIRE(at::equal(paged->v(), full->v()));
  REQUIRE(paged->nbytes() == full->nbytes());
  REQUIRE(paged->nbytes_allocated() == 40 * 16 * 2 * 12 * 4);
  // Calls that need the keys in one piece: with a mask, with weights, with gradients.
  const auto x = torch::randn({2, 2, 24}), mask = torch::randn({2, paged->len() + 2});
  const auto masked = AttentionInputs().mask(mask);
  const auto [a, wanted] = layer->forward_with_weights(x, AttentionInputs(masked).cache(full));
  const auto [b, got] = layer->forward_with_weights(x, AttentionInputs(masked).cache(paged));
  REQUIRE(at::equal(a, b));
  REQUIRE(at::equal(got, wanted));
  torch::AutoGradMode grad(true);
  const auto gradient = [&](const std::shared_ptr<KVCache>& cache) {
    layer->zero_grad();
    call(layer, x, cache).square().sum().backward();
    return layer->k_proj->weight.grad().clone();
  };
  REQUIRE(at::equal(gradient(paged), gradient(full)));
  REQUIRE(at::equal(paged->k(), full->k()));
}

TEST_CASE("forks share pages until one writes, and each cache gives its pages back once") {
  torch::manual_seed(0);
  torch::NoGradGuard no_grad;
  auto layer = layer_with_rope();
  auto cache = std::make_shared<PagedCache>(options_for(2, 12));
  call(layer, torch::randn({2, 6, 24}), cache);
  REQUIRE(cache->free_pages() == 8);
  const auto before = cache->k();
  auto fork = cache->fork(torch::tensor({1, 0, 1}));
  REQUIRE(fork->free_pages() == 8);
  REQUIRE(fork->k_pool().is_alias_of(cache->k_pool()));
  call(layer, torch::randn({3, 1, 24}), fork);  // each writes to the second page: three copies
  REQUIRE(fork->free_pages() == 5);
  REQUIRE(at::equal(cache->k(), before));
  REQUIRE(at::equal(fork->k().narrow(2, 0, 6), before.index_select(0, torch::tensor({1, 0, 1}))));
  fork->release(torch::tensor({0}));
  REQUIRE(fork->free_pages() == 6);
  REQUIRE(fork->lengths()[0].item<int64_t>() == 0);
  fork->crop(4);
  REQUIRE(fork->free_pages() == 8);
  cache.reset();  // the fork still holds the first page of both
  REQUIRE(fork->free_pages() == 10);
  REQUIRE(at::equal(fork->k()[1], before[0].narrow(1, 0, 4)));
  fork->reorder(torch::tensor({1, 1, 2, 2}));
  REQUIRE(fork->free_pages() == 10);
  const auto copy = fork->clone();
  const auto other = fork->fork(torch::tensor(std::vector<int64_t>{}, at::kLong));
  fork.reset();
  REQUIRE(other->free_pages() == 12);
  REQUIRE(at::equal(copy->k()[2], before[1].narrow(1, 0, 4)));
  copy->reset();
  REQUIRE(std::dynamic_pointer_cast<PagedCache>(copy)->free_pages() == 12);
}

TEST_CASE("a failed append changes nothing and keeps no page") {
  torch::manual_seed(0);
  torch::NoGradGuard no_grad;
  auto layer = layer_with_rope();
  const auto cache = std::make_shared<PagedCache>(options_for(2, 8));
  call(layer, torch::randn({2, 6, 24}), cache);
  const auto fork = cache->fork(torch::tensor({0, 0}));
  cache->crop(5);  // the fork holds more of the page that both are to write
  const auto keys = cache->k(), forked = fork->k(), table = cache->block_table().clone();
  REQUIRE(complains("the pool is full: 5 pages are needed and 4 of 8 are free: release()",
                    [&] { call(layer, torch::randn({2, 9, 24}), cache); }));
  REQUIRE(complains("sequence 0 holds 5 positions and 28 are to be appended, wants at most 32",
                    [&] { call(layer, torch::randn({2, 28, 24}), cache); }));
  REQUIRE(
      complains("cache: got keys", [&] { cache->reserve(torch::randn({3, 2, 1, 6}), torch::randn({3, 2, 1, 6})); }));
  REQUIRE(complains("cache: got a PagedCache", [&] { cache->reserve_latents(torch::randn({2, 1, 1, 6}), 4); }));
  const auto stop = [&] {
    rollback_on_error(std::vector{cache, fork}, [&] {
      call(layer, torch::randn({2, 2, 24}), cache);
      call(layer, torch::randn({2, 1, 24}), fork);
      throw std::runtime_error("stop");
      return 0;
    });
  };
  REQUIRE_THROWS(stop());
  REQUIRE(cache->free_pages() == 4);
  REQUIRE(at::equal(cache->block_table(), table));
  REQUIRE(at::equal(cache->k(), keys));
  REQUIRE(at::equal(fork->k(), forked));
  call(layer, torch::randn({2, 1, 24}), cache);  // it goes on
  REQUIRE(cache->free_pages() == 3);
}

TEST_CASE("ragged tokens take only the pages of the valid ones") {
  torch::NoGradGuard no_grad;
  auto layer = layer_with_rope();
  const auto cache = std::make_shared<PagedCache>(options_for(2, 5));
  layer->forward(torch::randn({2, 16, 24}), AttentionInputs().cache(cache).kv_lens(torch::tensor({16, 2})));
  REQUIRE(cache->free_pages() == 0);
  cache->reset();
  REQUIRE(cache->free_pages() == 5);
  REQUIRE(complains("num_pages: got 0", [] { PagedCache(options_for(2, 0)); }));
  REQUIRE(complains("page_size: got 0", [] { PagedCache(options_for(2, 4).page_size(0)); }));
  REQUIRE(complains("rows[0] is 2, wants 0 to 1", [&] { cache->release(torch::tensor({2})); }));
}

}  // namespace attnpack
