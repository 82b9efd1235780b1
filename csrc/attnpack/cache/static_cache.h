#pragma once

#include <attnpack/cache/kv_cache.h>
#include <attnpack/ops/option_list.h>

namespace attnpack {

struct StaticCacheOptions : OptionList<StaticCacheOptions> {
  StaticCacheOptions(int64_t batch, int64_t num_kv_heads, int64_t max_len, int64_t head_dim)
      : batch_(batch), num_kv_heads_(num_kv_heads), max_len_(max_len), head_dim_(head_dim) {}
  ATTNPACK_OPTION(int64_t, batch);
  ATTNPACK_OPTION(int64_t, num_kv_heads);
  ATTNPACK_OPTION(int64_t, max_len);
  ATTNPACK_OPTION(int64_t, head_dim);
  ATTNPACK_OPTION(std::optional<int64_t>, v_head_dim);  // default head_dim; 0 for latent attention
  ATTNPACK_OPTION(at::TensorOptions, tensor);           // dtype and device
};

// Room for max_len positions, allocated once; an append past it raises.
class StaticCache : public KVCache {
 public:
  StaticCache(int64_t batch, int64_t num_kv_heads, int64_t max_len, int64_t head_dim)
      : StaticCache(StaticCacheOptions(batch, num_kv_heads, max_len, head_dim)) {}
  explicit StaticCache(const StaticCacheOptions& options);
  explicit StaticCache(Unfilled) {}
  // Over tensors that somebody else holds too.
  explicit StaticCache(CacheTensors tensors) : KVCache(std::move(tensors)) {}

  CacheTensors reserve(const at::Tensor& key, const at::Tensor& value) override;
  // With all max_len positions, so that nothing waits for the lengths.
  CacheTensors shared() const override { return tensors_; }
  void commit(const c10::SymInt&, const std::optional<at::Tensor>&) override {}

  // Reads the length tensor: on CUDA this waits for the device.
  c10::SymInt sym_len() const override;
  // Bytes of all max_len positions, which are allocated at once.
  c10::SymInt sym_nbytes() const override;
  int64_t max_len() const { return tensors_.key.size(2); }
  std::optional<int64_t> capacity() const override { return max_len(); }
  void reset() override { tensors_.lengths.zero_(); }
  void crop(const c10::SymInt& n) override;
  // In place; the batch keeps its size.
  void reorder(const at::Tensor& index) override;
  std::shared_ptr<KVCache> clone() const override { return copy_of(*this); }

 protected:
  void check_state() const override;
};

}  // namespace attnpack
