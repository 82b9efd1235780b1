#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>
#include <c10/util/ArrayRef.h>

#include <optional>

namespace attnpack {

// The members of CacheTensors. This is their only list: the arguments of the layer ops, their schema, and the fields
// that Python's caches read follow from it. X(type, name, default, text in a schema).
#define ATTNPACK_CACHE_TENSORS(X)                                                                                    \
  /* [B, Hkv, capacity, D]; for latent attention [B, 1, capacity, kv_lora_rank + rope]. */                           \
  X(at::Tensor, key, {}, "Tensor(a!)? cache_key=None")                                                               \
  /* [B, Hkv, capacity, Dv]; for latent attention Dv = 0. */                                                         \
  X(at::Tensor, value, {}, "Tensor(b!)? cache_value=None")                                                           \
  /* [B] int64: how many positions are held; a call adds to them. */                                                 \
  X(at::Tensor, lengths, {}, "Tensor(c!)? cache_lengths=None")                                                       \
  /* For a cache that forgets positions (ops/detail/kv_window.h), [B] int64: how many of each sequence it has */     \
  /* dropped. */                                                                                                     \
  X(std::optional<at::Tensor>, dropped, std::nullopt, "Tensor? cache_dropped=None")                                  \
  /* Number of past positions that stay readable; -1: all. */                                                        \
  X(int64_t, window, -1, "int cache_window=-1")                                                                      \
  /* Number of first positions that stay readable too. */                                                            \
  X(int64_t, keep_first, 0, "int cache_keep_first=0")                                                                \
  /* For a cache of quantised rows (ops/quantize.h): key and value are such rows. Positions that are kept as they */ \
  /* were stand in slots beside them, and dropped, window and keep_first are those of the slots. */                  \
  X(int64_t, bits, 0, "int cache_bits=0")                                                                            \
  /* [B, Hkv, slots, D], written. */                                                                                 \
  X(std::optional<at::Tensor>, exact_key, std::nullopt, "Tensor(d!)? cache_exact_key=None")                          \
  /* [B, Hkv, slots, Dv], written. */                                                                                \
  X(std::optional<at::Tensor>, exact_value, std::nullopt, "Tensor(e!)? cache_exact_value=None")                      \
  /* For a cache in pages, [B, max_pages] int32 (ops/kv_cache_paged.h); key and value are pools then. */             \
  X(std::optional<at::Tensor>, block_table, std::nullopt, "Tensor? cache_block_table=None")                          \
  /* For a SparseCache: the sums of each block of keys, [B, Hkv, blocks, D] in fp32 at least. A call that chooses */ \
  /* blocks by their mean brings them up to date. */                                                                 \
  X(std::optional<at::Tensor>, block_sums, std::nullopt, "Tensor(f!)? cache_block_sums=None")

// The tensors of one layer's KV cache, as the ops take them, and the numbers beside them.
struct CacheTensors {
#define ATTNPACK_CACHE_MEMBER(type, name, value, text) type name = value;
  ATTNPACK_CACHE_TENSORS(ATTNPACK_CACHE_MEMBER)
#undef ATTNPACK_CACHE_MEMBER

  // Calls f(name, member) with each member.
  template <class Self, class F>
  static void for_each_member(Self&& self, F&& f) {
#define ATTNPACK_VISIT_NAMED(type, name, value, text) f(#name, self.name);
    ATTNPACK_CACHE_TENSORS(ATTNPACK_VISIT_NAMED)
#undef ATTNPACK_VISIT_NAMED
  }
};

// The number of positions of the longest sequence; 0 if there is no sequence. It reads lengths: for a tensor on another
// device it waits for that device.
c10::SymInt longest_length(const at::Tensor& lengths,     // [B] int64
                           const c10::SymInt& capacity);  // a length above it is an error, as one below 0

// A copy of lengths [B] int64. Each layer of each step makes some, so where they can be read no operator copies them.
at::Tensor copy_lengths(const at::Tensor& lengths);

// Raises unless sequence b of a cache with `capacity` positions can hold `length` of them.
void check_length(int64_t b, int64_t length, int64_t capacity);

// Raises unless new_lens, how many new tokens of each sequence are valid, is int32 or int64 [batch].
void check_new_lens(const at::Tensor& new_lens, const c10::SymInt& batch, const char* name = "kv_lens");

// Raises unless `count` of the `most` new tokens of sequence b can be valid.
void check_new_len(int64_t b, int64_t count, int64_t most, const char* name = "kv_lens");

// Writes the new keys and values after the positions that each sequence of the cache holds, and adds to lengths.
// Checks everything before the first write. Values are stored detached.
void kv_cache_append_(const at::Tensor& cache_key,    // [B, Hkv, capacity, D], written
                      const at::Tensor& cache_value,  // [B, Hkv, capacity, Dv], written
                      const at::Tensor& lengths,      // [B] int64, written
                      const at::Tensor& key,          // [B, Hkv, L, D]
                      const at::Tensor& value,        // [B, Hkv, L, Dv]
                      // how many of the L new positions of each sequence are valid, [B] int32 or int64; default: all
                      const std::optional<at::Tensor>& new_lens = std::nullopt,
                      // most positions that a sequence may have afterwards (a mask may cover fewer than the capacity)
                      const std::optional<c10::SymInt>& limit = std::nullopt,
                      // [B] int64; the new rows go to slot lengths - dropped and after it
                      const std::optional<at::Tensor>& dropped = std::nullopt);

// The same, with keys rotated as they are written. Returns query [B, Hq, L, D] rotated. Token l of a sequence stands at
// position p = its length before the call + l, and rotates by p * inv_freq (see rope_table, apply_rope).
at::Tensor kv_cache_append_rotated_(const at::Tensor& cache_key, const at::Tensor& cache_value,
                                    const at::Tensor& lengths, const at::Tensor& query, const at::Tensor& key,
                                    const at::Tensor& value, at::ArrayRef<double> inv_freq, double factor,
                                    bool interleaved, const std::optional<at::Tensor>& new_lens = std::nullopt,
                                    const std::optional<c10::SymInt>& limit = std::nullopt,
                                    const std::optional<at::Tensor>& dropped = std::nullopt);

// The checks of all backends.
void check_rotated(const at::Tensor& query, const at::Tensor& key, at::ArrayRef<double> inv_freq);
void check_kv_cache_append(const at::Tensor& cache_key, const at::Tensor& cache_value, const at::Tensor& lengths,
                           const at::Tensor& key, const at::Tensor& value, const std::optional<at::Tensor>& new_lens,
                           const std::optional<at::Tensor>& dropped = std::nullopt);
// Raises unless dropped is int64 [batch] as lengths are, on their device.
void check_dropped(const at::Tensor& lengths, const at::Tensor& dropped);
// Checks that the tensors that are written have memory of their own. Meta tensors have no memory, so Meta kernels do
// not call it.
void check_kv_cache_memory(const at::Tensor& cache_key, const at::Tensor& cache_value, const at::Tensor& lengths,
                           const at::Tensor& key, const at::Tensor& value);

}  // namespace attnpack
