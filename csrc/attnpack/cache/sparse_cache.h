#pragma once

#include <attnpack/cache/dynamic_cache.h>

namespace attnpack {

// The keys and values of SparseAttention, and what its selector keeps beside them: the keys of an indexer, one a
// position, or the sums of blocks of keys, so that a step reads these and not all keys. Grows as DynamicCache does.
//
// A sum counts where its block is whole; the block in which a sequence ends is summed anew in each call. So crop and a
// failed call leave nothing stale.
class SparseCache : public DynamicCache {
 public:
  SparseCache() = default;

  // Room for the new keys of an indexer; the next append brings the keys and values of these positions. Lengths are a
  // copy, which is not counted.
  CacheTensors reserve_index(const at::Tensor& key);  // [B, 1, L, D]
  // The next append, of new_len positions, brings the sums of blocks of `block` keys up to date: reserve gives them.
  void keep_sums(int64_t block, const c10::SymInt& new_len);

  // Raises where the selector of the held positions has not made room for these.
  CacheTensors reserve(const at::Tensor& key, const at::Tensor& value) override;
  void commit(const c10::SymInt& new_len, const std::optional<at::Tensor>& new_lens) override;
  // With the selector's part.
  c10::SymInt sym_nbytes() const override;
  c10::SymInt sym_nbytes_allocated() const override;
  void reset() override;
  void crop(const c10::SymInt& n) override;
  void reorder(const at::Tensor& index) override;
  std::shared_ptr<KVCache> clone() const override;
  // tensors: at the end index(), with its capacity; numbers: len, block, ready
  CacheState state() const override;
  void restore(const CacheState& state) override;

  // What the selector keeps: [B, 1, len, D], the indexer's keys, or [B, Hkv, blocks, D], the sums of the blocks with a
  // position; undefined where it keeps nothing.
  at::Tensor index() const;
  // Keys of a block; 0: index() holds an indexer's keys, or nothing.
  int64_t block() const { return block_; }

 private:
  c10::SymInt held_rows() const;

  at::Tensor index_;
  int64_t block_ = 0;
  c10::SymInt ready_ = 0;  // positions after the append that the selector has made room for
};

}  // namespace attnpack
