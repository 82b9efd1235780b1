#pragma once

#include <ATen/core/Tensor.h>

#include <attnpack/ops/kv_cache.h>

#include <memory>
#include <optional>

namespace attnpack {

// Keys and values of one attention layer. A cache is a value handed to forward, never a buffer of a module.
//
// A call asks for room with reserve, lets attend write into it, and counts the new positions with commit. Where attend
// raises, the cache is as it was before.
//
// Not thread-safe: calls that append to one cache come one after the other. Calls in other threads use other caches.
class KVCache {
 public:
  virtual ~KVCache() = default;

  // Tensors with room for key.size(2) more positions; raises where key or value do not fit the cache.
  virtual CacheTensors reserve(const at::Tensor& key,         // [B, Hkv, L, D]
                               const at::Tensor& value) = 0;  // [B, Hkv, L, Dv]
  // The same for latent attention. Its keys and values are one: they are stored as keys, with values of no width.
  virtual CacheTensors reserve_latents(const at::Tensor& latents,  // [B, 1, L, kv_lora_rank + rope]
                                       int64_t kv_lora_rank);
  // Call it after attend has written new_len positions, or new_lens [B] valid ones of them.
  virtual void commit(int64_t new_len, const std::optional<at::Tensor>& new_lens) = 0;

  // The number of positions of the longest sequence.
  virtual int64_t len() const = 0;
  // The most positions that it can hold; none if it grows.
  virtual std::optional<int64_t> capacity() const { return std::nullopt; }
  // Bytes of keys and values.
  virtual int64_t nbytes() const = 0;
  virtual void reset() = 0;
  // Keeps the first n positions of each sequence.
  virtual void crop(int64_t n) = 0;
  // Sequence b becomes what index[b] was, index [B] int64 (beam search).
  virtual void reorder(const at::Tensor& index) = 0;
  virtual std::shared_ptr<KVCache> clone() const = 0;
  // Forgets what was appended since `lengths` was copied from lengths().
  virtual void take_back(const at::Tensor& lengths) = 0;

  // [B, Hkv, len, D] and [B, Hkv, len, Dv], views; undefined before the first append of a DynamicCache. Where sequences
  // differ in length, the positions after the end of a shorter one are unspecified.
  at::Tensor k() const { return tensors_.key.defined() ? tensors_.key.narrow(2, 0, len()) : tensors_.key; }
  virtual at::Tensor v() const {
    return tensors_.value.defined() ? tensors_.value.narrow(2, 0, len()) : tensors_.value;
  }
  // [B] int64
  const at::Tensor& lengths() const { return tensors_.lengths; }
  // The whole tensors, with the capacity after the held positions.
  const CacheTensors& tensors() const { return tensors_; }

 protected:
  KVCache() = default;
  explicit KVCache(CacheTensors tensors) : tensors_(std::move(tensors)) {}
  KVCache(const KVCache&) = default;

  CacheTensors tensors_;
};

// Raises unless key and value have the shape (but for the length), dtype and device of the cache.
void check_fits(const CacheTensors& cache, const at::Tensor& key, const at::Tensor& value);

// Checks that index [B] names sequences that lengths has, and with same_batch as many as lengths has. Returns index on
// the device of lengths.
at::Tensor check_index(const at::Tensor& index, const at::Tensor& lengths, bool same_batch);

// Zeros [batch, heads, capacity, head_dim]. They are normal tensors also under inference_mode, so that a cache made
// there can be written anywhere.
at::Tensor cache_zeros(int64_t batch, int64_t heads, int64_t capacity, int64_t head_dim,
                       const at::TensorOptions& options);

// Copies of the three tensors, which are normal tensors too.
CacheTensors copy_tensors(const CacheTensors& tensors);

}  // namespace attnpack
