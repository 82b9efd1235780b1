#include <attnpack/cache/detail/rules.h>

#include <ATen/ATen.h>
#include <torch/library.h>

#include <attnpack/cache/latent_cache.h>
#include <attnpack/cache/static_cache.h>
#include <attnpack/core/check.h>
#include <attnpack/ops/detail/schema.h>

namespace attnpack {
namespace {

using at::Tensor;
using c10::SymInt;

Changed state_of(const KVCache& cache) {
  auto state = cache.state();
  return {std::move(state.tensors), std::move(state.numbers)};
}

template <typename Change>
Changed changed(const HeldCache& held, const Change& change) {
  const auto cache = held.make();
  change(*cache);
  return state_of(*cache);
}

Room with_state(const KVCache& cache, const CacheTensors& room) {
  return std::tuple_cat(state_of(cache), std::make_tuple(Tensors{room.key, room.value, room.lengths}));
}

}  // namespace

std::shared_ptr<KVCache> HeldCache::make() const {
  if (tensors.empty() && kind == "DynamicCache") return std::make_shared<DynamicCache>();
  if (tensors.empty() && kind == "LatentCache") return std::make_shared<LatentCache>();
  ATTNPACK_CHECK(tensors.size() == 1 || tensors.size() == 3, "tensors: got ", tensors.size(),
                 ", want lengths alone, or lengths, key and value");
  CacheTensors parts{Tensor(), Tensor(), tensors[0]};
  if (tensors.size() == 3) parts = {tensors[1], tensors[2], tensors[0]};
  const size_t wanted = kind == "StaticCache" ? 0 : kind == "DynamicCache" ? 1 : 2;
  ATTNPACK_CHECK(numbers.size() >= wanted, "numbers: got ", numbers.size(), ", want ", wanted, " for a ", kind);
  if (kind == "StaticCache") return std::make_shared<StaticCache>(std::move(parts));
  if (kind == "DynamicCache") return std::make_shared<DynamicCache>(std::move(parts), numbers.at(0));
  ATTNPACK_CHECK(kind == "LatentCache", "kind: got ", kind, ", want a class of caches");
  const int64_t kv_lora_rank = numbers.at(1).guard_int(__FILE__, __LINE__);
  return std::make_shared<LatentCache>(std::move(parts), numbers.at(0), kv_lora_rank);
}

Room cache_reserve(const HeldCache& held, const Tensor& key, const Tensor& value) {
  const auto cache = held.make();
  const auto room = cache->reserve(key, value);
  return with_state(*cache, room);
}

Room cache_reserve_latents(const HeldCache& held, const Tensor& latents, int64_t kv_lora_rank) {
  const auto cache = held.make();
  const auto room = cache->reserve_latents(latents, kv_lora_rank);
  return with_state(*cache, room);
}

Changed cache_commit(const HeldCache& held, SymInt new_len, const std::optional<Tensor>& new_lens) {
  return changed(held, [&](KVCache& cache) { cache.commit(new_len, new_lens); });
}

Changed cache_reset(const HeldCache& held) {
  return changed(held, [](KVCache& cache) { cache.reset(); });
}

Changed cache_crop(const HeldCache& held, SymInt n) {
  return changed(held, [&](KVCache& cache) { cache.crop(n); });
}

Changed cache_reorder(const HeldCache& held, const Tensor& index) {
  return changed(held, [&](KVCache& cache) { cache.reorder(index); });
}

Changed cache_take_back(const HeldCache& held, const Tensor& lengths) {
  return changed(held, [&](KVCache& cache) { cache.take_back(lengths); });
}

Changed cache_clone(const HeldCache& held) { return state_of(*held.make()->clone()); }

Numbers cache_len(const HeldCache& held) { return {held.make()->sym_len()}; }

Numbers cache_nbytes(const HeldCache& held) { return {held.make()->sym_nbytes()}; }

Tensors cache_views(const HeldCache& held) {
  const auto cache = held.make();
  const auto key = cache->k();
  return key.defined() ? Tensors{key, cache->v()} : Tensors{};
}

Tensors static_cache(int64_t batch, int64_t num_kv_heads, int64_t max_len, int64_t head_dim,
                     std::optional<int64_t> v_head_dim, std::optional<at::ScalarType> dtype,
                     std::optional<at::Device> device) {
  return StaticCache(StaticCacheOptions(batch, num_kv_heads, max_len, head_dim)
                         .v_head_dim(v_head_dim)
                         .tensor(at::TensorOptions().dtype(dtype).device(device)))
      .state()
      .tensors;
}

}  // namespace attnpack

#define ATTNPACK_STATE "(str kind, Tensor(a!)[] tensors, SymInt[] numbers"
#define ATTNPACK_CHANGED ") -> (Tensor(a!)[], SymInt[]"

TORCH_LIBRARY_FRAGMENT(attnpack, m) {
  using namespace attnpack;
  m.def("cache_reserve" ATTNPACK_STATE ", Tensor key, Tensor value" ATTNPACK_CHANGED ", Tensor(a!)[])",
        from_schema<cache_reserve>);
  m.def("cache_reserve_latents" ATTNPACK_STATE ", Tensor latents, int kv_lora_rank" ATTNPACK_CHANGED ", Tensor(a!)[])",
        from_schema<cache_reserve_latents>);
  m.def("cache_commit" ATTNPACK_STATE ", SymInt new_len, Tensor? new_lens" ATTNPACK_CHANGED ")",
        from_schema<cache_commit>);
  m.def("cache_reset" ATTNPACK_STATE ATTNPACK_CHANGED ")", from_schema<cache_reset>);
  m.def("cache_crop" ATTNPACK_STATE ", SymInt n" ATTNPACK_CHANGED ")", from_schema<cache_crop>);
  m.def("cache_reorder" ATTNPACK_STATE ", Tensor index" ATTNPACK_CHANGED ")", from_schema<cache_reorder>);
  m.def("cache_take_back" ATTNPACK_STATE ", Tensor lengths" ATTNPACK_CHANGED ")", from_schema<cache_take_back>);
  m.def("cache_clone(str kind, Tensor[] tensors, SymInt[] numbers) -> (Tensor[], SymInt[])", from_schema<cache_clone>);
  m.def("cache_len(str kind, Tensor[] tensors, SymInt[] numbers) -> SymInt[]", from_schema<cache_len>);
  m.def("cache_nbytes(str kind, Tensor[] tensors, SymInt[] numbers) -> SymInt[]", from_schema<cache_nbytes>);
  m.def("cache_views(str kind, Tensor(a)[] tensors, SymInt[] numbers) -> Tensor(a)[]", from_schema<cache_views>);
  m.def(
      "static_cache(int batch, int num_kv_heads, int max_len, int head_dim, int? v_head_dim, ScalarType? dtype, "
      "Device? device) -> Tensor[]",
      static_cache);
}
