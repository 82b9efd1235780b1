// Thousands of random sequences of changes over every kind of cache, beside rows that are kept by hand. A new kind is a
// row of kKinds.
#include <torch/torch.h>

#include <cstdlib>
#include <functional>
#include <random>

#include "catch.h"
#include "complains.h"

#include <attnpack/attnpack.h>
#include <attnpack/layers/attend.h>

namespace attnpack {
namespace {

using at::Tensor;

constexpr int64_t kBatch = 3, kHeads = 2, kDim = 2, kWidth = 3, kRoom = 700;

struct Kind {
  const char* name;
  std::function<std::shared_ptr<KVCache>()> make;
  Window window = {-1, -1};
  int64_t keep_first = 0;
  std::optional<int64_t> room;       // the most positions of a sequence
  std::optional<int64_t> allocated;  // the most positions that take memory between calls
  int64_t bits = 0;                  // of quantised rows; 0: rows as they are
  bool paged = false;                // stores the positions that sequences hold, and shared ones once
  int64_t sums = 0;                  // of blocks of so many keys, kept beside them
};

const Kind kKinds[] = {
    {"dynamic", [] { return std::make_shared<DynamicCache>(); }},
    {"static",
     [] { return std::make_shared<StaticCache>(StaticCacheOptions(kBatch, kHeads, kRoom, kDim).v_head_dim(kWidth)); },
     {-1, -1},
     0,
     kRoom,
     kRoom},
    {"sliding",
     [] { return std::make_shared<SlidingWindowCache>(SlidingWindowCacheOptions(9)); },
     {9, 0},
     0,
     std::nullopt,
     9 + 256 + 64},
    {"sliding, first kept",
     [] { return std::make_shared<SlidingWindowCache>(SlidingWindowCacheOptions(Window{40, 0}).keep_first(5)); },
     {40, 0},
     5,
     std::nullopt,
     45 + 256 + 64},
    {"8 bits", [] { return std::make_shared<QuantizedCache>(8); }, {-1, -1}, 0, std::nullopt, std::nullopt, 8},
    {"4 bits, some exact",
     [] { return std::make_shared<QuantizedCache>(QuantizedCacheOptions(4).exact_first(3).exact_last(9)); },
     {-1, -1},
     0,
     std::nullopt,
     std::nullopt,
     4},
    {"paged",
     [] { return std::make_shared<PagedCache>(PagedCacheOptions(kBatch, kHeads, kDim, 850).v_head_dim(kWidth)); },
     {-1, -1},
     0,
     std::nullopt,
     850 * 16,
     0,
     true},
    {"sparse, sums",
     [] { return std::make_shared<SparseCache>(); },
     {-1, -1},
     0,
     std::nullopt,
     std::nullopt,
     0,
     false,
     8},
};

struct Rows {
  Tensor keys, values;  // [H, n, D], [H, n, Dv]
};

class Machine {
 public:
  Machine(const Kind& kind, uint64_t seed) : kind_(kind), draw_(seed), cache_(kind.make()) { clear(); }

  void change() {
    switch (pick(0, 12)) {
      case 6:
      case 7:
        return crop();
      case 8:
      case 9:
        return fail();
      case 10:
        return reorder();
      case 11:
        return clone();
      case 12:
        return cache_->reset(), clear();
      default:
        return append();
    }
  }

  void check() {
    const auto most = longest();
    REQUIRE(cache_->len() == most);
    if (most == 0) return;
    int64_t shown = 0;
    for (int64_t b = 0; b < kBatch; ++b) {
      REQUIRE(cache_->lengths()[b].item<int64_t>() == length(b));
      const auto held = stored(b);
      shown = std::max<int64_t>(shown, held.numel());
      REQUIRE(shows(cache_->k()[b].narrow(1, 0, held.numel()), rows_[b].keys.index_select(1, held)));
      REQUIRE(shows(cache_->v()[b].narrow(1, 0, held.numel()), rows_[b].values.index_select(1, held)));
    }
    REQUIRE(cache_->k().size(2) == shown);
    REQUIRE(cache_->nbytes() <= cache_->nbytes_allocated());
    if (kind_.bits) return;
    const int64_t position = kBatch * kHeads * (kDim + kWidth) * 4;
    if (kind_.paged) {
      REQUIRE(cache_->nbytes() <= position / kBatch * (length(0) + length(1) + length(2)));
      REQUIRE(cache_->nbytes() >= position / kBatch * shown);
    } else {
      REQUIRE(cache_->nbytes() == position * kind_.room.value_or(shown) + check_sums(shown));
    }
    REQUIRE(cache_->nbytes() <= cache_->nbytes_allocated());
    if (kind_.allocated) REQUIRE(cache_->nbytes_allocated() <= position * *kind_.allocated);
  }

