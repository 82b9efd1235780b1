#include <attnpack/cache/detail/rules.h>

#include <ATen/ATen.h>
#include <torch/library.h>

#include <type_traits>

#include <attnpack/cache/cross_cache.h>
#include <attnpack/cache/latent_cache.h>
#include <attnpack/cache/paged_cache.h>
#include <attnpack/cache/quantized_cache.h>
#include <attnpack/cache/recurrent_cache.h>
#include <attnpack/cache/sliding_window_cache.h>
#include <attnpack/cache/sparse_cache.h>
#include <attnpack/cache/static_cache.h>
#include <attnpack/core/check.h>
#include <attnpack/ops/detail/schema.h>

namespace attnpack {
namespace {

using at::Tensor;
using c10::SymInt;

std::optional<Tensor> given(const Tensor& tensor) {
  return tensor.defined() ? std::make_optional(tensor) : std::nullopt;
}

Changed state_of(const KVCache& cache) {
  auto state = cache.state();
  return {std::move(state.tensors), std::move(state.numbers)};
}

template <typename Change>
Changed changed(const CacheSnapshot& snapshot, const Change& change) {
  const auto cache = snapshot.make();
  change(*cache);
  return state_of(*cache);
}

Room with_state(const KVCache& cache, const CacheTensors& room) {
  OptionalTensors tensors;
  Numbers numbers;
  CacheTensors::for_each_member(room, [&]<class T>(const char*, const T& member) {
    if constexpr (std::is_integral_v<T>)
      numbers.emplace_back(member);
    else
      tensors.emplace_back(member);
  });
  return std::tuple_cat(state_of(cache), std::make_tuple(std::move(tensors), std::move(numbers)));
}

// Calls show(name, read) with all that a kind of cache has beside keys, values and lengths. Some of it takes time to
// read: the free pages, or an index, which asks for the length.
template <typename Show>
void show_parts(const KVCache& cache, const Show& show) {
  if (const auto* typed = dynamic_cast<const LatentCache*>(&cache)) {
    show("kv_lora_rank", [&] { return typed->kv_lora_rank(); });
    show("index", [&] { return typed->index(); });
  } else if (const auto* typed = dynamic_cast<const SparseCache*>(&cache)) {
    show("block", [&] { return typed->block(); });
    show("index", [&] { return typed->index(); });
  } else if (const auto* typed = dynamic_cast<const RecurrentCache*>(&cache)) {
    show("conv_state", [&] { return typed->conv_state(); });
    show("state", [&] { return typed->state_matrix(); });
  } else if (const auto* typed = dynamic_cast<const StaticCache*>(&cache)) {
    show("max_len", [&] { return *typed->capacity(); });
  } else if (const auto* typed = dynamic_cast<const SlidingWindowCache*>(&cache)) {
    show("window", [&] { return typed->window(); });
    show("keep_first", [&] { return typed->keep_first(); });
    show("dropped", [&] { return typed->dropped(); });
  } else if (const auto* typed = dynamic_cast<const QuantizedCache*>(&cache)) {
    show("bits", [&] { return typed->bits(); });
    show("exact_first", [&] { return typed->exact_first(); });
    show("exact_last", [&] { return typed->exact_last(); });
    show("kv_lora_rank", [&] { return typed->kv_lora_rank(); });
  } else if (const auto* typed = dynamic_cast<const PagedCache*>(&cache)) {
    show("block_table", [&] { return typed->block_table(); });
    show("k_pool", [&] { return typed->k_pool(); });
    show("v_pool", [&] { return typed->v_pool(); });
    show("page_size", [&] { return typed->page_size(); });
    show("num_pages", [&] { return typed->num_pages(); });
    show("free_pages", [&] { return typed->free_pages(); });
  }
}

struct Kind {
  std::string_view name;
  std::shared_ptr<KVCache> (*unfilled)();
  std::shared_ptr<KVCache> (*empty)();  // null for a class that has settings
};

template <typename Cache>
constexpr Kind kind_of(std::string_view name) {
  Kind kind{name, []() -> std::shared_ptr<KVCache> { return std::make_shared<Cache>(Unfilled()); }, nullptr};
  if constexpr (std::is_default_constructible_v<Cache>)
    kind.empty = []() -> std::shared_ptr<KVCache> { return std::make_shared<Cache>(); };
  return kind;
}

constexpr Kind kKinds[] = {
    kind_of<DynamicCache>("DynamicCache"),     kind_of<StaticCache>("StaticCache"),
    kind_of<LatentCache>("LatentCache"),       kind_of<SlidingWindowCache>("SlidingWindowCache"),
    kind_of<SparseCache>("SparseCache"),       kind_of<QuantizedCache>("QuantizedCache"),
    kind_of<RecurrentCache>("RecurrentCache"), kind_of<PagedCache>("PagedCache"),
    kind_of<CrossCache>("CrossCache"),
};

const Kind& find_kind(std::string_view name) {
  for (const Kind& kind : kKinds)
    if (kind.name == name) return kind;
  ATTNPACK_CHECK(false, "kind: got ", name, ", want a class of caches");
}

}  // namespace

std::shared_ptr<KVCache> CacheSnapshot::make() const {
  const auto cache = find_kind(kind).unfilled();
  cache->restore({tensors.vec(), numbers.vec()});
  return cache;
}

namespace {

// The cache of a rule that only the class Cache has.
template <typename Cache>
std::shared_ptr<Cache> made_as(const CacheSnapshot& snapshot, const char* name) {
  auto cache = std::dynamic_pointer_cast<Cache>(snapshot.make());
  ATTNPACK_CHECK(cache, "kind: got ", snapshot.kind, ", want a ", name);
  return cache;
}

}  // namespace

Room cache_reserve(const CacheSnapshot& snapshot, const Tensor& key, const Tensor& value,
                   const std::optional<Tensor>& new_lens) {
  const auto cache = snapshot.make();
  const auto room = cache->reserve_valid(key, value, new_lens);
  return with_state(*cache, room);
}

Room cache_reserve_latents(const CacheSnapshot& snapshot, const Tensor& latents, int64_t kv_lora_rank) {
  const auto cache = snapshot.make();
  const auto room = cache->reserve_latents(latents, kv_lora_rank);
  return with_state(*cache, room);
}

Room cache_reserve_index(const CacheSnapshot& snapshot, const Tensor& key) {
  const auto cache = made_as<IndexedCache>(snapshot, "LatentCache or SparseCache");
  const auto room = cache->reserve_index(key);
  return with_state(*cache, room);
}

Changed cache_keep_sums(const CacheSnapshot& snapshot, int64_t block, SymInt new_len) {
  const auto cache = made_as<SparseCache>(snapshot, "SparseCache");
  cache->keep_sums(block, new_len);
  return state_of(*cache);
}

Changed cache_commit(const CacheSnapshot& snapshot, SymInt new_len, const std::optional<Tensor>& new_lens) {
  return changed(snapshot, [&](KVCache& cache) { cache.commit(new_len, new_lens); });
}

Changed cache_reset(const CacheSnapshot& snapshot) {
  return changed(snapshot, [](KVCache& cache) { cache.reset(); });
}

Changed cache_crop(const CacheSnapshot& snapshot, SymInt n) {
  return changed(snapshot, [&](KVCache& cache) { cache.crop(n); });
}

Changed cache_reorder(const CacheSnapshot& snapshot, const Tensor& index) {
  return changed(snapshot, [&](KVCache& cache) { cache.reorder(index); });
}

Changed cache_store(const CacheSnapshot& snapshot, const Tensor& key, const Tensor& value,
                    const std::optional<Tensor>& kv_lens) {
  const auto cache = made_as<CrossCache>(snapshot, "CrossCache");
  cache->store(key, value, kv_lens);
  return state_of(*cache);
}

void cache_check_call(const CacheSnapshot& snapshot, const Tensor& x, const std::optional<Tensor>& context) {
  made_as<CrossCache>(snapshot, "CrossCache")->check_call(x, context);
}

OptionalTensors cache_states(const CacheSnapshot& snapshot, SymInt batch, at::IntArrayRef conv_shape,
                             at::IntArrayRef state_shape) {
  const auto states = made_as<RecurrentCache>(snapshot, "RecurrentCache")->states(batch, conv_shape, state_shape);
  return {given(states.conv), given(states.state)};
}

Changed cache_advance(const CacheSnapshot& snapshot, const std::optional<Tensor>& conv_state,
                      const std::optional<Tensor>& state, SymInt new_len, const std::optional<Tensor>& new_lens) {
  const auto cache = made_as<RecurrentCache>(snapshot, "RecurrentCache");
  cache->advance({conv_state.value_or(Tensor()), state.value_or(Tensor())}, new_len, new_lens);
  return state_of(*cache);
}

Changed cache_fork(const CacheSnapshot& snapshot, const Tensor& index) {
  return state_of(*made_as<PagedCache>(snapshot, "PagedCache")->fork(index));
}

Changed cache_release(const CacheSnapshot& snapshot, const Tensor& rows) {
  const auto cache = made_as<PagedCache>(snapshot, "PagedCache");
  cache->release(rows);
  return state_of(*cache);
}

Changed cache_give_back(const CacheSnapshot& snapshot) {
  const auto cache = made_as<PagedCache>(snapshot, "PagedCache");
  cache->give_back();
  return state_of(*cache);
}

Changed cache_clone(const CacheSnapshot& snapshot) { return state_of(*snapshot.make()->clone()); }

Numbers cache_len(const CacheSnapshot& snapshot) { return {snapshot.make()->sym_len()}; }

Numbers cache_nbytes(const CacheSnapshot& snapshot) { return {snapshot.make()->sym_nbytes()}; }

Numbers cache_nbytes_allocated(const CacheSnapshot& snapshot) { return {snapshot.make()->sym_nbytes_allocated()}; }

std::vector<std::string> cache_tensor_names(std::string_view kind) {
  return find_kind(kind).unfilled()->tensor_names();
}

std::vector<std::string> cache_number_names(std::string_view kind) {
  return find_kind(kind).unfilled()->number_names();
}

std::vector<std::string> room_names() {
  std::vector<std::string> names, numbers;
  CacheTensors::for_each_member(CacheTensors(), [&]<class T>(const char* name, const T&) {
    (std::is_integral_v<T> ? numbers : names).emplace_back(name);
  });
  names.insert(names.end(), numbers.begin(), numbers.end());
  return names;
}

Changed cache_part(const CacheSnapshot& snapshot, std::string_view name) {
  Changed part;
  bool known = false;
  show_parts(*snapshot.make(), [&](const char* shown, const auto& read) {
    if (name != shown) return;
    known = true;
    const auto value = read();
    if constexpr (std::is_same_v<decltype(value), const Tensor>) {
      std::get<OptionalTensors>(part).push_back(given(value));
    } else {
      std::get<Numbers>(part).emplace_back(value);
    }
  });
  ATTNPACK_CHECK(known, "name: got ", name, ", want something that a ", snapshot.kind, " has");
  return part;
}

OptionalTensors cache_views(const CacheSnapshot& snapshot) {
  const auto cache = snapshot.make();
  return {given(cache->k()), given(cache->v())};
}

Tensors cache_shared(const CacheSnapshot& snapshot, const Tensor& x, const std::optional<Tensor>& new_lens,
                     int64_t num_kv_heads, int64_t head_dim, int64_t v_head_dim) {
  const auto shared = shared_keys(*snapshot.make(), x, new_lens, num_kv_heads, head_dim, v_head_dim);
  return {shared.key, shared.value, shared.lengths};
}

Changed new_cache(std::string_view kind) {
  const auto make = find_kind(kind).empty;
  ATTNPACK_CHECK(make, "kind: got ", kind, ", which has settings, want a class of caches without");
  return state_of(*make());
}

Changed sliding_window_cache(int64_t left, int64_t right, int64_t keep_first) {
  return state_of(SlidingWindowCache(SlidingWindowCacheOptions(Window{left, right}).keep_first(keep_first)));
}

Changed quantized_cache(int64_t bits, int64_t exact_first, int64_t exact_last) {
  return state_of(QuantizedCache(QuantizedCacheOptions(bits).exact_first(exact_first).exact_last(exact_last)));
}

namespace {

at::TensorOptions tensor_options(std::optional<at::ScalarType> dtype, std::optional<at::Device> device) {
  // torch reads its table of dtypes at that number, wherever it lies.
  ATTNPACK_CHECK(!dtype || (*dtype >= at::kByte && *dtype < at::ScalarType::NumOptions), "dtype: got the number ",
                 static_cast<int>(*dtype), ", want one of torch's dtypes");
  return at::TensorOptions().dtype(dtype).device(device);
}

}  // namespace

Changed paged_cache(int64_t batch, int64_t num_kv_heads, int64_t head_dim, int64_t page_size, int64_t num_pages,
                    std::optional<int64_t> v_head_dim, std::optional<at::ScalarType> dtype,
                    std::optional<at::Device> device) {
  return state_of(PagedCache(PagedCacheOptions(batch, num_kv_heads, head_dim, num_pages)
                                 .page_size(page_size)
                                 .v_head_dim(v_head_dim)
                                 .tensor(tensor_options(dtype, device))));
}

Changed static_cache(int64_t batch, int64_t num_kv_heads, int64_t max_len, int64_t head_dim,
                     std::optional<int64_t> v_head_dim, std::optional<at::ScalarType> dtype,
                     std::optional<at::Device> device) {
  return state_of(StaticCache(StaticCacheOptions(batch, num_kv_heads, max_len, head_dim)
                                  .v_head_dim(v_head_dim)
                                  .tensor(tensor_options(dtype, device))));
}

}  // namespace attnpack

