#include <attnpack/cache/dynamic_cache.h>

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>

namespace attnpack {

using c10::SymInt;

DynamicCache::DynamicCache() { reset(); }

DynamicCache::DynamicCache(CacheTensors tensors) : KVCache(std::move(tensors)), len_(longest()) {}

SymInt DynamicCache::longest() const {
  return tensors_.key.defined() ? longest_length(tensors_.lengths, tensors_.key.sym_size(2)) : SymInt(0);
}

CacheTensors DynamicCache::reserve(const at::Tensor& key, const at::Tensor& value) {
  check_given(key, value);
  const SymInt need = len_ + key.sym_size(2);
  if (len_ == 0) {
    tensors_ = {cache_grown(key, 0, need), cache_grown(value, 0, need),
                cache_zeros({key.sym_size(0)}, key.options().dtype(at::kLong))};
  } else {
    check_fits(tensors_, key, value);
    const SymInt capacity = tensors_.key.sym_size(2);
    if (need > capacity) {
      const SymInt larger = std::max(need, capacity * 2);
      tensors_.key = cache_grown(tensors_.key, len_, larger);
      tensors_.value = cache_grown(tensors_.value, len_, larger);
    }
  }
  // The result is as long as the cache will be, so that a mask over its keys fits.
  return {first_positions(tensors_.key, need), first_positions(tensors_.value, need), tensors_.lengths};
}

void DynamicCache::commit(const SymInt& new_len, const std::optional<at::Tensor>& new_lens) {
  const auto added = new_len.maybe_as_int(), length = len_.maybe_as_int();
  const auto room = tensors_.key.defined() ? tensors_.key.sym_size(2).maybe_as_int() : std::make_optional<int64_t>(0);
  ATTNPACK_CHECK(!added || !length || !room || (*added >= 0 && *length <= *room - *added), "new_len: got ", new_len,
                 " after ", len_, " positions, want what was written into the room that reserve() gave");
  len_ = new_lens ? longest() : len_ + new_len;
}

SymInt DynamicCache::sym_nbytes() const {
  if (len_ == 0) return 0;
  return bytes_of_position(tensors_) * len_;
}

void DynamicCache::reset() {
  tensors_ = {at::Tensor(), at::Tensor(), cache_zeros({0}, at::kLong)};
  len_ = 0;
}

void DynamicCache::crop(const SymInt& n) {
  check_crop(n);
  if (n == 0) return reset();
  tensors_.lengths.clamp_max_(n);
  len_ = std::min(len_, n);
}

void DynamicCache::reorder(const at::Tensor& index) {
  const auto rows = check_index(index, lengths(), /*same_batch=*/false);
  if (!tensors_.key.defined()) return;
  c10::InferenceMode normal(false);
  at::NoGradGuard no_grad;
  tensors_ = {tensors_.key.index_select(0, rows), tensors_.value.index_select(0, rows),
              tensors_.lengths.index_select(0, rows)};
  len_ = longest();
}

}  // namespace attnpack
