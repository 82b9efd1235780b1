// The pages of paged caches: random appends, crops, forks and releases against lists of tensors.
#include <torch/torch.h>

#include <chrono>
#include <random>

#include "catch.h"

#include <attnpack/attnpack.h>
#include <attnpack/cache/detail/page_table.h>

namespace attnpack {

namespace {

std::string complaint(const std::function<void()>& f) {
  try {
    f();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "";
}

// A cache of pages, and beside it what each of its sequences holds, [length, 1, 2].
struct Paged {
  PageTable table;
  std::vector<int64_t> held;
  std::vector<at::Tensor> oracle;
};

struct World {
  at::Tensor keys, values;
  std::vector<Paged> caches;

  // The positions of a sequence, gathered from its pages.
  at::Tensor read(const at::Tensor& pool, const Paged& cache, size_t b) const {
    const int64_t pages = (cache.held[b] + cache.table.page_size - 1) / cache.table.page_size;
    const at::Tensor row = cache.table.block_table[static_cast<int64_t>(b)].narrow(0, 0, pages);
    return pool.index_select(0, row).flatten(0, 1).narrow(0, 0, cache.held[b]);
  }

  // Every sequence holds what the lists hold, and each page is counted once for each row that holds it.
  bool agrees() const {
    at::Tensor counted = at::zeros_like(caches[0].table.references);
    bool same = true;
    for (const Paged& cache : caches)
      for (size_t b = 0; b < cache.held.size(); ++b) {
        same &= at::equal(read(keys, cache, b), cache.oracle[b]) && at::equal(read(values, cache, b), -cache.oracle[b]);
        const at::Tensor row = cache.table.block_table[static_cast<int64_t>(b)];
        const at::Tensor named = row.masked_select(row >= 0);
        same &= named.numel() == (cache.held[b] + cache.table.page_size - 1) / cache.table.page_size;
        counted.index_add_(0, named, at::ones({named.numel()}, at::kInt));
      }
    return same && at::equal(counted, caches[0].table.references);
  }

  // Appends through the op, as the cache does it. Returns whether there was room.
  bool append(Paged& cache, const std::vector<int64_t>& counts, int64_t most) {
    const auto batch = static_cast<int64_t>(cache.held.size());
    const at::Tensor x = at::randn({batch, 1, most, 2});
    std::vector<PageCopy> copies;
    try {
      copies = give_room(cache.table, cache.held, counts);
    } catch (const c10::Error&) {
      return false;
    }
    copy_pages(keys, copies);
    copy_pages(values, copies);
    const at::Tensor lengths = at::tensor(cache.held, at::kLong);
    kv_cache_append_paged_(keys, values, cache.table.block_table, lengths, x, -x, at::tensor(counts, at::kLong));
    for (size_t b = 0; b < counts.size(); ++b) {
      cache.held[b] += counts[b];
      const at::Tensor rows = x[static_cast<int64_t>(b)].transpose(0, 1).narrow(0, 0, counts[b]);
      cache.oracle[b] = at::cat({cache.oracle[b], rows});
    }
    return true;
  }
};

}  // namespace

TEST_CASE("pages hold what lists of tensors hold, through random appends, crops, forks and releases") {
  std::mt19937_64 generator(5);
  const auto pick = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(generator);
  };
  int64_t full = 0, copied = 0;
  for (int game = 0; game < 150; ++game) {
    const int64_t page_size = pick(1, 5), num_pages = pick(4, 30), batch = pick(1, 4);
    World world{at::zeros({num_pages, page_size, 1, 2}), at::zeros({num_pages, page_size, 1, 2}), {}};
    const at::Tensor none = at::empty({0, 1, 2});
    world.caches.push_back({make_page_table(batch, num_pages, page_size), std::vector<int64_t>(batch),
                            std::vector<at::Tensor>(batch, none)});
    for (int step = 0; step < 40; ++step) {
      const size_t n = pick(0, static_cast<int64_t>(world.caches.size()) - 1);
      Paged& cache = world.caches[n];
      const auto rows = static_cast<int64_t>(cache.held.size());
      switch (pick(0, 7)) {
        default: {
          std::vector<int64_t> counts;
          const int64_t most = pick(0, 7);
          for (int64_t b = 0; b < rows; ++b) counts.push_back(pick(0, most));
          const at::Tensor before = cache.table.references.clone(), table = cache.table.block_table.clone();
          const bool shared = (before > 1).any().item<bool>();
          if (world.append(cache, counts, most)) {
            copied += shared;
          } else {
            ++full;
            REQUIRE(at::equal(before, cache.table.references));
            REQUIRE(at::equal(table, cache.table.block_table));
          }
          break;
        }
        case 5: {  // crop, which releases at 0
          for (size_t b = 0; b < cache.held.size(); ++b) {
            cache.held[b] = pick(0, cache.held[b]);
            cache.oracle[b] = cache.oracle[b].narrow(0, 0, cache.held[b]);
          }
          keep_pages(cache.table, cache.held);
          break;
        }
        case 6: {  // fork, also as a reordering: the first cache may go
          if (rows == 0 || world.caches.size() > 3) break;
          const at::Tensor index = at::randint(rows, {pick(1, 4)}, at::kLong);
          Paged fork{fork_pages(cache.table, index), {}, {}};
          for (int64_t i = 0; i < index.numel(); ++i) {
            fork.held.push_back(cache.held[index[i].item<int64_t>()]);
            fork.oracle.push_back(cache.oracle[index[i].item<int64_t>()]);
          }
          world.caches.push_back(fork);
          break;
        }
        case 7: {  // a cache ends
          if (world.caches.size() == 1) break;
          keep_pages(cache.table, std::vector<int64_t>(rows));
          world.caches.erase(world.caches.begin() + static_cast<int64_t>(n));
          break;
        }
      }
      REQUIRE(world.agrees());
    }
  }
  REQUIRE(full > 100);  // the games are about something
  REQUIRE(copied > 100);
}

TEST_CASE("a pool that is full says so") {
  const PageTable table = make_page_table(2, 3, 4);
  give_room(table, {0, 0}, {4, 3});
  REQUIRE(free_pages(table) == 1);
  const std::string message = complaint([&] { give_room(table, {4, 3}, {1, 2}); });
  REQUIRE(message.find("the pool is full: 2 pages are needed and 1 of 3 are free: release() seq") != std::string::npos);
  const std::string longer = complaint([&] { give_room(table, {4, 3}, {9, 0}); });
  REQUIRE(longer.find("sequence 0 holds 4 positions and 9 are to be appended, wants at most 12") != std::string::npos);
  REQUIRE(free_pages(table) == 1);
  REQUIRE(complaint([] { make_page_table(1, 4, 0); }).find("page_size is 0, wants at least 1") != std::string::npos);
}

TEST_CASE("pages of one sequence follow each other") {
  const PageTable table = make_page_table(2, 40, 4);
  give_room(table, {0, 0}, {40, 40});
  for (int64_t b = 0; b < 2; ++b) {
    const at::Tensor row = table.block_table[b].narrow(0, 0, 10);
    REQUIRE(at::equal(row, at::arange(10, at::kInt) + row[0]));
  }
}

TEST_CASE("a fork of 16k positions copies no page and takes less than a millisecond") {
  const PageTable table = make_page_table(1, 1100, 16);
  give_room(table, {0}, {16384});
  double shortest = 1;
  for (int i = 0; i < 20; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    const PageTable fork = fork_pages(table, at::zeros({1}, at::kLong));
    shortest = std::min(shortest, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
    REQUIRE(free_pages(table) == 76);
    keep_pages(fork, {0});
  }
  INFO("a fork takes " << shortest * 1e6 << " microseconds");
  REQUIRE(shortest < 1e-3);
}

}  // namespace attnpack