#define ATTNPACK_STATE "(str kind, Tensor(a!)?[] tensors, SymInt[] numbers"
#define ATTNPACK_CHANGED ") -> (Tensor(a!)?[], SymInt[]"
#define ATTNPACK_ROOM ATTNPACK_CHANGED ", Tensor(a!)?[], SymInt[])"

TORCH_LIBRARY_FRAGMENT(attnpack, m) {
  using namespace attnpack;
  m.def("cache_reserve" ATTNPACK_STATE ", Tensor key, Tensor value, Tensor? new_lens" ATTNPACK_ROOM,
        from_schema<cache_reserve>);
  m.def("cache_reserve_latents" ATTNPACK_STATE ", Tensor latents, int kv_lora_rank" ATTNPACK_ROOM,
        from_schema<cache_reserve_latents>);
  m.def("cache_reserve_index" ATTNPACK_STATE ", Tensor key" ATTNPACK_ROOM, from_schema<cache_reserve_index>);
  m.def("cache_keep_sums" ATTNPACK_STATE ", int block, SymInt new_len" ATTNPACK_CHANGED ")",
        from_schema<cache_keep_sums>);
  m.def("cache_commit" ATTNPACK_STATE ", SymInt new_len, Tensor? new_lens" ATTNPACK_CHANGED ")",
        from_schema<cache_commit>);
  m.def("cache_reset" ATTNPACK_STATE ATTNPACK_CHANGED ")", from_schema<cache_reset>);
  m.def("cache_crop" ATTNPACK_STATE ", SymInt n" ATTNPACK_CHANGED ")", from_schema<cache_crop>);
  m.def("cache_reorder" ATTNPACK_STATE ", Tensor index" ATTNPACK_CHANGED ")", from_schema<cache_reorder>);
  m.def("cache_store" ATTNPACK_STATE ", Tensor key, Tensor value, Tensor? kv_lens" ATTNPACK_CHANGED ")",
        from_schema<cache_store>);
  m.def("cache_check_call(str kind, Tensor?[] tensors, SymInt[] numbers, Tensor x, Tensor? context) -> ()",
        from_schema<cache_check_call>);
  m.def(
      "cache_states(str kind, Tensor(a)?[] tensors, SymInt[] numbers, SymInt batch, int[] conv_shape, "
      "int[] state_shape) -> Tensor(a)?[]",
      from_schema<cache_states>);
  m.def("cache_advance" ATTNPACK_STATE
        ", Tensor? conv_state, Tensor? state, SymInt new_len, Tensor? new_lens" ATTNPACK_CHANGED ")",
        from_schema<cache_advance>);
  m.def("cache_fork" ATTNPACK_STATE ", Tensor index" ATTNPACK_CHANGED ")", from_schema<cache_fork>);
  m.def("cache_release" ATTNPACK_STATE ", Tensor rows" ATTNPACK_CHANGED ")", from_schema<cache_release>);
  m.def("cache_give_back" ATTNPACK_STATE ATTNPACK_CHANGED ")", from_schema<cache_give_back>);
  m.def("cache_clone(str kind, Tensor?[] tensors, SymInt[] numbers) -> (Tensor?[], SymInt[])",
        from_schema<cache_clone>);
  m.def("cache_len(str kind, Tensor?[] tensors, SymInt[] numbers) -> SymInt[]", from_schema<cache_len>);
  m.def("cache_nbytes(str kind, Tensor?[] tensors, SymInt[] numbers) -> SymInt[]", from_schema<cache_nbytes>);
  m.def("cache_nbytes_allocated(str kind, Tensor?[] tensors, SymInt[] numbers) -> SymInt[]",
        from_schema<cache_nbytes_allocated>);
  m.def("cache_part(str kind, Tensor(a)?[] tensors, SymInt[] numbers, str name) -> (Tensor(a)?[], SymInt[])",
        from_schema<cache_part>);
  m.def("cache_views(str kind, Tensor(a)?[] tensors, SymInt[] numbers) -> Tensor(a)?[]", from_schema<cache_views>);
  m.def(
      "cache_shared(str kind, Tensor(a)?[] tensors, SymInt[] numbers, Tensor x, Tensor? new_lens, int num_kv_heads, "
      "int head_dim, int v_head_dim) -> Tensor(a)[]",
      from_schema<cache_shared>);
  m.def("new_cache(str kind) -> (Tensor?[], SymInt[])", new_cache);
  m.def("sliding_window_cache(int left, int right, int keep_first) -> (Tensor?[], SymInt[])", sliding_window_cache);
  m.def("quantized_cache(int bits, int exact_first, int exact_last) -> (Tensor?[], SymInt[])", quantized_cache);
  m.def(
      "paged_cache(int batch, int num_kv_heads, int head_dim, int page_size, int num_pages, int? v_head_dim, "
      "ScalarType? dtype, Device? device) -> (Tensor?[], SymInt[])",
      paged_cache);
  m.def(
      "static_cache(int batch, int num_kv_heads, int max_len, int head_dim, int? v_head_dim, ScalarType? dtype, "
      "Device? device) -> (Tensor?[], SymInt[])",
      static_cache);
}
