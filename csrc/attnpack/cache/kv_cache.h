#pragma once

#include <ATen/core/Tensor.h>

#include <c10/util/FunctionRef.h>

#include <attnpack/ops/kv_cache.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace attnpack {

using OptionalTensors = std::vector<std::optional<at::Tensor>>;

// A cache as plain values, from which the same cache can be made again. Python's classes hold nothing else.
struct CacheState {
  OptionalTensors tensors;           // as visit_tensors names them; none where the cache does not hold one yet
  std::vector<c10::SymInt> numbers;  // what the cache knows beside its tensors, as visit_numbers names it
};

// Sees a tensor of a cache's state, which is undefined where the cache does not hold one, and may change it.
using TensorVisitor = c10::function_ref<void(const char* name, at::Tensor& tensor)>;
// The same for a tensor that is optional.
void visit_optional(TensorVisitor visit, const char* name, std::optional<at::Tensor>& tensor);

// Sees a number of a cache's state, and may change it.
using NumberVisitor = c10::function_ref<void(const char* name, c10::SymInt& number)>;
// The same for a number that torch.compile knows.
void visit_int(NumberVisitor visit, const char* name, int64_t& number);

// For the constructor of a cache that restore() fills: it makes no tensors.
struct Unfilled {};

// A cache before a call. The call changes lengths, and the rows of key and value after the held positions.
struct CacheBefore {
  CacheState state;
  at::Tensor lengths;  // [B], a copy
};

// Keys and values of one attention layer. A cache is a value handed to forward, never a buffer of a module.
//
// A call asks for room with reserve, lets attend write into it, and counts the new positions with commit. If the
// call raises, take_back restores the state before it exactly. So reserve and commit do not overwrite held positions:
// where positions move, they put new tensors in place of the old ones.
//
// Lengths that torch.compile does not know while it traces a call are c10::SymInt, as in torch: sym_len() beside len().
//
// Not thread-safe: calls that append to one cache come one after the other. Calls in other threads use other caches.
// Appends of two threads to one cache at once may raise, or be lost or mixed without an error.
class KVCache {
 public:
  virtual ~KVCache() = default;

  // Tensors with room for key.size(2) more positions; raises where key or value do not fit the cache.
  virtual CacheTensors reserve(const at::Tensor& key,         // [B, Hkv, L, D]
                               const at::Tensor& value) = 0;  // [B, Hkv, L, Dv]
  // The same with room for only new_lens [B] of the new positions, if the cache can count them.
  virtual CacheTensors reserve_valid(const at::Tensor& key, const at::Tensor& value,
                                     const std::optional<at::Tensor>& new_lens);
  // The same for latent attention. Its keys and values are one: they are stored as keys, with values of no width.
  virtual CacheTensors reserve_latents(const at::Tensor& latents,  // [B, 1, L, kv_lora_rank + rope]
                                       int64_t kv_lora_rank);
  // Call it after attend has written new_len positions, or new_lens [B] valid ones of them.
  virtual void commit(const c10::SymInt& new_len, const std::optional<at::Tensor>& new_lens) = 0;

  // The number of positions of the longest sequence.
  virtual c10::SymInt sym_len() const = 0;
  int64_t len() const { return sym_len().guard_int(__FILE__, __LINE__); }
  // The number of positions that k() and v() show.
  virtual c10::SymInt sym_stored() const { return sym_len(); }
  // The most positions that it can hold; none if it grows.
  virtual std::optional<int64_t> capacity() const { return std::nullopt; }
  // Bytes of the keys and values that are stored.
  virtual c10::SymInt sym_nbytes() const = 0;
  int64_t nbytes() const { return sym_nbytes().guard_int(__FILE__, __LINE__); }
  // Bytes of the memory that keys and values take, with the free capacity.
  virtual c10::SymInt sym_nbytes_allocated() const;
  int64_t nbytes_allocated() const { return sym_nbytes_allocated().guard_int(__FILE__, __LINE__); }
  virtual void reset() = 0;
  // Keeps the first n positions of each sequence.
  virtual void crop(const c10::SymInt& n) = 0;
  // Sequence b becomes what index[b] was, index [B] int64 (beam search).
  virtual void reorder(const at::Tensor& index) = 0;
  virtual std::shared_ptr<KVCache> clone() const = 0;
  CacheState state() const;
  // Becomes the cache that had this state. Raises for one that this class cannot have, and stays as it was then.
  void restore(CacheState state);
  // Call visit with each tensor and each number of the state. These are their only lists.
  virtual void visit_tensors(TensorVisitor visit);
  virtual void visit_numbers(NumberVisitor /*visit*/) {}
  std::vector<std::string> tensor_names() const;
  std::vector<std::string> number_names() const;
  // Forgets what was done since before() was called.
  CacheBefore before() const { return {state(), copy_lengths(tensors_.lengths)}; }
  virtual void take_back(const CacheBefore& before);

