#pragma once

#include <attnpack/cache/kv_cache.h>

namespace attnpack {

// Grows as positions are appended, by doubling its capacity. It takes shape, dtype and device from the first append,
// and again from the first append after reset().
class DynamicCache : public KVCache {
 public:
  DynamicCache();
  explicit DynamicCache(Unfilled) {}
  // Over tensors that somebody else holds too. They are written until the cache outgrows them.
  explicit DynamicCache(CacheTensors tensors);

  CacheTensors reserve(const at::Tensor& key, const at::Tensor& value) override;
  void commit(const c10::SymInt& new_len, const std::optional<at::Tensor>& new_lens) override;

  c10::SymInt sym_len() const override { return len_; }
  // Bytes of the len positions that are held, without the capacity after them.
  c10::SymInt sym_nbytes() const override;
  void reset() override;
  void crop(const c10::SymInt& n) override;
  void reorder(const at::Tensor& index) override;
  std::shared_ptr<KVCache> clone() const override { return copy_of(*this); }
  void visit_numbers(NumberVisitor visit) override { visit("len", len_); }

 private:
  c10::SymInt longest() const;

  c10::SymInt len_ = 0;  // kept here so that no call waits for the device
};

}  // namespace attnpack