 private:
  int64_t pick(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(draw_); }
  // Each row as it was, or as it is after it was quantised once.
  bool shows(const Tensor& shown, const Tensor& rows) const {
    if (!kind_.bits) return at::equal(shown, rows);
    const auto back = dequantize_rows(quantize_rows(rows, kind_.bits), kind_.bits, rows.size(-1), at::kFloat);
    return ((shown == rows).all(-1)).logical_or((shown == back).all(-1)).all().item<bool>();
  }
  // The sums of whole blocks are right. Returns the bytes of all.
  int64_t check_sums(int64_t shown) const {
    if (kind_.sums == 0) return 0;
    const auto sums = std::dynamic_pointer_cast<SparseCache>(cache_)->index();
    for (int64_t b = 0; b < kBatch; ++b) {
      const auto whole = length(b) / kind_.sums;
      const auto keys = rows_[b].keys.narrow(1, 0, whole * kind_.sums).unflatten(1, {whole, kind_.sums});
      REQUIRE(at::equal(sums[b].narrow(1, 0, whole), keys.sum(2)));
    }
    REQUIRE(sums.size(2) == (shown + kind_.sums - 1) / kind_.sums);
    return sums.numel() * 4;
  }
  int64_t length(int64_t b) const { return rows_[b].keys.size(1); }
  int64_t longest() const { return std::max({length(0), length(1), length(2)}); }
  void clear() { rows_.assign(kBatch, {torch::zeros({kHeads, 0, kDim}), torch::zeros({kHeads, 0, kWidth})}); }

  // The positions of a sequence that k() and v() show.
  Tensor stored(int64_t b) const {
    const auto all = torch::arange(length(b), at::kLong);
    const auto* ring = dynamic_cast<const SlidingWindowCache*>(cache_.get());
    if (!ring || !cache_->k().defined()) return all;
    const auto gone = ring->dropped()[b].item<int64_t>();
    REQUIRE((gone == 0 || kind_.keep_first + gone <= length(b) - kind_.window[0]));
    return all.masked_select((all < kind_.keep_first).logical_or(all >= kind_.keep_first + gone));
  }

  void write(const Tensor& key, const Tensor& value, const std::optional<Tensor>& new_lens) {
    rollback_on_error(std::vector{cache_}, [&] {
      AttendOptions options;
      if (kind_.sums) std::dynamic_pointer_cast<SparseCache>(cache_)->keep_sums(kind_.sums, key.size(2));
      options.cache = cache_->reserve_valid(key, value, new_lens);
      options.causal = true;
      options.window = kind_.window;
      options.kv_lens = new_lens;
      if (kind_.sums) options.blocks = {kind_.sums, /*top_blocks=*/1000, /*local_blocks=*/1, "mean"};
      attend(torch::zeros_like(key), key, value, options);
      cache_->commit(key.size(2), new_lens);
      return 0;
    });
  }

  std::pair<Tensor, Tensor> fresh(int64_t length, int64_t dim = kDim) {
    return {torch::randn({kBatch, kHeads, length, dim}), torch::randn({kBatch, kHeads, length, kWidth})};
  }

