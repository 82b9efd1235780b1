#include <attnpack/cache/indexed_cache.h>

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>

#include <attnpack/core/padded.h>

namespace attnpack {

using c10::SymInt;

namespace {

CacheTensors as_keys(const at::Tensor& key, const at::Tensor& lengths) { return {key, key.narrow(-1, 0, 0), lengths}; }

}  // namespace

CacheTensors IndexedCache::reserve_index(const at::Tensor& key) {
  check_defined("key", key);
  ATTNPACK_CHECK(key.dim() == 4, "key has shape ", key.sym_sizes(), ", wants [batch, 1, length, head_dim]");
  const SymInt need = sym_len() + key.sym_size(2);
  at::Tensor lengths;
  if (sym_len() == 0) {
    index_ = cache_grown(key, 0, need);
    lengths = cache_zeros({key.sym_size(0)}, key.options().dtype(at::kLong));
  } else {
    ATTNPACK_CHECK(index_.defined(), "cache: got one whose positions have no keys of an indexer, want one that this ",
                   "layer has filled from the start; use a cache for each layer, or reset() it");
    check_fits(as_keys(index_, this->lengths()), key, key.narrow(-1, 0, 0));
    if (need > index_.sym_size(2)) index_ = cache_grown(index_, sym_len(), std::max(need, index_.sym_size(2) * 2));
    lengths = this->lengths().clone();
  }
  ready_ = need;
  return as_keys(index_.narrow_symint(2, 0, need), lengths);
}

bool IndexedCache::is_ready(const SymInt& new_len) const {
  const auto ready = ready_.maybe_as_int(), need = (sym_len() + new_len).maybe_as_int();
  return !ready || !need || *ready == *need;
}

void IndexedCache::commit(const SymInt& new_len, const std::optional<at::Tensor>& new_lens) {
  DynamicCache::commit(new_len, new_lens);
  ready_ = sym_len();
}

SymInt IndexedCache::sym_nbytes() const {
  const SymInt kv_bytes = DynamicCache::sym_nbytes();
  if (!index_.defined() || sym_len() == 0) return kv_bytes;
  return kv_bytes + bytes_of_position(as_keys(index_, lengths())) * index_len();
}

SymInt IndexedCache::sym_nbytes_allocated() const {
  return DynamicCache::sym_nbytes_allocated() + (index_.defined() ? index_.sym_nbytes() : SymInt(0));
}

void IndexedCache::reset() {
  DynamicCache::reset();
  index_ = at::Tensor();
  ready_ = 0;
}

void IndexedCache::crop(const SymInt& n) {
  DynamicCache::crop(n);
  ready_ = sym_len();
}

void IndexedCache::reorder(const at::Tensor& index) {
  const auto rows = check_index(index, lengths(), /*same_batch=*/false);
  DynamicCache::reorder(index);
  ready_ = sym_len();
  if (!index_.defined()) return;
  c10::InferenceMode normal(false);
  at::NoGradGuard no_grad;
  index_ = index_.index_select(0, rows);
}

std::shared_ptr<KVCache> IndexedCache::with_copied_index(std::shared_ptr<KVCache> copy) {
  c10::InferenceMode normal(false);
  at::NoGradGuard no_grad;
  auto& copied = static_cast<IndexedCache&>(*copy).index_;
  if (copied.defined()) copied = copied.clone();
  return copy;
}

at::Tensor IndexedCache::index() const {
  return index_.defined() && sym_len() > 0 ? index_.narrow_symint(2, 0, index_len()) : at::Tensor();
}

}  // namespace attnpack
