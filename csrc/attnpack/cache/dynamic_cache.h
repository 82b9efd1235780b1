#pragma once

#include <attnpack/cache/kv_cache.h>

namespace attnpack {

// Grows as positions are appended, by doubling its capacity. It takes shape, dtype and device from the first append,
// and again from the first append after reset().
class DynamicCache : public KVCache {
 public:
  DynamicCache();
  // Over tensors that somebody else holds too. They are written until the cache outgrows them.
  explicit DynamicCache(CacheTensors tensors);

  CacheTensors reserve(const at::Tensor& key, const at::Tensor& value) override;
  void commit(int64_t new_len, const std::optional<at::Tensor>& new_lens) override;

  int64_t len() const override { return len_; }
  // Bytes of the len positions that are held, without the capacity after them.
  int64_t nbytes() const override;
  void reset() override;
  void crop(int64_t n) override;
  void reorder(const at::Tensor& index) override;
  std::shared_ptr<KVCache> clone() const override;
  void take_back(const at::Tensor& lengths) override;

 private:
  CacheTensors room_;  // made by reserve, and taken over by commit
  int64_t len_ = 0;    // kept here so that no call waits for the device
};

}  // namespace attnpack
