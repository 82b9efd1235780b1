#pragma once

#include <attnpack/cache/dynamic_cache.h>
#include <attnpack/cache/sliding_window_cache.h>
#include <attnpack/ops/option_list.h>

namespace attnpack {

struct QuantizedCacheOptions : OptionList<QuantizedCacheOptions> {
  /* implicit */ QuantizedCacheOptions(int64_t bits) : bits_(bits) {}
  ATTNPACK_OPTION(int64_t, bits);             // 8 or 4
  ATTNPACK_OPTION(int64_t, exact_first) = 0;  // how many first positions are kept in the module's dtype too
  ATTNPACK_OPTION(int64_t, exact_last) = 0;  // of how many positions, its own and those before it, a query sees them so
};

// Keeps keys and values as integers of 8 or 4 bits with a scale per 32 numbers: 8.5 or 4.5 bits per number
// (ops/quantize.h). A position is quantised when it is appended, and not again. Few queries read the integers without
// an expanded copy. Grows as DynamicCache does.
//
// With exact_first or exact_last attention is causal, and the position at p sees the exact keys and values of the first
// exact_first positions, and of the exact_last positions up to its own; a SlidingWindowCache holds them. After crop()
// the last positions may be exact no longer.
class QuantizedCache : public DynamicCache {
 public:
  explicit QuantizedCache(const QuantizedCacheOptions& options);
  explicit QuantizedCache(Unfilled unfilled) : DynamicCache(unfilled), options_(8), exact_(unfilled) {}

  CacheTensors reserve(const at::Tensor& key, const at::Tensor& value) override;
  // Latents as bytes (ops/detail/latent_rows.h): c in 8 bits, the rotated k_rope as it is. Raises with 4 bits, or with
  // exact positions. A call expands the latents of its layer.
  CacheTensors reserve_latents(const at::Tensor& latents, int64_t kv_lora_rank) override;
  void commit(const c10::SymInt& new_len, const std::optional<at::Tensor>& new_lens) override;

  c10::SymInt sym_nbytes() const override;
  c10::SymInt sym_nbytes_allocated() const override;
  void reset() override;
  void crop(const c10::SymInt& n) override;
  void reorder(const at::Tensor& index) override;
  std::shared_ptr<KVCache> clone() const override;
  void visit_tensors(TensorVisitor visit) override;
  void visit_numbers(NumberVisitor visit) override;

  // The held numbers in the module's dtype, a new tensor: [B, Hkv, len, D] and [B, Hkv, len, Dv]. Latents: k() is
  // [B, 1, len, kv_lora_rank + rope], v() its first kv_lora_rank numbers.
  at::Tensor k() const override;
  at::Tensor v() const override;
  int64_t bits() const { return options_.bits(); }
  int64_t exact_first() const { return options_.exact_first(); }
  int64_t exact_last() const { return options_.exact_last(); }
  int64_t kv_lora_rank() const { return kv_lora_rank_; }  // of latents; 0 for keys and values

 protected:
  void check_state() const override;
  void after_restore() override;

 private:
  bool keeps_exact() const { return exact_first() > 0 || exact_last() > 0; }
  // Takes shape and dtype of the first append, and checks those of later ones.
  void check_stored(const at::Tensor& key, const at::Tensor& value, int64_t kv_lora_rank);
  at::Tensor expanded(const at::Tensor& rows, const c10::SymInt& dim, const at::Tensor& exact) const;
  void share_lengths() { exact_.tensors_.lengths = tensors_.lengths; }
  at::ScalarType dtype() const { return static_cast<at::ScalarType>(dtype_); }

  QuantizedCacheOptions options_;
  SlidingWindowCache exact_;  // its lengths are this cache's lengths
  c10::SymInt head_dim_ = 0, v_head_dim_ = 0;
  int64_t kv_lora_rank_ = 0;
  int64_t dtype_ = static_cast<int64_t>(at::kFloat);  // of the module
};

}  // namespace attnpack
