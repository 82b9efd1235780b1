#pragma once

#include <attnpack/cache/kv_cache.h>

namespace attnpack {

// The memory that a recurrent layer has of its sequences. A part that the layer does not have is undefined.
struct RecurrentStates {
  at::Tensor conv;   // the last inputs of its short convolution, [B, C, K - 1]
  at::Tensor state;  // [B, Hv, D, Dv]

  bool is_empty() const { return !conv.defined() && !state.defined(); }
};

// The state of a recurrent layer. Its bytes do not grow with the length. A state cannot forget tokens, so crop to fewer
// positions raises. There are no keys and values: k() and v() are undefined.
//
// It holds the tensors that the last call gave, without history; each call gives new ones, unless write_in_place says
// otherwise.
class RecurrentCache : public KVCache {
 public:
  RecurrentCache() { reset(); }
  explicit RecurrentCache(Unfilled) {}

  // The states for a call with `batch` sequences; undefined before the first call. The shapes are those of one
  // sequence, empty for a part that the layer does not have. Raises where what is held is of another shape.
  RecurrentStates states(const c10::SymInt& batch, at::IntArrayRef conv_shape, at::IntArrayRef state_shape) const;
  // Counts new_len tokens of each sequence, or new_lens [B] valid ones, and holds the states after them.
  void advance(const RecurrentStates& states, const c10::SymInt& new_len, const std::optional<at::Tensor>& new_lens);

  // Calls without gradients write the state matrix into the memory of the one before it: a step moves half as many
  // bytes. Such a cache cannot go back: where a call raises, it is reset. generate does this with caches of its own.
  void write_in_place(bool on) { in_place_ = on; }
  bool writes_in_place() const { return in_place_; }
  void take_back(const CacheBefore& before) override;

  at::Tensor conv_state() const { return readable(states_.conv); }
  at::Tensor state_matrix() const { return readable(states_.state); }

  // These raise: nothing is appended.
  CacheTensors reserve(const at::Tensor& key, const at::Tensor& value) override;
  CacheTensors reserve_latents(const at::Tensor& latents, int64_t kv_lora_rank) override;
  void commit(const c10::SymInt& new_len, const std::optional<at::Tensor>& new_lens) override;
  CacheTensors shared() const override;

  c10::SymInt sym_len() const override { return len_; }
  c10::SymInt sym_nbytes() const override;
  c10::SymInt sym_nbytes_allocated() const override { return sym_nbytes(); }
  void reset() override;
  void crop(const c10::SymInt& n) override;
  void reorder(const at::Tensor& index) override;
  std::shared_ptr<KVCache> clone() const override;
  void visit_tensors(TensorVisitor visit) override {
    visit("lengths", tensors_.lengths);
    visit("conv_state", states_.conv);
    visit("state", states_.state);
  }
  void visit_numbers(NumberVisitor visit) override { visit("len", len_); }

 private:
  // A tensor that a call under inference_mode has made cannot be read by autograd: it gives a copy that can.
  static at::Tensor readable(const at::Tensor& stored);

  RecurrentStates states_;
  c10::SymInt len_ = 0;  // kept here so that no call waits for the device
  bool in_place_ = false;
};

}  // namespace attnpack
