#include <attnpack/cache/dynamic_cache.h>

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>

#include <attnpack/core/check.h>

namespace attnpack {

namespace {

int64_t longest(const at::Tensor& lengths) { return lengths.numel() > 0 ? lengths.max().item<int64_t>() : 0; }

// Copies held's positions into a buffer with room for `capacity` of them.
at::Tensor grown(const at::Tensor& held, int64_t len, int64_t capacity) {
  auto larger = cache_zeros(held.size(0), held.size(1), capacity, held.size(3), held.options());
  larger.narrow(2, 0, len).copy_(held.narrow(2, 0, len));
  return larger;
}

}  // namespace

DynamicCache::DynamicCache() { reset(); }

DynamicCache::DynamicCache(CacheTensors tensors) : KVCache(std::move(tensors)), len_(longest(lengths())) {}

CacheTensors DynamicCache::reserve(const at::Tensor& key, const at::Tensor& value) {
  const int64_t need = len_ + key.size(2);
  room_ = tensors_;
  if (len_ == 0) {
    room_.key = cache_zeros(key.size(0), key.size(1), need, key.size(3), key.options());
    room_.value = cache_zeros(value.size(0), value.size(1), need, value.size(3), value.options());
    c10::InferenceMode normal(false);
    room_.lengths = at::zeros({key.size(0)}, key.options().dtype(at::kLong));
  } else {
    check_fits(tensors_, key, value);
    if (need > tensors_.key.size(2)) {
      at::NoGradGuard no_grad;
      const auto capacity = std::max(need, 2 * tensors_.key.size(2));
      room_.key = grown(tensors_.key, len_, capacity);
      room_.value = grown(tensors_.value, len_, capacity);
    }
  }
  // As long as the cache will be, so that a mask over its keys fits.
  return {room_.key.narrow(2, 0, need), room_.value.narrow(2, 0, need), room_.lengths};
}

void DynamicCache::commit(int64_t new_len, const std::optional<at::Tensor>& new_lens) {
  tensors_ = std::move(room_);
  room_ = {};
  len_ = new_lens ? longest(tensors_.lengths) : len_ + new_len;
}

int64_t DynamicCache::nbytes() const {
  if (len_ == 0) return 0;
  const int64_t width = tensors_.key.size(3) * tensors_.key.size(1) + tensors_.value.size(3) * tensors_.value.size(1);
  return static_cast<int64_t>(tensors_.key.size(0) * len_ * width * tensors_.key.element_size());
}

void DynamicCache::reset() {
  c10::InferenceMode normal(false);
  tensors_ = {at::Tensor(), at::Tensor(), at::zeros({0}, at::kLong)};
  len_ = 0;
}

void DynamicCache::crop(int64_t n) {
  ATTNPACK_CHECK(n >= 0, "n: got ", n, ", want how many positions to keep, 0 or more");
  if (n == 0) return reset();
  tensors_.lengths.clamp_max_(n);
  len_ = std::min(len_, n);
}

void DynamicCache::reorder(const at::Tensor& index) {
  const auto rows = check_index(index, lengths(), /*same_batch=*/false);
  if (len_ == 0) return;
  c10::InferenceMode normal(false);
  at::NoGradGuard no_grad;
  tensors_ = {tensors_.key.index_select(0, rows), tensors_.value.index_select(0, rows),
              tensors_.lengths.index_select(0, rows)};
  len_ = longest(tensors_.lengths);
}

std::shared_ptr<KVCache> DynamicCache::clone() const {
  auto copy = std::make_shared<DynamicCache>(*this);
  copy->tensors_ = copy_tensors(tensors_);
  return copy;
}

void DynamicCache::take_back(const at::Tensor& lengths) {
  if (lengths.numel() == 0) return reset();
  tensors_.lengths.copy_(lengths);
  len_ = longest(lengths);
}

}  // namespace attnpack