  void append() {
    constexpr int64_t kLengths[] = {1, 1, 2, 5, 60, 130, 300};
    const auto added = kLengths[pick(0, 6)];
    const bool ragged = pick(0, 1) == 1;
    std::vector<int64_t> valid(kBatch, added);
    bool full = false;
    for (int64_t b = 0; b < kBatch; ++b) {
      if (ragged) valid[b] = pick(0, added);
      full |= kind_.room && length(b) + valid[b] > *kind_.room;
    }
    const auto [key, value] = fresh(added);
    const auto lens = ragged ? std::make_optional(torch::tensor(valid, at::kLong)) : std::nullopt;
    if (full) {
      REQUIRE(complains("cache is full", [&, &key = key, &value = value] { write(key, value, lens); }));
      return;
    }
    write(key, value, lens);
    for (int64_t b = 0; b < kBatch; ++b) {
      rows_[b].keys = at::cat({rows_[b].keys, key[b].narrow(1, 0, valid[b])}, 1);
      rows_[b].values = at::cat({rows_[b].values, value[b].narrow(1, 0, valid[b])}, 1);
    }
  }

  void crop() {
    const auto n = pick(0, 2) == 0 ? pick(0, 600) : std::max<int64_t>(longest() - pick(0, 70), 0);
    bool lost = false;
    for (int64_t b = 0; b < kBatch; ++b) {
      if (length(b) <= n || n == 0) continue;
      const auto held = stored(b), first = torch::tensor(std::max<int64_t>(n - kind_.window[0], 0));
      const auto needed = held.masked_select((held >= first).logical_and(held < n)).numel();
      lost |= kind_.window[0] >= 0 && needed < n - first.item<int64_t>();
    }
    if (lost) {
      REQUIRE(complains("but sequence", [&] { cache_->crop(n); }));
      return;
    }
    cache_->crop(n);
    for (auto& row : rows_) {
      row.keys = row.keys.narrow(1, 0, std::min(n, row.keys.size(1)));
      row.values = row.values.narrow(1, 0, std::min(n, row.values.size(1)));
    }
  }

  void reorder() {
    std::vector<int64_t> index;
    std::vector<Rows> moved;
    for (int64_t b = 0; b < kBatch; ++b) moved.push_back(rows_[index.emplace_back(pick(0, kBatch - 1))]);
    cache_->reorder(torch::tensor(index, at::kLong));
    rows_ = moved;
  }

  void clone() {
    const auto before = cache_;
    cache_ = before->clone();
    if (before->k().defined()) before->k().fill_(7);
    before->reset();
  }

  // An append that fails in the op, or after the commit.
  void fail() {
    const auto memory = cache_->nbytes_allocated();
    const bool empty = !cache_->k().defined();
    const auto added = pick(0, 1) ? 400 : 3;
    const auto [key, value] = fresh(added);
    const bool late = pick(0, 1) && !(kind_.room && longest() + added > *kind_.room);
    std::string message;
    try {
      rollback_on_error(std::vector{cache_}, [&, &key = key, &value = value] {
        write(key, value,
              late ? std::nullopt : std::make_optional(at::tensor(std::vector<int64_t>{0, added + 1, 0}, at::kLong)));
        throw std::runtime_error("stop");
        return 0;
      });
    } catch (const std::exception& error) {
      message = error.what();
    }
    INFO(message);
    REQUIRE(message.find(late ? "stop" : "kv_lens[1] is") != std::string::npos);
    REQUIRE(cache_->nbytes_allocated() == memory);
    REQUIRE(!cache_->k().defined() == empty);
  }

  const Kind& kind_;
  std::mt19937_64 draw_;
  std::shared_ptr<KVCache> cache_;
  std::vector<Rows> rows_;
};

}  // namespace

TEST_CASE("random sequences of changes leave in a cache what they should") {
  const uint64_t sequences = std::getenv("ATTNPACK_LONG_TESTS") ? 500 : 100;
  torch::NoGradGuard no_grad;
  torch::manual_seed(0);
  for (const auto& kind : kKinds) {
    for (uint64_t seed = 0; seed < sequences; ++seed) {
      INFO(kind.name << ", seed " << seed);
      Machine machine(kind, seed);
      for (int step = 0; step < 14; ++step) {
        machine.change();
        machine.check();
      }
    }
  }
}

}  // namespace attnpack
