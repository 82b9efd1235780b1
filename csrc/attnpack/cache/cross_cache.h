#pragma once

#include <attnpack/cache/kv_cache.h>

namespace attnpack {

// The keys and values of a context, which cross-attention projects once: the first call stores them, later calls read
// them and take no context. Keys are stored before rotation.
class CrossCache : public KVCache {
 public:
  CrossCache() { reset(); }
  explicit CrossCache(Unfilled) {}

  bool filled() const { return tensors_.key.defined(); }
  // Stores copies, without history. kv_lens [B]: the valid keys of each sequence; default all.
  void store(const at::Tensor& key,    // [B, Hkv, Lc, D], before rotation
             const at::Tensor& value,  // [B, Hkv, Lc, Dv]
             const std::optional<at::Tensor>& kv_lens);
  // Raises unless a call with x [B, L, E] can read the cache, or fill it with the context [B, Lc, E]. A full cache does
  // not read the context: its batch and length must be those of the stored one.
  void check_call(const at::Tensor& x, const std::optional<at::Tensor>& context) const;

  // These raise: a context is no sequence of positions that grows.
  CacheTensors reserve(const at::Tensor& key, const at::Tensor& value) override;
  CacheTensors reserve_latents(const at::Tensor& latents, int64_t kv_lora_rank) override;
  void commit(const c10::SymInt& new_len, const std::optional<at::Tensor>& new_lens) override;
  void crop(const c10::SymInt& n) override;
  CacheTensors shared() const override;

  // The length of the context, with its padding.
  c10::SymInt sym_len() const override;
  c10::SymInt sym_nbytes() const override { return sym_nbytes_allocated(); }
  void reset() override;
  void reorder(const at::Tensor& index) override;
  std::shared_ptr<KVCache> clone() const override { return copy_of(*this); }
};

}  // namespace attnpack
