#include <attnpack/cache/sparse_cache.h>

#include <ATen/ATen.h>

#include <attnpack/core/check.h>

namespace attnpack {

using c10::SymInt;

namespace {

SymInt blocks_of(const SymInt& positions, int64_t block) { return (positions + block - 1) / block; }

}  // namespace

CacheTensors SparseCache::reserve_index(const at::Tensor& key) {
  if (sym_len() == 0) block_ = 0;
  ATTNPACK_CHECK(block_ == 0, "cache: got one whose positions have no keys of an indexer, want one that this layer ",
                 "has filled from the start; use a cache for each layer, or reset() it");
  return IndexedCache::reserve_index(key);
}

void SparseCache::keep_sums(int64_t block, const SymInt& new_len) {
  ATTNPACK_CHECK(block >= 1, "block is ", block, ", wants at least 1 key");
  if (sym_len() == 0) index_ = at::Tensor();
  ATTNPACK_CHECK(sym_len() == 0 || (block_ == block && index_.defined()),
                 "cache: got one that keeps no sums of blocks ", "of ", block,
                 " keys, want one that this layer has filled from the start; use a SparseCache for each ",
                 "layer, or reset() it");
  block_ = block;
  ready_ = sym_len() + new_len;
}

CacheTensors SparseCache::reserve(const at::Tensor& key, const at::Tensor& value) {
  check_given(key, value);
  ATTNPACK_CHECK((!index_.defined() && block_ == 0) || is_ready(key.sym_size(2)),
                 "cache: got a SparseCache that serves a selector, want ",
                 "one of its own for a layer without this selector; use a DynamicCache there");
  auto room = DynamicCache::reserve(key, value);
  if (block_ == 0) return room;
  // One more than the keys have: a call writes one block after that in which a sequence ends.
  const auto& keys = tensors().key;
  const SymInt blocks = blocks_of(keys.sym_size(2), block_) + 1;
  if (!index_.defined()) {
    const auto wide = key.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    index_ = cache_zeros({keys.sym_size(0), keys.sym_size(1), blocks, keys.sym_size(3)}, keys.options().dtype(wide));
  } else if (index_.sym_size(2) < blocks) {
    index_ = cache_grown(index_, index_len(), blocks);
  }
  room.block_sums = index_;
  return room;
}

SymInt SparseCache::index_len() const { return block_ == 0 ? sym_len() : blocks_of(sym_len(), block_); }

void SparseCache::reset() {
  IndexedCache::reset();
  block_ = 0;
}

}  // namespace attnpack
