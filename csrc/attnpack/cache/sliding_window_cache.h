#pragma once

#include <attnpack/cache/kv_cache.h>
#include <attnpack/ops/attention.h>
#include <attnpack/ops/option_list.h>

namespace attnpack {

struct SlidingWindowCacheOptions : OptionList<SlidingWindowCacheOptions> {
  // How many positions before its own a later position sees.
  /* implicit */ SlidingWindowCacheOptions(int64_t left) : window_{left, 0} {}
  // The same as the operator's window, (left, 0).
  /* implicit */ SlidingWindowCacheOptions(Window window) : window_(window) {}
  ATTNPACK_OPTION(Window, window);
  ATTNPACK_OPTION(int64_t, keep_first) = 0;  // how many first positions stay, and are seen by all later ones
};

// Keeps what a causal window (left, 0) leaves to the positions to come, so that its memory is the same for any length:
// room for keep_first + left + 256 + max(64, left / 16) positions, and for the new ones while a call appends more. It
// has the bits of a DynamicCache under the same window. With keep_first the first positions stay and every later one
// sees them, whatever the module's window says (attention sinks, Xiao et al. 2023, section 3.2; but positions are the
// true ones). Takes shape, dtype and device from the first append, and again from the first append after reset().
class SlidingWindowCache : public KVCache {
 public:
  explicit SlidingWindowCache(const SlidingWindowCacheOptions& options);
  explicit SlidingWindowCache(Unfilled) {}

  CacheTensors reserve(const at::Tensor& key, const at::Tensor& value) override;
  // Raises: latent attention has no window.
  CacheTensors reserve_latents(const at::Tensor& latents, int64_t kv_lora_rank) override;
  // Raises: the append of its own layer may have dropped what another layer's queries see.
  CacheTensors shared() const override;
  void commit(const c10::SymInt& new_len, const std::optional<at::Tensor>& new_lens) override;

  // The true length, with what has been dropped. Reads the length tensor: on CUDA this waits for the device.
  c10::SymInt sym_len() const override;
  // The most positions that a sequence still has. k() and v() show the first keep_first positions of sequence b, and
  // after them those from keep_first + dropped()[b] on. Waits as sym_len().
  c10::SymInt sym_stored() const override;
  c10::SymInt sym_nbytes() const override;
  // [B] int64, how many positions of each sequence are no longer stored
  at::Tensor dropped() const { return tensors_.dropped ? *tensors_.dropped : tensors_.lengths; }
  int64_t window() const { return tensors_.window; }
  int64_t keep_first() const { return tensors_.keep_first; }

  void reset() override;
  // Raises where a sequence has dropped positions that the window before position n has; the last append can be taken
  // back if it had at most 64 positions. On CUDA it waits for the device.
  void crop(const c10::SymInt& n) override;
  void reorder(const at::Tensor& index) override;
  std::shared_ptr<KVCache> clone() const override { return copy_of(*this); }
  void visit_tensors(TensorVisitor visit) override {
    KVCache::visit_tensors(visit);
    visit_optional(visit, "dropped", tensors_.dropped);
  }
  void visit_numbers(NumberVisitor visit) override {
    visit_int(visit, "window", tensors_.window);
    visit_int(visit, "keep_first", tensors_.keep_first);
    visit("used", used_);
  }

 protected:
  void check_state() const override;

 private:
  friend class QuantizedCache;  // whose exact rows stand in the slots of such a cache

  c10::SymInt max_slots_after_slide() const;  // most slots that a slide leaves in use
  c10::SymInt steady_capacity() const;        // slots between calls
  void slide(const c10::SymInt& capacity);

  c10::SymInt used_ = 0;  // an upper bound of the slots in use, so that no append waits for the device
};

}  // namespace attnpack
