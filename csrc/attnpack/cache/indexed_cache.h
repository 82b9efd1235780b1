#pragma once

#include <attnpack/cache/dynamic_cache.h>

namespace attnpack {

// Base of the caches that hold the keys of an indexer beside what attention reads, one a position. Grows as
// DynamicCache does. A cache without an indexer has none of them.
class IndexedCache : public DynamicCache {
 public:
  // Room for the new keys of an indexer; the next append brings what attention reads of these positions. Lengths are a
  // copy, which is not counted.
  virtual CacheTensors reserve_index(const at::Tensor& key);  // [B, 1, L, D]

  void commit(const c10::SymInt& new_len, const std::optional<at::Tensor>& new_lens) override;
  // With the indexer's keys.
  c10::SymInt sym_nbytes() const override;
  c10::SymInt sym_nbytes_allocated() const override;
  void reset() override;
  void crop(const c10::SymInt& n) override;
  void reorder(const at::Tensor& index) override;
  void visit_tensors(TensorVisitor visit) override {
    DynamicCache::visit_tensors(visit);
    visit("index", index_);
  }
  void visit_numbers(NumberVisitor visit) override {
    DynamicCache::visit_numbers(visit);
    visit("ready", ready_);
  }

  // The indexer's keys, [B, 1, len, D]; undefined where the cache has none.
  at::Tensor index() const;

 protected:
  IndexedCache() = default;
  explicit IndexedCache(Unfilled unfilled) : DynamicCache(unfilled) {}
  explicit IndexedCache(CacheTensors tensors) : DynamicCache(std::move(tensors)), ready_(sym_len()) {}

  // Positions of index_ that are held.
  virtual c10::SymInt index_len() const { return sym_len(); }
  // Whether an append of new_len positions is the one that index_ has room for.
  bool is_ready(const c10::SymInt& new_len) const;
  // Gives a copy made by copy_of an index_ of its own.
  static std::shared_ptr<KVCache> with_copied_index(std::shared_ptr<KVCache> copy);

  at::Tensor index_;
  c10::SymInt ready_ = 0;  // positions after the append that index_ has room for
};

}  // namespace attnpack
