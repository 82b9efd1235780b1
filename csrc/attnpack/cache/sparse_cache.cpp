#include <attnpack/cache/sparse_cache.h>

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>

#include <attnpack/core/padded.h>

namespace attnpack {

using c10::SymInt;

namespace {

SymInt blocks_of(const SymInt& positions, int64_t block) { return (positions + block - 1) / block; }

CacheTensors as_keys(const at::Tensor& key, const at::Tensor& lengths) { return {key, key.narrow(-1, 0, 0), lengths}; }

}  // namespace

CacheTensors SparseCache::reserve_index(const at::Tensor& key) {
  check_defined("key", key);
  ATTNPACK_CHECK(key.dim() == 4, "key has shape ", key.sym_sizes(), ", wants [batch, 1, length, head_dim]");
  const SymInt need = sym_len() + key.sym_size(2);
  at::Tensor lengths;
  if (sym_len() == 0) {
    index_ = cache_grown(key, 0, need);
    block_ = 0;
    lengths = cache_zeros({key.sym_size(0)}, key.options().dtype(at::kLong));
  } else {
    ATTNPACK_CHECK(index_.defined() && block_ == 0, "cache: got one whose positions have no keys of an indexer, want ",
                   "one that this layer has filled from the start; use a SparseCache for each layer, or reset() it");
    check_fits(as_keys(index_, this->lengths()), key, key.narrow(-1, 0, 0));
    if (need > index_.sym_size(2)) index_ = cache_grown(index_, sym_len(), std::max(need, index_.sym_size(2) * 2));
    lengths = this->lengths().clone();
  }
  ready_ = need;
  return as_keys(index_.narrow_symint(2, 0, need), lengths);
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
  const bool selects = index_.defined() || block_ > 0;
  const auto ready = ready_.maybe_as_int(), need = (sym_len() + key.sym_size(2)).maybe_as_int();
  ATTNPACK_CHECK(!selects || !ready || !need || *ready == *need,
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
    index_ = cache_grown(index_, held_rows(), blocks);
  }
  room.block_sums = index_;
  return room;
}

void SparseCache::commit(const SymInt& new_len, const std::optional<at::Tensor>& new_lens) {
  DynamicCache::commit(new_len, new_lens);
  ready_ = sym_len();
}

SymInt SparseCache::held_rows() const { return block_ == 0 ? sym_len() : blocks_of(sym_len(), block_); }

SymInt SparseCache::sym_nbytes() const {
  const SymInt own = DynamicCache::sym_nbytes();
  if (!index_.defined() || sym_len() == 0) return own;
  return own + bytes_of_position(as_keys(index_, lengths())) * held_rows();
}

SymInt SparseCache::sym_nbytes_allocated() const {
  return DynamicCache::sym_nbytes_allocated() + (index_.defined() ? index_.sym_nbytes() : SymInt(0));
}

void SparseCache::reset() {
  DynamicCache::reset();
  index_ = at::Tensor();
  block_ = 0;
  ready_ = 0;
}

void SparseCache::crop(const SymInt& n) {
  DynamicCache::crop(n);
  ready_ = sym_len();
}

void SparseCache::reorder(const at::Tensor& index) {
  const auto rows = check_index(index, lengths(), /*same_batch=*/false);
  if (sym_len() == 0) return;
  DynamicCache::reorder(index);
  ready_ = sym_len();
  if (!index_.defined()) return;
  c10::InferenceMode normal(false);
  at::NoGradGuard no_grad;
  index_ = index_.index_select(0, rows);
}

std::shared_ptr<KVCache> SparseCache::clone() const {
  auto copy = copy_of(*this);
  c10::InferenceMode normal(false);
  at::NoGradGuard no_grad;
  auto& held = static_cast<SparseCache&>(*copy).index_;
  if (held.defined()) held = held.clone();
  return copy;
}

CacheState SparseCache::state() const {
  auto result = DynamicCache::state();
  if (index_.defined()) result.tensors.push_back(index_);
  result.numbers.insert(result.numbers.end(), {SymInt(block_), ready_});
  return result;
}

void SparseCache::restore(const CacheState& state) {
  const auto& numbers = numbers_of(state, 3);
  auto tensors = state.tensors;
  const bool indexed = tensors.size() == 2 || tensors.size() == 4;
  index_ = indexed ? tensors.back() : at::Tensor();
  if (indexed) tensors.pop_back();
  DynamicCache::restore({tensors, {numbers[0]}});
  block_ = numbers[1].guard_int(__FILE__, __LINE__);
  ready_ = numbers[2];
}

at::Tensor SparseCache::index() const {
  return index_.defined() && sym_len() > 0 ? index_.narrow_symint(2, 0, held_rows()) : at::Tensor();
}

}  // namespace attnpack