  // [B, Hkv, len, D] and [B, Hkv, len, Dv], views (copies of a QuantizedCache and a PagedCache); undefined before the
  // first append of a DynamicCache. Where sequences differ in length, the positions after the end of a shorter one are
  // unspecified.
  virtual at::Tensor k() const { return valid(tensors_.key); }
  virtual at::Tensor v() const { return valid(tensors_.value); }
  // Key, value and lengths for a layer that reads what this cache's own layer has appended; key is undefined before the
  // first append. A cache that another layer cannot read raises.
  virtual CacheTensors shared() const { return {k(), v(), lengths()}; }
  // [B] int64
  const at::Tensor& lengths() const { return tensors_.lengths; }
  // The whole tensors, with the capacity after the held positions.
  const CacheTensors& tensors() const { return tensors_; }

 protected:
  KVCache() = default;
  explicit KVCache(CacheTensors tensors) : tensors_(std::move(tensors)) {}
  KVCache(const KVCache&) = default;

  // A copy of a cache of the class Cache with tensors of its own.
  template <typename Cache>
  static std::shared_ptr<KVCache> copy_of(const Cache& cache) {
    auto copy = std::make_shared<Cache>(cache);
    copy->tensors_ = copy_tensors(cache.tensors());
    return copy;
  }

  // longest_length where it can be read for nothing: not from another device, and not while a graph is traced.
  static std::optional<c10::SymInt> known_length(const at::Tensor& lengths, const c10::SymInt& capacity);

  // Raises unless what restore() has read can be the state of this class.
  virtual void check_state() const;
  // Follows check_state: makes what the class derives from its state.
  virtual void after_restore() {}

  CacheTensors tensors_;

 private:
  // Copies, which are normal tensors also under inference_mode.
  static CacheTensors copy_tensors(const CacheTensors& tensors);
  void swap_state(CacheState& state);
  at::Tensor valid(const at::Tensor& tensor) const {  // the positions that are stored
    return tensor.defined() ? tensor.narrow_symint(2, 0, sym_stored()) : tensor;
  }
};

// Runs call, which appends to caches, a container of shared pointers. Where it raises, each cache is taken back to
// where it was.
template <typename Caches, typename Call>
auto rollback_on_error(const Caches& caches, const Call& call) {
  std::vector<CacheBefore> before;
  before.reserve(caches.size());
  for (const auto& cache : caches) before.push_back(cache->before());
  try {
    return call();
  } catch (...) {
    for (size_t i = 0; i < before.size(); ++i) caches[i]->take_back(before[i]);
    throw;
  }
}

// The keys and values of a cache that another layer has filled, for queries of x. Raises unless it holds num_kv_heads
// heads of head_dim, values of v_head_dim, and the positions of x (new_lens [B] of them) too: that layer must be called
// first.
CacheTensors shared_keys(const KVCache& cache, const at::Tensor& x,  // [B, L, E]
                         const std::optional<at::Tensor>& new_lens, int64_t num_kv_heads, int64_t head_dim,
                         int64_t v_head_dim);

// Raises unless n is a number of positions that crop can keep.
void check_crop(const c10::SymInt& n);

// Raises for an undefined key or value.
void check_given(const at::Tensor& key, const at::Tensor& value);

// Raises unless key and value have the shape (but for the length), dtype and device of the cache.
void check_fits(const CacheTensors& cache, const at::Tensor& key, const at::Tensor& value);

// Checks that index [B] names sequences that lengths has, and with same_batch as many as lengths has. Returns index on
// the device of lengths.
at::Tensor check_index(const at::Tensor& index, const at::Tensor& lengths, bool same_batch, const char* name = "index");

// The first n positions of a tensor [B, H, slots, D].
at::Tensor first_positions(const at::Tensor& tensor, const c10::SymInt& n);

// A tensor like `like` [B, H, slots, D] with `capacity` slots. It begins with the first `len` ones of `like`.
at::Tensor cache_grown(const at::Tensor& like, const c10::SymInt& len, const c10::SymInt& capacity);

// Bytes of one position of all sequences.
c10::SymInt bytes_of_position(const CacheTensors& cache);

// Zeros. They are a normal tensor also under inference_mode, so that a cache made there can be written anywhere.
at::Tensor cache_zeros(c10::SymIntArrayRef sizes, const at::TensorOptions& options);

}  // namespace attnpack
