#pragma once

#include <attnpack/cache/indexed_cache.h>

namespace attnpack {

// The keys and values of SparseAttention, and what its selector keeps beside them: the keys of an indexer, one a
// position, or the sums of blocks of keys, so that a step reads these and not all keys. Grows as DynamicCache does.
// index() gives the keys or sums: the sums are [B, Hkv, blocks, D], of the blocks with a position; undefined if the
// cache keeps nothing.
//
// A sum counts where its block is whole; the block in which a sequence ends is summed anew in each call. So crop and a
// failed call leave nothing stale.
class SparseCache : public IndexedCache {
 public:
  SparseCache() = default;
  explicit SparseCache(Unfilled unfilled) : IndexedCache(unfilled) {}

  // Raises for a cache that keeps sums.
  CacheTensors reserve_index(const at::Tensor& key) override;  // [B, 1, L, D]
  // The next append, of new_len positions, brings the sums of blocks of `block` keys up to date: reserve gives them.
  void keep_sums(int64_t block, const c10::SymInt& new_len);

  // Raises where the selector of the held positions has not made room for these.
  CacheTensors reserve(const at::Tensor& key, const at::Tensor& value) override;
  void reset() override;
  std::shared_ptr<KVCache> clone() const override { return with_copied_index(copy_of(*this)); }
  void visit_numbers(NumberVisitor visit) override {
    IndexedCache::visit_numbers(visit);
    visit_int(visit, "block", block_);
  }

  // Keys of a block; 0: index() holds an indexer's keys, or nothing.
  int64_t block() const { return block_; }

 protected:
  c10::SymInt index_len() const override;

 private:
  int64_t block_ = 0;
};

}  // namespace attnpack
