#pragma once

#include <ATen/core/Tensor.h>

#include <attnpack/cache/kv_cache.h>

#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

// The rules of a cache, as functions of its class and its state. They are the ops attnpack::cache_<rule>, so that
// torch.compile traces them; eager calls come through pybind.
namespace attnpack {

// A cache as the arguments of an op: the name of its class, and the members of its CacheState.
struct CacheSnapshot {
  std::string_view kind;
  at::ArrayRef<std::optional<at::Tensor>> tensors;
  c10::SymIntArrayRef numbers;

  auto members() const { return std::tie(kind, tensors, numbers); }
  std::shared_ptr<KVCache> make() const;
};

using Tensors = std::vector<at::Tensor>;
using Numbers = std::vector<c10::SymInt>;
using Changed = std::tuple<OptionalTensors, Numbers>;  // the new state
// The new state, and the CacheTensors of the room: its tensors, and then its numbers, because an op gives lists of one
// type.
using Room = std::tuple<OptionalTensors, Numbers, OptionalTensors, Numbers>;
// The names of these tensors and numbers, in this order.
std::vector<std::string> room_names();
// The names of the tensors and of the numbers of a cache's state.
std::vector<std::string> cache_tensor_names(std::string_view kind);
std::vector<std::string> cache_number_names(std::string_view kind);

Room cache_reserve(const CacheSnapshot& snapshot, const at::Tensor& key, const at::Tensor& value,
                   const std::optional<at::Tensor>& new_lens);
Room cache_reserve_latents(const CacheSnapshot& snapshot, const at::Tensor& latents, int64_t kv_lora_rank);
Changed cache_commit(const CacheSnapshot& snapshot, c10::SymInt new_len, const std::optional<at::Tensor>& new_lens);
Changed cache_reset(const CacheSnapshot& snapshot);
Changed cache_crop(const CacheSnapshot& snapshot, c10::SymInt n);
Changed cache_reorder(const CacheSnapshot& snapshot, const at::Tensor& index);
Changed cache_clone(const CacheSnapshot& snapshot);

// For a CrossCache.
Changed cache_store(const CacheSnapshot& snapshot, const at::Tensor& key, const at::Tensor& value,
                    const std::optional<at::Tensor>& kv_lens);
void cache_check_call(const CacheSnapshot& snapshot, const at::Tensor& x, const std::optional<at::Tensor>& context);

// One number each. torch.compile takes no op that returns a number instead of a list.
Numbers cache_len(const CacheSnapshot& snapshot);
Numbers cache_nbytes(const CacheSnapshot& snapshot);
Numbers cache_nbytes_allocated(const CacheSnapshot& snapshot);
// The tensor or the number of that name which a kind of cache has.
Changed cache_part(const CacheSnapshot& snapshot, std::string_view name);
// k and v; none before the first append of a cache that grows.
OptionalTensors cache_views(const CacheSnapshot& snapshot);
// Key, value and lengths (shared_keys).
Tensors cache_shared(const CacheSnapshot& snapshot, const at::Tensor& x, const std::optional<at::Tensor>& new_lens,
                     int64_t num_kv_heads, int64_t head_dim, int64_t v_head_dim);

// For a SparseCache or a LatentCache.
Room cache_reserve_index(const CacheSnapshot& snapshot, const at::Tensor& key);
// For a SparseCache.
Changed cache_keep_sums(const CacheSnapshot& snapshot, int64_t block, c10::SymInt new_len);

// For a RecurrentCache. The convolution's state and the state matrix for a call, where it holds them.
OptionalTensors cache_states(const CacheSnapshot& snapshot, c10::SymInt batch, at::IntArrayRef conv_shape,
                             at::IntArrayRef state_shape);
Changed cache_advance(const CacheSnapshot& snapshot, const std::optional<at::Tensor>& conv_state,
                      const std::optional<at::Tensor>& state, c10::SymInt new_len,
                      const std::optional<at::Tensor>& new_lens);

// For a PagedCache.
Changed cache_fork(const CacheSnapshot& snapshot, const at::Tensor& index);
Changed cache_release(const CacheSnapshot& snapshot, const at::Tensor& rows);
// The end of take_back: gives back the pages after the positions that the cache holds.
Changed cache_give_back(const CacheSnapshot& snapshot);

// The state of an empty cache, of a class that has no settings.
Changed new_cache(std::string_view kind);

// The state of an empty SlidingWindowCache.
Changed sliding_window_cache(int64_t left, int64_t right, int64_t keep_first);

// The state of an empty QuantizedCache.
Changed quantized_cache(int64_t bits, int64_t exact_first, int64_t exact_last);
// The state of an empty PagedCache.
Changed paged_cache(int64_t batch, int64_t num_kv_heads, int64_t head_dim, int64_t page_size, int64_t num_pages,
                    std::optional<int64_t> v_head_dim, std::optional<at::ScalarType> dtype,
                    std::optional<at::Device> device);

// The state of an empty StaticCache.
Changed static_cache(int64_t batch, int64_t num_kv_heads, int64_t max_len, int64_t head_dim,
                     std::optional<int64_t> v_head_dim, std::optional<at::ScalarType> dtype,
                     std::optional<at::Device> device);

}  // namespace attnpack
